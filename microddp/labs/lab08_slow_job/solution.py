# %% [markdown]
r"""
# Lab 08: name why a job is slow

A job's steps take longer than they should. Measure them, and name the cause, the same on every
rank:

- `"slow rank 1"`: rank 1, say, works more than twice as long as the others. Its work is all but the
  averaging.
- `"loading"`: on every rank, to load a batch takes more than half of the step.
- `"slow network"`: to average takes more than half of the step, also where no rank waits for
  another, and most of that depends on the bytes.
- `"many messages"`: to average takes as long, but most of that is to start the messages, however
  small they are.
- `"nothing"`: none of these.

**Given:** a `job`. To call `job.load()`, `job.forward()`, `job.backward()`, `job.average()` and
`job.update()`, in this order on every rank, is a step. Ten steps are enough. The first may take
longer for another reason, and so may one of the others. `job.clock()` is the time on this rank in
seconds. Most jobs here are simulated, so use no other clock. Clocks of two ranks differ by more
than a step: only what passes on one of them can be compared.

`job.average()` sends a message for each number in `job.sizes`, of so many bytes.
`job.all_reduce(nbytes)`, on every rank, sends one more message over the same network, to see how
long that takes. Every message waits until all ranks are there. `comms.all_gather_data(value)`
returns the list of what all ranks have passed, numbers, texts, lists or dictionaries.

**Counted:** nothing but the answer, for many jobs: what is planted, on which rank, and in which
part of the step, is drawn by lot.

`python -m microddp.labs check 08` runs it on 2 and 3 ranks, and on 2 with real links of 100 Mbit/s;
`torchrun --nproc-per-node=2` and this file run its last cell, which needs at least two ranks.
"""

# %%
import statistics

import microddp
from microddp.labs.lab08_slow_job.checks import CAUSES, Job, plant

WORK = ("load", "forward", "backward", "update")


# %%
def name_cause(job: Job, comms: microddp.Comms) -> str:
    """Name why a job is slow.

    Args:
        job: no step of which was taken yet.
        comms: the ranks, all of which call this.

    Returns:
        One of the causes above, the same on every rank.
    """
    seconds: dict[str, list[float]] = {}
    for _ in range(10):
        for part in ("load", "forward", "backward", "average", "update"):
            began = job.clock()
            getattr(job, part)()
            seconds.setdefault(part, []).append(job.clock() - began)
    mine = {part: statistics.median(times[1:]) for part, times in seconds.items()}
    ranks = comms.all_gather_data(mine)
    work = [sum(times[part] for part in WORK) for times in ranks]
    for rank in range(len(work)):
        others = work[:rank] + work[rank + 1 :]
        if work[rank] > 2 * max(others):
            return f"slow rank {rank}"
    step = statistics.median(sum(times.values()) for times in ranks)
    if min(times["load"] for times in ranks) > step / 2:
        return "loading"
    transfer = min(times["average"] for times in ranks)  # who comes last waits for nobody
    if transfer < step / 2:
        return "nothing"
    started = []
    for _ in range(5):
        job.all_reduce(0)  # to meet
        began = job.clock()
        job.all_reduce(4)
        started.append(job.clock() - began)
    start = statistics.median(comms.all_gather_data(statistics.median(started)))
    return "many messages" if len(job.sizes) * start > transfer / 2 else "slow network"


# %% tags=["try"]
comms = microddp.init()
for seed, cause in enumerate(CAUSES):
    planted, job = plant(comms, cause, seed)
    comms.print(f"planted: {planted}, named: {name_cause(job, comms)}")
comms.close()
