"""Train a model under a limit on each process's memory that only an n-th of it meets. Linux.

torchrun --nproc-per-node=4 train_limited.py zero3 ddp
"""

import argparse
import gc
import resource

import torch
from torch import nn

import microddp
from microddp.sharding import fully_shard

ALLOWED = 192 << 20  # bytes that a process may take beyond what an empty job takes


def warm_up(comms):
    """Use all that is used later, once, on something tiny: modules, threads and buffers."""
    ddp = microddp.DDP(nn.Linear(8, 8), comms)
    ddp(torch.ones(1, 8)).sum().backward()
    torch.optim.Adam(ddp.parameters()).step()
    fully_shard(layer := nn.Linear(8, 8), comms)
    layer(torch.ones(1, 8)).sum().backward()


def limit_memory():
    """Let the kernel refuse this process more than it has now and what is allowed."""
    with open("/proc/self/status") as status:
        used = int(status.read().partition("VmData:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + ALLOWED,) * 2)


def new_model():
    """24 layers of 4 MiB."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))


def shard(comms):
    """Make the model without memory, then one block after the other, and divide each."""
    with torch.device("meta"):
        model = new_model()
    for layer in model:
        fully_shard(layer, comms)
    fully_shard(model, comms)
    return model


def train(strategy, comms):
    """Train three steps."""
    model = shard(comms) if strategy == "zero3" else microddp.DDP(new_model(), comms)
    adam = torch.optim.Adam(model.parameters())
    for _ in range(3):
        adam.zero_grad()
        model(torch.ones(4, 1024)).square().mean().backward()
        adam.step()
    comms.print(f"{strategy}: trained 3 steps")


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="+", choices=["ddp", "zero3"])
    strategies = parser.parse_args().strategies
    comms = microddp.init()
    warm_up(comms)
    limit_memory()
    for strategy in strategies:
        train(strategy, comms)
        gc.collect()  # the memory of a model whose parts refer to each other
    comms.close()


if __name__ == "__main__":
    main()
