"""Ranks as a grid: those of a node, and those with the same number in every node."""

from __future__ import annotations

from microddp.comms import Comms
from microddp.shared import cached_per_comms, machines_of


def nodes_of(comms: Comms, node: int | None = None) -> tuple[Comms, Comms]:
    """Divide the ranks into nodes, and across them. A collective; the same groups each time.

    Args:
        comms: the ranks.
        node: how many ranks in a row are a node; default: those of each machine.

    Returns:
        The ranks of this rank's node, and those with its number in every node.

    Raises:
        ValueError: the nodes would have different numbers of ranks.
    """
    return _divide(comms, node)


@cached_per_comms
def _divide(comms: Comms, node: int | None) -> tuple[Comms, Comms]:
    every = [*range(comms.world_size)]
    nodes = machines_of(comms) if node is None else [every[i : i + node] for i in every[::node]]
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(
            f"rank {comms.rank}: expected nodes of equal size, got {[len(r) for r in nodes]} ranks"
        )
    (inside,) = filter(None, [comms.subgroup(ranks) for ranks in nodes])
    (across,) = filter(None, [comms.subgroup(ranks) for ranks in zip(*nodes, strict=True)])
    return inside, across
