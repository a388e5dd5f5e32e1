"""What a profiler saw: operations and kernels, of which kind they are, and when they overlap."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.autograd.profiler_util import FunctionEvent

from microddp.timing import covered, in_both

ALL_REDUCE, OPTIMIZER, COLLECTIVES, OTHER = "all-reduce", "optimizer", "other collectives", "other"
# What stands first wins where an operation is made of others: attention is, of multiplications.
WHOLE = {"attention": r"attention|flash_|fmha", "convolution": r"conv|cudnn"}
PARTS = {
    "matrix multiplication": r"::_?(add|b|badd|scaled_)*mm\b|::(matmul|linear|mv|dot)\b|gemm"
    r"|cutlass",
    "copy": r"::_?(to_)?(copy|clone|contiguous|cat|stack|fill|zero)_?\b|Memcpy|Memset",
    "elementwise": r"::_?(foreach_|native_|fused_)?(add|addc\w+|sub|rsub|mul|div|neg|abs|pow|sqrt"
    r"|rsqrt|exp|log|lerp|cos|sin|tanh|sigmoid|silu|gelu|relu|threshold|clamp|where|sum|mean|max"
    r"|std|var|norm|batch_norm|layer_norm|rms_norm|group_norm|softmax|log_softmax|dropout|bernoulli"
    r"|mse_loss|nll_loss)(_(forward|backward|data|out))*_?\b|elementwise|reduce_kernel",
}
KINDS = (*PARTS, *WHOLE, OPTIMIZER, ALL_REDUCE, COLLECTIVES, OTHER)

# NCCL's and RCCL's: ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclDevKernel_Generic_1,
# void rcclGenericKernel<1, false>, mscclKernel_Sum_float_Simple_false.
COLLECTIVE_KERNEL = r"(void )?(nccl|rccl|msccl)"
RUNTIME_CALL = r"(cuda|cu|hip)[A-Z]"  # as cudaLaunchKernel, cuLaunchKernelEx, hipMemcpyAsync


@dataclass(frozen=True)
class Event:
    """Something the profiler saw on one rank.

    Attributes:
        name: of the operation, kernel or range.
        start: seconds.
        end: likewise.
        alone: seconds of it that are not a nested operation's.
        within: names of what it is part of, innermost first: of a kernel, the operation that
            launched it and what that is part of.
        device: whether it is a kernel.
    """

    name: str
    start: float
    end: float
    alone: float
    within: tuple[str, ...] = ()
    device: bool = False

    @property
    def kind(self) -> str:
        """Which of ``KINDS`` it counts as."""
        if re.match(COLLECTIVE_KERNEL if self.device else "nccl:|gloo:", self.name):
            # One kernel serves many collectives, whatever its name says: what launched it knows.
            calls = [name for name in self.within if re.match("nccl:|c10d::", name)]
            all_reduce = re.search(r"all_?reduce", " ".join(calls) or self.name, re.I)
            return ALL_REDUCE if all_reduce else COLLECTIVES
        # Of a kernel the operation tells more than its own name.
        names = (*self.within, self.name) if self.device else (self.name, *self.within)
        return _kind(names)

    @property
    def outermost(self) -> bool:
        """Whether it is no part of an operation of the same kind, and counts as a call."""
        nested = self.within and is_operation(self.within[0])
        return self.device or not nested or _kind(self.within) != self.kind

    @property
    def collective(self) -> bool:
        """Whether it is communication, and no computation."""
        return self.kind in (ALL_REDUCE, COLLECTIVES)

    @property
    def operation(self) -> bool:
        """Whether it computes, and is no mere range, nor a node of autograd's graph."""
        return self.device or is_operation(self.name)


@dataclass(frozen=True)
class RankProfile:
    """Where the time of a step went on one rank. All times are seconds a step.

    Attributes:
        wall: from the beginning of a step to the next one's.
        kinds: for each of ``KINDS`` its time and the number of its operations, or kernels. The
            time of collectives is that in which at least one was under way.
        hidden: time in which an all-reduce was under way and the rank computed.
        computing: time in which the rank computed: operations on CPU, kernels on CUDA.
        host: time in which an operation was going on on the host, launching kernels or computing.
        idle: time in which the rank neither computed nor had a collective under way.
        ranges: of each all-reduce of all steps, in the order they began, divided by the steps.
    """

    wall: float
    kinds: dict[str, tuple[float, float]]
    hidden: float
    computing: float
    host: float
    idle: float
    ranges: tuple[float, ...]

    @property
    def all_reduce(self) -> float:
        """Time in which an all-reduce was under way, seconds a step."""
        return self.kinds[ALL_REDUCE][0]

    @property
    def busy(self) -> float:
        """The sum over all kinds, computation and collectives, seconds a step."""
        return sum(seconds for seconds, _ in self.kinds.values())


def summarize(
    events: Sequence[Event], seconds: float, steps: int = 1, *, kernels: bool = False
) -> RankProfile:
    """Where the time of one rank went.

    Args:
        events: all of that rank.
        seconds: that all steps took.
        steps: the number of steps.
        kernels: whether kernels compute, on CUDA; else operations on the host do.
    """
    host = [e for e in events if e.operation and not e.device and not e.collective]
    compute = [e for e in events if e.device and not e.collective] if kernels else host
    all_reduces = [e for e in events if e.kind == ALL_REDUCE]
    others = [e for e in events if e.kind == COLLECTIVES]
    times, calls = dict.fromkeys(KINDS, 0.0), Counter(e.kind for e in compute if e.outermost)
    for event in compute:
        times[event.kind] += event.alone
    for kind, ranges in ((ALL_REDUCE, all_reduces), (COLLECTIVES, others)):
        times[kind], calls[kind] = covered(ranges), len(ranges)
    return RankProfile(
        wall=seconds / steps,
        kinds={kind: (times[kind] / steps, calls[kind] / steps) for kind in KINDS},
        hidden=in_both(compute, all_reduces) / steps,
        computing=covered(compute) / steps,
        host=covered(host) / steps,
        idle=(seconds - covered([*compute, *all_reduces, *others])) / steps,
        ranges=tuple((e.end - e.start) / steps for e in sorted(all_reduces, key=lambda e: e.start)),
    )


def events_of(found: Iterable[FunctionEvent]) -> Iterator[Event]:
    """A profiler's own events as these, without those that tell of a kernel once more.

    Those are user ranges on the device, and NCCL's ranges on the host if it launched kernels.
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
            alone = event.self_cpu_time_total * 1e-6
            yield Event(event.name, *_moments(event), alone, _with_parents(event.cpu_parent))
    # A kernel has the number of the operation that launched it. Calls of the runtime are events of
    # the host, too, with numbers of their own, which may be those of quite other operations.
    launchers = {
        event.id: event
        for event in host
        if not getattr(event, "linked_correlation_id", 0) and not re.match(RUNTIME_CALL, event.name)
    }
    for kernel in kernels:
        launcher = launchers.get(getattr(kernel, "linked_correlation_id", 0))
        within = _with_parents(launcher)
        if launcher and re.match(COLLECTIVE_KERNEL, kernel.name):
            within = (*_calls_within(launcher, host), *within)
        start, end = _moments(kernel)
        yield Event(kernel.name, start, end, end - start, within, device=True)


def _calls_within(launcher: FunctionEvent, host: Iterable[FunctionEvent]) -> Iterator[str]:
    """NCCL's ranges that began in an operation: they end on another thread, as nobody's child."""
    span = launcher.time_range
    for event in host:
        here = event.name.startswith("nccl:") and event.thread == launcher.thread
        if here and span.start <= event.time_range.start <= span.end:
            yield event.name


def _with_parents(event: FunctionEvent | None) -> tuple[str, ...]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return tuple(names)


def _moments(event: FunctionEvent) -> tuple[float, float]:
    return event.time_range.start * 1e-6, event.time_range.end * 1e-6


@functools.cache
def _kind(names: tuple[str, ...]) -> str:
    """The kind of what has these names, its own or the most telling first."""
    if any(name.startswith("Optimizer.") for name in names):
        return OPTIMIZER
    for kind, pattern in WHOLE.items():
        if any(re.search(pattern, name) for name in names):
            return kind
    found = (k for name in names for k, p in PARTS.items() if re.search(p, name))
    return next(found, OTHER)


def is_operation(name: str) -> bool:
    outside = ("autograd::", "torch::autograd::", "c10d::")
    return "::" in name and not name.startswith(outside)
