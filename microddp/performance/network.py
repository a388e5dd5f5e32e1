"""Collectives as rounds of messages over a network that is described, and what each takes.

A round is over when its last message has arrived: the latency of the slowest link that is used,
and the time of the port that has most to carry for its bandwidth. So a round knows contention: of
messages that share a port, and of nodes that share a switch's uplink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]
ALGORITHMS = ("ring", "tree", "halving", "doubling", "hierarchical", "switch", "direct", "naive")
HALVED = ("ring", "halving", "hierarchical")  # those that are a reduce-scatter and an all-gather


@dataclass(frozen=True)
class Port:
    """What connects a device, or a node, with a switch.

    Attributes:
        bandwidth: bytes a second, in each direction.
        latency: seconds from the start of a message to its first byte's arrival, and what it takes
            to start it.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"expected a bandwidth above 0 bytes a second, got {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"expected a latency of 0 seconds or more, got {self.latency}")


@dataclass(frozen=True)
class Processor:
    """What carries every message of all devices, where they are processes of one machine.

    Attributes:
        message: seconds of all its cores together, for a message.
        byte: likewise, for each byte.
    """

    message: float
    byte: float


@dataclass(frozen=True)
class Network:
    """Devices in nodes of equal size, and nodes at one switch.

    Attributes:
        devices: how many.
        between: the port of a rail: each node has ``rails`` of them.
        node: devices in a node. They number those of a node one after the other.
        inside: a device's port to the others of its node; needed where a node has several.
        rails: network ports of a node; a device uses that of its own number, modulo.
        adds: whether switches add what passes through them.
        uplinks: groups of nodes that share one port to the other nodes: its bandwidth by the
            numbers of the nodes.
        slowed: the share of its bandwidth that a device's port has, by the device's number.
        processor: that all messages take time of; on a machine for each device there is none.

    Raises:
        ValueError: devices that do not fill their nodes, more rails than devices in a node, or
            a group, device or share that there is not.
    """

    devices: int
    between: Port
    node: int = 1
    inside: Port | None = None
    rails: int = 1
    adds: bool = False
    uplinks: tuple[tuple[tuple[int, ...], float], ...] = ()
    slowed: tuple[tuple[int, float], ...] = ()
    processor: Processor | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "node", "rails"):
            count = getattr(self, name)
            if count != int(count) or count < 1:
                raise ValueError(f"expected {name} to be a whole number from 1 on, got {count}")
        if self.devices > self.node and self.devices % self.node:
            raise ValueError(
                f"expected devices in whole nodes of {self.node}, got {self.devices}, which leaves "
                f"{self.devices % self.node}"
            )
        if self.node > 1 and self.inside is None:
            raise ValueError(f"expected the port inside nodes of {self.node} devices, got none")
        if self.rails > self.node:
            raise ValueError(f"expected at most {self.node} rails, one a device, got {self.rails}")
        for nodes, bandwidth in self.uplinks:
            if not nodes or not set(nodes) <= set(range(self.nodes)) or bandwidth <= 0:
                raise ValueError(
                    f"expected uplinks of nodes from 0 to {self.nodes - 1} with a bandwidth above "
                    f"0, got {nodes} with {bandwidth}"
                )
        for device, share in self.slowed:
            if not 0 <= device < self.devices or not share > 0:
                raise ValueError(
                    f"expected shares above 0 of devices from 0 to {self.devices - 1}, got "
                    f"{share} of {device}"
                )

    @property
    def nodes(self) -> int:
        """How many."""
        return -(-self.devices // self.node)

    @property
    def in_node(self) -> int:
        """Devices of a node that are used, fewer than ``node`` if there are not so many."""
        return min(self.node, self.devices)

    def seconds(self, half: str, algorithm: str, nbytes: float) -> float:
        """What a collective takes.

        Args:
            half: ``"all_reduce"``, or one half of it: ``"reduce_scatter"`` or ``"all_gather"``.
            algorithm: of ``ALGORITHMS``, for a half of ``HALVED``.
            nbytes: of the whole tensor.

        Raises:
            ValueError: there is no such algorithm, or it has no such half.
        """
        return _seconds(self, half, algorithm, nbytes)


@cache
def _seconds(network: Network, half: str, algorithm: str, nbytes: float) -> float:
    if network.devices == 1:
        return 0.0
    parts = [
        count * _round(network, transfers)
        for count, transfers in rounds(network, half, algorithm, nbytes)
    ]
    return parts[0] if len(parts) == 1 else math.fsum(parts)


@dataclass(frozen=True)
class Transfers:
    """Messages that begin together: from a device, to a device, and bytes of each."""

    source: Ranks
    target: Ranks
    nbytes: float


def _round(network: Network, transfers: list[Transfers]) -> float:
    """Seconds until the last of these has arrived."""
    source = np.concatenate([t.source for t in transfers])
    target = np.concatenate([t.target for t in transfers])
    sizes = np.concatenate([np.full(len(t.source), t.nbytes) for t in transfers])
    crosses = source // network.node != target // network.node
    share = np.ones(network.devices)
    for device, slow in network.slowed:
        share[device] = slow
    latency, longest = 0.0, 0.0
    if not crosses.all():
        assert network.inside is not None
        latency = network.inside.latency
        own = ~crosses
        for ends in (source[own], target[own]):
            load = np.bincount(ends, sizes[own], network.devices) / share
            longest = max(longest, float(load.max()) / network.inside.bandwidth)
    if crosses.any():
        latency = max(latency, network.between.latency)
        for ends in (source[crosses], target[crosses]):
            rail = ends // network.node * network.rails + ends % network.node % network.rails
            slowest = np.ones(network.nodes * network.rails)
            np.minimum.at(slowest, rail, share[ends])
            load = np.bincount(rail, sizes[crosses], len(slowest)) / slowest
            longest = max(longest, float(load.max()) / network.between.bandwidth)
        for nodes, bandwidth in network.uplinks:
            behind = np.isin([source // network.node, target // network.node], nodes)
            for here, there in (behind, behind[::-1]):  # out, and in
                longest = max(longest, float(sizes[here & ~there].sum()) / bandwidth)
    if network.processor is None:
        return latency + longest
    busy = len(sizes) * network.processor.message + float(sizes.sum()) * network.processor.byte
    return max(latency + longest, busy)


# ---- the algorithms, as how many equal rounds of which messages


Rounds = Iterator[tuple[int, list[Transfers]]]


def rounds(network: Network, half: str, algorithm: str, nbytes: float) -> Rounds:
    """The messages of a collective among all devices.

    Arguments and errors are those of :meth:`Network.seconds`.

    Yields:
        How many rounds there are of a kind, and the messages of each.

    Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005 (ring, doubling, halving); Sanders, Speck and Träff, "Two-tree algorithms for full
    bandwidth broadcast, reduction and scan", 2009 (tree); Jia et al., "Highly Scalable Deep
    Learning Training System with Mixed-Precision", 2018 (hierarchical).
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"expected an algorithm of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if half not in ("all_reduce", "reduce_scatter", "all_gather"):
        raise ValueError(f"expected all_reduce, reduce_scatter or all_gather, got {half!r}")
    if half != "all_reduce" and algorithm not in HALVED:
        raise ValueError(f"expected one of {', '.join(HALVED)} for a {half}, got {algorithm!r}")
    times = 2 if half == "all_reduce" else 1
    everyone = np.arange(network.devices)
    match algorithm:
        case "ring":
            yield times * (network.devices - 1), list(_rings(network, nbytes))
        case "halving":
            yield from _halving(everyone, nbytes, times)
        case "hierarchical":
            yield from _hierarchical(network, nbytes, times)
        case "doubling":
            yield from _doubling(everyone, nbytes)
        case "tree":
            yield from _tree(network, nbytes)
        case "switch":
            if not network.adds:
                raise ValueError("expected switches that add, got a network whose switches do not")
            # Each device fetches the sum of its part, and sends that to all: what the others
            # fetch and its own, out; the same, in.
            yield 1, [_to_next(everyone, nbytes)]
            yield 1, [_to_next(everyone, nbytes / network.devices)]
        case "direct":
            for step in range(1, network.devices):
                target = (everyone + step) % network.devices
                yield 1, [Transfers(everyone, target, nbytes)]
        case "naive":
            root = everyone[:1]
            for rank in everyone[1:]:
                yield 1, [Transfers(np.array([rank]), root, nbytes)]
            for rank in everyone[1:]:
                yield 1, [Transfers(root, np.array([rank]), nbytes)]


def _to_next(ranks: Ranks, nbytes: float) -> Transfers:
    return Transfers(ranks, np.roll(ranks, -1), nbytes)


def _rings(network: Network, nbytes: float) -> Iterator[Transfers]:
    """One ring for each rail, which leaves a node there; they share the tensor."""
    count = network.rails if network.nodes > 1 else 1
    devices = np.arange(network.devices).reshape(network.nodes, -1)
    for rail in range(count):
        # The device of the rail comes last in its node, and the next node begins anywhere else.
        order = np.roll(devices, -rail - 1, axis=1).reshape(-1)
        yield _to_next(order, nbytes / network.devices / count)


def _halving(ranks: Ranks, nbytes: float, times: int) -> Rounds:
    """Pairs halve what they exchange; those beyond a power of two give theirs away first."""
    power = 1 << int(math.log2(len(ranks)))
    inner, extra = ranks[:power], ranks[power:]
    if len(extra):
        yield 1, [Transfers(extra, inner[: len(extra)], nbytes)]
        if times == 2:
            yield 1, [Transfers(inner[: len(extra)], extra, nbytes)]
    # The nearest first, where the most is exchanged.
    for shift in range(power.bit_length() - 1):
        nbytes /= 2
        yield times, [Transfers(inner, inner[np.arange(power) ^ (1 << shift)], nbytes)]


def _doubling(ranks: Ranks, nbytes: float) -> Rounds:
    """Pairs exchange all they have, at doubling distances."""
    power = 1 << int(math.log2(len(ranks)))
    inner, extra = ranks[:power], ranks[power:]
    if len(extra):
        yield 1, [Transfers(extra, inner[: len(extra)], nbytes)]
    for shift in range(power.bit_length() - 1):
        yield 1, [Transfers(inner, inner[np.arange(power) ^ (1 << shift)], nbytes)]
    if len(extra):
        yield 1, [Transfers(inner[: len(extra)], extra, nbytes)]


def _hierarchical(network: Network, nbytes: float, times: int) -> Rounds:
    """A ring in each node, then rings of the devices with one number in each node."""
    devices = np.arange(network.devices).reshape(network.nodes, -1)
    inside, nodes = network.in_node, network.nodes
    if inside > 1:
        yield times * (inside - 1), [_to_next(row, nbytes / inside) for row in devices]
    if nodes > 1:
        size = nbytes / inside / nodes
        yield times * (nodes - 1), [_to_next(column, size) for column in devices.T]


def _tree(network: Network, nbytes: float) -> Rounds:
    """Two binary trees of nodes for each rail; pieces of the tensor go up and down at once.

    What is inside of one tree is a leaf of the other. The devices of a node are a chain.
    """
    nodes, inside = network.nodes, network.in_node
    devices = np.arange(network.devices).reshape(nodes, -1)
    count = min(network.rails, inside)
    child = np.arange(1, nodes)
    parent = (child - 1) // 2  # a heap
    edges: list[tuple[Ranks, Ranks]] = []
    for rail in range(count):
        column = np.roll(devices, -rail, axis=1)
        for tree in (column[:, 0], column[::-1, 0]):
            edges.append((tree[child], tree[parent]))
            edges += [(column[:, k + 1], column[:, k]) for k in range(inside - 1)]
    longest = nodes.bit_length() - 1 + inside - 1
    options = []
    for pieces in (1 << shift for shift in range(13)):
        size = nbytes / 2 / count / pieces
        up = [Transfers(*edge, size) for edge in edges]
        down = [Transfers(*edge[::-1], size) for edge in edges]
        options.append((2 * longest + pieces - 1, up + down))
    yield min(options, key=lambda option: option[0] * _round(network, option[1]))
