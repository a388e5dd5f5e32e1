# %% [markdown]
"""
# Lab 10: top-k with error feedback

Average a gradient over the ranks, but let each of them send only the `k` values that are largest by
magnitude, with their places. What a rank does not send it keeps, and adds to its next gradient.

**Given:** `comms.all_gather(tensor)` returns the tensors of all ranks, in rank order, with shape
`(world_size, *tensor.shape)`; they must be contiguous and have the same shape everywhere.
`comms.rank` is this rank's number, `comms.world_size` how many there are.

**Counted:** the bytes that each rank gives into collectives: of a gradient in fp32 at most $8k$,
which is $k$ values and $k$ places in int32. Such places reach to $2^{31} - 1$, far beyond any
bucket; `topk` returns them in int64, which would make $12k$. Also the mean in each of several
steps, and whether all ranks have the same bits.

`python -m microddp.labs check 10` runs it on 1, 2, 3 and 4 ranks.
"""

# %%
import torch

import microddp


# %%
class TopK:
    """Averages one gradient over the ranks, step after step, by its largest values.

    Args:
        k: how many values a rank sends in a step, at least 1. A tensor with fewer is sent whole.
        comms: the ranks.

    Attributes:
        residual: what was not sent yet, shaped as the gradient; ``None`` before the first step.
    """

    def __init__(self, k: int, comms: microddp.Comms) -> None:
        self.k, self.comms = k, comms
        self.residual: torch.Tensor | None = None

    def average(self, gradient: torch.Tensor) -> None:
        """Replace a gradient by the mean over all ranks of what they send of it.

        What this rank wants to send is its gradient plus what it did not send before. Of that it
        sends the ``k`` values largest by magnitude. Where a rank sends nothing, it counts as 0 in
        the mean.

        Args:
            gradient: one dimension, contiguous, floating point, of the same size on every rank and
                in every step; overwritten.
        """
        rest = gradient.clone() if self.residual is None else gradient + self.residual
        places = rest.abs().topk(min(self.k, len(rest))).indices
        values, theirs = self.comms.all_gather(rest[places]), self.comms.all_gather(places.int())
        rest[places] = 0
        self.residual = rest
        gradient.zero_()
        for value, place in zip(values, theirs, strict=True):
            gradient.index_add_(0, place, value, alpha=1 / self.comms.world_size)


# %% tags=["try"]
comms = microddp.init()
top = TopK(2, comms)
for _ in range(4):
    gradient = torch.tensor([1.0, -8.0, 3.0, 5.0, -2.0]) + comms.rank
    top.average(gradient)
    comms.print(gradient)
comms.close()
