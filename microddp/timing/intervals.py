"""Interval algebra: union, intersection, and tracks beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from microddp.timing.timeline import Span


class Interval(Protocol):
    """Something with a start and an end, in seconds."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def union(spans: Iterable[Interval]) -> list[tuple[float, float]]:
    """The intervals that spans cover, apart from each other and in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if union and start <= union[-1][1]:
            start, last = union.pop()
            end = max(end, last)
        union.append((start, end))
    return union


def common(
    some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The intervals that two unions have in common."""
    common, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            common.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return common


def covered(spans: Iterable[Interval]) -> float:
    """Seconds in which at least one of the spans was going on."""
    return sum(end - start for start, end in union(spans))


def in_both(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Seconds in which at least one of ``some`` and one of ``others`` were going on."""
    return sum(end - start for start, end in common(union(some), union(others)))


def exposed(spans: Sequence[Span], rank: int) -> float:
    """Seconds in which a rank only waited for communication: its spans in the lane ``"wait"``."""
    return covered([span for span in spans if span.rank == rank and span.lane == "wait"])


def overlapped(spans: Sequence[Span], rank: int) -> float:
    """Seconds in which a rank computed while communication of its was under way."""
    mine = [span for span in spans if span.rank == rank]
    compute = [span for span in mine if span.lane == "compute"]
    communication = [span for span in mine if span.lane == "communication"]
    return in_both(compute, communication)


def tracks(spans: Sequence[Span]) -> list[int]:
    """For each span a track, from 0, on which no two spans of its rank and lane overlap."""
    numbers = [0] * len(spans)
    ends: dict[tuple[int, str], list[float]] = {}
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[i]
        taken = ends.setdefault((span.rank, span.lane), [])
        free = (track for track, end in enumerate(taken) if end <= span.start)
        numbers[i] = next(free, len(taken))
        taken[numbers[i] : numbers[i] + 1] = [span.end]
    return numbers
