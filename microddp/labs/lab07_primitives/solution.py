# %% [markdown]
r"""
# Lab 07: the right primitive

Rank 0 has read the data, and its model is the one to use. Every rank should get a copy of the model
and a part of the samples. Each then computes the losses of its part. In the end rank 0 should have
the losses of all samples, in order, and every rank their mean. Use for each of these what sends the
fewest bytes.

**Given:** all collectives. `comms.broadcast(tensor)` and `comms.all_reduce(tensor)` overwrite the
tensor, the others return a new one. `comms.scatter(tensor)` on rank 0, and `comms.scatter()`
elsewhere, deals out along the first dimension, with shape and dtype. `comms.gather(tensor)` joins
tensors of any lengths on rank 0, and is None elsewhere. `comms.all_gather(tensor)` takes one shape
on all ranks. `comms.all_gather_data(value)` takes numbers, texts and lists.

**Counted:** the bytes that all ranks together send: what somebody needs and has not got, once.

| | at most |
|---|---|
| `initialise` | $(n-1)\,M$, for a model of $M$ bytes |
| `distribute` | $S - S_0$, for $S$ bytes of samples, of which rank 0 keeps $S_0$ |
| `collect` | $P - P_0$, for $P$ bytes of losses, of which rank 0 has $P_0$ |

Each may take 1 KiB a rank more, for shapes, sizes and sums. `initialise` may make 4 calls, however
many tensors the model has.

`python -m microddp.labs check 07` runs it on 1, 2, 3 and 4 ranks.
"""

# %%
import torch
from torch import nn

import microddp


# %%
def initialise(model: nn.Module, comms: microddp.Comms) -> None:
    """Overwrite the whole model with rank 0's, in place: every parameter and every buffer.

    Args:
        model: of the same structure on every rank, with tensors of one or two dtypes.
        comms: the ranks.
    """
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # in one order on all ranks
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        comms.broadcast(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


# %%
def distribute(samples: torch.Tensor | None, comms: microddp.Comms) -> torch.Tensor:
    """Give each rank its part of the samples that rank 0 has.

    Args:
        samples: on rank 0, of shape ``(samples, ...)`` and any dtype, maybe fewer samples than
            there are ranks; None on the others, which know neither shape nor dtype.
        comms: the ranks.

    Returns:
        This rank's samples, of the same dtype, on its device. The ranks' parts are blocks: one
        after the other, in rank order, they are the samples. Their sizes differ by at most one.
    """
    return comms.scatter(samples)


# %%
def collect(losses: torch.Tensor, comms: microddp.Comms) -> tuple[torch.Tensor | None, float]:
    """Bring all losses to rank 0, and their mean to every rank.

    Args:
        losses: of this rank's samples, one dimension, floating point; another number on each
            rank, on some maybe none.
        comms: the ranks.

    Returns:
        On rank 0 the losses of all ranks, in rank order, and None elsewhere, where they are not
        sent; and on every rank the mean over the losses of all.
    """
    sums = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
    comms.all_reduce(sums)
    return comms.gather(losses), (sums[0] / sums[1]).item()


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(comms.rank)
model = nn.Linear(3, 1).to(comms.device)
initialise(model, comms)
part = distribute(torch.randn(10, 3) if comms.rank == 0 else None, comms)
comms.print("parts of", comms.all_gather_data(len(part)), "samples")
losses, mean = collect(model(part).detach()[:, 0] ** 2, comms)
comms.print(f"losses {losses}, their mean {mean:.3f}")
comms.close()
