"""The all-reduce algorithms against the backend's own, and against a fold by hand."""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from wires import run_threads

from microddp.allreduce import (
    all_reduce_cost,
    ring,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from microddp.message_counter import MessageCounter
from microddp.shared import ALL_REDUCES

BY_MESSAGES = ("naive", "direct", "ring", "doubling")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
BACKEND_REFUSES = (torch.int16, torch.int8, torch.bool)  # but can be sent
BACKEND_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN", "product": "PRODUCT"}
FOLD = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def of_rank(rank, size, dtype):
    """What ``rank`` contributes: small whole numbers, so that every sum and product is exact."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 4, (size,), generator=generator)
    return values.to(dtype) * (1 + 1j) if dtype.is_complex else values.to(dtype)


def by_hand(n, size, dtype, op):
    tensors = [of_rank(rank, size, dtype) for rank in range(n)]
    if op == "mean":
        tensors = [tensor / n for tensor in tensors]
    return functools.reduce(FOLD[op], tensors)


def ops_of(dtype):
    ops = list(BACKEND_OPS)
    if dtype.is_complex:
        ops = ["sum", "product"]
    return [*ops, "mean"] if dtype.is_floating_point or dtype.is_complex else ops


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def equal_on_all_ranks(comms, tensor):
    """Whether every rank holds the same bits."""
    everyone = comms.all_gather(bits(tensor.flatten()))
    return bool((everyone == everyone[0]).all())


def check_against_oracles(comms, dtypes, sizes):
    n = comms.world_size
    for dtype in dtypes:
        for op in ops_of(dtype):
            for size in sizes:
                expected = by_hand(n, size, dtype, op)
                only_adds = dtype.is_complex and op != "sum"  # the backend, that is
                if dtype not in BACKEND_REFUSES and op in BACKEND_OPS and not only_adds:
                    backend = of_rank(comms.rank, size, dtype)
                    dist.all_reduce(backend, getattr(dist.ReduceOp, BACKEND_OPS[op]))
                    assert torch.equal(expected, backend), ("the oracles differ", op, dtype, size)
                for name, algorithm in ALL_REDUCES.items():
                    tensor = of_rank(comms.rank, size, dtype)
                    address = tensor.data_ptr()
                    assert algorithm(tensor, comms, op) is None
                    where = (name, op, dtype, size)
                    assert tensor.data_ptr() == address, where
                    if op == "mean" and n & (n - 1):  # n does not divide without rounding
                        few_units = 8 * torch.finfo(dtype).eps
                        torch.testing.assert_close(tensor, expected, rtol=few_units, atol=few_units)
                    else:
                        assert torch.equal(tensor, expected), where


def sizes_for(comms):
    n = comms.world_size
    return sorted({0, 1, n - 1, n + 1, 97})


@on_ranks()
def test_every_algorithm_equals_the_oracles_for_floats(comms):
    check_against_oracles(comms, FLOATS, sizes_for(comms))


@on_ranks()
def test_every_algorithm_equals_the_oracles_for_integers(comms):
    check_against_oracles(comms, INTEGERS, sizes_for(comms))


@on_ranks()
def test_every_algorithm_equals_the_oracles_for_complex_numbers(comms):
    check_against_oracles(comms, (torch.complex64,), sizes_for(comms))


@on_ranks(3)
def test_every_algorithm_equals_the_fold_by_hand_where_a_sign_is_pending(comms):
    """A conjugation or a negation of a tensor is a note on it; its memory has other values."""
    for name, algorithm in ALL_REDUCES.items():
        for size in (6, 1 << 18):  # through shared memory at once, and in pieces
            generators = (torch.Generator().manual_seed(rank) for rank in range(3))
            every = [torch.randint(9, (size, 2), generator=g).float() for g in generators]
            numbers = [torch.view_as_complex(pair) for pair in every]
            conjugated = numbers[comms.rank].clone().conj()
            negated = numbers[comms.rank].clone().conj().imag
            assert conjugated.is_conj()
            assert negated.is_neg()
            algorithm(conjugated, comms, "sum")
            algorithm(negated, comms, "sum")
            assert torch.equal(conjugated.resolve_conj(), sum(numbers).conj_physical()), name
            assert torch.equal(negated.resolve_neg(), -sum(numbers).imag), name


@on_ranks()
def test_every_algorithm_equals_the_fold_by_hand_where_the_backend_cannot(comms):
    check_against_oracles(comms, BACKEND_REFUSES, sizes_for(comms))


@on_ranks()
def test_the_ring_equals_the_oracles_when_chunks_travel_in_many_pieces(comms):
    ring.PIECE_BYTES = 32
    sizes = (1, 7, 8 * comms.world_size + 1, 101, 1009)
    check_against_oracles(comms, (torch.float32, torch.int64, torch.uint8), sizes)


@on_ranks(2, 3)
def test_the_ring_is_right_for_chunks_larger_than_a_real_piece(comms):
    size = comms.world_size * ring.PIECE_BYTES // 4 * 2 + 4097  # in three pieces
    tensor = (torch.arange(size) % 1000 + comms.rank).float()
    backend = tensor.clone()
    dist.all_reduce(backend)
    with MessageCounter(comms) as counter:
        ring_all_reduce(tensor, comms)
    assert len(counter.messages) == 2 * (comms.world_size - 1) * 3
    assert torch.equal(tensor, backend)


@on_ranks()
def test_all_ranks_hold_the_same_bits_whatever_the_rounding(comms):
    torch.manual_seed(comms.rank)
    for pieces in (ring.PIECE_BYTES, 64):
        ring.PIECE_BYTES = pieces
        for dtype in (*FLOATS, torch.complex64):
            for op in ops_of(dtype):
                values = torch.randn(1009, dtype=dtype) * 10
                exact = values.to(torch.complex128 if dtype.is_complex else torch.float64)
                everyone = comms.all_gather(
                    torch.view_as_real(exact) if dtype.is_complex else exact
                )
                if dtype.is_complex:
                    everyone = torch.view_as_complex(everyone)
                expected = functools.reduce(FOLD[op], everyone)
                expected = expected / comms.world_size if op == "mean" else expected
                scale = everyone.abs().sum(0) if op in ("sum", "mean") else expected.abs()
                for name, algorithm in ALL_REDUCES.items():
                    tensor = values.clone()
                    algorithm(tensor, comms, op)
                    assert equal_on_all_ranks(comms, tensor), (name, op, dtype)
                    error = (tensor.to(exact.dtype) - expected).abs()
                    close = error <= 4 * comms.world_size * torch.finfo(dtype).eps * scale
                    overflown = ~torch.isfinite(tensor.abs())  # products of float16
                    assert (close | overflown).all(), (name, op, dtype)
                    assert op == "product" or not overflown.any()


@on_ranks(2, 3, 4, 5)
def test_all_ranks_hold_the_same_zero_for_max_and_min_of_both_zeros(comms):
    for op in ("max", "min"):
        for name, algorithm in ALL_REDUCES.items():
            tensor = torch.full((19,), 0.0 if comms.rank % 2 else -0.0)
            algorithm(tensor, comms, op)
            assert equal_on_all_ranks(comms, tensor), (name, op)


@on_ranks(2, 5)
def test_the_mean_does_not_overflow_where_the_sum_does(comms):
    for name, algorithm in ALL_REDUCES.items():
        tensor = torch.full((7,), 60_000.0, dtype=torch.float16)  # the largest float16 is 65504
        algorithm(tensor, comms, "mean")
        assert (tensor - 60_000).abs().max() <= 128, name


@on_ranks()
def test_tensors_that_are_not_contiguous_are_reduced_in_place_and_their_gaps_left_alone(comms):
    n = comms.world_size
    for name, algorithm in ALL_REDUCES.items():
        for op in ("sum", "mean", "max"):
            storage = torch.full((6, 10), float(comms.rank))
            columns = storage[:, ::3]
            algorithm(columns, comms, op)
            expected = {"sum": n * (n - 1) / 2, "mean": (n - 1) / 2, "max": n - 1}[op]
            torch.testing.assert_close(columns, torch.full((6, 4), float(expected)))
            gaps = torch.cat([storage[:, 1::3], storage[:, 2::3]], dim=1)
            assert gaps.eq(comms.rank).all(), (name, op)
        slanted = (torch.arange(15.0).view(5, 3) + comms.rank).T
        algorithm(slanted, comms, "sum")
        expected = torch.arange(15.0).view(5, 3).T * n + n * (n - 1) / 2
        assert torch.equal(slanted, expected), name
        assert slanted.stride() == (1, 3)


@on_ranks(2)
def test_views_that_lie_apart_are_reduced(comms):
    for algorithm in ALL_REDUCES.values():
        for view in (lambda x: x[::2], lambda x: x[:, :1], lambda x: x.T):
            whole = torch.arange(24.0).view(6, 4) * (comms.rank + 1)
            expected = view(torch.arange(24.0).view(6, 4) * 1.5)
            algorithm(view(whole), comms, "mean")
            assert torch.equal(view(whole), expected)


@on_ranks(3)
def test_gradients_of_parameters_and_parameters_can_be_reduced(comms):
    for algorithm in ALL_REDUCES.values():
        parameter = torch.nn.Parameter(torch.full((5,), float(comms.rank)))
        algorithm(parameter, comms, "sum")
        assert parameter.tolist() == [3] * 5
        assert parameter.requires_grad
        assert parameter.is_leaf


@on_ranks(1, 3)
def test_what_cannot_be_reduced_is_refused_before_anything_is_sent(comms):
    float8 = torch.ones(5).to(torch.float8_e4m3fn)
    bad_arguments = [
        (torch.ones(5), "average", r"expected op in \['sum', .*\], got 'average'"),
        (torch.ones(5, dtype=torch.int32), "mean", "floating point tensor, got torch.int32"),
        (torch.ones(5, dtype=torch.complex64), "max", "no max of torch.complex64"),
        (float8, "sum", "no sum of torch.float8_e4m3fn"),
        (float8, "product", "no product of torch.float8_e4m3fn"),
    ]
    functions = [*ALL_REDUCES.values(), ring_reduce_scatter]
    with MessageCounter(comms) as counter:
        for tensor, op, message in bad_arguments:
            for function in functions:
                with pytest.raises(ValueError, match=f"^rank {comms.rank}: .*{message}"):
                    function(tensor, comms, op)
        for half in (ring_reduce_scatter, ring_all_gather):
            with pytest.raises(ValueError, match="expected a contiguous tensor, got shape"):
                half(torch.ones(4, 2).T, comms)
    assert counter.messages == []


# ---- the two halves of the ring


@on_ranks()
def test_the_rings_first_half_is_a_reduce_scatter(comms):
    n = comms.world_size
    for piece_bytes in (ring.PIECE_BYTES, 16):
        ring.PIECE_BYTES = piece_bytes
        for dtype in (torch.float32, torch.int64):
            for op in BACKEND_OPS:
                tensor = of_rank(comms.rank, 12 * n, dtype)
                backend = torch.empty(12, dtype=dtype)
                parts = [part.clone() for part in tensor.chunk(n)]
                dist.reduce_scatter(backend, parts, getattr(dist.ReduceOp, BACKEND_OPS[op]))
                chunk = ring_reduce_scatter(tensor, comms, op)
                assert torch.equal(chunk, backend), (dtype, op)
                start = tensor.data_ptr() + 12 * comms.rank * tensor.element_size()
                assert chunk.data_ptr() == start, "should be a view of the argument"
                for size in (0, 1, n + 1, 97):
                    chunk = ring_reduce_scatter(of_rank(comms.rank, size, dtype), comms, op)
                    whole = by_hand(n, size, dtype, op)
                    assert torch.equal(chunk, whole.tensor_split(n)[comms.rank]), (op, size)


@on_ranks()
def test_the_rings_second_half_is_an_all_gather(comms):
    n = comms.world_size
    for piece_bytes in (ring.PIECE_BYTES, 16):
        ring.PIECE_BYTES = piece_bytes
        for dtype in (torch.float32, torch.bool, torch.int16, torch.float8_e4m3fn):
            for size in (0, 1, n + 1, 12 * n, 97):
                whole = of_rank(17, size, torch.float32).to(dtype)
                tensor = torch.full((size,), 3.0).to(dtype)
                tensor.tensor_split(n)[comms.rank].copy_(whole.tensor_split(n)[comms.rank])
                ring_all_gather(tensor, comms)
                assert torch.equal(bits(tensor), bits(whole)), (dtype, size)
        mine = of_rank(comms.rank, 12, torch.float32)
        backend = [torch.empty(12) for _ in range(n)]
        dist.all_gather(backend, mine)
        tensor = torch.zeros(12 * n)
        tensor.chunk(n)[comms.rank].copy_(mine)
        ring_all_gather(tensor, comms)
        assert torch.equal(tensor, torch.cat(backend))


# ---- what is sent, and what is allocated


@on_ranks()
def test_messages_and_bytes_are_those_of_the_cost_model(comms):
    n = comms.world_size
    for size in (n, 97, 1000):
        nbytes = 4 * size
        for name in BY_MESSAGES:
            with MessageCounter(comms) as counter:
                ALL_REDUCES[name](torch.ones(size), comms, "sum")
            by_rank = counter.gather()
            cost = all_reduce_cost(name, n, nbytes)
            assert sum(map(len, by_rank)) == cost.messages, name
            most = max(sum(message.nbytes for message in sent) for sent in by_rank)
            padding = 4 * cost.rounds if name == "ring" else 0  # an element more in each round
            assert cost.most_sent <= most <= cost.most_sent + padding, name


@on_ranks(2, 3, 4, 5)
def test_no_rank_of_the_ring_sends_more_than_its_share(comms):
    n, rank = comms.world_size, comms.rank
    for piece_bytes in (ring.PIECE_BYTES, 64):
        ring.PIECE_BYTES = piece_bytes
        for size in (1, n, n + 1, 1009):
            with MessageCounter(comms) as counter:
                ring_all_reduce(torch.ones(size), comms)
            sent = sum(message.nbytes for message in counter.messages)
            padding = 2 * (n - 1) * 4
            assert sent <= 2 * (n - 1) / n * 4 * size + padding
            assert {message.dst for message in counter.messages} == {(rank + 1) % n}


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that come into being while it is on."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            given = {
                a.untyped_storage().data_ptr()
                for a in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(a, torch.Tensor)
            }
            for made in torch.utils._pytree.tree_leaves(result):
                if isinstance(made, torch.Tensor):
                    storage = made.untyped_storage()
                    if storage.data_ptr() not in given:
                        self.nbytes += storage.nbytes()
        return result


def allocated(algorithm, tensor, comms):
    with Allocations() as allocations:
        algorithm(tensor, comms, "sum")
    return allocations.nbytes


@on_ranks(2, 3, 4, 5)
def test_the_ring_allocates_at_most_one_chunk(comms):
    n, size = comms.world_size, 10_007
    chunk = 4 * -(-size // n)
    probe = 16  # bytes; of the question whether the dtype can be added
    assert allocated(ring_all_reduce, torch.ones(size), comms) <= chunk + probe
    ring.PIECE_BYTES = 400
    assert allocated(ring_all_reduce, torch.ones(size), comms) <= 400 + probe
    # The same count finds the copies that the others make.
    assert allocated(ALL_REDUCES["doubling"], torch.ones(size), comms) >= 4 * size
    assert allocated(ALL_REDUCES["direct"], torch.ones(size), comms) >= 4 * size * (n - 1)


# ---- over the most unhelpful network that the rules allow


@given(
    algorithm=st.sampled_from(BY_MESSAGES),
    n=st.integers(1, 9),
    size=st.integers(0, 60),
    piece_bytes=st.integers(1, 64),
    op=st.sampled_from(["sum", "max", "product"]),
)
def test_nothing_under_way_is_touched_whatever_the_shape_of_the_job(
    algorithm, n, size, piece_bytes, op
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "PIECE_BYTES", piece_bytes)

        def reduce(comms):
            tensor = of_rank(comms.rank, size, torch.float64)
            ALL_REDUCES[algorithm](tensor, comms, op)
            return tensor

        results, sent = run_threads(n, reduce)
    for tensor in results:
        assert torch.equal(tensor, by_hand(n, size, torch.float64, op))
    cost = all_reduce_cost(algorithm, n, size * 8)
    most = max(sum(nbytes for _, nbytes in messages) for messages in sent)
    if algorithm == "ring":
        assert most <= cost.most_sent + 8 * cost.rounds
    else:
        assert sum(map(len, sent)) == cost.messages
        assert most == cost.most_sent
