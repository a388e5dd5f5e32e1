"""Work and waiting of every rank, from the spans of all: each collective matched across the ranks.

:mod:`microddp.performance.stragglers` says what the words mean.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

from microddp.step_times import common, union
from microddp.timing import Span

WATCHED = "all-reduce"  # TorchDDPWatch's name for all collectives of a backward together


@dataclass(frozen=True)
class CollectiveTimes:
    """One collective on all ranks, in seconds of the timeline.

    Attributes:
        name: name of the recorded span.
        step: number of its step, from 0.
        arrivals: by rank, when it was launched there. With PyTorch's DDP all of a backward counts
            as one, at which a rank arrives when it begins to wait.
        ends: by rank, when it was complete there.
        began: when all ranks had arrived and the collective before was over.
    """

    name: str
    step: int
    arrivals: tuple[float, ...]
    ends: tuple[float, ...]
    began: float

    @property
    def last(self) -> int:
        """The rank that arrived last."""
        return self.arrivals.index(max(self.arrivals))

    @property
    def transfer(self) -> float:
        """Seconds from its beginning to its end."""
        return max(0.0, max(self.ends) - self.began)


@dataclass(frozen=True)
class RankTimes:
    """Work and waiting of one rank, in seconds.

    Attributes:
        work: seconds of work in each step.
        delays: seconds in each step that it held the others up by working longer than they did.
        last: share of the collectives at which it arrived last.
        for_ranks: seconds in each step that it waited for other ranks to arrive.
        for_transfers: seconds in each step that it waited when all had arrived.
    """

    work: tuple[float, ...]
    delays: tuple[float, ...]
    last: float
    for_ranks: tuple[float, ...]
    for_transfers: tuple[float, ...]


def times_of_ranks(
    spans: Sequence[Span], world_size: int
) -> tuple[list[float], list[RankTimes], list[CollectiveTimes]]:
    """Take the steps of all ranks apart.

    Args:
        spans: spans of all ranks, as for :func:`~microddp.performance.stragglers.find_stragglers`.
        world_size: number of ranks.

    Returns:
        The seconds of each step, the mean over the ranks; the times of each rank; and those of each
        collective. The first step is in none of them.

    Raises:
        ValueError: as for ``find_stragglers``.
    """
    ranks = [_Recorded([s for s in spans if s.rank == rank]) for rank in range(world_size)]
    _check_alike(ranks)
    collectives = _match(ranks)
    lengths = [[end - start for start, end in pairwise(rank.updates)] for rank in ranks]
    work = [
        [end - start - rank.waited(start, end) for start, end in pairwise(rank.updates)]
        for rank in ranks
    ]
    steps = [statistics.mean(step) for step in zip(*lengths, strict=True)]
    times = [_times(rank, ranks, collectives, work) for rank in range(world_size)]
    return steps, times, collectives


def work_of_others(work: Sequence[Sequence[float]], rank: int) -> list[float]:
    """Compute, for each step, the median work of the other ranks; its own for a rank alone."""
    others = [times for other, times in enumerate(work) if other != rank] or [work[rank]]
    return [statistics.median(times) for times in zip(*others, strict=True)]


class _Recorded:
    """The record of one rank.

    Attributes:
        updates: end of each update, seconds.
        calls: start, end and name of each collective, in order.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        waits = [span for span in spans if span.lane == "wait"]
        under_way = [span for span in spans if span.lane == "communication"]
        # The watch does not see when the last of a backward's collectives is launched.
        launches = {(WATCHED, span.end): span.start for span in waits}
        self.updates = sorted(span.end for span in spans if span.name == "optimizer")
        self.calls = sorted(
            (launches.get((span.name, span.end), span.start), span.end, span.name)
            for span in under_way
        )
        # In naive averaging a rank works while it "waits", between one collective and the next.
        waited = common(union(waits), union(under_way))
        self._starts = [start for start, _ in waited]
        self._ends = [end for _, end in waited]
        self._sums = [0.0, *accumulate(end - start for start, end in waited)]

    def waited(self, start: float, end: float) -> float:
        """Sum up the seconds from ``start`` to ``end`` in which it waited in a collective."""
        return self._waited_until(end) - self._waited_until(start) if end > start else 0.0

    def _waited_until(self, moment: float) -> float:
        i = bisect_right(self._starts, moment) - 1
        if i < 0:
            return 0.0
        return self._sums[i] + min(moment, self._ends[i]) - self._starts[i]


def _check_alike(ranks: Sequence[_Recorded]) -> None:
    first = ranks[0]
    names = [name for *_, name in first.calls]
    for rank, recorded in enumerate(ranks):
        count = len(recorded.updates)
        if count < 2 or count != len(first.updates):
            raise ValueError(
                "expected spans of two steps or more, as many on every rank, got "
                f"{len(first.updates)} on rank 0 and {count} on rank {rank}"
            )
        others = [name for *_, name in recorded.calls]
        for mine, theirs in zip_longest(names, others, fillvalue="nothing"):
            if mine != theirs:
                raise ValueError(
                    f"expected the same collectives on every rank, got {mine} on rank 0 and "
                    f"{theirs} on rank {rank}"
                )


def _match(ranks: Sequence[_Recorded]) -> list[CollectiveTimes]:
    """Match the k-th collective of every rank, in all steps but the first."""
    collectives, over = [], -math.inf
    for calls in zip(*(rank.calls for rank in ranks), strict=True):
        arrivals, ends, (name, *_) = zip(*calls, strict=True)
        step = bisect_right(ranks[0].updates, arrivals[0]) - 1
        if 0 <= step < len(ranks[0].updates) - 1:
            collectives.append(CollectiveTimes(name, step, arrivals, ends, max(*arrivals, over)))
        over = max(over, *ends)
    return collectives


def _times(
    rank: int,
    ranks: Sequence[_Recorded],
    collectives: Sequence[CollectiveTimes],
    work: Sequence[Sequence[float]],
) -> RankTimes:
    me, steps = ranks[rank], range(len(work[rank]))
    let_go, for_ranks, for_transfers = me.updates[0], [0.0 for _ in steps], [0.0 for _ in steps]
    for collective in collectives:
        end, ready = collective.ends[rank], max(collective.arrivals)
        for_ranks[collective.step] += me.waited(let_go, min(ready, end))
        for_transfers[collective.step] += me.waited(max(let_go, ready), end)
        let_go = max(let_go, end)
    replays = (_delay(rank, ranks, [c for c in collectives if c.step == step]) for step in steps)
    delays = [
        min(delay, max(0.0, mine - others))
        for delay, mine, others in zip(replays, work[rank], work_of_others(work, rank), strict=True)
    ]
    last = sum(collective.last == rank for collective in collectives)
    return RankTimes(
        work=tuple(work[rank]),
        delays=tuple(delays),
        last=last / max(1, len(collectives)),
        for_ranks=tuple(for_ranks),
        for_transfers=tuple(for_transfers),
    )


def _delay(rank: int, ranks: Sequence[_Recorded], step: Sequence[CollectiveTimes]) -> float:
    """Replay a step without one rank: by how many seconds its last collective ends earlier."""
    earlier, over = 0.0, -math.inf
    for collective in step:
        arrivals = []
        for other, recorded in enumerate(ranks):
            arrival = collective.arrivals[other]
            # A rank that has waited in this step comes when it is let go: then earlier, too.
            if recorded.waited(recorded.updates[collective.step], arrival) > 0:
                arrival -= earlier
            if other != rank:
                arrivals.append(arrival)
        over = max([over, *arrivals]) + collective.transfer
        earlier = collective.began + collective.transfer - over
    return earlier
