"""Save a sharded model on 4 ranks, and load it on 2 and on 8.

torchrun --nproc-per-node=8 sharded_checkpoint.py

(Or `python sharded_checkpoint.py`, which imports once, and then starts the 8 itself.) The first 4
processes shard a model, train it, and save it: with the training waiting, and in the background.
Then 2 and 8 of them, with other weights, load it. It prints what rank 0 found, as JSON. PyTorch
alone is enough: `fully_shard`, and `torch.distributed.checkpoint`.
"""

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

LAYERS, WIDTH, ROUNDS = 6, 1024, 5


class Shards:
    """A model and its optimizer, of which each rank of a group keeps a part."""

    def __init__(self, ranks):
        torch.manual_seed(ranks)  # other weights for each number of ranks
        self.group = dist.new_group(range(ranks))
        self.beside = dist.new_group(range(ranks))  # for the writing, while the other one trains
        self.here = dist.get_rank() < ranks
        if self.here:
            mesh = DeviceMesh.from_group(self.group, "cpu")
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self):
        """Train a step."""
        self.model(torch.ones(1, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        """Return what a checkpoint holds: of each tensor this rank's part, as a DTensor."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder):
        """Take the state of a checkpoint; each rank reads its new part."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=self.group)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def fingerprint(self):
        """Hash all bits of the state, whoever has them."""
        found = hashlib.sha256()
        tensors = [*self.model.parameters()]
        tensors += [v for p in tensors for _, v in sorted(self.optimizer.state[p].items())]
        for tensor in tensors:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().numpy().tobytes())
        return found.hexdigest()[:16]


def save(shards, folder):
    """Save by both calls, in turn; returns the seconds for which each stopped the training."""
    stopped = {"save": [], "async_save": [], "async_save, until written": []}
    for number in range(ROUNDS):
        dist.barrier(shards.group)
        start = time.perf_counter()
        dcp.save(shards.state(), checkpoint_id=folder / f"{number}", process_group=shards.beside)
        stopped["save"].append(time.perf_counter() - start)

        dist.barrier(shards.group)
        start, where = time.perf_counter(), folder / f"{number}-async"
        writing = dcp.async_save(shards.state(), checkpoint_id=where, process_group=shards.beside)
        stopped["async_save"].append(time.perf_counter() - start)
        writing.result()  # training would go on here, and this come before the next one
        stopped["async_save, until written"].append(time.perf_counter() - start)
    return stopped


def committed(shards, folder):
    """Save once more; returns for each rank its calls that commit, with their beginning and end."""
    events = []

    def noted(call):
        def noting(*arguments):
            began = time.time()
            call(*arguments)
            events.append([call.__name__, began, time.time()])

        return noting

    dist.barrier(shards.group)
    began = time.time()
    with (
        mock.patch("os.fsync", noted(os.fsync)),  # a file, then .metadata
        mock.patch("os.rename", noted(os.rename)),  # .metadata
        mock.patch("pickle.dump", noted(pickle.dump)),  # .metadata
    ):
        dcp.save(shards.state(), checkpoint_id=folder, process_group=shards.beside)
    events = [["save", began, time.time()], *events]
    gathered = [None] * dist.get_world_size(shards.group)
    dist.all_gather_object(gathered, events, group=shards.group)
    return gathered


def main():
    """Train and save on 4 ranks, load on 2 and on 8."""
    dist.init_process_group("gloo")
    four, found = Shards(4), {}
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    folder = Path(folder[0])
    if four.here:
        four.step()
        found["seconds"] = save(four, folder)
        found["commit, by rank"] = committed(four, folder / "commit")
        found["fingerprint on 4 ranks"] = four.fingerprint()
        files = sorted((folder / "0-async").glob("*.distcp"))
        found["bytes of each rank's file"] = [file.stat().st_size for file in files]
        found["bytes of .metadata"] = (folder / "0-async" / ".metadata").stat().st_size
    dist.barrier()
    for ranks in (2, 8):
        shards = Shards(ranks)
        if shards.here:
            shards.load(folder / "0-async")
            found[f"fingerprint on {ranks} ranks"] = shards.fingerprint()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


def be_a_rank(rank, port):
    """Do what torchrun does for a rank."""
    names = {"RANK": rank, "WORLD_SIZE": 8, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    main()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torch.optim.Adam([torch.zeros(1)])  # the first optimizer of a process imports more
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        ranks = [context.Process(target=be_a_rank, args=(rank, port)) for rank in range(8)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        sys.exit(max(abs(rank.exitcode) for rank in ranks))
