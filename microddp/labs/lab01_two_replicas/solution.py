# %% [markdown]
"""
# Lab 01: replicas by hand

Train several copies of a model in one process as if they were one. In each step, every replica
computes the gradient of its own part of the batch. Then all of them step with the gradient of the
whole batch.

**Given:** the replicas, equal at first, and an optimizer for each. `loss_fn(outputs, targets)` is
the mean loss over the samples that it is given. `x.tensor_split(n)` cuts a batch into n shards,
whose sizes differ by at most one; some are empty where the samples are fewer.

**Counted:** the samples that each replica sees: each sample goes to one replica, and no replica
gets more than $\\lceil B/n \\rceil$ of $B$. The gradients that the optimizers find when they step:
the same bits on every replica, in a tensor of each replica's own, and up to rounding those of one
model on the whole batch. Each optimizer steps once. All of it also for batches that n does not
divide, for fewer samples than replicas, for frozen parameters, and over several steps.

`python -m microddp.labs check 01` runs it on 1 rank, with 1, 2, 3 and 4 replicas.
"""

# %%
import copy
from collections.abc import Callable, Sequence

import torch

import microddp


# %%
def split_step(
    replicas: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
) -> float:
    """Take one training step with all replicas, as one model would on the whole batch.

    Args:
        replicas: copies of a model, with equal weights.
        optimizers: one for each replica, in the same order.
        loss_fn: takes outputs and targets to their mean loss, a tensor without dimensions. Of no
            samples it is ``nan``.
        x: the inputs of the whole batch, one row for each sample; at least one.
        y: the targets, as many rows.

    Returns:
        The mean loss over the samples of the whole batch, before the step.
    """
    n, batch = len(replicas), len(x)
    shards = zip(x.tensor_split(n), y.tensor_split(n), strict=True)
    total = 0.0
    for replica, (inputs, targets) in zip(replicas, shards, strict=True):
        replica.zero_grad()
        if len(inputs) > 0:
            loss = loss_fn(replica(inputs), targets) * len(inputs) / batch
            loss.backward()
            total += loss.item()
    for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
        gradients = [p.grad for p in copies if p.grad is not None]
        if gradients:
            whole = torch.stack(gradients).sum(0)
            for p in copies:
                p.grad = whole.clone()
    for optimizer in optimizers:
        optimizer.step()
    return total


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
replicas = [torch.nn.Linear(3, 1)]
replicas.append(copy.deepcopy(replicas[0]))
optimizers = [torch.optim.Adam(replica.parameters(), lr=0.1) for replica in replicas]
x = torch.randn(7, 3)
y = x.sum(1, keepdim=True)
for _ in range(5):
    comms.print(f"{split_step(replicas, optimizers, torch.nn.functional.mse_loss, x, y):.3f}")
comms.print([replica.weight.tolist() for replica in replicas])
comms.close()
