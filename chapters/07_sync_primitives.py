# %% [markdown]
r"""
# 07. The other collectives

Which other collectives are there, and what are they for? An all-reduce gives everybody the sum.
Around it stand seven more, for waiting, copying, dealing out and collecting. This chapter draws
who has what before and after those that move data, does the chores of a training job with them,
and counts and times what they send. Appendices show the mistakes that leave a job hanging.
"""

# %% tags=["imports"]
import contextlib
import itertools
import math
import os
import re
import socket
import struct
import tempfile
import time
from functools import partial
from pathlib import Path
from textwrap import fill, shorten

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

import microddp
from microddp import figures
from microddp.allreduce import fit_alpha_beta, ring_reduce_scatter
from microddp.data import ShardedBatches, load_digits, shard
from microddp.ddp import DDP
from microddp.model import FullMLP, SimpleCNN
from microddp.replicas import broadcast_parameters, check_replicas
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

The simplest collective moves nothing. Nobody leaves a *barrier* before everybody has come to it.
Here each rank comes a little later than the one before. (`all_gather_data` lets everybody know what
each rank has to tell, in numbers, texts and lists.)
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
A barrier makes ranks meet in time. It is needed before something that is not a message: before a
clock is read, or a file that another rank wrote. Before a collective it is of no use, since whoever
needs the data of others waits for them anyway.

## Who has what

The others move data:

- *Broadcast*: every rank gets a copy of what one rank has.
- *Scatter*: one rank deals its tensor out, a part for each rank.
- *Gather*: one rank collects a part from every rank, in rank order. It is scatter backwards.
- *All-gather*: every rank collects.
- *Reduce-scatter*: all tensors are added up, and each rank keeps one part of the sum.
- *All-to-all*: every rank deals out, and every rank collects. Read as a table of ranks and parts,
  the data is transposed.

**Predict.** Let part $p$ of rank $r$ be the number $(p + 1) \cdot 10^r$. Then every rank writes to
a decimal digit of its own, and a sum tells who is in it. With these numbers in `data[r][p]`, one
line defines each collective: what every rank holds at the end, in rank order. (The ranks form
groups of at most four, so that the picture stays small: it shows the first.)
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
**Build.** The calls have the names of the collectives. Broadcast and all-reduce overwrite the
tensor they are given, the others return a new one. To a gather or an all-gather, every rank brings
only the part with its own number; to a scatter, all but rank 0 bring nothing:
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
**Measure.** What every rank really held before and after, told by the ranks themselves:
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

# %% [markdown]
"""
The colour of a square is the rank whose number it is; in a sum, each digit is on the colour of
its own rank. Two identities can be read off: a reduce-scatter and then an all-gather make an
all-reduce, which is how chapter 02's ring works; and an all-to-all undoes itself:
"""

# %%
x = torch.arange(3 * n, device=comms.device) * (rank + 1)
total = x.clone()
comms.all_reduce(total)
assert torch.equal(comms.all_gather(comms.reduce_scatter(x)).flatten(), total)
assert torch.equal(comms.all_to_all(comms.all_to_all(x)), x)
comms.print("reduce-scatter, all-gather = all-reduce; all-to-all twice = no change")

# %% [markdown]
r"""
## What they are for

A training job needs several of them. Here is one, from its start to its last number.

**Broadcast: one model.** Each rank makes a model from a seed of its own. A broadcast replaces
every rank's parameters by rank 0's. `DDP` would do the same in its constructor; with
`verify_replicas` it only checks:
"""

# %%
torch.manual_seed(rank)
module = FullMLP(64, depth=4, outputs=10).to(comms.device, torch.float64)


def first_weights():
    return [f"{w:+.4f}" for w in comms.all_gather_data(module.layers[0].weight[0, 0].item())]


before = first_weights()
broadcast_parameters(module, comms)
rows = list(zip(range(n), before, first_weights(), strict=True))
comms.print("the first weight of each rank's model")
comms.print(table(rows, ["rank", "made", "after broadcast"]))
model = DDP(module, comms, verify_replicas=True)

# %% [markdown]
"""
**Scatter: data that one rank has.** Only rank 0 would need to read the file. The number of images
here is a prime, so it never divides: the first ranks get one image more.
"""

# %%
digits = load_digits(comms.device)
images, labels = (tensor[:359] for tensor in digits.test.tensors)  # "read" by rank 0 alone
images = images.double()
x = comms.scatter(images if rank == 0 else None)
y = comms.scatter(labels if rank == 0 else None)
sizes = comms.all_gather_data(len(x))
comms.print(f"{len(images)} images, dealt out as {sizes}")
assert sum(sizes) == len(images)

# %% [markdown]
"""
**All-reduce of a flag: stop together.** A rank looks at the loss on *its* images to decide
whether it has trained long enough. The ranks need not decide alike, and one that leaves its loop
alone leaves the others waiting. So each says 0 or 1, and the maximum counts: all stop as soon as
one wants to. (With the minimum, they stop as soon as all want to.)
"""

# %%
batches = ShardedBatches(digits.train, 96 - 96 % n, rank, n)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
wished = None
for epoch in range(1, 21):
    for a, b in batches.epoch(epoch):
        optimizer.zero_grad()
        cross_entropy(model(a.double()), b).backward()
        optimizer.step()
    with torch.no_grad():
        content = cross_entropy(module(x), y).item() < 0.17  # on its own images
    wished = epoch if content and wished is None else wished
    flag = torch.tensor([int(content)], device=comms.device)
    comms.all_reduce(flag, "max")
    if flag.item():
        break

# %%
stops = comms.all_gather_data([wished, epoch])
rows = [(r, "not yet" if w is None else w, e) for r, (w, e) in enumerate(stops)]
comms.print(table(rows, ["rank", "wants to stop after epoch", "stops after epoch"]))
assert len({stopped for _, stopped in stops}) == 1

# %% [markdown]
"""
**All-reduce of sums and counts: a metric.** Each rank has the losses of its own images, and which
of them were classified correctly: the *hits*. The mean of the ranks' means gives an image of a
smaller part a larger weight. The sums of all ranks, divided by the count of all ranks, are what
one device would have found:
"""


# %%
@torch.no_grad()
def losses_and_hits(x, y):
    """Two rows: of each image its loss, and 1 where the class is right."""
    output = module(x)
    return torch.stack(
        [cross_entropy(output, y, reduction="none"), (output.argmax(1) == y).double()]
    )


# %%
values = losses_and_hits(x, y)
means = values.mean(1)
comms.all_reduce_mean(means)
sums = torch.cat([values.sum(1), values.new_tensor([len(x)])])
comms.all_reduce(sums)
single = losses_and_hits(images, labels).mean(1)

# %%
rows = [("mean of means", means), ("sums and counts", sums[:2] / sums[2]), ("one device", single)]
rows = [(name, *both.tolist(), (both[0] - single[0]).abs().item()) for name, both in rows]
headers = ["", "loss", "accuracy", "loss off by"]
comms.print(table(rows, headers, floats=("", ".6f", ".6f", ".0e")))
assert rows[1][3] < 1e-12
assert n == 1 or rows[0][3] > 1e-9

# %% [markdown]
"""
**Gather: predictions, in the right order.** Gather joins parts in rank order. Scatter had cut the
images into blocks, so the predictions come back in the order of the images. PyTorch's
`DistributedSampler` does not cut blocks: rank r takes images r, r + n, r + 2n and so on. So that
all ranks have equally many, it takes some images twice. Joined in rank order, such predictions
belong to other images. They have to be dealt back, one from each rank in turn, and cut to length:
"""

# %%
strided = torch.tensor(list(DistributedSampler(images, n, rank, shuffle=False)))
with torch.no_grad():
    blocks = comms.gather(module(x).argmax(1))  # on rank 0
    everyone = comms.all_gather(module(images[strided.to(comms.device)]).argmax(1))
orders = {
    "blocks": blocks,
    "every n-th, rank by rank": everyone.flatten(),
    "every n-th, dealt back": everyone.T.flatten(),
}

# %%
found = {
    name: (predicted[: len(labels)] == labels).double().mean().item()
    for name, predicted in orders.items()
    if predicted is not None
}

# %%
comms.print(table(found.items(), ["predictions", "accuracy"], floats=".4f"))
assert all(abs(found[name] - single[1]) < 1e-12 for name in found if "rank by" not in name)
assert n == 1 or found["every n-th, rank by rank"] < 0.5

# %% [markdown]
"""
The second line is the accuracy of a good model whose predictions were shuffled. No error says so.
"""

# %% [markdown] index=["device mesh", "subgroup"]
"""
## Whom to ask: a mesh

So far one group was enough, and `comms` was at hand. Larger jobs arrange ranks in a grid, a *mesh*,
with a group along each row and each column. One dimension may be the GPUs of a machine and the
other the machines, or one the copies of a model and the other its parts. A rank then has several
numbers. {func}`microddp.get` takes a word and answers for one dimension of a mesh: `"ws"` is the
world size, `"rank"` the rank in that dimension, `"grank"` the rank in the whole job, `"lrank"` the
one on its machine, `"pg"` the process group. `register_mesh` says for which dimension, so that a
function deep inside a model need not be handed it:
"""

# %%
shape = (2, n // 2) if n > 2 and n % 2 == 0 else (1, n)
device_type = "cuda" if comms.backend == "nccl" else "cpu"
mesh = init_device_mesh(device_type, shape, mesh_dim_names=("across", "within"))
mine = [microddp.get("grank"), microddp.get("lrank")]
for name in mesh.mesh_dim_names:
    microddp.register_mesh(mesh[name])
    mine.append(f"{microddp.get('rank')} of {microddp.get('ws')}")
comms.print(f"a mesh of {shape[0]} x {shape[1]}" + ("; 2 x 2 takes four ranks" if n < 4 else ""))
comms.print(table(comms.all_gather_data(mine), ["grank", "lrank", *mesh.mesh_dim_names]))

# %% [markdown]
"""
Groups along two dimensions add up to all ranks. A sum within each row and then across the rows is
the sum over everybody. That pays where the links within a machine are faster than those between; on
hosts in a box all are alike. The second argument of `get` names a dimension, registered or not:
"""

# %%
total = torch.tensor([10.0**rank], dtype=torch.float64, device=comms.device)
whole = total.clone()
comms.all_reduce(whole)
for name in ("within", "across"):
    dist.all_reduce(total, group=microddp.get("pg", mesh[name]))
    comms.print(f"rank 0 after the sum {name}: {total.item():.0f}")
assert torch.equal(total, whole)
microddp.register_mesh(None)

# %% [markdown]
r"""
## What they cost

**Predict.** Let $S$ be the bytes of the largest tensor that a rank holds before or after.

- Broadcast is a tree from rank 0. Each round reaches twice as many ranks, so it takes
  $\lceil\log_2 n\rceil$ rounds of $S$. A barrier takes as many, with nothing to carry.
- Scatter and gather are $n-1$ messages of $S/n$ through rank 0's link.
- The other four are rings, or exchanges with one rank after the other: $n-1$ rounds of $S/n$, and
  for all-reduce twice as many.

`COST` holds three numbers for each: the rounds, and as shares of $S$ the bytes of a round and the
bytes that the busiest rank sends. As in chapter 02, ranks that only send can all be timed where
they have links of their own; elsewhere those without a core or GPU leave. `m` ranks stay:
"""

# %%
timed = comms.timed(computing=False)
m = timed.world_size
doublings = math.ceil(math.log2(m))
timed.print(f"{m} of {n} ranks stay")

# %%
COST = {
    "barrier": (doublings, 0, 0),
    "broadcast": (doublings, 1, doublings),
    "scatter": (m - 1, 1 / m, (m - 1) / m),
    "gather": (m - 1, 1 / m, 1 / m),
    "all-gather": (m - 1, 1 / m, (m - 1) / m),
    "reduce-scatter": (m - 1, 1 / m, (m - 1) / m),
    "all-to-all": (m - 1, 1 / m, (m - 1) / m),
    "all-reduce": (2 * (m - 1), 1 / m, 2 * (m - 1) / m),
}

# %% [markdown]
"""
**Measure.** First the bytes. gloo's messages travel over TCP, between two processes of one machine,
too. Linux counts what each connection has sent, and what it had to send again
(`tcpi_bytes_sent` and `tcpi_bytes_retrans` in the kernel's `linux/tcp.h`). The sum over a
process's connections tells what a collective really sent, whatever the backend does inside:
"""


# %%
def bytes_sent():
    """What this process has sent over each of its TCP connections."""
    counts = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # not TCP, or an old kernel
            connection = socket.socket(fileno=int(fd))
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                sent, sent_again = struct.unpack_from("QQ", info, 200)
                counts[fd] = sent - sent_again
            finally:
                connection.detach()  # it is not ours to close
    return counts


# %%
def sent_since(before):
    """Those to ranks that left may be closed by now: what they sent is in no difference."""
    return sum(count - before.get(fd, 0) for fd, count in bytes_sent().items())


# %%
def call_on(name, parts):
    """A call of a collective whose largest tensor has ``parts`` numbers for each rank."""
    x = brings(name, torch.ones(m * parts, device=comms.device), timed)
    if name == "reduce-scatter, ring":
        return partial(ring_reduce_scatter, x, timed)
    return timed.barrier if name == "barrier" else partial(collective, name, timed, x)


# %%
PART = 2**18  # numbers: 1 MiB
S = 4 * PART * m
COST["reduce-scatter, ring"] = COST["reduce-scatter"]  # chapter 02's
can_count = comms.backend == "gloo" and hasattr(socket, "TCP_INFO") and any(bytes_sent().values())

# %%
counted = {}
for name in COST if m > 1 and all(timed.all_gather_data(can_count)) else ():
    call = call_on(name, PART)
    timed.barrier()
    before = bytes_sent()
    call()
    timed.barrier()
    counted[name] = max(timed.all_gather_data(sent_since(before)))

# %%
rows = [(name, human_bytes(COST[name][2] * S), human_bytes(sent)) for name, sent in counted.items()]
if counted:
    timed.print(f"S = {human_bytes(S)}, {m} ranks: bytes of the rank that sends most")
    timed.print(table(rows, ["", "predicted", "counted"]))
else:
    timed.print("Bytes are counted for two ranks and more, on gloo, under Linux.")
for name, sent in counted.items():
    expected = COST["all-reduce" if name == "reduce-scatter" else name][2] * S
    assert abs(sent - expected) < 0.02 * S, (name, sent, expected)

# %% [markdown]
r"""
**Explain.** The few hundred bytes of the barrier, and of the one that ends the count, are messages
without content. All others send
what was predicted, except one: over gloo, a reduce-scatter sends what an all-reduce sends. PyTorch
makes it from all-reduces, after which every rank throws all parts but one away. The name of a
collective says who has what at the end, not what it costs to get there. The last line is the
first half of chapter 02's ring, which sends half of that.

Now the time. As in chapter 02, $\alpha$ comes from single exchanges, and so does
$\beta$ where the links' speed is not known:
"""

# %%
right, left = (timed.rank + 1) % m, (timed.rank - 1) % m
exchanges = {}
for nbytes in (2**i for i in range(10, 23, 2)):
    out, into = torch.zeros(2, nbytes // 4, device=comms.device).unbind()
    exchange = partial(timed.sendrecv, out, right, into, left)
    exchanges[nbytes] = exchange if m > 1 else partial(into.copy_, out)  # alone, one can only copy
single = {size: t.median for size, t in measure(exchanges, timed, repeat=31).items()}
known = timed.box.seconds_per_byte if timed.box else None
alpha, beta = fit_alpha_beta(list(single), list(single.values()), known)
timed.print(f"alpha {human_seconds(alpha)}, beta {beta * 1e9:.3f} ns/byte")

# %%
timings = {
    parts: measure({name: call_on(name, parts) for name in COST}, timed, repeat=9)
    for parts in (1, PART)
}

# %% tags=["plumbing"]
rows = {name: [name] for name in COST}
for parts, by_name in timings.items():
    for name, timing in by_name.items():
        rounds, share, _ = COST[name]
        predicted = rounds * (alpha + beta * share * 4 * m * parts)
        rows[name] += [human_seconds(predicted), human_seconds(timing.median)]
headers = [f"{human_bytes(4 * m * parts)}, {w}" for parts in timings for w in ("pred.", "meas.")]
timed.print(table(rows.values(), ["", *headers]))
for parts, by_name in timings.items():
    costs = {name: COST[name][0] * (alpha + beta * COST[name][1] * 4 * m * parts) for name in COST}
    del costs["barrier"]  # has no bytes
    quicker = sum(by_name[name].median < seconds for name, seconds in costs.items())
    timed.print(f"{human_bytes(4 * m * parts)}: {quicker} of the {len(costs)} with bytes took less")

# %% [markdown]
r"""
**Explain.** For small tensors the bytes do not count: what does is the start of each round. A round
inside a collective may start faster than an exchange that is called on its own, which is where
$\alpha$ comes from, or slower, with what PyTorch and gloo do around it. Scatter and gather also say
first what comes, because parts may differ in size, which doubles their messages. For large tensors
the bytes are what counts; a barrier has none, so its two times show the noise. Not in the model are
copies and additions, and messages that share a link. gloo starts all messages of a broadcast's root
at once: of four ranks, the one that passes a broadcast on has its data only after both of rank 0's
messages, which is three rounds' time, not two. It starts all of an all-to-all at once, too. Where
several senders meet at one receiver's link, they slow each other down: the direct way of chapter 02
took 2.8 times what a ring's bytes take when it sent that way, and 2.2 since it goes by rounds (16
MiB on four hosts at 1 Gbit/s, 2 cores of an AMD EPYC, November 2026). A reduce-scatter over gloo
takes about the time of the bytes that it really sends.

## What to take along

- A collective is defined by who has what before and after. What it sends depends on how the
  backend does it: count.
- For a metric, add up sums and counts. For predictions, know in which order the samples were dealt
  out. To stop, agree.
- Every rank must make the same calls in the same order with the same shapes. A rank that does not
  shows up as a time-out somewhere else, or as a wrong number (first appendix).
- Do not unpickle what a rank or a file sends, unless you would run its program.
"""

# %% [markdown] index=["time-out", "timeout"]
r"""
## Appendix: when it hangs

This appendix is about mistakes. Each is a few lines that many have written, and the ranks that
stayed run them all.
"""

# %% [markdown] index=["deadlock"]
r"""
## Where it breaks: only rank 0 enters

Collectives are paired by their order. Whoever enters one waits for those it receives from, in an
all-reduce for everybody, and may wait for those it sends to. If they do not come, it waits until
the time-out. A group in which a collective was given up is of no use afterwards, so `outcomes`
makes each mistake in a group of its own, with a time-out of one second. It returns how each rank
fared: its error, or "went on". (With NCCL the time-out ends the process, so there the mistakes are
not made.)
"""

# %%
rank, n = timed.rank, m
STUCK = n > 1 and timed.backend == "gloo"  # whether there is somebody to wait for


def outcomes(mistake, *args, debug="0"):
    """How each rank fares when all ranks call ``mistake(group, *args)``."""
    os.environ["MICRODDP_DEBUG"] = debug  # read when a group is made; the next section turns it on
    timed.barrier()  # the time-out counts while the group is made, too
    hasty, ending = timed.subgroup(range(n), timeout=1.0), "went on"
    os.environ["MICRODDP_DEBUG"] = "0"
    try:
        if timed.backend == "gloo":
            mistake(hasty, *args)
    except RuntimeError as error:
        without_folder = re.sub(r"\[\S*/", "[", str(error))
        ending = shorten(without_folder, 150, placeholder=" ...")
    endings = timed.all_gather_data(ending)
    hasty.close()
    return endings


# %%
def show(endings):
    for r, ending in enumerate(endings):
        timed.print(fill(f"[rank {r}] {ending}", 90, subsequent_indent=" " * 9))


# %% [markdown]
"""
The usual way in: only rank 0 prints a number, so only rank 0 averages it. Each mistake below is a
function that takes the ranks which depart from what the others do. With an empty list nobody does,
and the function is right. Here it takes the ranks that stay away:
"""


# %%
def log_loss(group, away):
    loss = torch.ones(1, device=timed.device)
    if rank not in away:
        group.all_reduce_mean(loss)
    group.print(f"loss {loss.item():.3f}")


endings = outcomes(log_loss, range(1, n))
show(endings)
assert [ending != "went on" for ending in endings] == [STUCK] + [False] * (n - 1)

# %% [markdown]
"""
Read the error for what it does not say. It names a wait, and neither the collective nor the ranks
that did not come. It is raised where the program is right to wait. The culprits went on. In a job
with the usual time-out of minutes they hang by now at their own next collective, somewhere else in
the program. So ask every rank where it is: `py-spy dump --pid` shows the stack of a running
process. Then look for the last collective that all of them passed.

The fix is to average on all ranks and to print on one:
"""

# %%
assert set(outcomes(log_loss, [])) == {"went on"}

# %% [markdown]
"""
## Where it breaks: another order, another shape

Rank 0 broadcasts a threshold and then sums up a loss; the others do it the other way round. All of
them enter a collective, but not the same one:
"""


# %%
def two_orders(group, odd):
    loss, threshold = torch.ones(2, 1, device=timed.device)
    calls = [lambda: group.all_reduce(loss), lambda: group.broadcast(threshold)]
    for call in reversed(calls) if rank in odd else calls:
        call()


endings = outcomes(two_orders, [0])
show(endings)
assert all((ending != "went on") == STUCK for ending in endings)

# %% [markdown]
"""
All of them wait, and that is the lucky case. Two calls of one kind and shape fit each other, and
add up what does not belong together. A loop over a `set` of names does that: Python hashes strings
differently in every process, so each may walk it in another order. A tensor of another shape may
fit as well. In the second function below, the last rank expects one number more than rank 0
broadcasts:
"""


# %%
def swapped_sums(group, odd):
    sums = {"loss": 0.5, "images": 100.0}
    for name in sorted(sums, reverse=rank in odd):
        total = torch.tensor([sums[name]], device=timed.device)
        group.all_reduce(total)
        sums[name] = total.item()
    group.print(f"0.5 and 100, summed over the ranks: {sums}")


# %%
def other_shape(group, odd):
    tensor = torch.full((4 if rank in odd else 3,), float(rank), device=timed.device)
    group.broadcast(tensor)
    received = timed.all_gather_data(tensor.tolist())
    group.print(f"rank 0 sent {received[0]}, the last rank has {received[-1]}")


# %%
MISTAKES = ((two_orders, [0]), (swapped_sums, [0]), (other_shape, [n - 1]))
for mistake, odd in MISTAKES[1:]:
    assert set(outcomes(mistake, odd)) == {"went on"}

# %% [markdown]
"""
No error, on any rank. Nor can you count on that: a tensor too *long* for its receiver ends the
process in gloo (`Received data size doesn't match expected size`, in its
[pair.cc](https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc)), and NCCL promises
nothing ("undefined behavior, including hangs, crashes, or data corruption", [NCCL's user
guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html)).

With `MICRODDP_DEBUG=1` in the environment, all ranks first tell each other what they are about to
do. On a difference all of them raise, at once, and name who is not with the most, or, where there
is no most, who differs from the first:
"""

# %%
for mistake, odd in (MISTAKES[0], MISTAKES[2]):
    endings = outcomes(mistake, odd, debug="1")
    show(endings[:1])
    assert all(("the ranks disagree" in ending) == STUCK for ending in endings)

# %% [markdown]
"""
Where no majority agrees, nobody can tell who is right. The comparison cannot
see swapped sums of one shape, for all ranks say the same. Nor can it name a rank that stays away:
it waits for that rank, too. PyTorch has such a comparison for its own calls,
`TORCH_DISTRIBUTED_DEBUG=DETAIL`.

The fix is one order and one shape by construction: a list instead of a set, and shapes that are
told before they are used.
"""

# %%
for mistake, _ in MISTAKES:
    assert set(outcomes(mistake, [])) == {"went on"}

# %% [markdown]
"""
## Where it breaks: evaluation through the wrapper

Training is done by all ranks, but one is enough to evaluate. Does the model know? The forward
pass of a `DDP` begins with a collective if the model has buffers: rank 0's are broadcast, as
chapter 06 showed. Here rank 0 evaluates between two training steps: through the wrapper or through
`.module`, which is the model inside it, and with or without gradients. In two of the four cases
all ranks meet at a barrier afterwards:
"""


# %%
def evaluation(group, wrap, through, gradients, barrier):
    model = wrap(SimpleCNN().to(timed.device), group)
    a, b = next(batches.epoch(0))
    for step in range(4):
        if step == 3 and rank == 0:
            with torch.set_grad_enabled(gradients):
                (model.module if through == "module" else model).eval()(images.float())
        if step == 3 and barrier:
            group.barrier()
        cross_entropy(model.train()(a), b).backward()


# %%
def torch_ddp(module, group):
    return TorchDDP(module, process_group=group.group)


_ = torch_ddp(nn.Linear(1, 1).to(timed.device), timed)  # imports longer than the time-out below

# %%
HANG = [("wrapper", True, False), ("wrapper", False, True)]
GO_ON = [("wrapper", False, False), ("module", True, True)]
rows = []
for case, wrap in itertools.product(HANG + GO_ON, (DDP, torch_ddp)):
    hangs = {ending != "went on" for ending in outcomes(evaluation, wrap, *case)}
    name = "microddp" if wrap is DDP else "torch"
    rows.append((*case, name, "hangs" if any(hangs) else "goes on"))
    assert hangs == {STUCK and case in HANG}
headers = ["rank 0 evaluates", "gradients", "barrier", "DDP", "the job"]
timed.print(table(rows, headers))

# %% [markdown]
"""
**Explain.** With gradients, rank 0 has broadcast its buffers for one forward more than the others,
and everybody's next collective meets the wrong one. Under `no_grad` and without a barrier nothing
hangs, by luck: after a forward without gradients the wrapper skips its next broadcast, because
nothing was trained in between. So rank 0 sends its buffers in the evaluation and not in the
training step, and the others receive them in the training step. The numbers of collectives happen
to agree. Put one between, such as the barrier, and the order does not.

The fix is the last case: evaluate through `.module`, which has none of the wrapper's collectives.
Or let all ranks evaluate, each a part, and add up sums and counts.

## Where it breaks: save, then barrier

Rank 0 saves, and the others wait until the file is there. Two lines, and one indentation:
"""

# %%
folder = tempfile.TemporaryDirectory()
path = Path(timed.all_gather_data(folder.name)[0], "model.pt")  # rank 0's


def save(group):
    if rank == 0:
        torch.save(module.state_dict(), path)
        group.barrier()


endings = outcomes(save)
show(endings)
assert [ending != "went on" for ending in endings] == [STUCK] + [False] * (n - 1)

# %% [markdown]
"""
The barrier belongs to all ranks, so it stands outside of the `if`. Then everybody may read
(on several machines, if they share the folder). A saved model is a *pickle*, a program that runs
when it is read; `weights_only=True` lets it make tensors, plain containers, and little else:
"""

# %%
if rank == 0:
    torch.save(module.state_dict(), path)
timed.barrier()
restored = FullMLP(64, depth=4, outputs=10).to(timed.device, torch.float64)
restored.load_state_dict(torch.load(path, weights_only=True, map_location=timed.device))
check_replicas(restored, timed)
timed.barrier()  # before rank 0 takes the folder away
folder.cleanup()
timed.print(f"{n} equal models from one file")

# %% [markdown]
"""
## Appendix: objects

Ranks have more to tell each other than tensors of one shape. `all_gather_data` takes plain data:
numbers, texts, lists, dictionaries. It sends them as JSON, in two all-gathers: first the lengths,
then the texts, padded to the longest. What JSON does not know, it changes or refuses: a key becomes
a text, a tuple a list.
"""

# %%
told = timed.all_gather_data({"rank": rank, 1: (2, 3), "note": "x" * rank})
timed.print(f"from the last rank: {told[-1]}")
assert [entry["rank"] for entry in told] == list(range(n))

# %% [markdown]
"""
PyTorch's `all_gather_object` takes *any* object, because it sends a pickle. A pickle is a program:
it names functions to call, and whoever reads it calls them. Below, the last rank sends an object
that asks to be rebuilt by calling `os.getpid`:
"""


# %%
class Surprise:
    def __reduce__(self):  # how pickle is to make this object again
        return os.getpid, ()


received = [None] * n
last = Surprise() if rank == n - 1 else "a text"
dist.all_gather_object(received, last, group=timed.group)
timed.print(f"rank 0 received {received[-1]}; its process is number {os.getpid()}")
assert received[-1] == os.getpid()

# %% [markdown]
r"""
No object arrived. Every rank ran a function that the sender chose, and got its own process's
number. It could as well have been `os.system`. Among the ranks of one job that is no loss: one user
runs them, who could have called it anyway. But a port can be reached by others, and a file may
come from anywhere. JSON has nothing to call.

## Exercises

**The lab.** Start and end a job with the right collectives, counted in bytes. {doc}`It is checked
</labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 07
```

1. Write `gather` with `all_to_all`, and count the bytes that each rank sends. Which of the two
   takes parts of unequal length?

   <details class="solution"><summary>Solution</summary>

   Every rank puts its part in the place of rank 0 and zeros in all others; rank 0 keeps what it
   gets:

   ```python
   def gather_by_all_to_all(part):
       parts = part.new_zeros(m, *part.shape)
       parts[0] = part
       result = timed.all_to_all(parts.flatten(0, 1))
       return result if timed.rank == 0 else None
   ```

   The zeros travel, too. With `bytes_sent` before and `sent_since` after both, each rank sends
   $m - 1$ parts, where with `gather` all but rank 0 send one part and rank 0 almost nothing.
   Unequal parts take `gather`: it first tells everybody the lengths. `all_to_all` cuts each tensor
   into $m$ equal parts, so ranks with unequal parts call it with different shapes, and gloo then
   ended the processes.

   </details>

2. Replace the maximum in the early stop by a vote of the majority. Which operation does it take?
   What does it do with two ranks?

   <details class="solution"><summary>Solution</summary>

   Add the flags up, and stop if more than half of the ranks want to:

   ```python
   comms.all_reduce(flag)  # the sum
   if 2 * flag.item() > n:
       break
   ```

   All ranks read the same sum, so all decide alike. More than half of two ranks is both, so with
   two the vote is the minimum.

   </details>

3. Let rank 1 sleep for two seconds before an all-reduce in a group with a time-out of one. What
   do the others see, and what does rank 1 see?

   <details class="solution"><summary>Solution</summary>

   After one second the others raise a time-out, as when rank 1 never comes: whoever waits cannot
   tell late from absent. Rank 1 comes after two, to a group that was given up. With gloo it reads
   `Connection closed by peer`, "typically caused by a remote worker crashing". But none has
   crashed: the rank that is late is told that the fault is another's. Of such errors, look for the
   one that was raised first, and for the rank that did not raise it. And a time-out has to be
   longer than the longest time by which a rank may rightly be late.

   </details>

4. Let rank 0 evaluate two batches through the wrapper instead of one. By how many collectives is it
   ahead, with gradients and without? Chapter 06's `collectives` counts them. To keep the count from
   hanging, let all ranks evaluate.

   <details class="solution"><summary>Solution</summary>

   With gradients by two: each forward broadcasts the buffers, in one message. Without gradients by
   one, for any number of batches: only the first forward after a training step broadcasts. The
   training step after it makes one collective fewer, and rank 0 is level again. That is why the job
   went on in the table, and why it would go on with two batches. PyTorch's wrapper makes twice as
   many: `SimpleCNN` has buffers of two dtypes, and there a broadcast carries one.

   </details>
"""

# %%
drawn.close()
comms.close()
