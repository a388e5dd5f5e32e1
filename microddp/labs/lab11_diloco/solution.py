# %% [markdown]
r"""
# Lab 11: DiLoCo's outer step

Let each rank train by itself for $H$ steps. Then the ranks meet: what they did since the last
meeting is averaged, an outer optimizer moves the weights they share by it, and every rank goes on
from those. The outer optimizer is SGD with Nesterov momentum, as PyTorch's
`torch.optim.SGD(..., nesterov=True)` has it. Build it by hand.

**Given:** `comms.all_reduce_mean(tensor)` replaces a contiguous tensor by its mean over all ranks.
From PyTorch, `parameters_to_vector(parameters)` makes a flat tensor of parameters;
`vector_to_parameters(flat, parameters)` makes parameters views of a flat tensor: they share its
memory from then on. `inner_step` below trains a model by one batch.

**Counted:** collectives, their bytes, and after which step they come. In $H$ steps there is one
all-reduce, of as many bytes as the model's parameters have. After a meeting all ranks have the same
bits.

`python -m microddp.labs check 11` runs it on 1, 2, 3 and 4 ranks.
"""

# %%
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import microddp

Batch = tuple[torch.Tensor, torch.Tensor]


# %%
def inner_step(model: nn.Module, inner: torch.optim.Optimizer, batch: Batch) -> None:
    """Train a model by one batch of inputs and targets."""
    inputs, targets = batch
    inner.zero_grad()
    mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call,unused-ignore]
    inner.step()


# %%
def outer_step(
    parameters: Sequence[nn.Parameter],
    shared: torch.Tensor,
    velocity: torch.Tensor,
    lr: float,
    momentum: float,
    comms: microddp.Comms,
) -> None:
    """Hold a meeting: move the shared weights, and let every rank go on from them.

    The pseudo-gradient is where the ranks came from minus where they went, averaged over them. With
    it the outer optimizer takes a step, with Nesterov momentum.

    Args:
        parameters: this rank's, which become the shared ones, in memory of their own.
        shared: the weights after the last meeting: flat, in the order of the parameters, without
            gradient, the same on every rank; changed in place.
        velocity: of the outer optimizer, of the same shape, 0 before the first meeting; the same on
            every rank, changed in place.
        lr: the outer learning rate.
        momentum: from 0 to below 1.
        comms: the ranks.
    """
    with torch.no_grad():
        pseudo_gradient = shared - parameters_to_vector(parameters)
        comms.all_reduce_mean(pseudo_gradient)
        velocity.mul_(momentum).add_(pseudo_gradient)
        shared.sub_(lr * (pseudo_gradient + momentum * velocity))
        vector_to_parameters(shared.clone(), parameters)


# %%
def train(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    batches: Iterable[Batch],
    every: int,
    lr: float,
    momentum: float,
    comms: microddp.Comms,
) -> None:
    """Train a model on this rank's batches, with a meeting after every so many of them.

    The inner optimizer keeps its state over meetings. Batches that follow on the last meeting are
    trained, too, but need no meeting of their own.

    Args:
        model: with the same weights on every rank in the beginning.
        inner: the optimizer of its parameters.
        batches: as many on every rank.
        every: steps from one meeting to the next.
        lr: see ``outer_step``.
        momentum: see ``outer_step``.
        comms: the ranks.
    """
    parameters = list(model.parameters())
    shared = parameters_to_vector(parameters).detach().clone()
    velocity = torch.zeros_like(shared)
    for step, batch in enumerate(batches, start=1):
        inner_step(model, inner, batch)
        if step % every == 0:
            outer_step(parameters, shared, velocity, lr, momentum, comms)


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
model = nn.Linear(2, 1).to(comms.device)
torch.manual_seed(comms.rank)
inputs = torch.randn(64, 8, 2).to(comms.device)
batches = [(x, 3 * x[:, :1] - 2 * x[:, 1:]) for x in inputs]
inner = torch.optim.AdamW(model.parameters(), lr=0.1)
train(model, inner, batches, every=8, lr=0.7, momentum=0.5, comms=comms)
comms.print(model.weight)
comms.close()
