# %% [markdown]
r"""
# Lab 13: training that survives a kill

Write training that may be killed at any moment. Started again in the same way, it goes on from its
newest checkpoint, and ends with the very bits that it would have had without the kill. What does
the next step depend on? All of that belongs in a checkpoint.

Each rank has a disk of its own, so `folder` is another place on each. Rank 0 alone writes and reads
checkpoints. The others get the state as a message.

**Given:** `Batches` and `take_step` below. The model drops values at random, other ones on each
rank. `torch.get_rng_state()` is a tensor, the state of a rank's random numbers, and
`torch.set_rng_state(tensor)` sets it. (Pass a tensor of its own: given a row of another one,
PyTorch 2.13 crashes, so `clone()` it.) `comms.all_gather(tensor)` returns every rank's tensor, in
rank order. `torch.distributed.broadcast_object_list([value])` replaces the value in a list by that
of rank 0. `os.replace(old, new)` gives a file another name, at once.

**Counted:** the steps that are taken after a restart: those in the checkpoint are not taken again.
The weights in the end, bit by bit. What is on the disks when a rank was killed between two steps,
and when rank 0 was killed in the midst of writing. Only `checkpoint-8.pt`, say, is the name of a
checkpoint, of the state after 8 steps. The newest two must be there, older ones may be removed.

(A machine that loses power may lose what the disk has not got yet, so a checkpoint needs
`os.fsync`, too. A process that is killed loses nothing that it has written, and only this is
checked.)

`python -m microddp.labs check 13` runs it on 1, 2 and 3 ranks.
"""

# %%
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import microddp
from microddp.datasets import load_digits

Batch = tuple[torch.Tensor, torch.Tensor]


# %%
class Batches:
    """Batches without end, shuffled anew in each epoch: of each batch this rank's samples.

    ``next(batches)`` is the next one. The ranks are at the same place, so the states of all are the
    same.

    Args:
        inputs: ``(samples, features)``.
        targets: ``(samples,)``, classes.
        size: samples in a batch, of all ranks together.
        comms: the ranks.
    """

    def __init__(
        self, inputs: torch.Tensor, targets: torch.Tensor, size: int, comms: microddp.Comms
    ) -> None:
        self.inputs, self.targets, self.size, self.comms = inputs, targets, size, comms
        self.generator, self.left = torch.Generator().manual_seed(0), torch.tensor([])

    def __next__(self) -> Batch:
        if len(self.left) < self.size:
            self.left = torch.randperm(len(self.inputs), generator=self.generator)
        batch, self.left = self.left[: self.size], self.left[self.size :]
        mine = batch[self.comms.rank :: self.comms.world_size]
        return self.inputs[mine], self.targets[mine]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The place in the data."""
        return {"generator": self.generator.get_state(), "left": self.left.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go to a place in the data."""
        self.generator.set_state(state["generator"])
        self.left = state["left"]


# %%
def take_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, comms: microddp.Comms
) -> None:
    """Take a step of all ranks together."""
    optimizer.zero_grad()
    inputs, targets = batch
    torch.autograd.backward(cross_entropy(model(inputs), targets))
    for parameter in model.parameters():
        if parameter.grad is not None:
            comms.all_reduce_mean(parameter.grad)
    optimizer.step()


# %%
def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write a checkpoint. Called on rank 0.

    When it returns, ``checkpoint-{step}.pt`` is there. If it is killed before, that name is not
    there, or it is that of a whole file.

    Args:
        folder: made if need be.
        step: how many have been taken.
        state: tensors, numbers and texts in dictionaries and lists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"checkpoint-{step}.part"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / f"checkpoint-{step}.pt")


# %%
def load(folder: Path, comms: microddp.Comms) -> dict[str, Any] | None:
    """The newest state that can be read, the same on every rank. Called on all ranks.

    A file that the disk has broken cannot be read: then it is the one before.

    Args:
        folder: may be missing. Only that of rank 0 has checkpoints.
        comms: the ranks.

    Returns:
        What was saved; ``None`` if there is no checkpoint.
    """
    newest: list[Any] = [None]
    if comms.rank == 0:
        files = {int(path.stem.partition("-")[2]): path for path in folder.glob("checkpoint-*.pt")}
        for step in sorted(files, reverse=True):
            try:
                newest = [torch.load(files[step])]
                break
            except Exception as error:  # of many types, by where the damage is
                print(f"{files[step]}: {error}")
    dist.broadcast_object_list(newest)
    state: dict[str, Any] | None = newest[0]
    return state


# %%
def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    steps: int,
    every: int,
    folder: Path,
    comms: microddp.Comms,
) -> None:
    """Train up to a number of steps, from the newest checkpoint on if there is one.

    Args:
        model: as built anew, with the same weights on every rank.
        optimizer: of its parameters, new as well.
        batches: from their beginning.
        steps: how many there are to be in the end, with those in the checkpoint.
        every: so many steps a checkpoint is written.
        folder: this rank's own.
        comms: the ranks.
    """
    step = 0
    if state := load(folder, comms):
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["random"][comms.rank].clone())
    while step < steps:
        take_step(model, optimizer, next(batches), comms)
        step += 1
        if step % every == 0:
            random = comms.all_gather(torch.get_rng_state())
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "batches": batches.state_dict(),
                "random": random,
            }
            if comms.rank == 0:
                save(folder, step, state)


# %% tags=["try"]
comms = microddp.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Dropout(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters())
inputs, targets = load_digits().train.tensors
batches = Batches(inputs, targets, 24, comms)
torch.manual_seed(1 + comms.rank)
# Start it with torchrun --nproc-per-node=2, kill it when checkpoint-300.pt is there, and start it
# again: the biases in the end must be those of a run without a kill. To begin anew, remove the
# folders.
folder = Path("my_work", f"lab13_rank{comms.rank}")
comms.print("it begins anew" if load(folder, comms) is None else "it goes on")
train(model, optimizer, batches, 1000, 100, folder, comms)
comms.print("biases:", list(model.parameters())[-1].tolist())
comms.close()
