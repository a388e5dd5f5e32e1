"""Where the time of a training step goes: computing, waiting for communication, hiding it.

Whatever averages the gradients, a step is taken apart by the same rule. Communication is
*exposed* while the rank waits for it and does nothing else, and *hidden* for the rest of the time
in which it is under way. Computing is what a phase takes without the waiting inside it.
"""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.bucketing import BUCKET_CAP_MB, BucketedDDPHooks
from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.hooks import AllReduceHooks
from microddp.model import gradient_bytes
from microddp.schedule import average_gradients
from microddp.timing import Instant, Span, Timeline, Timing, covered, in_both, measure

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Hooks = AllReduceHooks | BucketedDDPHooks


@dataclass(frozen=True)
class StepTimes:
    """What one rank did in a step, in seconds.

    Attributes:
        data: fetching the batch and bringing it to the device.
        forward: of the model and the loss.
        backward: without waiting for communication.
        exposed: waiting for communication.
        hidden: communication under way behind something else; not a part of the total.
        optimizer: the update, and forgetting the gradients.
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


PHASES = tuple(field.name for field in fields(StepTimes))


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


def median_step(steps: Sequence[StepTimes]) -> StepTimes:
    """The median of each number of several steps."""
    return StepTimes(*map(statistics.median, zip(*map(astuple, steps), strict=True)))


class DDPPerformanceAnalyzer:
    """Times training steps phase by phase, and says what the ranks have in common.

    Args:
        comms: the ranks that train together.
        device: where batches are wanted; default: where this rank computes.

    Attributes:
        steps: the times of every step so far, of this rank.

    Example:
        >>> analyzer = DDPPerformanceAnalyzer(comms)
        >>> for inputs, targets in analyzer.batches(batches.epoch(0)):
        ...     analyzer.time_step(model, inputs, targets, optimizer)
        >>> comms.print(analyzer.summary())
    """

    def __init__(self, comms: Comms, device: torch.device | None = None) -> None:
        self.comms = comms
        self.device = device or comms.device
        self.steps: list[StepTimes] = []
        self._timeline = _QuietTimeline(comms)
        self._watches: WeakKeyDictionary[TorchDDP, _TorchWatch] = WeakKeyDictionary()
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
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Loss = cross_entropy,
        hooks: Hooks | None = None,
        naive: bool = False,
    ) -> StepTimes:
        """Train one step and time its phases.

        Args:
            model: a bare module, :class:`~microddp.ddp.wrapper.DistributedDataParallel` or
                PyTorch's. With PyTorch's the buckets cannot be watched: communication counts as
                under way from the first collective to the end of backward.
            inputs: of this rank's shard.
            targets: of this rank's shard.
            optimizer: of the model's parameters.
            loss_fn: from outputs and targets to a scalar.
            hooks: on a bare module, those that average its gradients.
            naive: on a bare module, average its gradients one by one after backward.

        Returns:
            This rank's times, which also go to :attr:`steps`.
        """
        timeline = self._timeline
        timeline.take()  # what is left of a step that raised
        watch = self._watch(model) if isinstance(model, TorchDDP) else None
        with self._recording(model.reducer if isinstance(model, DDP) else hooks):
            with timeline.span("data", lane="data"):
                inputs = inputs.to(self.device, non_blocking=True)
                targets = targets.to(self.device, non_blocking=True)
            with timeline.span("optimizer"):
                optimizer.zero_grad()
            with timeline.span("forward"):
                loss = loss_fn(model(inputs), targets)
            with timeline.span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            if naive:
                average_gradients(model, self.comms, timeline)
            if hooks:
                hooks.finish()
            with timeline.span("optimizer"):
                optimizer.step()
        spans = timeline.take()
        if watch:
            spans += watch.spans(timeline, spans)
        times = break_down(spans)
        fetching, self._fetching = self._fetching, 0.0
        times = replace(times, data=times.data + fetching, total=times.total + fetching)
        self.steps.append(times)
        return times

    def _watch(self, model: TorchDDP) -> _TorchWatch:
        """The hooks on a model; they stay as long as the analyzer, since making them takes time."""
        if model not in self._watches:
            self._watches[model] = _TorchWatch(model)
            weakref.finalize(self, self._watches[model].remove)
        return self._watches[model]

    @contextmanager
    def _recording(self, hooks: Hooks | None) -> Iterator[None]:
        """Have hooks that average gradients record on this analyzer's timeline."""
        if hooks is None:
            yield
            return
        before, hooks.timeline = hooks.timeline, self._timeline
        try:
            yield
        finally:
            hooks.timeline = before

    def summary(self) -> StepSummary:
        """The median step of every rank so far. A collective.

        Raises:
            RuntimeError: no step was timed.
        """
        if not self.steps:
            raise RuntimeError(f"rank {self.comms.rank}: expected timed steps, got none")
        everyone = self.comms.all_gather_data(astuple(median_step(self.steps)))
        return StepSummary(tuple(StepTimes(*times) for times in everyone))

    def analyze_communication_overhead(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        loss_fn: Loss = cross_entropy,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        repeat: int = 15,
    ) -> Overhead:
        """Time a step with the model in the book's DDP against one without. A collective.

        Args:
            model: is copied, and left as it is.
            inputs: of this rank's shard, on its device.
            targets: likewise.
            loss_fn: from outputs and targets to a scalar.
            bucket_cap_mb: size of a bucket in MiB.
            repeat: measurements of each.
        """
        alone, wrapped = copy.deepcopy(model), copy.deepcopy(model)
        replica = DDP(wrapped, self.comms, bucket_cap_mb=bucket_cap_mb)

        def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            loss_fn(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        calls: dict[str, Callable[[], object]] = {
            name: partial(step, net, torch.optim.SGD(net.parameters(), lr=1e-4))
            for name, net in (("alone", alone), ("together", replica))
        }
        times = measure(calls, self.comms, repeat=repeat)
        return Overhead(gradient_bytes(model), times["alone"], times["together"])


class _QuietTimeline(Timeline):
    """Without the moments at which gradients are ready: there are many, and none is needed here."""

    def mark(self, name: str, lane: str = "gradients") -> None:
        pass


class _TorchWatch:
    """Sees from outside when PyTorch's DDP sends its first bucket, and gets its last gradient.

    The group numbers its collectives. PyTorch's hooks run after these: a bucket is sent right after
    the gradient that fills it, and the next hook finds a higher number.
    """

    def __init__(self, model: TorchDDP) -> None:
        group: Any = model.process_group  # whose stub lacks the method
        self._number: Callable[[], int] = group._get_sequence_number_for_group
        self._before = 0
        self._first: Instant | None = None
        self._last: Instant | None = None
        self._device = next(model.parameters()).device
        self._handles = [model.register_forward_hook(self._forwarded)]
        self._handles += [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for p in model.parameters()
            if p.requires_grad
        ]

    def spans(self, timeline: Timeline, step: Sequence[Span]) -> list[Span]:
        """The communication of a step whose phases are in ``step``.

        The rank waits from the last gradient to the end of backward. Communication is taken to be
        under way from the first bucket to the end of backward; the gaps in it cannot be seen.
        """
        if self._last is None:
            return []
        end = max(span.end for span in step if span.name == "backward")
        rank, last = timeline.comms.rank, timeline.at(self._last)
        first = timeline.at(self._first or self._last)
        return [
            Span(rank, "communication", "all-reduce", first, end),
            Span(rank, "wait", "wait for all-reduce", last, end),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forwarded(self, *_: object) -> None:
        self._before = self._number()  # with those that broadcast buffers
        self._first = self._last = None

    def _ready(self, _parameter: torch.Tensor) -> None:
        if self._last and not self._first and self._number() > self._before:
            self._first = self._last
        self._last = Instant(self._device)


@dataclass(frozen=True)
class StepSummary:
    """The median step of every rank.

    Attributes:
        ranks: in rank order.
    """

    ranks: tuple[StepTimes, ...]

    @property
    def slowest(self) -> int:
        """The rank that works longest, and so waits least; the straggler."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].working)

    @property
    def spread(self) -> float:
        """The straggler's work, by that of the rank that works least; 1 where all are alike."""
        return self.ranks[self.slowest].working / min(times.working for times in self.ranks)

    @property
    def rows(self) -> list[tuple[str | float, ...]]:
        """A row for each phase, with its name and its milliseconds on each rank."""
        return [(phase, *(getattr(times, phase) * 1e3 for times in self.ranks)) for phase in PHASES]

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
        """Which rank the others wait for, in a sentence."""
        return (
            f"Rank {self.slowest} works longest, {self.spread:.2f} times as long as the rank that "
            "works least."
        )

    def _table(self, form: str) -> str:
        headers = ["ms", *(f"rank {rank}" for rank in range(len(self.ranks)))]
        table: str = tabulate(self.rows, headers=headers, floatfmt=".2f", tablefmt=form)
        return table


@dataclass(frozen=True)
class Overhead:
    """A step with gradients averaged over the ranks against one without.

    Attributes:
        nbytes: of all gradients.
        alone: the step without communication, on all ranks at once.
        together: the step in :class:`microddp.DDP <microddp.ddp.wrapper.DistributedDataParallel>`.
    """

    nbytes: int
    alone: Timing
    together: Timing

    @property
    def seconds(self) -> float:
        """What data parallelism adds to a step, as the median of the differences of each round."""
        pairs = zip(self.alone.seconds, self.together.seconds, strict=True)
        return statistics.median(together - alone for alone, together in pairs)

    @property
    def share(self) -> float:
        """The part of the step that data parallelism takes."""
        return self.seconds / self.together.median
