# %% [markdown]
r"""
# 15. Inside one machine

How fast can one machine agree with itself? You care if several of your ranks are on one machine:
they share a memory, and still send each other messages, as if they were far apart. This chapter
builds an all-reduce without a message, predicts its time from that of a copy, and says where that
misses. Then machines send each other only the sums of their ranks, as NCCL can between nodes.
"""

# %% tags=["imports"]
import os
import time
from functools import partial
from itertools import cycle
from pathlib import Path
from textwrap import fill

import torch
from torch.nn.functional import mse_loss

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.findings import Prediction, compare, find
from microddp.model import FullMLP, parameter_count
from microddp.report import human_bytes, human_seconds, table
from microddp.shared import (
    all_reduce_hook,
    carrier,
    hierarchical_all_reduce,
    machines_of,
    region_of,
    shared_all_gather,
    shared_all_reduce,
    shared_reduce_scatter,
    why_not_shared,
)
from microddp.stage import cluster, set_stage
from microddp.timing import Timing, measure

# %%
# sphinx_gallery_builds = "an all-reduce through memory that ranks share, and one by machine"
# sphinx_gallery_hosts = "2 x 1gbit, 2 ranks each"
comms = microddp.init()
comms.print(comms.describe())
timed = comms.timed(computing=False)  # without ranks that would only take another's core

# %% [markdown]
"""
## Who shares memory?

Two containers may have one host name and no memory in common. So the ranks try. On Linux each makes
a file that lies in memory (`memfd_create`), writes a random word on it, and tells the others both.
A rank that can open it and finds the word *maps* it: its pages appear among the addresses of both
processes, and one reads what the other writes there.

Hosts in a box count as machines. On the website there are two, of two ranks each. Inside a machine
the two ranks of the first are timed, with all cores, while those of the second sleep:
"""

# %% tags=["plumbing"]
if timed.box:  # a machine is timed on all cores
    os.sched_setaffinity(0, range(os.cpu_count()))

# %%
machines = machines_of(timed)
groups = [timed.subgroup(ranks) for ranks in machines]
(inside,) = filter(None, groups)  # the ranks of this machine
me, n = inside.rank, inside.world_size
timed.print(f"Ranks that stay, by machine: {machines}")

# %% tags=["plumbing"]
FIRST, ALONE = timed.rank in machines[0], len(machines[0]) == 1
why = why_not_shared(timed) or "it is alone on its machine: add --nproc-per-node=2"
if ALONE:
    timed.print(fill(f"Left out: a rank that shares its memory with others. {why}.", 90))


def on_first(call):
    """What a call returns on the first machine, while the others sleep; all ranks learn it."""
    return timed.all_gather_data(call() if FIRST else None)[machines[0][0]]


def in_a_row(calls, count, repeat=9):
    """Timings of a call on the first machine, when so many are made in a row."""

    def row(call):
        for _ in range(count):
            call()

    def seconds():
        rows = {name: partial(row, call) for name, call in calls.items()}
        times = measure(rows, inside, repeat=repeat)
        return {name: [s / count for s in timing.seconds] for name, timing in times.items()}

    return {name: Timing(tuple(each)) for name, each in on_first(seconds).items()}


# %% [markdown] index=["shared memory", "semaphore"]
r"""
## Two barriers and a sum

**Predict.** A message between ranks of one machine is copied into the kernel and out again, in
packets. In shared memory a rank writes its tensor where the others see it. Each adds up the $n$-th
part that is its own, and writes the sum where all see it. Then each reads the whole.

Let a copy of $S$ bytes take $c(S)$ seconds: it reads $S$ and writes $S$. To add to a tensor in
place reads two and writes one.

| | bytes read and written |
|---|---|
| copy the tensor in | $2S$ |
| copy the first rank's part | $2S/n$ |
| add the others' parts | $3S\,(n-1)/n$ |
| copy the result out | $2S$ |

That makes $(7 - 1/n)\,S$, or $\frac{7 - 1/n}{2}$ copies: 3.25 for two ranks. And twice the ranks
wait for each other, at a *barrier*: nobody adds up before all have written, nobody reads before all
have added up. Let a barrier take $b$, and the sum of only $n$ numbers, without barriers, $p$. Then

$$ t(S) = 2b + p + \frac{7 - 1/n}{2}\,c(S) . $$

**Build.** A {class}`~microddp.shared.region.SharedRegion` has the memory of all ranks of a machine,
and the barrier. Each rank allocates a block and tells the others where in its file it begins;
`region.at` returns theirs as tensors:
"""

# %%
region = region_of(inside)
LARGEST = 2**24  # bytes


def blocks(nbytes):
    """A block of float32 in the memory of each rank, by rank, as this rank sees them."""
    count = nbytes // 4
    mine = region.zeros(count, torch.float32)
    offsets = inside.all_gather_data(region.offset_of(mine))
    seen = [region.at(rank, offset, count, torch.float32) for rank, offset in enumerate(offsets)]
    return [mine if rank == me else block for rank, block in enumerate(seen)]


inputs = blocks(LARGEST)
total = blocks(LARGEST)[0]  # one is enough: that of rank 0


# %%
def shared_sum(tensor, written=region.barrier, summed=region.barrier):
    count = tensor.numel()
    inputs[me][:count].copy_(tensor)
    written()  # all have
    first, *others = (block[:count].tensor_split(n)[me] for block in inputs)
    part = total[:count].tensor_split(n)[me]
    part.copy_(first)
    for other in others:
        part += other
    summed()  # all have
    tensor.copy_(total[:count])


# %% [markdown]
"""
Is it right? Whole numbers have exact sums, to compare with the backend's. Of rounded numbers, each
is added up once, in rank order, so all ranks must have the same bits:
"""

# %%
values = torch.arange(1003.0) % 7 + me
expected = values.clone().to(inside.device)
inside.all_reduce(expected)
shared_sum(values)
assert torch.equal(values, expected.cpu())

rounded = torch.randn(1003, generator=torch.Generator().manual_seed(me))
shared_sum(rounded)
results = inside.all_gather(rounded.to(inside.device))
assert (results == results[0]).all()
timed.print("Equal to the backend's sum, and the same bits on all ranks")

# %% [markdown]
"""
How does a rank know that the others have come? Not by a plain flag in shared memory: a processor
such as ARM's may show two writes in another order than they were made. Each rank has a *semaphore*
of each other one. That is a counter in shared memory, too, but one that the kernel knows: to *post*
adds one, to *wait* takes one away, and sleeps while there is none. After the wait a rank sees all
that was written before the post ([POSIX,
4.15](https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/V1_chap04.html)). A barrier posts to
all others, and then waits for each.

**Predict.** Ranks in step find the others' posts there, and nobody sleeps. A rank that sleeps has
to be woken by the kernel. So the times of barriers should be spread.

**Measure.** A thousand barriers, each timed. Then 50 in a row, and as many of the backend's, which
are made of messages:
"""


# %%
def each_barrier():
    seconds = []
    for _ in range(1000):
        begun = time.perf_counter()
        region.barrier()
        seconds.append(time.perf_counter() - begun)
    return seconds


barriers = Timing(tuple(on_first(each_barrier)))
in_rows = in_a_row({"memory": region.barrier, "messages": inside.barrier}, 50)
b = in_rows["memory"].median

# %% tags=["plumbing"]
low, high = (barriers.percentile(percent) for percent in (10, 90))
said = (
    f"One barrier in ten takes {human_seconds(low)} or less, and one in ten {human_seconds(high)} "
    f"or more. In a row each takes b, {human_seconds(b)}, and the backend's "
    f"{human_seconds(in_rows['messages'].median)}."
)
find(
    timed,
    "barrier",
    spread=(not ALONE and high > 3 * low, said),
    even=(not ALONE and high <= 3 * low, f"{said} That is little spread."),
    alone=(ALONE, "One rank waits for nobody."),
)

# %% [markdown]
"""
## Where it breaks: a barrier left out

The ranks do the same work, and come at about the same time. So why wait? **Predict.** Without the
first barrier, a rank may add up what another wrote in the *last* call. Without the second, a fast
rank may read what is not added up yet, and then write over what a slow one is still to add up. A
late rank makes that likely.

**Measure.** Other numbers in each call, so that the right sum is known. First all come as they do;
then the last rank sleeps ten milliseconds before it writes, and before it adds up:
"""

# %%
CALLS = 25


def wrong_sums(written, summed, late):
    """How many calls gave a wrong sum, on all ranks of this machine together."""
    nap = partial(time.sleep, late if me == n - 1 else 0)
    wrong = 0
    for i in range(CALLS):
        tensor = torch.full((1000,), float(i + me))
        nap()
        shared_sum(tensor, lambda: (written(), nap()), summed)
        wrong += not tensor.eq(n * i + n * (n - 1) / 2).all()
    return sum(inside.all_gather_data(wrong))


# %%
def nothing():
    pass


BARRIERS = {
    "both barriers": (region.barrier, region.barrier),
    "without the first": (nothing, region.barrier),
    "without the second": (region.barrier, nothing),
}
wrong = {}
for name, pair in BARRIERS.items():
    wrong[name] = [on_first(partial(wrong_sums, *pair, late)) for late in (0, 1e-2)]
    assert (wrong[name][1] > 0) == (not ALONE and name != "both barriers")
assert wrong["both barriers"] == [0, 0]

# %% tags=["plumbing"]
sums = len(machines[0]) * CALLS
rows = [(name, *counts) for name, counts in wrong.items()]
timed.print(table(rows, [f"wrong, of {sums} sums", "as they come", "one is late"]))
(_, first, late_first), (_, second, late_second) = rows[1:]
said = (
    f"If one rank is late, {late_first} of {sums} sums are wrong without the first barrier, and "
    f"{late_second} without the second. As the ranks come, it is {first} and {second}"
)
find(
    timed,
    "wrong-sums",
    seen=(not ALONE and min(first, second) > 0, f"{said}."),
    hidden=(not ALONE and min(first, second) == 0, f"{said}: a test may pass."),
    alone=(ALONE, "One rank finds every sum right, with barriers or without."),
)

# %% [markdown]
r"""
**Explain.** Run this on your computer and other counts come out, perhaps 0. Arrange for a late rank
in your test. (After the last call nobody writes over anything, so there the late rank may be right
without the second barrier.)

A third barrier is not needed: the next call writes `inputs`, which others read before the second
only, and writes sums after *its* first, when all have read these.

## One barrier, and none of the copies

**Predict.** A small tensor's time is barriers and calls. So take one barrier: write the tensor,
wait, and let each rank add up everything. That should save $b$, and a copy's call. But then a fast
rank could begin the next call while a slow one still adds up. With *two buffers in turn* it writes
into the other one; and when it comes to the first again, all have been at the barrier in between,
after they had read.

**Build.**
"""

# %%
SMALL = 2**16  # bytes
pairs, turns = blocks(2 * SMALL), cycle((0, 1))


def one_barrier(tensor, written=region.barrier):
    start = next(turns) * SMALL // 4
    buffers = [block[start : start + tensor.numel()] for block in pairs]
    buffers[me].copy_(tensor)
    written()
    tensor.copy_(buffers[0])
    for other in buffers[1:]:
        tensor += other


values = torch.arange(1003.0) % 7 + me
one_barrier(values)
assert torch.equal(values, expected.cpu())

# %% [markdown]
r"""
Of a large tensor the copies can be spared, if it is in shared memory already: DDP's buckets can be.
It is added up *in place*: a rank reads the $n$ parts of its sum, and writes that $n$ times. $S$ and
$S$: as much as one copy. microddp's {func}`~microddp.shared.collectives.shared_all_reduce` does so.
Where all ranks have 1 MiB or less together, it is `one_barrier`, and a check besides: each rank
writes what it calls, and after the barrier reads what the others do.

**Measure.** Small tensors are added up many times in a row. "No barrier" is all the work of
`shared_sum`, which waits for nobody. "Copy" copies one tensor on each rank, all at once. (Ratios
are medians of the rounds' ratios, not ratios of medians.)
"""

# %% tags=["plumbing"]
SIZES = [2**k for k in range(12, 25, 3)]


def calls_of(nbytes):
    x, y = torch.zeros(2, nbytes // 4)
    calls = {
        "backend": partial(inside.all_reduce, x.to(comms.device)),
        "two barriers": partial(shared_sum, x),
        "no barrier": partial(shared_sum, x, nothing, nothing),
        "microddp": partial(shared_all_reduce, region.zeros(nbytes // 4, torch.float32), inside),
        "copy": partial(x.copy_, y),
    }
    if nbytes <= SMALL:
        calls["one barrier"] = partial(one_barrier, x)
    return calls


# %%
tiny = partial(shared_sum, torch.zeros(n), nothing, nothing)
timings = {s: in_a_row(calls_of(s) | {"calls": tiny}, max(1, min(50, 2**22 // s))) for s in SIZES}
p = timings[SIZES[0]]["calls"].median


def work(nbytes):
    """Predicted seconds of calls and bytes."""
    return p + (7 - 1 / len(machines[0])) / 2 * timings[nbytes]["copy"].median


def predicted(nbytes):
    return 2 * b + work(nbytes)


# %% tags=["plumbing"]
parts = {
    s: (timings[s]["two barriers"].median, predicted(s), timings[s]["no barrier"].median, work(s))
    for s in SIZES
}
rows = [(human_bytes(s), *map(human_seconds, each)) for s, each in parts.items()]
headers = ["size", "two barriers", "predicted", "no barrier", "predicted"]
timed.print(table(rows, headers))
timed.print(f"p = {human_seconds(p)}, 2b = {human_seconds(2 * b)}")

# %% tags=["plumbing"]
over = {s: took / guessed for s, (took, guessed, _, _) in parts.items()}
bare = {s: took / guessed for s, (_, _, took, guessed) in parts.items()}
worst = max(SIZES, key=lambda s: max(over[s], 1 / over[s]))
waiting = human_seconds(max(0.0, parts[worst][0] - parts[worst][2]))
said = (
    f"Two barriers and a sum take {min(over.values()):.2g} to {max(over.values()):.2g} times the "
    f"predicted time, and the work alone {min(bare.values()):.2g} to {max(bare.values()):.2g} "
    f"times. The sum's largest miss is at {human_bytes(worst)}, where barriers add {waiting}, "
    f"predicted {human_seconds(2 * b)}."
)
find(
    timed,
    "model",
    longer=(over[worst] > 1.25, said),
    shorter=(over[worst] < 0.8, said),
    near=(0.8 <= over[worst] <= 1.25, f"{said} The sum's misses are all within a quarter."),
)

# %% tags=["plumbing"]
gains = {s: compare(timings[s]["microddp"], timings[s]["backend"]) for s in SIZES}
faster = [s for s in SIZES if gains[s].faster]
ratios = sorted(gain.ratio for gain in gains.values())
span = f"{ratios[0]:.2g} to {ratios[-1]:.2g} times as fast as the backend"
series = ("backend", "two barriers", "one barrier", "microddp", "copy")
figures.times_by_size(
    {name: {s: timings[s][name] for s in SIZES if name in timings[s]} for name in series},
    title=f"microddp in shared memory: {span}",
    models={"two barriers": predicted},
)
said = f"With a tensor in shared memory, microddp is {span}, by size; faster, beyond the quartiles,"
if not ALONE:
    find(
        timed,
        "memory",
        all=(len(faster) == len(SIZES), f"{said} at all {len(SIZES)} sizes."),
        not_all=(len(faster) < len(SIZES), f"{said} at {len(faster)} of {len(SIZES)} sizes."),
    )

# %% tags=["plumbing"]
smallest = timings[SIZES[0]]
pairs_of = zip(smallest["two barriers"].seconds, smallest["one barrier"].seconds, strict=True)
saved = human_seconds(Timing(tuple(two - one for two, one in pairs_of)).median)
one = compare(smallest["one barrier"], smallest["two barriers"])
limit = Prediction(timings[SIZES[-1]]["copy"].median, timings[SIZES[-1]]["microddp"])
said = f"A sum of {human_bytes(SIZES[-1])} in place, predicted as one copy, takes {limit}."
if not ALONE:
    find(
        timed,
        "one-barrier",
        **one.sides(
            f"At {human_bytes(SIZES[0])}, one barrier is {one.than('two')}. In the median round it "
            f"saves {saved}; b is {human_seconds(b)}."
        ),
    )
    find(timed, "one-copy", **limit.sides(said))

# %% [markdown] index=["hierarchical all-reduce", "topology"]
r"""
**Explain.** The model adds up what was measured apart, barriers one right after the other, and
copies of what no other core has touched. It leaves out that at a barrier in a sum all wait for the
slowest rank's *work*, and that one that waits long sleeps. And it leaves out *caches*, the cores'
small and fast memories: what another core has written last, or this one has just read, comes from
there.

## Several machines: each sum once

**Predict.** Let $K$ machines have $n$ ranks each, $N = Kn$, and one link. A ring through all ranks
leaves each machine once. Over its link go the $2\,\frac{N-1}{N}\,S$ bytes that every rank sends.
But all that a machine has to say is its sum, $S$ bytes. So let its ranks add up first, in memory,
each its part; let the ranks that have a part sum it over the machines; and let all hand the results
round, in memory. The link carries $n$ all-reduces of $S/n$ among $K$ machines, together
$2\,\frac{K-1}{K}\,S$: for two machines of two ranks $S$ instead of $1.5\,S$.

**Build.**
"""

# %%
K = len(machines)
even = K > 1 and n > 1 and len({len(ranks) for ranks in machines}) == 1
across = None
if even and comms.device.type == "cpu":  # the ranks that have this rank's part
    groups = [timed.subgroup(ranks) for ranks in zip(*machines, strict=True)]
    (across,) = filter(None, groups)


def by_machine(tensor):
    part = shared_reduce_scatter(tensor, inside)
    ring_all_reduce(part, across)
    shared_all_gather(tensor, inside)


# %% [markdown]
"""
microddp's {func}`~microddp.shared.hierarchical.hierarchical_all_reduce` takes machines of uneven
size, too, and sends a large tensor in pieces: while one travels, the machine adds up the next.

**Measure.** 16 MiB, and what the interface of the first host says that it sent:
"""


# %% tags=["plumbing"]
def bytes_sent():
    """What has left this host, by the kernel's list of interfaces; without loopback."""
    _, _, *lines = Path("/proc/net/dev").read_text().splitlines()
    devices = dict(line.split(":") for line in lines)
    return sum(int(of.split()[8]) for name, of in devices.items() if name.strip() != "lo")


def counted(call):
    """Bytes that a call brings onto the first host's link."""
    timed.barrier()
    before = bytes_sent()
    call()
    timed.barrier()
    return timed.all_gather_data(bytes_sent() - before)[0]


# %% tags=["plumbing"]
tensor = torch.zeros(LARGEST // 4)
flat, once = 2 * (K * n - 1) / (K * n), 2 * (K - 1) / K  # times S, over a machine's link
WAYS = {
    "ring": (partial(ring_all_reduce, tensor, timed), flat),
    "backend": (partial(timed.all_reduce, tensor), flat),
    "by machine": (partial(by_machine, tensor), once),
    "microddp": (partial(hierarchical_all_reduce, tensor, timed), once),
}
found = {}
if across:
    probe = torch.full((1003,), float(timed.rank))
    by_machine(probe)
    assert (probe == sum(range(timed.world_size))).all()
    found = measure({name: call for name, (call, _) in WAYS.items()}, timed, warmup=1, repeat=5)
else:
    timed.print("Left out: it takes machines of equally many ranks, two or more, and no GPUs.")

# %% tags=["plumbing"]
rows = []
for name, timing in found.items():
    (call, times_S), carried, wire = WAYS[name], None, None
    if timed.box:
        carried = counted(call) / LARGEST
        wire = human_seconds(times_S * LARGEST * timed.box.seconds_per_byte)
        assert 0.98 * times_S < carried < 1.15 * times_S
    rows.append((name, times_S, carried, wire, human_seconds(timing.median)))
headers = ["", "over the link / S", "counted", "wire's time", "measured"]
if across:
    timed.print(f"{K} machines of {n} ranks, {human_bytes(LARGEST)}")
    timed.print(table(rows, headers, floats=".2f"))
    gain = compare(found["microddp"], found["ring"])
    pieces = compare(found["microddp"], found["by machine"])
    said = (
        f"By machine, an all-reduce is {gain.than('a ring through all ranks')}; by bytes it would "
        f"be {flat / once:.2f} times as fast. microddp's, in pieces, is "
        f"{pieces.than('`by_machine`, in one piece')}."
    )
    find(timed, "once", **gain.sides(said))

# %% [markdown]
r"""
And a step? **Predict.** The stage (chapter 03) is a scale model of machines that have as many A100
each, and a link of 25 Gbit/s, and train 355 million parameters. $M$, all messages alone, is more
than the two thirds of $C$, computing alone, that could hide it. So a step takes $\frac{1}{3}C + M$
or more. By machine $M$ shrinks as the bytes do; or each way has its own $M$: its time in
the last table, for as many bytes as the gradients have:
"""

# %%
WORK = {"parameters": 355e6, "tokens": 24_576, "layers": 24}


def step_with(all_reduce):
    strategy = stage.strategy("ddp", 4.0)
    strategy.module.register_comm_hook((timed, all_reduce), all_reduce_hook)
    return stage.step(strategy)


# %% tags=["plumbing"]
steps = {}
if across and timed.box:
    there = cluster("a100", "25gbit", nodes=K, node=n, value_size=4, **WORK)
    stage = set_stage(timed, there)
    timed.print(stage)
    calls = {"one device": stage.step("none"), "ring": step_with(ring_all_reduce)}
    calls["by machine"] = step_with(hierarchical_all_reduce)
    steps = measure(calls, timed, warmup=1, repeat=5)

# %% tags=["plumbing"]
said = "Left out: it takes several machines of equally many ranks, and links of known speed."
if steps:
    C, messages = stage.sides[1].compute, stage.sides[1].messages
    ideal = max(C, C / 3 + messages) / max(C, C / 3 + messages * once / flat)
    share = stage.sides[1].nbytes / LARGEST
    ring, ours = (max(C, C / 3 + share * found[way].median) for way in ("ring", "microddp"))
    alone = steps.pop("one device")
    speeds = {name: stage.speed_up(step, alone) for name, step in steps.items()}
    gain = compare(steps["by machine"], steps["ring"])
    figures.speed_ups(
        {name: speed.times for name, speed in speeds.items()},
        timed.world_size,
        title=f"A step by machine is {gain.than('in a ring')}",
    )
    said = (
        f"By machine {timed.world_size} devices are {speeds['by machine'].ratio:.1f} times as fast "
        f"as one, in a ring {speeds['ring'].ratio:.1f} times: a step is {gain.than('in a ring')}. "
        f"By bytes it would be {ideal:.2f} times as fast, by each way's own M {ring / ours:.2f}."
    )
find(timed, "step", measured=(bool(steps), said), left_out=(not steps, said))

# %% [markdown] index=["NVLink", "NVLS", "SHARP", "RDMA", "rail", "symmetric memory", "tree"]
r"""
## How NCCL does it

**Inside a machine** one GPU reads and writes the memory of another, over NVLink or PCIe; where
neither is possible, NCCL goes through the host's memory
([SHM](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)).

**Between machines** the network card copies. With *RDMA* (remote direct memory access) cards write
into each other's memory past the kernel, with *GPUDirect* straight from GPU to GPU. Servers often
have a card for each GPU. Cards of one number in all machines may share a switch, a *rail*.

**Which algorithm?** Four nodes of 8 B200, a card of 400 Gbit/s for each GPU, took trees up to 16
MiB (which send each machine's sum), and a ring from 512 MiB. With 4 GiB it keeps each card busy at
94 % of its speed ([Stas Bekman](https://github.com/stas00/ml-engineering/tree/master/network), NCCL
2.30.7, AWS's tuner, October 2026): NCCL makes several rings, which leave by different cards
(exercise 1).

**In DDP** you set nothing for this: NCCL chooses for each bucket. `NCCL_DEBUG=INFO` with
`NCCL_DEBUG_SUBSYS=TUNING` prints its choice, and `NCCL_ALGO` forces another one, to compare. For
processes on CPUs, `step_with` above is the recipe.

**The switch adds.** With *NVLS* (NVLink with SHARP) a GPU reads the sum of its part of $S/n$ from
the switch, which asks all GPUs for what they have, and writes it to the switch, which gives it to
all. It sends its $S$ once into the switch, and its finished part, $S/n$, once more ([NCCL's
maintainer](https://github.com/NVIDIA/nccl-tests/pull/239)). **Predict.** In a ring of 8 each GPU
sends $\frac{14}{8}\,S$, here $\frac{9}{8}\,S$: the switch could be 1.56 times as fast. Published,
on 8 H200, for 16 GiB: 480 GB/s with NVLS and 367 in a ring, so 1.31 times ([Stas
Bekman](https://github.com/stas00/ml-engineering/tree/master/network), August 2026).

**Explain.** NVLink carries 450 GB/s by specification, and 480 is no error. It is *bus bandwidth*,
$\frac{S}{t} \cdot \frac{2(n-1)}{n}$: the bytes a second that leave a GPU in a *ring* that takes as
long. With NVLS only $\frac{9}{14}$ of them leave it: 309 GB/s.

## DDP twice

**Predict.** microddp's DDP can be handed `carrier("auto", inside)`: the backend's all-reduce or the
one in memory, whichever is faster, as measured at four sizes when it is made. If that is in memory,
so are the buckets, and a step should save the difference between the backend's all-reduce and one
in place: more if the backend's threads take time from backward's core, less if backward hides them.

**Measure.** Ranks really compute, with 16 MiB of gradients. The two all-reduces alone take turns
with the steps. (In the first figure they take turns with other calls: do not compare the two.)
"""

# %%
WIDTH, BATCH = 512, 64


def step(model, data):
    model.zero_grad()
    mse_loss(model(data[0]), data[1]).backward()


def steps_and_sums():
    data = torch.randn(2, BATCH, WIDTH)
    calls = {"alone": partial(step, FullMLP(WIDTH), data)}
    for name in ("backend", "auto"):
        ddp = microddp.DDP(FullMLP(WIDTH), inside, all_reduce=carrier(name, inside))
        calls[name] = partial(step, ddp, data)
    flat = region.zeros(parameter_count(FullMLP(WIDTH)), torch.float32)
    calls["sum by messages"] = partial(inside.all_reduce, flat.clone())
    calls["sum in place"] = partial(shared_all_reduce, flat, inside)
    return calls


# %% tags=["plumbing"]
times = {}
if comms.device.type == "cpu":
    times = in_a_row(steps_and_sums() if FIRST else {}, 1, repeat=13)


# %% tags=["plumbing"]
def in_ms(timing):
    low, high = (1e3 * seconds for seconds in timing.spread)
    return f"{1e3 * timing.median:.3g} ms ({low:.3g} to {high:.3g})"


def less(name, other):
    """By how much something takes less time than another, by round."""
    pairs = zip(times[other].seconds, times[name].seconds, strict=True)
    return Timing(tuple(more - its for more, its in pairs))


# %% tags=["plumbing"]
if times:
    timed.print(table(times.items(), [f"ranks: {len(machines[0])}", "median and quartiles"]))
    saved, due = less("auto", "backend"), less("sum in place", "sum by messages")
    saving = Prediction(due.median, saved)
    how = "within these quartiles" if saving.held else "less" if saving.longer else "more"
    said = (
        f'In the median round "auto" saves {in_ms(saved)} of a step. Predicted is the difference '
        f"of the two all-reduces alone, {in_ms(due)}, which is {how}."
    )
    if saved.spread[0] <= 0 <= saved.spread[1]:
        said += " So this run does not tell whether DDP gains."
    if not ALONE:
        find(timed, "saved", **saving.sides(said))
else:
    timed.print(f"On GPUs DDP keeps {comms.backend}: gradients are not in memory ranks share.")

# %% [markdown]
r"""
:::{admonition} On GPUs
Barriers and bytes stay. This chapter's memory is *symmetric memory* there: buffers that all GPUs
joined by NVLink can address. NCCL has kernels for registered ones since 2.27. On 8 H200 they raise
the bus bandwidth of 1 MiB from 75 to 145 GB/s, of 1 GiB from 466 to 480 ([Stas
Bekman](https://github.com/stas00/ml-engineering/tree/master/network), NCCL 2.30.7, October 2026).
Try `nccl-tests` with `-R 2`. PyTorch's `torch.distributed._symmetric_memory` ([alpha in
2.13](https://docs.pytorch.org/docs/2.13/symmetric_memory.html)) has `empty` and `rendezvous` for
this chapter's `zeros` and `at`. Of its all-reduces, `one_shot_all_reduce` lets each GPU add up
everything, as `one_barrier` does, `two_shot_all_reduce_` a part, as `shared_sum` does, and
`multimem_all_reduce_` lets the switch add.
:::

## What to take along

- An all-reduce in place, in memory, reads and writes the bytes of one copy. A barrier in it lasts
  until the slowest rank has come.
- Two barriers make it right, and buffers in turn save one. A barrier left out may go unnoticed
  until a rank is late.
- If a machine's ranks share a link, add up inside the machine first.

## Exercises

**The lab.** Write two barriers and a sum. {doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks, with
one of them late at each place in turn.

```console
$ python -m microddp.labs start 15
```

1. Four machines have eight ranks each, and gradients of 1 GiB. How many bytes cross a machine's
   link in a ring through all 32 ranks, and how many by machine? And if each of the eight ranks had
   a link of its own to the network?

   <details class="solution"><summary>Solution</summary>

   The ring: $2 \cdot 31/32$, or 1.94 GiB. By machine: $2 \cdot 3/4$, or 1.5 GiB. With more
   machines both come nearer to 2 GiB: most is won with two.

   With eight links one ring still leaves by one of them. By machine, the ranks of each part have a
   link, which carries 1.5/8, or 0.19 GiB. NCCL makes several rings, which leave by different
   links: with eight, each carries 1.94/8, or 0.24 GiB.

   </details>

2. `shared_sum` lets every rank add up a part. Let rank 0 add up everything instead. How many bytes
   are read and written then, one after the other, for two and for eight ranks? Can a barrier
   be left out now?

   <details class="solution"><summary>Solution</summary>

   All copy in, $2S$. Then rank 0 alone copies and adds, $2S + 3(n-1)S$; then all copy out, $2S$.
   That is $9S$ for two ranks instead of $6.5\,S$, and $27\,S$ for eight instead of $6.875\,S$.

   Neither barrier can be left out: rank 0 must not begin before all have written, and nobody may
   read before it has ended.

   </details>
"""

# %%
comms.close()
