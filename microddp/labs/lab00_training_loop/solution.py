# %% [markdown]
"""
# Lab 00: a timed training loop

Train a model over some batches, and say how many seconds went into the forward passes, the backward
passes and the optimizer's steps, and how large the loss was. Measuring must neither change what is
learned nor keep memory.

**Given:** `now()` reads the clock, in seconds. On a GPU such a function first waits for the device.
`loss_fn(outputs, targets)` is the mean loss over the samples of a batch. `optimizer.zero_grad()`
and `optimizer.step()` are PyTorch's, and so is `loss.backward()`.

**Counted:** the seconds of each part, exactly: the checks use a clock of their own, which goes on
only where a batch is loaded, gradients are zeroed, the model or the loss is called, or a gradient
or a step is computed. The forward part is the model and the loss. Loading a batch and zeroing
gradients belong to no part. Also compared: the weights after training, the mean loss over all
samples where batches differ in size, and how many autograd graphs are in memory at a time, at most
one when a forward pass begins.

`python -m microddp.labs check 00` runs it on 1 rank.
"""

# %%
import time
from collections.abc import Callable, Iterable

import torch

import microddp
from microddp.report import human_seconds

PARTS = ("forward", "backward", "optimizer")


# %%
def train(
    model: torch.nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    now: Callable[[], float],
    warmup: int = 0,
) -> tuple[dict[str, float], float]:
    """Take one training step for each batch, and time its parts.

    Args:
        model: to train; gradients that it already has must not matter.
        loss_fn: takes outputs and targets to their mean loss, a tensor without dimensions.
        optimizer: of the model's parameters.
        batches: inputs and targets, one row for each sample; the last batch may be smaller. At
            least one batch. It can be read only once.
        now: reads the clock, in seconds.
        warmup: how many batches at the beginning are not timed. They are trained on like all
            others, and their losses count.

    Returns:
        For each of ``PARTS``, its seconds, added over all timed batches. And the mean loss over all
        samples, each as it was before its batch's step, as a float.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    total, samples = 0.0, 0
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        began = now()
        loss = loss_fn(model(x), y)
        forward = now()
        loss.backward()
        backward = now()
        optimizer.step()
        stepped = now()
        if i >= warmup:
            seconds["forward"] += forward - began
            seconds["backward"] += backward - forward
            seconds["optimizer"] += stepped - backward
        total += loss.item() * len(x)
        samples += len(x)
    return seconds, total / samples


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(50)]
cross_entropy = torch.nn.functional.cross_entropy
seconds, loss = train(model, cross_entropy, optimizer, batches, time.perf_counter, warmup=5)
comms.print({part: human_seconds(took) for part, took in seconds.items()}, f"loss {loss:.3f}")
comms.close()
