# %% [markdown]
r"""
# Lab 16: an n-th of the optimizer

Every rank of DDP keeps what Adam remembers of every parameter, and updates every parameter, as all
others do. Let each rank do that for an n-th of them, its *shard*: stage 1 of ZeRO. Two functions:
one prepares, and one takes the place of `optimizer.step()`.

**Given:** `comms`, with `ring_reduce_scatter` and `ring_all_gather`, the two halves of an
all-reduce: the first leaves in chunk `rank` of a flat tensor the mean of all ranks', the second
brings every rank's chunk to all. Both cut by `torch.tensor_split`, so a length that n divides is
cut into equal parts.

**Counted:** what the optimizer keeps, an n-th. What is sent, by these two rings and not by
PyTorch's own collectives, no more than an all-reduce sends. That parameters are the same bits on
all ranks, and those that DDP would have.

`python -m microddp.labs check 16` runs it on 1, 2, 3 and 4 ranks; `torchrun --nproc-per-node=2` and
this file run its last cell.
"""

# %%
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import microddp
from microddp.allreduce import ring_all_gather, ring_reduce_scatter
from microddp.comms import Comms

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


# %%
@dataclass
class Sharded:
    """A model whose optimizer is sharded.

    Attributes:
        model: its parameters are views of ``unsharded``.
        unsharded: all parameters, flat, padded with zeros until n divides the length.
        shard: this rank's n-th of it, in the same memory.
        optimizer: an optimizer of ``shard`` alone.
    """

    model: nn.Module
    unsharded: torch.Tensor
    shard: nn.Parameter
    optimizer: torch.optim.Optimizer


def shard(model: nn.Module, comms: Comms, make_optimizer: MakeOptimizer) -> Sharded:
    """Give this rank its shard of a model's parameters, and an optimizer of it.

    Args:
        model: equal on all ranks; all its parameters train, and are float32.
        comms: the ranks.
        make_optimizer: makes an optimizer of the parameters that it is given.
    """
    n, rank = comms.world_size, comms.rank
    unsharded = parameters_to_vector(model.parameters()).detach()
    unsharded = pad(unsharded, (0, -len(unsharded) % n))
    vector_to_parameters(unsharded, model.parameters())
    own = nn.Parameter(unsharded.tensor_split(n)[rank])
    return Sharded(model, unsharded, own, make_optimizer([own]))


def update(sharded: Sharded, comms: Comms) -> None:
    """Update all parameters by the mean of all ranks' gradients, and set these to ``None``.

    Args:
        sharded: what :func:`shard` returned; its model's parameters have this rank's gradients.
        comms: the ranks.
    """
    parameters = list(sharded.model.parameters())
    gradients = parameters_to_vector(p.grad for p in parameters if p.grad is not None)
    gradients = pad(gradients, (0, len(sharded.unsharded) - len(gradients)))
    sharded.shard.grad = ring_reduce_scatter(gradients, comms, "mean")
    sharded.optimizer.step()
    ring_all_gather(sharded.unsharded, comms)
    for parameter in parameters:
        parameter.grad = None


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
model = nn.Linear(3, 2)
sharded = shard(model, comms, torch.optim.Adam)
for _ in range(3):
    model(torch.ones(1, 3) + comms.rank).square().sum().backward()
    update(sharded, comms)
comms.print(model.weight.detach())
comms.close()
