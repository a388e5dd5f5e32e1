"""A recorded step, taken apart: its time part by part, and the algebra of intervals for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from microddp.timing import Span


@dataclass(frozen=True)
class StepTimes:
    """One rank's step taken apart, in seconds.

    Attributes:
        data: fetching the batch and bringing it to the device.
        forward: of the model and the loss.
        backward: without waiting for communication.
        exposed: waiting for communication.
        hidden: communication under way behind something else; not a part of the total.
        optimizer: the update.
        total: of the step. What it exceeds the parts by went into the gaps between them.
    """

    data: float
    forward: float
    backward: float
    exposed: float
    hidden: float
    optimizer: float
    total: float

    @property
    def working(self) -> float:
        """Seconds in which the rank did not wait for others."""
        return self.total - self.exposed


def break_down(spans: Sequence[Span]) -> StepTimes:
    """Take a step apart.

    Args:
        spans: of one rank and one step, as :class:`~microddp.timing.timeline.Timeline` records
            them: the phases by name, collectives in the lane ``"communication"``, and ``"wait"``.
    """
    waits = [span for span in spans if span.lane == "wait"]
    under_way = [span for span in spans if span.lane == "communication"]

    def phase(name: str) -> float:
        mine = [span for span in spans if span.name == name]
        return covered(mine) - in_both(mine, waits)

    return StepTimes(
        data=phase("data"),
        forward=phase("forward"),
        backward=phase("backward"),
        exposed=covered(waits),
        hidden=covered(under_way) - in_both(under_way, waits),
        optimizer=phase("optimizer"),
        total=max(span.end for span in spans) - min(span.start for span in spans),
    )


@dataclass(frozen=True)
class ComputeTimes:
    """A step without communication: medians, each of the slowest rank, in seconds.

    Attributes:
        forward: the loss from the batch.
        backward: all gradients from the loss.
        ready: by parameter, when its gradient is ready, since backward began; in that order.
        optimizer: the update, and forgetting the gradients.
        copy: to bring one byte of gradient into a bucket.
    """

    forward: float
    backward: float
    ready: Mapping[str, float]
    optimizer: float
    copy: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: the parameters' names and their bytes."""

    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class PredictedStep:
    """A step, predicted; in seconds.

    Attributes:
        step: all of it.
        exposed: in which nothing but communication went on.
        hidden: of communication behind backward.
    """

    step: float
    exposed: float
    hidden: float


# ---- intervals


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
