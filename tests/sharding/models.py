"""What tests of sharding train: sizes that nothing divides, and parameters that are shared."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

SMALL = 0.0005  # MiB: several groups, of sizes that no number of ranks divides
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Odd(nn.Module):
    """Odd sizes, a weight that two layers share, one layer used twice, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(7, 13), nn.Linear(13, 13)
        self.tied, self.frozen = nn.Linear(13, 13, bias=False), nn.Linear(13, 13)
        self.tied.weight = self.twice.weight
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(13, 3)

    def forward(self, x):
        x = torch.relu(self.twice(self.twice(torch.relu(self.first(x)))))
        return self.last(self.frozen(torch.relu(self.tied(x))))


def odd():
    torch.manual_seed(0)
    return Odd()


def batch(comms, step):
    generator = torch.Generator().manual_seed(100 * step + comms.rank)
    return torch.randn(5, 7, generator=generator), torch.randn(5, 3, generator=generator)


def weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def storage_bytes(*tensors):
    """Of distinct storages."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def used_twice(comms, recomputed, shard):
    """A sharded layer after a backward through two uses, and what sharded it.

    Where each use is recomputed in a reentrant checkpoint, it has a backward of its own.
    """
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    run = partial(checkpoint, layer, use_reentrant=True) if recomputed else layer
    sharded = shard(layer, comms, collectives="ring")
    run(torch.tanh(run(x * (comms.rank + 1)))).square().sum().backward()
    return layer, sharded


def by_ddp(comms, kind, steps=20, clip=None):
    ddp = TorchDDP(odd(), process_group=comms.group, bucket_cap_mb=SMALL)
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mse_loss(ddp(batch(comms, step)[0]), batch(comms, step)[1]).backward()
        if clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
    return weights(ddp.module)
