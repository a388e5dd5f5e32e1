"""The parts of a training step's time: computing, waiting for communication, hiding it.

Whatever averages the gradients, a step is taken apart by the same rule. Communication is
*exposed* while the rank waits for it and does nothing else, and *hidden* for the rest of the time
in which it is under way. Computing is the time of a phase without the waiting inside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from microddp.comms import Comms
from microddp.report import table
from microddp.step import Loss, Strategy, take_step
from microddp.step_times import StepTimes, break_down
from microddp.timing import Timeline
from microddp.torch_ddp import strategy_of

PHASES = tuple(field.name for field in fields(StepTimes))


def median_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Take the median of each time over several steps."""
    return StepTimes(*map(statistics.median, zip(*map(astuple, steps), strict=True)))


class DDPPerformanceAnalyzer:
    """Times training steps phase by phase, and compares the ranks.

    Args:
        comms: ranks that train together.

    Attributes:
        steps: times of every step so far on this rank.

    Example:
        >>> analyzer = DDPPerformanceAnalyzer(comms)
        >>> for inputs, targets in analyzer.batches(batches.epoch(0)):
        ...     analyzer.time_step(model, inputs, targets, optimizer)
        >>> comms.print(analyzer.summary())
    """

    def __init__(self, comms: Comms) -> None:
        self.comms = comms
        self.steps: list[StepTimes] = []
        self._timeline = _QuietTimeline(comms)
        self._fetching = 0.0

    def batches(
        self, batches: Iterable[tuple[torch.Tensor, ...]]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Pass batches on; the time to fetch one counts as data of the next timed step."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._fetching += time.perf_counter() - start
            yield batch

    def time_step(
        self,
        model: nn.Module | Strategy,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Loss = cross_entropy,
    ) -> StepTimes:
        """Train one step and time its phases.

        Args:
            model: strategy with its model, :class:`~microddp.ddp.wrapper.DistributedDataParallel`
                or PyTorch's, or a bare module, whose gradients nobody averages. With PyTorch's the
                buckets cannot be watched: communication counts as under way from the first
                collective to the end of backward.
            inputs: inputs of this rank's shard.
            targets: targets of this rank's shard.
            optimizer: optimizer of the model's parameters.
            loss_fn: function from outputs and targets to a scalar.

        Returns:
            The times on this rank, which also go to :attr:`steps`.
        """
        timeline, strategy = self._timeline, strategy_of(model, self.comms)
        timeline.take()  # the rest of a step that raised
        before = strategy.timeline
        strategy.record(timeline)
        try:
            with timeline.span("data", lane="data"):
                batch = [
                    part.to(self.comms.device, non_blocking=True) for part in (inputs, targets)
                ]
            take_step(strategy, loss_fn, optimizer, batch)
        finally:
            strategy.record(before)
        times = break_down(timeline.take())
        fetching, self._fetching = self._fetching, 0.0
        times = replace(times, data=times.data + fetching, total=times.total + fetching)
        self.steps.append(times)
        return times

    def summary(self) -> StepSummary:
        """Gather the median step of every rank so far. A collective.

        Raises:
            RuntimeError: on every rank, if one has timed no step.
        """
        self.comms.fail_together("" if self.steps else "none", "timed steps")
        everyone = self.comms.all_gather_data(astuple(median_step(self.steps)))
        return StepSummary(tuple(StepTimes(*times) for times in everyone))


class _QuietTimeline(Timeline):
    """A timeline without the many moments at which gradients are ready."""

    def mark(self, name: str) -> None:
        pass


@dataclass(frozen=True)
class StepSummary:
    """The median step of every rank. Prints as a table.

    Attributes:
        ranks: times of each rank's step, in rank order.
    """

    ranks: tuple[StepTimes, ...]

    @property
    def slowest(self) -> int:
        """The straggler, the rank that works longest and so waits least."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].working)

    @property
    def spread(self) -> float:
        """The straggler's work, divided by the least work of a rank; 1 where all are alike."""
        return self.ranks[self.slowest].working / min(times.working for times in self.ranks)

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """The seconds of each phase on each rank, as ``figures.stacked_bars`` takes them."""
        phases = [phase for phase in PHASES if phase not in ("hidden", "total")]
        return {
            f"rank {rank}": {phase: getattr(times, phase) for phase in phases}
            for rank, times in enumerate(self.ranks)
        }

    def __str__(self) -> str:
        return f"{self._table('simple')}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return f"{self._table('html')}<p>{self.verdict}</p>"

    @property
    def verdict(self) -> str:
        """The rank for which the others wait, in a sentence."""
        return (
            f"Rank {self.slowest} works longest (total less exposed), {self.spread:.2f} times as "
            "long as the rank that works least."
        )

    def _table(self, form: str) -> str:
        rows = [(phase, *(getattr(times, phase) * 1e3 for times in self.ranks)) for phase in PHASES]
        headers = ["ms", *(f"rank {rank}" for rank in range(len(self.ranks)))]
        return table(rows, headers, form=form)
