"""Another right DiLoCo: PyTorch's optimizer outside, and weights that are copied one by one."""

import itertools

import torch
from torch.nn.functional import mse_loss


def outer_step(parameters, shared, velocity, lr, momentum, comms):
    local = torch.cat([p.detach().flatten() for p in parameters])
    comms.all_reduce(local)
    outer = torch.optim.SGD([shared], lr, momentum, nesterov=momentum > 0)
    if momentum:
        outer.state[shared]["momentum_buffer"] = velocity
    shared.grad = shared - local / comms.world_size
    outer.step()
    shared.grad = None
    for p, part in zip(parameters, shared.split([p.numel() for p in parameters]), strict=True):
        p.data.copy_(part.view_as(p))


def train(model, inner, batches, every, lr, momentum, comms):
    parameters = list(model.parameters())
    shared = torch.cat([p.detach().flatten() for p in parameters])
    velocity = torch.zeros_like(shared)
    rest = iter(batches)
    while taken := list(itertools.islice(rest, every)):
        for inputs, targets in taken:
            inner.zero_grad()
            mse_loss(model(inputs), targets).backward()
            inner.step()
        if len(taken) == every:
            outer_step(parameters, shared, velocity, lr, momentum, comms)
