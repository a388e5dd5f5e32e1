"""The time of a step by kind of operation: ``torch.profiler`` read on every rank.

On CPU operations compute on the host; on CUDA kernels compute, which belong to the operations that
launched them. Collectives are ranges of their own: NCCL's kernels, or gloo's ``gloo:all_reduce``,
on gloo's own threads. Both last from the moment when a stream or one of those threads takes the
collective up, not from the call, until the result is there. So they include the wait for ranks that
come later, but no time in the backend's queue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from microddp.comms import Comms
from microddp.performance.profiler_events import (
    KINDS,
    RankProfile,
    events_of,
    summarize,
)
from microddp.report import human_seconds, table

WINDOW = "profiled steps"  # the range whose events count


@dataclass(frozen=True)
class KindTime:
    """The time of one kind of operation in a step, the mean over the ranks.

    Attributes:
        kind: kind of operation.
        calls: number of operations or kernels in a step.
        seconds: seconds in a step.
        share: share of the time that ``ProfileSummary.of`` names.
    """

    kind: str
    calls: float
    seconds: float
    share: float


@dataclass(frozen=True)
class ProfileSummary:
    """The time of a step by kind of operation, on all ranks. Prints as two tables.

    Attributes:
        ranks: profile of each rank.
        of: time of which all shares are a part. With NCCL ``"kernel time"``: the sum of all
            kernels' times, NCCL's among them, as ``nsys`` counts. With gloo ``"wall time"``: a
            step's, in which all-reduces run on other threads beside the rest, so that shares add up
            to more than 1 where they overlap.
    """

    ranks: tuple[RankProfile, ...]
    of: str

    @property
    def rows(self) -> list[KindTime]:
        """The kinds that occurred, in the order of ``KINDS``, as means over the ranks."""
        whole = self.mean("busy" if self.of == "kernel time" else "wall")
        rows = []
        for kind in KINDS:
            seconds, calls = (
                sum(rank.kinds[kind][i] for rank in self.ranks) / len(self.ranks) for i in (0, 1)
            )
            if calls:
                rows.append(KindTime(kind, calls, seconds, seconds / whole))
        return rows

    @property
    def busy_share(self) -> float:
        """All-reduce's share of the time of computation and collectives together.

        With NCCL that is the kernel time. With gloo it is the figure to compare with NCCL's.
        """
        return self.mean("all_reduce") / (self.mean("busy") or math.inf)

    def mean(self, name: str) -> float:
        """Compute the mean over the ranks of a time in their profiles, seconds a step.

        Args:
            name: attribute of :class:`~microddp.performance.profiler_events.RankProfile`.
        """
        return float(sum(getattr(rank, name) for rank in self.ranks)) / len(self.ranks)

    def __str__(self) -> str:
        return "\n\n".join(self._tables("simple"))

    def _repr_html_(self) -> str:
        return "\n".join(self._tables("html"))

    def _tables(self, form: str) -> Iterator[str]:
        headers = ["kind", "calls a step", "time a step", f"share of {self.of}"]
        kinds = [
            (row.kind, f"{row.calls:.4g}", human_seconds(row.seconds), f"{row.share:.1%}")
            for row in self.rows
        ]
        yield table(kinds, headers, form=form)
        names = ("wall", "computing", "all_reduce", "hidden", "idle", "host")
        headers = ["rank", "step", "computing", "all-reduce", "of it hidden", "idle", "host busy"]
        times = [
            (i, *(human_seconds(getattr(rank, name)) for name in names))
            for i, rank in enumerate(self.ranks)
        ]
        yield table(times, headers, form=form)


def profile_steps(step: Callable[[], object], comms: Comms, *, steps: int = 3) -> ProfileSummary:
    """Run a training step under the profiler on every rank, and sum up its time.

    The first step is not counted. The profiler itself takes some microseconds for each operation.
    With a model of small operations the step is longer than without, so look at shares here, and at
    times with :func:`~microddp.timing.clock.measure`.

    Args:
        step: call that takes one step, in which all ranks do the same collectives.
        comms: ranks that take the step together.
        steps: number of steps that are counted, at least 1.

    Returns:
        The summary, the same on every rank.

    Raises:
        ValueError: nothing to profile.
    """
    if steps < 1:
        raise ValueError(f"rank {comms.rank}: expected at least one step, got {steps}")
    activities = [ProfilerActivity.CPU]
    if comms.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with quiet_profile(activities) as profiler:
        step()
        comms.barrier()
        _synchronize(comms)
        with record_function(WINDOW):
            for i in range(steps):
                with record_function(f"step {i}"):
                    step()
            _synchronize(comms)
    events = list(events_of(profiler.events() or ()))
    (window,) = (e for e in events if e.name == WINDOW and not e.device)
    counted = [e for e in events if e.name != WINDOW and window.start <= e.start < window.end]
    mine = summarize(counted, window.end - window.start, steps, kernels=len(activities) > 1)
    return ProfileSummary(
        tuple(_from_json(data) for data in comms.all_gather_data(asdict(mine))),
        of="kernel time" if comms.backend == "nccl" else "wall time",
    )


def quiet_profile(activities: Iterable[ProfilerActivity], **options: Any) -> profile:
    """Make a PyTorch profiler that prints no lines ``USDT: ... profiler_start``.

    Kineto, on which it is built, prints them at log levels up to 6, and reads the level when it is
    used first. A level that the user has set stays.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=activities, **options)


def _from_json(data: dict[str, Any]) -> RankProfile:
    kinds = {kind: (seconds, calls) for kind, (seconds, calls) in data["kinds"].items()}
    return RankProfile(**(data | {"kinds": kinds}))


def _synchronize(comms: Comms) -> None:
    if comms.device.type == "cuda":
        torch.cuda.synchronize(comms.device)
