"""Another right one: parts of one size, and the sum of a stack."""

import torch


def shared_sum(tensor, rank, inputs, total, barrier):
    part = -(-len(tensor) // len(inputs))
    place = slice(rank * part, min((rank + 1) * part, len(tensor)))
    inputs[rank][: len(tensor)].copy_(tensor)
    barrier()
    if place.start < place.stop:
        torch.sum(torch.stack([block[place] for block in inputs]), dim=0, out=total[place])
    barrier()
    tensor[:] = total[: len(tensor)]
