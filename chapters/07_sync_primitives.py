# %% [markdown]
r"""
# 07. Collectives, and when they hang

Which other collectives are there, what do they cost, and what if one hangs? A job that hangs prints
nothing, or an error on a rank that did nothing wrong: to read it, you must know what every rank
was to do. The first half of this chapter draws who has what before and after, and counts what is
sent. The second half makes mistakes, most of which hang, and reads
them.
"""

# %% tags=["imports"]
import contextlib
import itertools
import math
import os
import re
import socket
import struct
import time
from functools import partial
from textwrap import fill, shorten

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

import microddp
from microddp import figures
from microddp.allreduce import ring_reduce_scatter
from microddp.comms import name_ranks
from microddp.data import ShardedBatches, load_digits, shard
from microddp.ddp import DDP
from microddp.findings import compare, find
from microddp.hang import torch_calls
from microddp.model import FullMLP, SimpleCNN
from microddp.report import human_bytes, human_seconds, table
from microddp.timing import measure

# %%
os.environ.pop("MICRODDP_DEBUG", None)  # a later section sets it where it belongs
# sphinx_gallery_builds = "the chores of a training job, and mistakes that hang or spoil one"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown] index=["barrier"]
"""
## Who waits: the barrier

Nobody leaves a *barrier* before everybody has come to it. Here each rank comes a little later than
the one before. (`all_gather_data` tells all ranks what each has to say, as JSON. PyTorch's
`all_gather_object` sends pickles, which are programs: read them from nobody whom you do not trust.)
"""

# %%
time.sleep(0.05 * rank)
arrived = time.monotonic()  # one clock for all processes of a machine
comms.barrier()
times = comms.all_gather_data([arrived, time.monotonic()])
rows = [(r, *(human_seconds(t - times[0][0]) for t in pair)) for r, pair in enumerate(times)]
comms.print(table(rows, ["rank", "comes at", "leaves at"]))
if comms.box or comms.local_world_size == n:
    assert min(left for _, left in times) >= max(came for came, _ in times)

# %% [markdown] index=["collectives", "all_gather", "reduce_scatter"]
r"""
A barrier is needed before something that is not a message: before a clock is read, or a file that
another rank wrote. A collective needs none: whoever needs the data of others waits for them anyway.

## Who has what

The others move data:

- *Broadcast*: every rank gets a copy of what one rank has.
- *Scatter*: one rank deals its tensor out, a part for each rank.
- *Gather*: one rank collects a part from every rank, in rank order.
- *All-gather*: every rank collects.
- *Reduce-scatter*: all tensors are added up, and each rank keeps one part of the sum.
- *All-to-all*: every rank deals out, and every rank collects.

**Predict.** Let part $p$ of rank $r$ be the number $(p + 1) \cdot 10^r$. Then every rank writes to
a decimal digit of its own, and a sum tells who is in it. With these numbers in `data[r][p]`, one
line defines each collective: what every rank holds at the end. (The picture shows the first four
ranks.)
"""

# %%
fours = [comms.subgroup(range(first, min(first + 4, n))) for first in range(0, n, 4)]
drawn = fours[rank // 4]
k = drawn.world_size
data = [[(p + 1) * 10**r for p in range(k)] for r in range(k)]
columns = [list(column) for column in zip(*data, strict=True)]
sums = [sum(column) for column in columns]
own = [data[r][r] for r in range(k)]

# %%
DEFINED = {
    "broadcast": [data[0]] * k,
    "scatter": [[number] for number in data[0]],
    "gather": [own] + [[]] * (k - 1),
    "all-gather": [own] * k,
    "reduce-scatter": [[number] for number in sums],
    "all-to-all": columns,
    "all-reduce": [sums] * k,
}

# %% [markdown]
"""
**Build.** Broadcast and all-reduce overwrite their tensor, the others return a new one. To a gather
or an all-gather every rank brings one part; to a scatter all but rank 0 bring nothing:
"""


# %%
def collective(name, group, x):
    result = getattr(group, name.replace("-", "_"))(x)
    return x if name in ("broadcast", "all-reduce") else result


def brings(name, whole, group):
    if name in ("gather", "all-gather"):
        return shard(whole, group.rank, group.world_size).clone()
    return whole[:0] if name == "scatter" and group.rank > 0 else whole.clone()


# %% [markdown]
"""
**Measure.** What every rank really held before and after:
"""

# %%
panels = {}
for name, defined in DEFINED.items():
    x = brings(name, torch.tensor(data[drawn.rank], device=comms.device), drawn)
    before = drawn.all_gather_data(x.tolist())
    result = collective(name, drawn, x)
    after = drawn.all_gather_data([] if result is None else result.flatten().tolist())
    assert after == defined, name
    panels[name] = before, after

# %% tags=["plumbing"]
rooted = {name: panels.pop(name) for name in ("broadcast", "scatter", "gather")}
figures.holdings(rooted, title="One rank gives to all, or takes from all")
figures.holdings(panels, title="Every rank gives, and every rank gets")

# %% [markdown] index=["device mesh", "subgroup"]
"""
The colour of a square is the rank whose number it is; in a sum, each digit is on the colour of
its own rank. A reduce-scatter and then an all-gather make an all-reduce: that is chapter 02's ring.

## What they are for

Broadcast brings rank 0's model to all (chapter 06). All-gather and reduce-scatter make sharded
training: parameters are gathered where they are used, gradients summed where they are kept (chapter
16). All-to-all takes tokens to their experts. Large jobs arrange ranks in a grid, a *device mesh*,
with a group for each row and column ({func}`microddp.register_mesh`). Three uses have a trap.

**Stop together: the maximum of flags.** The last rank has ten images, the others share the rest.
Each looks at the loss on *its* images to decide whether it has trained long enough. One that left
its loop alone would leave the others waiting. So each says 0 or 1, and the maximum counts:
"""

# %%
digits = load_digits(comms.device)
images, labels = (tensor[:359] for tensor in digits.test.tensors)
images = images.double()
rest = [len(part) for part in torch.arange(349).tensor_split(max(1, n - 1))]
sizes = [*rest, 10] if n > 1 else [359]
x = comms.scatter(images.split(sizes) if rank == 0 else None)
y = comms.scatter(labels.split(sizes) if rank == 0 else None)

# %%
torch.manual_seed(0)
module = FullMLP(64, depth=4, outputs=10).to(comms.device, torch.float64)
model = DDP(module, comms)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
batches = ShardedBatches(digits.train, 96 - 96 % n, rank, n)

# %%
for epoch in range(1, 21):
    for a, b in batches.epoch(epoch):
        optimizer.zero_grad()
        cross_entropy(model(a.double()), b).backward()
        optimizer.step()
    with torch.no_grad():
        content = cross_entropy(module(x), y).item() < 0.17
    flag = torch.tensor([int(content)], device=comms.device)
    comms.all_reduce(flag, "max")
    if flag.item():
        break

# %% tags=["plumbing"]
ends = comms.all_gather_data([epoch, content])
assert len({stopped for stopped, _ in ends}) == 1
wish = [r for r, (_, content) in enumerate(ends) if content]
find(
    comms,
    "stop-together",
    parted=(
        0 < len(wish) < n,
        f"All stop after epoch {epoch}, for the sake of {name_ranks(wish)}. The others would have "
        "gone on, and waited in the next all-reduce.",
    ),
    alike=(len(wish) in (0, n), f"After epoch {epoch} all ranks decide alike."),
)

# %% [markdown]
"""
**A metric: sums and counts.** The mean of the ranks' means gives an image of a smaller part a
larger weight. The sums of all ranks, divided by the count of all ranks, are what one device would
have found:
"""

# %%
with torch.no_grad():
    sums = torch.stack([cross_entropy(module(x), y, reduction="sum"), x.new_tensor(len(x))])
    means = sums[0] / sums[1]
    comms.all_reduce_mean(means)
    comms.all_reduce(sums)
    single = cross_entropy(module(images), labels).item()

# %% tags=["plumbing"]
right, off = sums[0].item() / sums[1].item(), abs(means.item() / single - 1)
assert abs(right - single) < 1e-12
find(
    comms,
    "mean-of-means",
    off=(
        n > 1,
        f"The loss on all images is {single:.3f}, by sums and counts too. The mean of the ranks' "
        f"means is {means.item():.3f}: {off:.1%} off.",
    ),
    alone=(n == 1, "On one rank the mean of means is the mean."),
)

# %% [markdown]
"""
**Predictions, in the right order.** Gathers join parts in rank order. That is the order of the data
if each rank had a block. PyTorch's `DistributedSampler`, if it does not shuffle, gives rank r the
images r, r + n, r + 2n and so on (and some twice, so that all ranks have equally many). Their
predictions have to be dealt back, one from each rank in turn, and cut to length:
"""

# %%
strided = torch.tensor(list(DistributedSampler(images, n, rank, shuffle=False)))
with torch.no_grad():
    everyone = comms.all_gather(module(images[strided.to(comms.device)]).argmax(1))
    hits = (module(images).argmax(1) == labels).double().mean().item()
joined, dealt = (
    (predicted.flatten()[: len(labels)] == labels).double().mean().item()
    for predicted in (everyone, everyone.T)
)
assert dealt == hits

# %% tags=["plumbing"]
find(
    comms,
    "order",
    shuffled=(
        n > 1,
        f"Dealt back, {dealt:.0%} of the predictions are right. Joined rank by rank, {joined:.0%} "
        "are: the same model, and no error.",
    ),
    alone=(n == 1, "One rank has one order."),
)

# %% [markdown]
r"""
## What they cost

**Predict.** Let $S$ be the bytes of the largest tensor that a rank holds before or after. What
counts is the busiest link: the most that a rank sends, or receives.

- gloo broadcasts by a tree. Each round reaches twice as many ranks, so there are
  $\lceil\log_2 n\rceil$, and rank 0 sends $S$ in each.
- NCCL broadcasts around a ring, in pieces, and in no other way
  ([tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc) skips all others):
  each rank passes on a piece as soon as it has it. So nobody sends more than $S$.
- The others send each part of $S/n$ to or from $n-1$ ranks, or around a ring; all-reduce twice.

`COST` has the busiest link's bytes by $S$, over gloo and with NCCL's rings. (Inside a node, and for
small tensors, NCCL has other ways for all but broadcast.) Ranks that only send can all be timed
where they have links of their own; elsewhere those without a core or GPU leave. `m` ranks stay:
"""

# %%
timed = comms.timed(computing=False)
m = timed.world_size
levels, most = math.ceil(math.log2(m)), (m - 1) / m
timed.print(f"{m} of {n} ranks stay")
COST = {
    "broadcast": (levels, 1),
    "broadcast, our ring": (1, 1),
    "scatter": (most, most),
    "gather": (most, most),
    "all-gather": (most, most),
    "reduce-scatter": (most, most),
    "reduce-scatter, our ring": (most, most),
    "all-to-all": (most, most),
    "all-reduce": (2 * most, 2 * most),
}

# %% [markdown]
"""
**Build.** NCCL's broadcast, to be tried beside gloo's. (Chapter 02 has a ring's reduce-scatter.)
"""


# %%
def ring_broadcast(tensor, group, pieces=8):
    chunks, receiving, sending = tensor.chunk(pieces), [], []
    if group.rank > 0:
        receiving = [group.recv(chunk, group.rank - 1, async_op=True) for chunk in chunks]
    for chunk, coming in itertools.zip_longest(chunks, receiving):
        if coming:
            coming.wait()
        if group.rank < group.world_size - 1:
            sending.append(group.send(chunk, group.rank + 1, async_op=True))
    for pending in sending:
        pending.wait()


# %% tags=["plumbing"]
def calls_on(parts):
    """Calls whose largest tensor has ``parts`` numbers for each rank."""
    x = torch.zeros(m * parts, device=timed.device)
    mine = x[:parts].clone()
    wire = timed.to_wire(mine).clone()  # for those that gloo takes from a processor only
    whole = [wire.clone() for _ in range(m)] if timed.rank == 0 else None
    return {
        "broadcast": partial(timed.broadcast, x),
        "broadcast, our ring": partial(ring_broadcast, x, timed),
        "scatter": partial(dist.scatter, wire, whole, group=timed.group, group_src=0),
        "gather": partial(dist.gather, wire, whole, group=timed.group, group_dst=0),
        "all-gather": partial(timed.all_gather, mine),
        "reduce-scatter": partial(timed.reduce_scatter, x),
        "reduce-scatter, our ring": partial(ring_reduce_scatter, x, timed),
        "all-to-all": partial(timed.all_to_all, x),
        "all-reduce": partial(timed.all_reduce, x),
        "microddp's scatter": partial(timed.scatter, x),
    }


# %% [markdown]
"""
**Measure.** First the bytes. gloo's messages travel over TCP, and Linux counts what each connection
has carried. So the kernel can say what a collective really sent, whatever the backend does inside:
"""


# %%
def carried():
    """Bytes sent, bytes received and packets sent, of each of this process's TCP connections."""
    counts = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # not TCP, or an old kernel
            connection = socket.socket(fileno=int(fd))
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
            finally:
                connection.detach()  # it is not ours to close
            received, packets, sent, again = (
                struct.unpack_from(form, info, at)[0]
                for form, at in (("Q", 128), ("I", 156), ("Q", 200), ("Q", 208))
            )
            counts[fd] = torch.tensor([sent - again, received, packets])
    return counts


# %%
def carried_by(call):
    """What a call carries, on the rank where each is most."""
    timed.barrier()
    time.sleep(0.05)  # until what is buffered has left
    before = carried()
    call()
    time.sleep(0.05)
    counts = sum(count - before.get(fd, 0) for fd, count in carried().items())
    return torch.tensor(timed.all_gather_data(counts.tolist())).amax(0).tolist()


# %%
PART = 2**18  # numbers: 1 MiB
S = 4 * PART * m
can_count = timed.backend == "gloo" and hasattr(socket, "TCP_INFO") and bool(carried())
can_count = m > 1 and all(timed.all_gather_data(can_count))
tiny, full = (
    {name: carried_by(call) for name, call in calls_on(parts).items()} if can_count else {}
    for parts in (1, PART)
)

# %% [markdown]
"""
Then the time, of as many bytes and of a single number for each rank. The unit is what $S$ takes on
a link of known speed; elsewhere, what it takes to exchange $S$ with a neighbour:
"""

# %%
right, left = (timed.rank + 1) % m, (timed.rank - 1) % m
out, into = torch.zeros(2, S // 4, device=timed.device).unbind()
swap = partial(timed.sendrecv, out, right, into, left) if m > 1 else partial(into.copy_, out)
large = measure({"swap": swap, **calls_on(PART)}, timed, repeat=9)
small = measure(calls_on(1), timed, repeat=9)
unit = S * timed.box.seconds_per_byte if timed.box else large["swap"].median

# %% tags=["plumbing"]
counted = {name: max(full[name][:2]) / S for name in COST if can_count}
took = {name: large[name].median / unit for name in COST}
rows = [
    (
        name,
        float(gloo),
        counted.get(name),
        took[name],
        float(nccl),
        human_seconds(small[name].median),
    )
    for name, (gloo, nccl) in COST.items()
]
headers = ["", "predicted", "counted", "took", "NCCL, worked out", f"time of {4 * m} B"]
timed.print(f"{timed.backend}, {m} ranks, S = {human_bytes(S)}: the busiest link's bytes, in S")
if not can_count:
    timed.print("Bytes are counted for two ranks and more, on gloo, under Linux.")
timed.print(table(rows, headers))

# %% tags=["plumbing"]
real = {name: gloo for name, (gloo, _) in COST.items()}
real["reduce-scatter"] = real["all-reduce"] if can_count else most
assert all(abs(counted[name] - real[name]) < 0.02 for name in counted)
twice = counted.get("reduce-scatter", 0.0)
find(
    timed,
    "bytes",
    counted=(
        can_count,
        "Each sent what was predicted, except gloo's reduce-scatter: it sent "
        f"{twice:.2f} S, as much as an all-reduce, where {most:.2f} S would do.",
    ),
    not_counted=(not can_count, "No bytes were counted."),
)

# %% tags=["plumbing"]
miss = {name: took[name] / real[name] for name in COST} if m > 1 else {"": 1.0}
worst = max(miss, key=lambda name: abs(math.log(miss[name])))
close = sum(0.9 < ratio < 1.1 for ratio in miss.values())
find(
    timed,
    "times",
    several=(
        m > 1,
        f"Of {len(miss)} ways {close or 'none'} took the time of the bytes that they sent, to a "
        f"tenth. Missed most is {worst}: it took {miss[worst]:.2g} times that.",
    ),
    alone=(m == 1, "One rank sends nothing, so there is nothing to predict."),
)

# %% tags=["plumbing"]
tree, half = (
    compare(large[f"{name}, our ring"], large[name]) for name in ("broadcast", "reduce-scatter")
)
find(
    timed,
    "rings",
    several=(
        m > 1,
        tree.say("A broadcast around our ring", "the backend's")
        + ". "
        + half.say("A reduce-scatter around a ring", "the backend's")
        + ".",
    ),
    alone=(m == 1, "One rank has no ring."),
)

# %% tags=["plumbing"]
figures.stacked_bars(
    {
        name: {
            "its bytes on the link": unit * min(real[name], took[name]),
            "more": unit * max(0.0, took[name] - real[name]),
        }
        for name in COST
    },
    title=f"Around a ring, a reduce-scatter is {half.than('the one of ' + timed.backend)}",
    xlabel=f"time of {human_bytes(S)}",
)

# %% tags=["plumbing"]
mine, direct = (tiny.get(name, [0])[-1] for name in ("microddp's scatter", "scatter"))
slow = compare(small["scatter"], small["microddp's scatter"])
find(
    timed,
    "small-scatter",
    counted=(
        can_count,
        f"Of {4 * m} B, gloo's scatter is {slow.than('that of microddp')}: its busiest rank "
        f"sends {direct} packets, and with microddp's {mine}.",
    ),
    not_counted=(not can_count, "No packets were counted."),
)

# %% [markdown]
r"""
**Explain.** PyTorch makes gloo's reduce-scatter from all-reduces, after which every rank throws all
parts but its own away ("2x communication", says [its
author](https://github.com/pytorch/pytorch/pull/118911)). A collective's name says who has what at
the end, not what it costs to get there. Not in the model are starts, which are all that a small
tensor pays; copies and sums; and that a rank must have a piece before it can pass it on. In
gloo's tree rank 0 starts all its messages at once, and they share its link: so the rank that passes
one on has it late: with four ranks after $2 S$, and then sends $S$. A round of an all-to-all waits
for two partners. A scatter of gloo's must be told on every rank what will come. In microddp's the
ranks first agree, in two all-gathers, that there is something to deal out, and rank 0 sends a
header before each part.

:::{admonition} On GPUs
Who has what stays, and so does the order that the second half is about. What changes is the
column of NCCL: a broadcast does not grow with $n$, and a reduce-scatter is half an all-reduce, on
which sharded training rests. On 8 H200, with 16 GiB, a link carried 367 GB/s in a ring's
all-reduce, 363 in a reduce-scatter and 361 in an all-gather
([ml-engineering](https://github.com/stas00/ml-engineering/tree/master/network), August 2026): as
fast, with half the bytes. On yours, run `reduce_scatter_perf` of nccl-tests.
:::
"""

# %% [markdown] index=["time-out", "timeout"]
r"""
## When it hangs

Collectives are paired by their order. Whoever enters one waits for the others, until the time-out.
Most mistakes below are functions of the ranks that depart from the others. `outcomes` makes
it in a group of its own, with a time-out of one second, and returns how each rank fared: its error,
or "went on". (With NCCL a time-out ends the process, so there they are not made.)
"""

# %%
STUCK = m > 1 and timed.backend == "gloo"  # whether there is somebody to wait for


def outcomes(mistake, *args, debug="0"):
    os.environ["MICRODDP_DEBUG"] = debug  # read when a group is made; a later section turns it on
    timed.barrier()  # the time-out counts while the group is made, too
    hasty, ending = timed.subgroup(range(m), timeout=1.0), "went on"
    os.environ["MICRODDP_DEBUG"] = "0"
    try:
        if timed.backend == "gloo":
            mistake(hasty, *args)
    except RuntimeError as error:
        ending = re.sub(r"\[\S*/", "[", str(error))  # without the source's folder
    endings = timed.all_gather_data(shorten(ending, 150, placeholder=" ..."))
    hasty.close()
    return endings


# %% tags=["plumbing"]
FARED = {}  # by mistake


def show(endings):
    for r, ending in enumerate(endings):
        timed.print(fill(f"[rank {r}] {ending}", 90, subsequent_indent=" " * 9))


# %% [markdown] index=["deadlock"]
"""
## Where it breaks: only rank 0 enters

Only rank 0 prints a number, so only rank 0 averages it:
"""


# %%
def log_loss(group, away):
    loss = torch.ones(1, device=timed.device)
    if group.rank not in away:
        group.all_reduce_mean(loss)
    group.print(f"loss {loss.item():.3f}")


FARED["only rank 0 enters"] = endings = outcomes(log_loss, range(1, m))
show(endings)
assert [ending != "went on" for ending in endings] == [STUCK] + [False] * (m - 1)
assert set(outcomes(log_loss, [])) == {"went on"}  # all average, one prints

# %% [markdown]
"""
The error names a wait, and neither the collective nor the ranks that did not come. It is raised
where the program is right to wait. The culprits went on: with a time-out of minutes they hang by
now at their own next collective, somewhere else.

## Where it breaks: another order, another shape

Rank 0 broadcasts a threshold and then sums up a loss; the others do it the other way round:
"""


# %%
def two_orders(group, odd):
    loss, threshold = torch.ones(2, 1, device=timed.device)
    calls = [lambda: group.all_reduce(loss), lambda: group.broadcast(threshold)]
    for call in reversed(calls) if group.rank in odd else calls:
        call()


FARED["two orders"] = endings = outcomes(two_orders, [0])
assert all((ending != "went on") == STUCK for ending in endings)

# %% [markdown]
"""
To wait is the lucky case. Two calls of one kind and shape fit, and add up what does not belong
together. A loop over a `set` of names does that: Python hashes strings differently in every
process. Another shape may fit, too. Below, the last rank expects one number more than rank 0 sends:
"""


# %%
def swapped_sums(group, odd):
    sums = {"loss": 0.5, "images": 100.0}
    for name in sorted(sums, reverse=group.rank in odd):
        total = torch.tensor([sums[name]], device=timed.device)
        group.all_reduce(total)
        sums[name] = total.item()
    group.print(f"0.5 and 100, summed over {m} ranks: {sums}; right: {m / 2:g} and {100 * m}")


def other_shape(group, odd):
    tensor = torch.full((4 if group.rank in odd else 3,), float(group.rank), device=timed.device)
    group.broadcast(tensor)
    received = timed.all_gather_data(tensor.tolist())
    group.print(f"rank 0 sent {received[0]}, the last rank has {received[-1]}")


# %%
FARED["sums in another order"] = outcomes(swapped_sums, [0])
FARED["another shape"] = outcomes(other_shape, [m - 1])
assert {*FARED["sums in another order"], *FARED["another shape"]} == {"went on"}

# %% [markdown]
"""
Nor can you count on that: a tensor too *long* for its receiver ends the process in gloo, and NCCL
promises nothing ("undefined behavior, including hangs, crashes, or data corruption", [its user
guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html)).

With `MICRODDP_DEBUG=1` all ranks first tell each other what they are about to do. On a difference
all raise and name the ranks in the minority or, without a majority, those that differ from rank 0.
(PyTorch's own: `TORCH_DISTRIBUTED_DEBUG=DETAIL`.) It is blind to swapped sums, of which all say the
same, and sees the other shape:
"""

# %%
endings = outcomes(other_shape, [m - 1], debug="1")
show(endings[:1])
assert all(("the ranks disagree" in ending) == STUCK for ending in endings)

# %% [markdown]
"""
The fix is one order and one shape by construction: a list instead of a set, and shapes that are
told before they are used.

## Where it breaks: evaluation through the wrapper

One rank is enough to evaluate. Does the model know? The forward pass of a `DDP` begins with a
collective if the model has buffers: rank 0's are broadcast (chapter 06). Here rank 0 evaluates
between two training steps: through the wrapper or through `.module`, the model inside it, with or
without gradients, and with or without a barrier of all ranks afterwards:
"""


# %%
def evaluation(group, wrap, through, gradients, barrier):
    model = wrap(SimpleCNN().to(timed.device), group)
    evaluated = model if through == "wrapper" else model.module
    a, b = next(batches.epoch(0))
    for step in range(4):
        if step == 3 and group.rank == 0:
            with torch.set_grad_enabled(gradients):
                evaluated.eval()(images.float())
        if step == 3 and barrier:
            group.barrier()
        cross_entropy(model.train()(a), b).backward()


def torch_ddp(module, group):
    return TorchDDP(module, process_group=group.group)


_ = torch_ddp(nn.Linear(1, 1).to(timed.device), timed)  # imports longer than the time-out

# %%
HANG = [("wrapper", True, False), ("wrapper", False, True)]
GO_ON = [("wrapper", False, False), ("module", True, True)]
rows = []
for case, wrap in itertools.product(HANG + GO_ON, (DDP, torch_ddp)):
    endings = outcomes(evaluation, wrap, *case)
    FARED.setdefault("evaluation through the wrapper", endings)
    hangs = {ending != "went on" for ending in endings}
    name = "microddp" if wrap is DDP else "torch"
    rows.append((*case, name, "hangs" if any(hangs) else "goes on"))
    assert hangs == {STUCK and case in HANG}

# %% tags=["plumbing"]
headers = ["rank 0 evaluates", "gradients", "barrier", "DDP", "the job"]
timed.print(table(rows, headers))

# %% [markdown]
"""
**Explain.** With gradients, rank 0 broadcasts its buffers once more than the others, and the next
collective of each meets the wrong one. Under `no_grad` and without a barrier nothing hangs, by
luck: after a forward without gradients the wrapper skips its next broadcast, because nothing was
trained in between. The numbers of collectives agree again; with a barrier, their order does not.
The fix is the last case: evaluate through `.module`. Or let all ranks evaluate, each a part.

## Where it breaks: save, then barrier

Rank 0 saves, and the others wait until the file is there. Two lines, and one indentation:
"""


# %%
def save(group):
    if group.rank == 0:
        torch.save(module.state_dict(), os.devnull)
        group.barrier()  # belongs after the if


FARED["save, then barrier"] = endings = outcomes(save)
assert [ending != "went on" for ending in endings] == [STUCK] + [False] * (m - 1)

# %% tags=["plumbing"]
late = [name for name, endings in FARED.items() if set(endings) != {"went on"}]
silent = [name for name in FARED if name not in late]
find(
    timed,
    "mistakes",
    made=(
        STUCK,
        f"Of {len(FARED)} mistakes {len(late)} hang until an error ends them, and {len(silent)} "
        f"end in wrong numbers and no error: {' and '.join(silent)}.",
    ),
    not_made=(not STUCK, "Left out: mistakes that hang take two ranks, and gloo."),
)

# %% [markdown] index=["flight recorder"]
r"""
## The flight recorder

**Predict.** The time-out did not name who did not come. A list of each rank's calls can: a group
numbers its collectives (the first is made with the group), so a rank that is behind has a smaller
last number. (For this one mistake, gloo also has `dist.monitored_barrier`, which names the ranks
that stay away.) PyTorch keeps such a list, the *flight recorder*, for NCCL and for gloo: the last
collectives of each process, as many as `TORCH_FR_BUFFER_SIZE` says, with number, sizes and stack.

**Measure.** An early `continue` on one rank, and the two orders of above. `torch_calls` reads the
recorder, by a private call of PyTorch's (`torch._C._distributed_c10d._dump_fr_trace`):
"""


# %%
def early_continue(group, odd):
    for batch in range(4):
        if group.rank in odd and batch == 2:
            continue  # "this loss is not finite, leave it out"
        group.all_reduce(torch.ones(4, device=timed.device))


# %%
def recorded(mistake, odd):
    """Each rank's last collective in the group of a mistake: number, call, line."""
    calls = []

    def watched(group, odd):
        try:
            mistake(group, odd)
        finally:
            name = group.group.group_name
            calls.extend(c for c in torch_calls(stacks=True) if c["process_group"][0] == name)

    outcomes(watched, odd)
    last = calls[-1]
    line = next(f["line"] for f in last["frames"] if f["name"] == mistake.__name__)
    what = f"{last['profiling_name']} of {last['input_sizes'][0]}"
    return timed.all_gather_data([last["collective_seq_id"], what, line])


# %% tags=["plumbing"]
seen, READS = {}, STUCK and torch_calls() is not None
for mistake, odd in ((early_continue, [m - 1]), (two_orders, [0])) if READS else ():
    seen[mistake.__name__] = recorded(mistake, odd)
rows = [(name, r, *last) for name, ranks in seen.items() for r, last in enumerate(ranks)]
timed.print(table(rows, ["mistake", "rank", "last number", "last collective", "line"]))
numbers = [number for number, *_ in seen.get("early_continue", ())]
ahead, behind = max(numbers, default=0), min(numbers, default=0)
absent = [r for r, number in enumerate(numbers) if number < ahead]
assert absent == [m - 1] or not READS
assert len({number for number, *_ in seen.get("two_orders", ())}) <= 1
find(
    timed,
    "not-come",
    named=(
        READS,
        f"Others wait in collective {ahead}, and {name_ranks(absent)} made only {behind}: that is "
        "who did not come. With two orders the numbers are equal, and the calls differ.",
    ),
    not_made=(not READS, "Left out: nobody waits, so there is nothing to read."),
)

# %% [markdown] index=["watchdog"]
"""
So look for ranks that are behind, and on them not for the recorded line but for where they are
*now*: `py-spy dump --pid` shows the stack of a running process. If no rank is behind, compare the
calls. (While a job hangs, the field `retired` says whether a call is over; gloo's `state` stays
"scheduled".)
{doc}`Chapter 13 <13_faults>` has a program that does all this on a job that hangs.

## With NCCL

NCCL's calls return before anything has moved. They put a kernel on a *stream*, a queue of the GPU,
and `wait()` makes another stream wait and not the host: Python goes on to queue more. So a hang is
seen late and elsewhere. Python stops where it needs a number from the GPU, at `loss.item()` or
`synchronize()`. There `py-spy` finds it, any number of lines behind the collective that hangs. Nor
can that collective's line raise an error: it has returned.

Instead a thread of PyTorch's, the *watchdog*, looks after each collective. At the time-out (10
minutes, if nothing else was set) it prints what it found and ends the process. From one such
job ([NVIDIA/nccl 1409](https://github.com/NVIDIA/nccl/issues/1409), August 2024):

```text
[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST,
    NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE,
    NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds before timing
    out.
```

Read it as the table above: one number, two calls. So these ranks had parted: look in the program
before you look at the network. Other lines tell the last collective that was *queued*, and the
program's line or `Stack trace of the failed collective not found, potentially because
FlightRecorder is disabled`. Where the recorder is on, each rank's record can be in a file
after the time-out (`TORCH_NCCL_DUMP_ON_TIMEOUT`), and [PyTorch's
tutorial](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) has a script
that compares them.

Meta found over 60 % of such time-outs to come from the CPU side, mostly from ranks that part ways
([PyTorch's blog][blog], March 2026): mistakes like those above. One more is of NCCL alone. There
PyTorch makes a barrier of an all-reduce on a GPU, and a process that has not said which is its own
may take another's. Pass `device_ids=[local_rank]` to `dist.barrier`, or `device_id` to
`init_process_group`.

[blog]:
https://pytorch.org/blog/flight-recorder-a-new-lens-for-understanding-nccl-watchdog-timeouts/

## What to take along

- A collective is who has what before and after. What it sends depends on the backend: count.
- For a metric, add up sums and counts. For predictions, know the order of the samples. To stop,
  agree.
- Every rank must make the same calls in the same order with the same shapes. One that does not
  shows up as a time-out somewhere else, a process that ends, or a wrong number.
- At a hang, ask every rank for its last collective, and those behind for their stack.

## Exercises

**The lab.** Start and end a job with the right collectives, counted in bytes. {doc}`It is checked
</labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 07
```

1. Let rank 1 sleep for two seconds before an all-reduce in a group with a time-out of one. What
   do the others see, and what does rank 1 see?

   <details class="solution"><summary>Solution</summary>

   After one second the others raise a time-out: whoever waits cannot tell late from absent. Rank 1
   comes after two, to a group that was given up. With gloo it reads `Connection closed by peer`,
   "typically caused by a remote worker crashing". But none has crashed: the rank that is late is
   told that the fault is another's. Of such errors, look for the one that was raised first, and for
   the rank that did not raise it.

   </details>

2. Replace the maximum in the early stop by a vote of the majority. Which operation does it take?
   What does it do with two ranks?

   <details class="solution"><summary>Solution</summary>

   Add the flags up, and stop if `2 * flag.item() > n`. All ranks read the same sum, so all decide
   alike. More than half of two ranks is both, so with two the vote is the minimum.

   </details>
"""

# %%
drawn.close()
comms.close()
