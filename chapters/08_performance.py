# %% [markdown]
r"""
# 08. Where the time goes

Where does the time of a step go, and when is a second device worth it? A faster network is bought
in an hour and paid for over years, and may change nothing. This chapter takes a step of eight
devices apart, ranks what can be changed by the milliseconds that it saves, shows how one slow rank
passes for a slow network, and works out and tries from which batch on two devices beat one.
"""

# %% tags=["imports"]
import random
import time
from dataclasses import replace

import microddp
from microddp import figures
from microddp.findings import compare, find
from microddp.hosts import relink
from microddp.model import gradient_bytes
from microddp.performance import DDPPerformanceAnalyzer, median_step, step_budget
from microddp.plan.library import devices, links
from microddp.report import MIB, table
from microddp.stage import cluster, known_clusters, pausing_model, set_stage, work_of
from microddp.step_times import break_down
from microddp.timing import Timeline, Timing, measure

# %%
# sphinx_gallery_builds = "a clock for every part of a step, and a prediction to hold against it"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
n = comms.world_size
comms.print(comms.describe())

# %% [markdown] index=["exposed communication"]
r"""
## Taking a step apart

A collective can be under way while the rank computes, or while the rank waits for it: it is
*hidden*, or *exposed*. The second always costs time; the first only where it competes with
computing for cores or memory.

The stage is that of chapters 03 to 06, a scale model of eight machines with an A100 each, on links
of 25 Gbit/s, that train 355 million parameters. A later section changes the speed of the links. The
kernel sets a connection's pace when it opens, so the ranks' connections open on the fastest link:
"""

# %%
WORKLOAD = {"parameters": 355e6, "tokens": 24_576, "layers": 24}
there = cluster("a100", "25gbit", nodes=n, node=1, **WORKLOAD)
usual, FASTEST = comms.box and comms.box.links[0].option, "4gbit"
if usual:
    relink(comms, FASTEST)
own = comms.subgroup(range(n))
if usual:
    relink(own, usual)
stage = set_stage(own, there, layer_bytes=3 << 17)
here = stage.sides[-1] if stage.sides else None  # its numbers; GPUs are what they are
comms.print(stage)

# %% [markdown]
"""
("Start of a message": what a layer's all-reduce takes beyond its share of $M$, chapter 03. It is
measured anew in each chapter, and varies.)

**Predict.** If gradients are averaged one by one after backward, all of their communication is
exposed. If it starts during backward, some is hidden, but not the last message: it waits for the
last gradient.

**Build.** The timelines of chapters 03 and 04 have spans of communication, and of waiting for it.
Spans of one kind may overlap, so their union counts:
"""


# %%
def union(spans):
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


# %%
def take_apart(spans):
    waits = [span for span in spans if span.lane == "wait"]
    under_way = [span for span in spans if span.lane == "communication"]
    in_both = union(waits) + union(under_way) - union(waits + under_way)
    return {"exposed": union(waits), "hidden": union(under_way) - in_both}


# %% [markdown]
"""
**Measure.** A *strategy* is a way to average gradients: one by one after backward (naive), one by
one by hooks, in buckets by hooks, or by microddp's DDP. Their steps, and those of most changes that
later sections ask about, take turns in one long measurement, and each is recorded:
"""

# %%
CHANGES = {  # computing, bytes, number of buckets
    "ddp": (1, 1, 8),  # the step as it is
    "one bucket": (1, 1, 1),
    "hooks": (1, 1, 24),  # a gradient each
    "half the bytes": (1, 0.5, 8),
    "twice the batch": (2, 1, 8),
    "a device twice as fast": (0.5, 1, 8),
}
if not here:
    CHANGES = {name: change for name, change in CHANGES.items() if change[:2] == (1, 1)}


def step_of(compute=1, nbytes=1, buckets=8, group=own, kind="ddp"):
    """A strategy, and its step, of the stage so changed, on a group of its ranks."""
    other, size = replace(stage, comms=group), gradient_bytes(stage.model)
    if here:
        side = replace(here, compute=compute * here.compute, nbytes=nbytes * here.nbytes)
        other, size = replace(other, model=pausing_model(work_of(side), comms.device)), side.nbytes
    way = other.strategy(kind, size / buckets / MIB)
    return way, other.step(way)


# %%
ALL = [k for k in (2, 4, 8) if k <= n] if here and 8 % n == 0 else []
if usual:
    relink(own, FASTEST)  # connections are made, and replicas begin with a broadcast
groups = {k: comms.subgroup(range(k)) if k < n else own for k in ALL}
steps = {"naive": step_of(kind="naive"), "bucketed": step_of(kind="bucketed")}
steps["one device"] = step_of(kind="none")
for name, change in CHANGES.items():
    steps[name] = step_of(*change, kind="hooks" if name == "hooks" else "ddp")
for k, group in groups.items():  # ranks outside the group do nothing
    steps[f"strong, {k}"] = step_of(1 / k, group=group) if group else None
    if k < n:
        steps[f"weak, {k}"] = step_of(group=group) if group else None
if usual:
    relink(own, usual)


# %%
def record(names, rounds=comms.most_rounds or 5):
    """Spans of all ranks, by step and round. A first round is not counted."""
    recorded = {name: [] for name in names}
    for i in range(1 + rounds):
        for name in random.Random(i).sample([*names], len(names)):
            timeline = Timeline(own)
            if steps[name]:
                way, step = steps[name]
                way.record(timeline)
                step()
            recorded[name].append(timeline.gather())
    return {name: spans[1:] for name, spans in recorded.items()}


recorded = record(steps)

# %% [markdown]
"""
{func}`~microddp.step_times.break_down` follows the same rule, and adds the phases. A step takes as
long as its slowest rank. The parts are medians over all rounds and ranks, which need not add up:
"""


# %%
def of_each_rank(spans):
    everyone = sorted({span.rank for span in spans})
    return [[span for span in spans if span.rank == rank] for rank in everyone]


def time_of(rounds):
    totals = ([break_down(mine).total for mine in of_each_rank(spans)] for spans in rounds)
    return Timing(tuple(map(max, totals)))


times, parts = {name: time_of(rounds) for name, rounds in recorded.items()}, {}
for name in ("naive", "hooks", "bucketed", "ddp"):
    every = [mine for spans in recorded[name] for mine in of_each_rank(spans)]
    parts[name] = median_step([break_down(mine) for mine in every])
    for mine in every:
        for part, seconds in take_apart(mine).items():
            assert abs(seconds - getattr(break_down(mine), part)) < 1e-9

# %% tags=["plumbing"]
rows, medians = [], {}
for name, took in parts.items():
    every = times[name].median, took.exposed, took.hidden, took.forward, took.backward
    rows.append((name, *(1e3 * seconds for seconds in every)))
    by_time = sorted(zip(times[name].seconds, range(len(recorded[name])), strict=True))
    medians[name] = recorded[name][by_time[len(by_time) // 2][1]]
headers = ["ms", "step", "exposed", "hidden", "forward", "backward"]
comms.print(table(rows, headers, floats=".0f"))
figures.explore_timelines(medians, title="The median steps, rank by rank")

# %% tags=["plumbing"]
naive, ddp = (dict(zip(headers, row, strict=True)) for row in (rows[0], rows[-1]))
said = (
    f"A rank waits {naive['exposed']:.0f} ms of a naive step's {naive['step']:.0f}, and "
    f"{ddp['exposed']:.0f} of the {ddp['step']:.0f} with DDP, which hides {ddp['hidden']:.0f} ms. "
    f"Backward takes {naive['backward']:.0f} and {ddp['backward']:.0f} ms."
)
less = ddp["exposed"] < naive["exposed"]
find(
    comms,
    "apart",
    less=(n > 1 and less, said),
    not_less=(n > 1 and not less, said),
    alone=(n == 1, "One rank waits for nobody; torchrun --nproc-per-node=4 starts four."),
)

# %% [markdown]
r"""
**Explain.** A span of communication lasts from its launch until it is complete. It may queue behind
others, so "hidden" can be longer than the link needs. What hiding costs is in backward, beside what
hooks and copies take there: it is free only if backward gets no longer.

## What to change first

**Predict.** Of a step without messages, a third is forward. Let buckets go one after the other,
each when it is full and the one before it has arrived. Each takes the start of a message, and its
share of $M$, the time of all bytes. So a step is a loop:
"""


# %%
def predict(compute, nbytes, buckets, side=here):
    """Seconds of a step, with computing and bytes as multiples of the side's."""
    backward, arrived = compute * side.compute * 2 / 3, 0.0
    for full in range(1, buckets + 1):
        left = max(arrived, backward * full / buckets)
        arrived = left + side.start + nbytes * side.messages / buckets
    return compute * side.compute / 3 + max(arrived, backward)


# %% [markdown]
r"""
**Measure.** These steps have been timed above: 'ddp' is the step as it is, and 'hooks' sends each
gradient alone. Twice the batch is twice the computing for the same bytes; the table has half its
time, so that all rows are the same work:
"""

# %%
work = {name: max(1, compute) for name, (compute, *_) in CHANGES.items()}
taken = {name: Timing(tuple(t / work[name] for t in times[name].seconds)) for name in CHANGES}
far, guess = [
    {name: predict(*CHANGES[name], side) / work[name] for name in CHANGES} for side in stage.sides
] or ({}, {})

# %% tags=["plumbing"]
base = taken["ddp"]
saved = {name: round(1e3 * base.median) - round(1e3 * taken[name].median) for name in CHANGES}
ranked = sorted([*CHANGES][1:], key=lambda name: -saved[name])
rows = []
for name in ("ddp", *ranked):
    worked_out = (f"{1e3 * side[name]:.0f}" if here else "" for side in (far, guess))
    sides = compare(taken[name], base).sides("")
    word = next(side for side, (holds, _) in sides.items() if holds)
    word = {"alike": "not told apart"}.get(word, word) if name != "ddp" else ""
    took = f"{1e3 * taken[name].median:.0f}"
    rows.append((name, *worked_out, took, saved[name] if word else "", word))
headers = ["ms for the same work", "cluster, predicted", "predicted", "takes", "saves", "than ddp"]
comms.print(table(rows, headers))

# %% tags=["plumbing"]
first, bars = ranked[0], {}
for name in ("ddp", *ranked) if here else ():
    step = taken[name].median
    computing = min(CHANGES[name][0] / work[name] * here.compute, step)
    bars[name] = {"computing": computing, "the rest": step - computing}
if bars:
    figures.stacked_bars(
        bars,
        title=f"'{first}' saves {saved[first]} of {1e3 * base.median:.0f} ms",
        xlabel="time for the work of one step",
    )

# %% tags=["plumbing"]
alike = [repr(name) for name in ranked[1:] if not compare(taken[first], taken[name]).faster]
beside = f" (not told apart from {' and '.join(alike)})" if alike else ""
said = f"'{first}' saves most{beside}: {saved[first]} ms of {1e3 * base.median:.0f} ms."
if here:
    named = min(ranked, key=guess.get)
    ms = {name: round(1e3 * far[name]) for name in ranked}
    best = " and ".join(repr(name) for name in ranked if ms[name] == min(ms.values()))
    said += f" The prediction names {'it too' if named == first else repr(named)}; for the cluster "
    said += f"it names {best}."
    turned = [name for name in ranked if (far[name] < far["ddp"]) != (guess[name] < guess["ddp"])]
    if turned:
        said += f" Whether {' and '.join(map(repr, turned))} saves, the two predictions disagree."
won = compare(taken[first], base)
find(
    comms,
    "first",
    won=(n > 1 and won.faster, said),
    alike=(n > 1 and won.alike, f"{said} The run does not tell its gain from nothing."),
    lost=(n > 1 and won.slower, f"{said} In most rounds it was the slower step."),
    alone=(n == 1, "One rank sends nothing, so no message can be saved."),
)

# %% tags=["plumbing"]
if here:
    off = [taken[name].median / guess[name] - 1 for name in CHANGES]
    alone = times["one device"].median / here.compute - 1
    said = (
        f"From the predictions the medians of these {len(off)} steps differ by {min(off):+.0%} to "
        f"{max(off):+.0%}. A device alone, which sends nothing, differs by {alone:+.0%} from C."
    )
    longer, shorter = min(off) > 0, max(off) < 0
    both = not longer and not shorter
    find(comms, "predicted", longer=(longer, said), shorter=(shorter, said), both=(both, said))

# %% [markdown]
r"""
**Explain.** The loop leaves out what processors do: Python, copies into buckets, and eight ranks on
one machine's cores. The device alone shows a part of that; the rest, the page does not take apart.

A faster device shortens computing, and with it the time in which messages can hide. Stage and
cluster have the same M/C: for the loop only start/C differs. No clock shows that twice the batch
takes half as many steps for the same data, which is another training (chapter 14), and that fewer
bytes round what is sent (chapter 10).

## Against the speed of the link

**Predict.** A step that computes for $C$ and sends all gradients in one bucket hides nothing: it
takes $C + M$. $M$ is the table's, divided by how much faster the links are. A step that hides all
it can takes $\max(C, \frac{1}{3} C + M)$ (chapter 04). So by bytes alone overlap can gain most
where $M$ is two thirds of $C$. The loop counts starts, too, of which more buckets have more.

**Measure.** On the usual links both steps have been timed above. `relink` changes the speed of
every host's link:
"""

# %%
BOTH, by_speed = ("one bucket", "ddp"), {}
SPEEDS = ("2gbit", FASTEST) if usual and here else ()
if SPEEDS:
    by_speed[own.box.links[0]] = {name: times[name] for name in BOTH}
for speed in SPEEDS:
    relink(own, speed)
    rounds = record(BOTH)
    by_speed[own.box.links[0]] = {name: time_of(rounds[name]) for name in BOTH}
if usual:
    relink(own, usual)

# %% tags=["plumbing"]
C, curves, overlap = here.compute if here else 0.0, {}, {}
for link, took in by_speed.items():
    M = here.messages * own.box.links[0].bits_per_second / link.bits_per_second
    seconds = {name: timing.median for name, timing in took.items()}
    seconds |= {"nothing hidden": C + M, "all hidden that can be": max(C, C / 3 + M)}
    for name, step in seconds.items():
        x, y = curves.setdefault(name, ([], []))
        x.append(link.bits_per_second / 1e9)
        y.append(1e3 * step)
    by_bytes = seconds["nothing hidden"] / seconds["all hidden that can be"]
    loop = [predict(*CHANGES[name], replace(here, messages=M)) for name in BOTH]
    overlap[link] = compare(took["ddp"], took["one bucket"]), by_bytes, loop[0] / loop[1]
gaining = sum(gain.faster for gain, *_ in overlap.values())

# %% tags=["plumbing"]
if by_speed:
    figures.lines(
        curves,
        title=f"Overlap gains at {gaining} of {len(by_speed)} speeds",
        xlabel="speed of each link, Gbit/s",
        ylabel="a step, ms",
        log="x",
    )
else:
    comms.print("links of known speed: none here")

# %% tags=["plumbing"]
if by_speed:
    each = []
    for at, (gain, by_bytes, loop) in overlap.items():
        low, high = gain.times.spread
        each.append(
            f"{gain.ratio:.2f} ({low:.2f} to {high:.2f}) at {at}, where bytes alone allow "
            f"{by_bytes:.2f} and the loop says {loop:.2f}"
        )
    losing = sum(gain.slower for gain, *_ in overlap.values())
    most = max(overlap, key=lambda at: overlap[at][0].ratio)
    by_loop = max(overlap, key=lambda at: overlap[at][2])
    said = (
        f"Overlap gains at {gaining} of {len(by_speed)} speeds"
        f"{f', and loses at {losing}' * bool(losing)}. With 8 buckets a "
        f"step is so many times as fast as with one: {'; '.join(each)}. The highest median is "
        f"that at {most}, the loop's at {by_loop}."
    )
    find(comms, "overlap", some=(gaining > 0, said), none=(gaining == 0, said))

# %% [markdown] index=["strong scaling", "weak scaling", "scaling efficiency"]
r"""
**Explain.** $C + M$ and the maximum count bytes only; the loop counts starts as well. Where a gain
is not the loop's, this page does not show why.

## More devices

*Strong* scaling divides one batch among more devices; *weak* scaling gives each as much as before.
The *speed-up* says how many times as many samples a second there are as on one. Divided by the
number of devices, it is the *efficiency*.

**Predict.** On $n$ devices a ring sends $\frac{2(n-1)}{n} S$ over each link: $S$ for two
devices, $1.75\,S$ for eight, never $2\,S$. So with weak scaling the speed-up goes on rising. With
strong scaling computing shrinks as $1/n$ while messages grow.

**Measure.** A batch of eight parts, shared (strong), or eight parts for every rank (weak). All were
timed above, and on all ranks weak scaling is 'ddp', the step as it is.
({func}`~microddp.performance.scaling.measure_scaling` times a step of yours so.)
"""


# %%
def times_as_fast(step, batches):
    """Beside one device that takes so many batches one by one."""
    alone = (batches * seconds for seconds in times["one device"].seconds)
    return compare(times[step], Timing(tuple(alone))).ratio


speedups = {}
if ALL:
    strong = {k: times_as_fast(f"strong, {k}", 1) for k in ALL}
    weak = {k: times_as_fast(f"weak, {k}" if k < n else "ddp", k) for k in ALL}
    speedups = {"strong": {1: 1.0, **strong}, "weak": {1: 1.0, **weak}}

# %% tags=["plumbing"]
curves = {kind: (list(of), list(of.values())) for kind, of in speedups.items()}
if speedups:
    counts, speeds = curves["strong"]
    (*_, strong), (*_, weak), most = speeds, curves["weak"][1], max(speeds)
    at = counts[speeds.index(most)]
    figures.lines(
        {**curves, "as many as devices": (counts, counts)},
        title=f"{n} devices are {weak:.2f} times as fast as one (weak), {strong:.2f} (strong)",
        xlabel="devices",
        ylabel="times as fast as one",
    )

# %% tags=["plumbing"]
if speedups:
    said = (
        f"With weak scaling {n} devices are {weak:.2f} times as fast as one, an efficiency of "
        f"{round(weak, 2) / n:.1%}. With strong scaling they are {strong:.2f} times as fast, or "
        f"{round(strong, 2) / n:.1%}"
    )
    fewer = f"{said}; the fastest number of devices is {at}, with {most:.2f}."
    find(comms, "scaling", more=(at == n, f"{said}."), fewer=(at < n, fewer))
else:
    comms.print("scaling is timed on 2, 4 or 8 devices of known speed: none here")

# %% [markdown] index=["straggler"]
r"""
## Where it breaks: one slow rank looks like a slow network

{class}`~microddp.performance.analyzer.DDPPerformanceAnalyzer` takes the steps of any strategy
apart, PyTorch's DDP included. Here, loading a batch takes the last rank as long as a step:
"""


# %%
def slow_loader(batches=5):
    for _ in range(batches):
        if comms.rank == n - 1:
            time.sleep(base.median)
        yield stage.batch


# %%
(ddp, _), analyzer = steps["ddp"], DDPPerformanceAnalyzer(comms)
optimizer = stage.make_optimizer(ddp.module.parameters())
for inputs, targets in analyzer.batches(slow_loader()):
    analyzer.time_step(ddp, inputs, targets, optimizer, loss_fn=stage.loss_fn)
summary = analyzer.summary()

# %% tags=["plumbing"]
figures.stacked_bars(
    summary.bars,
    title=f"Rank {summary.slowest} works {summary.spread:.1f} times as long as the quickest",
    xlabel="time of a step (medians)",
)
waits = [round(1e3 * times.exposed) for times in summary.ranks]
said = (
    f"Rank 0 waits {waits[0]} of {1e3 * summary.ranks[0].total:.0f} ms, and rank {n - 1}, the slow "
    f"one, {waits[-1]} ms: {waits[0] - waits[-1]} ms less. Planted were {1e3 * base.median:.0f} ms."
)
told = n > 1 and summary.slowest == n - 1 and waits[0] > waits[-1]
find(
    comms,
    "slow-rank",
    told=(told, said),
    mistaken=(n > 1 and not told, f"The waits do not tell; the summary names {summary.slowest}."),
    alone=(n == 1, "One rank has nobody to wait for it."),
)

# %% [markdown]
r"""
Exposed time is waiting, for the network *or* for another rank. Look at all ranks: those that wait
much less than the others are the *stragglers* (chapter 12).

## When is it worth it?

**Predict.** Each of $n$ ranks computes $6Pb$ operations for its $b$ tokens (or samples, if each
uses every parameter once, unlike in convolutions): 2 for each parameter in forward, 4 in backward.
Its rate $R$ is the device's peak times its *utilisation*, the part of the peak that training
reaches. One device needs $n$ times as long for the same batch. Without overlap, $n$ ranks are
faster if an all-reduce takes less than they save. For links of bandwidth $B$ and gradients of $w$
bytes a value (4 in DDP with autocast, here 2):

$$\frac{2(n-1)}{n}\,\frac{wP}{B} \;<\; (n-1)\,\frac{6Pb}{R}
\qquad\Longrightarrow\qquad
b \;>\; \frac{wR}{3nB} .$$

$P$ has cancelled out: a larger model sends more and computes more. So has $n$ from the global batch
$nb$. With $b^*$ for the bound, the speed-up at a batch $b$ is $n / (1 + (n-1)\,b^*/b)$.

**Measure.** Two of the stage's devices with a single bucket, at half of $b^*$, at $b^*$, and at
twice as many tokens, beside one device that computes twice as long:
"""

# %%
R, B = devices()["a100"].rate, links()["25gbit"].bandwidth
least = 2 * R / (3 * 2 * B)  # tokens of each of two, with values of 2 bytes
FACTORS = (0.5, 1, 2) if here and n > 1 else ()
pair, calls = comms.subgroup(range(2)) if FACTORS else None, {}
for f in FACTORS:
    share = f * least / WORKLOAD["tokens"]
    _, calls[f"one, {f}"] = step_of(2 * share, kind="none")
    _, calls[f"two, {f}"] = step_of(share, buckets=1, group=pair) if pair else (0, lambda: None)
took = measure(calls, own, warmup=1, repeat=3) if calls else {}
tested = {f: compare(took[f"two, {f}"], took[f"one, {f}"]) for f in FACTORS}

# %% tags=["plumbing"]
rows = [(f"{f:g} b*", f"{f * least:.0f}", f"{2 / (1 + 1 / f):.2f}", tested[f]) for f in tested]
if rows:
    comms.print(table(rows, ["batch", "tokens each", "predicted", "two devices against one"]))
    as_it_says = tested[0.5].slower and tested[2].faster
    said = f"at half of b* two devices are {tested[0.5]} as one, at twice b* {tested[2]}."
    find(
        comms,
        "break-even",
        held=(as_it_says, "One device wins at half of b*, and two at twice b*."),
        not_held=(not as_it_says, f"It is not as the inequality says: {said}"),
    )
else:
    comms.print("tried on two devices of known speed or more: none here")
if pair:
    pair.close()

# %% [markdown]
"""
**Explain.** Three things do not cancel; what each weighs, this page does not show. The stage's $C$
was scaled to an $M$ of $2(n-1)$ rounds, and an all-reduce of two ranks has 2: two ranks pay fewer
starts than the scale allows for. What Python takes of a step is not scaled at all. And a real
device with few tokens reaches less of its peak, which the stage's pauses do not know.

{func}`~microddp.performance.worth.step_budget` does the same arithmetic, counts a start for each
of the $2(n-1)$ rounds, 14 us here, and adds the best case: all that fits into the last backward is
hidden. As a form:
"""

# %% tags=["plumbing"]
chosen = [devices()[name] for name in ("h100", "a100", "b200")]
between = [links()[name] for name in ("400gbit", "100gbit", "25gbit", "10gbit")]
figures.explore_plan(
    {d.name: {"peak": d.peak, "utilisation": d.utilisation, "latency": 14e-6} for d in chosen},
    {f"{link.name}, a device each": link.bandwidth for link in between},
    parameters=1e9,
    tokens=8192,
    ranks=8,
    gradient_bytes=2,
    budget=step_budget,
)

# %% [markdown]
r"""
:::{admonition} On GPUs
Exposed and hidden, the inequality and the slow rank stay. Three things differ.

- *The clock.* A launch returns before the GPU has done the work, so a Python clock times the
  launch. microddp's clock waits for the device where a phase ends; [CUDA
  events](https://docs.pytorch.org/docs/stable/notes/cuda.html) are recorded on the GPU's stream.
- *The price of hiding.* NCCL's kernels use the GPU's processors. Matrix products beside them get 30
  to 40 % slower, says the author of [PyTorch pull request
  179937](https://github.com/pytorch/pytorch/pull/179937) (April 2026).
- *Bandwidth depends on the message.* Eight H200 reach a {term}`bus bandwidth` of 256 GB/s at
  16 MiB, and 482 at 16 GiB ([ML
  engineering](https://github.com/stas00/ml-engineering/tree/master/network/benchmarks), October
  2026). There the switch adds (NVLS, chapter 15); around a ring it is less (chapter 07). DDP's
  buckets have about 25 MiB.

`python -m microddp.bench ddp` shows steps of your GPUs. This chapter's model elsewhere:
:::
"""

# %% tags=["plumbing"]
rows = [
    (side.words, side.devices, side.ratio, side.unhidden, side.overlapped)
    for side in known_clusters(**WORKLOAD)
]
headers = [
    "times as fast as one, worked out",
    "devices",
    "M/C",
    "nothing hidden",
    "all hidden that can be",
]
comms.print(table(rows, headers))

# %% [markdown]
r"""
## What to take along

Before you buy a network, in this order:

1. Time the step without averaging (DDP's `no_sync()`), on as many ranks. What averaging adds is all
   that a network can win.
2. Look at every rank. The one that waits least is the one that the others wait for: what they wait
   beyond that is not the network's.
3. Split communication into exposed and hidden. Exposed costs its time, hidden as much as it slows
   computing.
4. Rank what can be changed by the milliseconds that it saves, predict before you try, and try.
5. Below $b^* = wR / (3nB)$ tokens one device is faster, if nothing is hidden. Overlap lowers
   the bound.

## Exercises

**The lab.** Write a function that names why a job is slow, among planted causes. {doc}`It is
checked </labs>` on 2 and 3 ranks.

```console
$ python -m microddp.labs start 08
```

1. A backward can also be long because the rank is starved of cores. `break_down` counts that as
   computing. Which clock tells the two apart?

   <details class="solution"><summary>Solution</summary>

   `time.thread_time()` counts only while the thread runs on a core, `time.perf_counter()` always.
   Read both around `loss.backward()`, under `no_sync()`, so that it waits for no message: if a
   second process is busy on the same core, `perf_counter` grows and `thread_time` stays.

   </details>

2. A step of one device takes 40 ms. Of these, 4 ms do not shrink with the batch: the optimizer and
   the start of each operation. An all-reduce adds 6 ms that nothing hides, whatever the number of
   ranks. Work out the speed-up of 2, 4 and 8 ranks, with strong and with weak scaling. Which number
   does strong scaling never reach?

   <details class="solution"><summary>Solution</summary>

   Strong scaling divides 36 of the 40 ms. A step on n ranks takes $4 + 36/n + 6$ ms, and the
   speed-up is 1.43, 2.11 and 2.76. It never reaches $40 / (4 + 6) = 4$. With weak scaling every
   step takes 46 ms for n times the samples. The speed-up is $40n / 46$, so 1.74, 3.48 and 6.96: an
   efficiency of 87 % from two ranks on.

   </details>
"""

# %%
comms.close()
