# %% [markdown]
r"""
# Lab 15: a sum through shared memory

The ranks of a machine add up a tensor without a message. Each writes its own where all see it, adds
up a part of all tensors, and copies the whole from where all have put their parts. What must
each rank wait for, and when?

**Given:** `inputs[r]` is a block of memory that rank r writes and all ranks see, and `total` is one
that all see and all may write. Both are at least as long as the tensor, and hold what the call
before has left there. `barrier()` waits until all ranks have called it as often.

**Counted:** the barriers, of which two are enough, also for one call right after another. Who
writes what: each rank adds up a part, one n-th of the values give or take one, and nobody adds up
another's. Any number of values. Every check lets one rank be late: before it writes, between two
barriers, and after the last.

`python -m microddp.labs check 15` runs it on 1, 2, 3 and 4 ranks; `torchrun --nproc-per-node=2` and
this file run its last cell. Both need Linux.
"""

# %%
from collections.abc import Callable, Sequence

import torch

import microddp
from microddp.shared import region_of


# %%
def shared_sum(
    tensor: torch.Tensor,
    rank: int,
    inputs: Sequence[torch.Tensor],
    total: torch.Tensor,
    barrier: Callable[[], None],
) -> None:
    """Replace a tensor by its sum over all ranks.

    Args:
        tensor: one dimension, as many values on every rank.
        rank: this one's number.
        inputs: for each rank, the block that it writes and all ranks see.
        total: a block that all ranks see and write.
        barrier: waits until all ranks have called it as often.
    """
    n, size = len(inputs), len(tensor)
    inputs[rank][:size] = tensor
    barrier()
    first, *others = (block[:size].tensor_split(n)[rank] for block in inputs)
    mine = total[:size].tensor_split(n)[rank]
    mine.copy_(first)
    for other in others:
        mine += other
    barrier()
    tensor.copy_(total[:size])


# %% tags=["try"]
comms = microddp.init()
region = region_of(comms)
mine = [region.zeros(6, torch.float32) for _ in range(2)]
offsets = comms.all_gather_data([region.offset_of(block) for block in mine])
inputs = [region.at(rank, offset, 6, torch.float32) for rank, (offset, _) in enumerate(offsets)]
total = region.at(0, offsets[0][1], 6, torch.float32)
tensor = torch.arange(6.0) + comms.rank
shared_sum(tensor, comms.rank, inputs, total, region.barrier)
comms.print(tensor)
comms.close()
