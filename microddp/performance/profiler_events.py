"""Events of a profiler: operations and kernels, their kinds, and when they overlap."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.autograd.profiler_util import FunctionEvent

from microddp.step_times import covered, in_both

ALL_REDUCE, OPTIMIZER, COLLECTIVES, OTHER = "all-reduce", "optimizer", "other collectives", "other"
# The first match wins where an operation is made of others, as attention is of multiplications.
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
    """An operation, kernel or range that the profiler saw on one rank.

    Attributes:
        name: name of the operation, kernel or range.
        start: beginning, seconds.
        end: end, seconds.
        alone: seconds that are not a nested operation's.
        within: names of the events around it, innermost first; around a kernel, the operation that
            launched it and the events around that.
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
        """Its kind, one of ``KINDS``."""
        if re.match(COLLECTIVE_KERNEL if self.device else "nccl:|gloo:", self.name):
            # One kernel serves many collectives, whatever its name says: its launcher knows.
            calls = [name for name in self.within if re.match("nccl:|c10d::", name)]
            all_reduce = re.search(r"all_?reduce", " ".join(calls) or self.name, re.I)
            return ALL_REDUCE if all_reduce else COLLECTIVES
        # Of a kernel the operation tells more than its own name.
        names = (*self.within, self.name) if self.device else (self.name, *self.within)
        return _kind(names)

    @property
    def outermost(self) -> bool:
        """True if it is no part of an operation of the same kind, and so counts as a call."""
        nested = self.within and is_operation(self.within[0])
        return self.device or not nested or _kind(self.within) != self.kind

    @property
    def collective(self) -> bool:
        """True if it communicates, and does not compute."""
        return self.kind in (ALL_REDUCE, COLLECTIVES)

    @property
    def operation(self) -> bool:
        """True if it computes, and is neither a mere range nor a node of autograd's graph."""
        return self.device or is_operation(self.name)


@dataclass(frozen=True)
class RankProfile:
    """The time of a step on one rank, in seconds a step.

    Attributes:
        wall: time from the beginning of a step to the next one's.
        kinds: time and number of operations or kernels, by kind of ``KINDS``. The time of
            collectives is the time in which at least one was under way.
        hidden: time in which an all-reduce was under way and the rank computed.
        computing: time in which the rank computed: operations on CPU, kernels on CUDA.
        host: time in which an operation was going on on the host, launching kernels or computing.
        idle: time in which the rank neither computed nor had a collective under way.
    """

    wall: float
    kinds: dict[str, tuple[float, float]]
    hidden: float
    computing: float
    host: float
    idle: float

    @property
    def all_reduce(self) -> float:
        """Seconds a step in which an all-reduce was under way."""
        return self.kinds[ALL_REDUCE][0]

    @property
    def busy(self) -> float:
        """The sum over all kinds, computation and collectives, seconds a step."""
        return sum(seconds for seconds, _ in self.kinds.values())


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
    )


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
            alone = event.self_cpu_time_total * 1e-6
            yield Event(event.name, *_moments(event), alone, _with_parents(event.cpu_parent))
    # A kernel has the number of the operation that launched it. Calls of the runtime are events of
    # the host, too, with numbers of their own, which may equal the numbers of other operations.
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
    """List NCCL's ranges that began in an operation, which end on another thread without parent."""
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
    """Find the kind of an event by its name and the names around it, the most telling first."""
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
