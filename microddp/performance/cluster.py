"""A simulator of data-parallel steps: what many devices would take that nobody has at hand.

A step is a program, the same on every device: compute, start a collective, wait for one. It is
played with a clock for each device and one lane for messages. A collective starts when the last
device has reached it and the one before has ended; what it takes is
:meth:`microddp.performance.network.Network.seconds`. Devices that are all alike have one clock for
all of them.

What is left out: that messages take memory's bandwidth or processors from computing, and that a
device may begin a collective's first rounds while another one is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from microddp.bucketing import bucket_caps, plan_buckets
from microddp.performance.network import Network

SIMULATED = ("none", "naive", "hooks", "ddp", "zero1", "zero2", "zero3", "local")


@dataclass(frozen=True)
class Layer:
    """What a layer takes on one device, for the samples of one step.

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
    """What a device does in a step, without the others.

    Attributes:
        layers: in the order of forward.
        optimizer: seconds, for all parameters.
        gradient_size: bytes of each value of a gradient as it is sent.
        parameter_size: likewise, of a parameter.
        copy: seconds to bring a byte of a gradient to where it is sent from.
    """

    layers: tuple[Layer, ...]
    optimizer: float = 0.0
    gradient_size: float = 4
    parameter_size: float = 4
    copy: float = 0.0

    @classmethod
    def from_operations(
        cls, parameters: float, layers: int, tokens: float, rate: float, value_size: float = 2
    ) -> Work:
        """The work of a transformer, from its operations: 6 for each parameter and token.

        Args:
            parameters: of all layers together.
            layers: equal ones.
            tokens: of a device and step.
            rate: operations a second that the device reaches.
            value_size: bytes of a value that is sent.

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
        return cls((layer,) * layers, gradient_size=value_size, parameter_size=value_size)

    @property
    def seconds(self) -> float:
        """A step of one device alone."""
        return sum(layer.forward + layer.backward for layer in self.layers) + self.optimizer


@dataclass(frozen=True)
class Way:
    """How the devices work together.

    Attributes:
        strategy: of ``SIMULATED``; ``"local"`` averages parameters every so many steps.
        algorithm: of a collective, see ``ALGORITHMS`` of :mod:`microddp.performance.network`.
        bucket_cap_mb: as for a strategy of :mod:`microddp.schedule`.
        accumulation: micro-batches of a step, each with the work of all layers.
        kept: the share of a gradient's bytes that is sent, where it is compressed.
        every: steps from one meeting to the next.
    """

    strategy: str = "ddp"
    algorithm: str = "ring"
    bucket_cap_mb: float | None = None
    accumulation: int = 1
    kept: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in SIMULATED:
            raise ValueError(
                f"expected a strategy of {', '.join(SIMULATED)}, got {self.strategy!r}"
            )
        for name in ("accumulation", "every"):
            count = getattr(self, name)
            if count != int(count) or count < 1:
                raise ValueError(f"expected {name} to be a whole number from 1 on, got {count}")
        if not 0 < self.kept <= 1:
            raise ValueError(f"expected kept above 0 and at most 1, got {self.kept}")


@dataclass(frozen=True)
class Call:
    """A collective: its name in ``torch.distributed``, without ``_``, and bytes of the tensor."""

    half: str
    nbytes: float


@dataclass(frozen=True)
class Op:
    """One line of a program: seconds of computing; or a call to start, or to wait for.

    A call is waited for by the number of its start in the step.
    """

    seconds: float = 0.0
    start: Call | None = None
    wait: int | None = None


class _Program:
    """Ops in the order in which a device comes to them."""

    def __init__(self, work: Work, way: Way, devices: int) -> None:
        self.work, self.way, self.devices = work, way, devices
        self.ops: list[Op] = []
        self.started = 0

    def compute(self, seconds: float) -> None:
        if seconds:
            self.ops.append(Op(seconds))

    def start(self, half: str, nbytes: float) -> int:
        self.ops.append(Op(start=Call(half, nbytes)))
        self.started += 1
        return self.started - 1

    def wait(self, call: int) -> None:
        self.ops.append(Op(wait=call))

    def forward(self) -> None:
        for layer in self.work.layers:
            self.compute(layer.forward)

    def backward_alone(self) -> None:
        for layer in reversed(self.work.layers):
            self.compute(layer.backward)

    # ---- what is sent together

    def buckets(self) -> list[list[tuple[int, int]]]:
        """Tensors that travel together, as layer and values, in the order of sending."""
        ordered = [
            (i, count)
            for i, layer in reversed([*enumerate(self.work.layers)])
            for count in reversed(layer.tensors)
        ]
        if self.way.strategy == "naive":  # after backward, in the order of the parameters
            return [[each] for each in reversed(ordered)]
        if self.way.strategy == "hooks":
            return [[each] for each in ordered]
        # A dtype of so many bytes is all that the plan looks at.
        kind = {2: torch.float16, 4: torch.float32}[int(self.work.gradient_size)]
        sizes = [torch.empty(count, dtype=kind, device="meta") for _, count in ordered]
        plan = plan_buckets(sizes, bucket_caps(self.way.bucket_cap_mb))
        return [[ordered[i] for i in members] for members in plan]

    def padded(self, values: int, size: float) -> float:
        """Bytes of a flat tensor that the devices divide evenly."""
        return -(-values // self.devices) * self.devices * size

    # ---- the ways

    def micro_batches(self, last: bool) -> None:
        """Forward and backward of all but the last micro-batch, which send nothing."""
        for _ in range(self.way.accumulation - 1 + last):
            self.forward()
            self.backward_alone()

    def replicas(self) -> None:
        """All-reduces: after backward (naive), or as soon as their gradients are there."""
        way, work = self.way, self.work
        self.micro_batches(last=way.strategy in ("none", "naive", "local"))
        buckets = [] if way.strategy in ("none", "local") else self.buckets()
        sizes = [sum(count for _, count in b) * work.gradient_size * way.kept for b in buckets]
        if way.strategy == "naive":
            for nbytes in sizes:
                self.wait(self.start("all_reduce", nbytes))
        elif buckets:
            self.forward()
            self.backward(buckets, "all_reduce", sizes)
        self.compute(work.optimizer)

    def backward(
        self, buckets: Sequence[Sequence[tuple[int, int]]], half: str, sizes: Sequence[float]
    ) -> None:
        """Start each bucket's collective with its last gradient, and wait for all."""
        work, calls, sent = self.work, [], 0
        for i, layer in reversed([*enumerate(work.layers)]):
            self.compute(layer.backward)
            while sent < len(buckets) and min(place for place, _ in buckets[sent]) >= i:
                values = sum(count for _, count in buckets[sent])
                self.compute(values * work.gradient_size * work.copy)
                calls.append(self.start(half, sizes[sent]))
                sent += 1
        for call in calls:
            self.wait(call)

    def sharded(self) -> None:
        """Stages 1 and 2: parameters gathered in forward, gradients reduced in backward."""
        work, buckets = self.work, self.buckets()
        values = [sum(count for _, count in bucket) for bucket in buckets]
        needed: dict[int, list[int]] = {}
        for bucket, count in reversed([*zip(buckets, values, strict=True)]):
            call = self.start("all_gather", self.padded(count, work.parameter_size))
            for place in {place for place, _ in bucket}:
                needed.setdefault(place, []).append(call)
        for i, layer in enumerate(work.layers):
            for call in needed.get(i, ()):
                self.wait(call)
            self.compute(layer.forward)
        for _ in range(self.way.accumulation - 1):
            self.backward_alone()
            self.forward()
        sizes = [self.padded(count, work.gradient_size) for count in values]
        self.backward(buckets, "reduce_scatter", sizes)
        self.compute(work.optimizer / self.devices)

    def fully_sharded(self) -> None:
        """Stage 3: a layer gathered before its forward and its backward, the next one meanwhile."""
        work = self.work
        layers = [*enumerate(work.layers)]
        values = [sum(layer.tensors) for layer in work.layers]
        reduced: list[int] = []
        for _ in range(self.way.accumulation):
            for order, phase in ((layers, "forward"), (layers[::-1], "backward")):
                coming: dict[int, int] = {}

                def gather(i: int, coming: dict[int, int] = coming) -> None:
                    if i not in coming:
                        size = self.padded(values[i], work.parameter_size)
                        coming[i] = self.start("all_gather", size)

                for (i, layer), following in zip(order, [*order[1:], None], strict=True):
                    gather(i)
                    if following:
                        gather(following[0])
                    self.wait(coming[i])
                    self.compute(getattr(layer, phase))
                    if phase == "backward":
                        self.compute(values[i] * work.gradient_size * work.copy)
                        size = self.padded(values[i], work.gradient_size)
                        reduced.append(self.start("reduce_scatter", size))
                        if len(reduced) > 1:  # the memory of one is needed for the next
                            self.wait(reduced[-2])
        self.wait(reduced[-1])
        self.compute(work.optimizer / self.devices)


def program(work: Work, way: Way, devices: int, step: int = 0) -> list[Op]:
    """What each device does in a step, in its order.

    Args:
        work: of a device.
        way: how they work together.
        devices: how many.
        step: its number, from 0, for what does not happen in each.
    """
    made = _Program(work, way, devices)
    if way.strategy == "zero3":
        made.fully_sharded()
    elif way.strategy in ("zero1", "zero2"):
        made.sharded()
    else:
        made.replicas()
        if way.strategy == "local" and (step + 1) % way.every == 0:
            values = sum(sum(layer.tensors) for layer in work.layers)
            made.wait(made.start("all_reduce", values * work.parameter_size))
    return made.ops


@dataclass(frozen=True)
class Variation:
    """How much longer a device computes than it mostly does.

    Attributes:
        factors: that steps of one device have taken, in their median; one is drawn for each device
            and step.
        rare: the probability that a device has to wait once in a step, for something else.
        pause: seconds of that.
    """

    factors: tuple[float, ...] = (1.0,)
    rare: float = 0.0
    pause: float = 0.0

    def __post_init__(self) -> None:
        if not self.factors or min(self.factors) <= 0:
            raise ValueError(f"expected factors above 0, got {self.factors}")
        if not 0 <= self.rare <= 1 or self.pause < 0:
            raise ValueError(
                f"expected a probability, and a pause of 0 seconds or more, got {self.rare} and "
                f"{self.pause}"
            )


@dataclass(frozen=True)
class Simulated:
    """What a simulation gave.

    Attributes:
        steps: seconds of each.
        exposed: seconds that a device waits in a step, in the mean: for messages, and for others.
        calls: of the last step, in their order.
        events: lines of programs that were played, of all devices that were.
    """

    steps: NDArray[np.float64]
    exposed: float
    calls: tuple[Call, ...]
    events: int

    @property
    def step(self) -> float:
        """Their median."""
        return float(np.median(self.steps))


def simulate(
    work: Work,
    network: Network,
    way: Way,
    *,
    steps: int = 1,
    variation: Variation | None = None,
    seed: int = 0,
) -> Simulated:
    """Play steps of all devices.

    Args:
        work: of each device.
        network: between them.
        way: how they work together.
        steps: how many; those of devices that are alike are all alike, too.
        variation: of computing; without, one clock stands for all devices.
        seed: of what is drawn.

    Raises:
        ValueError: fewer than one step, or a collective that the network or algorithm has not.
    """
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    drawn = np.random.default_rng(seed)
    clock = np.zeros(network.devices if variation else 1)
    lane, waited, events = 0.0, 0.0, 0
    ends = [0.0]
    calls: list[Call] = []
    programs = [program(work, way, network.devices, step) for step in range(min(steps, way.every))]
    for step in range(steps):
        factor: NDArray[np.float64] | float = 1.0
        if variation:
            factor = drawn.choice(variation.factors, len(clock))
            clock += variation.pause * (drawn.random(len(clock)) < variation.rare)
        done: list[float] = []
        calls = []
        ops = programs[step % way.every]
        for op in ops:
            if op.start:
                took = network.seconds(op.start.half, way.algorithm, op.start.nbytes)
                lane = max(lane, float(clock.max())) + took
                done.append(lane)
                calls.append(op.start)
            elif op.wait is not None:
                waited += float(np.maximum(done[op.wait] - clock, 0).mean())
                np.maximum(clock, done[op.wait], out=clock)
            else:
                clock += op.seconds * factor
        events += len(ops) * len(clock)
        ends.append(float(clock.max()))
    return Simulated(np.diff(ends), waited / steps, tuple(calls), events)
