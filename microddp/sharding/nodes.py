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
        ValueError: on every rank: the nodes would have different numbers of ranks, or none, or
            ``node`` differs between ranks.
    """
    return _divide(comms, node)


@cached_per_comms
def _divide(comms: Comms, node: int | None) -> tuple[Comms, Comms]:
    said = comms.all_gather_data(node)
    if len(set(said)) > 1 or (node is not None and node < 1):
        raise ValueError(
            f"rank {comms.rank}: expected one number of ranks in a node, from 1 on, got {said} on "
            f"ranks 0 to {comms.world_size - 1}"
        )
    every = [*range(comms.world_size)]
    nodes = machines_of(comms) if node is None else [every[i : i + node] for i in every[::node]]
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(
            f"rank {comms.rank}: expected nodes of equal size, got {[len(r) for r in nodes]} ranks"
        )
    (inside,) = filter(None, [comms.subgroup(ranks) for ranks in nodes])
    (across,) = filter(None, [comms.subgroup(ranks) for ranks in zip(*nodes, strict=True)])
    return inside, across
