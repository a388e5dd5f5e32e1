# %% [markdown]
r"""
# 08. Where the time goes

Where does the time of a step go, and when is a second device worth it? A faster network is bought
in an hour and paid for years, and may change nothing. This chapter takes a step of eight devices
apart, ranks what can be changed by the milliseconds that it saves, shows how one slow rank passes
for a slow network, and works out and tries from which batch on two devices beat one.
"""

# %% tags=["imports"]
import time
from dataclasses import replace

import microddp
from microddp import figures
from microddp.findings import compare, find
from microddp.hosts import relink
from microddp.model import gradient_bytes
from microddp.performance import DDPPerformanceAnalyzer, measure_scaling, step_budget
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
of 25 Gbit/s, that train 355 million parameters:
"""

# %%
WORKLOAD = {"parameters": 355e6, "tokens": 24_576, "layers": 24}
there = cluster("a100", "25gbit", nodes=n, node=1, **WORKLOAD)
stage = set_stage(comms, there, layer_bytes=3 << 17)
comms.print(stage)

# %% [markdown]
"""
**Predict.** If gradients are averaged one by one after backward, all of their communication is
exposed. If hooks start it during backward, some is hidden, but not the last message: it waits for
the last gradient.

**Build.** The timelines of chapters 03 and 04 have spans of communication, and of waiting for it.
Spans of one kind may overlap, so their union counts:
"""


# %%
def union(spans):
    total, reached = 0.0, 0.0
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
**Measure.** Four *strategies*, which are ways to average gradients: one by one after backward, one
by one by hooks, in buckets by hooks, and in microddp's DDP. They take turns:
"""

# %%
CAP = 1.0  # MiB of a bucket; it stands for 75 MiB of the cluster
recorded = {name: [] for name in ("naive", "hooks", "bucketed", "ddp")}
ways = {name: stage.strategy(name, CAP) for name in recorded}
calls = {name: stage.step(way) for name, way in ways.items()}
for _ in range(6):
    for name, steps in recorded.items():
        timeline = Timeline(comms)
        ways[name].record(timeline)
        calls[name]()
        steps.append(timeline.gather())

# %% [markdown]
"""
{func}`~microddp.step_times.break_down` follows the same rule, and adds the phases. Of each
strategy's steps, the one of median length on rank 0 is shown; the first has warmed up:
"""


# %%
def on_rank_0(spans):
    return [span for span in spans if span.rank == 0]


medians, parts = {}, {}
for name, steps in recorded.items():
    steps = sorted(steps[1:], key=lambda spans: break_down(on_rank_0(spans)).total)
    medians[name] = steps[len(steps) // 2]
    parts[name] = break_down(on_rank_0(medians[name]))
    for part, seconds in take_apart(on_rank_0(medians[name])).items():
        assert abs(seconds - getattr(parts[name], part)) < 1e-9

# %% tags=["plumbing"]
rows = [
    (name, *(t * 1e3 for t in (took.total, took.exposed, took.hidden)))
    for name, took in parts.items()
]
comms.print(table(rows, ["ms, rank 0's median step", "step", "exposed", "hidden"], floats=".0f"))
figures.explore_timelines(medians, title="The median steps, rank by rank")

# %% tags=["plumbing"]
naive, ddp = parts["naive"], parts["ddp"]
(before, waited), (after, waits) = (
    (round(1e3 * took.total), round(1e3 * took.exposed)) for took in (naive, ddp)
)
said = (
    f"Rank 0 waits {waited} ms of a naive step's {before}, and {waits} of DDP's {after}. The rest "
    f"takes {before - waited} and {after - waits} ms."
)
find(
    comms,
    "apart",
    less=(n > 1 and ddp.exposed < naive.exposed, said),
    not_less=(n > 1 and ddp.exposed >= naive.exposed, said),
    alone=(n == 1, "One rank waits for nobody; torchrun --nproc-per-node=4 starts four."),
)

# %% [markdown]
r"""
**Explain.** A span of communication lasts from its launch until it is complete. It may queue behind
others, so "hidden" can be longer than the link needs. It is free only if the rest gets no longer.

## What to change first

**Predict.** Of a step alone, a third is forward. Let buckets go one after the other, each when it
is full and the one before it has arrived (they are sent as soon as they are full, and share the
link, so that some starts are hidden). Each takes the start of a message, and its share of $M$, the
time of all bytes. So a step is a loop:
"""

# %%
here = stage.sides[-1] if stage.sides else None  # its numbers; GPUs are what they are


def predict(compute, nbytes, buckets, side=here):
    """Seconds of a step, with computing and bytes as multiples of the side's."""
    backward, arrived = compute * side.compute * 2 / 3, 0.0
    for full in range(1, buckets + 1):
        left = max(arrived, backward * full / buckets)
        arrived = left + side.start + nbytes * side.messages / buckets
    return compute * side.compute / 3 + max(arrived, backward)


# %% [markdown]
r"""
**Measure.** Each change is another number. Twice the batch is twice the computing for the same
bytes; the table has half its time, so that all rows are the same work. Ratios are taken round by
round, and not between medians:
"""

# %%
CHANGES = {  # computing, bytes, number of buckets
    "as it is": (1, 1, 8),
    "one bucket": (1, 1, 1),
    "a gradient each": (1, 1, 24),
    "half the bytes": (1, 0.5, 8),
    "twice the batch": (2, 1, 8),
    "a device twice as fast": (0.5, 1, 8),
}


def step_of(compute=1, nbytes=1, buckets=8, group=comms, kind="ddp"):
    """A step of the stage so changed, on a group of its ranks."""
    if not here:
        return stage.step(kind, gradient_bytes(stage.model) / buckets / MIB)
    side = replace(here, compute=compute * here.compute, nbytes=nbytes * here.nbytes)
    other = replace(stage, comms=group, model=pausing_model(work_of(side), comms.device))
    return other.step(kind, side.nbytes / buckets / MIB)


# %%
if not here:
    CHANGES = {name: change for name, change in CHANGES.items() if change[:2] == (1, 1)}
steps = {name: step_of(*change) for name, change in CHANGES.items()}
times = measure(steps, comms, repeat=5)
work = {name: max(1, compute) for name, (compute, *_) in CHANGES.items()}
taken = {name: Timing(tuple(t / work[name] for t in times[name].seconds)) for name in CHANGES}
far, guess = [
    {name: predict(*CHANGES[name], side) / work[name] for name in CHANGES} for side in stage.sides
] or ({}, {})

# %% tags=["plumbing"]
base = taken["as it is"]
saved = {name: round(1e3 * base.median) - round(1e3 * taken[name].median) for name in CHANGES}
ranked = sorted([*CHANGES][1:], key=lambda name: -saved[name])
rows = [
    (
        name,
        *(f"{1e3 * seconds[name]:.0f}" if here else "" for seconds in (far, guess)),
        f"{1e3 * taken[name].median:.0f}",
        f"{saved[name]:+}",
        compare(taken[name], base),
    )
    for name in ("as it is", *ranked)
]
headers = ["ms", "cluster, predicted", "predicted", "takes", "saves", "the same work is"]
comms.print(table(rows, headers))

# %% tags=["plumbing"]
first, bars = ranked[0], {}
for name in ("as it is", *ranked) if here else ():
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
    right = "right" if sorted(ranked, key=guess.get) == ranked else "not"
    said += f" The prediction names {'it too' if named == first else repr(named)}, and the order of"
    said += f" the medians is {right}; for the cluster it names {best}."
won = compare(taken[first], base).faster
find(
    comms,
    "first",
    won=(n > 1 and won, said),
    lost=(n > 1 and not won, f"{said} The run does not tell its gain from nothing."),
    alone=(n == 1, "One rank sends nothing, so no message can be saved."),
)

# %% [markdown]
r"""
**Explain.** A faster device shortens computing, and with it the time in which messages can hide.
Stage and cluster have the same M/C: for the loop only start/C differs. No clock shows that twice
the batch takes half as many steps for the same data, which is another training (chapter 14), and
that fewer bytes round what is sent (chapter 10).

## Against the speed of the link

**Predict.** A step that computes for $C$ and sends all gradients in one bucket hides nothing: it
takes $C + M$. Here $M$ is bytes by speed; the table's was measured. One that hides all it can takes
$\max(C, \frac{1}{3} C + M)$ (chapter 04). So overlap can gain most where $M$ is two thirds of $C$.

**Measure.** `relink` changes the speed of every host's link. (TCP connections opened on a
slow link stay slow, so new ones begin on the fastest.)
"""

# %%
SPEEDS = ("500mbit", "1gbit", "2gbit", "4gbit") if comms.box and here else ()
by_speed = {}
if SPEEDS:
    usual = comms.box.links[0].option
    relink(comms, SPEEDS[-1])
    group = comms.subgroup(range(n))
    calls = {"one bucket": step_of(buckets=1, group=group), "8 buckets": step_of(group=group)}
    for speed in SPEEDS:
        relink(group, speed)
        by_speed[group.box.links[0]] = measure(calls, group, warmup=1, repeat=4)
    relink(comms, usual)
    group.close()

# %% tags=["plumbing"]
C, curves, overlap = here.compute if here else 0.0, {}, {}
for link, times in by_speed.items():
    M = 2 * (n - 1) / n * here.nbytes / (link.bits_per_second / 8)
    steps = {name: timing.median for name, timing in times.items()}
    steps |= {"nothing hidden": C + M, "all hidden that can be": max(C, C / 3 + M)}
    for name, step in steps.items():
        x, y = curves.setdefault(name, ([], []))
        x.append(link.bits_per_second / 1e9)
        y.append(1e3 * step)
    best = steps["nothing hidden"] / steps["all hidden that can be"]
    overlap[link] = compare(times["8 buckets"], times["one bucket"]), best
gaining = sum(gain.faster for gain, _ in overlap.values())

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
    for at, (gain, best) in overlap.items():
        low, high = gain.times.spread
        each.append(f"{gain.ratio:.2f} ({low:.2f} to {high:.2f}) at {at}, {best:.2f} predicted")
    most = max(overlap, key=lambda at: overlap[at][0].ratio)
    losing = sum(gain.slower for gain, _ in overlap.values())
    hoped = max(overlap, key=lambda at: overlap[at][1])
    missed = f" Most was predicted at {hoped}: not in these medians." if most != hoped else ""
    said = (
        f"Overlap gains at {gaining} of {len(by_speed)} speeds"
        f"{f', most in the median at {most}' * bool(gaining)}"
        f"{f', and loses at {losing}' * bool(losing)}. With 8 buckets a "
        f"step is so many times as fast as with one: {'; '.join(each)}.{missed}"
    )
    find(comms, "overlap", some=(gaining > 0, said), none=(gaining == 0, said))

# %% tags=["plumbing"]
if by_speed:
    ms = dict(zip(*curves["8 buckets"], strict=True))
    quicker, halved = round(ms[1]) - round(ms[2]), saved["half the bytes"]
    said = (
        f"Links of 2 Gbit/s save {quicker:+} of the {ms[1]:.0f} ms with 1 Gbit/s. "
        f"Half the bytes saved {halved:+} of {1e3 * base.median:.0f} ms, on connections that "
        "began on links of 1 Gbit/s."
    )
    find(comms, "faster-links", more=(quicker > halved, said), less=(quicker <= halved, said))

# %% [markdown] index=["strong scaling", "weak scaling", "scaling efficiency"]
r"""
**Explain.** $C + M$ and the maximum count bytes only. Starts and copies come on top of both. All
ranks' messages are copied by this machine's cores, and where these are slower than the links,
faster links save less than their bytes say.

## More devices

*Strong* scaling divides one batch among more devices; *weak* scaling gives each as much as before.
The *speed-up* says how many times as many samples a second there are as on one. Divided by the
number of devices, it is the *efficiency*.

**Predict.** On $n$ devices a ring sends $\frac{2(n-1)}{n} S$ over each link: $S$ for two
devices, $1.75\,S$ for eight, never $2\,S$. So with weak scaling the speed-up goes on rising. With
strong scaling computing shrinks as $1/n$ while messages grow.

**Measure.** On 1, 2, 4 and 8 ranks: a batch of eight parts, shared (strong), or eight parts for
every rank (weak):
"""


# %%
def make_step(group, parts):
    return step_of(compute=parts / 8, group=group)


speedups = {}
if here and 8 % n == 0:
    for kind in ("strong", "weak"):
        speedups[kind] = measure_scaling(make_step, comms, 8, weak=kind == "weak", repeat=3)

# %% tags=["plumbing"]
curves = {kind: (list(of), list(of.values())) for kind, of in speedups.items()}
if speedups and n > 1:
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
if speedups and n > 1:
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
def slow_loader(batches=6):
    for _ in range(batches):
        if comms.rank == n - 1:
            time.sleep(base.median)
        yield stage.batch


# %%
ddp, analyzer = stage.strategy("ddp", CAP), DDPPerformanceAnalyzer(comms)
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
    f"one, {waits[-1]} ms: {waits[0] - waits[-1]} ms are for the slow rank and not the network."
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
    calls[f"one, {f}"] = step_of(2 * share, kind="none")
    calls[f"two, {f}"] = step_of(share, buckets=1, group=pair) if pair else lambda: None
times = measure(calls, comms, repeat=5) if calls else {}
tested = {f: compare(times[f"two, {f}"], times[f"one, {f}"]) for f in FACTORS}

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
**Explain.** The starts of messages do not cancel: the stage's $C$ was scaled to an all-reduce of
$2(n-1)$ rounds, and that of two ranks has 2. A device with few tokens reaches less of its peak.

{func}`~microddp.performance.worth.step_budget` does the same arithmetic, and adds the best case:
all that fits into the last backward is hidden. As a form:
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
- *The price of hiding.* NCCL's kernels use the GPU's processors. Products beside them get 30 to
  40 % slower, says the author of [PyTorch pull request
  179937](https://github.com/pytorch/pytorch/pull/179937) (April 2026).
- *Bandwidth depends on the message.* Eight H200 reach a {term}`bus bandwidth` of 256 GB/s at
  16 MiB, and 482 at 16 GiB, where the switch adds (NVLS, chapter 15; [ML
  engineering](https://github.com/stas00/ml-engineering/tree/master/network/benchmarks), October
  2026). DDP's buckets have about 25 MiB.

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
   that can be won.
2. Look at every rank. Beside what hiding costs, the network costs no more than the shortest wait of
   any rank. What others wait longer is for slow ranks.
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
