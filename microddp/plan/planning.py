"""Plans of a training on so many devices: simulated time, memory, and price."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from microddp.performance.failures import Failures
from microddp.performance.memory import bytes_kept
from microddp.performance.simulator import Way, simulate
from microddp.plan.library import Device, Link, Overheads, named, network_of, read
from microddp.program import Work
from microddp.step import Strategy
from microddp.strategies import STRATEGIES

DAY = 86400.0
ATTENTION = 12.0  # operations of a layer and token for each value of hidden times sequence
# Values that backward keeps of each token and layer, as a multiple of the model's width, by what is
# recomputed. All of them: 8 of that width, and 4 of the one between, which is 3.5 times as large in
# Llama 3. Selected: half of it, by the memory that torchtitan published. It keeps 35 % (chapter
# 16); the rest stands for buffers and the allocator. The last: what enters the layer.
KEPT = {"none": 22.0, "selective": 11.0, "full": 1.0}
LOGIT = 12.0  # bytes of each: in bf16 and in fp32, and its gradient in both


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
        hidden: width of the model. With 0, operations of attention and memory of activations are
            not counted.
        attention: width of its attention, of all heads together; with 0, that of the model.
        vocabulary: number of tokens that the model knows.
        sequence: length of a sequence in tokens.
        recompute: ``"none"``, ``"selective"`` or ``"full"``: activations that are computed again.
        gradient_size: bytes of a value of a gradient that is sent: 4 in fp32, 2 in bf16.

    Raises:
        ValueError: a number is not above 0 (``hidden``, ``attention``, ``vocabulary`` and
            ``sequence`` may be 0), an unknown recomputation, or another size of gradients.
    """

    parameters: float
    layers: int
    tokens: float
    accumulation: int = 1
    in_all: float | None = None
    kept: float = 1.0
    every: int = 1
    batch: float | None = None
    hidden: float = 0.0
    vocabulary: float = 0.0
    sequence: float = 0.0
    recompute: str = "none"
    gradient_size: int = 4
    attention: float = 0.0

    def __post_init__(self) -> None:
        named("recomputation", self.recompute, KEPT)
        if self.gradient_size not in (2, 4):
            raise ValueError(f"expected a gradient_size of 2 or 4, got {self.gradient_size}")
        for name, number in vars(self).items():
            if name == "recompute" or number is None or 0 < number < math.inf:
                continue
            if number != 0 or name not in ("hidden", "attention", "vocabulary", "sequence"):
                raise ValueError(f"expected {name} above 0, got {number}")

    def on(self, devices: int) -> Training:
        """Return this training with the tokens of one of so many devices.

        Raises:
            ValueError: that is less than a token.
        """
        if self.batch is None:
            return self
        if self.batch < devices * self.accumulation:
            raise ValueError(
                f"expected a batch of a token or more for each of {devices} devices x "
                f"{self.accumulation} micro-batches, got {self.batch:g}"
            )
        return replace(self, tokens=self.batch / devices / self.accumulation)

    @property
    def operations(self) -> float:
        """Operations of a token, without recomputation, which utilisations leave out."""
        width = self.attention or self.hidden
        return 6 * self.parameters + ATTENTION * self.layers * width * self.sequence

    @property
    def activations(self) -> float:
        """Bytes that backward needs of a micro-batch, for activations and logits."""
        values = self.layers * KEPT[self.recompute]
        if self.recompute == "full":  # and all of one layer at a time
            values += KEPT["none"]
        return self.tokens * (2 * values * self.hidden + LOGIT * self.vocabulary)


@dataclass(frozen=True)
class Plan:
    """A simulated way to train.

    Attributes:
        devices: number of devices.
        strategy: key of ``microddp.strategies.STRATEGIES``.
        step: seconds of a step, the mean from one meeting to the next.
        exposed: seconds of a step in which a device waits for messages.
        tokens_per_second: tokens a second of each device.
        efficiency: tokens a second, divided by those of a device that waits for nothing.
        memory: bytes on a device: parameters, gradients, optimizer, and activations if the
            training says how wide its model is.
        fits: whether the device has more memory than that.
        useful: share of the time that is training which is kept, with checkpoints and failures.
        seconds: seconds of the whole training; ``None`` if it has no end.
        price: price of the whole training; ``None`` without a price or an end.
    """

    devices: int
    strategy: str
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

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together; ``None`` if the training has no end."""
        return None if self.seconds is None else self.devices * self.seconds / 3600


def usual_failures() -> Failures:
    """Return those of one device in ``library.toml``, which names their sources."""
    found = read("library.toml")["failures"]
    return Failures(3600 * found["hours"], found["checkpoint"], found["restart"])


def plan(
    training: Training,
    device: Device,
    link: Link,
    devices: int,
    strategy: str,
    price: float | None = None,
    failures: Failures | None = None,
) -> Plan:
    """Simulate a step of a strategy on so many devices, and plan the training by it.

    Parameters are sent in bf16, gradients as the training says, and the optimizer is Adam with a
    copy of the parameters in fp32: 16 bytes of each parameter, divided as the stage says.
    Collectives take what NCCL expects of its best algorithm, and computing is slower while they are
    under way, as ``library.toml`` says.

    Args:
        training: training to plan.
        device: kind of the devices.
        link: link between nodes.
        devices: number of devices.
        strategy: key of ``microddp.strategies.STRATEGIES``.
        price: price of a device's hour.
        failures: failures of one device; default: the usual ones.

    Raises:
        ValueError: devices that do not fill their nodes, or an unknown strategy, or one that sends
            something else than gradients, of which a share is to be kept.
    """
    training, kind = training.on(devices), named("strategy", strategy, STRATEGIES)
    if training.kept < 1 and (hasattr(kind, "program") or not kind.averages):
        expected = "strategies that all-reduce gradients, as ddp, with kept below 1"
        raise ValueError(f"expected {expected}; got {strategy}")
    overheads = Overheads.usual()
    carried = replace(link, bandwidth=link.bandwidth * overheads.reached(link.transport))
    network = network_of(device, carried, devices)
    # The rate counts no recomputation: those who publish it choose recomputation where memory is
    # short, and reach as many of the operations that count. Some of these are attention's.
    rate = min(device.rate * overheads.alone, device.peak)
    work = Work.from_operations(
        training.parameters,
        training.layers,
        training.tokens,
        rate * 6 * training.parameters / training.operations,
        gradient_size=training.gradient_size,
    )
    accumulation = training.accumulation
    way = Way(strategy, "nccl", None, accumulation, training.kept, training.every, overheads.slowed)
    found = simulate(work, network, way, steps=training.every)
    step = float(found.steps.mean()) * (1.0 if kind is Strategy else overheads.waiting(devices))
    tokens = training.tokens * accumulation
    memory = _kept(training, kind, network.in_node if kind.in_nodes else devices)
    memory += training.activations
    useful = (failures or usual_failures()).of(devices).useful()
    seconds = None
    if training.in_all is not None:
        whole = training.in_all / (tokens * devices) * step
        seconds = whole / useful if useful else math.inf
    return Plan(
        devices,
        strategy,
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


def _kept(training: Training, kind: type[Strategy], ranks: int) -> float:
    """Compute the bytes of parameters, gradients and optimizer on one of the ranks that share."""
    # Where micro-batches add up their gradients, stage 2 keeps them whole until the last one.
    stage = 1 if kind.stage == 2 and training.accumulation > 1 else kind.stage
    shared = bytes_kept(stage, training.parameters, ranks, parameter=2, gradient=2, optimizer=12)
    layer = 2 * training.parameters / training.layers
    # In stage 3 two layers are whole at a time, and the gradients of one; these in stage 2, too.
    whole = layer * {2: 1, 3: 3}.get(stage, 0) if ranks > 1 else 0.0
    return shared.total + whole + 2 * training.parameters * kind.copies


def calibrated(
    training: Training, device: Device, link: Link, strategy: str, rate: float, devices: int
) -> Device:
    """Return a device that is so fast that a plan on a few has the speed that was measured there.

    Args:
        training: training that was measured.
        device: kind of the devices.
        link: link between nodes.
        strategy: key of ``microddp.strategies.STRATEGIES``.
        rate: tokens a second of each device, as measured.
        devices: number of devices on which that was measured.

    Raises:
        ValueError: more than the device's peak would be needed for it.
    """

    def speed(utilisation: float) -> float:
        found = replace(device, utilisation=utilisation)
        return plan(training, found, link, devices, strategy).tokens_per_second

    low, high = 0.0, 1.0
    if speed(high) < rate:
        raise ValueError(
            f"expected a measured speed of at most {speed(high):,.0f} tokens a second of each of "
            f"{devices}, that of the device's peak; got {rate:,.0f}"
        )
    for _ in range(40):  # it never falls with utilisation
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) < rate else (low, middle)
    return replace(device, utilisation=high)


def sweep(
    training: Training,
    device: Device,
    link: Link,
    counts: Iterable[int],
    strategies: Iterable[str],
    price: float | None = None,
    failures: Failures | None = None,
) -> list[Plan]:
    """Plan every strategy on every number of devices, with arguments and errors of :func:`plan`."""
    names = list(strategies)
    return [
        plan(training, device, link, n, name, price, failures) for n in counts for name in names
    ]


def cheapest(plans: Sequence[Plan], within: float | None = None) -> Plan | None:
    """Choose the plan that fits and takes the least time of all devices together.

    Args:
        plans: plans for one device and price; a plan without an end is never chosen.
        within: limit of the training's seconds.

    Returns:
        The cheapest plan; ``None`` if none fits. Several devices that average nothing
        (``"none"``) train several models, so they are never chosen.
    """
    able = [
        each
        for each in plans
        if each.fits
        and (each.devices == 1 or STRATEGIES[each.strategy] is not Strategy)
        and each.seconds is not None
        and each.seconds < math.inf
        and (within is None or each.seconds <= within)
    ]
    return min(able, key=lambda each: each.device_hours or 0.0, default=None)
