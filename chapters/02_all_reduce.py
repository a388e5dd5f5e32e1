# %% [markdown]
r"""
# 02. All-reduce from send and receive

How do n processes agree on a sum? Each one has a tensor, and each one should end with the sum of
all: an *all-reduce*. It is a *collective*, an operation that all processes call together. This
chapter builds three ways to do it from messages between two processes, counts what they send, and
times them against the all-reduce of the *backend*, the library that carries PyTorch's messages:
gloo between CPUs, NCCL between Nvidia GPUs.
"""

# %% tags=["imports"]
import functools
import itertools

import torch

import microddp
from microddp import figures
from microddp.allreduce import ALGORITHMS, all_reduce_cost
from microddp.findings import Prediction, compare, find, mark_least
from microddp.fitted import bus_bandwidth, fit_alpha_beta
from microddp.message_counter import MessageCounter
from microddp.report import human_bytes, human_seconds, table
from microddp.stage import known_all_reduces
from microddp.timing import Timing, measure

# %%
# sphinx_gallery_builds = "three all-reduces from send and receive, the ring among them"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
"""
## Send and receive

This file runs as a *job*: n processes run it, each from the first line on, and each has a number,
its *rank*, from 0 to n-1. The number of processes is the *world size*. A rank
can `send` a tensor to another rank, which must call `recv` with room for it. Two ranks that both
call `send` first may wait for each other for ever; `sendrecv` does both at once.

Here every rank sends its number to its right-hand neighbour, and receives one from the left. Only
rank 0 prints:
"""

# %%
right, left = (rank + 1) % n, (rank - 1) % n
mine, theirs = torch.tensor([rank], device=comms.device), torch.tensor([-1], device=comms.device)
if n > 1:
    comms.sendrecv(mine, right, theirs, left)
    comms.print(f"rank 0 of {n} heard from rank {theirs.item()}")
else:
    comms.print("One rank has nobody to talk to; torchrun --nproc-per-node=4 starts four.")

# %% [markdown]
r"""
## Naive: everything through rank 0

**Predict.** Rank 0 receives $n-1$ tensors of $S$ bytes, adds them up and sends $n-1$ tensors
back: $2(n-1)$ messages. A rank's *link* is its connection to the others. All messages pass through
rank 0's link, one after the other, so the time grows as $2(n-1)S$, however fast the other links
are.

**Build.** Rank 0 does one thing, all others another:
"""


# %%
def naive(tensor):
    if rank == 0:
        scratch = torch.empty_like(tensor)
        for peer in range(1, n):
            comms.recv(scratch, peer)
            tensor += scratch
        for peer in range(1, n):
            comms.send(tensor, peer)
    else:
        comms.send(tensor, 0)
        comms.recv(tensor, 0)


# %% [markdown]
r"""
## Direct: everyone to everyone

**Predict.** Nobody is in the middle: every rank sends its tensor to all others and adds up what
it gets. Messages that are on their way at the same time make a *round*. Here are $n(n-1)$ messages
in $n-1$ rounds, and every round uses all links. Each rank sends $(n-1)S$ bytes.

**Build.** In round $k$ a rank sends to the one $k$ places to its right. The tensors are added
only when all have arrived, in the order of the ranks. The reason comes below:
"""


# %%
def direct(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(n)]
    everyone[rank].copy_(tensor)
    for k in range(1, n):
        comms.sendrecv(tensor, (rank + k) % n, everyone[(rank - k) % n], (rank - k) % n)
    tensor.copy_(torch.stack(everyone).sum(0))


# %% [markdown] index=["ring", "ring all-reduce"]
r"""
## Ring: a chunk at a time

Both ways send whole tensors. The ring cuts the tensor into $n$ chunks, and every link carries
another chunk. In the first half, *reduce-scatter*, a rank receives a chunk from its left, adds its
own values, and in the next round passes it on. After $n-1$ rounds each rank holds one chunk of the
finished sum. In the second half, *all-gather*, the finished chunks go round once more.

**Predict.** There are $2(n-1)$ rounds of $S/n$ bytes, so a rank sends $2\,\frac{n-1}{n}\,S$
bytes: never more than $2S$, however many ranks there are. The price is the number of rounds,
which grows with $n$.

**Build.** The numbers of chunks, like those of ranks, start again at 0 after $n-1$:
"""


# %%
def ring(tensor):
    chunks = tensor.tensor_split(n)
    scratch = torch.empty_like(chunks[0])
    for s in range(n - 1):  # reduce-scatter
        outgoing, incoming = chunks[(rank - 1 - s) % n], chunks[(rank - 2 - s) % n]
        arriving = scratch[: incoming.numel()]
        comms.sendrecv(outgoing, right, arriving, left)
        incoming += arriving
    for s in range(n - 1):  # all-gather
        comms.sendrecv(chunks[(rank - s) % n], right, chunks[(rank - 1 - s) % n], left)


# %% [markdown]
"""
**Measure.** First: are they right? They must agree with the backend's all-reduce. The values are
whole numbers, whose sums are exact in any order, so the comparison can be exact. The number of
values is odd, so that an even number of ranks has chunks that differ in size. A
{class}`~microddp.message_counter.MessageCounter` records every message:
"""

# %%
BUILT = {"naive": naive, "direct": direct, "ring": ring}
size = 1003

# %%
sent = {}
for name, all_reduce in BUILT.items():
    tensor = torch.arange(size, dtype=torch.float32, device=comms.device) * (rank + 1)
    expected = tensor.clone()
    comms.all_reduce(expected)
    with MessageCounter(comms) as counter:
        all_reduce(tensor)
    sent[name] = counter.gather()
    assert torch.equal(tensor, expected), name

# %% [markdown]
"""
Then: do they send what was predicted?
"""

# %%
rows = []
for name, by_rank in sent.items():
    cost = all_reduce_cost(name, n, size * 4)
    messages = sum(len(messages) for messages in by_rank)
    most = max(sum(message.nbytes for message in messages) for messages in by_rank)
    rows.append((name, messages, cost.messages, most, round(cost.most_sent), cost.rounds))
    assert messages == cost.messages
    assert cost.most_sent <= most <= cost.most_sent + 2 * n * 4  # chunks are whole elements

# %% tags=["plumbing"]
headers = ["", "messages", "predicted", "most bytes a rank sent", "predicted", "rounds predicted"]
comms.print(f"{n} ranks reduce {human_bytes(size * 4)}")
comms.print(table(rows, headers))

# %% [markdown]
"""
The same messages by sender and receiver. The row of a rank is what it sends, the column what it
receives:
"""


# %%
def matrix(by_rank):
    links = [[0] * n for _ in range(n)]
    for message in itertools.chain.from_iterable(by_rank):
        links[message.src][message.dst] += message.nbytes
    return links


figures.traffic(
    {name: matrix(by_rank) for name, by_rank in sent.items()},
    title="Naive fills a row and a column, direct all but the diagonal, the ring one in each row",
)

# %% [markdown]
"""
And the ring as it ran. Each panel shows what the ranks hold before a round: a number says how many
ranks' values a chunk contains, a frame marks the chunk that its rank sends next, to the rank below:
"""

# %%
if n > 1:
    figures.ring_rounds(
        sent["ring"],
        size * 4,
        title="After n-1 rounds each rank holds one finished chunk; then they go round",
    )

# %% [markdown]
"""
The same messages as they travel, beside those of naive and direct. **Try:** with eight ranks, let
a step be the same time instead of a round, and see which one ends first. Then go from two ranks to
eight: which counts grow without bound, and which stays below 2S?
"""

# %%
figures.all_reduces(sent, size, itemsize=4)

# %% [markdown]
"""
## Where it breaks: a ring that sends whole tensors

A ring that passes on the whole tensor in each of $n-1$ rounds also ends with the right sum on every
rank. Count its bytes:
"""


# %%
def ring_of_whole_tensors(tensor):
    passing, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(n - 1):
        comms.sendrecv(passing, right, arriving, left)
        tensor += arriving
        passing, arriving = arriving, passing


# %%
tensor = torch.ones(size, device=comms.device)
with MessageCounter(comms) as counter:
    ring_of_whole_tensors(tensor)
whole = sum(message.nbytes for message in counter.messages)
chunked = sum(message.nbytes for message in sent["ring"][rank])
comms.print(f"rank 0 sends {whole} bytes in whole tensors, {chunked} in chunks")
assert torch.equal(tensor, torch.full_like(tensor, n))
assert whole == (n - 1) * size * 4

# %% [markdown] index=["rounding", "reproducibility"]
r"""
It sends $(n-1)S$ bytes, as the direct way does. That is as much as the ring of chunks for two
ranks, and $n/2$ times as much for $n$. It is a ring in shape only.

## Where it breaks: each rank adds in its own order

The whole-tensor ring has a second fault. The sum of floating-point numbers depends on the order,
and here each rank starts with its own tensor and adds the others in another order. A direct
exchange that adds tensors as they arrive has the same fault:
"""

# %%
torch.manual_seed(rank)
values = torch.randn(10_000, device=comms.device)
three = {"whole-tensor ring": ring_of_whole_tensors, "ring": ring, "direct": direct}
for name, all_reduce in three.items():
    result = values.clone()
    all_reduce(result)
    results = comms.all_gather(result)
    differ = int((results != results[0]).any(0).sum())
    most = (results - results[0]).abs().max()
    comms.print(f"{name}: {differ} of {len(values)} sums differ between ranks, at most {most:.0e}")
    torch.testing.assert_close(results, results[:1].expand_as(results))
    assert name == "whole-tensor ring" or differ == 0

# %% [markdown]
r"""
The differences are in the last bits, and the usual tolerances let them pass. But replicas that
start equal and add different averages are no longer replicas. Two ranks are always safe, since a +
b = b + a; with three or more, the order must be the same everywhere. In the chunked ring each chunk
is added up along one path and then copied.

## From a chapter to the package

The ring of the package, `microddp`, is {func}`~microddp.allreduce.ring.ring_all_reduce`:
the one above for any operation and any dtype. It cuts large chunks into pieces, so that what
arrives is still in the cache when it is added. microddp also has a fourth way, *recursive
doubling*: exchange whole tensors with the rank 1 away, then 2 away, then 4, so that $\log_2 n$
rounds are enough if n is a power of two. All four must agree with the backend's all-reduce:
"""

# %%
WAYS = ALGORITHMS
for op in ("sum", "max", "min", "product"):
    for name, all_reduce in WAYS.items():
        tensor = torch.arange(size, dtype=torch.float64, device=comms.device) % 3 + rank
        expected = tensor.clone()
        comms.all_reduce(expected, op)
        all_reduce(tensor, comms, op)
        assert torch.equal(tensor, expected), (name, op)

comms.print(f"{', '.join(WAYS)}: equal to the backend's for sum, max, min and product")

# %% [markdown] index=["latency", "bandwidth", "alpha", "beta"]
r"""
## What a message costs

The simplest useful model of a message has two numbers: $\alpha$ seconds to start one, whatever its
size, and $\beta$ seconds for each byte. A message of $m$ bytes then takes

$$ t(m) = \alpha + \beta m . $$

On the website this chapter runs on eight *hosts in a box*: one machine, in which each rank has a
network of its own, with a *shaped* link: the kernel lets so many bits through a second and, but for
a first few after a pause, no more.
The ranks share the machine's cores. Where what a rank waits for is its link, as with large
messages, that is fair. Where ranks compute, it is not. ({doc}`/install` says what such hosts need.
Without them, only as many ranks are timed as there are cores or GPUs; the others leave at
`timed()`.)
"""

# %%
timed = comms.timed(computing=False)
timed.print(f"{timed.world_size} of {n} ranks stay")
if timed.world_size == 1:
    timed.print("One rank has nobody to send to: what it exchanges below, it copies.")

# %% [markdown]
"""
This section and the next one measure four of them, so that fewer share the cores. The others wait
for the result:
"""

# %%
counts = sorted({count for count in (2, 4, 8, timed.world_size) if count <= timed.world_size})
groups = {count: timed.subgroup(range(count)) for count in counts}
four = min(4, timed.world_size)


def measure_among(count, make_calls, **options):
    """Time what ``make_calls(group)`` returns on the first ranks; all ranks learn it."""
    group, seconds = groups[count], {}
    if group:
        calls = make_calls(group)
        seconds = {name: t.seconds for name, t in measure(calls, group, **options).items()}
    told = timed.all_gather_data(seconds)[0]  # rank 0 is in all groups
    return {name: Timing(tuple(times)) for name, times in told.items()}


# %% [markdown]
"""
Neighbours exchange messages of six sizes, from 2 KiB to 2 MiB. So each link carries a message in
each direction at once. The largest also goes one way only, from ranks with even numbers to those
with odd ones:
"""


# %%
def exchange(group, outgoing, incoming, one_way=False):
    neighbour, other = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if group.world_size == 1:
        incoming.copy_(outgoing)
    elif not one_way:
        group.sendrecv(outgoing, neighbour, incoming, other)
    elif group.rank % 2:
        group.recv(incoming, other)
    elif neighbour:
        group.send(outgoing, neighbour)


# %%
def exchanges(group):
    """A call for each size in bytes."""
    there_and_back = torch.zeros(2, 2**19, device=comms.device)
    both = functools.partial(exchange, group)
    calls = {
        str(2**k): functools.partial(both, *there_and_back[:, : 2**k // 4])
        for k in range(11, 22, 2)
    }
    return calls | {"one way": functools.partial(both, *there_and_back, one_way=True)}


times = measure_among(four, exchanges, repeat=11)
one_way = times.pop("one way")
messages = {int(size): timing for size, timing in times.items()}
message_seconds = {nbytes: timing.median for nbytes, timing in messages.items()}

# %% [markdown]
"""
The line that fits these times with the least *relative* error gives alpha and beta. Where the
links' speed is known, beta is taken from it, here and in what follows, and alpha is what small
messages take beyond their bytes. (A shaped link lets the first 68 KiB after a pause through at
once. So a message may take less than its bytes would, by as much as 68 KiB take.)
"""

# %% tags=["plumbing"]
alpha, beta = fit_alpha_beta(list(message_seconds), list(message_seconds.values()))
if timed.box:
    known = timed.box.seconds_per_byte
    alpha, beta = fit_alpha_beta(*zip(*message_seconds.items(), strict=True), beta=known)
rows = [
    (human_bytes(m), human_seconds(t), human_seconds(alpha + beta * m))
    for m, t in message_seconds.items()
]
timed.print(table(rows, ["message", "measured", "alpha + beta m"]))
off = {m: t / (alpha + beta * m) - 1 for m, t in message_seconds.items()}
most, worst = max(message_seconds), max(off, key=lambda m: abs(off[m]))
direction = {m: f"{abs(x):.0%} {'more' if x > 0 else 'less'}" for m, x in off.items()}
said = (
    f"With {beta * 1e9:.2f} ns a byte, alpha comes out at {human_seconds(alpha)}. A message of "
    f"{human_bytes(most)} took {direction[most]} than this model says; farthest off is "
    f"{human_bytes(worst)}, {direction[worst]}."
)
find(timed, "alpha-beta", large=(worst == most, said), small=(worst < most, said))
ways = compare(one_way, messages[most])
said = ways.say(f"A message of {human_bytes(most)} one way", "two, one each way at once")
said = f"{said}; the model says {human_seconds(alpha + beta * most)} for both."
find(timed, "one-way", **ways.sides(said))

# %% [markdown]
r"""
## Time by size

**Predict.** An algorithm of $r$ rounds, each of $m$ bytes, should take $r(\alpha + \beta m)$. For
small tensors $\alpha$ decides, so fewer rounds should win. For large ones $\beta$ decides: the
ring's rounds are shortest, and it should win by a factor that grows with the number of ranks.

**Measure.** The book's four ways and the backend's take turns:
"""


# %%
def reductions(nbytes, names, group):
    """An all-reduce in each of these ways."""
    x = torch.zeros(nbytes // 4, device=comms.device)
    ways = {"backend": lambda x, group: group.all_reduce(x), **WAYS}
    return {name: functools.partial(ways[name], x, group) for name in names}


# %%
timings, names = {}, ("backend", *WAYS)
for nbytes in (2**k for k in range(13, 22, 2)):
    calls = functools.partial(reductions, nbytes, names)
    for name, t in measure_among(four, calls, warmup=1, repeat=4).items():
        timings.setdefault(name, {})[nbytes] = t

# %% tags=["plumbing"]
models = {
    name: lambda m, name=name: all_reduce_cost(name, four, m).seconds(alpha, beta) for name in WAYS
}
against = compare(timings["ring"][nbytes], timings["backend"][nbytes])
figures.times_by_size(
    {name: timings[name] for name in ("backend", "ring", "naive")},
    models=models,
    title=f"{four} ranks, {human_bytes(nbytes)}: the ring is {against.than('the backend')}",
)

# %% tags=["plumbing"]
rows = []
for nbytes, backend in timings["backend"].items():
    ratios = [compare(timings[name][nbytes], backend).ratio for name in WAYS]
    marked = mark_least([f"{ratio:.2f}" for ratio in ratios], [-ratio for ratio in ratios])
    bus = bus_bandwidth(nbytes, timings["ring"][nbytes].median, four) / 1e9
    rows.append((human_bytes(nbytes), backend, *marked, f"{bus:.2g}"))
timed.print("our four: times as fast as the backend; * the fastest of them")
timed.print(table(rows, ["size", "backend", *WAYS, "ring GB/s"]))
rows = [
    (human_bytes(m), *(models[name](m) / timings[name][m].median for name in WAYS))
    for m in timings["backend"]
]
timed.print("times as fast as predicted (predicted / measured)")
timed.print(table(rows, ["size", *WAYS], floats=("", *[".2f"] * len(WAYS))))

# %% tags=["plumbing"]
small, large = min(timings["ring"]), max(timings["ring"])
for nbytes, when in ((small, "small"), (large, "large")):
    ours = {name: timings[name][nbytes] for name in WAYS}
    beside = {name: compare(ours[name], timings["backend"][nbytes]).ratio for name in WAYS}
    least = max(beside, key=beside.get)
    rivals = [name for name in WAYS if not compare(ours[least], ours[name]).faster]
    against = compare(ours[least], timings["backend"][nbytes])
    said = (
        f"At {human_bytes(nbytes)} the fastest of ours is {least}, with its "
        f"{all_reduce_cost(least, four, nbytes).rounds} rounds"
        + (f", not told apart from {' and '.join(set(rivals) - {least})}" if rivals[1:] else "")
        + f": {against.than('the backend')}."
    )
    find(timed, f"fastest-{when}", ring=(least == "ring", said), other=(least != "ring", said))

# %% tags=["plumbing"]
rounds = {name: all_reduce_cost(name, four, small).rounds for name in WAYS}
pairs = [
    (a, b)
    for a, b in itertools.permutations(WAYS, 2)
    if rounds[a] < rounds[b] and not compare(timings[a][small], timings[b][small]).faster
]
failed = ", ".join(f"{a} ({rounds[a]} rounds) with {b} ({rounds[b]})" for a, b in pairs)
said = f"At {human_bytes(small)} the way with fewer rounds"
equal = compare(timings["naive"][small], timings["ring"][small])
beside = equal.say("Naive", "the ring")
beside = f"{beside}, where naive has {rounds['naive']} rounds and the ring {rounds['ring']}."
if four > 1:
    find(
        timed,
        "rounds",
        all=(not pairs, f"{said} is the faster one in every pair of ours. {beside}"),
        some=(bool(pairs), f"{said} is not the faster one in these pairs: {failed}. {beside}"),
    )

# %% tags=["plumbing"]
missed = []
for m in timings["backend"]:
    chosen = min(WAYS, key=lambda name, m=m: models[name](m))
    won = min(WAYS, key=lambda name, m=m: timings[name][m].median)
    if compare(timings[won][m], timings[chosen][m]).faster:
        missed.append(f"at {human_bytes(m)} the model chooses {chosen}, the run {won}")
hits, of = len(timings["backend"]) - len(missed), len(timings["backend"])
said = f"At {hits} of {of} sizes the model chooses the fastest of our four, or one not told apart"
find(
    timed,
    "model-chooses",
    right=(not missed, f"{said}."),
    wrong=(bool(missed), f"{said}; {', '.join(missed)}."),
)

# %% tags=["plumbing"]
ring_gain = compare(timings["ring"][large], timings["naive"][large])
with_starts = models["naive"](large) / models["ring"](large) if four > 1 else 1.0
said = (
    f"At {human_bytes(large)} the ring is {ring_gain.than('naive')}. From the bytes through the "
    f"busiest link, {four} was expected, and {with_starts:.2f} with alphas."
)
find(timed, "ring", gain=(ring_gain.faster, said), none=(not ring_gain.faster, said))
if four > 1:
    in_a_row = Prediction(rounds["direct"] * message_seconds[large], timings["direct"][large])
    said = (
        f"The {rounds['direct']} rounds of the direct way, as long as such messages took above, "
        f"make {human_seconds(in_a_row.predicted)}. It took {in_a_row}."
    )
    said += "" if in_a_row.held else " This page does not show why."
    find(timed, "direct", **in_a_row.sides(said))

# %% [markdown]
r"""
*GB/s* is the ring's *bus bandwidth*, $\frac{S}{t}\cdot\frac{2(n-1)}{n}$: what each link must have
carried in a second. It can be compared between algorithms and numbers of ranks. (The definition is
[nccl-tests'](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).)

**Explain.** The model takes the rounds as if each began when the one before has ended. In the naive
way neither the messages to rank 0 need wait for each other, nor those back: only their bytes pass
one after the other, as predicted, and not their alphas. And of a small tensor most passes in the
links' first 68 KiB, at once: the rows of small tensors say little of these links, and of which way
is best on links that let nothing through at once. In a row of rounds alpha may be another, too. How
much of a row's error each of these is, this page does not show. gloo's own all-reduce is a ring [at
every size](https://github.com/pytorch/gloo/blob/main/gloo/allreduce.cc), of $2(n-1)$ rounds, each
in pieces.

Naive's bytes pass through rank 0's link one way, then the other: $2(n-1)S$. The ring sends and
receives at once, each way $\frac{2(n-1)}{n}S$, which is $n$ times less. Between processes of one
machine without such links (*loopback*) the cores copy all messages. There the sum of all bytes
counts, and that is the same for both.

## Time by ranks

**Predict.** Naive's time should grow as $n-1$. The ring's bytes grow as $2(n-1)/n$: less and less,
and never to twice those of two ranks. On top come the alphas of its rounds.

**Measure.** 2 MiB, among the first 2 and 8 ranks, where there are so many; the times of 4 are those
of above:
"""

# %%
calls = functools.partial(reductions, large, ("naive", "ring"))
counts = [count for count in counts if count > 1]
by_count = [
    {name: timings[name][large] for name in ("naive", "ring")}
    if count == four
    else measure_among(count, calls, warmup=1, repeat=3)
    for count in counts
]

# %% tags=["plumbing"]
if counts:  # with one rank there is none
    curves = {}
    for name in ("naive", "ring"):
        predicted = [all_reduce_cost(name, c, large).seconds(alpha, beta) for c in counts]
        curves[name] = counts, [times[name].median * 1e3 for times in by_count]
        curves[f"{name}, predicted"] = counts, [s * 1e3 for s in predicted]
        off = {c: s / t[name].median for c, t, s in zip(counts, by_count, predicted, strict=True)}
        worst = max(off, key=lambda c, off=off: abs(off[c] - 1))
        spread = dict.fromkeys(f"{f(off.values()):.2f}" for f in (min, max))  # one, if alike
        said = (
            f"{'The naive all-reduce' if name == 'naive' else 'The ring'} was "
            f"{' to '.join(spread)} times as fast as predicted"
        )
        said += f" (farthest off: {worst} ranks)." if len(spread) > 1 else "."
        find(
            timed,
            f"by-ranks-{name}",
            few=(worst == counts[0], said),
            many=(worst != counts[0], said),
        )

# %% tags=["plumbing"]
if counts:
    gain = compare(by_count[-1]["ring"], by_count[-1]["naive"])
    figures.lines(
        curves,
        title=f"{counts[-1]} ranks: the ring is {gain.than('naive')}",
        xlabel="ranks",
        ylabel="time of an all-reduce of 2 MiB, ms",
    )

# %% [markdown]
r"""
**Explain.** In the naive way rank 0's link carries everything; in the ring each link carries its
share.

:::{admonition} On GPUs
NCCL's rings send what these do. It also has trees, for small tensors; two protocols with less to
wait for at a message's start, which carry fewer bytes a second; and it can let switches of the
network add up what passes through them. It chooses by an estimate of its own, in which what passes
between nodes counts once a node, not once a device. By that estimate
({mod}`microddp.performance.nccl`), with the latencies and bandwidths that
`microddp/plan/library.toml` has sources for, an all-reduce takes:
:::
"""

# %% tags=["plumbing"]
SOME = (1 << 16, 25 << 20, 1 << 30)
rows = [(words, *map(human_seconds, row)) for words, row in known_all_reduces(SOME).items()]
timed.print(table(rows, ["worked out, not measured", *map(human_bytes, SOME)]))

# %% [markdown]
r"""
## What to take along

- A ring all-reduce is a reduce-scatter followed by an all-gather. With three or more ranks, its
  busiest rank sends less than that of any other way here. Recursive doubling and the direct way
  need fewer rounds.
- The sum must be formed in one order on all ranks.
"""

# %% [markdown]
r"""
## Exercises

**The lab.** Write the ring. {doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 02
```

1. In the alpha-beta model, from which size $S$ on is the ring faster than the direct exchange?
   Write it with $\alpha$, $\beta$ and $n$, for 8 ranks and for 2.

   <details class="solution"><summary>Solution</summary>

   The ring has $2(n-1)$ rounds of $S/n$ bytes, the direct exchange has $n-1$ rounds of $S$ bytes.
   They take equally long where

   $$ 2(n-1)\left(\alpha + \beta \frac{S}{n}\right) = (n-1)(\alpha + \beta S), \quad
   \text{so} \quad S = \frac{n}{n-2} \cdot \frac{\alpha}{\beta} . $$

   For the 4 ranks of the table that is $2\,\alpha/\beta$, for 8 it is $\frac{4}{3}\,\alpha/\beta$.
   (A message of $\alpha/\beta$ bytes is one whose bytes take as long as its start.) Put in the
   alpha and beta of your run. Where your table has a crossing at another size, the model is off
   there. For 2 ranks there is no such size: both ways send the same bytes, and the ring needs one
   round more.

   </details>

2. Draw recursive doubling for 4 ranks. How many rounds does it take, and how many bytes does each
   rank send? Compare both with the ring of 4.

   <details class="solution"><summary>Solution</summary>

   Two rounds, where the ring has six. In the first, 0 and 1 exchange whole tensors, and so do 2 and
   3; each then holds the sum of a pair. In the second, 0 exchanges with 2, and 1 with 3; each then
   holds the sum of both pairs. That makes 8 messages of $S$ bytes, 2 from each rank, so a rank
   sends $2S$.

   The ring sends 24 messages of $S/4$, 6 from each rank, so a rank sends $\frac{3}{2}S$. A
   `MessageCounter` around `ALGORITHMS["doubling"]` and `ALGORITHMS["ring"]` counts the same in a
   job of 4 ranks, if it stands before `timed()`.

   </details>

"""

# %%
comms.close()
