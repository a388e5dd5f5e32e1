# %% [markdown]
r"""
# Lab 15: a sum through shared memory

The ranks of a machine add up a tensor without a message. Each gives its own where all see it, adds
up a part of all that was given, and takes the whole from where all have put their parts. What must
each rank wait for, and when?

**Given:** `given[r]` is a block of memory that rank r writes and all ranks see, and `total` is one
that all see and all may write. Both are at least as long as the tensor, and hold what the call
before has left there. `meet()` waits until all ranks have called it as often.

**Counted:** the meetings, of which two are enough, also for one call right after another. Who
writes what: each rank adds up a part, one n-th of the values give or take one, and nobody adds up
another's. Any number of values. Every check lets one rank be late: before it gives, between two
meetings, and after the last.

`python -m microddp.labs check 15` runs it on 1, 2, 3 and 4 ranks; `torchrun --nproc-per-node=2` and
this file run its last cell. Both need Linux.
"""

# %%
from collections.abc import Callable, Sequence

import torch

import microddp
from microddp.shared import room_of


# %%
def shared_sum(
    tensor: torch.Tensor,
    rank: int,
    given: Sequence[torch.Tensor],
    total: torch.Tensor,
    meet: Callable[[], None],
) -> None:
    """Replace a tensor by its sum over all ranks.

    Args:
        tensor: one dimension, as many values on every rank.
        rank: this one's number.
        given: a block of each rank.
        total: a block of all.
        meet: to be called as often on every rank.
    """
    n, size = len(given), len(tensor)
    given[rank][:size] = tensor
    meet()
    first, *others = (block[:size].tensor_split(n)[rank] for block in given)
    mine = total[:size].tensor_split(n)[rank]
    mine.copy_(first)
    for other in others:
        mine += other
    meet()
    tensor.copy_(total[:size])


# %% tags=["try"]
comms = microddp.init()
room = room_of(comms)
mine = [room.zeros(6, torch.float32) for _ in range(2)]
places = comms.all_gather_data([room.place(block) for block in mine])
given = [room.at(rank, place, 6, torch.float32) for rank, (place, _) in enumerate(places)]
total = room.at(0, places[0][1], 6, torch.float32)
tensor = torch.arange(6.0) + comms.rank
shared_sum(tensor, comms.rank, given, total, room.meet)
comms.print(tensor)
comms.close()
