"""Naive, direct and ring beside each other: what the picture is given, and what stands still."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import astuple

import pytest
import torch
from messages import all_messages
from ranks import on_ranks

from microddp.allreduce import ALGORITHMS, all_reduce_cost
from microddp.figures import all_reduces
from microddp.message_counter import MessageCounter

SVG = "{http://www.w3.org/2000/svg}"


def data_of(picture):
    return json.loads(re.search(r"json\">(.*?)</script>", picture._repr_html_(), re.DOTALL)[1])


def stills(picture):
    return [ET.fromstring(svg) for svg in re.findall("<svg.*?</svg>", picture.still, re.DOTALL)]


@on_ranks(2, 3, 4)
def test_the_rules_are_what_the_core_sends(comms):
    for name, by_rank in all_messages(comms.world_size, 1003).items():
        with MessageCounter(comms) as counter:
            ALGORITHMS[name](torch.ones(1003), comms, "sum")
        assert counter.gather() == by_rank, name


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_every_message_is_in_one_round_in_the_order_of_its_sender(n):
    sent = all_messages(n, 1003)
    data = data_of(all_reduces(sent, 1003, itemsize=4))
    assert (data["n"], data["elements"], data["itemsize"]) == (n, 1003, 4)
    for name, by_rank in sent.items():
        rounds = data["rounds"][name]
        assert len(rounds) == all_reduce_cost(name, n, 4012).rounds
        for rank, messages in enumerate(by_rank):
            mine = [tuple(m) for together in rounds for m in together if m[0] == rank]
            assert mine == [astuple(message) for message in messages]
        for together in rounds:  # a link carries one message at a time in each direction
            assert len({m[0] for m in together}) == len({m[1] for m in together}) == len(together)


def test_rank_0_hears_from_all_before_it_answers():
    rounds = data_of(all_reduces(all_messages(4, 8), 8, 4))["rounds"]["naive"]
    ways = [message[:2] for together in rounds for message in together]
    assert ways == [[1, 0], [2, 0], [3, 0], [0, 1], [0, 2], [0, 3]]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_still_circles_have_an_arrow_for_each_message_of_the_first_round(n):
    naive, direct, ring = stills(all_reduces(all_messages(n, 1003), 1003, 4))
    for svg, arrows in ((naive, 1), (direct, n), (ring, n)):
        places = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.findall(f"{SVG}circle")]
        assert len(set(places)) == n
        ways = [path.get("d") for path in svg.findall(f"{SVG}path")]
        assert len(ways) == arrows
        for src, way in enumerate(ways, start=1 if svg is naive else 0):
            x0, y0, x1, y1 = map(float, re.findall(r"-?[\d.]+", way)[:4])
            nearest = [
                min(
                    range(n),
                    key=lambda r, x=x, y=y: (places[r][0] - x) ** 2 + (places[r][1] - y) ** 2,
                )
                for x, y in ((x0, y0), (x1, y1))
            ]
            assert nearest == [src, 0 if svg is naive else (src + 1) % n]


def test_the_still_table_has_every_round():
    still = all_reduces(all_messages(3, 7), 7, 4).still
    table = re.search("<table.*</table>", still, re.DOTALL)[0]
    _, *rows = [[cell.text for cell in row] for row in ET.fromstring(table).findall("tr")]
    assert rows == [
        ["1", "1 to 0", "1 2 0", "2 0 1"],
        ["2", "2 to 0", "2 0 1", "1 2 0"],
        ["3", "0 to 1", "done", "0 1 2"],
        ["4", "0 to 2", "done", "2 0 1"],
    ]


def test_the_still_table_numbers_chunks_of_unequal_sizes():
    still = all_reduces(all_messages(8, 12), 12, 4).still
    first, second = re.findall(r"<td>([0-9 ]+)</td></tr>", still)[:2]
    assert (first, second) == ("7 0 1 2 3 4 5 6", "6 7 0 1 2 3 4 5")


def test_what_stands_still_needs_no_script_and_no_other_site():
    still = all_reduces(all_messages(3, 30), 30, 4).still
    assert "<script" not in still
    assert "href" not in still
    assert "animate" not in still
    assert still.count("http") == still.count('xmlns="http://www.w3.org/2000/svg"') == 3


def test_no_line_is_too_long_for_docutils():
    html = all_reduces(all_messages(16, 1003), 1003, 4)._repr_html_()
    assert max(map(len, html.splitlines())) < 10_000


@on_ranks(1, 2)
def test_it_shows_on_rank_0_only_and_a_terminal_gets_a_line(comms):
    picture = all_reduces(all_messages(3, 30), 30, 4)
    assert ("data-live" in picture._repr_html_()) == (comms.rank == 0)
    assert bool(repr(picture)) == (comms.rank == 0)


def test_one_rank_sends_nothing_and_that_is_no_error():
    picture = all_reduces({"naive": [[]], "direct": [[]], "ring": [[]]}, 5, 4)
    assert data_of(picture)["rounds"] == {"naive": [], "direct": [], "ring": []}
    assert picture.still == "<p>One rank sends nothing.</p>"
