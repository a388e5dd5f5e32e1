"""Plans of a training on so many devices: simulated time, memory, and price."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from microddp.performance.failures import Failures
from microddp.performance.memory import bytes_kept
from microddp.performance.network import Network
from microddp.performance.rounds import HALVED
from microddp.performance.simulator import Simulated, Way, simulate
from microddp.plan.library import Device, Link, named, network_of, read
from microddp.program import Work
from microddp.strategies import STRATEGIES

WHOLE = ("ring", "tree", "hierarchical")  # all-reduce algorithms to try
CHECKPOINT, RESTART = 60.0, 600.0  # seconds
DAY = 86400.0


@dataclass(frozen=True)
class Training:
    """A training to plan.

    Attributes:
        parameters: number of parameters of the model.
        layers: number of layers, all equal.
        tokens: number of tokens in a micro-batch of a device.
        accumulation: number of micro-batches in a step.
        in_all: number of tokens of the whole training; ``None`` if it has no end.
        kept: share of a gradient's bytes that is sent; below 1 if it is compressed.
        every: number of steps between two meetings, where weights are averaged (``"local"``).
        batch: number of tokens in a step, all devices together, instead of ``tokens``.

    Raises:
        ValueError: a number is not above 0.
    """

    parameters: float
    layers: int
    tokens: float
    accumulation: int = 1
    in_all: float | None = None
    kept: float = 1.0
    every: int = 1
    batch: float | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "tokens", "accumulation", "in_all", "batch"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"expected {name} above 0, got {number}")

    def on(self, devices: int) -> Training:
        """Return this training with the tokens of one of so many devices."""
        if self.batch is None:
            return self
        return replace(self, tokens=self.batch / devices / self.accumulation)


@dataclass(frozen=True)
class Plan:
    """A simulated way to train.

    Attributes:
        devices: number of devices.
        strategy: key of ``microddp.strategies.STRATEGIES``.
        algorithm: algorithm of its collectives, the quickest that was tried.
        step: seconds of a step, the mean from one meeting to the next.
        exposed: seconds of a step in which a device waits for messages.
        tokens_per_second: tokens a second of each device.
        efficiency: tokens a second, divided by those of a device that waits for nothing.
        memory: bytes of parameters, gradients and optimizer on a device; activations come on top.
        fits: whether the device has more memory than that.
        useful: share of the time that is training which is kept, with checkpoints and failures.
        seconds: seconds of the whole training; ``None`` if it has no end.
        price: price of the whole training; ``None`` without a price or an end.
    """

    devices: int
    strategy: str
    algorithm: str
    step: float
    exposed: float
    tokens_per_second: float
    efficiency: float
    memory: float
    fits: bool
    useful: float
    seconds: float | None
    price: float | None

    @property
    def limit(self) -> str:
        """The limit of the plan, one of ``"memory"``, ``"messages"`` or ``"computing"``."""
        if not self.fits:
            return "memory"
        return "messages" if self.exposed > self.step / 2 else "computing"


def quickest(work: Work, network: Network, way: Way) -> tuple[str, Simulated]:
    """Simulate a way with each algorithm; return the quickest algorithm, and its simulation."""
    tried = HALVED if STRATEGIES[way.strategy].stage else WHOLE
    found = {a: simulate(work, network, replace(way, algorithm=a), steps=way.every) for a in tried}
    return min(found.items(), key=lambda each: float(each[1].steps.mean()))


def plan(
    training: Training,
    device: Device,
    link: Link,
    devices: int,
    strategy: str,
    price: float | None = None,
) -> Plan:
    """Simulate a step of a strategy on so many devices, and plan the training by it.

    Parameters and messages are in bf16, the optimizer is Adam with a copy of the parameters in
    fp32: 16 bytes of each parameter, divided as the stage says. Devices fail as often as
    ``library.toml`` says, checkpoints take a minute and restarts ten.

    Args:
        training: training to plan.
        device: kind of the devices.
        link: link between nodes.
        devices: number of devices.
        strategy: key of ``microddp.strategies.STRATEGIES``.
        price: price of a device's hour.

    Raises:
        ValueError: devices that do not fill their nodes, or an unknown strategy.
    """
    training, stage = training.on(devices), named("strategy", strategy, STRATEGIES).stage
    network = network_of(device, link, devices)
    work = Work.from_operations(training.parameters, training.layers, training.tokens, device.rate)
    accumulation, kept, every = training.accumulation, training.kept, training.every
    way = Way(strategy, accumulation=accumulation, kept=kept, every=every)
    algorithm, found = quickest(work, network, way)
    step = float(found.steps.mean())
    tokens = training.tokens * accumulation
    divided = network.in_node if STRATEGIES[strategy].in_nodes else devices
    memory = bytes_kept(
        stage, training.parameters, divided, parameter=2, gradient=2, optimizer=12
    ).total
    if stage == 3 and divided > 1:  # two layers are whole at a time, and the gradients of one
        memory += 3 * 2 * training.parameters / training.layers
    failures = Failures.of_devices(
        devices, 3600 * read("library.toml")["failures"]["hours"], CHECKPOINT, RESTART
    )
    useful = failures.useful(failures.best_interval)
    seconds = None
    if training.in_all is not None:
        seconds = training.in_all / (tokens * devices) * step / useful
    return Plan(
        devices,
        strategy,
        algorithm,
        step,
        found.exposed,
        tokens / step,
        accumulation * work.seconds / step,
        memory,
        memory < device.memory,
        useful,
        seconds,
        None if price is None or seconds is None else price * devices * seconds / 3600,
    )


def sweep(
    training: Training,
    device: Device,
    link: Link,
    counts: Iterable[int],
    strategies: Iterable[str],
    price: float | None = None,
) -> list[Plan]:
    """Plan every strategy on every number of devices, with arguments and errors of :func:`plan`."""
    names = list(strategies)
    return [plan(training, device, link, n, name, price) for n in counts for name in names]


def cheapest(plans: Sequence[Plan], within: float | None = None) -> Plan | None:
    """Choose the plan that fits and takes the least time of all devices together.

    Args:
        plans: plans for one device and price; a plan without an end is never chosen.
        within: limit of the training's seconds.

    Returns:
        The cheapest plan; ``None`` if none fits.
    """
    able = [
        each
        for each in plans
        if each.fits and each.seconds is not None and (within is None or each.seconds <= within)
    ]
    return min(able, key=lambda each: each.devices * (each.seconds or 0), default=None)
