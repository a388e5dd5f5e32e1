"""The rounds of a collective's messages, by algorithm, among the devices of a described network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from microddp.allreduce import ring_cost

if TYPE_CHECKING:
    from microddp.performance.network import Network

ALGORITHMS = ("ring", "tree", "halving", "doubling", "hierarchical", "switch", "direct", "naive")
HALVED = ("ring", "halving", "hierarchical")  # made of a reduce-scatter and an all-gather
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Transfers:
    """Messages that begin together: their senders, their receivers, and the bytes of each."""

    source: Ranks
    target: Ranks
    nbytes: float


Rounds = Iterator[tuple[int, list[Transfers]]]


def rounds(
    network: Network, half: str, algorithm: str, nbytes: float
) -> Iterator[tuple[int, list[Transfers]]]:
    """Iterate over the messages of a collective among all devices.

    Arguments and errors are those of :meth:`~microddp.performance.network.Network.seconds`.

    Yields:
        A number of equal rounds, and the messages of each of them.

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
            cost = ring_cost(network.devices, nbytes, times)
            yield cost.rounds, list(_rings(network, cost.round_bytes))
        case "halving":
            yield from _in_pairs(everyone, nbytes, times, halves=True)
        case "hierarchical":
            yield from _hierarchical(network, nbytes, times)
        case "doubling":
            yield from _in_pairs(everyone, nbytes, times, halves=False)
        case "tree":
            yield from _tree(network, nbytes)
        case "switch":
            if not network.adds:
                raise ValueError("expected switches that add, got a network whose switches do not")
            # A device sends its tensor, of which every device fetches the sum of one part; then it
            # sends the sum of its own part to all. As much comes in.
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


def _rings(network: Network, chunk: float) -> Iterator[Transfers]:
    """Send a chunk along one ring for each rail, through which the ring leaves a node.

    The rings share the chunk.
    """
    count = network.rails if network.nodes > 1 else 1
    devices = np.arange(network.devices).reshape(network.nodes, -1)
    for rail in range(count):
        # The device of the rail comes last in its node, and the next node begins anywhere else.
        order = np.roll(devices, -rail - 1, axis=1).reshape(-1)
        yield _to_next(order, chunk / count)


def _in_pairs(ranks: Ranks, nbytes: float, times: int, *, halves: bool) -> Rounds:
    """Exchange in pairs, at doubling distances: half of what is left each time, or all of it.

    Ranks beyond a power of two first send theirs to a partner, and get the result from it.
    """
    shifts = len(ranks).bit_length() - 1
    inner, extra = ranks[: 1 << shifts], ranks[1 << shifts :]
    if len(extra):
        yield 1, [Transfers(extra, inner[: len(extra)], nbytes)]
        if times == 2:
            yield 1, [Transfers(inner[: len(extra)], extra, nbytes)]
    # The nearest first, where the most is exchanged.
    for shift in range(shifts):
        nbytes = nbytes / 2 if halves else nbytes
        partners = inner[np.arange(len(inner)) ^ (1 << shift)]
        yield times if halves else 1, [Transfers(inner, partners, nbytes)]


def _hierarchical(network: Network, nbytes: float, times: int) -> Rounds:
    """Go around a ring in each node, then around rings of the devices of equal place in a node."""
    devices = np.arange(network.devices).reshape(network.nodes, -1)
    if network.in_node > 1:
        cost = ring_cost(network.in_node, nbytes, times)
        yield cost.rounds, [_to_next(row, cost.round_bytes) for row in devices]
    if network.nodes > 1:
        cost = ring_cost(network.nodes, nbytes / network.in_node, times)
        yield cost.rounds, [_to_next(column, cost.round_bytes) for column in devices.T]


def _tree(network: Network, nbytes: float) -> Rounds:
    """Send pieces up and down two binary trees of nodes for each rail, all at once.

    An inner node of one tree is a leaf of the other. The devices of a node are a chain.
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
    yield min(options, key=lambda option: option[0] * network.round_seconds(option[1]))
