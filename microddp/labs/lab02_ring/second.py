"""Another right ring all-reduce: chunks of one size, messages under way, and the other way to
number the chunks."""

import torch

COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def ring_all_reduce(tensor, comms, op="sum"):
    n, rank = comms.world_size, comms.rank
    size = -(-len(tensor) // n)
    bounds = [(min(i * size, len(tensor)), min((i + 1) * size, len(tensor))) for i in range(n)]

    def chunk(i):
        start, end = bounds[i % n]
        return tensor[start:end]

    def pass_on(outgoing):
        incoming = torch.empty_like(chunk(outgoing - 1))
        sending = comms.send(chunk(outgoing), (rank + 1) % n, async_op=True)
        comms.recv(incoming, (rank - 1) % n)
        sending.wait()
        return incoming

    for i in range(n - 1):  # rank r ends with the sum of chunk r
        held = chunk(rank - i - 2)
        held.copy_(COMBINE[op](pass_on(rank - i - 1), held))
    for i in range(n - 1):
        chunk(rank - i - 1).copy_(pass_on(rank - i))
