"""What intervals cover: alone, together, and in how many tracks beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from microddp.timing.timeline import Span


class Interval(Protocol):
    """What began and ended, at a number of seconds each."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def in_both(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds in which at least one of ``some`` and one of ``others`` were going on."""
    return max(0.0, covered(some) + covered(others) - covered([*some, *others]))  # but for rounding


def covered(spans: Sequence[Interval]) -> float:
    """Seconds in which at least one of the spans was going on."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


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
