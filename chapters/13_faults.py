# %% [markdown]
r"""
# 13. When a rank hangs or dies

What if a rank hangs or dies? You care because a job on a thousand GPUs is interrupted every few
hours or days, and without a plan it stands still until somebody looks. This chapter reads a hang
from what the ranks were doing, builds training that lives through a death, measures what each way
to go on costs, and saves checkpoints that another number of ranks can load.
"""

# %% tags=["imports"]
import contextlib
import io
import itertools
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from textwrap import fill
from unittest import mock

import torch
from torch.distributed import PrefixStore, TCPStore

import microddp
from microddp import figures
from microddp.doctor.hang import report
from microddp.findings import compare, find
from microddp.performance import Failures
from microddp.report import human_bytes, human_seconds, table
from microddp.timing import Timing
from microddp.train.checkpoint import Checkpoints

# %%
# sphinx_gallery_builds = "training that outlives its ranks, and read hangs"
# sphinx_gallery_ranks = 3
run = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))  # the same on all ranks
RECORDS = Path(tempfile.gettempdir(), f"microddp-records-{run}")
os.environ["MICRODDP_RECORD"] = str(RECORDS)
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
r"""
## How often

**Predict.** If a device interrupts a job once in a time $M_1$ on average, independently of the
others, then the first of $N$ does so after $M_1 / N$. Meta counted 466 interruptions in 54 days on
16 384 GPUs, 47 of them planned ([Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4, 2024).
In other clusters of Meta's, jobs of 1024 GPUs failed every 7.9 hours ([Kokolis and
others](https://arxiv.org/abs/2410.21680), 2024). What does $M_1 / N$ make of the two counts
at other sizes?
"""

# %%
HOUR = 3600
M1 = {"Llama 3": 54 * 24 * HOUR / 419 * 16384, "Kokolis": 7.9 * HOUR * 1024}  # seconds
rows = [
    (f"{count:,}", *(human_seconds(one / count) for one in M1.values()))
    for count in (1, 8, 256, 1024, 16384, 100_000)
]
comms.print(table(rows, ["devices", *(f"interrupted every, from {name}'s count" for name in M1)]))

# %% [markdown] index=["hang", "deadlock", "stuck", "flight recorder"]
r"""
Something has to notice, find the cause, and go on.

## Reading a hang

If a process dies, the kernel closes its connections, and with gloo its neighbours get an error. A
rank that does not come to a collective gives no sign: the others wait until a time-out. Of Meta's
time-outs over 60 % came from the CPU side, as when ranks part ways ([PyTorch's blog][blog], March
2026).

So each rank notes each call before it makes it: its kind, its number in its group, and the line
of the program. With `MICRODDP_RECORD=DIR` in the environment the last 64 notes are in a file that
is mapped into memory. What is written there belongs to the kernel, so it can be read while the
process hangs, and when it is dead.

`python -m microddp.doctor DIR` compares the records of all ranks, and asks each process for its
stack, by a signal. Below, a thread of rank 0 calls its `report` while the ranks hang. Each mistake
has a group of its own, with a time-out of 1.5 seconds.

[blog]:
https://pytorch.org/blog/flight-recorder-a-new-lens-for-understanding-nccl-watchdog-timeouts/
"""

# %% tags=["plumbing"]
STUCK = n > 1 and comms.backend == "gloo"  # whether there is somebody to wait for


# %%
def diagnosed(mistake):
    """What the doctor says while all ranks call ``mistake(group)``, and what came of the call."""
    comms.barrier()  # the time-out counts while the group is made, too
    group = comms.subgroup(range(n), timeout=1.5)
    said = RECORDS / mistake.__name__
    doctor = threading.Timer(0.5, lambda: said.write_text(report(RECORDS)))
    if rank == 0:
        doctor.start()
    try:
        came = mistake(group)
    except RuntimeError:
        came = "time-out"
    if rank == 0:
        doctor.join()
    for _ in range(500):  # it went on, and does something else
        if said.exists():
            break
        time.sleep(0.02)
    group.close()
    said = said.read_text().partition("## The diagnosis")[2].partition("## Where")[0]
    return said.strip(), comms.all_gather_data(came)


# %% tags=["plumbing"]
CAME = {}


def with_texts(said):
    """Name this chapter's lines by number, and the first time by their text."""
    for file, number in dict.fromkeys(re.findall(r"(\S*13_faults\.\w+):(\d+)", said)):
        text = linecache.getline(file, int(number)).partition("  #")[0].strip(" ,\n")
        said = said.replace(f"{file}:{number}", f"line {number}" + f" `{text}`" * bool(text), 1)
    return re.sub(r"\S*13_faults\.\w+:(\d+)", r"line \1", said)


def show(*mistakes):
    for mistake in mistakes if STUCK else ():
        with contextlib.redirect_stderr(io.StringIO()):  # they print their stacks, too
            said, CAME[mistake.__name__] = diagnosed(mistake)
        said = re.sub(r"Among ranks [\d, -]+: | among ranks \d[\d, -]*\d", "", said)  # all are
        verdict, _, places = with_texts(said).partition("\n\n")
        lines = [f"{mistake.__name__}", f"  verdict: {verdict}"]
        if "time-out" in CAME[mistake.__name__]:
            lines += [f"  {place[2:]}" for place in places.splitlines() if place]
        comms.print("\n".join(fill(line, 94, subsequent_indent=" " * 6) for line in lines) + "\n")
        assert rank or "not come" in verdict or "different calls" in verdict, said


# %% [markdown]
"""
One rank departs from the others, as happens in real programs: rank 0 in the first two, rank 1 in
the others:
"""

# %%
ones = torch.ones(4, device=comms.device)


def only_rank_0_averages(group):
    if rank == 0:
        group.all_reduce_mean(ones)


def save_then_barrier(group):
    if rank == 0:
        torch.save(ones, os.devnull)
        group.barrier()  # belongs after the if


def early_continue(group):
    for batch in range(4):
        if rank == 1 and batch == 2:
            continue  # "this loss is not finite, leave it out"
        group.all_reduce(ones)


def uneven_batches(group):
    for _ in range(4 if rank == 1 else 5):
        group.all_reduce(ones)


# %%
show(only_rank_0_averages, save_then_barrier, early_continue, uneven_batches)

# %% [markdown]
r"""
How to read it: `all_reduce 4 (float32 (4,), op=sum)` is the fourth collective of this group, an
all-reduce of four 32-bit numbers, added up. "In no call; through its last, X" means that the last
call that this rank completed was X. (`subgroup`, which made this group, is numbered in the group of
all ranks.)

The line where a rank waits need not be the bug. It is in the first two, as not all ranks come to
it. In the others the bug is what lets rank 1 leave it out. (DDP's `join` is for `uneven_batches`:
chapter 06.) In `early_continue` rank 1's batch 3 was added to the others' batch 2. In training that
is a wrong gradient without an error, and the hang comes at the end. Next, calls that differ. Of
mistakes that do not hang, only the verdict is printed:
"""


# %%
def another_order(group):
    calls = [
        lambda: group.all_reduce(ones),
        lambda: group.broadcast(ones),
    ]
    for call in calls[::-1] if rank == 1 else calls:
        call()


def another_shape(group):
    sums = torch.ones((2, 2) if rank == 1 else 4, device=comms.device)
    group.all_reduce(sums)
    return bool(sums.eq(n).all())


def another_dtype(group):
    dtype = torch.int32 if rank == 1 else torch.float32
    sums = torch.ones(4, dtype=dtype, device=comms.device)
    group.all_reduce(sums)
    return sums[0].item()


show(another_order, another_shape, another_dtype)

# %% tags=["plumbing"]
left_out = (not STUCK, "Left out: mistakes that hang take two ranks, and gloo.")
hung = [name for name, came in CAME.items() if "time-out" in came]
silent = [name for name in CAME if name not in hung]
find(
    comms,
    "mistakes",
    made=(
        STUCK,
        f"Of {len(CAME)} mistakes {len(hung)} hang until the time-out, and {len(silent)} go on "
        f"without an error: {' and '.join(silent) or 'none'}. The doctor's verdict names the ranks "
        "that are missing, or those whose call differs, in each.",
    ),
    left_out=left_out,
)

# %% tags=["plumbing"]
sums = CAME.get("another_dtype", [])
right = sums.count(n)
shapes = CAME.get("another_shape", []).count(True)
said = (
    f"Where (4,) meets (2, 2), {shapes} of {n} ranks have the right sums. "
    f"Where float32 meets int32, the first sum is, by rank, {', '.join(map(str, sums))}."
)
find(
    comms,
    "dtypes",
    wrong=(STUCK and right < n, f"{said} {n - right} of {n} ranks have a wrong sum, and no error."),
    right=(STUCK and right == n, f"{said} All are right."),
    left_out=left_out,
)

# %% [markdown]
r"""
**Explain.** gloo sends bytes, and whoever adds up a part reads them as its own dtype. The bits of
the integer 1, read as a float, are $1.4 \cdot 10^{-45}$; those of the float 1.0, read as an
integer, are 1 065 353 216, those of 2.0 1 073 741 824. `MICRODDP_DEBUG=1` compares calls before
they are made, by a round of messages, and raises on all ranks (chapter 07).

Last, an exception on one rank, in a job of its own: {download}`raise_on_one_rank.py
<../_downloads/raise_on_one_rank.py>`.

```{literalinclude} ../_downloads/raise_on_one_rank.py
:language: python
:start-at: comms
```
"""

# %% tags=["plumbing"]
PROGRAMS = Path(microddp.__file__).parents[1] / "docs" / "_downloads"


def on_rank_0(work, *args):
    """Let rank 0 work, and the others wait for its result, which is plain data."""
    return comms.all_gather_data(work(*args) if rank == 0 else None)[0]


OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith((*OF_TORCHRUN, "MICRODDP_"))}
BARE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MICRODDP_TIMEOUT": "20"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]


def start(*arguments, said=subprocess.DEVNULL, **environment):
    """A Python process that knows nothing of this job."""
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    out = {"stdout": said, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=BARE | environment, **out)


def said_by(program):
    process = start(PROGRAMS / program, said=subprocess.PIPE)
    return process.communicate(timeout=100)[0]


# %%
def raises_on_one_rank():
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAMS / "raise_on_one_rank.py"
        start(*TORCHRUN, program, MICRODDP_RECORD=folder).wait(timeout=60)
        return report(Path(folder)).partition("## The diagnosis")[2].strip()


said = on_rank_0(raises_on_one_rank)
assert "cannot be read" in said

# %% tags=["plumbing"]
said = re.sub(r"\. This is typically.*? at ", " at ", said)  # gloo's advice
said = re.sub(r"\[/\S+\] |(\.\./|[^\s()]*/)+(?=raise_on)", "", said)
comms.print("\n".join(fill(line, 94, subsequent_indent="    ") for line in said.splitlines()))

# %% [markdown] index=["elastic"]
r"""
The first collective of all ranks is the barrier in `init`, so step 0 makes the second. Ranks that
fail first are named first. As rank 1's Python ends, its connections close, and the others fail,
unless torchrun ends them before. The records remain.

Where no folder was named, each process that has called `microddp.init()` prints its stack and its
last collectives when it gets SIGUSR1 (`kill -USR1`). For others there is `py-spy dump
--pid`, and PyTorch's *flight recorder* (chapter 07), which the doctor reads, too.

## Without a restart, in thirty lines

Now a rank is dead. The survivors have the weights. The group is broken: they make a new one.

Ranks that have no group yet meet in a *store*, a small server that keeps values by their names. In
torchrun's jobs it is at `MASTER_ADDR` and `MASTER_PORT`. `add` adds to a number there and returns
the sum, so the first to come reads 1. gloo's ranks leave their addresses there. `PrefixStore` puts
a word before each name, so that a new group does not read the addresses of an old one:
"""

# %%
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
first, second = PrefixStore("first", store), PrefixStore("second", store)
comms.print("it counts", first.add("come", 1), first.add("come", 1), second.add("come", 1))

# %% [markdown]
r"""
The ranks that train together from one change to the next are a *generation*.

**Build.** Three processes add up ones, and the third kills itself at step 30. Two functions of
{download}`meet_again.py <../_downloads/meet_again.py>` (its main program starts them, and holds the
store):

```{literalinclude} ../_downloads/meet_again.py
:language: python
:start-at: WINDOW
:end-before: def say
```

**Predict.** The survivors notice in a round trip. All who come to the next generation within 0.3 s
are in. Its group takes some connections, so in all a little more than 0.3 s:
"""

# %%
said = on_rank_0(said_by, "meet_again.py")
comms.print(said)
assert said.count("[60.0, 60.0, 60.0]") == 2
assert "process 2 ended with -9" in said

# %% tags=["plumbing"]
again = max(float(text) for text in re.findall(r"together again in ([\d.]+) s", said))
extra = again - 0.3
found = f"The two are together again after {again:.3f} s: {human_seconds(extra)} more"
find(
    comms,
    "together-again",
    little=(extra < 0.1, f"{found} than the window of 0.3 s, as predicted."),
    more=(extra >= 0.1, f"{found} than the window of 0.3 s, and that is not little."),
)

# %% [markdown] index=["restart", "torchrun", "fault tolerance"]
r"""
**Explain.** Each weight is 60, one for each step: of three ranks up to the thirtieth, of two from
there on. The step that was lost was taken again with larger shares. What can go wrong:

- The process with the store dies? `microddp.elastic` has a small server that knows the members.
  If it dies, a survivor starts another one, and all tell it what they saw last.
- A rank hangs? The others notice at the time-out (10 s by default), wait two seconds, and go on.
- One rank has finished a step, and another has not? Before any weight changes, the losses are
  averaged in one more message. A rank that gets it takes the step. One that does not, or comes
  late, gets the state of a rank that is furthest when they meet.

[torchft](https://github.com/meta-pytorch/torchft) does this for clusters of GPUs.

## What a fault costs

A rank dies after $k$ steps, and the last checkpoint is of step $j$. Four ways to go on, in
{download}`train_and_die.py <../_downloads/train_and_die.py>`:

- with **nothing** saved: `torchrun --max-restarts=1` begins again;
- with a **restart** by the same command, which goes on from the last checkpoint;
- with a **warm restart**: three more processes have imported, and take over when they see a file
  that process 1 writes just before it dies;
- **elastic**: two survivors go on, and a fourth process, which has imported and stood by, joins
  them.

**Predict.** What a fault costs is counted from the death to the end of the next new step. $B$ is
the time to meet and take a first step, $R$ that of imports and $B$, and $s$ a step's. Then the
first way costs $R + k \cdot s$, a restart $R + (k - j) \cdot s$, a warm one $B + (k - j) \cdot s$:
the first of the steps up to the new one is in $B$. These predictions leave out noticing, the start
of processes, and loading. Elastic repeats only the lost step. The survivors get an error within a
step's time, pause for 50 ms as they drop the old group, and wait up to 20 ms until the server
counts who has come; then there is $B$, in which the newcomer gets the state in one message. (If the
dead process had the server, add the start of another.)

**Measure.** The same training in each way, with a checkpoint after each epoch of 14 steps. (One
whole job runs after the other, so this takes a while.) Process 1 dies after step 26, so $k = 26$
and $j = 14$. A step has a pause of 20 ms, in place of computing. (Beginning again is not measured:
it is the restart, with all steps to repeat. In a restart each life imports PyTorch anew.) The
restart's first life, which finds no checkpoint, gives $R$, $B$ and $s$:
"""


# %%
def run_job(way):
    """Run a job to its end; what its processes told, in order."""
    with tempfile.TemporaryDirectory() as folder:
        restarted = [*TORCHRUN, "--max-restarts=1"] if way == "restart" else []
        job = start(*restarted, PROGRAMS / "train_and_die.py", way, folder)
        if job.wait(timeout=100) != 0:
            raise RuntimeError(f"{way}: expected a job that ends well, got {job.returncode}")
        logs = [path.read_text().splitlines() for path in Path(folder).glob("*.log")]
    return sorted((json.loads(line) for log in logs for line in log), key=lambda event: event[0])


# %%
WAYS = ["restart", "warm", "elastic"]
events = {way: on_rank_0(run_job, way) for way in WAYS}


# %% tags=["plumbing"]
def fault(told):
    """When a rank died, when the first step after that was made, and when the first new one."""
    died = next(at for at, what, *_ in told if what == "dead")
    later = [(at, what) for at, what, *_ in told if at > died and isinstance(what, int)]
    first = next(at for at, step in later if step not in (25, 26))  # which others may just end
    return died, first, next(at for at, step in later if step > 26)


# %% tags=["plumbing"]
died, *_ = fault(events["restart"])
life = [event for event in events["restart"] if event[0] <= died]
first = next(at for at, what, *_ in life if what == 1)
R, B = (  # from when the last of the processes had come so far
    first - max(at for at, what, *_ in life if what == mark) for mark in ("started", "imported")
)
s = (died - first) / 25

died, first, _ = fault(events["elastic"])
met = [more for at, what, more in events["elastic"] if what == "met" and died < at < first]
new_server = any(started for _, started, _ in met)
predicted = {"nothing": R + 26 * s, "restart": R + 12 * s, "warm": B + 12 * s}
predicted["elastic"] = s + 0.05 + 0.02 + B
cost = {way: fault(told)[2] - fault(told)[0] for way, told in events.items()}

# %% tags=["plumbing"]
comms.print(f"R {R:.2f} s, B {B:.2f} s, a step {human_seconds(s)}\n")
rows = [("nothing", predicted["nothing"], None, None)]
rows += [(way, predicted[way], cost[way], cost[way] / predicted[way]) for way in WAYS]
headers = ["a fault costs", "predicted, s", "measured once, s", "measured / predicted"]
comms.print(table(rows, headers))


# %% tags=["plumbing"]
def recovery(told):
    """What a fault cost, in parts."""
    died, first, new = fault(told)
    marks = {"started": died, "imported": died}
    marks |= {what: at for at, what, *_ in told if what in marks and died < at < first}
    ends = itertools.pairwise([died, *marks.values(), first, new])
    names = "processes start", "imports", "recover", "steps again"
    return dict(zip(names, (end - start for start, end in ends), strict=True))


parts_of = {way: recovery(told) for way, told in events.items()}
figures.stacked_bars(
    parts_of,
    title="To the next new step: "
    + ", ".join(f"{way} {seconds:.2f} s" for way, seconds in cost.items()),
    xlabel="after the death of a process",
)


# %% tags=["plumbing"]
def before_steps(told, lifes_end):
    """Seconds of each part up to the first step after that moment, and those that it ran."""
    parts = next(more for at, what, more in told if what == "parts" and at > lifes_end)
    return [part[0] for part in parts.values()], *map(sum, [*zip(*parts.values(), strict=True)][1:])


rows = [("restart, first life", *before_steps(events["restart"], 0))]
rows += [(way, *before_steps(events[way], fault(events[way])[0])) for way in WAYS[:2]]
headers = ["seconds, of one process", "join", "model, load", "first step", "of these it ran"]
headers += ["waited for a core"]
rows = [(name, *parts, ran, waited) for name, parts, ran, waited in rows]
comms.print(table(rows, headers, floats=".3f"))

# %% tags=["plumbing"]
_, *parts, ran, waited = rows[-1]
restart, recovered = parts_of["restart"], parts_of["warm"]["recover"]
cores = f" One main thread ran for {ran:.2f} s of these, and waited for a core for {waited:.2f} s."
said = (
    f"Imports took {R - B:.2f} s in the first life. After the death processes took "
    f"{restart['processes start']:.2f} s to start, and imports {restart['imports']:.2f} s. The "
    f"warm restart recovered in {recovered:.3f} s, for a B of {B:.2f} s: "
    f"{max(0.0, recovered - sum(parts)):.3f} s passed until it began to join, and "
    f"{sum(parts):.3f} s from there on. (In the restart's first life {sum(rows[0][1:4]):.3f} s: of "
    "one process, which may have waited for the last one's imports, with which B begins.)"
    f"{cores * (ran > 0)} Elastic "
    f"took {cost['elastic']:.2f} s, {cost['elastic'] - predicted['elastic']:+.2f} s beside its "
    f"prediction{', in which the start of a new server is left out' * new_server}. (Where a "
    "quotient in the table is near 1, differences may have cancelled.)"
)
find(comms, "parts", measured=(True, said))

# %% tags=["plumbing"]
ahead, plain = cost["warm"] / cost["elastic"], cost["restart"] / cost["elastic"]
plain, repeated = float(f"{plain:.2g}"), parts_of["warm"]["steps again"]
by_way = (
    f"Measured once each, elastic{', with a new server,' * new_server} is about {plain:g} times as "
    "fast as a restart"
)
half = (
    f" Of the warm one's {cost['warm']:.2f} s, {repeated:.2f} s are 12 steps, from its second to "
    "the new one. If it had 7 to repeat instead of 12, half an interval, it would cost "
    f"{cost['warm'] - repeated * 5 / 12:.2f} s."
)
find(
    comms,
    "cost",
    elastic=(ahead > 1.2, f"{by_way}, and {ahead:.1f} times as fast as a warm one.{half}"),
    warm=(
        ahead < 1 / 1.2,
        f"{by_way}; the warm one is {1 / ahead:.1f} times as fast as elastic.{half}",
    ),
    alike=(1 / 1.2 <= ahead <= 1.2, f"{by_way}; one fault does not tell it from a warm one.{half}"),
)

# %%
losses = {
    way: {step: loss for _, step, loss in told if isinstance(step, int)}
    for way, told in events.items()
}
calm = losses["restart"]  # of steps that were repeated, the second time
assert losses["warm"] == calm
assert all(loss == calm[step] for _, step, loss in life if isinstance(step, int))
off = max(abs(losses["elastic"][step] - loss) for step, loss in calm.items())
assert off < 1e-3

# %% tags=["plumbing"]
said = "The losses of the steps that a restart repeats are bitwise what they were before the death"
said = (
    f"{said}; after it, up to step {len(calm)}, the plain and the warm restart's are bitwise equal"
)
find(
    comms,
    "losses",
    bitwise=(off == 0, f"{said}, and elastic's are, too."),
    rounding=(off > 0, f"{said}; elastic's are off by {off:.0e} at most."),
)

# %% [markdown] index=["warm spare"]
r"""
**Explain.** A warm restart and elastic do without start and imports. NVIDIA's
[resiliency extension](https://github.com/NVIDIA/nvidia-resiliency-ext/releases/tag/v0.3.0) has warm
spares for GPUs (March 2025).

Elastic ranks wait for the fourth here. With one rank fewer, sums would be rounded differently.

Where nobody dies, a spare costs a machine; elastic, in each step, a message more, with the losses
(chapter 02: $2(n-1)\,\alpha$), and a wait for it. Hold what a fault costs, times how often there is
one, against that. On 64 H200, with a fault every 45 to 75 minutes, 3000 steps of Llama-4 Scout took
818 minutes with restarts, 930 with torchft, whose averages across replicas went over gloo, and 405
with TorchPass, which moves to a spare ([Clockwork][clockwork], who sell it).

[clockwork]:
https://clockwork.io/blog/keeping-distributed-training-running-through-failures

## How often to save

**Predict.** A checkpoint stops training for $c$ seconds, every $\tau$ seconds: the share $c/\tau$.
A fault, one in $M$ seconds, loses half an interval on average, and each takes $r$ to start again:

$$ \text{lost} = \frac{c}{\tau} + \frac{\tau}{2M} + \frac{r}{M}, \qquad
\tau^* = \sqrt{2 c M}. $$

That is [Young's interval](https://doi.org/10.1145/361147.361115) (1974). Twice or half as long
costs a quarter more of the first two terms. `Failures`, below, has Daly's formula (2006). It also
counts faults during checkpoints and restarts, and no checkpoint for time that was lost.

$$ \text{kept} = \frac{\tau}{M e^{r/M} (e^{(\tau + c)/M} - 1)}. $$

**Measure.** Months of 1024 GPUs with a fault every 7.9 hours are simulated, with $c$ of 60 seconds
and $r$ of 600: 40 months for each interval, with faults drawn at random:
"""

# %%
MONTH, DRAWS, TIMES = 30 * 24 * HOUR, 40, (0.25, 0.5, 1, 2, 4)
job = Failures(M1["Kokolis"], checkpoint=60, restart=600).of(1024)
young = job.best_interval
lost, months = {}, {}
for times in TIMES:
    interval = times * young
    count = round(MONTH * job.useful(interval) / interval)
    months[times] = Timing(tuple(1 - job.play(interval, count, seed) for seed in range(DRAWS)))
    lost[times] = 1 - job.useful(interval)

# %% tags=["plumbing"]
minutes = [times * young / 60 for times in TIMES]
low, high = months[1].spread
figures.lines(
    {
        "by Daly's formula": (minutes, [100 * lost[times] for times in TIMES]),
        "a month, lower quartile": (minutes, [100 * months[t].spread[0] for t in TIMES]),
        "upper quartile": (minutes, [100 * months[t].spread[1] for t in TIMES]),
    },
    title=f"Every {young / 60:.0f} min {lost[1]:.1%} are lost by the formula, "
    f"{low:.1%} to {high:.1%} in half of the months",
    xlabel="minutes between checkpoints",
    ylabel="time lost, %",
    log="x",
    simulated=True,
)

# %% tags=["plumbing"]
worse = lost[2] - lost[1]
said = (
    f"Young's interval is {young / 60:.0f} min, and loses {lost[1]:.1%}. Half of it loses "
    f"{lost[0.5]:.1%}, and twice {lost[2]:.1%}. "
    f"The middle half of the months lose {low:.1%} to {high:.1%}: within it luck changes the loss"
)
find(
    comms,
    "interval",
    luck=(high - low >= worse, f"{said} no less than doubling the interval does."),
    shown=(high - low < worse, f"{said} less than doubling the interval does."),
)

# %% [markdown] index=["distributed checkpoint", "DCP", "async_save", "sharded checkpoint"]
r"""
The time to notice a hang, and to get a new machine, belongs in $r$. Chapter 18 and exercise 1 hold
the model against Llama 3's record.

## Checkpoints as practised

How does $c$ become small? All ranks write, each its own shard, in the background, with PyTorch's
`torch.distributed.checkpoint` (DCP). A sharded model's parameters are `DTensor`s: a rank holds its
rows, and the tensor knows which they are. So each rank writes a file of its own rows, and a small
`.metadata` says where in which file each row is. A rank with other shards looks up the rows that it
needs. `async_save` copies the state, returns, and a thread writes the copy.

**Build.** {download}`sharded_checkpoint.py <../_downloads/sharded_checkpoint.py>` has a model by
`fully_shard` (chapter 16) with Adam. Four ranks train and save it, two and eight load it:

```{literalinclude} ../_downloads/sharded_checkpoint.py
:language: python
:start-at: def state(
:end-before: def fingerprint
:dedent:
```

```{literalinclude} ../_downloads/sharded_checkpoint.py
:language: python
:start-at: start, where
:end-at: writing.result()
:dedent:
```

The saving has a group of its own, `shards.beside`: its thread makes collectives, too, and in the
training's group they would be mixed with those of the next steps.

**Predict.** Parameters and Adam's two moments are 12 bytes a parameter: 3 for each of 4 files.
All bits are the same after loading. Both calls stop training for `state()`; then `async_save` for a
copy in memory, and `save` for writing, which should take longer:
"""

# %%
dcp = json.loads(on_rank_0(said_by, "sharded_checkpoint.py"))
prints = [dcp[f"fingerprint on {ranks} ranks"] for ranks in (4, 2, 8)]
assert len({*prints}) == 1

# %% tags=["plumbing"]
share = 3 * 6 * (1024**2 + 1024)  # 3 bytes for each parameter of 6 layers
sizes = dcp["bytes of each rank's file"]
times = {name: Timing(tuple(seconds)) for name, seconds in dcp["seconds"].items()}
rows = [(name, *map(human_seconds, (t.median, *t.spread))) for name, t in times.items()]
comms.print(table(rows, ["time of", "median", "lower quartile", "upper quartile"]))
over = max(sizes) / share - 1
said = (
    f"{len(sizes)} ranks wrote a file each, of {human_bytes(max(sizes))} at most, for "
    f"{human_bytes(share)} predicted; 2 and 8 ranks loaded the same bits, by their fingerprints."
)
find(
    comms,
    "reshard",
    as_predicted=(abs(over) < 0.02, f"{said} That is within 2 %."),
    off=(abs(over) >= 0.02, f"{said} The longest file is off by {over:+.0%}."),
)

# %% tags=["plumbing"]
stopped = compare(times["async_save"], times["save"])
_, stop, written = (t.median / times["save"].median for t in times.values())
said = (
    f"By the medians, async_save stops training for {stop:.2f} times as long as save, and its "
    f"files are written after {written:.1f} times as long."
)
alike = (stopped.alike, f"{said} This run does not tell the two stops apart.")
find(comms, "async", **stopped.sides(said) | {"alike": alike})

# %% [markdown]
r"""
**Explain.** Only what *stops* training counts as $c$. As it shrinks, $\tau^*$ does, as its root.
But the thread takes a core and the disk, the copy takes memory, and a fault finds the newest
complete checkpoint a little older. Wait for the last save before the next. Jobs also keep newer
copies on a neighbour machine (*local checkpointing* in NVIDIA's extension).

## When a checkpoint counts

Faults do not wait until a checkpoint is complete. So one call makes it count, the renaming of a
file, and the order is: write everything, *flush* it (wait until the disk has it), rename, and only
then remove an old one. In DCP rank 0 hears from all ranks that their files are flushed, writes
`.metadata` under another name, flushes and renames it. Without `.metadata` nothing is loaded. So
give each checkpoint a folder of its own, and remove the one before only when the new one has its
`.metadata`. The calls of one more `save` on four ranks:
"""

# %% tags=["plumbing"]
commit = dcp["commit, by rank"]
began = min(calls[0][1] for calls in commit)
dumped, renamed = commit[0][2][1], commit[0][-1][2]  # rank 0 begins .metadata, and it has its name
flushed, bars = [], {}
for number, (_, (_, flushes, ends), *_) in enumerate(commit):
    flushed.append(ends)
    until = renamed if number else dumped
    bars[f"rank {number}"] = {
        "plans, writes its file": flushes - began,
        "flushes it": ends - flushes,
        "waits": until - ends,
        "writes, flushes, renames .metadata": renamed - until,
    }
assert max(flushed) <= dumped
figures.stacked_bars(
    bars,
    title=f"All files are on the disk after {human_seconds(max(flushed) - began)}, "
    f"and count after {human_seconds(renamed - began)}",
    xlabel="since save was called",
)

# %% [markdown]
r"""
## Where it breaks: the newest checkpoint

microddp writes one file, `checkpoint-30.pt.part`, and `os.replace` takes away the `.part`.
**Predict.** Killed before the renaming, a job goes on from the checkpoint before; after it, from
the new one. Here two are kept. While a third is saved, the folder is copied before each call that
flushes, renames or removes, as a kill would leave it:
"""

# %%
folder = RECORDS / "checkpoints"
checkpoints = Checkpoints(folder, comms, keep=2)
killed = []


def save(number):
    checkpoints.save(number, {"step": number})
    checkpoints.finish()


def copied_before(call):
    def copying(*arguments, **more):
        killed.append(call.__name__)
        shutil.copytree(folder, RECORDS / f"killed-{len(killed)}")
        return call(*arguments, **more)

    return copying


save(10), save(20)
with contextlib.ExitStack() as stack:
    for call in (os.fsync, os.replace, os.unlink):
        stack.enter_context(mock.patch(f"os.{call.__name__}", copied_before(call)))
    save(30)

# %%
rows = []
for number, call in enumerate(comms.all_gather_data(killed)[0], 1):
    copy = RECORDS / f"killed-{number}"
    names = sorted(path.name.removeprefix("checkpoint-") for path in copy.glob("*"))
    rows.append((call, ", ".join(names), Checkpoints(copy, comms, keep=2).load()["step"]))
comms.print(table(rows, ["killed before", "has checkpoints", "goes on from step"]))
assert [step for *_, step in rows] == [20, 20, 30, 30]

# %% [markdown]
r"""
The first `fsync` flushes the file, the second the folder with its new name; `unlink` removes the
oldest. A killed process loses no bytes that it wrote. A machine that loses power can lose them and
still keep the new name: hence the flush before. Now the newest file loses its second half:
"""

# %%
if rank == 0:
    newest = folder / "checkpoint-30.pt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
state = checkpoints.load()
comms.print(f"going on from step {state['step']}")
assert state["step"] == 20

# %% tags=["plumbing"]
if rank == 0:
    shutil.rmtree(RECORDS)
comms.barrier()  # a rank that ends writes there

# %% [markdown]
r"""
With `keep=1` there would have been nothing to go back to. All ranks must agree on which one it is:
so rank 0 reads, and sends. All that the next step depends on must be in it: weights, what the
optimizer keeps, the step's number, the place in the data, each rank's random numbers.

## Where it breaks: a fault that comes again

A program that is wrong at step 1000 is wrong again after a restart. So restarts are counted, by
`--max-restarts`. In microddp any error other than a lost connection ends that process at once, and
a step that the same members have lost five times counts as the program's failure.

A GPU that computes wrong numbers raises nothing at all: here only a comparison of replicas or of
losses can tell.

:::{admonition} On GPUs
The mistakes stay. But an NCCL call returns at once, so the host stands at a later line, where it
needs a result. If a plain DDP job hangs, the watchdog ends it after the `timeout` of
`init_process_group` (10 minutes, unless set), and its message names the collective
({doc}`chapter 07 <07_sync_primitives>` reads one). Each rank dumps its flight recorder (PyTorch
2.13: on by default, 2000 entries): have `TORCH_FR_DUMP_TEMP_FILE` name a disk that stays.
`torchfrtrace` compares the files. `async_save` copies from the GPU to the host first, and needs
gloo beside NCCL (`init_process_group("cpu:gloo,cuda:nccl")`). Published: Llama 3 trained over 90 %
of the time on 16 384 H100 ([section 3.3.4](https://arxiv.org/abs/2407.21783), 2024).
:::

## What to take along

- A rank that waits may be innocent. Have each note its calls before it makes them, and look for the
  rank that has not come, or came to another one. Then ask whether the call that waits or the
  missing one is the bug.
- A restart costs a start and half an interval. Spares that have imported take the start away, with
  a checkpoint or elastic, and cost a machine.
- Save every $\sqrt{2cM}$ seconds; twice or half that costs a quarter more of $c/\tau + \tau/2M$.
  To lose less, make $c$ smaller: sharded, in the background.
- Half a checkpoint is none: write beside, flush, rename, then remove the old one, and keep two.

## Exercises

**The lab.** Write training that survives a kill. {doc}`It is checked </labs>` on 1, 2 and 3 ranks.

```console
$ python -m microddp.labs start 13
```

1. Llama 3 kept over 90 % of the time, with a fault every 3.09 hours by the first table. Let each
   take 10 minutes to start again. How long may a checkpoint stop training, by the sum of three
   terms at Young's interval? How long does it take to write 405 billion parameters of 14 bytes (2
   in bf16; 12 in fp32, a copy and two moments) to storage of 2 TB/s (section 3.3.1)?

   <details class="solution"><summary>Solution</summary>

   Restarts take $600/11124 = 5.4$ %, so 4.6 % are left for the first two terms. At Young's interval
   they are equal, together $\sqrt{2c/M}$. So $c = 0.046^2 \cdot 11124 / 2 = 11.8$ s at most.
   Writing takes $405 \cdot 10^9 \cdot 14 / (2 \cdot 10^{12}) = 2.8$ s, which is less. A minute
   would be too much: $\sqrt{120/11124}$ alone is 10 %.

   </details>

2. In `meet_again.py`, what happens if the third process stops itself (`signal.SIGSTOP`) instead of
   killing itself? (The main program has to kill it at the end.)

   <details class="solution"><summary>Solution</summary>

   The survivors wait until the group's time-out, 5 s, since a stopped process keeps its connections
   open. Then they go on as before. Woken by SIGCONT, the stopped one gets an error, too, comes
   third to a generation that is under way, and waits for ranks that do not come. So one place has
   to say who is in: microddp's server does.

   </details>

3. In `meet_again.py` two survivors add to `come to 1` and wait for 0.3 s. Where does it go wrong if
   one of them comes 0.4 s after the other?

   <details class="solution"><summary>Solution</summary>

   The first counts itself alone, and trains with all the samples. The second counts two, and waits
   for a first that is no longer there; its error is not caught in `meet`. If it were, it would
   train alone as well: two jobs that each believe to be the one, a *split brain*. A least number of
   members that is more than half of all prevents it, and so does one server that says who is in.

   </details>
"""

# %%
comms.close()
