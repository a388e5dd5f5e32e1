"""Another right one: ranks meet before they average, and the tables are tensors."""

import torch

PARTS = ("load", "forward", "backward", "update")


def clocked(job, call, *arguments):
    began = job.clock()
    call(*arguments)
    return job.clock() - began


def name_cause(job, comms):
    rows = []
    for _ in range(12):
        row = [clocked(job, job.load), clocked(job, job.forward), clocked(job, job.backward)]
        job.all_reduce(1)
        small = clocked(job, job.all_reduce, 1)
        row += [clocked(job, job.average), small]
        rows.append([*row, clocked(job, job.update)])
    table = comms.all_gather(torch.tensor(rows[2:])).median(dim=1).values
    load, forward, backward, average, small, update = table.T
    work = load + forward + backward + update
    longest = int(work.argmax())
    if work[longest] > 2 * work.sort().values[-2]:
        return f"slow rank {longest}"
    half = (work + average).mean() / 2
    if load.mean() > half:
        return "loading"
    if average.mean() > half:
        many = small.mean() * len(job.sizes) > average.mean() / 2
        return "many messages" if many else "slow network"
    return "nothing"
