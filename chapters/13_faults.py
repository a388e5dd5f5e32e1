# %% [markdown]
r"""
# 13. When a rank hangs or dies

What if a rank hangs or dies? Up to here each run ended well. A large job does not: among so many
machines one is always broken. This chapter reads a hang from what the ranks were doing, counts what
a death costs, and builds training that lives through it, with a restart and without one.
"""

# %% tags=["imports"]
import contextlib
import io
import itertools
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from textwrap import fill

import torch
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

import microddp
from microddp import figures
from microddp.data import load_digits
from microddp.doctor.hang import report
from microddp.model import FullMLP
from microddp.report import human_seconds, table
from microddp.results import whole_file
from microddp.train.checkpoint import Checkpoints

# %%
# sphinx_gallery_builds = "training that outlives its ranks, and a reader for hangs"
# sphinx_gallery_ranks = 3
run = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))  # the same on all ranks
RECORDS = Path(tempfile.gettempdir(), f"microddp-records-{run}")
os.environ["MICRODDP_RECORD"] = str(RECORDS)  # of which more below
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
r"""
## How often

**Predict.** If a device interrupts a job once in a time $M_1$ on average, independently of the
others, then the first of $N$ does so after $M_1 / N$. Meta counted 466 interruptions in 54 days on
16 384 GPUs, 47 of them planned ([Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4, 2024).
What do the other 419 make of other sizes?
"""

# %%
M1 = 54 * 24 * 3600 / 419 * 16384  # seconds
rows = [(f"{count:,}", human_seconds(M1 / count)) for count in (1, 8, 256, 1024, 16384, 100_000)]
comms.print(table(rows, ["devices", "time between interruptions"]))

# %% [markdown] index=["hang", "deadlock", "stuck", "flight recorder"]
r"""
One device runs for years, a job of a thousand for two days, one of ten thousand for hours. Others
count more: in another cluster of Meta's, jobs of 1024 GPUs failed every 7.9 hours ([Kokolis and
others, 2024](https://arxiv.org/abs/2410.21680)). It depends on machines, and on what is counted. In
any case somebody or something has to notice, to find the cause, and to go on.

## Reading a hang

If a process dies, the kernel closes its connections, and with gloo its neighbours get an error. A
rank that does not come to a collective gives no sign: the others wait. Chapter 07 showed what they
see at best: a time-out, on a rank that waited.

So each rank has to say where it *is*. It notes each call before it makes it: what it is, its number
in its group, and the line of the program. With `MICRODDP_RECORD=DIR` in the environment the last 64
notes are in a file that is mapped into memory. What is written there belongs to the kernel, so it
can be read while the process hangs, and when it is dead; the process need not be asked. That costs
a few microseconds a call.

`python -m microddp.doctor DIR` reads the records of all ranks and compares them. It asks each
process for its stack, by a signal, and below, a thread of rank 0 calls its `report` while the ranks
hang. Each mistake is made in a group of its own, with a time-out of three seconds. (With NCCL a
time-out would end the process, so these mistakes are made with gloo only.)
"""

# %%
STUCK = n > 1 and comms.backend == "gloo"  # whether there is somebody to wait for


def diagnosed(mistake):
    """What the doctor says of a group in which all ranks call ``mistake(group)``."""
    comms.barrier()  # the time-out counts while the group is made, too
    group, said = comms.subgroup(range(n), timeout=3.0), RECORDS / mistake.__name__
    doctor = threading.Timer(0.5, lambda: said.write_text(report(RECORDS)))
    if rank == 0:
        doctor.start()
    with contextlib.suppress(RuntimeError):  # the others did not come
        mistake(group)
    if rank == 0:
        doctor.join()
    for _ in range(500):  # it went on, and does something else
        if said.exists():
            break
        time.sleep(0.02)
    group.close()
    return said.read_text().partition("## The diagnosis")[2].partition("## Where")[0].strip()


# %% tags=["plumbing"]
def show_wrapped(said):
    comms.print("\n".join(fill(line, 94, subsequent_indent="    ") for line in said.splitlines()))


def show(*mistakes):
    for mistake in mistakes if STUCK else ():
        with contextlib.redirect_stderr(io.StringIO()):  # they print their stacks, too
            said = diagnosed(mistake)
        show_wrapped(f"{mistake.__name__}:\n{said}\n\n")
        assert rank or "not come" in said or "different calls" in said, said


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
A rank that waits is not stuck by itself. Compare its line with where those are that have not come:
one of the two is wrong. In the first two it is the line that waits. In the others it is the rank
that has not come. (It is in `diagnosed` here. In a program it is in a loader, or in the next thing
that blocks.)

An early `continue` and a batch less are the same to a collective: rank 1 has made one call less.
Had more batches followed, rank 1's next call would have been paired with the one that it left out,
and nothing would hang until the end, while what was trained is wrong. Where the next call comes
from another line of the program, the doctor sees that; in a loop of one line it cannot. Next, calls
that differ:
"""


# %%
def another_order(group):
    calls = [lambda: group.all_reduce(ones), lambda: group.broadcast(ones)]
    for call in calls[::-1] if rank == 1 else calls:
        call()


def another_shape(group):
    group.all_reduce(torch.ones(2, 2) if rank == 1 else torch.ones(4))


def another_dtype(group):
    group.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))


show(another_order, another_shape, another_dtype)

# %% [markdown]
r"""
The last two did not hang. gloo adds up bytes as each rank sees them, and only the record knows that
something is wrong. With *more* bytes on one rank gloo ends a process, and with NCCL such a mistake
hangs or gives garbage. `MICRODDP_DEBUG=1` compares calls before they are made, and raises on all
ranks (chapter 07); it costs a round of messages each time, and the record does not.

Last, an exception on one rank, here in a job of its own, under torchrun:
"""

# %%
RAISES = """
import torch, microddp

comms = microddp.init()
for step in range(5):
    if comms.rank == 1 and step == 3:
        raise ValueError("a sample that cannot be read")
    comms.all_reduce(torch.ones(4))
"""


# %% tags=["plumbing"]
def on_rank_0(work, *args):
    """Let rank 0 work, and the others wait for its result, which is plain data."""
    return comms.all_gather_data(work(*args) if rank == 0 else None)[0]


OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith((*OF_TORCHRUN, "MICRODDP_"))}
BARE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MICRODDP_TIMEOUT": "20"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]


def start(*arguments, **environment):
    """A Python process that knows nothing of this job."""
    command = [sys.executable, *map(str, arguments)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=BARE | environment, **quiet)


# %%
def raises_on_one_rank():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "raises.py")
        script.write_text(RAISES)
        start(*TORCHRUN, script, MICRODDP_RECORD=folder).wait(timeout=60)
        said = report(Path(folder)).partition("## The diagnosis")[2].strip()
        return said.replace(f"{folder}/", "")


said = on_rank_0(raises_on_one_rank)
show_wrapped(said)
assert "cannot be read" in said

# %% [markdown] index=["elastic"]
r"""
The others fail when rank 1's connections close, and torchrun ends whoever is still there. The
records remain. (The numbers count all collectives of a group, and `init` makes one.)

Where a job hangs and no folder was named, each process that has called `microddp.init()` prints its
stack and its last collectives when it gets SIGUSR1 (`kill -USR1`). At a time-out the error has
both. For any other process there is `py-spy dump --pid`. PyTorch has a record of its own, the
*flight recorder*, with NCCL and with gloo; the doctor reads that, too, for calls that microddp did
not make. Of each call it has a field `state`, which with gloo stays "scheduled", and a field
`retired`, which tells whether it is through. With NCCL a *watchdog* thread looks after each
collective, and ends the process when one is over its time-out, since a GPU's kernel that waits
would wait for ever ([PyTorch's environment variables of
ProcessGroupNCCL](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html)).

## Without a restart, in thirty lines

Now a rank that is dead. The survivors are alive, and they have all that it takes to go on: every
replica has the weights. What is broken is the group. So: make a new one.

**Predict.** What does it take? They must notice: a closed connection does that in a round trip.
They must agree on who is left: a number counts *generations*, and all who come to the next one
within 0.3 s are in. And they make a group of that generation: some connections. So it should take a
little more than the 0.3 s.

**Build.** The third of three processes kills itself at step 30:
"""

# %%
TINY = """
import os, signal, sys, time
from datetime import timedelta
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

me, store = int(sys.argv[1]), TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)

def meet(generation, least=1):
    rank = store.add(f"come to {generation}", 1) - 1
    while store.add(f"come to {generation}", 0) < least:
        time.sleep(0.01)
    time.sleep(0.3)
    size = store.add(f"come to {generation}", 0)
    return ProcessGroupGloo(
        PrefixStore(f"generation {generation}", store), rank, size, timedelta(seconds=5)
    )
"""

# %%
TINY += """
weights, step, generation, group = torch.zeros(3), 0, 0, meet(0, least=3)
while step < 60:
    if me == 2 and step == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    share, began = torch.ones(3) / group.size(), time.time()
    try:
        group.allreduce([share]).wait()
    except RuntimeError:
        generation, group = generation + 1, None
        group = meet(generation)
        print(f"process {me}: {group.size()} left, together again in {time.time() - began:.2f} s")
        continue  # the step again
    weights, step = weights + share, step + 1
print(f"process {me}: {weights.tolist()}", flush=True)
os._exit(0)  # a thread of the old group may wait yet, and gloo would end in an error
"""


# %%
def three_processes():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", TINY]
    processes = [
        subprocess.Popen([*command, str(i), str(store.port)], env=BARE, stdout=subprocess.PIPE)
        for i in range(3)
    ]
    said = [process.communicate(timeout=60)[0].decode() for process in processes]
    return "".join(said), [process.returncode for process in processes]


said, codes = on_rank_0(three_processes)
comms.print(said)
assert codes == [0, 0, -9]
assert said.count("[60.0, 60.0, 60.0]") == 2

# %% [markdown] index=["restart", "torchrun", "fault tolerance"]
r"""
**Explain.** Each weight is 60, one for each step: of three ranks up to the thirtieth, of two from
there on. The step that was lost was taken again with larger shares. That is the whole idea, and the
rest is what can go wrong. Who holds the store? Who is *hung*, and comes neither to the collective
nor to the meeting? What if one dies while they meet? If one rank has finished the step, and another
has not? And who comes later needs weights and optimizer state from somebody.

`microddp.elastic` answers these. Members keep a connection to a small server, which a member
starts, and another one if that member dies. It lets nobody in who does not know the job's secret.
It sees at once that a process has died, and leaves behind who is silent for two seconds while the
others meet. A step's loss is averaged in
one more message, before the weights change: so who has taken a step has all its samples in it. Who
is new, or missed the end of a step, gets the state of a rank that is furthest.
[torchft](https://github.com/meta-pytorch/torchft) does this for clusters of GPUs.

## What a fault costs

**Predict.** Let $R$ be the time to start a job, $s$ that of a step, and a rank die after $k$ steps,
the last checkpoint being of step $j$. Then a fault costs

- with **nothing** but the same command again, $R + k s$;
- with a **restart** from the last checkpoint, $R + (k - j)\,s$, on average half an interval;
- **elastic**, the step that was lost, and what it takes to build a group and a training anew: that
  part of $R$ which comes after the imports.

**Measure.** The same training four times: without a fault, and in each of these ways with process 1
dead after step 30 of 56. Restarts are torchrun's: when one rank dies, it ends all and starts all
(`--max-restarts`). A checkpoint is written every 8 steps, the last one before the fault after 24.
In the elastic job a fourth process stands by, and joins after the death. Each step sleeps 20 ms,
for a larger model's time. All jobs are processes of their own, on the CPU:
"""

# %%
JOB = """
import json, os, signal, sys, time
began = time.time()
from pathlib import Path
import torch
from torch.nn.functional import cross_entropy
import microddp
from microddp.data import load_digits
from microddp.elastic import Members
from microddp.train import TrainingConfig, train
from microddp.train.elastic import train_elastically

way, folder, me, port = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
me = os.environ.get("RANK", me)
log = open(folder / f"{os.getpid()}.log", "w", buffering=1)
x, y = load_digits().test.tensors
dead = folder / "dead"

def tell(what, loss=None, at=None):
    print(json.dumps([at or time.time(), what, loss]), file=log)
"""

# %%
JOB += """
def on_step(step, model):
    with torch.no_grad():
        tell(step, cross_entropy(model(x), y).item())
    time.sleep(0.02)
    if (step, me) == (30, "1") and way != "no fault" and not dead.exists():
        dead.touch()
        tell("dead")
        os.kill(os.getpid(), signal.SIGKILL)
"""

# %%
JOB += """
torch.optim.Adam([torch.zeros(1)])  # the first optimizer of a process imports more
tell("started", at=began)
tell("imported")
while me == "spare" and not dead.exists():
    time.sleep(0.01)
options = dict(model="mlp", width=64, lr=3e-3, epochs=4)
if way == "restart":
    options |= dict(checkpoint=folder / "checkpoints", checkpoint_every=8, resume=True)
if way == "elastic":
    with Members(f"127.0.0.1:{port}") as members:
        train_elastically(TrainingConfig(**options), members, on_step)
else:
    with microddp.init() as comms:
        train(TrainingConfig(**options), comms, on_step)
"""


# %%
def run_job(way):
    """Run a job to its end; what its processes told, in order."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        script, port = Path(folder, "job.py"), free.getsockname()[1]
        script.write_text(JOB)
        free.close()
        arguments = script, way, folder
        if way == "elastic":
            jobs = [start(*arguments, member, port) for member in (0, 1, 2, "spare")]
        else:
            jobs = [start(*TORCHRUN, "--max-restarts=1", *arguments, 0, 0)]
        ends = [job.wait(timeout=100) for job in jobs]
        if max(ends) != 0:
            raise RuntimeError(f"{way}: expected jobs that end well, got {ends}")
        logs = [path.read_text().splitlines() for path in Path(folder).glob("*.log")]
    return sorted((json.loads(line) for log in logs for line in log), key=lambda event: event[0])


# %%
WAYS = ["no fault", "nothing", "restart", "elastic"]
events = {way: on_rank_0(run_job, way) for way in WAYS}

# %% [markdown]
"""
What these ways cost, from the death of a rank to the first step that nobody had made before:
"""


# %% tags=["plumbing"]
def fault(told):
    """When a rank died, when the first step after that was made, and when the first new one."""
    died = next(at for at, what, *_ in told if what == "dead")
    later = [(at, what) for at, what, *_ in told if at > died and isinstance(what, int)]
    return died, later[0][0], next(at for at, step in later if step > 30)


# %% tags=["plumbing"]
calm = events["no fault"]
first = next(at for at, what, *_ in calm if what == 1)
START = first - min(at for at, what, *_ in calm if what == "started")
BUILD = first - max(at for at, what, *_ in calm if what == "imported")
STEP = (max(at for at, what, *_ in calm if what == 56) - first) / 55
predicted = {"nothing": START + 30 * STEP, "restart": START + 6 * STEP, "elastic": BUILD + STEP}

# %% tags=["plumbing"]
comms.print(f"no fault: {START:.1f} s from a process's start to its first step, of which")
comms.print(f"{BUILD:.2f} s after imports; then {human_seconds(STEP)} a step")
cost, rows = {}, []
for way in WAYS[1:]:
    died, _, new = fault(events[way])
    cost[way] = new - died
    rows.append((way, predicted[way], cost[way]))
headers = ["", "a fault costs, predicted, s", "measured, s"]
comms.print(table(rows, headers, floats=["", ".2f", ".2f"]))

# %% tags=["plumbing"]
PARTS = ("processes start", "imports", "meet, and read", "steps again")


def recovery(told):
    """What a fault cost, in parts."""
    died, first, new = fault(told)
    marks = [
        max([at for at, what, *_ in told if what == mark and died < at < first], default=died)
        for mark in ("started", "imported")
    ]
    ends = itertools.pairwise([died, *marks, first, new])
    return dict(zip(PARTS, (end - start for start, end in ends), strict=True))


figures.stacked_bars(
    {way: recovery(events[way]) for way in WAYS[1:]},
    title="From a death to the next new step: "
    + ", ".join(f"{way} {human_seconds(seconds)}" for way, seconds in cost.items()),
    xlabel="after the death of a process",
)

# %% tags=["plumbing"]
began = {way: min(t for t, what, *_ in told if what == 1) for way, told in events.items()}
curves = {
    way: [(t - began[way], loss) for t, _, loss in told if loss] for way, told in events.items()
}
figures.lines(
    {way: tuple(zip(*curve, strict=True)) for way, curve in curves.items()},
    title="Loss by time, with faults crossed: they cost time, and no quality",
    xlabel="seconds since the first step of the job",
    ylabel="loss on the test set",
    crosses=[
        max(point for point in curves[way] if point[0] <= fault(events[way])[0] - began[way])
        for way in WAYS[1:]
    ],
)

# %%
losses = {way: {step: loss for _, step, loss in told if loss} for way, told in events.items()}
assert all(losses[way] == losses["no fault"] for way in WAYS[:-1]), "bitwise"
off = max(abs(losses["elastic"][k] - losses["no fault"][k]) for k in losses["no fault"])
comms.print(f"restart: bitwise the losses without a fault; elastic: off by {off:.0e} at most")
assert off < 1e-3
assert cost["elastic"] == min(cost.values())

# %% [markdown] index=["checkpoint interval"]
r"""
**Explain.** A restart costs what a start costs: the processes, Python's imports, the ranks'
meeting, the state from the disk. Here that is seconds, most of it imports on two cores; in a
cluster minutes, with a queue for a new machine, and terabytes to read. (The first start may be
slower than the later ones, which find its files in memory; then the prediction is too high.)
Elastic has only the meeting, and for the newcomer the state as a message: the processes that live
have started and imported already. It takes longer than to build a group anew, because the old one
has to be let go first: what still refers to it is looked for in all that Python holds, and its
threads are given 50 ms to end. If the dead process had the server, another one is started, and
waits for a second whether more members come.

The loss does not show who died: after a restart each step is bitwise what it was without a fault.
So it is with elastic if the fourth process was there when the others met, for then three ranks go
on as three did. With fewer, sums are in another order, and agree up to rounding. Had the fourth not
imported yet, the others would have gone on as two until it was ready.

What does elastic cost where nobody dies? Two numbers are averaged in each step, which takes the
$2(n-1)\,\alpha$ of a small all-reduce, and waits until the loss is known. And NCCL's way to lose a
rank, to abort and then to shrink the group, is young, so microddp's elastic members use gloo. That
may be expensive. Two published results:

- Llama 3 restarted 466 times in 54 days, and trained for more than 90 % of the time ([section
  3.3.4](https://arxiv.org/abs/2407.21783), 2024).
- On 64 H200, with a fault every 45 to 75 minutes, 3000 steps of Llama-4 Scout took 818 minutes with
  restarts and 930 with torchft, whose averages across replicas went over gloo
  ([Clockwork](https://clockwork.io/blog/keeping-distributed-training-running-through-failures), who
  sell a third way).

In the second, going on without a restart is *slower* than restarting. What a fault costs, times how
often there is one, has to be held against what readiness costs in every step.

## How often to save

**Predict.** A checkpoint that stops training for $c$ seconds, every $\tau$ seconds, takes the share
$c/\tau$. A fault loses half an interval on average: with one in $M$ seconds, the share
$\frac{\tau}{2M}$. And each takes $r$ to start again and to read the checkpoint, whatever $\tau$. So

$$ \text{lost} = \frac{c}{\tau} + \frac{\tau}{2M} + \frac{r}{M}, \qquad
\tau^* = \sqrt{2 c M}. $$

That is [Young's interval](https://doi.org/10.1145/361147.361115) (1974). It asks for little: twice
as long or half as long costs a quarter more than the least of the first two terms. If $c = 30$ s
and $M = 3$ hours, $\tau^*$ is 13 minutes.

**Measure.** Each rank that has a core for itself trains a small network alone, with steps of about
a millisecond, and dies at random moments, every 0.2 s on average. It then reads its newest
checkpoint and goes on:
"""

# %%
timed = comms.timed()
MEAN, STEPS = 0.2, 300  # seconds between faults, steps to make
inputs, targets = (tensor[:32] for tensor in load_digits().train.tensors)


# %%
def mortal(every, seed, path):
    """Train, with faults; returns the seconds of all, of writing, of reading, and steps made."""
    torch.manual_seed(0)
    chance, model = random.Random(seed), FullMLP(64, depth=8, inputs=64, outputs=10)
    optimizer = torch.optim.Adam(model.parameters())
    reading, step, made, start = [], 0, 0, time.perf_counter()
    writing = [seconds(save, path, 0, model, optimizer)]
    fault = time.perf_counter() + chance.expovariate(1 / MEAN)
    while step < STEPS:
        if time.perf_counter() > fault:
            reading.append(seconds(load, path, model, optimizer))
            step = max(0, every * ((step - 1) // every))
            fault = time.perf_counter() + chance.expovariate(1 / MEAN)
        elif step and step % every == 0:
            writing.append(seconds(save, path, step, model, optimizer))
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        step, made = step + 1, made + 1
    return time.perf_counter() - start, writing, reading, made


# %%
def seconds(call, *args):
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def save(path, step, model, optimizer):
    with whole_file(path) as unfinished:  # there when it is complete, not before
        torch.save((step, model.state_dict(), optimizer.state_dict()), unfinished)


def load(path, model, optimizer):
    _, weights, state = torch.load(path)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


# %%
EVERY, LIVES = (4, 10, 25, 60, 150), 4  # of each rank
with tempfile.TemporaryDirectory() as own:
    newest, seeds = Path(own, "newest.pt"), range(LIVES * timed.rank, LIVES * (timed.rank + 1))
    lives = [[mortal(every, seed, newest) for seed in seeds] for every in EVERY]
lives = timed.all_gather_data(lives)  # by rank, interval, life


# %% tags=["plumbing"]
def lost_share(total, writing, reading, made):
    """What a life took longer than its steps, each made once, as a share of these."""
    step = (total - sum(writing) - sum(reading)) / made
    return total / (STEPS * step) - 1


def share_by_formula(interval):
    return saves / interval + interval / (2 * MEAN) + loads / MEAN


def mean_of(values):
    values = list(values)
    return sum(values) / max(1, len(values))


flat = [life for rank_lives in lives for each in rank_lives for life in each]
saves, loads = (mean_of(t for life in flat for t in life[part]) for part in (1, 2))
step = mean_of((t - sum(writing) - sum(reading)) / made for t, writing, reading, made in flat)
lost, formula = {}, {}
for i, k in enumerate(EVERY):
    lost[k] = mean_of(lost_share(*life) for each in lives for life in each[i])
    formula[k] = share_by_formula(k * step)
best, young = min(lost, key=lost.get), math.sqrt(2 * saves * MEAN) / step
by_formula = [share_by_formula(t) for t in (young * step, 2 * young * step)]

# %% tags=["plumbing"]
timed.print(f"a step, to save, to read: {', '.join(map(human_seconds, (step, saves, loads)))}")
timed.print(f"Young's interval: {human_seconds(young * step)}, {young:.0f} steps; by the formula")
timed.print("{:.0%} of the time are lost there, {:.0%} with one twice as long".format(*by_formula))
rows = [(k, human_seconds(k * step), 100 * formula[k], 100 * lost[k]) for k in EVERY]
headers = ["steps between", "time", "lost, predicted, %", "measured, %"]
timed.print(table(rows, headers, floats=["", "", ".0f", ".0f"]))
figures.lines(
    {
        "Young": (EVERY, [100 * v for v in formula.values()]),
        "measured": (EVERY, [100 * v for v in lost.values()]),
    },
    title=f"Young's interval is {young:.0f} steps; in these lives {best} lost least",
    xlabel="steps between checkpoints",
    ylabel="time lost, % of that without faults",
    log="x",
)

# %% [markdown]
r"""
**Explain.** To save too often costs something for certain, to save too seldom only if a fault
comes. Each row is the mean of a few lives, with a few faults in each, so the rows of longer
intervals depend on luck, and do not tell where exactly the valley lies. By the formula its floor is
nearly flat: an interval twice as long as the best costs little more. And the formula is for
intervals that are short against $M$; the longest ones here are not.

What does $c$ mean if a thread writes the file? Only what *stops* training counts: a copy of the
state. `python -m microddp.train --checkpoint-every N` does so, one at a time. The thread takes a
core and the disk meanwhile, which may cost something, too, and a fault finds the newest file a
little older. As $c$ shrinks, $\tau^*$ does, as its root: a hundredth of the cost, a tenth of the
interval.

## Where it breaks: the newest checkpoint

Faults do not wait until a file is complete. microddp writes it under another name, waits until the
disk has it, and renames it: under its name there is all of it or nothing. But a disk may break a
file afterwards. **Predict.** Here are two checkpoints, and the newer one loses its second half:
"""

# %%
folder = RECORDS / "checkpoints"
checkpoints = Checkpoints(folder, timed, keep=2)
for number in (10, 20):
    checkpoints.save(number, {"step": number, "weights": torch.full((1000,), float(number))})
checkpoints.finish()
if timed.rank == 0:
    newest = folder / "checkpoint-20.pt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
state = checkpoints.load()
timed.print(f"going on from step {state['step']}")
assert state["step"] == 10
assert state["weights"].eq(10).all()

# %% tags=["plumbing"]
if timed.rank == 0:
    shutil.rmtree(RECORDS)

# %% [markdown]
r"""
With `--keep 1` there would have been nothing to go back to. All ranks must agree on which one it
is, or some would go on from step 10 and some from step 20: so rank 0 reads, and sends. And all that
the next step depends on must be in it: weights, what the optimizer keeps, the step's number, the
place in the data, and each rank's random numbers.

## Where it breaks: a fault that comes again

Restarts and new groups help against what goes away. A program that is wrong at step 1000 is wrong
again after a restart. So restarts are counted, by `--max-restarts`. In microddp an error that is no
lost connection ends its member at once, and a step that the same members have lost five times
counts as the program's failure.

A GPU that computes wrong numbers raises nothing at all. That ranks agree on a loss proves no more
than that they agree.

## What to take along

- Who waits may be innocent. Ask all ranks for their last call, and look at who has not come, or
  came to another one.
- Have each rank write down its calls before it makes them: afterwards is too late to ask.
- A restart costs a start and half an interval, elastic a meeting and a step; readiness costs
  something in each step.
- Save every $\sqrt{2cM}$ seconds; a factor of two matters little.
- Half a checkpoint is none: write beside, then rename, and keep two.

## Exercises

**The lab.** Write training that survives a kill. {doc}`It is checked </labs>` on 1, 2 and 3 ranks.

```console
$ python -m microddp.labs start 13
```

1. A job of 1024 GPUs is interrupted every 7.9 hours, and each time loses 10 minutes, apart from
   what was computed since the last checkpoint. To write one stops it for 20 seconds. What is
   Young's interval, and which share of the time is lost?

   <details class="solution"><summary>Solution</summary>

   $\tau^* = \sqrt{2 \cdot 20 \cdot 28440} = 1067$ s, 18 minutes. Lost: $20/1067 + 1067/56880 +
   600/28440 = 1.9 + 1.9 + 2.1 = 5.9$ %. Better checkpoints would gain at most 3.8 of these. The
   rest is for faster starts.

   </details>

2. In `TINY`, what happens if the third process stops itself (`signal.SIGSTOP`) instead of killing
   itself? (`three_processes` has to kill it at the end.)

   <details class="solution"><summary>Solution</summary>

   The survivors wait until the group's time-out, 5 s here, since a stopped process keeps its
   connections open. Then they meet and go on as before. (gloo cannot give up a collective: one of
   them may end with "terminate called" after its last line, as a thread of the old group still
   waits.) If the stopped process is woken by SIGCONT, it gets an error, too, comes third to a
   generation that is under way, and waits for ranks that do not. So somebody has to say who is in,
   and to whom it is said: microddp's server does.

   </details>

3. In `TINY` two survivors add to `come to 1` and wait for 0.3 s. Where does it go wrong if one of
   them comes 0.4 s after the other?

   <details class="solution"><summary>Solution</summary>

   The first counts itself alone, and trains alone, with all the samples. The second counts two, and
   waits for a first that is no longer there; its error is not caught in `meet`. If it were, it
   would train alone as well: two jobs, each of which believes that it is the one. That is called
   *split brain*. A least number of members that is more than half of all prevents it, and so does
   one server that says who is in.

   </details>
"""

# %%
comms.close()
