"""Other right primitives: the model as bytes in one broadcast, and messages to and from rank 0."""

import torch


def initialise(model, comms):
    with torch.no_grad():
        tensors = [*model.parameters(), *model.buffers()]
        raw = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        comms.broadcast(raw)
        for tensor, part in zip(tensors, raw.split([t.nbytes for t in tensors]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))


def distribute(samples, comms):
    rank, n = comms.rank, comms.world_size
    what = [list(samples.shape), str(samples.dtype).removeprefix("torch.")] if rank == 0 else None
    shape, dtype = comms.all_gather_data(what)[0]
    starts = [i * shape[0] // n for i in range(n + 1)]  # the odd ones anywhere
    if rank == 0:
        for peer in range(1, n):
            comms.send(samples[starts[peer] : starts[peer + 1]], peer)
        return samples[: starts[1]]
    rows = starts[rank + 1] - starts[rank]
    part = torch.empty(rows, *shape[1:], dtype=getattr(torch, dtype))
    comms.recv(part, 0)
    return part


def collect(losses, comms):
    counts = comms.all_gather_data(len(losses))
    joined = losses.new_empty(sum(counts))
    if comms.rank > 0:
        comms.send(losses, 0)
    else:
        first, *others = joined.split(counts)
        first.copy_(losses)
        for peer, part in enumerate(others, start=1):
            comms.recv(part, peer)
    mean = joined.sum() / len(joined)  # right on rank 0
    comms.broadcast(mean)
    return (None if comms.rank else joined), mean
