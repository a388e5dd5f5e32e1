"""Ranks as a grid: those of a node, and those with the same number in every node."""

from __future__ import annotations

from microddp.comms import Comms
from microddp.shared import cached_per_comms, machines_of

Grid = tuple[Comms, Comms]


def nodes_of(comms: Comms, node: int | None = None) -> Grid:
    """Divide the ranks into nodes, and across them. A collective; the same groups each time.

    Args:
        comms: the ranks.
        node: how many ranks in a row are a node; default: those of each machine.

    Returns:
        The ranks of this rank's node, and those with its number in every node.

    Raises:
        ValueError: the nodes would have different numbers of ranks.
    """
    known = _known(comms)
    if node not in known:
        known[node] = _divide(comms, node)
    return known[node]


@cached_per_comms
def _known(_: Comms) -> dict[int | None, Grid]:
    return {}


def _divide(comms: Comms, node: int | None) -> Grid:
    n = comms.world_size
    nodes = (
        machines_of(comms)
        if node is None
        else [[*range(first, min(n, first + node))] for first in range(0, n, node)]
    )
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(
            f"rank {comms.rank}: expected nodes of equal size, got {[len(r) for r in nodes]} ranks"
        )
    (inside,) = filter(None, [comms.subgroup(ranks) for ranks in nodes])
    (across,) = filter(None, [comms.subgroup(ranks) for ranks in zip(*nodes, strict=True)])
    return inside, across
