"""What a training takes on so many devices: simulated, with the memory and the money it needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from microddp.performance.cluster import Way, simulate
from microddp.performance.failures import Failures
from microddp.performance.memory import bytes_kept
from microddp.performance.network import HALVED
from microddp.plan.library import Device, Link, network_of, read
from microddp.program import Work
from microddp.strategies import STRATEGIES

WHOLE = ("ring", "tree", "hierarchical")  # algorithms of an all-reduce that are tried
CHECKPOINT, RESTART = 60.0, 600.0  # seconds
DAY = 86400.0
YEAR = 365 * DAY


@dataclass(frozen=True)
class Training:
    """What is to be trained.

    Attributes:
        parameters: of the model.
        layers: equal ones.
        tokens: of a device and micro-batch.
        accumulation: micro-batches of a step.
        in_all: tokens of the whole training.
        kept: the share of a gradient's bytes that is sent, where it is compressed.
        every: steps from one meeting to the next, where weights are averaged (``"local"``).
        batch: tokens of a step, all devices together, where that is given instead of ``tokens``.

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
        """The same with the tokens of one of so many devices."""
        if self.batch is None:
            return self
        return replace(self, tokens=self.batch / devices / self.accumulation)


@dataclass(frozen=True)
class Plan:
    """A simulated way to train.

    Attributes:
        devices: how many.
        strategy: a key of ``microddp.strategies.STRATEGIES``.
        algorithm: of its collectives, the quickest of those that were tried.
        step: seconds, the mean from one meeting to the next.
        exposed: seconds of a step in which a device waits for messages.
        tokens_per_second: of each device.
        efficiency: that, by what one device would do that waits for nothing.
        memory: bytes of parameters, gradients and optimizer on a device; activations come on top.
        fits: whether that is less than the device has.
        useful: the share of the time that is left, with checkpoints and failures.
        seconds: of the whole training; ``None`` if it has no end.
        price: of that; ``None`` without a price.
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
        """Memory, messages or computing, whichever stands in the way of more."""
        if not self.fits:
            return "memory"
        return "messages" if self.exposed > self.step / 2 else "computing"


def plan(
    training: Training,
    device: Device,
    link: Link,
    devices: int,
    strategy: str,
    price: float | None = None,
) -> Plan:
    """Simulate a step of a strategy on so many devices, and what follows from it.

    Parameters and messages are in bf16, the optimizer is Adam with a copy of the parameters in
    fp32: 16 bytes of each parameter, divided as the stage says. Failures are those of
    ``library.toml``, checkpoints take a minute and restarts ten.

    Args:
        training: what.
        device: on which.
        link: between nodes.
        devices: how many.
        strategy: a key of ``microddp.strategies.STRATEGIES``.
        price: of a device's hour.

    Raises:
        ValueError: devices that do not fill their nodes, or a strategy that there is not.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"expected a strategy of {', '.join(STRATEGIES)}, got {strategy!r}")
    training, stage = training.on(devices), STRATEGIES[strategy].stage
    network = network_of(device, link, devices)
    work = Work.from_operations(training.parameters, training.layers, training.tokens, device.rate)
    played = {
        algorithm: simulate(
            work,
            network,
            Way(
                strategy,
                algorithm,
                accumulation=training.accumulation,
                kept=training.kept,
                every=training.every,
            ),
            steps=training.every,
        )
        for algorithm in (HALVED if stage else WHOLE)
    }
    algorithm = min(played, key=lambda name: float(played[name].steps.mean()))
    found, step = played[algorithm], float(played[algorithm].steps.mean())
    tokens = training.tokens * training.accumulation
    kept = bytes_kept(
        stage, training.parameters, devices, parameter=2, gradient=2, optimizer=12
    ).total
    if stage == 3 and devices > 1:  # two layers are whole at a time, and the gradients of one
        kept += 3 * 2 * training.parameters / training.layers
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
        training.accumulation * work.seconds / step,
        kept,
        kept < device.memory,
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
    """Every strategy on every number of devices. Arguments and errors are those of :func:`plan`."""
    names = list(strategies)
    return [plan(training, device, link, n, name, price) for n in counts for name in names]


def cheapest(plans: Sequence[Plan], within: float | None = None) -> Plan | None:
    """The plan that fits and takes the least of the devices' time, all together.

    Args:
        plans: of one device and price, with an end.
        within: seconds that the training may take.
    """
    able = [
        each
        for each in plans
        if each.fits and each.seconds is not None and (within is None or each.seconds <= within)
    ]
    return min(able, key=lambda each: each.devices * (each.seconds or 0), default=None)
