"""Computing and all-reduces of a step: ``torch.profiler`` read on every rank.

On CPU operations compute on the host; on CUDA kernels compute, which belong to the operations that
launched them. Collectives are ranges of their own: NCCL's kernels, or gloo's ``gloo:all_reduce``,
on gloo's own threads. Both last from the moment when a stream or one of those threads takes the
collective up, not from the call, until the result is there. So they include the wait for ranks that
come later, but no time in the backend's queue.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from microddp.comms import Comms
from microddp.step_times import covered

WINDOW = "profiled steps"  # the range whose events count
# NCCL's and RCCL's: ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclDevKernel_Generic_1,
# void rcclGenericKernel<1, false>, mscclKernel_Sum_float_Simple_false.
COLLECTIVE_KERNEL = r"(void )?(nccl|rccl|msccl)"
RUNTIME_CALL = r"(cuda|cu|hip)[A-Z]"  # as cudaLaunchKernel, cuLaunchKernelEx, hipMemcpyAsync
NO_OPERATION = ("autograd::", "torch::autograd::", "c10d::")


@dataclass(frozen=True)
class Event:
    """An operation, kernel or range that the profiler saw on one rank.

    Attributes:
        name: name of the operation, kernel or range.
        start: beginning, seconds.
        end: end, seconds.
        alone: seconds that are not a nested operation's.
        within: of a collective's kernel, the names of what launched it.
        device: whether it is a kernel.
    """

    name: str
    start: float
    end: float
    alone: float
    within: tuple[str, ...] = ()
    device: bool = False

    @property
    def collective(self) -> bool:
        """True if it communicates, and does not compute."""
        return bool(re.match(COLLECTIVE_KERNEL if self.device else "nccl:|gloo:", self.name))

    @property
    def all_reduce(self) -> bool:
        """True if it is an all-reduce. One kernel serves many collectives; its launcher knows."""
        calls = [name for name in self.within if re.match("nccl:|c10d::", name)]
        named = re.search("all_?reduce", " ".join(calls) or self.name, re.I)
        return self.collective and named is not None

    @property
    def operation(self) -> bool:
        """True if it computes, and is neither a mere range nor a node of autograd's graph."""
        computes = "::" in self.name and not self.name.startswith(NO_OPERATION)
        return not self.collective and (self.device or computes)


@dataclass(frozen=True)
class RankProfile:
    """The time of a step on one rank, in seconds a step.

    Attributes:
        wall: time from the beginning of a step to the next one's.
        computing: time in which the rank computed: operations on CPU, kernels on CUDA.
        all_reduce: time in which an all-reduce was under way.
        busy: the sum over all operations and collectives.
    """

    wall: float
    computing: float
    all_reduce: float
    busy: float


@dataclass(frozen=True)
class ProfileSummary:
    """The time of a step on all ranks.

    Attributes:
        ranks: profile of each rank.
    """

    ranks: tuple[RankProfile, ...]

    @property
    def busy_share(self) -> float:
        """All-reduce's share of the time of computation and collectives together.

        With NCCL that is the kernel time. With gloo it is the figure to compare with NCCL's.
        """
        return self.mean("all_reduce") / (self.mean("busy") or math.inf)

    def mean(self, name: str) -> float:
        """Compute the mean over the ranks of a time in their profiles, seconds a step.

        Args:
            name: attribute of :class:`RankProfile`.
        """
        return float(sum(getattr(rank, name) for rank in self.ranks)) / len(self.ranks)


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
    everyone = comms.all_gather_data(asdict(mine))
    return ProfileSummary(tuple(RankProfile(**data) for data in everyone))


def summarize(
    events: Sequence[Event], seconds: float, steps: int = 1, *, kernels: bool = False
) -> RankProfile:
    """Sum up the events of one rank.

    Args:
        events: all events of the rank.
        seconds: seconds of all steps together.
        steps: number of steps.
        kernels: whether kernels compute, on CUDA; else operations on the host do.
    """
    compute = [e for e in events if e.operation and e.device == kernels]
    all_reduces = [e for e in events if e.all_reduce]
    others = [e for e in events if e.collective and not e.all_reduce]
    busy = sum(e.alone for e in compute) + covered(all_reduces) + covered(others)
    times = seconds, covered(compute), covered(all_reduces), busy
    return RankProfile(*(time / steps for time in times))


def quiet_profile(activities: Iterable[ProfilerActivity], **options: Any) -> profile:
    """Make a PyTorch profiler that prints no lines ``USDT: ... profiler_start``.

    Kineto, on which it is built, prints them at log levels up to 6, and reads the level when it is
    used first. A level that the user has set stays.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=activities, **options)


def _synchronize(comms: Comms) -> None:
    if comms.device.type == "cuda":
        torch.cuda.synchronize(comms.device)


def events_of(found: Iterable[FunctionEvent]) -> Iterator[Event]:
    """Convert a profiler's own events, and leave out those that stand for a kernel once more.

    These are user ranges on the device, and NCCL's ranges on the host if it launched kernels.
    """
    host, kernels = [], []
    for event in found:
        if event.device_type.name == "CPU":
            host.append(event)
        elif not event.is_user_annotation:
            kernels.append(event)
    counted = any(re.match(COLLECTIVE_KERNEL, kernel.name) for kernel in kernels)
    for event in host:
        if not (counted and event.name.startswith("nccl:")):
            yield Event(event.name, *_moments(event), event.self_cpu_time_total * 1e-6)
    # A kernel has the number of the operation that launched it. Calls of the runtime are events of
    # the host, too, with numbers of their own, which may equal the numbers of other operations.
    launchers = {
        event.id: event
        for event in host
        if not getattr(event, "linked_correlation_id", 0) and not re.match(RUNTIME_CALL, event.name)
    }
    for kernel in kernels:
        launcher = launchers.get(getattr(kernel, "linked_correlation_id", 0))
        within: tuple[str, ...] = ()
        if re.match(COLLECTIVE_KERNEL, kernel.name):
            within = tuple(_launched_by(launcher, host))
        start, end = _moments(kernel)
        yield Event(kernel.name, start, end, end - start, within, device=True)


def _launched_by(launcher: FunctionEvent | None, host: Iterable[FunctionEvent]) -> Iterator[str]:
    """List NCCL's ranges that began in an operation, then the operation and those around it."""
    if launcher is None:
        return
    span = launcher.time_range
    for event in host:
        here = event.name.startswith("nccl:") and event.thread == launcher.thread
        if here and span.start <= event.time_range.start <= span.end:
            yield event.name
    while launcher is not None:
        yield launcher.name
        launcher = launcher.cpu_parent


def _moments(event: FunctionEvent) -> tuple[float, float]:
    return event.time_range.start * 1e-6, event.time_range.end * 1e-6
