"""Another right one: what is left of a step without its wait, and the table is a tensor."""

import torch


def slow_rank(job, comms):
    rows = []
    for _ in range(12):
        stamps = job.step()
        wait = stamps.backward - max(stamps.launched)
        rows.append(stamps.end - stamps.begin - wait)
    table = comms.all_gather(torch.tensor(rows[2:], dtype=torch.float64))
    work = table.median(dim=1).values
    longest = int(work.argmax())
    others = torch.cat([work[:longest], work[longest + 1 :]])
    return longest if work[longest] > 1.5 * others.quantile(0.5) else None
