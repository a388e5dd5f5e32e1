"""What rank 0 of 1024 calls in a step of each strategy, in one process; printed as JSON.

PyTorch's ``fake`` backend takes every call and moves nothing.
"""

import json

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.testing._internal.distributed.fake_pg import FakeStore

from microddp import sharding  # noqa: F401 - registers its strategies
from microddp.comms import Comms
from microddp.model import FullMLP
from microddp.step import take_step
from microddp.strategies import STRATEGIES

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
comms = Comms.of_group(None, torch.device("cpu"))
calls = []


def watch(owner, name, half, nbytes):
    before = getattr(owner, name)

    def call(*args, **kwargs):
        calls.append((half, nbytes(args)))
        return before(*args, **kwargs)

    setattr(owner, name, call)


for owner in (dist.ProcessGroup, type(comms.transport)):  # DDP calls the backend itself
    watch(owner, "allreduce", "all_reduce", lambda args: args[1][0].nbytes)
scatter, gather = "reduce_scatter_single", "all_gather_single"
if not hasattr(dist, gather):  # before PyTorch 2.13
    scatter, gather = "reduce_scatter_tensor", "all_gather_into_tensor"
watch(dist, scatter, "reduce_scatter", lambda args: args[1].nbytes)
watch(dist, gather, "all_gather", lambda args: args[0].nbytes)
found = {}
# PyTorch's own DDP calls from C++.
for kind in (name for name, made in STRATEGIES.items() if made.averages and name != "torch"):
    options = {"collectives": "backend"} if STRATEGIES[kind].stage else {}
    options |= {"node": 8} if STRATEGIES[kind].in_nodes else {}
    strategy = STRATEGIES[kind](FullMLP(256, depth=5), comms, 0.4, **options)
    optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
    batch = torch.randn(2, 4, 256).unbind()
    for _ in range(2):  # the second is as all that follow
        calls.clear()
        take_step(strategy, mse_loss, optimizer, batch)
    found[kind] = list(calls)
    strategy.remove()
print(json.dumps(found))
