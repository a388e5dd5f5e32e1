# %% [markdown]
r"""
# 12. One slow link, one slow rank

What if one link, or one rank, is slow? You care because all others wait for it in every step, and
the usual timers do not say for whom. This chapter predicts what a slow link costs, takes bytes from
it, finds a slow rank that DDP hides, tells rank from link, and counts false alarms.
"""

# %% tags=["imports"]
import math
import platform
import statistics
import time
from functools import partial

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.findings import Prediction, compare, find, in_words
from microddp.hosts import relink
from microddp.model import FullMLP
from microddp.performance import find_stragglers, probe_links
from microddp.program import Layer, Work
from microddp.report import MIB, human_seconds, table
from microddp.shared import parts_by_speed, weighted_all_reduce, weighted_time
from microddp.stage import (
    PausingOptimizer,
    Stage,
    cluster,
    pausing_batch,
    pausing_loss,
    pausing_model,
    set_stage,
)
from microddp.step import compute_gradients, take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timeline, measure, seconds_now

# %%
# sphinx_gallery_builds = "an all-reduce for unequal links, and a search for the slow rank"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())
known = comms.box is not None and len(comms.box.links) == n == 4
if not known:
    comms.print("Left out here: links of other speeds, which take four hosts in a box.")

# %% [markdown]
r"""
## The busiest link

A message crosses its sender's link outwards and its receiver's inwards. If it leaves a rack whose
hosts share an *uplink*, it crosses that, too.

**Predict.** Every link has to carry all messages that cross it. So an all-reduce takes at least

$$ T \ge \max_{\text{link}} \frac{\text{bytes that cross it}}{\text{its speed}}, $$

the time of its *busiest* link. For a ring on equal links that is the $\frac{2(n-1)}{n} \frac{S}{B}$
of chapter 02.

**Measure.** A ring of four hosts on three networks, which `relink` makes: all links alike; host 2's
at a tenth; and hosts 2 and 3 behind an uplink at a fifth, as a second rack. In the order 0 1 2 3
one of the ring's four messages leaves that rack and one enters it, so the uplink carries as much as
a host's link; in the order 0 2 1 3 twice as much. (Ratios are medians of the rounds' ratios.)
"""

# %%
NETWORKS = {  # arguments of relink, the slowest link's bytes a second, and how often it is crossed
    "all alike": (("1gbit",), 1e9 / 8, (1, 1)),
    "host 2 slow": (("100mbit", 2), 1e8 / 8, (1, 1)),
    "2 and 3 share": (("200mbit", None, [2, 3]), 2e8 / 8, (1, 2)),
}
tensor, least, took = torch.zeros(MIB // 4, device=comms.device), {}, {}
for network, (change, speed, times) in NETWORKS.items() if known else ():
    relink(comms, "1gbit")
    relink(comms, *change)
    orders = {f"ring {order}": order for order in ([0, 1, 2, 3], [0, 2, 1, 3])}
    calls = {k: partial(ring_all_reduce, tensor, comms, order=v) for k, v in orders.items()}
    took[network] = measure(calls, comms, repeat=3, warmup=1)
    bounds = [2 * (n - 1) / n * tensor.nbytes * crossed / speed for crossed in times]
    least[network] = dict(zip(calls, bounds, strict=True))

# %% tags=["plumbing"]
rows = [
    (network, name, human_seconds(least[network][name]), in_words(timing))
    for network, timings in took.items()
    for name, timing in timings.items()
]
headers = ["links", "all-reduce of 1 MiB", "its busiest link", "measured (quartiles)"]
comms.print(table(rows, headers) if rows else "no table without links of known speed")

# %% tags=["plumbing"]
if known:
    in_order, other = calls
    ring = Prediction(least["host 2 slow"][in_order], took["host 2 slow"][in_order])
    said = (
        f"With host 2's link at a tenth, the ring takes {ring}; in the other order, which has the "
        f"same bound, {in_words(took['host 2 slow'][other])}."
    )
    find(comms, "slow-link", **ring.sides(said))
    shared = took["2 and 3 share"]
    order = compare(shared[in_order], shared[other])
    more = [1e3 * (shared[k].median - least["2 and 3 share"][k]) for k in calls]
    said = (
        f"Behind a shared uplink the ring rack by rack is {order.than('in the other order')}. The "
        f"bounds differ by a factor of 2. Rack by rack took {more[0]:.0f} ms more than its bound, "
        f"the other order {more[1]:.0f} ms."
    )
    find(comms, "ring-order", **order.sides(said))

# %% [markdown]
r"""
**Explain.** A ring sends as much over every host's link, so the slowest sets its least time. A
shared uplink counts as often as the ring crosses it, so number the ranks rack by rack. `torchrun`
keeps a machine's together. With `--node-rank` the order of machines is yours; where they meet on
their own, by `torchrun`'s `c10d` rendezvous, it is that of their names as text, `node10` before
`node2` ([torch
2.13](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)).

## Bytes taken from a slow link

**Predict.** A slow host has to send its $S$ bytes, and to receive the sum, $S$ bytes. The ring
makes it carry $2(n-1)/n \cdot S$ each way, because it also adds up a part for the others.

Let rank $r$ *own* $c_r$ bytes of the tensor: all ranks send it their values of that part, and it
sends the sum to all. So it sends $S - c_r$ of the others' parts, and its own $n - 1$ times: $S +
(n-2)\,c_r$ in all, and it receives as much. Choose the parts so that all links need the same time;
a rank whose link is too slow even for $S$ owns nothing. Then the bound is

$$ \max\left(\frac{S}{\min_r B_r},\ \frac{2(n-1)\,S}{\sum_r B_r}\right). $$

The bounds' ratio is at most $2(n-1)/n$: 1.5 for four hosts, 2 for many.

**Build.** If first all values are sent, and then all sums, a host that owns nothing first only
sends and then only receives: $2S/B$, longer than the ring. So cut the tensor into *slices*. While
the values of one slice go to their owners, the sums of the slice before come back, and each message
carries both. With $k$ slices there are $k + 1$ rounds, which take the slow link $\frac{k+1}{k}
S/B$:
"""


# %%
def weighted(tensor, group, counts, slices=8):
    """All-reduce in which rank r adds up `counts[r]` elements of a flat tensor."""
    rank, n, none = group.rank, group.world_size, tensor[:0]
    parts = [(none, *part.tensor_split(slices), none) for part in tensor.split(counts)]
    mine = parts[rank]
    for j in range(1, slices + 2):
        values = [mine[j]]
        for k in range(1, n):
            dst, src = (rank + k) % n, (rank - k) % n
            message = torch.cat([parts[dst][j], mine[j - 1]])  # a value for dst, a sum of mine
            got = tensor.new_empty(len(mine[j]) + len(parts[src][j - 1]))
            group.sendrecv(message, dst, got, src)
            values.append(got[: len(mine[j])])
            parts[src][j - 1].copy_(got[len(mine[j]) :])
        mine[j].copy_(sum(values))


# %% [markdown]
r"""
{func}`~microddp.shared.weighted.parts_by_speed` works out the parts. This and microddp's own
{func}`~microddp.shared.weighted.weighted_all_reduce` must give what the backend does:
"""

# %%
given = torch.randint(-9, 9, (MIB // 2,), device=comms.device).float()  # sums of these are exact
SPEEDS = [1.0, 1.0, 0.1, 1.0, *[1.0] * n][:n]
counts = parts_by_speed(len(given), SPEEDS)
sums = [given.clone() for _ in range(3)]
weighted(sums[0], comms, counts)
weighted_all_reduce(sums[1], comms, speeds=SPEEDS)
comms.all_reduce(sums[2])
assert all(torch.equal(each, sums[2]) for each in sums)
comms.print("parts in MiB:", ", ".join(f"{4 * count / MIB:.2f}" for count in counts))

# %% [markdown]
r"""
**Measure.** Host 2's link at the others' speed, and at less and less of it:
"""

# %%
MBITS = (1000, 600, 400, 100) if known else ()
tensor, by_speed, bounds = torch.zeros_like(given), {}, {"ring, bound": [], "weighted, bound": []}
for mbit in MBITS:
    relink(comms, "1gbit")
    relink(comms, f"{mbit}mbit", host=2)
    speeds = [link.bytes_per_second for link in comms.box.links]
    counts = parts_by_speed(len(tensor), speeds)
    bounds["ring, bound"].append(2 * (n - 1) / n * tensor.nbytes / min(speeds))
    bounds["weighted, bound"].append(weighted_time(tensor.nbytes, speeds))
    calls = {
        "ring": partial(ring_all_reduce, tensor, comms),
        "one slice": partial(weighted, tensor, comms, counts, 1),
        "8 slices": partial(weighted, tensor, comms, counts),
    }
    by_speed[mbit] = measure(calls, comms, repeat=4, warmup=1)
if known:
    relink(comms, "1gbit")

# %% tags=["plumbing"]
if known:
    rows = [
        (
            f"{mbit} Mbit/s",
            *map(human_seconds, both),
            *(human_seconds(timing.median) for timing in timings.values()),
            compare(timings["8 slices"], timings["ring"]).than("the ring"),
        )
        for (mbit, timings), *both in zip(by_speed.items(), *bounds.values(), strict=True)
    ]
    headers = ["host 2", *bounds, "ring", "one slice", "8 slices", "8 slices are"]
    comms.print(table(rows, headers))

# %% tags=["plumbing"]
if known:
    slowest = by_speed[100]
    gain = compare(slowest["8 slices"], slowest["ring"])
    one = compare(slowest["one slice"], slowest["ring"])
    pays = sum(compare(t["8 slices"], t["ring"]).faster for t in by_speed.values())
    least_ring, least_slices = bounds["ring, bound"][-1], bounds["weighted, bound"][-1] * 9 / 8
    over = [slowest["ring"].median / least_ring - 1, slowest["8 slices"].median / least_slices - 1]
    said = (
        f"At a tenth of the speed 8 slices are {gain.than('the ring')}; in their 9 rounds of an "
        f"eighth the bounds give {least_ring / least_slices:.2f}. Beside its bound the ring takes "
        f"{over[0]:+.0%} (with 1 MiB, above, {ring.off:+.0%}), and 8 slices {over[1]:+.0%} beside "
        f"theirs. One slice is {one.than('the ring')}; in 2 rounds, 0.75. 8 slices are faster than "
        f"the ring at {pays} of {len(by_speed)} speeds."
    )
    find(comms, "slices", **gain.sides(said))

# %% tags=["plumbing"]
if known:
    curves = bounds | {
        name: [timings[name].median for timings in by_speed.values()] for name in slowest
    }
    figures.lines(
        {k: ([1000 / mbit for mbit in MBITS], [1e3 * t for t in v]) for k, v in curves.items()},
        title=f"At a tenth of the speed 8 slices are {gain.than('the ring')}",
        xlabel="how many times slower host 2's link is than the others",
        ylabel="an all-reduce of 2 MiB, ms",
    )

# %% [markdown] index=["straggler", "slow rank"]
r"""
**Explain.** With equal links there is nothing to shift. The bounds count bytes only. What a ring or
slices take beyond them, and why not equally much for each size, order and network, this page does
not show. Below some speed (exercise 2) the slow link carries the tensor once each way, and only
fewer bytes or meetings (chapters 10 and 11) help.
{func}`~microddp.performance.link_speed.probe_links` measures the speeds.

## The straggler that DDP hides

A rank for which the others wait is a *straggler*. Do the usual timers, of forward and backward on
each rank, show it?

**Predict.** Not if it is slow in backward. DDP's backward ends when all gradients are averaged, so
the others wait *inside* theirs, and it takes equally long on all ranks. (With 200 ms planted on one
of four GPUs (T4), the four backwards took 292 to 293 ms: [traceml issue
252](https://github.com/traceopt-ai/traceml/issues/252), July 2026.)

What differs is what a rank does *before* it waits. In DDP nothing waits before the end of backward
(unless the model has buffers to broadcast or a SyncBatchNorm; the second forward waits once:
chapter 06).
So the time from the step's begin to the *launch* of each collective contains no wait, and a rank
needs no clock but its own.

**Build.** A communication hook is called when a bucket is launched (chapter 10). It notes the time,
and goes on as DDP would. On the slow rank backward takes 30 ms longer. The stage is a scale model
of four machines with an A100 and 25 Gbit/s each, that train 355 million parameters (M/C is to
scale, the start of a message not):
"""

# %%
there = cluster("a100", "25gbit", nodes=n, node=1, parameters=355e6, tokens=24_576, layers=4)
stage = set_stage(comms, there)
comms.print(stage)
NAP, SLOW, COUNT = 0.03, min(1, n - 1), 9
launched = []


def noting(group, bucket):
    launched.append(time.perf_counter())
    return allreduce_hook(group, bucket)


def held_back(loss):
    """Make backward NAP longer on the slow rank."""
    if rank == SLOW:
        loss.register_hook(lambda _: time.sleep(NAP))
    return loss


# %% [markdown]
r"""
**Measure.** The usual timers, and the last launch:
"""

# %%
ddp, now = stage.strategy("ddp", 1.0).module, partial(seconds_now, comms.device)
ddp.register_comm_hook(comms.group, noting)


def clocked_step():
    begin = now()
    loss = held_back(stage.loss_fn(ddp(stage.batch[0]), stage.batch[1]))
    middle = now()
    loss.backward()
    end = now()
    return middle - begin, end - middle, end - begin, launched[-1] - begin


steps = [clocked_step() for _ in range(COUNT)][1:]
everyone = comms.all_gather_data([statistics.median(times) for times in zip(*steps, strict=True)])

# %% tags=["plumbing"]
headers = ["ms, medians", "forward", "backward", "both", "to the last launch"]
rows = [(f"rank {r}", *(1e3 * t for t in times)) for r, times in enumerate(everyone)]
comms.print(table(rows, headers, floats=["", *[".1f"] * 4]))
_, backward, whole, own = zip(*everyone, strict=True)
found = own.index(max(own))
spreads = [max(times) / min(times) for times in (backward, whole, own)]
figures.stacked_bars(
    {
        f"rank {r}": {
            "forward": forward,
            "backward until the last launch": max(0.0, last - forward),
            "waiting": max(0.0, both - last),
        }
        for r, (forward, _, both, last) in enumerate(everyone)
    },
    title=f"Forward and backward: the longest {spreads[1]:.2f} times the shortest; to the last "
    f"launch {spreads[2]:.2f} times",
    xlabel="forward and backward, cut at the launch of the last bucket",
)

# %% tags=["plumbing"]
said = (
    f"The longest backward is {spreads[0]:.2f} times the shortest, forward and backward "
    f"{spreads[1]:.2f} times, and to the last launch {spreads[2]:.2f} times, on rank {found}."
)
find(
    comms,
    "hidden",
    told=(n > 1 and found == SLOW, f"{said} That is the slow rank."),
    missed=(n > 1 and found != SLOW, f"{said} But rank {SLOW} was made slow."),
    alone=(n == 1, "One rank has nobody to wait for it."),
)

# %% [markdown] index=["slow link"]
r"""
**Explain.** A rank may also be slow in its loader or optimizer. From the end of backward to the
next step's begin there is no wait either, unless the script has a collective there: add that time.

## Slow rank or slow link?

**Predict.** The two differ in *when ranks arrive* at a collective. Until the last rank is there, a
rank waits for ranks; from then on for the transfer. A slow rank should add more to the first part,
a slow link more to the second. With $a_r$ the moment at which rank $r$ launches the collective:

$$ \text{wait} = \underbrace{\max_r a_r - a_{\text{me}}}_{\text{for ranks}} +
\underbrace{\text{end} - \max_r a_r}_{\text{for transfers}}. $$

**Build.** For the collectives of a timeline (chapter 04):
"""


# %%
def waits(spans, rank):
    """For each collective, the seconds in which a rank waited for ranks, and for transfers."""
    calls = [
        sorted((s.start, s.end) for s in spans if s.lane == "communication" and s.rank == r)
        for r in range(n)
    ]
    for together in zip(*calls, strict=True):
        start, end = together[rank]
        all_there = min(max(start for start, _ in together), end)
        yield all_there - start, end - all_there


# %% [markdown]
r"""
**Measure.** Naive averaging, not DDP, in four scenes of eight steps, after one that only warms up:
nothing planted; rank 1 slow; host 2's link at a quarter; both:
"""


# %%
def run(stage, count, late=False):
    """Take recorded steps; return the spans of all ranks, and the bytes that a rank sends."""
    strategy, timeline = stage.strategy("naive"), Timeline(comms)
    optimizer = stage.make_optimizer(strategy.module.parameters())
    strategy.record(timeline)
    loss_fn = (lambda *pair: held_back(stage.loss_fn(*pair))) if late else stage.loss_fn
    for _ in range(count):
        take_step(strategy, loss_fn, optimizer, stage.batch)
    return timeline.gather(), strategy.sent_bytes()


# %%
SCENES = {"nothing": (False, False), f"rank {SLOW} slow": (True, False)}
if known:
    SCENES |= {"host 2's link slow": (False, True), "both": (True, True)}
reports, mine, probed = {}, {}, {}
for scene, (late, link) in SCENES.items() if n > 1 else ():
    if link not in probed:  # once for each network
        if link:
            relink(comms, "250mbit", host=2)
        probed[link] = probe_links(comms)
    spans, sent = run(stage, COUNT, late)
    by_step = torch.tensor([*waits(spans, rank=0)]).view(COUNT, -1, 2).sum(dim=1)[1:]
    mine[scene] = [1e3 * statistics.median(part) for part in by_step.T.tolist()]
    reports[scene] = find_stragglers(spans, n, probed[link], sent)
if known:
    relink(comms, "1gbit")

# %% tags=["plumbing"]
rows = [
    (scene, *mine[scene], "none" if report.rank is None else report.rank, report.link)
    for scene, report in reports.items()
]
headers = ["planted", "rank 0 waits for ranks, ms (median)", "for transfers"]
headers += ["report names rank", "and link of"]
if rows:
    comms.print(table(rows, headers, floats=["", ".1f", ".1f", "", ""]))

# %% tags=["plumbing"]
if reports:
    calm = mine["nothing"]
    grown = {  # as the table has them
        scene: [round(x, 1) - round(y, 1) for x, y in zip(mine[scene], calm, strict=True)]
        for scene in [*reports][1:3]
    }
    said = "; ".join(
        f"with {scene}, rank 0's wait for ranks changes by {a:+.1f} ms, and that for transfers by "
        f"{b:+.1f} ms"
        for scene, (a, b) in grown.items()
    )
    misled = ", ".join(k for k, (a, b) in grown.items() if (a > b) != SCENES[k][0])
    find(
        comms,
        "split",
        told=(not misled, f"Compared with nothing planted, {said}: the predicted part grew more."),
        misled=(
            misled != "",
            f"Compared with nothing planted, {said}. Not as predicted: {misled}.",
        ),
    )

# %% tags=["plumbing"]
if reports:
    wrong = ", ".join(
        scene
        for scene, report in reports.items()
        if (report.rank, report.link)
        != tuple(who if slow else None for who, slow in zip((SLOW, 2), SCENES[scene], strict=True))
    )
    find(
        comms,
        "rank-or-link",
        right=(not wrong, f"The report is right in all {len(reports)} scenes, tried once."),
        wrong=(wrong != "", f"The report is wrong where this was planted: {wrong}."),
    )

# %% tags=["plumbing"]
if reports:
    title = "; ".join(
        f"{scene}: rank 0 waits {ranks:.0f} ms for ranks, {transfers:.0f} for transfers"
        for scene, (ranks, transfers) in mine.items()
        if scene in grown
    )
    figures.stacked_bars(
        {
            f"{scene}: rank {r}": parts
            for scene in grown
            for r, parts in enumerate(reports[scene].bars.values())
        },
        title=title.capitalize(),
        xlabel="a step",
    )

# %% [markdown]
r"""
**Explain.** A rank that leaves one collective late arrives late at the next, so a part of a slow
link's cost can be a wait for ranks: look at both parts. (How far the other part changes, nothing
here predicts.) Nor do transfers depend on links alone: processors carry them. So
{func}`~microddp.performance.stragglers.straggler_report` asks for more. It names a *rank* that
works at least 15 % longer than the others in three steps of four, if without this delay the median
step would be shorter by 4 %. It names a *link* if ranks wait for transfers for 4 % of the time, and
test messages over it, and over no other link, are less than half as fast as over the rest. (It
sends them itself; the cell above does, once for each network.) `python -m microddp.train --report`
prints it. In its table, a rank *works* while it does not wait in a collective, *holds others up* by
the time that a step would be shorter without it, and *comes last* to a share of the collectives,
whether it is slow or its link is. Of the last scene:
"""

# %%
reports.get(list(SCENES)[-1])

# %% [markdown]
r"""
## How often is it wrong?

**Predict.** With nothing planted no rank should meet either condition: these devices pause, so
only what processors do besides can differ, which weighs most in short steps, as here. (Ranks that
*compute* on a shared core work longer, so the report also asks who holds the others up.)

**Measure.** Fifty reports on ranks, of eight short steps each, cut from one long record:
"""


# %%
def devices_of(compute, layers, values):
    """Devices that compute so long for a step, in layers of so many values each."""
    layer = Layer(compute / 3 / layers, compute * 2 / 3 / layers, (values,))
    model = pausing_model(Work((layer,) * layers), comms.device)
    return Stage(comms, model, pausing_loss, pausing_batch(comms.device), PausingOptimizer)


REPORTS, quick = 50, devices_of(0.006, 1, 1 << 10)
count = 8 * REPORTS + 1  # a report's first step only prepares the others
spans, _ = run(quick, count)
each = len(spans) // n // count  # of a step, on each rank
near, alarms = [], 0
for first in range(0, count - 1, 8):
    begins = [(count * r + first) * each for r in range(n)]
    part = [span for begin in begins for span in spans[begin : begin + 9 * each]]
    report = find_stragglers(part, n)
    alarms += report.rank is not None
    near += [(report.longer(r), report.delay(r) / report.step) for r in range(n)]

# %% tags=["plumbing"]
often, costly = (max(values) for values in zip(*near, strict=True))
first = sum(longer >= 0.75 for longer, _ in near)
second = sum(delay >= 0.04 for _, delay in near)
said = (
    f"Of {REPORTS} reports with nothing planted, {alarms} named a rank. Of their {len(near)} ranks "
    f"{first} met the first condition and {second} the second. At most, a rank worked 15% longer "
    f"in {often:.0%} of its steps, and one held the others up for {costly:.1%} of a step."
)
find(
    comms,
    "false-alarms",
    held=(n > 1 and not first + second, f"{said} The prediction held."),
    failed=(n > 1 and first + second > 0, f"{said} The prediction failed."),
    alone=(n == 1, "A rank alone is never named: it is compared with itself."),
)

# %% [markdown] index=["clock offset"]
r"""
## Whose clock?

The split at the last arrival compares clocks of different ranks. Those of two machines differ by an
*offset*.

**Predict.** Rank 0 reads its clock and sends a message; the peer answers with its own clock; rank 0
reads again. The peer's clock was read in between. Take the middle: it is off by at most half the
round trip, however unequal the two ways were. That is [Cristian's
algorithm](https://doi.org/10.1007/BF01784024) (1989), and the heart of
[NTP](https://www.rfc-editor.org/rfc/rfc5905). Of several round trips the shortest counts.

**Measure.** Each rank's clock is made a quarter of a second ahead of the one before:
"""


# %%
def clock():
    return time.perf_counter() + 0.25 * rank


def offset_of(peer, rounds=20):
    """A peer's clock less rank 0's, and the bound, as rank 0 finds them; seconds."""
    trips, theirs = [(math.inf, 0.0)], torch.zeros(1, dtype=torch.float64, device=comms.device)
    for _ in range(rounds):
        if rank == 0:
            sent = clock()
            comms.send(theirs, peer)
            comms.recv(theirs, peer)
            answer, came = theirs.item(), clock()
            trips.append((came - sent, answer - (sent + came) / 2))
        elif rank == peer:
            comms.recv(theirs, 0)
            theirs.item()  # on a GPU: until it is there
            comms.send(theirs.fill_(clock()), 0)
    trip, offset = min(trips)
    return offset, trip / 2


# %%
estimates = comms.all_gather_data([offset_of(peer) for peer in range(1, n)])[0]
one_clock = comms.box is not None or len(set(comms.all_gather_data(platform.node()))) == 1

# %% tags=["plumbing"]
rows = [
    (f"rank {r}", 1e3 * offset, 1e6 * bound, 1e6 * abs(offset - 0.25 * r))
    for r, (offset, bound) in enumerate(estimates, start=1)
]
headers = ["", "estimated offset, ms", "bound, us", "missed the planted one by, us"]
if rows:
    comms.print(table(rows, headers, floats=["", ".3f", ".0f", ".1f"]))

# %% tags=["plumbing"]
bound = max((bound for _, bound in estimates), default=0.0)
missed = max((abs(offset - 0.25 * r) for r, (offset, _) in enumerate(estimates, 1)), default=0.0)
shortest = min((report.step for report in reports.values()), default=0.0)

# %% tags=["plumbing"]
said = (
    f"The widest bound is {human_seconds(bound)}. The delay for which a rank is named is "
    f"{human_seconds(0.04 * shortest)}, 4% of a step of {human_seconds(shortest)}, the shortest of "
    "the scenes'."
)
within = all(abs(offset - 0.25 * r) <= bound for r, (offset, bound) in enumerate(estimates, 1))
find(
    comms,
    "offsets",
    within=(
        n > 1 and one_clock and within,
        f"All planted offsets were found again within their bounds, to {human_seconds(missed)} or "
        f"better. {said}",
    ),
    beyond=(
        n > 1 and one_clock and not within,
        f"An estimate is off by more than its bound. {said}",
    ),
    machines=(n > 1 and not one_clock, f"The machines have clocks of their own. {said}"),
    alone=(n == 1, "A rank alone has one clock."),
)

# %% [markdown] index=["heterogeneous"]
r"""
**Explain.** Clocks also *run* at different speeds: NTP allows for 15 microseconds in a second. So
estimate before and after the recorded steps. (microddp's timelines take the end of a barrier for
the same moment on all ranks, a coarser estimate of how far the clocks are apart.)

What makes a rank slow? A hot GPU, another process, a late loader, longer samples, a garbage
collection. A link? A bad cable, another job's messages, half the lanes of a PCIe slot. Repair it;
until then, give a slow rank less to do.

## Less work for a slow rank

**Predict.** Rank $r$ computes $v_r$ samples a second, and gets $b_r$ of a batch of $b$. All finish
at the same time if $b_r$ is in proportion to $v_r$. Then computing takes $b / \sum_r v_r$ instead
of $b / (n \min_r v_r)$. The rest stays: $E$, the time of a naive step without computing, which is
messages and what a step does besides.

**Measure.** Rank 1's device takes three times as long for a sample:
"""

# %%
BATCH = 96 - 96 % n
A_SAMPLE = [(3 if r == SLOW else 1) * 0.06 * n / BATCH for r in range(n)]  # seconds
quick = round(BATCH / (n - 1 + 1 / 3))
equal, uneven = [BATCH // n] * n, [quick] * n
uneven[SLOW] = BATCH - (n - 1) * quick
values = int(stage.sides[1].nbytes / 16) if stage.sides else 1 << 18  # of each of 4 layers
computing, calls = {}, {}
for name, sizes in (("equal", equal), ("by speed", uneven)):
    seconds = [size * a_sample for size, a_sample in zip(sizes, A_SAMPLE, strict=True)]
    computing[name] = max(seconds)
    calls[name] = devices_of(seconds[rank], 4, values).step("naive")
calls["no computing"] = devices_of(0.0, 4, values).step("naive")
steps = measure(calls, comms, repeat=3, warmup=1)

# %% tags=["plumbing"]
E = steps["no computing"].median
rows = [
    (name, str(sizes), str(Prediction(computing[name] + E, steps[name])))
    for name, sizes in (("equal", equal), ("by speed", uneven))
]
headers = ["shards", "samples", "a step; predicted: the slowest computing + E"]
comms.print(table(rows, headers))
gain = compare(steps["by speed"], steps["equal"])
predicted = (computing["equal"] + E) / (computing["by speed"] + E)
alone = computing["equal"] / computing["by speed"]
said = (
    f"With shards by speed a step is {gain.than('with equal ones')}. {predicted:.2f} times was "
    f"predicted, with E of {human_seconds(E)}; computing alone would be {alone:.1f} times as fast."
)
find(comms, "less-work", **gain.sides(said if n > 1 else "One rank has all of the work."))

# %% [markdown]
r"""
**Explain.** This rests on speeds that stay as they are, and more samples need more memory.

## Where it breaks: a mean of means

Each rank's loss is a mean over *its* samples, and the all-reduce counts each rank alike. So with
shards by speed a sample of the slow rank counts for more. As in chapter 01, each rank has to
multiply its loss by its samples over those of an equal share: {func}`~microddp.step.take_step` does
if it is passed `share`. For the digits:
"""

# %%
digits = load_digits(comms.device).train


def gradient(sizes, share=None):
    """The averaged gradient of the first batch, in shards of these sizes."""
    torch.manual_seed(0)
    strategy = STRATEGIES["naive"](FullMLP(64, 3, inputs=64, outputs=10).to(comms.device), comms)
    batch = next(ShardedBatches(digits, BATCH, rank, n, sizes=sizes).epoch(0))
    compute_gradients(strategy, cross_entropy, batch, share=share)
    return parameters_to_vector(p.grad for p in strategy.module.parameters())


right = gradient(equal)
with_share, without = (
    ((gradient(uneven, share) - right).norm() / right.norm()).item() for share in (BATCH / n, None)
)
assert with_share < 1e-5

# %% tags=["plumbing"]
counts = [BATCH / (n * size) for size in uneven]
said = (
    f"By a mean of means the gradient is {without:.0%} off, and nothing raises an error: a sample "
    f"of rank {SLOW} counts {counts[SLOW]:.1f} times, one of another rank {min(counts):.1f} times. "
    f"Weighted, it is off by {with_share:.0e}."
)
find(comms, "mean-of-means", several=(n > 1, said), alone=(n == 1, "One rank has one mean."))

# %% [markdown]
r"""
If samples are dealt at random, that should only add noise. If rank 1 has what others do not, the
model gets a preference that nobody asked for. Batches counted in *tokens* are uneven: see chapter
14.

:::{admonition} On GPUs
- *A launch is not an arrival.* The CPU launches kernels ahead of the GPU. Record [CUDA
  events](https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html) on the stream, at
  the step's begin and in the hook. With
  [`TORCH_NCCL_ENABLE_TIMING=1`](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html)
  PyTorch also records when each collective starts on the GPU; that can end the overlap of what it
  measures ([pytorch 143890](https://github.com/pytorch/pytorch/issues/143890)). An NCCL kernel
  waits inside for the other ranks, so in a profile the slow rank's are the *shortest*.
- *The order of machines.* NCCL finds the links inside a machine. Between machines it does not look:
  its rings take them in the order of the ranks (issues
  [1340](https://github.com/NVIDIA/nccl/issues/1340) and
  [1545](https://github.com/NVIDIA/nccl/issues/1545), 2024). Slurm's [topology
  plugin](https://slurm.schedmd.com/topology.html) places a job on few switches; `--switches=1` asks
  for one.
- *What to run.* `nvidia-smi -q -d PERFORMANCE,ECC`, or DCGM, for low clocks and memory errors;
  `all_reduce_perf` of nccl-tests, on pairs of machines, for a slow link.
:::

## What to take along

- An all-reduce takes at least as long as its busiest link. Number the ranks rack by rack.
- A slow link has to carry the tensor once each way. Others can do the rest.
- DDP hides a slow rank in every rank's backward. Compare the time from the step's begin to the last
  launch: without buffers to broadcast it contains no wait, and it needs no common clock. On GPUs,
  take it on the stream.
- Slow rank or slow link: split a wait at the last arrival, then compare work and probe links. On
  several machines the split takes the clocks' offsets, known to half a round trip.
- Unequal shards need a mean over samples.

## Exercises

**The lab.** Write a function that names the rank that DDP hides. {doc}`It is checked </labs>` on 2,
3 and 4 ranks.

```console
$ python -m microddp.labs start 12
```

1. There are only two hosts, and the link of one is slow. How many bytes can be taken from it?

   <details class="solution"><summary>Solution</summary>

   None. Each has to send its $S$ bytes and to receive the sum. The ring's $2(n-1)/n \cdot S$ is $S$
   for two.

   </details>

2. Four hosts, one link at a share $x$ of the others' speed. Below which $x$ does the slow link set
   the time of the weighted all-reduce, and how much can then be gained on the ring?

   <details class="solution"><summary>Solution</summary>

   The slow link needs $S / (xB)$, all links together $2(n-1)S / ((n-1+x)B)$. They are equal at $x =
   (n-1)/(2n-3)$: for four hosts at 0.6. The ring needs $2(n-1)/n \cdot S/(xB)$, so below that the
   ratio of the bounds is $2(n-1)/n = 1.5$.

   </details>

3. Let rank 1 be slow in every third step only, and take the report of that. Whom does it name?

   <details class="solution"><summary>Solution</summary>

   For that, nobody: a rank is named for what it does in three steps of four and in the median
   step, and one in three is neither. Look for what it does at times: a checkpoint, a garbage
   collection, a slow file.

   </details>
"""

# %%
comms.close()
