"""A simulator of data-parallel steps on devices that nobody has at hand.

A step is a program (:mod:`microddp.program`), the same on every device. Devices are all alike, so
one clock stands for them. It has one lane for messages, or two for a strategy that sends inside
nodes and between them. A collective starts when the devices have reached it and the collective
before in its lane has ended, and lasts for :meth:`microddp.performance.network.Network.seconds`.

Computing may be slower while messages are under way, which take memory's bandwidth and processors.
Left out are devices that are slower than others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from microddp import local_sgd, sharding, torch_ddp  # noqa: F401 - each registers its own
from microddp.performance.network import Network, check_whole
from microddp.program import Call, Op, Program, Work, write
from microddp.strategies import STRATEGIES


@dataclass(frozen=True)
class Way:
    """The way in which devices work together.

    Attributes:
        strategy: key of ``microddp.strategies.STRATEGIES``.
        algorithm: ``"ring"`` or ``"nccl"``, as for
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
        check_whole(accumulation=self.accumulation, every=self.every)
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
class Simulated:
    """The result of a simulation.

    Attributes:
        steps: seconds of each step, shape (steps,).
        exposed: mean seconds of a step in which a device waits for messages.
        calls: collectives of the last step, in order.
    """

    steps: NDArray[np.float64]
    exposed: float
    calls: tuple[Call, ...]

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return float(np.median(self.steps))


def simulate(work: Work, network: Network, way: Way, *, steps: int = 1) -> Simulated:
    """Play steps of all devices, for which one clock stands.

    Args:
        work: work of each device.
        network: network between the devices.
        way: way in which the devices work together.
        steps: number of steps.

    Raises:
        ValueError: fewer than one step, or an unknown algorithm.
    """
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    clock, waited, ends = 0.0, 0.0, [0.0]
    lanes: dict[str, float] = {}
    calls: list[Call] = []
    programs = [
        program(work, way, network.devices, step, network.in_node)
        for step in range(min(steps, way.every))
    ]
    for step in range(steps):
        done: list[float] = []
        calls = []
        for op in programs[step % way.every]:
            if op.start:
                call = op.start
                took = network.among(call.among).seconds(call.half, way.algorithm, call.nbytes)
                ready = 0.0 if call.after is None else done[call.after]
                done.append(max(lanes.get(call.among, 0.0), clock, ready) + took)
                lanes[call.among] = done[-1]
                calls.append(call)
            elif op.wait is not None:
                waited += max(done[op.wait] - clock, 0.0)
                clock = max(clock, done[op.wait])
            else:
                busy = max(max(lanes.values(), default=0.0) - clock, 0.0)
                clock += op.seconds + way.slowed * min(op.seconds, busy / (1 + way.slowed))
        ends.append(clock)
    return Simulated(np.diff(ends), waited / steps, tuple(calls))
