"""A simulator of data-parallel steps: what many devices would take that nobody has at hand.

A step is a program (:mod:`microddp.program`), the same on every device. It is
played with a clock for each device and one lane for messages. A collective starts when the last
device has reached it and the one before has ended; what it takes is
:meth:`microddp.performance.network.Network.seconds`. Devices that are all alike have one clock for
all of them.

What is left out: that messages take memory's bandwidth or processors from computing, and that a
device may begin a collective's first rounds while another one is late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from microddp import local_sgd, sharding  # noqa: F401 - they register their strategies
from microddp.performance.network import Network
from microddp.program import Call, Op, Program, Work
from microddp.strategies import STRATEGIES


@dataclass(frozen=True)
class Way:
    """How the devices work together.

    Attributes:
        strategy: a key of ``microddp.strategies.STRATEGIES``.
        algorithm: of a collective, see ``ALGORITHMS`` of :mod:`microddp.performance.network`.
        bucket_cap_mb: as for a strategy of :mod:`microddp.strategies`.
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


def program(work: Work, way: Way, devices: int, step: int = 0) -> list[Op]:
    """What each device does in a step, in its order.

    Args:
        work: of a device.
        way: how they work together.
        devices: how many.
        step: its number, from 0, for what does not happen in each.
    """
    written = Program(
        work,
        devices,
        bucket_cap_mb=way.bucket_cap_mb,
        accumulation=way.accumulation,
        kept=way.kept,
        every=way.every,
        step=step,
    )
    STRATEGIES[way.strategy].program(written)
    return written.ops


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
