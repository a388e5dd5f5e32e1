"""All-reduce of machines with several ranks each: the network carries each sum once.

First a reduce-scatter through the shared memory of each machine gives every rank a share of the
machine's sum; then each share is all-reduced among the machines, over the network; then an
all-gather in each machine brings all shares to all ranks. With M machines, a machine's link carries
2 (M-1)/M S bytes each way, however many ranks it has. A ring through n ranks brings 2 (n-1)/n S
over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch

from microddp.allreduce import flattened, ring_all_reduce
from microddp.comms import Comms
from microddp.shared.collectives import shared_all_gather, shared_reduce_scatter
from microddp.shared.region import cached_per_comms, machines_of

# While one part of a tensor travels, the machine reduces the next and gathers the one before.
# That saved 3 to 5 % of the time that 16 MiB take in one part, and parts of half the size 1 to 3 %
# more (two hosts, links of 1 Gbit/s, AMD EPYC, November 2026).
PART_BYTES = 4 << 20


class Hierarchy:
    """Ranks by machine, and the groups among which their shares travel. Making one is a collective.

    A tensor is cut into as many shares as the largest machine has ranks. Each share has a *lane*, a
    group of one rank of each machine. On a machine with fewer ranks, a rank is in several lanes.

    Args:
        comms: all ranks of these machines.
        machines: the ranks of each machine.

    Attributes:
        machines: the ranks of each machine, in ascending order.
        shares: number of shares.
        inside: the group of this rank's machine.
        lanes: by share, the groups that this rank is in.

    Raises:
        ValueError: on every rank: ``machines`` does not have each rank once.
    """

    def __init__(self, comms: Comms, machines: Sequence[Sequence[int]]) -> None:
        every = sorted(rank for ranks in machines for rank in ranks)
        if every != [*range(comms.world_size)] or not all(machines):
            raise ValueError(
                f"rank {comms.rank}: expected machines that have each of the ranks 0 to "
                f"{comms.world_size - 1} once, got {[list(ranks) for ranks in machines]}"
            )
        self.machines = [sorted(ranks) for ranks in machines]
        self.shares = max(map(len, self.machines))
        groups = [comms.subgroup(ranks) for ranks in self.machines]
        (self.inside,) = (group for group in groups if group)
        # Neighbouring shares belong to one rank, so that its chunk inside the machine is one piece.
        members = [
            [ranks[share * len(ranks) // self.shares] for ranks in self.machines]
            for share in range(self.shares)
        ]
        lanes = [comms.subgroup(ranks) for ranks in members]
        self.lanes = {share: lane for share, lane in enumerate(lanes) if lane}
        self.network = ThreadPoolExecutor(max_workers=1, thread_name_prefix="between-machines")

    def chunks(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cut a flat tensor into the parts that the ranks of this machine reduce."""
        ends = [0, *accumulate(map(len, flat.tensor_split(self.shares)))]
        n = self.inside.world_size
        cuts = [ends[-(-k * self.shares // n)] for k in range(n + 1)]
        return [flat[start:end] for start, end in pairwise(cuts)]

    def all_reduce(self, tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
        """All-reduce in place: inside each machine, then between machines, then inside again.

        Args:
            tensor: as for :func:`hierarchical_all_reduce`.
            comms: all ranks. They are not kept: a hierarchy that is kept for them would keep them.
            op: as for :func:`hierarchical_all_reduce`.
        """
        inside_op = "sum" if op == "mean" else op
        # On another thread there is neither of the two.
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

        def cross(part: torch.Tensor) -> None:
            with mode():
                shares = part.tensor_split(self.shares)
                for share, lane in self.lanes.items():
                    ring_all_reduce(shares[share], lane, inside_op)

        with flattened(tensor, comms, op) as (flat, _):
            parts = flat.tensor_split(max(1, -(-flat.nbytes // PART_BYTES)))
            crossing = []
            for part in parts:
                shared_reduce_scatter(part, self.inside, inside_op, self.chunks(part))
                if len(parts) > 1:
                    crossing.append(self.network.submit(cross, part))
                else:  # nothing to do meanwhile
                    cross(part)
            for i, part in enumerate(parts):
                if crossing:
                    crossing[i].result()
                shared_all_gather(part, self.inside, self.chunks(part))


def hierarchical_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place by machine, over the network once for each machine.

    Arguments and errors are those of :func:`~microddp.shared.collectives.shared_all_reduce`, but
    there may be several machines, with any number of ranks each. The first call of a group finds
    its machines and makes their groups.
    """
    hierarchy_of(comms).all_reduce(tensor, comms, op)


@cached_per_comms
def hierarchy_of(comms: Comms) -> Hierarchy:
    """The hierarchy of a job's ranks by machine. A collective, when it is first called."""
    return Hierarchy(comms, machines_of(comms))
