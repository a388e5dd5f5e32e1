"""Collectives over a described network: closed forms, what is slowest, what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microddp.allreduce import all_reduce_cost
from microddp.performance.network import Network, Port, Processor

ALPHA, BANDWIDTH = 3e-6, 7e9
ANY_SIZE = st.integers(1, 10**10)
COUNTS = st.integers(2, 40)


def flat(devices, **more):
    return Network(devices, Port(BANDWIDTH, ALPHA), **more)


@given(COUNTS, ANY_SIZE)
def test_one_link_each_equals_alpha_beta_to_the_last_digit(n, size):
    cost = all_reduce_cost("ring", n, size)
    right = cost.rounds * (ALPHA + cost.round_bytes / BANDWIDTH)
    assert flat(n).seconds("all_reduce", "ring", size) == right
    assert 2 * flat(n).seconds("all_gather", "ring", size) == pytest.approx(right, rel=1e-12)


@given(st.floats(1e6, 1e12), st.floats(1.001, 10), ANY_SIZE, st.sampled_from(["ring", "nccl"]))
def test_more_bandwidth_never_takes_longer(bandwidth, times, size, algorithm):
    def network(bandwidth):
        inside = Port(8 * bandwidth, 1e-6)
        return Network(16, Port(bandwidth, 5e-6), 4, inside, 2, adds=True)

    slow = network(bandwidth).seconds("all_reduce", algorithm, size)
    assert network(bandwidth * times).seconds("all_reduce", algorithm, size) <= slow


def test_every_rail_has_a_ring_through_it():
    near = Port(100 * BANDWIDTH, 0.0)
    one, four = (Network(16, Port(BANDWIDTH, 0.0), 4, near, rails) for rails in (1, 4))
    size = 16e6
    assert one.seconds("all_reduce", "ring", size) == pytest.approx(30 * 1e6 / BANDWIDTH)
    assert four.seconds("all_reduce", "ring", size) == pytest.approx(30 * 0.25e6 / BANDWIDTH)
    # Of four rings one leaves the node at each device. With two, at some devices none does.
    for rails, nbytes in ((4, 0.75e6), (2, 1e6)):
        slow = Network(16, Port(100 * BANDWIDTH, 0.0), 4, Port(BANDWIDTH, 0.0), rails)
        assert slow.seconds("all_reduce", "ring", size) == pytest.approx(30 * nbytes / BANDWIDTH)


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
        (lambda: flat(math.inf), "expected devices to be a whole number from 1 on, got inf"),
        (lambda: Network(12, Port(1, 0), 8, Port(1, 0)), "whole nodes of 8, got 12, .* leaves 4"),
        (lambda: Network(8, Port(1, 0), 4), "expected the port inside nodes of 4 devices"),
        (lambda: Network(8, Port(1, 0), 4, Port(1, 0), 8), "at most 4 rails, .* got 8"),
        (
            lambda: flat(4).seconds("all_reduce", "rign", 1),
            "algorithm ring or nccl, got 'rign'",
        ),
        (lambda: flat(4).seconds("reduce", "ring", 1), "expected all_reduce, reduce_scatter"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
