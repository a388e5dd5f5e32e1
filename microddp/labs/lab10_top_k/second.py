"""Another right top-k: values and places in one message, and a mean as a product of matrices."""

import torch


class TopK:
    def __init__(self, k, comms):
        self.k, self.comms, self.late = k, comms, 0

    def average(self, gradient):
        gradient += self.late
        mask = torch.zeros_like(gradient, dtype=torch.bool)
        mask[gradient.abs().argsort(descending=True)[: self.k]] = True
        self.late = gradient.masked_fill(mask, 0)
        places = mask.nonzero().flatten().int()
        message = torch.cat([gradient[mask].view(torch.uint8), places.view(torch.uint8)])
        rows = self.comms.all_gather(message)
        ends = gradient.element_size() * len(places)
        values = rows[:, :ends].flatten().clone().view(gradient.dtype).view(len(rows), -1)
        theirs = rows[:, ends:].flatten().clone().view(torch.int32).view(len(rows), -1).long()
        dense = gradient.new_zeros(len(rows), len(gradient)).scatter_(1, theirs, values)
        gradient.copy_(dense.mean(dim=0))
