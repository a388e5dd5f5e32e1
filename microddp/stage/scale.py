"""Scale models: a cluster that nobody has at hand, as a stage on which the same ratios hold.

What a data-parallel step gains depends on a few numbers without units: how many devices, M/C (all
messages alone, by all computing alone), the time to start a message by C, and which share of
computing is backward. A stage with equal numbers is the cluster, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microddp.performance import Network
from microddp.plan.library import Device, Link, devices, links, named, network_of
from microddp.plan.published import cluster_of
from microddp.program import Layer, Work
from microddp.report import human_bytes, human_seconds

ALONE = 0.1  # seconds of computing
LEAST_PAUSE = 1e-3  # seconds; what a processor does beside a shorter pause weighs too much


@dataclass(frozen=True)
class Side:
    """Either side of a scale model: the cluster, or the stage.

    Attributes:
        words: name of the devices and the links.
        devices: number of devices.
        layers: number of layers, each with one gradient and one message.
        nbytes: bytes of all gradients.
        compute: C, seconds of a device's step alone.
        messages: M, seconds of an all-reduce of all gradients alone.
        start: seconds that an all-reduce of a layer takes more than its share of M.
        start_spread: quartiles of the start, where it was measured: a small difference of two
            long times.
    """

    words: str
    devices: int
    layers: int
    nbytes: float
    compute: float
    messages: float
    start: float
    start_spread: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """M/C."""
        return self.messages / self.compute

    @property
    def unhidden(self) -> float:
        """Speed of all devices beside one, if nothing is hidden and starts are 0."""
        return self.devices / (1 + self.ratio)

    @property
    def overlapped(self) -> float:
        """The same if all is hidden that backward can hide, two thirds of C: at most this."""
        return self.devices / max(1, 1 / 3 + self.ratio)

    def in_words(self) -> dict[str, str]:
        """Return the numbers in words, by what they are."""
        unresolved = self.messages > 0 and self.start <= 0  # measured, and lost in the noise
        start = human_seconds(self.start)
        if self.start_spread:
            start += f" ({' to '.join(map(human_seconds, self.start_spread))})"
        return {
            "": self.words,
            "devices": str(self.devices),
            "layers": str(self.layers),
            "gradients": human_bytes(self.nbytes),
            "C, computing alone": human_seconds(self.compute),
            "M, all gradients at once": human_seconds(self.messages),
            "M/C": f"{self.ratio:.2f}",
            "start of a message": "not resolved" if unresolved else start,
            "start/C": "" if unresolved else f"{self.start / self.compute:.4f}",
        }


def cluster(
    device: str,
    link: str,
    *,
    nodes: int,
    node: int,
    parameters: float,
    tokens: float,
    layers: int,
    value_size: int = 2,
) -> Side:
    """Compute a cluster's side, for a transformer whose gradients are summed around a ring.

    Links have the speed that ``library.toml`` gives, a measured ring's or the one that they are
    sold with: what is reached of the latter, planner and :func:`published_cluster` count.

    Args:
        device: key of ``library.toml``, as is ``link``, the one between nodes.
        nodes: number of nodes, of ``node`` devices each.
        parameters: number of them in all ``layers``, which are equal.
        tokens: tokens of a device and step.
        value_size: bytes of a value of a gradient.

    Raises:
        ValueError: an unknown name, with the closest one; a number that is not above 0; or fewer
            devices in a node than its link has rails.
    """
    kind, between, network = _network(device, link, nodes, node)
    work = Work.from_operations(parameters, layers, tokens, kind.rate, value_size)
    many, one = ("nodes", f"{node} x ") if node > 1 else ("machines", "")
    words = f"{nodes} {many} of {one}{kind.name}, {between.name}"
    return _side(words, work, network, "ring")


def _side(words: str, work: Work, network: Network, algorithm: str) -> Side:
    layers, nbytes = len(work.layers), work.values * work.gradient_size
    messages, layer = (
        network.seconds("all_reduce", algorithm, size) for size in (nbytes, nbytes / layers)
    )
    start = max(0.0, layer - messages / layers)
    return Side(words, network.devices, layers, nbytes, work.seconds, messages, start)


def _network(device: str, link: str, nodes: int, node: int) -> tuple[Device, Link, Network]:
    kind = replace(named("device", device, devices()), node=node)
    between = named("link", link, links())
    return kind, between, network_of(kind, between, nodes * node)


# What people train on, from the best connected to the least: device, link, nodes, devices a node.
KNOWN = {
    "8 H100 of a node, NVLink": ("h100", "8x400gbit", 1, 8),
    "2 nodes of 8 H100, 8 x 400 Gbit/s each": ("h100", "8x400gbit", 2, 8),
    "8 A100 of a machine, PCIe 4.0": ("a100", "pcie4", 8, 1),
    "8 machines of an A100, 100 Gbit/s": ("a100", "100gbit", 8, 1),
    "8 machines of an A100, 25 Gbit/s": ("a100", "25gbit", 8, 1),
}


def known_clusters(**workload: Any) -> list[Side]:
    """Compute the sides of clusters that people have, for one workload, as :func:`cluster` does."""
    return [
        replace(cluster(device, link, nodes=nodes, node=node, **workload), words=words)
        for words, (device, link, nodes, node) in KNOWN.items()
    ]


def published_cluster(name: str, count: int) -> Side:
    """Compute the side of a training in ``published.toml``, on so many devices.

    Raises:
        ValueError: nobody published that.
    """
    work, network = cluster_of(name, count)
    return _side(name, work, network, "nccl")


def known_all_reduces(sizes: Sequence[int]) -> dict[str, list[float]]:
    """Compute NCCL's seconds for all-reduces of so many bytes on clusters that people have."""
    return {
        words: [_network(*parts)[2].seconds("all_reduce", "nccl", nbytes) for nbytes in sizes]
        for words, parts in KNOWN.items()
    }


def stage_of(there: Side, words: str, layer_bytes: int, messages: float, start: float) -> Side:
    """Compute the stage that has the cluster's M/C: how long its devices have to compute.

    A layer's gradient has ``layer_bytes`` there; ``messages`` and ``start``, in seconds, were
    measured there.

    Raises:
        ValueError: a layer would have to pause for less than a millisecond; the message says how
            many bytes a layer should have.
    """
    # A device alone sends nothing: there is nothing to scale by.
    compute = messages * there.compute / there.messages if there.messages else ALONE
    shortest = compute / 3 / there.layers
    if shortest < LEAST_PAUSE:
        enough = human_bytes(layer_bytes * LEAST_PAUSE / shortest)
        raise ValueError(
            f"expected layers whose forward takes {human_seconds(LEAST_PAUSE)} or more, got "
            f"{human_seconds(shortest)}; layers of {enough} would do, or slower links"
        )
    nbytes = there.layers * layer_bytes
    return Side(words, there.devices, there.layers, nbytes, compute, messages, start)


def work_of(stage: Side) -> Work:
    """Return the work of a stage's devices: equal layers, backward twice as long as forward."""
    forward = stage.compute / 3 / stage.layers
    values = int(stage.nbytes / stage.layers / 4)
    return Work((Layer(forward, 2 * forward, (values,)),) * stage.layers)
