"""Another right one: parts of one size, and the sum of a stack."""

import torch


def shared_sum(tensor, rank, given, total, meet):
    part = -(-len(tensor) // len(given))
    place = slice(rank * part, min((rank + 1) * part, len(tensor)))
    given[rank][: len(tensor)].copy_(tensor)
    meet()
    if place.start < place.stop:
        torch.sum(torch.stack([block[place] for block in given]), dim=0, out=total[place])
    meet()
    tensor[:] = total[: len(tensor)]
