"""All-reduce from messages between two ranks: four ways to agree on a sum, and what each costs.

With n ranks and a tensor of S bytes:

=====================  ==============  ====================  ====================================
algorithm              rounds          bytes a rank sends    good for
=====================  ==============  ====================  ====================================
naive                  2 (n-1)         (n-1) S on rank 0     showing why rank 0 is the bottleneck
direct                 n-1             (n-1) S               two ranks
ring                   2 (n-1)         2 (n-1)/n S           large tensors: bytes do not grow with n
recursive doubling     log2 n          S log2 n              small tensors: fewest rounds
=====================  ==============  ====================  ====================================

Every function works in place, on any dtype the backend can send, and leaves bitwise the same
result on every rank, because each element is added up in one order that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from microddp.comms import Comms
from microddp.p2p import Exchange

# How the values of two ranks become one: COMBINE[op](first, second, out=result).
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}

# A chunk of the ring travels in pieces of this size, one at a time. Measured with two gloo ranks on
# two cores (AMD EPYC, November 2026), tensors of 16 and 64 MiB, against the backend: 0.97 times its
# time so; 1.03 with 1 MiB, as every message wakes up a thread on both sides; 1.06 with 4 MiB, which
# leave the cache; 1.02 with two pieces under way at once. The cores are busy for nine tenths of the
# time as it is: there is little left to overlap, and twice the memory to keep in the cache.
PIECE_BYTES = 3 << 19


def naive_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place by way of rank 0: it collects, reduces and sends the result back.

    2 (n-1) messages of S bytes, every one of them through rank 0, one after the other: the time
    grows as 2 (n-1) S. Rank 0 needs S bytes of scratch.

    Args:
        tensor: any shape, the same on every rank; any dtype the backend can send.
        comms: the group to reduce over.
        op: ``"sum"``, ``"mean"`` (floating point or complex), ``"max"``, ``"min"``, ``"product"``.

    Raises:
        ValueError: an unknown ``op``, or one that the dtype does not have: the mean of integers,
            the maximum of complex numbers.
        RuntimeError: another rank failed, or the time-out passed.
    """
    with _flattened(tensor, comms, op) as (flat, combine):
        if comms.rank == 0:
            scratch = comms.scratch(flat.numel(), flat)
            for peer in range(1, comms.world_size):
                comms.recv(scratch, peer)
                combine(flat, scratch, out=flat)
            for peer in range(1, comms.world_size):
                comms.send(flat, peer)
        else:
            comms.send(flat, 0)
            comms.recv(flat, 0)


def direct_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place by sending everything to everyone: n (n-1) messages of S bytes.

    One round trip's latency where all links work at once, but each rank sends (n-1) S bytes and
    needs as much scratch. Arguments and errors are those of :func:`naive_all_reduce`.
    """
    rank, n = comms.rank, comms.world_size
    with _flattened(tensor, comms, op) as (flat, combine):
        others = [peer for peer in range(n) if peer != rank]
        scratch = comms.scratch((n - 1) * flat.numel(), flat).view(n - 1, flat.numel())
        theirs = dict(zip(others, scratch, strict=True))
        under_way = [
            comms.sendrecv(
                flat, (rank + k) % n, theirs[(rank - k) % n], (rank - k) % n, async_op=True
            )
            for k in range(1, n)
        ]
        for pending in under_way:
            pending.wait()
        # In rank order on every rank: in another order the last bits would differ between ranks.
        in_order = [flat.clone() if peer == rank else theirs[peer] for peer in range(n)]
        flat.copy_(in_order[0])
        for other in in_order[1:]:
            combine(flat, other, out=flat)


def recursive_doubling_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place in log2 n rounds: exchange with the rank 1 away, then 2, 4, ...

    The ranks beyond the largest power of two first hand their tensor to a partner, and get the
    result from it at the end. Needs S bytes of scratch. Arguments and errors are those of
    :func:`naive_all_reduce`.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005, section 4.5.
    """
    rank = comms.rank
    power = 1 << (comms.world_size.bit_length() - 1)  # the largest power of two <= world_size
    extra = comms.world_size - power
    with _flattened(tensor, comms, op) as (flat, combine):
        scratch = comms.scratch(flat.numel(), flat)
        if rank >= power:
            comms.send(flat, rank - power)
            comms.recv(flat, rank - power)
            return
        if rank < extra:
            comms.recv(scratch, rank + power)
            combine(flat, scratch, out=flat)
        distance = 1
        while distance < power:
            partner = rank ^ distance
            comms.sendrecv(flat, partner, scratch, partner)
            # The lower rank's values first, on both sides: max(-0.0, 0.0) depends on the order.
            first, second = (flat, scratch) if rank < partner else (scratch, flat)
            combine(first, second, out=flat)
            distance *= 2
        if rank < extra:
            comms.send(flat, rank + power)


def ring_reduce_scatter(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> torch.Tensor:
    """Reduce over all ranks so that each rank holds its chunk of the result: half of the ring.

    The flattened tensor is cut into n chunks (``torch.tensor_split``). In round s a rank passes on
    the chunk it has just added to, so that after n-1 rounds chunk r arrives, complete, on rank r.
    A rank sends (n-1)/n S bytes. The other chunks are left holding partial sums.

    Args:
        tensor: contiguous; otherwise as for :func:`naive_all_reduce`, with its errors.

    Returns:
        This rank's chunk, a flat view into ``tensor``.
    """
    _check_contiguous(tensor, comms)
    with _flattened(tensor, comms, op) as (flat, combine):
        _ring(flat, comms, combine, scatter=True, gather=False)
    return flat.tensor_split(comms.world_size)[comms.rank]


def ring_all_gather(tensor: torch.Tensor, comms: Comms) -> None:
    """Fill ``tensor`` with every rank's chunk of it: the other half of the ring, in place.

    Rank r starts with chunk r (of ``torch.tensor_split`` of the flattened tensor) and in each
    round passes on the chunk that came in the round before. A rank sends about (n-1)/n S bytes.

    Args:
        tensor: contiguous; the same shape and dtype on every rank.
    """
    _check_contiguous(tensor, comms)
    with torch.no_grad():
        _ring(tensor.view(-1), comms, torch.add, scatter=False, gather=True)


def ring_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place around a ring: reduce-scatter, then all-gather, without a pause between.

    A rank sends 2 (n-1)/n S bytes (and up to one element more per round where n does not divide
    the size), to its right-hand neighbour only. Scratch: one piece, never more than a chunk.
    Arguments and errors are those of :func:`naive_all_reduce`.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009, section 3.
    """
    with _flattened(tensor, comms, op) as (flat, combine):
        _ring(flat, comms, combine, scatter=True, gather=True)


def _ring(
    flat: torch.Tensor,
    comms: Comms,
    combine: Callable[..., torch.Tensor],
    *,
    scatter: bool,
    gather: bool,
) -> None:
    """Run one or both halves of the ring, a piece at a time.

    Piece j of every chunk makes column j, and each column goes all the way round before the next
    one begins: what was just received is still in the cache when it is added and sent on.
    """
    rank, n = comms.rank, comms.world_size
    if n == 1 or flat.numel() == 0:
        return
    largest = -(-flat.numel() // n)
    pieces = -(-largest * flat.element_size() // PIECE_BYTES)
    columns = zip(*(chunk.tensor_split(pieces) for chunk in flat.tensor_split(n)), strict=True)
    # In each round: the chunk sent to the right, the chunk received from the left, whether to add.
    rounds = [((rank - 1 - s) % n, (rank - 2 - s) % n, True) for s in range(n - 1) if scatter]
    rounds += [((rank - s) % n, (rank - 1 - s) % n, False) for s in range(n - 1) if gather]
    scratch = comms.scratch(-(-largest // pieces) if scatter else 0, flat)
    exchange_with_neighbours = comms.exchanger(flat, (rank + 1) % n, (rank - 1) % n)
    sending: list[Exchange] = []
    for column in columns:
        for sent, received, add in rounds:
            target = column[received]
            arrival = scratch[: target.numel()] if add else target
            exchange = exchange_with_neighbours(column[sent], arrival)
            exchange.received()
            # The sending may go on: what is sent is not written to before the neighbour has it.
            sending.append(exchange)
            if add:
                combine(target, arrival, out=target)
    for exchange in sending:
        exchange.wait()


@contextmanager
def _flattened(
    tensor: torch.Tensor, comms: Comms, op: str
) -> Iterator[tuple[torch.Tensor, Callable[..., torch.Tensor]]]:
    """The tensor as one contiguous dimension, and how to combine; a copy only if it must be."""
    if error := _cannot_combine(op, tensor.dtype):
        raise ValueError(f"rank {comms.rank}: {error}")
    with torch.no_grad():
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
        if op == "mean":
            # Before adding: the sum of n gradients may overflow where their mean does not.
            flat.div_(comms.world_size)
        yield flat, COMBINE[op]
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


@cache
def _cannot_combine(op: str, dtype: torch.dtype) -> str | None:
    """Why the values of two ranks cannot become one, said before anything is sent."""
    if op not in COMBINE:
        return f"expected op in {list(COMBINE)}, got {op!r}"
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the mean needs a floating point tensor, got {dtype}"
    try:  # no order for complex numbers, no sum of float8
        one = torch.empty(1, dtype=dtype)
        COMBINE[op](one, one, out=one)
    except RuntimeError as error:
        return f"no {op} of {dtype}: {error}"
    return None


def _check_contiguous(tensor: torch.Tensor, comms: Comms) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"rank {comms.rank}: expected a contiguous tensor, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )


ALGORITHMS: dict[str, Callable[[torch.Tensor, Comms, str], None]] = {
    "naive": naive_all_reduce,
    "direct": direct_all_reduce,
    "ring": ring_all_reduce,
    "doubling": recursive_doubling_all_reduce,
}
