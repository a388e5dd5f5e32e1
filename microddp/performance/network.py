"""A described network, and the seconds of a collective on it.

A round is over when its last message has arrived: after the latency of the slowest link in use, and
the time of the port that has most to carry for its bandwidth. So messages that share a port slow
each other down, and so do nodes that share a switch's uplink.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from microddp.performance.nccl import nccl_seconds
from microddp.performance.rounds import Transfers, rounds


@dataclass(frozen=True)
class Port:
    """The connection of a device, or of a node, to a switch.

    Attributes:
        bandwidth: bytes a second, in each direction.
        latency: seconds to start a message, and until its first byte arrives.

    Raises:
        ValueError: a bandwidth that is not above 0, or a latency below 0.
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
    """The processor that carries all messages where the devices are processes of one machine.

    Attributes:
        message: seconds for each message, with all cores at work.
        byte: seconds for each byte, with all cores at work.
    """

    message: float
    byte: float


@dataclass(frozen=True)
class Network:
    """Devices in nodes of equal size, and nodes at one switch.

    Attributes:
        devices: number of devices.
        between: port of a rail: each node has ``rails`` of them.
        node: number of devices in a node; a node's devices have consecutive numbers.
        inside: port of a device to the others of its node; needed where a node has several.
        rails: number of network ports of a node; device i of a node uses port i modulo ``rails``.
        adds: whether switches add up the messages that pass through them.
        uplinks: groups of nodes that share one port to all other nodes: the numbers of the nodes,
            and the port's bandwidth.
        slowed: devices whose port is slow: the device's number, and the share of its bandwidth.
        processor: processor that carries all messages; ``None`` with a machine for each device.

    Raises:
        ValueError: devices that do not fill their nodes, more rails than devices in a node, or
            an uplink or a slowed device that is not of this network.
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
        """Number of nodes."""
        return -(-self.devices // self.node)

    @property
    def in_node(self) -> int:
        """Number of devices of a node that are in use, fewer than ``node`` in a smaller network."""
        return min(self.node, self.devices)

    def seconds(self, half: str, algorithm: str, nbytes: float) -> float:
        """Compute the seconds of a collective among all devices.

        Args:
            half: ``"all_reduce"``, or one half of it: ``"reduce_scatter"`` or ``"all_gather"``.
            algorithm: one of ``ALGORITHMS``; for a half, one of ``HALVED``. Or ``"nccl"``: what
                NCCL would choose, by its own estimate.
            nbytes: size of the whole tensor in bytes.

        Raises:
            ValueError: an unknown algorithm, or one that has no such half.
        """
        return _seconds(self, half, algorithm, nbytes)

    def among(self, which: str) -> Network:
        """The network of one group of devices, while each other group of its kind does the same.

        Args:
            which: ``"all"`` devices; those of one ``"node"``; or ``"replicas"``, those with the
                same number in each node, who share the node's ports.
        """
        return _among(self, which)

    def round_seconds(self, transfers: list[Transfers]) -> float:
        """Compute the seconds until the last of these messages has arrived."""
        source = np.concatenate([t.source for t in transfers])
        target = np.concatenate([t.target for t in transfers])
        sizes = np.concatenate([np.full(len(t.source), t.nbytes) for t in transfers])
        crosses = source // self.node != target // self.node
        share = np.ones(self.devices)
        for device, slow in self.slowed:
            share[device] = min(share[device], slow)
        latency, longest = 0.0, 0.0
        if not crosses.all():
            assert self.inside is not None
            latency = self.inside.latency
            own = ~crosses
            for ends in (source[own], target[own]):
                load = np.bincount(ends, sizes[own], self.devices) / share
                longest = max(longest, float(load.max()) / self.inside.bandwidth)
        if crosses.any():
            latency = max(latency, self.between.latency)
            for ends in (source[crosses], target[crosses]):
                rail = ends // self.node * self.rails + ends % self.node % self.rails
                slowest = np.ones(self.nodes * self.rails)
                np.minimum.at(slowest, rail, share[ends])
                load = np.bincount(rail, sizes[crosses], len(slowest)) / slowest
                longest = max(longest, float(load.max()) / self.between.bandwidth)
            for nodes, bandwidth in self.uplinks:
                behind = np.isin([source // self.node, target // self.node], nodes)
                for here, there in (behind, behind[::-1]):  # out, and in
                    longest = max(longest, float(sizes[here & ~there].sum()) / bandwidth)
        if self.processor is None:
            return latency + longest
        busy = len(sizes) * self.processor.message + float(sizes.sum()) * self.processor.byte
        return max(latency + longest, busy)


@cache
def _among(network: Network, which: str) -> Network:
    if which == "all":
        return network
    each = network.in_node
    if which == "node":
        groups, place = network.nodes, [device % network.node for device, _ in network.slowed]
        one = replace(network, devices=each, uplinks=(), slowed=(), processor=None)
    else:
        groups, place = each, [device // network.node for device, _ in network.slowed]
        bandwidth = network.between.bandwidth / -(-each // network.rails)  # on the fullest rail
        one = Network(
            network.nodes,
            replace(network.between, bandwidth=bandwidth),
            adds=network.adds,
            uplinks=tuple((nodes, uplink / each) for nodes, uplink in network.uplinks),
        )
    slowed = tuple(zip(place, (share for _, share in network.slowed), strict=True))
    busy = network.processor
    if busy:  # it carries the messages of all groups
        busy = Processor(busy.message * groups, busy.byte * groups)
    return replace(one, slowed=slowed, processor=busy)


@cache
def _seconds(network: Network, half: str, algorithm: str, nbytes: float) -> float:
    if network.devices == 1:
        return 0.0
    if algorithm == "nccl":
        return nccl_seconds(network, half, nbytes)[0]
    return math.fsum(
        count * network.round_seconds(transfers)
        for count, transfers in rounds(network, half, algorithm, nbytes)
    )
