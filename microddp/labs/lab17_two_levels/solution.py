# %% [markdown]
r"""
# Lab 17: HSDP's two reductions

The ranks of a node divide the parameters, and the nodes keep replicas. After backward each rank has
a whole gradient, and its optimizer needs one part of the mean over *all* ranks: the part that is
this rank's in its node. Links between nodes are slow. Write the function that reduces, and sends as
little as possible over them.

**Given:** the grid of ranks, with `ring_reduce_scatter` and `ring_all_reduce` for any group of it.
The first cuts a flat tensor by `torch.tensor_split`, and returns chunk `rank` of the sum or
`"mean"`, a view. The second leaves the whole sum or `"mean"` in its tensor.

**Counted:** the values. What a rank sends by these rings inside its node, no more than a reduce-
scatter does, and between nodes, no more than an all-reduce of one part does. That replicas have the
same bits.

`python -m microddp.labs check 17` runs it on 1, 4 and 6 ranks, in all grids; `torchrun
--nproc-per-node=4` and this file run its last cell.
"""

# %%
from dataclasses import dataclass

import torch

import microddp
from microddp.allreduce import ring_all_reduce, ring_reduce_scatter
from microddp.comms import Comms
from microddp.sharding import nodes_of


# %%
@dataclass
class Grid:
    """All ranks, and this rank's place among them.

    Attributes:
        everyone: all ranks.
        inside: the ranks of this rank's node, which divide the parameters.
        across: the ranks with this one's number in every node, which keep the same part.
    """

    everyone: Comms
    inside: Comms
    across: Comms


def reduce_gradients(flat: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return this rank's part of the mean over all ranks.

    Args:
        flat: this rank's gradients, flat; the ranks of a node divide its length. It may be
            overwritten.
        grid: the ranks.
    """
    part = ring_reduce_scatter(flat, grid.inside, "mean")
    ring_all_reduce(part, grid.across, "mean")
    return part


# %% tags=["try"]
comms = microddp.init()
node = 2 if comms.world_size % 2 == 0 else 1
grid = Grid(comms, *nodes_of(comms, node))
part = reduce_gradients(torch.arange(4.0) + comms.rank, grid)
comms.print(comms.all_gather_data(part.tolist()))
comms.close()
