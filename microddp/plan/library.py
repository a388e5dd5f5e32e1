"""Devices and links by name, with the sources of their figures: ``library.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

from microddp.performance.network import Network, Port

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Device:
    """A device on which a step is computed.

    Attributes:
        name: name in words.
        peak: operations a second, bf16, dense.
        utilisation: share of the peak that training reaches.
        memory: bytes of memory.
        node: number of devices that ``inside`` connects with each other.
        inside: bandwidth in a node, bytes a second in each direction.
        inside_latency: seconds to start a message in a node.
        source: source of the figures.
        date: date of the figures.
    """

    name: str
    peak: float
    utilisation: float
    memory: float
    node: int
    inside: float
    inside_latency: float
    source: str
    date: str

    @property
    def rate(self) -> float:
        """Operations a second that training reaches."""
        return self.peak * self.utilisation


@dataclass(frozen=True)
class Link:
    """The link between a node and the others.

    Attributes:
        name: name in words.
        bandwidth: bytes a second in each direction, of each rail.
        rails: number of rails of a node.
        latency: seconds to start a message.
        transport: ``"rdma"``, ``"tcp"`` or ``"pcie"``, which says how much of it training reaches.
        source: source of the figures.
        date: date of the figures.
    """

    name: str
    bandwidth: float
    rails: int
    latency: float
    transport: str
    source: str
    date: str


@dataclass(frozen=True)
class Overheads:
    """Losses of training on a real machine, beside waiting for messages.

    Attributes:
        slowed: share of time that computing takes longer while messages are under way.
        tcp: share of a link's bandwidth that collectives reach over TCP.
        pcie: the same over PCIe.
        jitter: standard deviation of a device's step, as a share of it. All wait for the slowest.
        alone: speed of a device that waits for nothing, as a multiple of the published one of
            those that do.
    """

    slowed: float
    tcp: float
    pcie: float
    jitter: float
    alone: float

    @classmethod
    def usual(cls) -> Overheads:
        """Return those of ``library.toml``, which names their sources."""
        found = read("library.toml")["overheads"]
        return cls(**{key: found[key] for key in cls.__dataclass_fields__})

    def reached(self, transport: str) -> float:
        """Return the share of a bandwidth that is reached; 1 over NVLink and RDMA."""
        return {"tcp": self.tcp, "pcie": self.pcie}.get(transport, 1.0)

    def waiting(self, devices: int) -> float:
        """Compute the time of the slowest of so many devices, as a multiple of one's.

        Source: Blom, "Statistical Estimates and Transformed Beta-Variables", 1958, for the expected
        largest of n draws of a normal distribution.
        """
        return 1 + self.jitter * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


@cache
def read(name: str) -> dict[str, Any]:
    """Read a TOML file of this folder."""
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def devices() -> dict[str, Device]:
    """Return all devices, by the short names of the command line."""
    return {key: Device(**entry) for key, entry in read("library.toml")["devices"].items()}


def links() -> dict[str, Link]:
    """Return all links, by the short names of the command line."""
    return {key: Link(**entry) for key, entry in read("library.toml")["links"].items()}


def named(kind: str, name: str, choices: Mapping[str, Any]) -> Any:
    """Look a name up.

    Raises:
        ValueError: an unknown name; the message suggests the closest one.
    """
    if name in choices:
        return choices[name]
    near = get_close_matches(name, choices, 1, cutoff=0)
    raise ValueError(
        f"expected a {kind} of {', '.join(choices)}, got {name!r}; did you mean {near[0]!r}?"
    )


def network_of(device: Device, link: Link, count: int) -> Network:
    """Describe the network of ``count`` devices in nodes, with a link between the nodes.

    Raises:
        ValueError: the devices do not fill their nodes.
    """
    inside = Port(device.inside, device.inside_latency)
    between = Port(link.bandwidth, link.latency)
    return Network(count, between, device.node, inside, link.rails)
