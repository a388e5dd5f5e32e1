"""Another right one: gradients of plain sums, which are scaled when backward is over."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy


def accumulate(model, micro_batches, comms):
    *others, last = micro_batches

    def backward(inputs, targets):
        losses = cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        losses.sum().backward()

    with model.no_sync():
        for each in others:
            backward(*each)
    backward(*last)
    mine = sum(int(targets.ge(0).sum()) for _, targets in micro_batches)
    tokens = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(tokens, group=comms.group)
    if tokens:
        for parameter in model.parameters():
            parameter.grad.mul_(comms.world_size / tokens.item())
