"""New process groups of some of a group's ranks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from microddp.comms.checks import check_rank

if TYPE_CHECKING:
    from microddp.comms.collectives import Comms


def make_group(comms: Comms, ranks: Sequence[int], seconds: float) -> Any:
    """The process group of some ranks, on its members; see :meth:`Comms.subgroup`."""
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"rank {comms.rank}: expected distinct ranks for a group, got {ranks!r}")
    for member in ranks:
        check_rank(comms, "ranks", member)
    whole = comms.world_size == dist.get_world_size()
    if not whole and comms.backend == "nccl":
        raise RuntimeError(
            f"rank {comms.rank}: NCCL makes a group together with all ranks of the job, "
            f"expected subgroup() of their group of {dist.get_world_size()}, got it of one of "
            f"{comms.world_size}"
        )
    members = [dist.get_global_rank(comms.group, member) for member in ranks]
    with comms.agree(f"subgroup({sorted(ranks)})"), nullcontext() if whole else _own_name(comms):
        group: Any = dist.new_group(members, timeout=timedelta(seconds=seconds))
        if comms.rank in ranks and comms.backend == "gloo":
            # Who left at once would break connections that others are still making.
            dist.barrier(group)
    return group


@contextmanager
def _own_name(comms: Comms) -> Iterator[None]:
    """Let torch name a group by a number that this group's ranks agree on. A collective.

    It numbers groups as they are made. Ranks that made one without the others would count
    differently from then on, and would look for each other under different names.
    """
    world = dist.distributed_c10d._world
    count, number = world.group_count, comms.all_gather_data(secrets.randbits(62))[0]
    world.group_count = number
    try:
        yield
    finally:
        world.group_count = count
