# %% [markdown]
r"""
# 15. Inside one machine

How fast can one machine agree with itself? Ranks of one machine have the same memory under them.
Yet all that they knew of each other so far came in messages, as if they were far apart. This
chapter builds an all-reduce without a message, in memory that the ranks share, and predicts its
time from that of a copy. Then it lets machines with several ranks each send every sum over the
network once.
"""

# %% tags=["imports"]
import os
import time
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from textwrap import fill

import torch
from torch.nn.functional import mse_loss

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.model import FullMLP, gradient_bytes
from microddp.report import human_bytes, human_seconds, table
from microddp.shared import (
    carrier,
    fastest,
    hierarchical_all_reduce,
    machines_of,
    region_of,
    shared_all_gather,
    shared_all_reduce,
    shared_reduce_scatter,
    why_not_shared,
)
from microddp.timing import Timing, measure

# %%
# sphinx_gallery_builds = "an all-reduce through memory that ranks share, and one by machine"
# sphinx_gallery_hosts = "2 x 1gbit, 2 ranks each"
comms = microddp.init()
comms.print(comms.describe())
senders = comms.timed(computing=False)  # without ranks that would only take another's core

# %% [markdown]
"""
## Who shares memory?

Which ranks are on one machine? `torchrun` numbers the ranks that it started in one place, and hosts
have names. Neither is a proof: two containers may have one name and no memory in common. So the
ranks try. On Linux each one makes a file that lies in memory and has no name in any folder
(`memfd_create`), and tells the others where it is, and a random word that it wrote on it. Who
can open it, and finds the word, shares memory with its owner: both *map* the file, so that its
pages appear among the addresses of both processes, and what one writes there the other reads. When
the last process that has it open ends, the file is gone, whatever ended the process:
"""

# %%
machines = machines_of(senders)
senders.print(f"{senders.world_size} ranks stay; by machine: {machines}")
groups = [senders.subgroup(ranks) for ranks in machines]
(inside,) = filter(None, groups)  # the ranks of this machine
me, n = inside.rank, inside.world_size
if n == 1:
    why = why_not_shared(senders) or "it is alone on its machine: add --nproc-per-node=2"
    senders.print(fill(f"Left out: a rank that shares its memory with others. {why}.", 90))

# %% [markdown]
"""
Hosts in a box count as machines: between them there is a network, and nothing else. On the
website there are two, of two ranks each, which share the cores that the page names at its top. What
belongs to one machine is timed on the first, with all these cores, while the ranks of the other one
sleep:
"""

# %% tags=["plumbing"]


@contextmanager
def on_all_cores():
    """Let this rank, and groups that it makes, use the cores of all hosts in a box."""
    own = os.sched_getaffinity(0) if senders.box else ()
    try:
        if own:
            os.sched_setaffinity(0, range(os.cpu_count()))
        yield
    finally:
        if own:
            os.sched_setaffinity(0, own)


with on_all_cores():
    groups = [senders.subgroup(ranks) for ranks in machines]
    (inside,) = filter(None, groups)


# %%
def on_one_machine(calls, **options):
    """Time calls among the ranks of the first machine; all ranks learn the times."""
    seconds = {}
    if senders.rank in machines[0]:
        with on_all_cores():
            times = measure(calls, inside, **options)
        seconds = {name: timing.seconds for name, timing in times.items()}
    told = senders.all_gather_data(seconds)[machines[0][0]]
    return {name: Timing(tuple(of)) for name, of in told.items()}


# %% [markdown] index=["shared memory", "semaphore"]
r"""
## Two barriers and a sum

**Predict.** A message between two ranks of one machine goes through a socket. The sender's bytes
are copied into the kernel and from there to the receiver, in packets, each handled on the way by
what would handle it in a network. In shared memory there is no message. A rank writes its tensor
where the others see it. Each adds up the $n$-th part that is its own, and writes the sum where all
see it. Then each reads the whole.

What that costs is reading and writing. Let a copy of $S$ bytes take $c(S)$ seconds: it reads $S$
and writes $S$. To add to a tensor in place reads two and writes one.

| | bytes read and written |
|---|---|
| copy the tensor in | $2S$ |
| copy the first rank's part | $2S/n$ |
| add the others' parts | $3S\,(n-1)/n$ |
| copy the result out | $2S$ |

That makes $(7 - 1/n)\,S$, as much as $\frac{7 - 1/n}{2}$ copies: 3.25 for two ranks.

And the ranks must wait for each other, twice, at a *barrier*. Nobody may add up before all have
written, and nobody may read the result before all have added up their part. Let one, in memory,
take $b$ seconds. And let the calls of PyTorch alone, with next to nothing to add up, take $p$. Then

$$ t(S) = 2b + p + \frac{7 - 1/n}{2}\,c(S) . $$

**Build.** A {class}`~microddp.shared.region.SharedRegion` has the memory of all ranks of a machine,
and the barrier. Each rank allocates a block of its own file and tells the others at which byte of
the file it begins, its offset. With that each maps the blocks of all; `region.at` returns them as
tensors:
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
Is it right? Whole numbers, whose sums are exact, against the backend's all-reduce. And numbers
that are rounded: each is added up once, in rank order, so all ranks must have the same bits:
"""

# %%
values = torch.arange(1003.0) % 7 + me
expected = values.to(inside.device)
inside.all_reduce(expected)
shared_sum(values)
assert torch.equal(values, expected.cpu())

rounded = torch.randn(1003, generator=torch.Generator().manual_seed(me))
shared_sum(rounded)
results = inside.all_gather(rounded.to(inside.device))
assert (results == results[0]).all()
senders.print(f"{n} ranks: equal to the backend's sum, and the same bits on each")

# %% [markdown]
"""
How does a rank know that the others have come? A flag in shared memory would not do everywhere. A
processor may let others see two writes in another order than they were made, ARM's do, and then a
rank finds the flag and not yet the values. So a rank uses a *semaphore* of each other rank, a
counter that the kernel knows: to *post* adds one, to *wait* takes one away, and sleeps while there
is none. The standard lists both among the calls that bring memory up to date ([POSIX, Base
Definitions, 4.15](https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/V1_chap04.html)): what
was written before a post is there after the wait. A rank that waits looks a hundred times first, if
each rank has a core, and then sleeps, so that with more ranks than cores nobody takes another's
time.

How long does the barrier take, beside the backend's? And the calls, without barriers? microddp's
{func}`~microddp.shared.collectives.shared_all_reduce`, which is compared below, does more than the
function above: it takes any shape and dtype, checks that all ranks make the same call, and keeps a
record. What that takes is its time in a group of one rank. Fifty in a row of each, on the first
machine, where nothing comes between them:
"""


# %%
def repeated(times, call, *arguments):
    for _ in range(times):
        call(*arguments)


nothing = partial(repeated, 0, None)
values = torch.zeros(n)
(alone,) = filter(None, [senders.subgroup([rank]) for rank in range(senders.world_size)])
waits = {
    "a barrier in memory": region.barrier,
    "the backend's barrier": inside.barrier,
    "the calls of a sum": partial(shared_sum, values, nothing, nothing),
    "microddp's sum, in a group of one": partial(shared_all_reduce, values, alone),
}
times = on_one_machine({name: partial(repeated, 50, call) for name, call in waits.items()})

# %% tags=["plumbing"]


def of_each(timing, count):
    return Timing(tuple(seconds / count for seconds in timing.seconds))


times = {name: of_each(timing, 50) for name, timing in times.items()}
barrier, calls_alone = times["a barrier in memory"].median, times["the calls of a sum"].median
rows = [
    (name, human_seconds(timing.median), " to ".join(map(human_seconds, timing.spread)))
    for name, timing in times.items()
]
senders.print(table(rows, ["", "median", "quartiles"]))

# %% [markdown]
"""
## Where it breaks: a barrier left out

Each barrier looks as if it could be spared: the ranks do the same work and come at about the same
time. **Predict.** Without the first, a rank may add up what another one wrote in the *last* call.
Without the second, a fast rank may read a part that is not added up yet. And it may go on to the
next call, and write over what a slow rank is still to add up. Whether it does is a matter of
microseconds, and of who has a core: a test may pass for long. A rank that is late makes it sure.

**Measure.** Other numbers in each call, and the right sum is known. First all ranks come as they
do, then the last one sleeps ten milliseconds before it writes, and again before it adds up:
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
BARRIERS = {
    "both barriers": (region.barrier, region.barrier),
    "without the first": (nothing, region.barrier),
    "without the second": (region.barrier, nothing),
}
rows = []
for name, pair in BARRIERS.items():
    counts = [wrong_sums(*pair, late) for late in (0, 1e-2)]
    rows.append((name, *counts))
    assert (counts[1] > 0) == (n > 1 and name != "both barriers")
    assert name != "both barriers" or not any(counts)
senders.print(table(rows, [f"wrong, of {n * CALLS} sums", "as they come", "one is late"]))

# %% [markdown]
r"""
**Explain.** The column on the left counts what happened to happen, on the first machine.
Another machine, or another load, has another number, and it may be 0: so such a mistake can live
long. The column on the right was arranged, and is the one to test with. (No call follows the last
one, so there the late rank itself may be right without the second barrier.)

And a third barrier at the end, so that nobody writes its next tensor over what others still read?
It is not needed. What the next call writes first is the rank's block of `inputs`, which the others
read before the second barrier only. The sums of the next call are written after *its* first
barrier, and by then every rank has read these.

## Small tensors: one barrier

**Predict.** A small tensor's time is that of barriers and calls. So do with one barrier: write the
tensor, wait, and add up everything oneself. That is $n$ times the additions, of few values:
$4S + 3(n-1)S$ are read and written, or $2 + \frac{3}{2}(n-1)$ copies. But now nothing stops a fast
rank from beginning the next call while a slow one still adds up. With *two buffers in turn* it
writes into the other one. When it comes to the first again, two calls later, all ranks have been at
the barrier in between, to which they came after they had read.

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


# %% [markdown]
r"""
microddp has both: one barrier for small tensors. Large ones it takes a piece at a time, through
buffers of a megabyte, two in turn. Such a buffer can stay in the processor's *cache*, its small and
fast memory: what one rank has just written, another reads from there. What must go to the main
memory then is the tensor itself, where it is larger than the cache: each rank reads $S$ and writes
$S$, like one copy. Smaller tensors need no main memory, and pieces only mean more barriers.

microddp can do one thing more: a tensor that is in shared memory already is added up where it is,
so that nothing is copied in or out. A rank then reads the $n$ parts that it adds up, and writes the
sum $n$ times: $S$ and $S$ again. DDP puts its buckets there.

**Measure.** Sizes from 4 KiB to 16 MiB. Small ones are called several times in a row, and timed
together. The backend sends through sockets between CPUs, and on GPUs by NCCL; the ring is
chapter 02's. "Copy" is that of one tensor on each rank, all at the same time. The prediction takes
it from this table, and barriers and calls from above. (Up to 1 MiB the same tensors are copied
several times in a row, so they may be in the cache; larger ones are called once at a time.)
"""

# %%
SIZES = [2**k for k in range(12, 25, 2)]
IN_MEMORY = {"two barriers": shared_sum, "one barrier": one_barrier}
IN_MEMORY["microddp"] = partial(shared_all_reduce, comms=inside)
BY_MESSAGES = {"backend": inside.all_reduce, "ring": partial(ring_all_reduce, comms=inside)}


def calls_of(nbytes):
    """Each way with a tensor of its own, many times in a row if it is small."""
    times = max(1, min(50, 2**22 // nbytes))
    zeros = partial(torch.zeros, nbytes // 4)
    calls = {name: (way, zeros(device=comms.device)) for name, way in BY_MESSAGES.items()}
    calls |= {name: (way, zeros()) for name, way in IN_MEMORY.items()}
    calls["microddp, in place"] = IN_MEMORY["microddp"], region.zeros(nbytes // 4, torch.float32)
    calls["copy"] = torch.ones(nbytes // 4).copy_, zeros()
    if nbytes > SMALL:
        del calls["one barrier"]
    return times, {name: partial(repeated, times, *call) for name, call in calls.items()}


# %%
timings = {}
for nbytes in SIZES:
    times, calls = calls_of(nbytes)
    for name, timing in on_one_machine(calls, warmup=3, repeat=11).items():
        timings.setdefault(name, {})[nbytes] = of_each(timing, times)


# %%
def predicted(nbytes):
    return 2 * barrier + calls_alone + (7 - 1 / n) / 2 * timings["copy"][nbytes].median


calls = {"": partial(repeated, 50, one_barrier, values, nothing)}
calls_of_one = on_one_machine(calls)[""].median / 50


def predicted_of_one(nbytes):
    return barrier + calls_of_one + (2 + 3 / 2 * (n - 1)) * timings["copy"][nbytes].median


# %% tags=["plumbing"]
rows = [
    (human_bytes(nbytes), *(human_seconds(of[nbytes].median) if nbytes in of else None
                            for of in timings.values()), human_seconds(predicted(nbytes)))
    for nbytes in SIZES
]  # fmt: skip
senders.print(f"median time of a call, {n} ranks")
senders.print(table(rows, ["size", *timings, "two barriers, predicted"]))

# %% tags=["plumbing"]


def with_quartiles(timing):
    low, high = timing.spread
    return f"{timing.median:.2f} ({low:.2f} to {high:.2f})"


def ratios(name, other):
    return {s: t.ratio(timings[other][s]) for s, t in timings[name].items()}


over_backend, over_copy = ratios("microddp", "backend"), ratios("microddp", "copy")
over_two = ratios("microddp", "two barriers")
rows = [
    (
        human_bytes(s),
        with_quartiles(over_backend[s]),
        with_quartiles(over_two[s]),
        with_quartiles(over_copy[s]),
        with_quartiles(ratios("microddp, in place", "copy")[s]),
        f"{timings['two barriers'][s].median / predicted(s):.2f}",
        f"{timings['one barrier'][s].median / predicted_of_one(s):.2f}" if s <= SMALL else None,
    )
    for s in SIZES
]
headers = ["size", "microddp / backend", "microddp / two barriers", "microddp / copy",
           "in place / copy", "two barriers / predicted", "one barrier / predicted"]  # fmt: skip
senders.print(table(rows, headers))

# %% tags=["plumbing"]


def sizes_where(of, holds):
    found = [human_bytes(s) for s, timing in of.items() if holds(timing)]
    return ", ".join(found) or "no size"


above = sizes_where(over_two, lambda timing: timing.spread[0] > 1)
under = sizes_where(over_two, lambda timing: timing.spread[1] < 1)
senders.print(f"microddp clearly takes more time than two barriers at {above}; less at {under}.")

# %% tags=["plumbing"]
below = [s for s in SIZES if over_backend[s].spread[1] < 1]
title = f"microddp takes less time than the backend at {len(below)} of {len(SIZES)} sizes"
if len(below) == len(SIZES):
    least, *_, most = sorted(timing.median for timing in over_backend.values())
    title = f"microddp, through memory: {least:.2f} to {most:.2f} of the backend's time"
figures.times_by_size(
    {name: timings[name] for name in ("backend", "ring", "two barriers", "microddp", "copy")},
    title=title,
    models={"two barriers": predicted},
)

# %% [markdown] index=["hierarchical all-reduce", "topology"]
r"""
**Explain.** For small tensors the prediction is barriers and calls, for large ones copies. Where
the measured time is below, a part of what one rank wrote may still have been in the cache when it
was read. Where it is above, the ranks may have waited for the slower of them in each call, or for
values that another core had written last: no row of this table separates the two. `one_barrier`
saves the second barrier and some of the calls. microddp spends that again: a part of it on what it
does in a group of one, above. This run does not separate the rest.

The column "microddp / copy" says how far it is from the limit of memory. It tells little where
the tensor fits into the cache, and the copy never leaves it. In place it may be below 1, since a
rank then writes where it has just read, and a copy writes elsewhere. The ring goes through the same
sockets as the backend.

Who else does that? DeepSpeed has such an all-reduce for machines with two processors: 32 MB in 0.65
ms instead of gloo's 30.7, 64 KB in 0.028 instead of 0.23
([April 2024](https://github.com/deepspeedai/DeepSpeed/pull/5391)).

## Several machines: each sum once

Now the network. Machines have several ranks each, and one link.

**Predict.** Let $M$ machines have $n$ ranks each, $N = Mn$. A ring through all ranks that goes
machine by machine leaves each machine once. Over that link go the $2\,\frac{N-1}{N}\,S$ bytes
that every rank sends to its neighbour. But the machine's ranks have something to say *together*:
their sum, $S$ bytes. So let them add up first, in memory, each a part, its *share*; let every share
be summed over the machines by those who have it; and let them hand the results round, in memory.
The link carries the all-reduces of $n$ shares of $S/n$ among $M$ machines, together
$2\,\frac{M-1}{M}\,S$. For two machines of two ranks that is $S$ instead of $1.5\,S$, for two of
eight $S$ instead of $1.875\,S$.

**Build.** The ranks that have the same share are a *lane*:
"""

# %%
even = len(machines) > 1 and len({len(ranks) for ranks in machines}) == 1
lane = None
if even and comms.device.type == "cpu":
    lanes = [senders.subgroup(ranks) for ranks in zip(*machines, strict=True)]
    (lane,) = filter(None, lanes)


def by_machine(tensor):
    share = shared_reduce_scatter(tensor, inside)
    ring_all_reduce(share, lane)
    shared_all_gather(tensor, inside)


# %% [markdown]
"""
microddp's {func}`~microddp.shared.hierarchical.hierarchical_all_reduce` takes machines of
uneven size, too. And it cuts a large tensor into parts of 4 MiB: while one travels, the machine
adds up the next.

**Measure.** 16 MiB, and what the interface of the first host says that it sent. The time that the
bytes need on the link is known:
"""


# %%
def bytes_sent():
    """What has left this host, by the kernel's list of interfaces; without loopback."""
    _, _, *lines = Path("/proc/net/dev").read_text().splitlines()
    devices = dict(line.split(":") for line in lines)
    return sum(int(of.split()[8]) for name, of in devices.items() if name.strip() != "lo")


def counted(call):
    """Bytes that a call brings onto the first host's link."""
    senders.barrier()
    before = bytes_sent()
    call()
    senders.barrier()
    return senders.all_gather_data(bytes_sent() - before)[0]


# %%
N, M = senders.world_size, len(machines)
tensor = torch.zeros(LARGEST // 4)
flat, once = 2 * (N - 1) / N, 2 * (M - 1) / M  # times S, over a machine's link
WAYS = {
    "ring": (partial(ring_all_reduce, tensor, senders), flat),
    "backend": (partial(senders.all_reduce, tensor), flat),
    "by machine": (partial(by_machine, tensor), once),
    "microddp": (partial(hierarchical_all_reduce, tensor, senders), once),
}
found = {}
if lane:
    found = measure({name: call for name, (call, _) in WAYS.items()}, senders, repeat=7)
else:
    senders.print("One machine, or GPUs: python -m microddp.hosts --ranks-per-host 2 has several.")

# %% tags=["plumbing"]
rows = []
for name, timing in found.items():
    (call, expected), carried, wire = WAYS[name], None, None
    if senders.box:
        carried = counted(call) / LARGEST
        wire = expected * LARGEST * senders.box.seconds_per_byte
        assert 0.98 * expected < carried < 1.15 * expected
    rows.append((
        name,
        expected,
        carried,
        human_seconds(wire) if wire else None,
        human_seconds(timing.median),
        f"{timing.median / wire:.2f}" if wire else None,
        with_quartiles(timing.ratio(found["ring"])),
    ))  # fmt: skip
headers = ["", "over the link / S", "counted", "wire's time", "measured", "/ wire", "/ ring"]
if rows:
    senders.print(f"{M} machines of {n} ranks, {human_bytes(LARGEST)}")
    senders.print(table(rows, headers, floats=".3f"))
    ratio = with_quartiles(found["microddp"].ratio(found["by machine"]))
    senders.print(f"microddp / by machine: {ratio}")

# %% tags=["plumbing"]
if found and senders.box:
    wires = {name: WAYS[name][1] * LARGEST * senders.box.seconds_per_byte for name in found}
    ratio = with_quartiles(found["microddp"].ratio(found["ring"])).partition(" ")[0]
    figures.stacked_bars(
        {
            name: {"on the wire": wires[name], "besides": max(0, t.median - wires[name])}
            for name, t in found.items()
        },
        title=f"Each sum once over the network: {ratio} of the ring's time",
        xlabel=f"an all-reduce of {human_bytes(LARGEST)}",
    )

# %% [markdown] index=["NVLink", "NVLS", "SHARP", "tree"]
r"""
**Explain.** The bytes are those of the formula, but for headers and the barrier around the call.
With two machines of two, $S$ by $1.5\,S$ is 0.67: so much of the ring's time on the wire is the
least that a way by machine takes, whatever it does in memory. What comes besides the wire is work
of the cores, which all ranks of the box share: to send and receive, and to add up and hand round in
memory. In `by_machine` the link waits for that; microddp lets one part travel while it adds up the
next, and the line below the table says whether that showed. The more ranks a machine has, the more
there is to win: of two machines, up to one half.

## How NCCL does it

GPUs of one machine are joined by NVLink, a link of their own, or else by PCIe, the machine's bus,
and one writes into the memory of another; where neither is possible, NCCL goes through the host's
memory, as its [manual](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) says of
SHM, shared memory.

Between machines it has trees besides rings. A
[tree](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/) runs
along a chain inside each machine and from machine to machine as a tree, so it sends each machine's
sum, and not each rank's. There are two at once, so that no link is idle. For small messages the way
up and down a tree, of a logarithm of steps, is shorter than a ring.

And the switch between GPUs may be able to add (*NVLS*: NVLink with SHARP). Each GPU has a chunk of
$S/n$ to care for: it reads its sum from the switch, which asks all GPUs for what they have, and
writes the sum to the switch, which gives it to all. So a GPU sends $S$ for the sums of all and
$S/n$ for its own chunk ([NCCL's maintainer](https://github.com/NVIDIA/nccl-tests/pull/239)).
**Predict.** In a ring of 8 each GPU sends $\frac{14}{8}\,S$, here $\frac{9}{8}\,S$: the switch
could be 1.56 times as fast. Published, on 8 H200, for 16 GiB: 480 GB/s with NVLS and 367 in a ring
([Stas Bekman](https://github.com/stas00/ml-engineering/tree/master/network), August 2026). These
are bus bandwidths, $\frac{S}{t} \cdot \frac{2(n-1)}{n}$, that is, a ring's bytes a second:
"""

# %%
ring_bytes, switch_bytes = 14 / 8, 9 / 8  # that leave a GPU, times S
rows = []
for way, bus, times_S in (("ring", 367, ring_bytes), ("NVLS", 480, switch_bytes)):
    seconds = 16 * 2**30 * ring_bytes / (bus * 1e9)
    rows.append((way, bus, human_seconds(seconds), times_S * 16 * 2**30 / seconds / 1e9))
headers = ["published, 8 H200", "bus GB/s", "so 16 GiB take", "GB/s that leave a GPU"]
senders.print(table(rows, headers, floats=".0f"))
allowed = ring_bytes / switch_bytes
senders.print(f"NVLS is {480 / 367:.2f} times as fast, where bytes allow {allowed:.2f}")

# %% [markdown]
r"""
**Explain.** A bus bandwidth above what a link can carry is no error: the switch adds, and less is
sent than in the ring that the number assumes. By what leaves a GPU the ring comes nearer than NVLS
to the 450 GB/s each way that NVLink has by its specification (the same source). Why the switch
stays further below what bytes allow, the sources do not say.

## DDP twice

**Predict.** microddp's DDP can be handed `carrier("auto", inside)`: for each size the fastest, as
measured here when it is made. Its buckets are in shared memory then, so of each step it should save
the difference between the backend's all-reduce and microddp's in place: for these models, of 4 and
16 MiB, both are in the table above. It saves more, if the backend's work takes time from backward's
core; less, if backward hides it.

**Measure.** A step of each model alone, with the backend's all-reduce, and with `"auto"`:
"""

# %%
CARRIERS = ["backend", "auto"] if comms.device.type == "cpu" else ["backend"]
BATCH = 64


def steps_of(width):
    """A training step of each kind, of a model of 16 layers; made on one machine."""
    data = torch.randn(2, BATCH, width, device=comms.device).unbind()
    models = {"alone": FullMLP(width).to(comms.device)}
    for name in CARRIERS:
        torch.manual_seed(0)
        models[name] = microddp.DDP(
            FullMLP(width).to(comms.device), inside, all_reduce=carrier(name, inside)
        )
    return {name: partial(step, model, data) for name, model in models.items()}


def step(model, data):
    inputs, targets = data
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()


# %%
results = {}
for width in (256, 512):
    with on_all_cores():
        steps = steps_of(width)
    results[width] = on_one_machine(steps, warmup=3, repeat=15)

# %% tags=["plumbing"]
rows = []
for width, of in results.items():
    size = gradient_bytes(FullMLP(width))
    nbytes = min(SIZES, key=lambda s, size=size: abs(s - size))
    row = [f"16 x {width}", human_bytes(size), *map(str, of.values())]
    if "auto" in of:
        both = zip(of["backend"].seconds, of["auto"].seconds, strict=True)
        saved = Timing(tuple(backend - auto for backend, auto in both))
        saving = timings["backend"][nbytes].median - timings["microddp, in place"][nbytes].median
        row += [with_quartiles(of["auto"].ratio(of["backend"])), human_seconds(saving), saved]
    rows.append(row)
headers = ["model", "gradients", "alone", *CARRIERS, "auto / backend", "to be saved", "saved"]
senders.print(f"a step of {n} ranks on one machine, without an optimizer")
senders.print(table(rows, headers[: len(rows[0])]))
if comms.device.type == "cpu":
    chosen = fastest(inside)
    choice = [f"{name} up to {human_bytes(size)}" for size, name in chosen.items()]
    told = f"{', '.join(choice)}, and the last beyond that"
    first, *others = dict.fromkeys(chosen.values())
    senders.print("auto takes", told if others else f"{first} at every size")
if comms.device.type != "cpu":
    senders.print(f"On GPUs DDP keeps {comms.backend}: gradients are not in memory ranks share.")

# %% [markdown]
r"""
**Explain.** `"auto"` does not change what is computed, only who carries it. Where more was saved
than the two all-reduces differ, the backend's may also have held up backward, whose core its
threads want
(chapter 05). What is left above the step of one rank alone is the sum itself, the wait for the
slowest rank, and what the wrapper does.

## What to take along

- Inside a machine an all-reduce of a large tensor is limited by memory: the bytes of about one copy
  are the least that it moves. That of a small one is limited by barriers and calls.
- Two barriers make it right, and buffers in turn save one. A barrier left out is a wrong sum:
  often, seldom or never, until a rank is late.
- Between machines send each machine's sum, not each rank's: over a link go $2(M-1)/M$ times the
  bytes, however many ranks a machine has.

## Exercises

**The lab.** Write two barriers and a sum. {doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks, with
one of them late at each place in turn.

```console
$ python -m microddp.labs start 15
```

1. `one_barrier` has two buffers. Use one, `start = 0`, and count wrong sums with a late rank as
   above. Where must it be late?

   <details class="solution"><summary>Solution</summary>

   After the barrier, before it adds up. The others leave the call, begin the next one and write
   over what the late rank is still to read:

   ```python
   def one_buffer(tensor, late):
       buffers = [block[: tensor.numel()] for block in pairs]
       buffers[me].copy_(tensor)
       region.barrier()
       time.sleep(late if me == n - 1 else 0)
       tensor.copy_(buffers[0])
       for other in buffers[1:]:
           tensor += other
   ```

   Called 25 times with `late=1e-2` and other numbers each time, the late rank has wrong sums. Its
   own value is right in them, and those of the others are of the next call. Two buffers, with
   `start` as it was, have none, however late it is.

   </details>

2. Four machines have eight ranks each, and gradients of 1 GiB. How many bytes cross a machine's
   link in a ring through all 32 ranks, and how many by machine? And if each of the eight ranks had
   a link of its own to the network?

   <details class="solution"><summary>Solution</summary>

   The ring: $2 \cdot 31/32$, or 1.94 GiB. By machine: $2 \cdot 3/4$, or 1.5 GiB. With more
   machines the two come nearer to each other, and both to 2 GiB: what is won is largest for two
   machines.

   With eight links the ring through all ranks still leaves the machine once, over one of them, and
   seven are idle. By machine, every lane has a link, and each carries 1.5/8, or 0.19 GiB. That is
   how GPU servers are built, with a network card for each GPU. (NCCL makes several rings, which
   leave the machine at different GPUs, for the same reason.)

   </details>

3. `shared_sum` lets every rank add up a part. Let rank 0 add up everything instead. How many bytes
   are read and written then, one after the other, for two and for eight ranks? Can a barrier
   be left out now?

   <details class="solution"><summary>Solution</summary>

   All copy in at the same time, $2S$. Then rank 0 alone copies and adds, $2S + 3(n-1)S$, while the
   others wait; then all copy out, $2S$. That is $9S$ for two ranks instead of $6.5\,S$, and
   $27\,S$ for eight instead of $6.875\,S$.

   Neither barrier can be left out: rank 0 must not begin before all have written, and nobody may
   read before it has ended.

   </details>
"""

# %%
comms.close()
