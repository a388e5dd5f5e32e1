"""Counted messages, and the formulas that predict them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from microddp.allreduce import CollectiveCost, all_reduce_cost, ring_cost
from microddp.fitted import bus_bandwidth, fit_alpha_beta
from microddp.message_counter import Message, MessageCounter

ALGORITHMS = ("naive", "direct", "ring", "doubling")


@on_ranks(3)
def test_a_counter_records_receiver_bytes_and_offset_of_what_is_sent(comms):
    n, rank = comms.world_size, comms.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    tensor, incoming = torch.zeros(10, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    comms.sendrecv(tensor[:4], right, incoming, left)
    with MessageCounter(comms) as counter:
        comms.sendrecv(tensor[6:], right, incoming, left)
        comms.sendrecv(tensor[:0], left, incoming[:0], right)
        comms.all_reduce(tensor)  # a collective is no message
    comms.sendrecv(tensor[:4], right, incoming, left)
    assert counter.messages == [Message(rank, right, 32, 48), Message(rank, left, 0, 0)]
    assert counter.gather() == [
        [Message(r, (r + 1) % n, 32, 48), Message(r, (r - 1) % n, 0, 0)] for r in range(n)
    ]


@on_ranks(1)
def test_messages_are_counted_once_at_a_time_and_an_error_ends_the_count(comms):
    with MessageCounter(comms):
        with pytest.raises(RuntimeError, match=r"rank 0: .* counted already"):
            MessageCounter(comms).__enter__()
        assert comms.on_send is not None
    with pytest.raises(KeyError), MessageCounter(comms):
        raise KeyError
    assert comms.on_send is None


@pytest.mark.parametrize(
    ("algorithm", "n", "cost"),
    [
        ("naive", 4, CollectiveCost(6, 1200, 6, 3600)),
        ("direct", 4, CollectiveCost(3, 1200, 12, 3600)),
        ("ring", 4, CollectiveCost(6, 300, 24, 1800)),
        ("doubling", 4, CollectiveCost(2, 1200, 8, 2400)),
        ("doubling", 5, CollectiveCost(4, 1200, 10, 3600)),
        ("doubling", 3, CollectiveCost(3, 1200, 4, 2400)),
        ("ring", 2, CollectiveCost(2, 600, 4, 1200)),
    ],
)
def test_costs_computed_by_hand(algorithm, n, cost):
    assert all_reduce_cost(algorithm, n, 1200) == cost


@given(n=st.integers(1, 10_000), nbytes=st.integers(0, 10**12))
def test_costs_have_the_properties_that_the_book_claims(n, nbytes):
    costs = {name: all_reduce_cost(name, n, nbytes) for name in ALGORITHMS}
    for cost in costs.values():
        assert (cost.rounds == 0) == (cost.messages == 0) == (n == 1)
        assert cost.most_sent >= 0
    assert costs["ring"].most_sent <= 2 * nbytes, "whatever the number of ranks"
    assert costs["direct"].messages == n * (n - 1)
    assert costs["naive"].messages == 2 * (n - 1)
    assert costs["doubling"].rounds <= math.ceil(math.log2(n)) + 1
    assert costs["doubling"].rounds <= costs["ring"].rounds
    # The least that any rank could send, and what the ring comes to.
    assert costs["ring"].most_sent == pytest.approx(2 * nbytes * (n - 1) / n)


@given(n=st.integers(1, 10_000), nbytes=st.integers(0, 10**12))
def test_a_reduce_scatter_or_an_all_gather_is_half_of_a_rings_all_reduce(n, nbytes):
    half, whole = ring_cost(n, nbytes, passes=1), all_reduce_cost("ring", n, nbytes)
    assert half.round_bytes == whole.round_bytes == nbytes / n
    assert (2 * half.rounds, 2 * half.messages) == (whole.rounds, whole.messages)
    assert half.most_sent == pytest.approx(nbytes * (n - 1) / n)
    assert whole == ring_cost(n, nbytes)


def test_predicted_seconds_are_rounds_times_alpha_plus_beta_bytes():
    assert all_reduce_cost("ring", 4, 1000).seconds(alpha=2.0, beta=0.01) == 6 * (2 + 0.01 * 250)


@pytest.mark.parametrize(
    ("algorithm", "n", "message"),
    [("tree", 2, "expected 'naive', .* got 'tree'"), ("ring", 0, "at least one rank, got 0")],
)
def test_a_cost_that_cannot_be_told_is_refused(algorithm, n, message):
    with pytest.raises(ValueError, match=message):
        all_reduce_cost(algorithm, n, 8)


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_bandwidth(10**9, 1.0, 4) == 1.5e9
    assert bus_bandwidth(10**9, 0.5, 2) == 2e9
    assert bus_bandwidth(10**9, 1.0, 1) == 0


SIZES = [float(2**k) for k in range(10, 25, 2)]


@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-12, 1e-8))
def test_a_fit_recovers_alpha_and_beta_of_exact_times(alpha, beta):
    got = fit_alpha_beta(SIZES, [alpha + beta * size for size in SIZES])
    # What one of the two contributes to any of the times is what can be recovered of it.
    assert got[0] == pytest.approx(alpha, rel=1e-6, abs=1e-9 * beta * SIZES[0])
    assert got[1] == pytest.approx(beta, rel=1e-6, abs=1e-9 * alpha / SIZES[-1])


@given(
    alpha=st.floats(1e-5, 1e-3),
    beta=st.floats(1e-10, 1e-8),
    noise=st.lists(st.floats(0.9, 1.1), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_a_fit_of_noisy_times_is_as_close_as_the_noise(alpha, beta, noise):
    times = [(alpha + beta * s) * factor for s, factor in zip(SIZES, noise, strict=True)]
    got_alpha, got_beta = fit_alpha_beta(SIZES, times)
    assert got_alpha >= 0
    assert got_beta >= 0
    for size, time in zip(SIZES, times, strict=True):
        assert got_alpha + got_beta * size == pytest.approx(time, rel=0.7)


def test_a_fit_lets_neither_alpha_nor_beta_below_zero():
    alpha, beta = fit_alpha_beta([1, 2, 4], [1.0, 2.5, 6.0])  # steeper than proportional
    assert alpha == 0
    assert beta == pytest.approx(1.2, rel=0.2)
    alpha, beta = fit_alpha_beta([1, 2, 4], [3.0, 2.0, 1.0])  # falling
    assert beta == 0
    assert 1 <= alpha <= 3


def test_a_known_beta_stays_and_alpha_is_what_small_messages_took_beside_it():
    sizes = [1000, 2000, 3000, 10**6]
    times = [1.0 + 0.5, 1.0 + 1.0, 7.0 + 1.5, 2.0]  # one was disturbed, and a burst was free
    assert fit_alpha_beta(sizes, times, beta=5e-4) == (1.0, 5e-4)
    assert fit_alpha_beta([10**6, 10**7], [3.0, 9.0], beta=1e-6) == (2.0, 1e-6)
    assert fit_alpha_beta([1000, 2000], [0.1, 0.2], beta=1.0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([], []), ([1], [1.0]), ([4, 4], [1.0, 2.0]), ([1, 2], [1.0])]
)
def test_a_fit_without_two_sizes_or_with_missing_times_is_refused(sizes, seconds):
    with pytest.raises(ValueError, match="two different sizes; got"):
        fit_alpha_beta(sizes, seconds)
