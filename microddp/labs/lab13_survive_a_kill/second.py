"""Another right one: bytes as a message, batches skipped instead of their place kept, two files."""

import io
import re

import torch
from torch.nn.functional import cross_entropy


def checkpoints(folder):
    names = [re.fullmatch(r"checkpoint-(\d+)\.pt", path.name) for path in folder.glob("*")]
    return sorted(int(name[1]) for name in names if name)


def save(folder, step, state):
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    beside = folder / "newest"
    beside.write_bytes(buffer.getvalue())
    beside.rename(folder / f"checkpoint-{step}.pt")
    for old in checkpoints(folder)[:-2]:
        (folder / f"checkpoint-{old}.pt").unlink()


def load(folder, comms):
    data = b""
    steps = checkpoints(folder) if comms.rank == 0 else []
    while steps and not data:
        data = (folder / f"checkpoint-{steps.pop()}.pt").read_bytes()
        try:
            torch.load(io.BytesIO(data))
        except Exception:
            data = b""
    size = comms.all_gather_data(len(data))[0]
    wire = torch.tensor(list(data) or [0] * size, dtype=torch.uint8)
    if size:
        comms.broadcast(wire)
    return torch.load(io.BytesIO(wire.numpy().tobytes())) if size else None


def train(model, optimizer, batches, steps, every, folder, comms):
    state = load(folder, comms)
    begin = 0
    if state is not None:
        begin = len(state["losses"])
        with torch.no_grad():
            for parameter, saved in zip(model.parameters(), state["weights"], strict=True):
                parameter.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
        for _ in range(begin):
            next(batches)
        random = state["random"][comms.rank]
        torch.random.set_rng_state(torch.tensor(random, dtype=torch.uint8))
    losses = state["losses"] if state else []
    for step in range(begin + 1, steps + 1):
        inputs, targets = next(batches)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            comms.all_reduce_mean(parameter.grad)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        if not step % every:
            random = comms.all_gather_data(torch.get_rng_state().tolist())
            weights = [parameter.data for parameter in model.parameters()]
            state = {"losses": losses, "weights": weights, "random": random}
            if not comms.rank:
                save(folder, step, {**state, "optimizer": optimizer.state_dict()})
