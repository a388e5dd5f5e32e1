"""All-reduces for uneven networks: parts by the speed of links, and rings in another order."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from wires import run_threads

from microddp.allreduce import direct_all_reduce, ring, ring_all_reduce
from microddp.message_counter import MessageCounter
from microddp.shared import parts_by_speed, weighted, weighted_all_reduce, weighted_time

SPEEDS = st.floats(0.01, 100)


def kinds_of_speeds(n):
    """Links that are equal, all different, and one that is so slow that its rank adds nothing."""
    return [1.0] * n, [2.0 + rank for rank in range(n)], [0.1] + [1.0] * (n - 1)


def of_rank(rank, size, dtype=torch.float32):
    """What ``rank`` contributes: with a rounding error in every sum."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


# ---- who adds up how much


@pytest.mark.parametrize(
    ("speeds", "parts"),
    [
        ([5], [120]),
        ([1, 1], [60, 60]),
        ([1, 100], [60, 60]),  # both send all of it, whatever they add up
        ([1, 1, 1], [40, 40, 40]),
        ([7, 7, 7, 7], [30, 30, 30, 30]),
        ([1, 1, 0.1, 1], [40, 40, 0, 40]),
        ([0.1, 1, 1, 0.1], [0, 60, 60, 0]),
        ([1, 1, 1e-9], [60, 60, 0]),
        # T = 4 S / 5: (T - S, 2 T - S, 2 T - S) < 0 for the first; without it T = 3 S / 4.
        ([1, 2, 2], [0, 60, 60]),
        # T = 6 S / 12 = S / 2: (2 T - S, 3 T - S, 3 T - S, 4 T - S) / 2.
        ([2, 3, 3, 4], [0, 30, 30, 60]),
    ],
)
def test_parts_computed_by_hand(speeds, parts):
    assert parts_by_speed(120, speeds) == parts
    assert parts_by_speed(0, speeds) == [0] * len(speeds)
    assert sum(parts_by_speed(1, speeds)) == 1


@given(count=st.integers(0, 10**9), speeds=st.lists(SPEEDS, min_size=1, max_size=9))
def test_the_parts_make_a_whole_and_no_link_takes_longer_than_it_must(count, speeds):
    n, parts = len(speeds), parts_by_speed(count, speeds)
    assert sum(parts) == count
    assert min(parts) >= 0
    # Every link carries the tensor; all links together what all ranks must send.
    least = max(count / min(speeds), 2 * (n - 1) * count / sum(speeds)) if n > 1 else 0.0
    rounding = n / min(speeds)
    assert least * (1 - 1e-9) <= weighted_time(count, speeds) + rounding
    assert weighted_time(count, speeds) <= least * (1 + 1e-9) + rounding


@pytest.mark.parametrize("speeds", [[], [1, 0], [1, -1.0], [1, float("nan")], [1, float("inf")]])
def test_what_is_no_speed(speeds):
    with pytest.raises(ValueError, match=r"expected a positive speed for each rank, got \["):
        parts_by_speed(10, speeds)


# ---- the sum


@on_ranks()
def test_equal_to_the_backend_whatever_the_type(comms):
    n = comms.world_size
    for dtype, op in (
        (torch.float32, "sum"),
        (torch.bfloat16, "max"),
        (torch.int64, "min"),
        (torch.uint8, "sum"),
        (torch.complex64, "sum"),
    ):
        for size, speeds in zip((0, 1, n + 1), kinds_of_speeds(n), strict=True):
            tensor = of_rank(comms.rank, size).mul(9).round().abs().to(dtype)
            backend, address = tensor.clone(), tensor.data_ptr()
            weighted_all_reduce(tensor, comms, op, speeds=speeds)
            dist.all_reduce(backend, getattr(dist.ReduceOp, op.upper()))
            assert torch.equal(tensor, backend), (dtype, op, size)
            assert tensor.data_ptr() == address


@on_ranks()
def test_equal_to_the_bit_to_adding_in_rank_order(comms):
    for column_bytes in (weighted.COLUMN_BYTES, 512):
        weighted.COLUMN_BYTES = column_bytes
        for op, speeds in itertools.product(("sum", "mean"), kinds_of_speeds(comms.world_size)):
            tensor = of_rank(comms.rank, 1009)
            in_rank_order = tensor.clone()
            weighted_all_reduce(tensor, comms, op, speeds=speeds)
            direct_all_reduce(in_rank_order, comms, op)
            assert torch.equal(tensor, in_rank_order), (op, speeds)
            everyone = comms.all_gather(tensor)
            assert (everyone == everyone[0]).all(), (op, speeds)


@on_ranks(4, environment={"MICRODDP_DEBUG": "1"})
def test_messages_are_received_in_the_order_in_which_they_were_sent(comms):
    weighted.COLUMN_BYTES = 128
    tensor = torch.full((1009,), float(comms.rank))
    weighted_all_reduce(tensor, comms, speeds=[2, 3, 3, 4])
    assert tensor.unique().tolist() == [6]


@on_ranks(3)
def test_a_tensor_that_is_not_contiguous_and_more_columns_than_may_be(comms):
    columns = torch.full((6, 10), float(comms.rank))[:, ::3]
    weighted_all_reduce(columns, comms, speeds=[1, 2, 1])
    assert columns.unique().tolist() == [3]
    weighted.COLUMNS = 5
    size = weighted.COLUMN_BYTES * 2 + 1
    tensor = torch.arange(size) % 1000 + comms.rank
    with MessageCounter(comms) as counter:
        weighted_all_reduce(tensor, comms, speeds=[1, 2, 1])
    assert torch.equal(tensor, torch.arange(size) % 1000 * 3 + 3)
    assert len(counter.messages) == 5 * 2 * 2


@on_ranks()
def test_a_link_carries_what_the_parts_say(comms):
    n, size = comms.world_size, 10_007
    weighted.COLUMN_BYTES = 1 << 10
    for speeds in kinds_of_speeds(n):
        own = parts_by_speed(size, speeds)[comms.rank]
        with MessageCounter(comms) as counter:
            weighted_all_reduce(torch.ones(size), comms, speeds=speeds)
        sent = counter.gather()
        assert sum(each.nbytes for each in sent[comms.rank]) == 4 * (size + (n - 2) * own)
        here = [each.nbytes for each in itertools.chain(*sent) if each.dst == comms.rank]
        assert sum(here) == 4 * (size + (n - 2) * own)
        if n > 2 and comms.rank == 0 and speeds[0] == 0.1:
            assert own == 0


@on_ranks(2)
def test_what_cannot_be_reduced_is_left_as_it_was(comms):
    tensor = torch.ones(5)
    for speeds in ([1], [1, 0]):
        message = rf"rank {comms.rank}: expected 2 positive speeds, one for each rank"
        with pytest.raises(ValueError, match=message):
            weighted_all_reduce(tensor, comms, "mean", speeds=speeds)
    with pytest.raises(ValueError, match=f"rank {comms.rank}: expected op in"):
        weighted_all_reduce(tensor, comms, "average", speeds=[1, 1])
    for order in ([0], [0, 0], [1, 2]):
        with pytest.raises(ValueError, match=r"an order of the ranks 0 to 1, got \["):
            ring_all_reduce(tensor, comms, order=order)
    assert tensor.unique().tolist() == [1]


# ---- a ring in another order


@on_ranks()
def test_a_ring_follows_its_order(comms):
    n = comms.world_size
    for order in itertools.islice(itertools.permutations(range(n)), 0, None, max(1, n**2 // 2)):
        for size, pieces in ((0, 1 << 20), (1, 1 << 20), (97, 1 << 20), (1009, 64)):
            ring.PIECE_BYTES = pieces
            tensor = of_rank(comms.rank, size).mul(9).round()
            backend = tensor.clone()
            dist.all_reduce(backend)
            with MessageCounter(comms) as counter:
                ring_all_reduce(tensor, comms, order=order)
            assert torch.equal(tensor, backend), (order, size)
            after = dict(zip(order, (*order[1:], order[0]), strict=True))
            assert {message.dst for message in counter.messages} <= {after[comms.rank]}
        tensor = of_rank(comms.rank, 1009)
        ring_all_reduce(tensor, comms, "mean", order)
        everyone = comms.all_gather(tensor)
        assert (everyone == everyone[0]).all(), order


# ---- over the most unhelpful network that the rules allow


@given(
    speeds=st.lists(SPEEDS, min_size=1, max_size=6),
    size=st.integers(0, 40),
    column_bytes=st.integers(1, 64),
    ahead=st.integers(1, 3),
    by_speed=st.booleans(),
    data=st.data(),
)
def test_nothing_under_way_is_touched(speeds, size, column_bytes, ahead, by_speed, data):
    n = len(speeds)
    order = data.draw(st.permutations(range(n)))

    def reduce(comms):
        tensor = torch.full((size,), 10.0**comms.rank)
        if by_speed:
            weighted_all_reduce(tensor, comms, speeds=speeds)
        else:
            ring_all_reduce(tensor, comms, order=order)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighted, "COLUMN_BYTES", column_bytes)
        patch.setattr(weighted, "AHEAD", ahead)
        patch.setattr(ring, "PIECE_BYTES", column_bytes)
        results, _ = run_threads(n, reduce)
    for tensor in results:
        assert tensor.tolist() == [(10**n - 1) / 9] * size
