"""Train a classifier of handwritten digits, on one device or on many.

python train_ddp.py --epochs 20
torchrun --nproc-per-node=4 train_ddp.py --epochs 20 --checkpoint run.pt

The same command goes on from its newest checkpoint, also on another number of devices that divides
--batch. SIGTERM ends it after the epoch, with a checkpoint.
"""

import argparse
import os
import signal
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

SEED = 0


def join():
    """Join the job that torchrun started, or be one of one rank; returns this rank's device."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}
    for name, value in {**alone, "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    store, rank, world_size = next(dist.rendezvous("env://"))
    group = {"store": of_this_start(store), "rank": rank, "world_size": world_size}
    if not gpus:
        dist.init_process_group("gloo", **group)
        return torch.device("cpu")
    if gpus < ranks:
        raise SystemExit(f"{gpus} GPUs for {ranks} ranks: start fewer, or hide the GPUs")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", **group, device_id=device)
    return device


def of_this_start(store):
    """The part of a store in which ranks do not find the addresses of those that died before.

    Ranks that a torchrun has restarted get its store again. Under a name of its own, a start begins
    with an empty one. Several torchruns have no such name: each counts its own restarts.
    """
    told = os.environ.get
    if told("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # as new as the start
    if told("GROUP_WORLD_SIZE", "1") != "1" and told("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise SystemExit("for restarts on several nodes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    return dist.PrefixStore(told("TORCHELASTIC_RESTART_COUNT", "0"), store)


def say(*words):
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def load_data():
    """1797 images of 8 x 8 pixels, four fifths of them to train on."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(pixels, torch.tensor(digits.target))
    return random_split(data, (0.8, 0.2), torch.Generator().manual_seed(SEED))


def new_model():
    """Two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )


def sum_over_ranks(*numbers, device):
    """Each number's sum over all ranks."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def train_epoch(model, optimizer, schedule, loader, device, precision):
    """Train once through the data; returns the mean loss over the samples of all ranks."""
    model.train()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with precision():
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.detach() * len(x)  # its item() would wait for the GPU in every step
        count += len(x)
    total, count = sum_over_ranks(total.item(), count, device=device)
    return total / count


@torch.no_grad()
def evaluate(model, data, device):
    """The share of samples that the model reads right; each rank reads every n-th."""
    model.eval()
    right, count = 0, 0
    mine = torch.utils.data.Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    for x, y in DataLoader(mine, 128):
        right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
        count += len(y)
    right, count = sum_over_ranks(right, count, device=device)
    return right / count


def written(path):
    """The epochs of which there are checkpoints, the newest first."""
    files = [file for file in Path(path).parent.iterdir() if file.stem == Path(path).name]
    ends = [file.suffix.removeprefix(".") for file in files]
    return sorted((int(end) for end in ends if end.isdecimal()), reverse=True)


def save(path, epoch, settings, parts):
    """Write a checkpoint of this epoch that is there whole or not at all; keep the last two."""
    if dist.get_rank() != 0:
        return
    with open(f"{path}.part", "wb") as file:
        torch.save((epoch, settings, [part.state_dict() for part in parts]), file)
        file.flush()
        os.fsync(file.fileno())  # on the disk, and not only on its way there
    os.replace(f"{path}.part", f"{path}.{epoch}")
    if os.name == "posix":  # the new name, too
        folder = os.open(Path(path).parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    for old in written(path)[2:]:
        os.remove(f"{path}.{old}")


def read(path):
    """The newest checkpoint that can be read, or None if there is none at all."""
    for epoch in written(path):
        try:
            with zipfile.ZipFile(f"{path}.{epoch}") as file:
                if file.testzip():  # torch.load does not compare checksums
                    raise ValueError("it is damaged")
            return torch.load(f"{path}.{epoch}", map_location="cpu")
        except Exception as error:  # of many types, by where the damage is
            print(f"{path}.{epoch} cannot be read: {error}", flush=True)
    if written(path):
        raise SystemExit(f"no checkpoint {path}.* can be read: to begin anew, remove them")
    return None


def resume(path, settings, parts):
    """Take the checkpoint's states, if there is one; returns the epoch to go on with.

    Rank 0 reads, and tells the others: they may see another disk, or an older file.
    """
    found = [read(path) if path and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    epoch, before, states = found[0]
    if before != settings:
        raise SystemExit(f"{path} was trained with {before}, and not with {settings}")
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return epoch + 1


def ignore_sigterm(_worker):
    """For a loader's processes: their rank ends them, when its epoch is over."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def train(options, device):
    """Train, from the beginning or from the checkpoint; returns whether SIGTERM cut it short."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if options.batch % n:
        raise SystemExit(f"rank {rank}: a batch of {options.batch} cannot be shared by {n} ranks")
    training, testing = load_data()
    sampler = DistributedSampler(training, seed=SEED, drop_last=True)
    loader = DataLoader(
        training,
        options.batch // n,
        sampler=sampler,
        drop_last=True,
        num_workers=options.workers,
        worker_init_fn=ignore_sigterm,
        pin_memory=device.type == "cuda",
    )
    torch.manual_seed(SEED)
    bare = new_model().to(device)  # what is saved and evaluated
    model = DistributedDataParallel(torch.compile(bare) if options.compile else bare)
    optimizer = torch.optim.SGD(bare.parameters(), options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (options.warmup + 1))
    )

    def precision():
        return torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext()

    # The wrapper deals gradients out to buckets anew after the first backward, which changes the
    # order of addition. If that comes now, a resumed run has the bits of a whole one. eval(), so
    # that it leaves a batch normalisation's statistics alone.
    model.eval()
    model(torch.zeros(options.batch // n, 64, device=device)).sum().backward()
    optimizer.zero_grad()
    parts = bare, optimizer, schedule
    settings = {name: getattr(options, name) for name in ("batch", "lr", "warmup")}
    begin = resume(options.checkpoint, settings, parts)
    told = []  # to stop
    if options.checkpoint:
        signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(SEED + 1 + epoch * n + rank)  # of noise, which differs between ranks
        loss = train_epoch(model, optimizer, schedule, loader, device, precision)
        share = evaluate(bare, testing, device)
        say(f"epoch {epoch}: loss {loss:.4f}, {share:.1%} read right")
        if options.checkpoint:
            save(options.checkpoint, epoch, settings, parts)
        (stop,) = sum_over_ranks(len(told), device=device)  # all stop, or none
        if stop:
            return epoch + 1 < options.epochs
    return False


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=0, help="steps to reach --lr in")
    parser.add_argument("--workers", type=int, default=0, help="processes that load, a rank")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", help="FILE: writes FILE.EPOCH, and goes on from it")
    options = parser.parse_args()
    device = join()
    stopped = train(options, device)
    # When nothing holds the group any more: a wrapper that ended it with its own end would wait,
    # with Python's lock, for threads of gloo's that may want that lock.
    dist.destroy_process_group()
    if stopped:
        sys.exit(128 + signal.SIGTERM)  # there is more to train


if __name__ == "__main__":
    main()
