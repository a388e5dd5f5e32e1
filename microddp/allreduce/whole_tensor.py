"""All-reduce by messages of the whole tensor: through rank 0, to everyone, or by doubling."""

from __future__ import annotations

import torch

from microddp.allreduce.reduction import flattened
from microddp.comms import Comms


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
    with flattened(tensor, comms, op) as (flat, combine):
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

    In each of n-1 rounds a rank sends to one other and receives from another, so that all links
    work and no two messages meet at one. (All at once, those to a rank shared its link, and on four
    hosts with 1 Gbit/s took 1.2 to 1.4 times as long.) Each rank needs n S bytes of scratch.
    Arguments and errors are those of :func:`naive_all_reduce`.
    """
    rank, n = comms.rank, comms.world_size
    with flattened(tensor, comms, op) as (flat, combine):
        others = [peer for peer in range(n) if peer != rank]
        scratch = comms.scratch((n - 1) * flat.numel(), flat).view(n - 1, flat.numel())
        theirs = dict(zip(others, scratch, strict=True))
        for k in range(1, n):
            comms.sendrecv(flat, (rank + k) % n, theirs[(rank - k) % n], (rank - k) % n)
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
    with flattened(tensor, comms, op) as (flat, combine):
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
