"""All-reduce over links of unequal speed: a slow one carries the tensor once each way, no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch

from microddp.allreduce.reduction import flattened
from microddp.comms import Comms, Exchange

# The tensor travels in columns, with a piece of every rank's part in each. A column's sum can leave
# only when all of it is there, so the more columns, the less the last ones cost; but a message
# costs the cores as much as tens of KiB on the wire. Of 32 to 512 KiB, 128 was best or as good on
# links of 0.1 and 0.4 Gbit/s (gloo, 4 hosts on two cores, AMD EPYC, November 2026).
COLUMN_BYTES = 1 << 17
COLUMNS = 64  # at most: the last ones then cost 3 to 5 %
# Columns on their way while one is added; with 1, 16 MiB took a seventh longer.
AHEAD = 2


def parts_by_speed(count: int, speeds: Sequence[float]) -> list[int]:
    """Elements or bytes for each rank to add up, so that no link takes longer than it must.

    A rank sends every other one's part of its tensor, and the sum of its own part to everyone: if
    that part has c of S bytes, S + (n-2) c, and it receives as many. So a link of B bytes a second
    needs at least S/B, and in a time T has time for a part of c = (T B - S) / (n-2). Ranks for
    which that is negative get none; T is the time at which the others' parts make up S.

    Args:
        count: of all parts together.
        speeds: of each rank's link, in any unit.

    Returns:
        A number for each rank, from 0. Two ranks get a half each, as both send S in any case.

    Raises:
        ValueError: there is no speed, or one is not a positive number.

    Example:
        >>> parts_by_speed(120, [1e9, 1e9, 0.1e9, 1e9])
        [40, 40, 0, 40]
        >>> parts_by_speed(120, [1e9, 1e9, 0.8e9, 1e9])
        [35, 34, 16, 35]
    """
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"expected a positive speed for each rank, got {list(speeds)}")
    n = len(speeds)
    if n <= 2:
        shares = [1 / n] * n
    else:
        served = sorted(speeds, reverse=True)
        while served[-1] * (level := (n - 2 + len(served)) / sum(served)) < 1:  # T / S
            served.pop()
        shares = [max(0.0, level * speed - 1) / (n - 2) for speed in speeds]
    ends = [round(count * min(share, 1.0)) for share in accumulate(shares)]
    return [end - start for start, end in pairwise([0, *ends[:-1], count])]


def weighted_time(nbytes: float, speeds: Sequence[float]) -> float:
    """Seconds that :func:`weighted_all_reduce` takes at least, by the bytes of its links.

    For two ranks or more that is the longer of S / (the least speed), as the slowest link has to
    carry the tensor, and 2 (n-1) S / (the sum of speeds), as all links carry what all ranks send.

    Args:
        nbytes: S, of the tensor.
        speeds: of each rank's link, bytes a second in each direction.

    Raises:
        ValueError: as for :func:`parts_by_speed`.

    Example:
        >>> weighted_time(1e9, [1e9, 1e9, 0.1e9, 1e9])  # the ring: 2 (n-1)/n S/B = 15 s
        10.0
    """
    parts = parts_by_speed(int(nbytes), speeds)
    sent = [nbytes + (len(parts) - 2) * part for part in parts]
    return max(each / speed for each, speed in zip(sent, speeds, strict=True))


def weighted_all_reduce(
    tensor: torch.Tensor, comms: Comms, op: str = "sum", *, speeds: Sequence[float]
) -> None:
    """All-reduce in place in which a rank with a slow link adds up less, or nothing.

    Each rank owns a part of the tensor, of the size that :func:`parts_by_speed` gives it. It gets
    the others' values of that part, adds them up in rank order, and sends the sum to all. A rank
    with a part of c bytes sends and receives S + (n-2) c: with links of one speed the ring's
    2 (n-1)/n S, and S over a link that is slow enough. There are 2 (n-1) messages for each column
    of pieces, a few columns are under way at a time, and scratch is needed for these.

    Args:
        speeds: of each rank's link, in any unit; the same on every rank.

    The others, and errors, are those of :func:`~microddp.allreduce.whole_tensor.naive_all_reduce`.

    Raises:
        ValueError: also if there is not one positive speed for each rank.
    """
    rank, n = comms.rank, comms.world_size
    if len(speeds) != n or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(
            f"rank {rank}: expected {n} positive speeds, one for each rank, got {list(speeds)}"
        )
    counts = parts_by_speed(tensor.numel(), speeds)
    with flattened(tensor, comms, op) as (flat, combine):
        if n == 1 or flat.numel() == 0:
            return
        pieces = min(COLUMNS, -(-flat.nbytes // COLUMN_BYTES))
        parts = torch.split(flat, counts)
        columns = [*zip(*(part.tensor_split(pieces) for part in parts), strict=True)]
        largest = columns[0][rank].numel()
        rooms = comms.scratch((AHEAD + 1) * n * largest, flat).view(AHEAD + 1, n, largest)
        peers = [((rank + k) % n, (rank - k) % n) for k in range(1, n)]
        exchangers = [(comms.exchanger(flat, dst, src), dst, src) for dst, src in peers]
        asked: list[list[Exchange]] = []  # by column: everyone's values, for their owner to add
        told: list[list[Exchange]] = []  # by column: what its owner made of them

        def terms(j: int) -> list[torch.Tensor]:
            own = columns[j][rank]
            room = rooms[j % (AHEAD + 1), :, : own.numel()]
            return [own if peer == rank else room[peer] for peer in range(n)]

        # A rank receives from another one in the order in which that one sends.
        for j in range(len(columns) + 2 * AHEAD):
            if j < len(columns):
                theirs = terms(j)
                asked.append([send(columns[j][dst], theirs[src]) for send, dst, src in exchangers])
            if 0 <= (k := j - AHEAD) < len(columns):
                for exchange in asked[k]:
                    exchange.received()
                (total, *others), own = terms(k), columns[k][rank]
                for peer, term in enumerate(others, start=1):  # in rank order
                    # This rank's own place is free from its turn on.
                    total = combine(total, term, out=own if peer >= rank else total)
                told.append([send(own, columns[k][src]) for send, _, src in exchangers])
            if (k := j - 2 * AHEAD) >= 0:
                for exchange in told[k]:
                    exchange.received()
        for exchange in chain(*asked, *told):
            exchange.wait()
