# %% [markdown]
r"""
# 15. Inside one machine

How fast can one machine agree with itself? You care if several of your ranks are on one machine:
they share a memory, and with gloo still send each other messages. This chapter builds an all-reduce
without a message, and predicts its time from that of a copy. Then machines send each other only the
sums of their ranks, as NCCL can between nodes.
"""

# %% tags=["imports"]
import math
import os
import time
from functools import partial
from itertools import cycle
from textwrap import fill

import torch
from torch.nn.functional import mse_loss

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.findings import Prediction, compare, find, in_words
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
timed = comms.timed(computing=False)

# %% [markdown]
"""
## Who shares memory?

Two containers may have one host name and no memory in common. So the ranks try. On Linux each makes
a file in memory (`memfd_create`), tells the others its random name, and looks for theirs in
`/proc`. Ranks that find them share memory, and *map* it: its pages appear among the addresses of
both.

Hosts in a box count as machines: on the website there are two hosts, with two ranks on each. What
happens inside one is timed on the first, where each rank has a core, while the others sleep. These
ranks really copy and add. (The line on top, of devices of known speed, is about the step in
*Several machines*.)
"""

# %% tags=["plumbing"]
if timed.box:  # else two ranks may get one core
    os.sched_setaffinity(0, {timed.rank % os.cpu_count()})

# %%
machines = machines_of(timed)
groups = [timed.subgroup(ranks) for ranks in machines]
(inside,) = filter(None, groups)  # the ranks of this machine
me, n = inside.rank, inside.world_size
timed.print(f"Ranks by machine: {machines}")

# %% tags=["plumbing"]
FIRST, ALONE = timed.rank in machines[0], len(machines[0]) == 1
if ALONE:
    why = why_not_shared(timed) or "Add --nproc-per-node=2"
    timed.print(fill(f"Left out: a rank that shares its memory with others. {why}.", 90))


def on_first(call):
    """What a call returns on the first machine."""
    return timed.all_gather_data(call() if FIRST else None)[machines[0][0]]


def in_a_row(calls, count, repeat=7):
    """Timings of so many calls in a row, on the first machine."""
    rows = {name: lambda call=call: [call() for _ in range(count)] for name, call in calls.items()}

    def seconds():
        return {name: t.seconds for name, t in measure(rows, inside, repeat=repeat).items()}

    return {k: Timing(tuple(s / count for s in each)) for k, each in on_first(seconds).items()}


# %% [markdown] index=["shared memory", "semaphore"]
r"""
## Two barriers and a sum

**Predict.** A message is copied into the kernel and out again, in packets. In shared memory each
rank writes its tensor where the others see it, adds up the $n$-th part that is its own, and reads
the whole.

Let a copy of $S$ bytes take $c(S)$ seconds: it reads $S$ and writes $S$. A rank copies its tensor
in ($2S$ bytes), copies the first rank's part ($2S/n$), adds the others' parts, reading two and
writing one each time ($3S\,(n-1)/n$), and copies the result out ($2S$). That is
$(7 - 1/n)\,S$, or $\frac{7 - 1/n}{2}$ copies: 3.25 for two ranks. And twice the ranks wait for each
other, at a *barrier*: nobody adds up before all have written, nobody reads before all have added
up. Let a barrier take $b$, and Python's calls $p$: as long as a sum of $16n$ numbers without
barriers. (A rank's part then has 64 bytes. In pieces of that size cores fetch memory. Two ranks
that write to one such piece wait for each other.) Then

$$ t(S) = 2b + p + \frac{7 - 1/n}{2}\,c(S) . $$

**Build.** A {class}`~microddp.shared.region.SharedRegion` has the memory and the barrier. Each rank
tells the others where in its file its block begins; `region.at` returns theirs:
"""

# %%
region = region_of(inside)
LARGEST = 2**24  # bytes


def blocks(nbytes):
    """A block of float32 of each rank, as this rank sees it."""
    count = nbytes // 4
    mine = region.zeros(count, torch.float32)
    offsets = inside.all_gather_data(region.offset_of(mine))
    seen = [region.at(rank, offset, count, torch.float32) for rank, offset in enumerate(offsets)]
    return [mine if rank == me else block for rank, block in enumerate(seen)]


inputs = blocks(LARGEST)
total = blocks(LARGEST)[0]  # rank 0's is enough


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
It has to be near the backend's sum, with the same bits on all ranks:
"""

# %%
values = torch.randn(1003, generator=torch.Generator().manual_seed(me))
expected, result = values.to(inside.device, copy=True), values.clone()
inside.all_reduce(expected)
shared_sum(result)
torch.testing.assert_close(result, expected.cpu())

results = inside.all_gather(result.to(inside.device))
assert (results == results[0]).all()

# %% [markdown]
"""
How does a rank know that the others have come? Not by a plain flag: a processor such as ARM's may
show two writes in another order. Each rank has a *semaphore* of each other one, a counter in shared
memory: to *post* adds one, to *wait* takes one away, and sleeps while there is none. After it a
rank sees all that was written before the post ([POSIX,
4.15](https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/V1_chap04.html)). A barrier posts to
all others, and then waits for each.

**Predict.** A rank that finds the posts goes on at once. One that sleeps is woken by the kernel.
So there should be short barriers and long ones. (This job has more ranks than cores, so a rank that
finds no post sleeps at once. In a job with a core for each, it first looks again some times.)

**Measure.** A thousand barriers, each timed; then 50 in a row:
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
b = in_a_row({"barrier": region.barrier}, 50)["barrier"].median

# %% tags=["plumbing"]
quick, slow = (barriers.percentile(percent) for percent in (10, 90))
said = (
    f"One barrier in ten takes {human_seconds(quick)} or less, and one in ten "
    f"{human_seconds(slow)} or more. In a row each takes b, {human_seconds(b)}."
)
if not ALONE:
    find(timed, "barrier", timed=(True, said))

# %% [markdown]
"""
## Where it breaks: a barrier left out

**Predict.** Without the first barrier, a rank may add up what another wrote in the *last* call.
Without the second, a fast rank may read what is not added up yet, and then write over what a slow
one is still to add up. A late rank makes that likely.

**Measure.** Other numbers in each call. First all come as they do; then the last rank sleeps ten
milliseconds before it writes and before it adds up:
"""

# %%
CALLS = 25


def wrong_sums(written, summed, late):
    """How many sums are wrong, of all ranks."""
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
_, (first, late_first), (second, late_second) = wrong.values()
said = (
    f"With both barriers no sum is wrong. If one rank is late, {late_first} of {sums} are wrong "
    f"without the first, and {late_second} without the second. As the ranks come, it is {first} "
    f"and {second}."
)
if not ALONE:
    find(timed, "wrong-sums", counted=(True, said))

# %% [markdown]
r"""
**Explain.** As the ranks come, luck decides: arrange for a late rank in your test. (Without the
second barrier, the late rank may be right in the last call: none overwrites its numbers.) Two are
enough: before the second all have read `inputs`, and before the next call's first the sums.

## One barrier, or none of the copies

**Predict.** A small tensor's time is barriers and calls. So write the tensor, wait once, and let
each rank add up everything. That should save $b$ (and calls: left out). But a fast rank could begin
the next call while a slow one still adds up. So there are *two buffers in turn*: the first is
written again after the second's barrier, which all reach after reading the first.

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


one_barrier(values)
assert torch.equal(values, result)

# %% [markdown]
r"""
A large tensor's copies can be spared if it is in shared memory already, as microddp's buckets can
be. To add up *in place*, a rank reads the $n$ parts of its sum, $S$ bytes together, and writes the
sum into all $n$ tensors, $S$ bytes again: as a copy does, if what is half added up stays in the
cache. microddp's
{func}`~microddp.shared.collectives.shared_all_reduce` does so; up to 1 MiB, all ranks' together, it
does as `one_barrier`, and checks that all ranks make the same call; what that takes beside
`one_barrier`, the figure shows.

**Measure.** Small tensors are added up many times in a row. "No barrier" is `shared_sum` that waits
for nobody, predicted without $2b$. "Copy" copies on all ranks at once. $p$ is measured beside each
size:
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
        "calls": partial(shared_sum, torch.zeros(16 * n), nothing, nothing),
    }
    if nbytes <= SMALL:
        calls["one barrier"] = partial(one_barrier, x)
    return calls


# %%
timings = {s: in_a_row(calls_of(s), max(1, min(50, 2**22 // s))) for s in SIZES}

# %% tags=["plumbing"]
parts = []
for s, times in timings.items():
    work = times["calls"].median + (7 - 1 / len(machines[0])) / 2 * times["copy"].median
    two, bare = (times[name].median for name in ("two barriers", "no barrier"))
    parts.append((s, two, 2 * b + work, bare, work))
rows = [
    (
        human_bytes(s),
        *map(human_seconds, each),
        *(human_seconds(timings[s][name].median) for name in ("copy", "calls")),
    )
    for s, *each in parts
]
headers = ["size", "two barriers", "predicted", "no barrier", "predicted", "copy", "p"]
timed.print(table(rows, headers))

# %% tags=["plumbing"]
s, two, guess, bare, work = max(parts, key=lambda each: abs(math.log(each[1] / each[2])))
miss = Prediction(guess, timings[s]["two barriers"])
missed = sum(not 1 / 2 <= each[1] / each[2] <= 2 for each in parts)
said = (
    f"Farthest from its prediction is a sum of {human_bytes(s)}: it takes {miss}. Without "
    f"barriers it takes {bare / work:.2g} times what was predicted for that. At {missed} of "
    f"{len(parts)} sizes the prediction is off by more than a factor of 2."
)
find(timed, "model", **miss.sides(said))

# %% tags=["plumbing"]
added = [two - bare for _, two, _, bare, _ in parts]
more = sum(seconds > 2 * b for seconds in added)
said = (
    f"From {human_bytes(SIZES[0])} on, two barriers add {', '.join(map(human_seconds, added))}. "
    f"Predicted are {human_seconds(2 * b)} (two long ones: {human_seconds(2 * slow)}). At "
    f"{more} of {len(added)} they add more than {human_seconds(2 * b)}."
)
if not ALONE:
    find(
        timed,
        "barriers-add",
        more=(2 * more > len(added), said),
        less=(2 * more <= len(added), said),
    )

# %% tags=["plumbing"]
gains = [compare(times["microddp"], times["backend"]) for times in timings.values()]
ratios = [times["backend"].median / times["microddp"].median for times in timings.values()]
said = (
    f"By medians, microddp in memory is {min(ratios):.2g} to {max(ratios):.2g} times as fast as "
    "the backend"
)
figures.times_by_size(
    {
        name: {s: times[name] for s, times in timings.items() if name in times}
        for name in ("backend", "one barrier", "microddp", "copy")
    },
    title=said,
)
faster = sum(gain.faster for gain in gains)
said += f"; at {faster} of {len(gains)} sizes the quartiles of the ratios say that it is faster."
if not ALONE:
    find(timed, "memory", shared=(True, said))

# %% tags=["plumbing"]
large, guesses = timings[SIZES[-1]], {}
for s, two, *_ in parts:
    if s <= SMALL:
        guesses[s, two] = Prediction(max(b, two - b), timings[s]["one barrier"])
said = " ".join(
    f"At {human_bytes(s)} two barriers take {human_seconds(two)}, and one {guess}."
    for (s, two), guess in guesses.items()
)
held = all(guess.held for guess in guesses.values())
saved = [two - timings[s]["one barrier"].median for s, two in guesses]
said = f"{said} A barrier less saves {' and '.join(map(human_seconds, saved))}"
said = f"{said}; {human_seconds(b)} was predicted."
copied = Prediction(large["copy"].median, large["microddp"])
if not ALONE:
    find(timed, "one-barrier", held=(held, said), failed=(not held, said))
    said = f"A sum of {human_bytes(SIZES[-1])} in place, predicted as one copy, takes {copied}."
    find(timed, "one-copy", **copied.sides(said))

# %% [markdown] index=["hierarchical all-reduce", "topology"]
r"""
**Explain.** A barrier in a sum comes after work: who comes first waits for the others' rest of it,
too, beside being woken. In a row of barriers alone there is no work. And the model takes all bytes
for equally far away. But a core has *caches*, small and fast memories. A copy that is made again
and again can stay in its own core's, where a sum fetches what another core has just written; and
where nothing fits any more, a copy may have to fetch what it overwrites. Which of these decides at
which size, this page does not measure, nor how much of a barrier is waiting for work, nor why $p$
is another at each size.

## Several machines: each sum once

**Predict.** Let $K$ machines have $n$ ranks each, $N = Kn$, and one link. A ring through all ranks
brings $2\,\frac{N-1}{N}\,S$ bytes onto each link. But all that a machine has to say is its sum. So
let its ranks add up first, in memory, each its part; let ranks with the same part all-reduce it;
and hand the results round, in memory. The link carries $n$ all-reduces of $S/n$ among $K$ machines,
together $2\,\frac{K-1}{K}\,S$: for two machines of two ranks $S$ instead of $1.5\,S$. That leaves
out the time in memory.

**Build**, and measure with 16 MiB:
"""

# %%
K = len(machines)
even = K > 1 and n > 1 and len({len(ranks) for ranks in machines}) == 1
across = None
if even and comms.device.type == "cpu":
    groups = [timed.subgroup(ranks) for ranks in zip(*machines, strict=True)]
    (across,) = filter(None, groups)


def by_machine(tensor):
    part = shared_reduce_scatter(tensor, inside)
    ring_all_reduce(part, across)
    shared_all_gather(tensor, inside)


# %% tags=["plumbing"]
tensor = torch.zeros(LARGEST // 4)
flat, once = 2 * (K * n - 1) / (K * n), 2 * (K - 1) / K  # times S, over a machine's link
if across:
    probe = torch.full((1003,), float(timed.rank))
    by_machine(probe)
    assert (probe == sum(range(timed.world_size))).all()
    part = tensor.tensor_split(n)[me].clone()
    ways = {"ring": partial(ring_all_reduce, tensor, timed), "sums": partial(by_machine, tensor)}
    ways["messages"] = partial(ring_all_reduce, part, across)
    found = measure(ways, timed, warmup=1, repeat=3)
    gain = compare(found["sums"], found["ring"])
    rest = found["sums"].median - found["messages"].median
    said = (
        f"On {K} machines of {n} ranks, a ring through all takes {in_words(found['ring'])}. By "
        f"machine it is {gain.than('that')}; by bytes it would be {flat / once:.2f} times as fast. "
        f"By machine it takes {in_words(found['sums'])}. Its messages alone, measured without the "
        f"rest, take {in_words(found['messages'])}: {human_seconds(rest)} differ. By bytes they "
        f"would take {human_seconds(found['ring'].median * once / flat)}."
    )
    find(timed, "once", **gain.sides(said))

# %% [markdown]
r"""
And a step? **Predict.** The stage (chapter 03) is a scale model of as many machines, each with as
many A100 and with a link of 25 Gbit/s. Computing alone takes $C$, two thirds of it backward. Of
three buckets the first leaves after a third of that, $\frac{2}{9}C$, beside forward's
$\frac{1}{3}C$. If all messages, the backend's $M$, take longer than what is left of backward, a
step takes $\frac{5}{9}C + M$. By machine $M$ shrinks as the bytes do. The hook calls
{func}`~microddp.shared.hierarchical.hierarchical_all_reduce`. (This counts bytes only: what the
all-reduce alone takes beyond them, above, may come on top.)
"""

# %%
WORK = {"parameters": 355e6, "tokens": 24_576, "layers": 24}


def step_with(all_reduce):
    strategy = stage.strategy("ddp", stage.sides[1].nbytes / 3 / 2**20)
    strategy.module.register_comm_hook((timed, all_reduce), all_reduce_hook)
    return stage.step(strategy)


# %% tags=["plumbing"]
steps = {}
said = "Left out: it takes machines of equally many ranks, and links of known speed."
if across and timed.box:
    stage = set_stage(timed, cluster("a100", "25gbit", nodes=K, node=n, value_size=4, **WORK))
    timed.print(stage)
    calls = {"ring": step_with(ring_all_reduce), "sums": step_with(hierarchical_all_reduce)}
    steps = measure(calls, timed, warmup=1, repeat=3)
    gain = compare(steps["sums"], steps["ring"])
    C, M = stage.sides[1].compute, stage.sides[1].messages
    long, short = (max(C, C * 5 / 9 + messages) for messages in (M, M * once / flat))
    said = (
        f"A step in a ring takes {Prediction(long, steps['ring'])}. By machine it is "
        f"{gain.than('that')}; by bytes it would be {long / short:.2f} times as fast."
    )
find(timed, "step", measured=(bool(steps), said), left_out=(not steps, said))

# %% [markdown] index=["NVLink", "NVLS", "SHARP", "RDMA", "rail", "symmetric memory", "tree"]
r"""
## How NCCL does it

**Inside a machine** one GPU reads and writes the memory of another, over NVLink or PCIe; where
neither is possible, NCCL goes through the host's memory
([SHM](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)).
`NCCL_DEBUG=INFO` prints which: `via P2P`, `via SHM`, or `via NET` between machines.

**Between machines** network cards copy. With *RDMA* (remote direct memory access) they write into
each other's memory past the kernel, with *GPUDirect* straight from GPU to GPU. Servers often have a
card for each GPU; cards of one number in all machines may share a switch, a *rail*.

**Which algorithm?** NCCL chooses for each size; with `NCCL_DEBUG_SUBSYS=INIT,TUNING` it prints
that. Four nodes of 8 B200, with 400 Gbit/s a GPU, took trees, which send each machine's sum, up to
16 MiB, and rings from 512 MiB on ([Stas
Bekman](https://github.com/stas00/ml-engineering/tree/master/network), NCCL 2.30.7, AWS's tuner,
October 2026).

**The switch adds.** With *NVLS* (NVLink with SHARP) a GPU reads the sum of its part from the
switch, which asks all GPUs, and writes it to the switch, which gives it to all. It sends
its $S$ once, and its finished part, $S/n$, once more ([NCCL's
maintainer](https://github.com/NVIDIA/nccl-tests/pull/239)). **Predict.** In a ring of 8 each GPU
sends $\frac{14}{8}\,S$, here $\frac{9}{8}\,S$: the switch could be 1.56 times as fast. On 8 H200,
16 GiB ran at 480 GB/s with NVLS and 367.6 in a ring, 1.31 times ([Stas
Bekman](https://github.com/stas00/ml-engineering/tree/master/network), August 2026).

**Explain.** NVLink carries 450 GB/s each way by specification, and 480 is no error. It is *bus
bandwidth*, $\frac{S}{t} \cdot \frac{2(n-1)}{n}$: the rate at which a GPU would send if a *ring*
took that time. With NVLS it sends only $\frac{9}{14}$ of that: 309 GB/s, or 69 % of the link, where
the ring reaches 82 %. That is the gap between 1.31 and 1.56. Why the switch's part is lower, these
numbers do not say.

## DDP twice

**Predict.** microddp's DDP can be handed `carrier("auto", inside)`: the backend's all-reduce or the
one in memory, whichever was faster when it was made. If it is in memory, so are the buckets, and a
step should save the difference of the backend's all-reduce and one in place. The model leaves out
that backward hides messages, and that the backend's threads take time from backward's core.

**Measure.** Ranks really compute, with 16 MiB of gradients. Steps and all-reduces take turns:
"""

# %%
WIDTH, BATCH = 512, 64


def step(model, data):
    model.zero_grad()
    mse_loss(model(data[0]), data[1]).backward()


def steps_and_sums():
    data = torch.randn(2, BATCH, WIDTH)
    calls = {}
    for name in ("backend", "auto"):
        ddp = microddp.DDP(FullMLP(WIDTH), inside, all_reduce=carrier(name, inside))
        calls[name] = partial(step, ddp, data)
    flat = region.zeros(parameter_count(FullMLP(WIDTH)), torch.float32)
    calls["sum by messages"] = partial(inside.all_reduce, flat.clone())
    calls["sum in place"] = partial(shared_all_reduce, flat, inside)
    return calls


# %% tags=["plumbing"]
if comms.device.type == "cpu":
    times = in_a_row(steps_and_sums() if FIRST else {}, 1, repeat=9)
    usual, in_place = times["backend"].median, times["sum in place"].median
    due = times["sum by messages"].median - in_place
    chosen = on_first(lambda: carrier("auto", inside).name_for(LARGEST))
    gain = compare(times["auto"], times["backend"])
    said = (
        f'A step with "auto", here {chosen}, is {gain.than("one with the backend")}. If it saved '
        f"what the all-reduces alone differ by, {human_seconds(due)} of {human_seconds(usual)}, it "
        f"would be {usual / max(usual - due, in_place):.2f} times as fast."
    )
    if not ALONE:
        find(timed, "saved", **gain.sides(said))
else:
    timed.print(f"On GPUs DDP keeps {comms.backend}: gradients are not in memory ranks share.")

# %% [markdown]
r"""
:::{admonition} On GPUs
Barriers and bytes stay. This chapter's memory is *symmetric memory* there: buffers that all GPUs
joined by NVLink can address. On 8 H200 NCCL's kernels for it raise the bus bandwidth
of 1 MiB from 75 to 145 GB/s, of 1 GiB from 466 to 480 ([Stas
Bekman](https://github.com/stas00/ml-engineering/tree/master/network), NCCL 2.30.7, October 2026).
Try `nccl-tests` with `-R 2`. PyTorch's `torch.distributed._symmetric_memory` ([alpha in
2.13](https://docs.pytorch.org/docs/2.13/symmetric_memory.html)) has `empty` for this chapter's
`zeros`, and what `rendezvous` returns has `get_buffer` for `at`. In `torch.ops.symm_mem`,
`one_shot_all_reduce` lets each rank add up everything, but has a second barrier instead of buffers
in turn; `two_shot_all_reduce_` is the sum in place; in `multimem_all_reduce_` the switch adds.
:::

## What to take along

- An all-reduce in place, in memory, need read and write no more than one copy does.
- Two barriers make it right, and buffers in turn save one. Test with a late rank.
- If a machine's ranks share a link, add up inside the machine first.

## Exercises

**The lab.** Write two barriers and a sum. {doc}`It is checked </labs>` on 1 to 4 ranks, with one
late at each place in turn.

```console
$ python -m microddp.labs start 15
```

1. Four machines have eight ranks each, and gradients of 1 GiB. How many bytes cross a machine's
   link in a ring through all ranks, and by machine?

   <details class="solution"><summary>Solution</summary>

   The ring: $2 \cdot 31/32$, or 1.94 GiB. By machine: $2 \cdot 3/4$, or 1.5 GiB.

   </details>

2. Let rank 0 add up everything in `shared_sum`. How many bytes are read and written, one after the
   other, for two and for eight ranks? Can a barrier be left out?

   <details class="solution"><summary>Solution</summary>

   All copy in, $2S$; rank 0 copies and adds, $2S + 3(n-1)S$; all copy out, $2S$. That is $9S$ for
   two ranks instead of $6.5\,S$, and $27\,S$ for eight instead of $6.875\,S$. Both barriers stay:
   rank 0 begins when all have written, and the others read when it has ended.

   </details>
"""

# %%
comms.close()
