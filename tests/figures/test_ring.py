"""The ring as a moving picture."""

import xml.etree.ElementTree as ET

import pytest
import torch
from ranks import on_ranks

from microddp.allreduce import ring_all_reduce
from microddp.comms import Message, MessageCounter
from microddp.figures import RingAnimation

SVG = "{http://www.w3.org/2000/svg}"


def ring_messages(n, size, itemsize=4):
    """The messages of a ring over n ranks, by the rule of chapter 02."""
    starts = [0]
    for k in range(n):
        starts.append(starts[-1] + size // n + (k < size % n))
    by_rank = []
    for rank in range(n):
        chunks = [(rank - 1 - s) % n for s in range(n - 1)] + [(rank - s) % n for s in range(n - 1)]
        sizes = [(starts[k + 1] - starts[k]) * itemsize for k in chunks]
        offsets = [starts[k] * itemsize for k in chunks]
        dst = (rank + 1) % n
        by_rank.append([Message(rank, dst, *both) for both in zip(sizes, offsets, strict=True)])
    return by_rank


@on_ranks(2, 3, 4)
def test_the_rule_is_what_the_core_sends(comms):
    with MessageCounter(comms) as counter:
        ring_all_reduce(torch.ones(1003), comms)
    assert counter.gather() == ring_messages(comms.world_size, 1003)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_every_message_is_a_dot_that_shows_its_chunk_and_its_way(n):
    messages = ring_messages(n, 1003)
    root = ET.fromstring(RingAnimation(messages, 4 * 1003).svg())
    assert root.tag == f"{SVG}svg"
    places = [f"{c.get('cx')} {c.get('cy')}" for c in root.findall(f"{SVG}circle")]
    assert len(set(places)) == n
    dots = [
        group
        for group in root.findall(f"{SVG}g")
        if group.find(f"{SVG}animateTransform") is not None
    ]
    assert len(dots) == 2 * n * (n - 1)
    expected = [
        (
            str((rank - 1 - s if s < n - 1 else rank - s + n - 1) % n),
            places[rank],
            places[(rank + 1) % n],
        )
        for rank in range(n)
        for s in range(2 * (n - 1))
    ]
    shown = []
    for dot in dots:
        way = dot.find(f"{SVG}animateTransform").get("values").split(";")
        assert way[0] == way[1]
        assert way[2] == way[3]
        shown.append((dot.find(f"{SVG}text").text, way[0], way[2]))
    assert shown == expected


def test_times_run_forwards_through_one_cycle():
    root = ET.fromstring(RingAnimation(ring_messages(4, 40), 160).svg())
    moving = [*root.iter(f"{SVG}animate"), *root.iter(f"{SVG}animateTransform")]
    assert len({element.get("dur") for element in moving}) == 1
    for element in moving:
        times = [float(time) for time in element.get("keyTimes").split(";")]
        assert times == sorted(times)
        assert times[0] == 0
        assert times[-1] <= 1
        assert len(times) == len(element.get("values").split(";"))


def test_the_picture_needs_no_script_and_no_other_site():
    svg = RingAnimation(ring_messages(3, 30), 120).svg()
    assert "<script" not in svg
    assert "href" not in svg
    assert svg.count("http") == svg.count('xmlns="http://www.w3.org/2000/svg"') == 1


@on_ranks(1, 2)
def test_it_shows_on_rank_0_only_and_a_terminal_gets_a_line(comms):
    animation = RingAnimation(ring_messages(3, 30), 120)
    if comms.rank == 0:
        assert animation._repr_html_() == animation.svg()
        assert repr(animation) == "RingAnimation(3 ranks, 4 rounds; shown in HTML)"
    else:
        assert animation._repr_html_() == ""
        assert repr(animation) == ""


def test_one_rank_has_nothing_to_show_and_no_error():
    assert ET.fromstring(RingAnimation([[]], 4).svg()).findall(f"{SVG}g") == []
