"""The limit of a training step: computing, memory, communication, or the host that gives orders.

Every operation of a step is counted with its floating point operations and the bytes it reads and
writes. At this machine's measured rates each would take some time for computing, some for memory,
and some to be started at all; the longest of the three limits it. That is the roofline model
(Williams, Waterman and Patterson, "Roofline", 2009), one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from microddp.comms import Comms
from microddp.report import MIB
from microddp.timing import measure

ADVICE = {
    "compute": "a precision with faster instructions here, or a device that multiplies faster",
    "memory": "fused operations, a lower precision, or a larger batch for the same weights",
    "communication": "a larger batch or gradient accumulation, overlap, or fewer bytes",
    "host": "a larger batch, fused operations, or torch.compile",
}


@dataclass(frozen=True)
class Rates:
    """The fastest rates of this rank, measured while the others do the same.

    Attributes:
        flops: floating point operations a second of a large matrix multiplication, in float32.
        nbytes: bytes a second, read and written, of a copy that no cache holds.
        call: seconds to start an operation on a few values, for autograd.
    """

    flops: float
    nbytes: float
    call: float


MATRIX = {"cpu": 512, "cuda": 4096}  # rows and columns that keep a device of this kind busy


def measure_rates(comms: Comms) -> Rates:
    """Measure this machine's rates on all ranks at once. A collective."""
    size = MATRIX[comms.device.type]
    a, b, out = (torch.ones(size, size, device=comms.device) for _ in range(3))
    source, target = torch.zeros(2, 16 * MIB, device=comms.device)
    tiny, calls = torch.zeros(8, device=comms.device, requires_grad=True), 200

    def start_many() -> None:
        chain = tiny
        for _ in range(calls):
            chain = chain * 2
        chain.sum().backward()  # type: ignore[no-untyped-call]

    timings = measure(
        {
            "multiply": lambda: torch.mm(a, b, out=out),
            "copy": lambda: target.copy_(source),
            "start": start_many,
        },
        comms,
        repeat=9,
    )
    return Rates(
        # Ceilings: whatever disturbs a call makes it longer.
        flops=2 * size**3 / min(timings["multiply"].seconds),
        nbytes=2 * source.nbytes / min(timings["copy"].seconds),
        call=min(timings["start"].seconds) / (2 * calls),  # forward, then backward
    )


@dataclass(frozen=True)
class Operation:
    """One counted operation of a step.

    Attributes:
        name: PyTorch's name.
        flops: number of multiplications and additions of matrix multiplications; else 0.
        nbytes: bytes of the tensors that it reads and writes.
    """

    name: str
    flops: int
    nbytes: int


class WorkCounter(TorchDispatchMode):
    """Counts every operation that PyTorch runs in the block, backward included.

    Attributes:
        operations: operations in the order in which they ran.

    Example:
        >>> with WorkCounter() as counter:
        ...     torch.ones(2, 3) @ torch.ones(3, 4)
        >>> sum(operation.flops for operation in counter.operations)
        48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = _tensors((args, kwargs)), _tensors(result)
        # Views move no bytes; the cost of collectives is measured, not counted.
        if func.is_view or not written or func.namespace == "c10d":
            return result
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count else 0
        # A tensor that is changed in place is read and written.
        nbytes = sum(tensor.nbytes for tensor in (*read, *written))
        self.operations.append(Operation(func.name(), int(flops), nbytes))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Verdict:
    """The limit of a step. Prints as a few lines.

    Attributes:
        seconds: seconds of the operations that a resource limits, at the measured rates, by the
            resource; for communication, the exposed seconds that were measured.
        measured: seconds of the step.
        flops: number of floating point operations.
        nbytes: bytes read and written.
        operations: number of operations.
        rates: rates from which the seconds come.
    """

    seconds: dict[str, float]
    measured: float
    flops: int
    nbytes: int
    operations: int
    rates: Rates

    @property
    def bottleneck(self) -> str:
        """The resource with the largest share, a key of :attr:`seconds`."""
        return max(self.seconds, key=lambda resource: self.seconds[resource])

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        shares = ", ".join(f"{name} {part / total:.0%}" for name, part in self.seconds.items())
        rates = self.rates
        return (
            f"{self.bottleneck} bound: {shares}\n"
            f"  together {total * 1e3:.3g} ms at measured rates; the step took "
            f"{self.measured * 1e3:.3g} ms\n"
            f"  counted: {self.operations} operations, {self.flops / 1e9:.3g} GFLOP, "
            f"{self.nbytes / 1e9:.3g} GB read or written\n"
            f"  rates: {rates.flops / 1e9:.3g} GFLOP/s, {rates.nbytes / 1e9:.3g} GB/s, "
            f"{rates.call * 1e6:.3g} us to start an operation\n"
            f"  would help most: {ADVICE[self.bottleneck]}"
        )


def find_bottleneck(
    step: Callable[[], object], rates: Rates, *, measured: float, exposed: float = 0.0
) -> Verdict:
    """Find the resource that limits a step.

    Args:
        step: call that runs the step once on this rank, so that it can be counted.
        rates: rates from :func:`measure_rates`.
        measured: seconds of the step.
        exposed: seconds of ``measured`` spent waiting for communication.
    """
    with WorkCounter() as counter:
        step()
    return judge(counter.operations, rates, measured=measured, exposed=exposed)


def judge(
    operations: Iterable[Operation], rates: Rates, *, measured: float, exposed: float = 0.0
) -> Verdict:
    """Judge counted operations; the other arguments are those of :func:`find_bottleneck`."""
    seconds = {"compute": 0.0, "memory": 0.0, "communication": exposed, "host": 0.0}
    flops = nbytes = number = 0
    for operation in operations:
        needs = {
            "compute": operation.flops / rates.flops,
            "memory": operation.nbytes / rates.nbytes,
            "host": rates.call,
        }
        limit = max(needs, key=lambda resource: needs[resource])
        seconds[limit] += needs[limit]
        flops += operation.flops
        nbytes += operation.nbytes
        number += 1
    return Verdict(seconds, measured, flops, nbytes, number, rates)
