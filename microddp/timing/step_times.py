"""A step's time, part by part: as recorded, as measured without other ranks, as predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from microddp.timing.intervals import covered, in_both
from microddp.timing.timeline import Span


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
class Prediction:
    """A step, predicted; in seconds.

    Attributes:
        step: all of it.
        exposed: in which nothing but communication went on.
        hidden: of communication behind backward.
    """

    step: float
    exposed: float
    hidden: float
