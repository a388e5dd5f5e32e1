# %% [markdown]
r"""
# 12. One slow link, one slow rank

What if one link, or one rank, is slow? Up to here all were alike. In a real cluster a cable is bad,
two machines share an uplink, one GPU is older than the others. Since every rank waits for all in
each step, one of them can slow down all. This chapter predicts by how much, takes bytes and work
from what is slow, and tells a slow link from a slow rank.
"""

# %% tags=["imports"]
import functools
import itertools
import time

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import microddp
from microddp import figures
from microddp.allreduce import ALGORITHMS, ring_all_reduce
from microddp.comms import MessageCounter
from microddp.data import ShardedBatches, load_digits
from microddp.findings import find
from microddp.hosts import relink
from microddp.model import FullMLP
from microddp.performance import find_stragglers, straggler_report
from microddp.report import MIB, human_seconds, table
from microddp.shared import parts_by_speed, weighted_all_reduce, weighted_time
from microddp.step import compute_gradients, take_step
from microddp.strategies import STRATEGIES
from microddp.timing import NOT_RECORDED, Timeline, measure

# %%
# sphinx_gallery_builds = "an all-reduce for unequal links, and shards for unequal ranks"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
senders = comms.timed(computing=False)
n, box = senders.world_size, senders.box
if box is None or n < 4:
    comms.print("For the links of this chapter: python -m microddp.hosts --hosts 4 -- chapters/...")

# %% [markdown]
r"""
## The busiest link

A message from one host to another crosses the sender's link outwards and the receiver's inwards. If
hosts share an uplink, as those of a rack do, it also crosses that, unless it stays in the rack.

**Predict.** In whatever order an algorithm sends its messages, every link must carry those that
cross it. So it takes at least

$$ T \ge \max_{\text{link}} \frac{\text{bytes that cross it}}{\text{its speed}}, $$

the time of the *busiest* link. For equal links that gives the ring's $\frac{2(n-1)}{n} \frac{S}{B}$
of chapter 02. It also tells what happens when links differ, without a new formula for each
algorithm. What it does not know is phases: a link that waits for another one carries nothing
meanwhile.

**Build.** A counter tells who sent how much to whom:
"""


# %%
def crossed(src, dst):
    """The links on the way, in their directions, with their bytes a second."""
    yield ("out of", src), box.links[src].bytes_per_second
    yield ("into", dst), box.links[dst].bytes_per_second
    for uplink in box.uplinks:
        if (src in uplink.hosts) != (dst in uplink.hosts):
            way = "out of" if src in uplink.hosts else "into"
            yield (way, uplink.hosts), uplink.link.bytes_per_second


# %%
def busiest(call):
    """The link that needs longest to carry what a call sends, and its seconds."""
    with MessageCounter(senders) as counter:
        call()
    seconds = {("nothing", ""): 0.0}
    for message in itertools.chain(*counter.gather()):
        for link, speed in crossed(message.src, message.dst):
            seconds[link] = seconds.get(link, 0.0) + message.nbytes / speed
    return max(seconds.items(), key=lambda item: item[1])


# %% [markdown]
r"""
It sees the messages of this book's algorithms, not the backend's. One more way knows which hosts
are in one *rack*: here 0 and 1, and 2 and 3. The two in a rack add up a half of the tensor each,
then each meets the one that has the same half in the other rack, and at last the halves are
exchanged in the rack:
"""


# %%
def by_racks(tensor, group):
    """All-reduce of four ranks in two racks."""
    halves, neighbour, across = tensor.chunk(2), group.rank ^ 1, group.rank ^ 2
    mine, theirs = halves[group.rank % 2], halves[neighbour % 2]
    got = torch.empty_like(mine)
    group.sendrecv(theirs, neighbour, got, neighbour)
    mine += got
    group.sendrecv(mine, across, got, across)
    mine += got
    group.sendrecv(mine, neighbour, theirs, neighbour)


# %% [markdown]
r"""
**Measure.** Four networks: all links alike; host 2's link at a tenth; host 0's link at a tenth; and
an uplink at a fifth, which hosts 2 and 3 share. A fifth, in which all that host 2 sends is 5 ms
late, takes a kernel that can delay packets:
"""

# %%
tensor = torch.zeros(MIB // 4, device=senders.device)  # sums of which stay finite
WAYS = {name: functools.partial(ALGORITHMS[name], tensor, senders) for name in ("naive", "ring")}
if n == 4:
    WAYS["ring 0 2 1 3"] = functools.partial(ring_all_reduce, tensor, senders, order=[0, 2, 1, 3])
    WAYS["by racks"] = functools.partial(by_racks, tensor, senders)
WAYS["backend"] = functools.partial(senders.all_reduce, tensor)
NETWORKS = {
    "alike": [("1gbit",)],
    "host 2 slow": [("100mbit", 2)],
    "host 0 slow": [("1gbit",), ("100mbit", 0)],
    "2, 3 share": [("1gbit",), ("200mbit", None, [2, 3])],
    "host 2 late": [("1gbit",), ("1gbit+5ms", 2)],
}


# %%
def compare(ways):
    """The busiest link of each way, and the seconds that it takes."""
    links = {name: busiest(call) for name, call in ways.items() if name != "backend"}
    times = measure(ways, senders, repeat=3, warmup=1)
    return {name: (links.get(name), timing.median) for name, timing in times.items()}


# %%
results = {}
for network, changes in NETWORKS.items() if box and n == 4 else ():
    try:
        for change in changes:
            relink(senders, *change)
    except RuntimeError as error:
        if "netem" not in str(error):
            raise
        continue
    box = senders.box
    results[network] = compare(WAYS)


# %% tags=["plumbing"]
rows = []
for network, found in results.items():
    for name, (link, measured) in found.items():
        cells = ("", "", human_seconds(measured), "")
        if link:
            (way, who), least = link
            cells = (f"{way} {who}", human_seconds(least), cells[2], f"{measured / least:.2f}")
        rows.append((network, name, *cells))
headers = ["links", "way", "busiest link", "its time", "measured", "ratio"]
senders.print(table(rows, headers) if rows else "links of known speed: none here")

# %% tags=["plumbing"]
if results:
    took = {network: {k: t for k, (_, t) in found.items()} for network, found in results.items()}
    shared = took["2, 3 share"]
    bars = {
        f"{network}: {k}": {"busiest link": link[1], "more than that": max(0.0, t - link[1])}
        for network in ("alike", "2, 3 share")
        for k, (link, t) in results[network].items()
        if link
    }
    in_order, other, racks = (shared[k] for k in ("ring", "ring 0 2 1 3", "by racks"))
    figures.stacked_bars(
        bars,
        title=f"Two racks: the ring takes {other / in_order:.1f} times as long in another order, "
        f"by racks {racks / in_order:.1f}",
        xlabel="an all-reduce of 1 MiB",
    )
    for name in ("ring", "backend"):
        assert took["host 2 slow"][name] > 3 * took["alike"][name], "all wait for one link"
    assert took["host 0 slow"]["naive"] > 1.5 * took["host 2 slow"]["naive"]
    assert other > in_order

# %% tags=["plumbing"]
late = results.get("host 2 late", {})
later = late["ring"][1] - results["alike"]["ring"][1] if late else 0.0
find(
    senders,
    "late",
    measured=(
        bool(late),
        f"With host 2's packets 5 ms late, a ring takes {human_seconds(later)} longer: as long as "
        f"{later / 5e-3:.0f} of its messages, one after the other.",
    ),
    left_out=(not late, "Left out: delay, which takes hosts in a box and a kernel with netem."),
)

# %% [markdown]
r"""
**Explain.** The ring sends as much over every link, so it runs at the speed of the slowest,
wherever that is. gloo's own all-reduce is a ring, too.
Naive takes about twice the time of its busiest link, because it has two phases: rank 0 first only
receives, then only sends; and it takes the others one by one, so a slow link also waits for the
fast ones. It depends on *where* the slow link is. At rank 0 all messages cross it, at rank 2 one
each way.

Where two racks are joined by a slow uplink, the *order* of the ring decides. In the order 0 1 2 3
it crosses the uplink once each way, as every other link. In the order 0 2 1 3 each message leaves
the rack or enters it, so the uplink carries twice as much. `by_racks` sends the least across, two
halves each way, and loses a part of that again: its three phases wait for each other, and in two of
them the uplink is idle. So number the ranks rack by rack: `torchrun` keeps a machine's ranks
together, and the order of machines is yours to give. NCCL finds out which links there are in a
machine, and joins machines in the order of their ranks: it [does not ask the network between
them](https://github.com/NVIDIA/nccl/issues/1340).

## Bytes taken from a slow link

**Predict.** How little can a slow host do with? It must send what it has, $S$ bytes, and receive
the sum, $S$ bytes. The ring makes it carry $2(n-1)/n \cdot S$ each way, since it also adds up a
part for others and passes on what is not its own.

Let every rank *own* a part of the tensor, owner $r$ of $c_r$ bytes. All send him their values of
that part; he adds them up, in rank order, and sends the sum to all. Then rank $r$ sends the others'
parts once, $S - c_r$, and his own $n - 1$ times: $S + (n-2)\,c_r$ in all, and he receives as much.
With equal parts that is the ring's number. With $c_r = 0$ it is $S$, the least there is. So with
more than two ranks, give each link what it can carry in the same time $T$:

$$ c_r = \max\left(0,\ \frac{T B_r - S}{n - 2}\right), \qquad \sum_r c_r = S. $$

A link that is too slow even for $S$ gets no part, and then it sets the time. So the least time is

$$ \max\left(\frac{S}{\min_r B_r},\ \frac{2(n-1)\,S}{\sum_r B_r}\right): $$

the slowest link carries $S$, and all links together what all ranks send.

**Build.**
"""


# %%
def by_owners(tensor, group, counts):
    """All-reduce in which rank r adds up `counts[r]` elements of a flat tensor."""
    rank, n = group.rank, group.world_size
    parts = torch.split(tensor, counts)
    values = [parts[rank].clone() for _ in range(n)]  # of my part, from every rank
    for k in range(1, n):
        dst, src = (rank + k) % n, (rank - k) % n
        group.sendrecv(parts[dst], dst, values[src], src)
    parts[rank].copy_(functools.reduce(torch.add, values))  # in rank order
    for k in range(1, n):
        dst, src = (rank + k) % n, (rank - k) % n
        group.sendrecv(parts[rank], dst, parts[src], src)


# %% [markdown]
r"""
{func}`~microddp.shared.weighted.parts_by_speed` solves for the parts, and
{func}`~microddp.shared.weighted.weighted_all_reduce` is the hardened version: it sends to all at
once, and in columns, so that first sums come in while later values still go out. All must give what
the backend does:
"""

# %%
tensor = torch.zeros(4 * MIB // 4, device=senders.device)
SPEEDS = [1.0, 1.0, 0.1, 1.0][:n] + [1.0] * (n - 4)
counts = parts_by_speed(tensor.numel(), SPEEDS)
given = torch.randint(-9, 9, tensor.shape, device=tensor.device).float()  # whose sums are exact
expected, *sums = (given.clone() for _ in range(4 if n == 4 else 3))
senders.all_reduce(expected)
by_owners(sums[0], senders, counts)
weighted_all_reduce(sums[1], senders, speeds=SPEEDS)
if n == 4:
    by_racks(sums[2], senders)
assert all(torch.equal(each, expected) for each in sums)
senders.print("parts in MiB:", ", ".join(f"{4 * count / MIB:.2f}" for count in counts))

# %% [markdown]
r"""
**Measure.** Host 2's link at the others' speed, and at less and less of it:
"""

# %%
MBITS = (1000, 500, 250, 100) if box and n == 4 else ()
curves = {"ring": [], "by owners": [], "weighted": []}
least = {"ring": [], "weighted": []}
for mbit in MBITS:
    relink(senders, "1gbit")
    relink(senders, f"{mbit}mbit", host=2)
    box = senders.box
    speeds = [link.bytes_per_second for link in box.links]
    counts = parts_by_speed(tensor.numel(), speeds)
    ways = {
        "ring": functools.partial(ring_all_reduce, tensor, senders),
        "by owners": functools.partial(by_owners, tensor, senders, counts),
        "weighted": functools.partial(weighted_all_reduce, tensor, senders, speeds=speeds),
    }
    for name, timing in measure(ways, senders, repeat=3, warmup=1).items():
        curves[name].append(timing.median)
    least["ring"].append(2 * (n - 1) / n * tensor.nbytes / min(speeds))
    least["weighted"].append(weighted_time(tensor.nbytes, speeds))

# %% tags=["plumbing"]
if MBITS:
    gains, expected = (
        [ring / weighted for ring, weighted in zip(of["ring"], of["weighted"], strict=True)]
        for of in (curves, least)
    )
    rows = [
        (f"{mbit} Mbit/s", *(human_seconds(times[i]) for times in curves.values()), gain, predicted)
        for i, (mbit, gain, predicted) in enumerate(zip(MBITS, gains, expected, strict=True))
    ]
    headers = ["host 2", *curves, "ring / weighted", "predicted"]
    senders.print(table(rows, headers, floats=["", "", "", "", ".2f", ".2f"]))
    drawn = curves | {"weighted, bound": least["weighted"]}
    figures.lines(
        {name: ([1, 2, 4, 10], [1e3 * t for t in times]) for name, times in drawn.items()},
        title=f"At a tenth of the speed, the ring takes {gains[-1]:.2f} times as long as weighted",
        xlabel="how many times slower host 2's link is than the others",
        ylabel="ms",
        log="x",
    )
    relink(senders, "1gbit")
    assert gains[-1] > 1
    assert curves["by owners"][-1] > curves["weighted"][-1]

# %% [markdown] index=["straggler", "slow rank", "slow link"]
r"""
**Explain.** With equal links there is nothing to shift: both send the same bytes. Below some speed
(exercise 2) the slow link carries the tensor once each way and nothing else, and then nothing but
compression or fewer meetings (chapters 10 and 11) makes that shorter. By the bounds no more than
$2(n-1)/n$ can be gained on the ring: a factor of 1.5 for four hosts, 2 for many. A measured ratio
is larger where the ring misses its own bound by more.

`by_owners` gains none of it. Host 2, which owns nothing, only sends in the first loop and only
receives in the second. So its link is used one way at a time, for $2S/B_2$ instead of the ring's
$1.5\,S/B_2$.

A job has to know its speeds first. They can be measured, before the training:
{func}`~microddp.performance.link_speed.probe_links` sends messages around and takes the time. But
is it a link that is slow?

## Slow rank or slow link?

A step takes longer than it should. Rank 0 looks at its own clock: it waits in collectives. That is
all it can see. The cause may be a rank that computes slowly, for which all wait, or a link, over
which bytes come slowly.

**Predict.** The two differ in *when ranks arrive*. A collective cannot begin before the last rank
is there. What passes until then is waiting for ranks, what passes from then on is waiting for the
transfer:

$$ \text{wait} = \underbrace{\max_r a_r - a_{\text{me}}}_{\text{for ranks}} +
\underbrace{\text{end} - \max_r a_r}_{\text{for transfers}}, $$

with $a_r$ the moment at which rank $r$ launches it. Nobody can tell alone: it takes the clocks of
all ranks, and these have to agree, to within much less than a step. (They do on one machine;
{class}`~microddp.timing.timeline.Timeline` begins on all after a barrier.)

**Build.** By hand, for the collectives of a timeline:
"""


# %%
def waits(spans, rank):
    """Seconds in which a rank's collectives waited for ranks, and for transfers."""
    calls = [
        sorted((s.start, s.end) for s in spans if s.lane == "communication" and s.rank == r)
        for r in range(n)
    ]
    for_ranks = for_transfers = 0.0
    for together in zip(*calls, strict=True):
        start, end = together[rank]
        all_there = min(max(start for start, _ in together), end)
        for_ranks += all_there - start
        for_transfers += end - all_there
    return for_ranks, for_transfers


# %% [markdown]
r"""
**Measure.** Four scenes of eight steps each. In the second, rank 1 sleeps for 30 ms in each step.
In the third, host 2's link is at a quarter of its speed. In the fourth, both:
"""

# %%
NAP, COUNT = 0.03, 8
torch.manual_seed(0)
model = FullMLP(256, depth=4, inputs=64, outputs=10).to(senders.device)
digits = load_digits(senders.device)
batch = tuple(tensor[:16] for tensor in digits.train.tensors)
strategy = STRATEGIES["naive"](model, senders)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


# %%
def run(count, sleeper=None, share=None):
    timeline = Timeline(senders)
    strategy.record(timeline)
    for _ in range(count):
        if senders.rank == sleeper:
            time.sleep(NAP)
        take_step(strategy, cross_entropy, optimizer, batch, share=share)
    strategy.record(NOT_RECORDED)
    return timeline.gather()


# %%
SCENES = {"nothing": (None, None), "rank 1 sleeps": (1, None)}
if box and n > 2:
    SCENES |= {"host 2's link": (None, 2), "both": (1, 2)}
reports, mine = {}, {}
run(3)
for scene, (sleeper, host) in SCENES.items() if n > 1 else ():
    if host is not None:
        relink(senders, "250mbit", host=host)
    spans = run(COUNT, sleeper)
    mine[scene] = [1e3 * seconds / COUNT for seconds in waits(spans, rank=0)]
    reports[scene] = straggler_report(spans, senders, strategy.sent_bytes())
    if host is not None:
        relink(senders, "1gbit")

# %% tags=["plumbing"]
rows = [
    (scene, sum(mine[scene]), *mine[scene], report.rank, report.link)
    for scene, report in reports.items()
]
headers = ["planted", "rank 0 waits, ms a step", "for ranks", "for transfers"]
senders.print(table(rows, [*headers, "named: rank", "link of"], floats=["", *[".1f"] * 3, "", ""]))
for scene, report in reports.items():
    named = zip(SCENES[scene], (report.rank, report.link), strict=True)
    assert all(planted in (None, found) for planted, found in named), f"{scene}: {report}"

# %% [markdown]
r"""
**Explain.** "Waits" alone tells a slow rank from a slow link as little as a thermometer tells one
illness from another. Split at the last arrival, it does: the sleep adds to the waits for ranks, the
slow link mostly to those for transfers. Mostly, because who is let go late comes late to the next
collective. And each of the eight messages has a part that does not depend on its bytes, so a link
at a quarter of the speed does not take four times as long.

microddp's {func}`~microddp.performance.stragglers.straggler_report` has to be right where nothing
was planted, too, so it asks for more. In each collective somebody is last without being to blame.
So a rank is named only if it works 15 % longer than the others in three steps of four, and if
without it the step would have been shorter by 4 % or more. And which link is slow, no collective
can tell, for all wait for it. So messages are sent from rank to rank, after the steps. `python -m
microddp.train --report` prints what it says; of the last scene:
"""

# %%
reports.get("both", next(reversed(reports.values()), None))

# %% tags=["plumbing"]
if "both" in reports:
    bars = {
        f"{scene}, rank {r}": parts
        for scene in ("rank 1 sleeps", "host 2's link")
        for r, parts in enumerate(reports[scene].bars.values())
    }
    figures.stacked_bars(
        bars, title="A slow rank: the others wait for it. A slow link: all wait", xlabel="a step"
    )

# %% [markdown] index=["heterogeneous"]
r"""
In the upper bars, the rank that does not wait for others is the one that others wait for. In the
lower ones there is no such rank.

What makes a rank slow? A GPU that is hot and clocks down, another process on the host, a loader
that does not keep up, longer samples, a garbage collection (chapter 07). What makes a link slow? A
bad cable or port that sends again what was lost, another job's messages, half the lanes of a PCIe
slot. It is best to repair or replace either. Until then, it can be given less to do.

## Less work for a slow rank

**Predict.** Let rank $r$ compute $v_r$ samples a second, and give it $b_r$ of a batch of $b$. A
step takes as long as its slowest, $\max_r b_r / v_r$. With equal shards that is $b / (n \min_r
v_r)$. It is least if all are done together, with $b_r$ in proportion to $v_r$:

$$ T = \frac{b}{\sum_r v_r}, \qquad
\text{gain} = \frac{\sum_r v_r}{n \min_r v_r}. $$

With two ranks, one of them at a third of the other's speed, the gain is $\frac{4/3}{2/3} = 2$.

But what is the average then? Each rank's loss is the mean over *its* samples, and the mean of the
ranks' gradients counts each rank alike. A sample on a rank with few then counts for more than one
on a rank with many. What one rank would compute on the whole batch is the mean over *samples*:

$$ g = \sum_r \frac{b_r}{b}\, g_r = \frac1n \sum_r \frac{b_r}{b/n}\, g_r. $$

So the all-reduce stays what it is, and each rank multiplies its loss by its number of samples over
that of an equal share.

**Build.** This needs devices of known speed, as it needed links of known speed before. Here they
are made of sleep: a rank sleeps 1 ms for each sample, and rank 1 sleeps 3 ms. (So a core idles
while its GPU computes.) What is learned is real.
"""

# %%
BATCH, SLOW = 96 - 96 % n, 1 if n > 1 else 0
A_SAMPLE = 3e-3 if senders.rank == SLOW else 1e-3  # seconds


# %%
def build():
    """The same model on every rank, on a device of the rank's speed."""
    torch.manual_seed(0)
    model = FullMLP(64, depth=3, inputs=64, outputs=10).to(senders.device)
    model.register_forward_pre_hook(lambda _, inputs: time.sleep(A_SAMPLE * len(inputs[0])))
    return model


# %%
def sizes_by_speed(batch, speeds):
    """Samples for each rank, in proportion to its speed."""
    ends = [round(batch * speed / sum(speeds)) for speed in itertools.accumulate(speeds)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


# %%
def shard(sizes):
    """This rank's shard of the first batch."""
    return next(ShardedBatches(digits.train, BATCH, senders.rank, n, sizes=sizes).epoch(0))


# %% [markdown]
r"""
How fast a rank is, it can say itself. (One forward will do here, where the sleep is. A job would
time whole steps, without the waits.)
"""

# %%
equal, model = [BATCH // n] * n, build()
start = time.perf_counter()
model(shard(equal)[0])
speed = torch.tensor([BATCH // n / (time.perf_counter() - start)], device=senders.device)
speeds = senders.all_gather(speed).flatten().tolist()
by_speed = sizes_by_speed(BATCH, speeds)
senders.print("samples a second:", [round(speed) for speed in speeds], "shards:", by_speed)

# %% [markdown]
r"""
Now the gradient of all ranks together, beside that of one process on the whole batch:
"""


# %%
def weighted_loss(outputs, targets):
    return cross_entropy(outputs, targets) * len(targets) / (BATCH / n)


def averaged(sizes, loss_fn):
    strategy = STRATEGIES["naive"](build(), senders)
    compute_gradients(strategy, loss_fn, shard(sizes))
    return parameters_to_vector(p.grad for p in strategy.module.parameters())


# %%
alone = build()
x, y = next(ShardedBatches(digits.train, BATCH, 0, 1).epoch(0))
cross_entropy(alone(x), y).backward()
whole = parameters_to_vector(p.grad for p in alone.parameters())
for name, sizes, loss_fn in (
    ("equal shards", equal, cross_entropy),
    ("by speed", by_speed, weighted_loss),
    ("by speed, not weighted", by_speed, cross_entropy),
):
    off = ((averaged(sizes, loss_fn) - whole).norm() / whole.norm()).item()
    senders.print(f"{name}: {off:.1e} of the gradient's norm from that of the whole batch")
    assert off < 1e-5 or name == "by speed, not weighted"

# %% [markdown]
r"""
Weighted, unequal shards give the gradient of the whole batch, but for rounding. microddp's
{func}`~microddp.step.take_step` does it if it is passed `share`, the samples of an equal shard,
which {class}`~microddp.data.ShardedBatches` knows. If it is left out, nothing is scaled.

**Measure.**
"""

# %%
steps = {}
for name, sizes in (("equal", equal), ("by speed", by_speed)):
    strategy = STRATEGIES["naive"](build(), senders)
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1)
    batch = shard(sizes)
    run(3)
    steps[name] = find_stragglers(run(COUNT, share=BATCH / n), n)
least = {"equal": max(equal) / min(speeds), "by speed": BATCH / sum(speeds)}
rows = [(name, 1e3 * least[name], 1e3 * report.step, report.rank) for name, report in steps.items()]
headers = ["shards", "computing, predicted, ms", "a step, ms", "named: rank"]
senders.print(table(rows, headers, floats=["", ".1f", ".1f", ""]))
gain = steps["equal"].step / steps["by speed"].step
senders.print(f"gain: {least['equal'] / least['by speed']:.1f} predicted, {gain:.1f} measured")

# %% tags=["plumbing"]
figures.stacked_bars(
    {f"{k}, rank {r}": b for k, v in steps.items() for r, b in enumerate(v.bars.values())},
    title=f"Shards by speed: a step in 1/{gain:.1f} of the time",
    xlabel="a step",
)
assert n == 1 or gain > 1.2

# %% [markdown]
r"""
**Explain.** Hardly anybody waits for the slow rank any more. A step is longer than predicted by
what a rank does besides: the messages, as the figure shows, backward, and the optimizer. These cost
both steps as much, so the gain is less than predicted.

All this rests on speeds that stay as they are. Measured once, they are right until the GPU cools
down; measured often, they follow noise. Nor is it free: a rank with more samples needs more memory
for them, and batch normalisation sees batches of different size on each. Where ranks differ by a
few per cent, equal shards lose these few per cent, and nothing else.

## Where it breaks: a mean of means

The third line above, shards by speed and a plain mean, raised no exception, and its gradient is
another one: that of a batch in which some samples count more than others. **Predict.** A sample of
rank $r$ has the weight $\frac{1}{n b_r}$ instead of $\frac1b$:
"""

# %%
rows = [(f"rank {r}", size, BATCH / (n * size)) for r, size in enumerate(by_speed)]
senders.print(table(rows, ["", "samples", "each counts"], floats=["", "", ".2f"]))

# %% [markdown]
r"""
If samples are dealt at random, that is no bias, and only some more noise. If rank 1 has what others
do not, the long sentences, or the patients of one hospital, the model gets a preference that nobody
asked for. It takes no slow rank: the last batch of an epoch and batches counted in tokens are
unequal as well, and chapter 06 has ranks whose inputs end early.

## What to take along

- A collective takes at least what its busiest link needs for its bytes. The ring's is its slowest
  link, so one link at a tenth makes it about ten times as long.
- If two racks are joined by a slow link, what crosses it sets the time: number the ranks rack by
  rack.
- A slow link must carry the tensor once each way. The rest can be left to others.
- Slow rank or slow link: compare the clocks of all ranks, and split a wait at the last arrival.
- Unequal shards need a mean over samples, not over ranks.

## Exercises

1. There are only two hosts, and the link of one is slow. How many bytes can be taken from it?

   <details class="solution"><summary>Solution</summary>

   None. Each has to send its $S$ bytes and to receive the sum. The ring's $2(n-1)/n \cdot S$ is $S$
   for two, and `parts_by_speed` gives a half to each. One link's speed is also the other's: what
   one sends the other receives.

   </details>

2. Four hosts, one link at a share $x$ of the others' speed. Below which $x$ is it the slow link
   that sets the time of the weighted all-reduce, and which ratio to the ring is there at most?

   <details class="solution"><summary>Solution</summary>

   The slow link needs $S / (xB)$, all links together $2(n-1)S / ((n-1+x)B)$. They are equal at $x =
   (n-1)/(2n-3)$: for four hosts at 0.6. The ring needs $2(n-1)/n \cdot S/(xB)$, so from there on
   down the ratio of the bounds is $2(n-1)/n = 1.5$: the column "predicted" above.

   </details>

3. Let rank 1 sleep in every third step only, and take the report of that alone. Whom does it name?

   <details class="solution"><summary>Solution</summary>

   Nobody, and it says so: "Rank 1 alone holds the others up for 30% of the time, but not steadily:
   for 0% of the median step" (on the machine this was tried on, November 2026). A rank is named for
   what it does in three steps of four. One that is slow at times asks for another search: what does
   it do then? A checkpoint, a garbage collection, a slow file.

   </details>
"""

# %%
comms.close()
