# %% [markdown]
r"""
# Lab 12: name the rank that DDP hides

A job trains with DDP, and one of its ranks may be slow. The others wait for it inside their own
backward, so the usual timers show equal times on all ranks. Name the slow rank, the same on every
rank.

A rank is slow if its *work*, all that it does in a step while it does not wait for others, takes
more than 1.5 times as long as the median of the other ranks' work. At most one is. It may be slow
in any part of its steps: loader, forward, backward or optimizer.

**Given:** a `job`. To call `job.step()` on every rank is a step of DDP. It returns the time stamps
of this rank: `begin`, `loaded` and `forward` (the end of each), `launched` (a tuple: when each
bucket's all-reduce was launched, in the hook), `backward` (its end) and `end`, after the optimizer.
Ten steps are enough. The first may take longer for another reason, and so may one of the others.
Each rank has a clock of its own, and two clocks differ by more than a step: only what passes on one
of them can be compared. `comms.all_gather_data(value)` returns the list of what all ranks have
passed.

**Counted:** nothing but the answer, for many jobs: most are simulated, and in the last ones
microddp's DDP averages.

`python -m microddp.labs check 12` runs it on 2, 3 and 4 ranks; `torchrun --nproc-per-node=3` and
this file run its last cell, which needs at least two ranks.
"""

# %%
import statistics

import microddp
from microddp.labs.lab12_hidden_straggler.checks import SECONDS, Job, plant


# %%
def slow_rank(job: Job, comms: microddp.Comms) -> int | None:
    """Name the slow rank.

    Args:
        job: no step of which was taken yet.
        comms: the ranks, all of which call this.

    Returns:
        Its number, the same on every rank; ``None`` if none is slow.
    """
    steps = [job.step() for _ in range(10)]
    # From the last launch to the end of backward it waits.
    work = [step.launched[-1] - step.begin + step.end - step.backward for step in steps[1:]]
    ranks = comms.all_gather_data(statistics.median(work))
    for rank, seconds in enumerate(ranks):
        others = ranks[:rank] + ranks[rank + 1 :]
        if seconds > 1.5 * statistics.median(others):
            return rank
    return None


# %% tags=["try"]
comms = microddp.init()
for seed, part in enumerate(SECONDS):
    planted, job = plant(comms, part, seed)
    comms.print(f"planted: rank {planted}, in {part}; named: {slow_rank(job, comms)}")
comms.close()
