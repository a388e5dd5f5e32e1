"""Another right one: shards copied out of the flat tensor, and put back."""

from types import SimpleNamespace

import torch
from torch import nn

from microddp.allreduce import ring_all_gather, ring_reduce_scatter


def shard(model, comms, make_optimizer):
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    part = -(-count // comms.world_size)
    flat = torch.zeros(part * comms.world_size)
    start = 0
    for p in parameters:
        flat[start : start + p.numel()] = p.detach().flatten()
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    mine = nn.Parameter(flat[comms.rank * part : (comms.rank + 1) * part].clone())
    return SimpleNamespace(
        model=model, unsharded=flat, shard=mine, optimizer=make_optimizer([mine])
    )


def update(sharded, comms):
    gradients = torch.zeros_like(sharded.unsharded)
    start = 0
    for p in sharded.model.parameters():
        gradients[start : start + p.numel()] = p.grad.flatten()
        start += p.numel()
        p.grad = None
    ring_reduce_scatter(gradients, comms)
    part = len(sharded.shard)
    place = slice(comms.rank * part, (comms.rank + 1) * part)
    sharded.shard.grad = gradients[place] / comms.world_size
    sharded.optimizer.step()
    sharded.unsharded[place] = sharded.shard.detach()
    ring_all_gather(sharded.unsharded, comms)
