# %% [markdown]
r"""
# Lab 03: the naive data-parallel step

Every rank has a model and its own shard of the batch. After each step, all ranks should hold the
weights that one device would hold after a step on the whole batch. Shards may differ in size, and
each sample of the batch counts as much as any other. That is more than the chapter's step does,
whose shards are equal; chapter 01 has the weights, in "Where it breaks: unequal shards".

**Given:** `comms.broadcast(tensor)` overwrites a tensor on every rank with that of rank 0, in
place, and `comms.all_reduce(tensor)` with the sum of all ranks' tensors. Both take contiguous
tensors of one shape and dtype on every rank. `comms.rank` is this rank's number,
`comms.world_size` how many there are, and `comms.device` where tensors must be.

**Counted:** the weights, to $10^{-9}$ in float64, against one process that takes the step on the
whole batch, with SGD, with momentum and with Adam. The ranks' weights among each other, bit for
bit. The bytes that all ranks together send in a step: at most $2(n-1)\,S$ for gradients of $S$
bytes, which is one all-reduce of each, and 1 KiB a rank for what else they tell each other.

`python -m microddp.labs check 03` runs it on 1, 2, 3 and 4 ranks.
"""

# %%
from collections.abc import Callable

import torch
from torch import nn

import microddp


# %%
def start_equal(model: nn.Module, comms: microddp.Comms) -> None:
    """Overwrite the whole model with rank 0's, in place: every parameter and every buffer.

    Args:
        model: of the same structure on every rank; an optimizer may have its parameters already.
            Buffers may be integers.
        comms: the ranks.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        comms.broadcast(tensor.detach())


# %%
def naive_step(
    model: nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    comms: microddp.Comms,
) -> None:
    """Train one step on all ranks' shards, as one device would on the whole batch.

    Args:
        model: with the same weights on every rank. Some of its parameters may get no gradient, the
            same ones on every rank; the step leaves these alone.
        loss_fn: from outputs and targets to a scalar, the mean over the shard's samples.
        optimizer: of the model's parameters, of any kind.
        x: this rank's inputs, shape ``(samples, ...)``, at least one sample. How many the other
            ranks have, only they know.
        y: the targets of ``x``, as many.
        comms: the ranks.
    """
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    samples = torch.tensor([len(x)], device=x.device)
    comms.all_reduce(samples)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= len(x) / samples.item()
            comms.all_reduce(parameter.grad)
    optimizer.step()


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(comms.rank)
model = nn.Linear(3, 2).to(comms.device)
start_equal(model, comms)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4 + comms.rank, 3, device=comms.device)
for _ in range(10):
    naive_step(model, nn.functional.mse_loss, optimizer, x, x[:, :2], comms)
comms.print("the bias on each rank:", comms.all_gather(model.bias.detach()).tolist())
comms.close()
