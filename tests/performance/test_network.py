"""Collectives over a described network: closed forms, bytes, what is slowest, what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microddp.allreduce import all_reduce_cost
from microddp.performance.network import Network, Port, Processor
from microddp.performance.rounds import ALGORITHMS, HALVED, rounds

ALPHA, BANDWIDTH = 3e-6, 7e9
ANY_SIZE = st.integers(1, 10**10)
COUNTS = st.integers(2, 40)


def flat(devices, **more):
    return Network(devices, Port(BANDWIDTH, ALPHA), **more)


def everywhere(devices=16):
    """A network that every algorithm runs on, with other ports inside of nodes."""
    inside = Port(20 * BANDWIDTH, ALPHA / 3)
    return Network(devices, Port(BANDWIDTH, ALPHA), 4, inside, 4, adds=True)


@given(COUNTS, ANY_SIZE)
def test_one_link_each_equals_alpha_beta_to_the_last_digit(n, size):
    for algorithm in ("ring", "doubling", "direct", "naive"):
        cost = all_reduce_cost(algorithm, n, size)
        right = cost.rounds * (ALPHA + cost.round_bytes / BANDWIDTH)
        assert flat(n).seconds("all_reduce", algorithm, size) == right, algorithm


@given(st.integers(1, 6), st.integers(0, 10**10))
def test_halving_takes_a_logarithm_of_rounds_and_a_rings_bytes(log, size):
    n = 2**log
    right = 2 * log * ALPHA + 2 * (n - 1) / n * size / BANDWIDTH
    assert flat(n).seconds("all_reduce", "halving", size) == pytest.approx(right, rel=1e-12)
    half = flat(n).seconds("all_gather", "halving", size)
    assert 2 * half == pytest.approx(right, rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**10))
def test_hierarchical_is_two_rings(nodes, inside, size):
    near = Port(9 * BANDWIDTH, ALPHA / 5)
    network = Network(nodes * inside, Port(BANDWIDTH, ALPHA), inside, near, inside)
    right = 2 * (inside - 1) * (ALPHA / 5 + size / inside / (9 * BANDWIDTH))
    right += 2 * (nodes - 1) * (ALPHA + size / inside / nodes / BANDWIDTH)
    assert network.seconds("all_reduce", "hierarchical", size) == pytest.approx(right, rel=1e-12)


def test_a_tree_is_pipelined_through_its_depth():
    """Seven nodes, two trees of depth two: each port carries the tensor twice, in pieces."""
    (found,) = rounds(flat(7), "all_reduce", "tree", 1e9)
    count, transfers = found
    pieces = count - 3
    assert pieces == pytest.approx(1e9 / 2 / transfers[0].nbytes)
    sent = np.zeros(7)
    for t in transfers:
        np.add.at(sent, t.source, t.nbytes * pieces)
    assert sent.max() == 2e9
    # For a byte, latency is all; for many bytes, none of it.
    assert flat(7).seconds("all_reduce", "tree", 1) == pytest.approx(4 * ALPHA, rel=1e-3)
    assert flat(7).seconds("all_reduce", "tree", 1e13) == pytest.approx(2e13 / BANDWIDTH, rel=1e-2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("devices", [1, 4, 8, 16])
def test_what_is_sent_is_received_and_is_enough(algorithm, devices):
    """Each device sends or receives at least 2 (n-1)/n of its bytes, if it has to add."""
    network, size = everywhere(devices), 3000
    if devices == 1:
        assert network.seconds("all_reduce", algorithm, size) == 0
        return
    out, back = np.zeros(devices), np.zeros(devices)
    for count, transfers in rounds(network, "all_reduce", algorithm, size):
        for t in transfers:
            np.add.at(out, t.source, count * t.nbytes)
            np.add.at(back, t.target, count * t.nbytes)
    assert out.sum() == pytest.approx(back.sum())
    least = size if algorithm == "switch" else 2 * (devices - 1) / devices * size
    assert (
        np.maximum(out, back) >= least * (1 - 1e-9) * (0.5 if algorithm == "naive" else 1)
    ).all()


@pytest.mark.parametrize("algorithm", HALVED)
def test_two_halves_are_the_whole(algorithm):
    network = everywhere()
    halves = [network.seconds(half, algorithm, 1e8) for half in ("reduce_scatter", "all_gather")]
    assert sum(halves) == pytest.approx(network.seconds("all_reduce", algorithm, 1e8), rel=1e-12)


@given(st.floats(1e6, 1e12), st.floats(1.001, 10), ANY_SIZE, st.sampled_from(ALGORITHMS))
def test_more_bandwidth_never_takes_longer(bandwidth, times, size, algorithm):
    def network(bandwidth):
        inside = Port(8 * bandwidth, 1e-6)
        return Network(16, Port(bandwidth, 5e-6), 4, inside, 2, adds=True)

    slow = network(bandwidth).seconds("all_reduce", algorithm, size)
    assert network(bandwidth * times).seconds("all_reduce", algorithm, size) <= slow


@given(st.integers(0, 7), st.floats(0.01, 1), ANY_SIZE)
def test_a_ring_waits_for_its_slowest_link(device, share, size):
    slow = flat(8, slowed=((device, share),)).seconds("all_reduce", "ring", size)
    everyone = Network(8, Port(BANDWIDTH * share, ALPHA)).seconds("all_reduce", "ring", size)
    assert slow == pytest.approx(everyone, rel=1e-12)


def test_every_rail_has_a_ring_through_it():
    near = Port(100 * BANDWIDTH, 0.0)
    one, four = (Network(16, Port(BANDWIDTH, 0.0), 4, near, rails) for rails in (1, 4))
    size = 16e6
    assert one.seconds("all_reduce", "ring", size) == pytest.approx(30 * 1e6 / BANDWIDTH)
    assert four.seconds("all_reduce", "ring", size) == pytest.approx(30 * 0.25e6 / BANDWIDTH)


def test_nodes_behind_an_uplink_share_it():
    size, half = 8e6, tuple(range(4))
    narrow = flat(8, uplinks=((half, BANDWIDTH / 2),))
    # A ring crosses once each way in a round; direct exchange, four devices with up to four others.
    ring = 14 * (ALPHA + size / 8 / (BANDWIDTH / 2))
    assert narrow.seconds("all_reduce", "ring", size) == pytest.approx(ring)
    crossing = [min(step, 8 - step, 4) for step in range(1, 8)]
    direct = math.fsum(ALPHA + c * size / (BANDWIDTH / 2) for c in crossing)
    assert narrow.seconds("all_reduce", "direct", size) == pytest.approx(direct)


def test_one_processor_for_all_messages_is_a_floor():
    busy = flat(4, processor=Processor(1e-3, 0.0))
    assert busy.seconds("all_reduce", "ring", 4) == pytest.approx(6 * 4 * 1e-3)
    moved = flat(4, processor=Processor(0.0, 1 / BANDWIDTH))
    assert moved.seconds("all_reduce", "ring", 4e9) == pytest.approx(6 * 4e9 / BANDWIDTH)
    assert flat(4, processor=Processor(0.0, 0.0)).seconds("all_reduce", "ring", 4e9) == flat(
        4
    ).seconds("all_reduce", "ring", 4e9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Port(-1.0, 0.0), "expected a bandwidth above 0 bytes a second, got -1"),
        (lambda: Port(0.0, 0.0), "got 0"),
        (lambda: Port(1.0, -1e-6), "expected a latency of 0 seconds or more, got -1e-06"),
        (lambda: flat(0), "expected devices to be a whole number from 1 on, got 0"),
        (lambda: flat(2.5), "got 2.5"),
        (lambda: Network(12, Port(1, 0), 8, Port(1, 0)), "whole nodes of 8, got 12, .* leaves 4"),
        (lambda: Network(8, Port(1, 0), 4), "expected the port inside nodes of 4 devices"),
        (lambda: Network(8, Port(1, 0), 4, Port(1, 0), 8), "at most 4 rails, .* got 8"),
        (lambda: flat(4, uplinks=(((4,), 1.0),)), "uplinks of nodes from 0 to 3"),
        (lambda: flat(4, slowed=((4, 0.5),)), "devices from 0 to 3, got 0.5 of 4"),
        (lambda: flat(4).seconds("all_reduce", "rign", 1), "expected an algorithm of ring, tree"),
        (lambda: flat(4).seconds("reduce", "ring", 1), "expected all_reduce, reduce_scatter"),
        (lambda: flat(4).seconds("all_gather", "tree", 1), "expected one of ring, halving"),
        (lambda: flat(4).seconds("all_reduce", "switch", 1), "expected switches that add"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
