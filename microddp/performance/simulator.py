"""A simulator of data-parallel steps on devices that nobody has at hand.

A step is a program (:mod:`microddp.program`), the same on every device. It is played with a clock
for each device and one lane for messages, or two for a strategy that sends inside nodes and between
them. A collective starts when the last device has reached it and the collective before in its lane
has ended, and lasts for :meth:`microddp.performance.network.Network.seconds`. Devices that are all
alike share one clock.

Computing may be slower while messages are under way, which take memory's bandwidth and processors.
Left out is a device that begins a collective's first rounds while another one is late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from microddp import local_sgd, sharding, torch_ddp  # noqa: F401 - each registers its own
from microddp.performance.network import Network
from microddp.program import Call, Op, Program, Work, write
from microddp.strategies import STRATEGIES


@dataclass(frozen=True)
class Way:
    """The way in which devices work together.

    Attributes:
        strategy: key of ``microddp.strategies.STRATEGIES``.
        algorithm: algorithm of collectives, as for
            :meth:`microddp.performance.network.Network.seconds`.
        bucket_cap_mb: size of a bucket in MiB, as for a strategy.
        accumulation: number of micro-batches in a step, each with the work of all layers.
        kept: share of a gradient's bytes that is sent; below 1 if it is compressed.
        every: number of steps from one meeting to the next.
        slowed: share of time that computing takes longer while messages are under way.

    Raises:
        ValueError: an unknown strategy, or a number out of its range.
    """

    strategy: str = "ddp"
    algorithm: str = "ring"
    bucket_cap_mb: float | None = None
    accumulation: int = 1
    kept: float = 1.0
    every: int = 1
    slowed: float = 0.0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"expected a strategy of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        for name in ("accumulation", "every"):
            count = getattr(self, name)
            if count != int(count) or count < 1:
                raise ValueError(f"expected {name} to be a whole number from 1 on, got {count}")
        if not 0 < self.kept <= 1:
            raise ValueError(f"expected kept above 0 and at most 1, got {self.kept}")
        if not 0 <= self.slowed < math.inf:
            raise ValueError(f"expected slowed to be 0 or more, got {self.slowed}")


def program(work: Work, way: Way, devices: int, step: int = 0, node: int = 1) -> list[Op]:
    """Write down what each device does in a step, in order.

    Args:
        work: work of a device.
        way: way in which the devices work together.
        devices: number of devices.
        step: number of the step, from 0: not every step has a meeting.
        node: number of devices in a node.
    """
    written = Program(
        work,
        devices,
        node=node,
        bucket_cap_mb=way.bucket_cap_mb,
        accumulation=way.accumulation,
        kept=way.kept,
        every=way.every,
        step=step,
    )
    write(STRATEGIES[way.strategy], written)
    return written.ops


@dataclass(frozen=True)
class Variation:
    """The variation of a device's computing, drawn for each device and step.

    Attributes:
        factors: times of one device's steps, divided by their median, of which one is drawn.
        rare: probability that a device pauses once in a step.
        pause: seconds of such a pause.

    Raises:
        ValueError: a number out of its range, or no factor.
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
    """The result of a simulation.

    Attributes:
        steps: seconds of each step, shape (steps,).
        exposed: mean seconds that a device waits in a step, for messages and for other devices.
        calls: collectives of the last step, in order.
        events: number of program lines that were played, over all clocks.
    """

    steps: NDArray[np.float64]
    exposed: float
    calls: tuple[Call, ...]
    events: int

    @property
    def step(self) -> float:
        """Seconds of the median step."""
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
        work: work of each device.
        network: network between the devices.
        way: way in which the devices work together.
        steps: number of steps.
        variation: variation of computing; without it one clock stands for all devices.
        seed: seed of the draws.

    Raises:
        ValueError: fewer than one step, or a collective that the network or algorithm lacks.
    """
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    drawn = np.random.default_rng(seed)
    # One clock is a number, as arrays of one take ten times as long.
    clock: Any = np.zeros(network.devices) if variation else 0.0
    clocks = network.devices if variation else 1
    last, mean, later, less = (np.max, np.mean, np.maximum, np.minimum)
    if not variation:
        last, mean, later, less = float, float, max, min  # type: ignore[assignment]
    lanes, waited, events = dict[str, float](), 0.0, 0
    ends = [0.0]
    calls: list[Call] = []
    programs = [
        program(work, way, network.devices, step, network.in_node)
        for step in range(min(steps, way.every))
    ]
    for step in range(steps):
        factor: Any = 1.0
        if variation:
            factor = drawn.choice(variation.factors, clocks)
            clock = clock + variation.pause * (drawn.random(clocks) < variation.rare)
        done: list[float] = []
        calls = []
        ops = programs[step % way.every]
        for op in ops:
            if op.start:
                call = op.start
                took = network.among(call.among).seconds(call.half, way.algorithm, call.nbytes)
                ready = 0.0 if call.after is None else done[call.after]
                done.append(max(lanes.get(call.among, 0.0), float(last(clock)), ready) + took)
                lanes[call.among] = done[-1]
                calls.append(call)
            elif op.wait is not None:
                waited += float(mean(later(done[op.wait] - clock, 0)))
                clock = later(clock, done[op.wait])
            else:
                alone = op.seconds * factor
                if way.slowed:
                    busy = later(max(lanes.values(), default=0.0) - clock, 0)
                    alone = alone + way.slowed * less(alone, busy / (1 + way.slowed))
                clock = clock + alone
        events += len(ops) * clocks
        ends.append(float(last(clock)))
    return Simulated(np.diff(ends), waited / steps, tuple(calls), events)
