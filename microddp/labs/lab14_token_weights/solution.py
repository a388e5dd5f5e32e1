# %% [markdown]
r"""
# Lab 14: tokens, not samples

A language model is trained on texts of unequal length. Rows are filled up to one length, and the
targets that only fill up are `-100`, which the loss leaves out. So ranks, and the micro-batches of
a rank, have unequal numbers of *tokens*: targets that count. Scale the losses so that the gradient
is still the one that a single process would get from the mean loss over all tokens of the step.

**Given:** `model`, wrapped in `microddp.DDP`: a backward pass replaces `.grad` by its mean over the
ranks, and `model.no_sync()` around forward and backward only adds up on this rank, as in chapter
06. `model(inputs)` has a row of logits for each place, of shape `(rows, length, classes)`.
`cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")` adds up over tokens; with
`reduction="mean"` it divides by their number. Both leave out targets of `-100`.
`comms.all_reduce(tensor)` replaces a tensor by its sum over the ranks.

**Counted:** gradients are sent once a step, after the last micro-batch. Numbers of tokens are sent
once a step as well: at most two collectives besides those of the gradients, and one is enough.

Some micro-batches have no token at all, on some steps those of a whole rank. They count as nothing.
A step in which nobody has a token has a gradient of zeros.

`python -m microddp.labs check 14` runs it on 1, 2 and 3 ranks.
"""

# %%
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import microddp

MicroBatch = tuple[torch.Tensor, torch.Tensor]
LEFT_OUT = -100


# %%
def accumulate(model: microddp.DDP, micro_batches: list[MicroBatch], comms: microddp.Comms) -> None:
    """Leave in ``.grad`` the gradient of the mean loss over all tokens of the step.

    These are the tokens of all micro-batches of all ranks. The result is the same on every rank.

    Args:
        model: its parameters have no gradients yet.
        micro_batches: this rank's inputs and targets, both ``(rows, length)``; the number of rows
            and of tokens differs between them. Every rank has equally many, at least one.
        comms: the ranks.
    """
    counts = [(targets != LEFT_OUT).sum() for _, targets in micro_batches]
    tokens = torch.stack(counts).sum()
    comms.all_reduce(tokens)
    scale = comms.world_size / max(1, tokens.item())
    for i, (inputs, targets) in enumerate(micro_batches, start=1):
        with nullcontext() if i == len(micro_batches) else model.no_sync():
            logits = model(inputs).flatten(0, 1)
            loss = cross_entropy(logits, targets.flatten(), reduction="sum") * scale
            torch.autograd.backward(loss)


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
model = microddp.DDP(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).to(comms.device), comms)
torch.manual_seed(1 + comms.rank)
micro_batches = []
for _ in range(3):
    inputs, targets = torch.randint(9, (2, 2, 6)).to(comms.device)
    targets[:, 1 + comms.rank :] = LEFT_OUT
    micro_batches.append((inputs, targets))
accumulate(model, micro_batches, comms)
comms.print([p.grad.norm().item() for p in model.parameters() if p.grad is not None])
comms.close()
