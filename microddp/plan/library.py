"""Devices and links by name, with the sources of their figures: ``library.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from microddp.performance.network import Network, Port

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Device:
    """What a step is computed on.

    Attributes:
        name: in words.
        peak: operations a second, bf16, dense.
        utilisation: the share of them that training reaches.
        memory: bytes.
        node: devices that are connected with each other by ``inside``.
        inside: bytes a second in each direction.
        inside_latency: seconds of a message.
        source: of the figures.
        date: of them.
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
    """What connects a node with the others.

    Attributes:
        name: in words.
        bandwidth: bytes a second in each direction, of each rail.
        rails: how many a node has.
        latency: seconds of a message.
        source: of the figures.
        date: of them.
    """

    name: str
    bandwidth: float
    rails: int
    latency: float
    source: str
    date: str


@cache
def read(name: str) -> dict[str, Any]:
    """A TOML file that lies here."""
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def devices() -> dict[str, Device]:
    """All devices, by the short names that are asked for."""
    return {key: Device(**entry) for key, entry in read("library.toml")["devices"].items()}


def links() -> dict[str, Link]:
    """All links, by the short names that are asked for."""
    return {key: Link(**entry) for key, entry in read("library.toml")["links"].items()}


def named(kind: str, name: str, choices: Mapping[str, Any]) -> Any:
    """What has a name.

    Raises:
        ValueError: nothing has; the message says what comes nearest.
    """
    if name in choices:
        return choices[name]
    near = get_close_matches(name, choices, 1, cutoff=0)
    raise ValueError(
        f"expected a {kind} of {', '.join(choices)}, got {name!r}; did you mean {near[0]!r}?"
    )


def network_of(device: Device, link: Link, count: int) -> Network:
    """So many devices in their nodes, with a link between those.

    Raises:
        ValueError: they do not fill their nodes.
    """
    inside = Port(device.inside, device.inside_latency)
    between = Port(link.bandwidth, link.latency)
    return Network(count, between, device.node, inside, link.rails)
