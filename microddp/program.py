"""A step written down as data: what each device computes, starts and waits for, in its order.

So what a strategy does can be looked at, and played on devices that nobody has at hand. One that
sends anything but each gradient once writes its own, as a class method ``program(program)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from microddp.buckets import bucket_caps, plan_buckets
from microddp.step import Strategy


@dataclass(frozen=True)
class Layer:
    """The time of a layer on one device, for the samples of one step.

    Attributes:
        forward: seconds.
        backward: seconds, until all gradients of the layer are there.
        tensors: how many values each of its parameters has.
    """

    forward: float
    backward: float
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """The work of a device in a step, without the others.

    Attributes:
        layers: in the order of forward.
        optimizer: seconds of the optimizer's step, for all parameters.
        gradient_size: bytes of each value of a gradient as it is sent.
        parameter_size: bytes of each value of a parameter as it is sent.
        copy: seconds to copy a byte of a gradient to where it is sent from.
    """

    layers: tuple[Layer, ...]
    optimizer: float = 0.0
    gradient_size: float = 4
    parameter_size: float = 4
    copy: float = 0.0

    @classmethod
    def from_operations(
        cls,
        parameters: float,
        layers: int,
        tokens: float,
        rate: float,
        value_size: float = 2,
        *,
        gradient_size: float | None = None,
    ) -> Work:
        """The work of a transformer, from its operations: 6 for each parameter and token.

        Args:
            parameters: of all layers together.
            layers: equal ones.
            tokens: of a device and step.
            rate: operations a second that the device reaches.
            value_size: bytes of a value of a parameter that is sent.
            gradient_size: bytes of a value of a gradient that is sent; default: ``value_size``.

        Raises:
            ValueError: a number is not above 0.

        Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1.
        """
        given = {"parameters": parameters, "layers": layers, "tokens": tokens, "rate": rate}
        for name, number in given.items():
            if not 0 < number < float("inf"):
                raise ValueError(f"expected {name} above 0, got {number}")
        forward = 2 * parameters * tokens / rate / layers
        layer = Layer(forward, 2 * forward, (round(parameters / layers),))
        sizes = {"gradient_size": gradient_size or value_size, "parameter_size": value_size}
        return cls((layer,) * layers, **sizes)

    @property
    def seconds(self) -> float:
        """A step of one device alone."""
        return sum(layer.forward + layer.backward for layer in self.layers) + self.optimizer

    @property
    def values(self) -> int:
        """Number of values of all parameters together."""
        return sum(sum(layer.tensors) for layer in self.layers)


@dataclass(frozen=True)
class Call:
    """A collective of a step.

    Attributes:
        half: its name in ``torch.distributed``.
        nbytes: bytes of the whole tensor.
        among: ``"all"`` devices; those of each ``"node"``; or ``"replicas"``, those with the same
            number in each node. Calls among others do not wait for each other, where
            all devices are alike.
        after: number of a call of the step whose result it takes, if it does.
    """

    half: str
    nbytes: float
    among: str = "all"
    after: int | None = None


@dataclass(frozen=True)
class Op:
    """One line of a program: seconds of computing; or a call to start, or to wait for.

    A call is waited for by the number of its start in the step.
    """

    seconds: float = 0.0
    start: Call | None = None
    wait: int | None = None


Gradients = Sequence[tuple[int, int]]  # that travel together: of which layer, and how many values


@dataclass
class Program:
    """Ops in the order in which a device comes to them.

    Attributes:
        work: of a device.
        devices: how many there are, all alike.
        node: how many are in a node.
        bucket_cap_mb: as for a strategy.
        accumulation: micro-batches of a step, each with the work of all layers.
        kept: the share of a gradient's bytes that is sent, where it is compressed.
        every: steps from one meeting to the next, where weights are averaged.
        step: its number, from 0, for what does not happen in each.
        ops: that were written so far.
    """

    work: Work
    devices: int
    node: int
    bucket_cap_mb: float | None
    accumulation: int
    kept: float
    every: int
    step: int
    ops: list[Op] = field(default_factory=list, init=False)
    _started: int = field(default=0, init=False)

    def compute(self, seconds: float) -> None:
        """Write down some computing."""
        if seconds:
            self.ops.append(Op(seconds))

    def start(self, half: str, nbytes: float, among: str = "all", after: int | None = None) -> int:
        """Write down that a collective is started; returns its number, for :meth:`wait`."""
        self.ops.append(Op(start=Call(half, nbytes, among, after)))
        self._started += 1
        return self._started - 1

    def wait(self, call: int) -> None:
        """Write down that a collective is waited for."""
        self.ops.append(Op(wait=call))

    # ---- what several strategies do

    def forward(self) -> None:
        """Write down the forward pass of all layers."""
        for layer in self.work.layers:
            self.compute(layer.forward)

    def backward_alone(self) -> None:
        """Write down a backward pass that sends nothing."""
        for layer in reversed(self.work.layers):
            self.compute(layer.backward)

    def micro_batches(self, count: int) -> None:
        """Write down forward and backward of micro-batches that send nothing."""
        for _ in range(count):
            self.forward()
            self.backward_alone()

    def copy(self, gradients: Gradients) -> None:
        """Write down that gradients are brought to where they are sent from."""
        values = sum(count for _, count in gradients)
        self.compute(values * self.work.gradient_size * self.work.copy)

    def backward(
        self,
        buckets: Sequence[Gradients],
        half: str,
        size: Callable[[Gradients], float],
        most: int | None = None,
    ) -> None:
        """Write down a backward pass that starts each bucket's collective with its last gradient.

        Then all are waited for.

        Args:
            buckets: gradients that travel together, in the order of sending.
            half: name of the collective.
            size: function from a bucket to the bytes of its tensor.
            most: number of collectives under way, beyond which backward waits; ``None``: any.
        """
        calls: list[int] = []
        for i, layer in reversed([*enumerate(self.work.layers)]):
            self.compute(layer.backward)
            for bucket in buckets[len(calls) :]:
                if min(place for place, _ in bucket) < i:
                    break
                self.copy(bucket)
                calls.append(self.start(half, size(bucket)))
                if most and len(calls) > most:
                    self.wait(calls[-1 - most])
        for call in calls[-most:] if most else calls:
            self.wait(call)

    # ---- what is sent together, and how large it is

    def buckets(self, overlaps: bool, together: bool) -> list[Gradients]:
        """The gradients that travel together, in the order of sending.

        Args:
            overlaps: whether they are sent during backward, or afterwards, in the order of layers.
            together: whether buckets are filled, or each parameter's gradient travels alone.
        """
        ordered = [
            (i, count) for i, layer in enumerate(self.work.layers) for count in layer.tensors
        ]
        if overlaps:
            ordered.reverse()
        if not together:
            return [[each] for each in ordered]
        nbytes = [int(count * self.work.gradient_size) for _, count in ordered]
        # Of tensors of one kind, the plan looks at the bytes only.
        tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in nbytes]
        plan = plan_buckets(tensors, bucket_caps(self.bucket_cap_mb))
        return [[ordered[i] for i in members] for members in plan]

    def gradient_bytes(self, gradients: Gradients) -> float:
        """Bytes that are sent of gradients."""
        return sum(count for _, count in gradients) * self.work.gradient_size * self.kept

    def padded(self, gradients: Gradients, size: float, parts: int | None = None) -> float:
        """Bytes of a flat tensor of as many values that the devices divide evenly.

        Args:
            gradients: whose values, or whose parameters'.
            size: bytes of a value.
            parts: into how many it is divided; default: the devices.
        """
        values, parts = sum(count for _, count in gradients), parts or self.devices
        return -(-values // parts) * parts * size


def write(kind: type[Strategy], program: Program) -> None:
    """Write down a step: as the strategy's own ``program`` does, or each gradient averaged once."""
    own: Callable[[Program], None] | None = getattr(kind, "program", None)
    if own is not None:
        own(program)
        return
    buckets = program.buckets(kind.overlaps, kind.buckets) if kind.averages else []
    program.micro_batches(program.accumulation - kind.overlaps)
    if kind.overlaps:
        program.forward()
        program.backward(buckets, "all_reduce", program.gradient_bytes)
    else:
        for bucket in buckets:
            program.wait(program.start("all_reduce", program.gradient_bytes(bucket)))
    program.compute(program.work.optimizer)
