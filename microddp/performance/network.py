"""A described network, and the seconds of a collective on it.

A ring's round is over when its last message has arrived: after the latency of the slowest link in
use, and the time of the port that has most to carry for its bandwidth. So messages that share a
port slow each other down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from microddp.allreduce import ring_cost
from microddp.performance.nccl import nccl_seconds


def check_whole(**counts: float) -> None:
    """Raise a ``ValueError`` for a count that is not a whole number from 1 on."""
    for name, count in counts.items():
        if not 1 <= count < math.inf or count != int(count):
            raise ValueError(f"expected {name} to be a whole number from 1 on, got {count}")


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
        processor: processor that carries all messages; ``None`` with a machine for each device.

    Raises:
        ValueError: devices that do not fill their nodes, or more rails than devices in a node.
    """

    devices: int
    between: Port
    node: int = 1
    inside: Port | None = None
    rails: int = 1
    adds: bool = False
    processor: Processor | None = None

    def __post_init__(self) -> None:
        check_whole(devices=self.devices, node=self.node, rails=self.rails)
        if self.devices > self.node and self.devices % self.node:
            raise ValueError(
                f"expected devices in whole nodes of {self.node}, got {self.devices}, which leaves "
                f"{self.devices % self.node}"
            )
        if self.node > 1 and self.inside is None:
            raise ValueError(f"expected the port inside nodes of {self.node} devices, got none")
        if self.rails > self.node:
            raise ValueError(f"expected at most {self.node} rails, one a device, got {self.rails}")

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
            algorithm: ``"ring"``; or ``"nccl"``: what NCCL would choose, by its own estimate.
            nbytes: size of the whole tensor in bytes.

        Raises:
            ValueError: an unknown half or algorithm.
        """
        return _seconds(self, half, algorithm, nbytes)

    def among(self, which: str) -> Network:
        """The network of one group of devices, while each other group of its kind does the same.

        Args:
            which: ``"all"`` devices; those of one ``"node"``; or ``"replicas"``, those with the
                same number in each node, who share the node's ports.
        """
        if which == "all":
            return self
        each = self.in_node
        if which == "node":
            groups, one = self.nodes, replace(self, devices=each)
        else:
            bandwidth = self.between.bandwidth / -(-each // self.rails)  # on the fullest rail
            between = replace(self.between, bandwidth=bandwidth)
            groups, one = each, Network(self.nodes, between, adds=self.adds)
        busy = self.processor
        if busy:  # it carries the messages of all groups
            busy = Processor(busy.message * groups, busy.byte * groups)
        return replace(one, processor=busy)


@cache
def _seconds(network: Network, half: str, algorithm: str, nbytes: float) -> float:
    if half not in ("all_reduce", "reduce_scatter", "all_gather"):
        raise ValueError(f"expected all_reduce, reduce_scatter or all_gather, got {half!r}")
    if algorithm not in ("ring", "nccl"):
        raise ValueError(f"expected the algorithm ring or nccl, got {algorithm!r}")
    if network.devices == 1:
        return 0.0
    if algorithm == "nccl":
        return nccl_seconds(network, half, nbytes)[0]
    cost = ring_cost(network.devices, nbytes, 2 if half == "all_reduce" else 1)
    return cost.rounds * _round(network, cost.round_bytes)


def _round(network: Network, chunk: float) -> float:
    """Compute the seconds of one round of a ring, in which each device sends a chunk.

    It is one ring for each rail, through which the ring leaves a node. The rings share the chunk.
    """
    rings = network.rails if network.nodes > 1 else 1
    latency, longest = 0.0, 0.0
    if network.inside and network.in_node > 1:
        # With a rail for each device, each leaves its node in one ring, and sends less inside.
        share = 1 - 1 / rings if rings == network.in_node else 1.0
        latency, longest = network.inside.latency, chunk * share / network.inside.bandwidth
    if network.nodes > 1:
        latency = max(latency, network.between.latency)
        longest = max(longest, chunk / rings / network.between.bandwidth)
    if not network.processor:
        return latency + longest
    messages, nbytes = network.devices * rings, network.devices * chunk
    return max(
        latency + longest, messages * network.processor.message + nbytes * network.processor.byte
    )
