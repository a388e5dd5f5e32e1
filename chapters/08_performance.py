# %% [markdown]
r"""
# 08. Where the time goes

Where does the time of a step go, and when is a second device worth it? A faster network is bought
in an hour and paid for years, and may change nothing. This chapter takes a step of eight devices
apart, ranks what can be changed by the milliseconds that it saves, compares links, counts devices,
shows how one slow rank passes for a slow network, and works out from which batch on two devices
beat one, which it then tries.
"""

# %% tags=["imports"]
import copy
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import mse_loss

import microddp
from microddp import figures
from microddp.allreduce import FittedCost
from microddp.ddp import DDP
from microddp.findings import Prediction, compare, find
from microddp.hosts import relink
from microddp.model import FullMLP, gradient_bytes, parameter_count
from microddp.performance import (
    DDPPerformanceAnalyzer,
    measure_all_reduce,
    measure_scaling,
    step_budget,
)
from microddp.plan.library import devices, links
from microddp.report import human_seconds, table
from microddp.stage import cluster, known_clusters, pausing_model, set_stage, work_of
from microddp.step import take_step
from microddp.step_times import break_down
from microddp.strategies import STRATEGIES
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

A collective can be under way while the rank computes, or while the rank waits for it. The second
always costs time; the first only where computing needs what the message needs. So three things are
wanted of each step: its computing, how long communication was *exposed*, and how long it was
*hidden*.

The stage is that of chapters 03 to 06: devices of known speed, which pause as long as they would
compute, on links of known speed. It is a scale model of eight machines with an A100 each, on links
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
exposed. If hooks start it during backward, some is hidden. The last message never is: it waits for
the last gradient.

**Build.** The timelines of chapters 03 and 04 have all that is needed: spans of communication, and
spans of waiting for it. Spans of one kind may overlap, so their union counts:
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
by one by hooks, in buckets by hooks, and in microddp's DDP. They take turns. A timeline begins when
all ranks have met:
"""

# %%
CAP = 1.0  # MiB of a bucket; it stands for 75 MiB of the cluster
recorded = {name: [] for name in ("naive", "hooks", "bucketed", "ddp")}
ways = {name: stage.strategy(name, CAP) for name in recorded}
optimizers = {name: stage.make_optimizer(way.module.parameters()) for name, way in ways.items()}
for _ in range(6):
    for name, steps in recorded.items():
        timeline = Timeline(comms)
        ways[name].record(timeline)
        take_step(ways[name], stage.loss_fn, optimizers[name], stage.batch)
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
    apart, parts[name] = (each(on_rank_0(medians[name])) for each in (take_apart, break_down))
    assert abs(apart["exposed"] - parts[name].exposed) < 1e-9
    assert abs(apart["hidden"] - parts[name].hidden) < 1e-9

# %% tags=["plumbing"]
rows = [
    (name, *(t * 1e3 for t in (took.total, took.exposed, took.hidden)))
    for name, took in parts.items()
]
comms.print(table(rows, ["ms, rank 0's median step", "step", "exposed", "hidden"], floats=".0f"))
figures.explore_timelines(medians, title="The median steps, rank by rank")

# %% tags=["plumbing"]
naive, ddp = parts["naive"], parts["ddp"]
said = (
    f"Of a naive step of {human_seconds(naive.total)} rank 0 waits {human_seconds(naive.exposed)}, "
    f"which is {naive.exposed / naive.total:.0%}. In DDP it waits {human_seconds(ddp.exposed)} of "
    f"{human_seconds(ddp.total)}, or {ddp.exposed / ddp.total:.0%}."
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
**Explain.** In the picture a span of communication lasts from its launch until it is complete. It
may queue behind others, so "hidden" can be longer than the link needs. Only "exposed" is time that
a step would save. (In "ddp" the wait is a part of backward, which the wrapper ends.)

## What to change first

**Predict.** Buckets leave one after the other, each when it is full and the one before it has
arrived. An all-reduce of $m$ bytes takes $\alpha + \beta m$ (chapter 02). So a step is a loop:
"""


# %%
def predict(compute, sizes, cost, K=1):
    """Seconds of a step of K micro-batches whose last one sends buckets of these sizes."""
    forward, backward = compute / 3, compute * 2 / 3
    ready, arrived = 0.0, 0.0
    for nbytes in sizes:
        ready += backward * nbytes / sum(sizes)
        arrived = max(ready, arrived) + cost.alpha + cost.beta * nbytes
    return (K - 1) * compute + forward + max(arrived, backward)


# %% [markdown]
r"""
Six things to change, each against the step of above in DDP:

- *one bucket*, or *a gradient each*: fewer or more messages for the same bytes;
- *half the bytes*: a communication hook sends each fp32 value as bf16 (the cluster sends bf16 as it
  is, and would send 8 bits);
- *twice the batch*: twice the computing for the same bytes;
- *4 micro-batches*: the gradients of four are averaged once (chapter 06);
- *a device twice as fast*: half the computing.

A step of more samples is divided by how many times as many there are, so that all times are those
of the same work:
"""


# %%
def ddp_step(K=1, scale=1.0, hook=None, cap=CAP):
    """A step in DDP of K micro-batches, each `scale` times as long to compute; and its DDP."""
    model, batch = copy.deepcopy(stage.model), stage.batch
    if stage.sides:
        model = pausing_model(scaled(scale), comms.device)
    elif scale > 1:
        batch = [torch.cat([tensor] * int(scale)) for tensor in batch]
    ddp = DDP(model, comms, bucket_cap_mb=cap)
    if hook:
        ddp.register_comm_hook(comms.group, hook)

    def step():
        ddp.zero_grad()
        for k in range(K):
            with nullcontext() if k == K - 1 else ddp.no_sync():
                stage.loss_fn(ddp(batch[0]), batch[1]).backward()

    return step, ddp


def scaled(scale):
    """The work of the stage's devices, if they took so many times as long."""
    return work_of(replace(stage.sides[1], compute=scale * stage.sides[1].compute))


# %%
CHANGES = {  # what changes, and by how much there is then more work in a step
    "as it is": ({}, 1),
    "one bucket": ({"cap": 1000.0}, 1),
    "a gradient each": ({"cap": 0.01}, 1),
    "half the bytes": ({"hook": bf16_compress_hook}, 1),
    "twice the batch": ({"scale": 2.0}, 2),
    "4 micro-batches": ({"K": 4}, 4),
    "a device twice as fast": ({"scale": 0.5}, 1),
}
if not stage.sides:
    del CHANGES["a device twice as fast"]  # GPUs are as fast as they are
built = {name: ddp_step(**options) for name, (options, _) in CHANGES.items()}
calls = {"alone": stage.step("none")} | {name: step for name, (step, _) in built.items()}
times = measure(calls, comms, warmup=2, repeat=4)
alone = times.pop("alone")

# %% [markdown]
r"""
The prediction takes the time of a device alone, the buckets as DDP planned them, and the stage's
own numbers: $M$ for each byte, and the start of a message in a row of several:
"""

# %%
if stage.sides:
    here = stage.sides[1]
    cost = FittedCost(here.start, here.messages / here.nbytes, cores=0.0)
else:
    cost = measure_all_reduce(comms, [1 << 16, 1 << 20], repeat=5)
computing, predicted, taken = {}, {}, {}
for name, (options, work) in CHANGES.items():
    K, scale = options.get("K", 1), options.get("scale", 1.0)
    size = 0.5 if options.get("hook") else 1.0
    sizes = [size * bucket.buffer().nbytes for bucket in built[name][1].reducer.buckets]
    computing[name] = alone.median * scale * K / work
    predicted[name] = predict(alone.median * scale, sizes, cost, K) / work
    taken[name] = Timing(tuple(seconds / work for seconds in times[name].seconds))

# %% tags=["plumbing"]
base, expected = taken.pop("as it is"), predicted.pop("as it is")
gains = {name: compare(timing, base) for name, timing in taken.items()}
saved = {name: base.median - timing.median for name, timing in taken.items()}
ranked = sorted(gains, key=lambda name: -saved[name])
rows = [
    (name, *(f"{1e3 * t:+.0f}" for t in (expected - predicted[name], saved[name])), gains[name])
    for name in ranked
]
comms.print(
    f"as it is: {base}, predicted {human_seconds(expected)}; ratios are taken in each round"
)
comms.print(table(rows, ["change", "should save, ms", "saves, ms", "the same work is"]))

# %% tags=["plumbing"]
same_steps = next(name for name in ranked if CHANGES[name][1] == 1)
fewer_steps = next(name for name in ranked if CHANGES[name][1] > 1)
figures.stacked_bars(
    {
        f"{name} ({human_seconds(timing.median)})": {
            "computing": min(computing[name], timing.median),
            "exposed": max(0.0, timing.median - computing[name]),
        }
        for name, timing in {"as it is": base, **{name: taken[name] for name in ranked}}.items()
    },
    title=f"As many steps: '{same_steps}' saves most, {1e3 * saved[same_steps]:.0f} ms of "
    f"{human_seconds(base.median)}; fewer: '{fewer_steps}', {1e3 * saved[fewer_steps]:.0f} ms",
    xlabel="time for the work of one step",
)

# %% tags=["plumbing"]
said = (
    f"Of what takes as many steps, '{same_steps}' saves most: {1e3 * saved[same_steps]:.0f} ms of "
    f"{human_seconds(base.median)}. Of what takes fewer steps for the same data, '{fewer_steps}' "
    f"does: {1e3 * saved[fewer_steps]:.0f} ms."
)
won = gains[same_steps].faster and gains[fewer_steps].faster
find(
    comms,
    "first",
    won=(n > 1 and won, said),
    lost=(n > 1 and not won, f"{said} The run does not tell both from nothing."),
    alone=(n == 1, "One rank sends nothing, so there is nothing to save."),
)

# %% tags=["plumbing"]
guesses = {name: Prediction(predicted[name], taken[name]) for name in ranked}
guesses["as it is"] = Prediction(expected, base)
worst = max(guesses, key=lambda name: abs(guesses[name].off))
said = f"It is off most for '{worst}': {guesses[worst]}."
order = sorted(predicted, key=predicted.get)
in_order = order == ranked
find(
    comms,
    "list-predicted",
    order=(n > 1 and in_order, f"The prediction ranks all changes as the run does. {said}"),
    other=(
        n > 1 and not in_order,
        f"The prediction ranks them otherwise: {', '.join(order)}. {said}",
    ),
    alone=(n == 1, "With one rank there is nothing to predict."),
)

# %% [markdown]
r"""
**Explain.** A step is computing and what is exposed. A faster device shortens the first, and with
it the time in which messages can hide; all other changes work on the second. The loop leaves out
hooks and copies in Python, and buckets that wait for a late rank. And a change has a price that no
clock shows: twice the batch, or four micro-batches, take half or a quarter as many steps for the
same data, which is another training (chapter 14). Fewer bytes round what is sent (chapter 10).

## Against the speed of the link

**Predict.** A step that sends all gradients in one bucket hides nothing: it takes $C + M$, where
$M$ is here the time of all bytes on the link. One that hides all it can takes $\max(C, \frac{1}{3}
C + M)$, as chapter 04 worked out. So overlap can gain most where $M$ is two thirds of $C$, as long
as backward. On a slow link there is too little computing to hide behind; on a fast one there is
little to hide.

**Measure.** `relink` changes the speed of every host's link while the job runs. (TCP connections
keep the pace that they began with, so new ones are made on the fastest.)
"""

# %%
SPEEDS = ("500mbit", "1gbit", "2gbit", "4gbit") if comms.box and stage.sides else ()
usual, by_speed = comms.box and comms.box.links[0].option, {}
if SPEEDS:
    relink(comms, SPEEDS[-1])
    group = comms.subgroup(range(n))
    over = replace(stage, comms=group)
    calls = {"alone": over.step("none"), "one bucket": over.step("ddp", 1000.0)}
    calls["buckets"] = over.step("ddp", CAP)
for speed in SPEEDS:
    relink(group, speed)
    by_speed[group.box.links[0]] = measure(calls, group, warmup=1, repeat=4)
if SPEEDS:
    relink(comms, usual)
    group.close()

# %% tags=["plumbing"]
curves = {"one bucket": [], "buckets": [], "nothing hidden": [], "all hidden that can be": []}
x, overlap = [link.bits_per_second / 1e9 for link in by_speed], {}
for link, timings in by_speed.items():
    C, whole, buckets = (timing.median for timing in timings.values())
    M = 2 * (n - 1) / n * gradient_bytes(stage.model) / (link.bits_per_second / 8)
    overlap[link] = compare(timings["buckets"], timings["one bucket"])
    for curve, step in zip(
        curves.values(), (whole, buckets, C + M, max(C, C / 3 + M)), strict=True
    ):
        curve.append(n * C / step)
rows = [
    (str(link), *(f"{curve[i]:.2f}" for curve in curves.values()), str(overlap[link]))
    for i, link in enumerate(by_speed)
]
headers = ["link", *curves, "buckets against one"]
comms.print(table(rows, headers) if rows else "links of known speed: none here")

# %% tags=["plumbing"]
if by_speed:
    gaining = [link for link, gain in overlap.items() if gain.faster]
    figures.lines(
        {name: (x, curve) for name, curve in curves.items()},
        title=f"Overlap gains at {len(gaining)} of {len(by_speed)} speeds",
        xlabel="speed of each link, Gbit/s",
        ylabel="times as fast as one device",
        log="x",
    )

# %% tags=["plumbing"]
if by_speed:
    ideal = [hidden / bare for bare, hidden in zip(*list(curves.values())[2:], strict=True)]
    each = [
        f"{overlap[link].ratio:.2f} times as fast at {link} ({guess:.2f} predicted)"
        for link, guess in zip(by_speed, ideal, strict=True)
    ]
    said = f"a step with buckets is {', '.join(each)} as one with a single bucket"
    find(
        comms,
        "overlap",
        all=(len(gaining) == len(by_speed), f"Overlap gains at every speed: {said}."),
        some=(
            0 < len(gaining) < len(by_speed),
            f"Overlap gains at {len(gaining)} of {len(by_speed)} speeds: {said}.",
        ),
        none=(not gaining, f"At no speed does overlap bring a net gain: {said}."),
    )

# %% tags=["plumbing"]
slow, quick = (
    next((link for link in by_speed if link.option == o), None) for o in (usual, "2gbit")
)
if slow and quick:
    a, b = (by_speed[link]["buckets"].median for link in (slow, quick))
    change = f"{abs(1e3 * (a - b)):.0f} ms {'shorter' if a > b else 'longer'}"
    said = (
        f"Links of {quick} instead of {slow} make a step of {1e3 * a:.0f} ms {change}; half "
        f"the bytes saved {1e3 * saved['half the bytes']:.0f} ms of {1e3 * base.median:.0f}."
    )
    more = a - b > saved["half the bytes"]
    find(comms, "faster-links", more=(more, said), less=(not more, said))

# %% [markdown] index=["strong scaling", "weak scaling", "scaling efficiency"]
r"""
**Explain.** On fast links the wire takes little of a step. What is left are starts, copies, and
waking up, which are in neither prediction.

## More devices

*Strong* scaling divides one batch among more devices; *weak* scaling gives each as much as before.
The *speed-up* says how many times as many samples a second there are as on one. Divided by the
number of devices, it is the *efficiency*.

**Predict.** On $n$ devices a ring sends $\frac{2(n-1)}{n} S$ over each link: $S$ for two
devices, $1.75\,S$ for eight, never $2\,S$. So with weak scaling bytes grow towards a limit, and the
speed-up goes on rising. With strong scaling computing shrinks as $1/n$ while messages grow: the
more devices, the more of a step is messages.
"""


# %%
def make_steps(group, share):
    """A step in DDP of so many eighths of a batch, and the same without communication."""
    over = replace(stage, comms=group, model=pausing_model(scaled(share / 8), comms.device))
    return over.step("ddp", CAP), over.step("none")


scalings = {}
if stage.sides and 8 % n == 0:
    for kind in ("strong", "weak"):
        scalings[kind] = measure_scaling(make_steps, comms, 8, weak=kind == "weak", repeat=3)

# %% tags=["plumbing"]
rows, curves = [], {}
for kind, scaling in scalings.items():
    counts = [point.ranks for point in scaling.points]
    curves[kind] = (counts, [scaling.speedup(point) for point in scaling.points])
    for point in scaling.points:
        speed, good = scaling.speedup(point), scaling.efficiency(point)
        rows.append((kind, point.ranks, str(point.step), f"{speed:.2f}", f"{good:.0%}"))
if not rows:
    comms.print("scaling is timed on 1, 2, 4 or 8 devices of known speed: none here")
else:
    comms.print(table(rows, ["scaling", "devices", "a step", "speed-up", "efficiency"]))

# %% tags=["plumbing"]
if scalings and n > 1:
    (*_, strong), (*_, weak) = (ups for _, ups in curves.values())
    most = max(curves["strong"][1])
    at = counts[curves["strong"][1].index(most)]
    figures.lines(
        {**curves, "as many as devices": (counts, counts)},
        title=f"{n} devices: {weak:.2f} times as fast as one with weak scaling, {strong:.2f} with "
        "strong",
        xlabel="devices",
        ylabel="times as fast as one",
    )
    said = f"With weak scaling {n} devices are {weak:.2f} times as fast as one. With strong scaling"
    find(
        comms,
        "scaling",
        more=(at == n, f"{said} they are {strong:.2f} times as fast."),
        fewer=(
            at < n,
            f"{said} they are {strong:.2f} times as fast, and {at} of them {most:.2f} times: the "
            "others make it slower.",
        ),
    )

# %% [markdown] index=["straggler"]
r"""
## Where it breaks: one slow rank looks like a slow network

{class}`~microddp.performance.analyzer.DDPPerformanceAnalyzer` takes the steps of any strategy
apart, PyTorch's DDP included. Here, to load a batch takes the last rank as long as a step:
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
    title=f"Rank {summary.slowest} works {summary.spread:.1f} times as long, and waits least",
    xlabel="time of a step (medians)",
)
waits = [times.exposed for times in summary.ranks]
said = (
    f"Rank 0 waits {human_seconds(waits[0])} of {human_seconds(summary.ranks[0].total)}. Rank "
    f"{n - 1}, the slow one, waits {human_seconds(waits[-1])}: the "
    f"difference, {human_seconds(waits[0] - waits[-1])}, is for the slow rank and not the network."
)
find(
    comms,
    "slow-rank",
    told=(n > 1 and summary.slowest == n - 1, said),
    mistaken=(
        n > 1 and summary.slowest != n - 1,
        f"The summary blames rank {summary.slowest}, which is not the one that loads slowly.",
    ),
    alone=(n == 1, "One rank has nobody to wait for it."),
)

# %% [markdown]
r"""
Rank 0 sees nothing but communication that takes long, and no network would change what the late
rank causes. Exposed time is waiting, for the network *or* for another rank. Look at all ranks:
where some wait much less than the others, they are the *stragglers*, for whom the others wait.
Chapter 12 finds them in a job that runs.

## When is it worth it?

**Predict.** Each of $n$ ranks computes $6Pb$ operations for its $b$ samples, at a rate $R$: 2 for
each parameter and sample in forward, 4 in backward. One device needs $n$ times as long for the same
batch. Without overlap, $n$ ranks are faster if an all-reduce takes less than what they save. For
links of bandwidth $B$ and gradients of 4 bytes:

$$\frac{2(n-1)}{n}\,\frac{4P}{B} \;<\; (n-1)\,\frac{6Pb}{R}
\qquad\Longrightarrow\qquad
b \;>\; \frac{4R}{3nB} .$$

$P$ has cancelled out: a larger model sends more and computes more. What decides is how much the
device computes for each byte of the link, and the batch. At a batch $b$, with $b^*$ the one of the
inequality, the speed-up is $n / (1 + (n-1)\,b^*/b)$.

**Measure.** Now devices are cores that compute. Ranks without a core of their own leave, and links
have their usual speed. First $R$, as this model reaches it while all compute; then a naive step at
half of $b^*$, at $b^*$, and at two and four times as many samples. One such device would take the
shards of all one after the other, as many times as long as one shard alone:
"""

# %%
timed = comms.timed()
time.sleep(3)  # until the processes of ranks that left have ended, which takes cores
m, DIM = timed.world_size, 512
torch.manual_seed(0)
model = FullMLP(DIM, depth=4).to(timed.device)


def step_of(kind, samples):
    batch = torch.randn(2, samples, DIM, device=timed.device).unbind()
    strategy = STRATEGIES[kind](copy.deepcopy(model), timed)
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=1e-3)
    return partial(take_step, strategy, mse_loss, optimizer, batch)


# %%
shard = measure({"": step_of("none", 256)}, timed, repeat=7)[""].median
R = 6 * parameter_count(model) * 256 / shard
least = 4 * R * timed.box.seconds_per_byte / (3 * m) if timed.box and m > 1 else None
tested = {}
for factor in (0.5, 1, 2, 4) if least else ():
    b = max(1, round(factor * least))
    times = measure({kind: step_of(kind, b) for kind in ("none", "naive")}, timed, repeat=7)
    one = Timing(tuple(m * seconds for seconds in times["none"].seconds))
    tested[factor] = b, compare(times["naive"], one)

# %% tags=["plumbing"]
rows = [(f"{f:g} b*", b, f"{m / (1 + (m - 1) / f):.2f}", speed) for f, (b, speed) in tested.items()]
if rows:
    timed.print(f"R = {R / 1e9:.0f} GFLOP/s, {m} ranks over {timed.box.links[0]}: b* = {least:.0f}")
    timed.print(table(rows, ["batch", "samples a rank", "predicted", f"{m} ranks against one"]))
else:
    timed.print("tried on two ranks or more, over links of known speed: none here")

# %% tags=["plumbing"]
if rows:
    winners = [f for f, (_, speed) in tested.items() if speed.faster]
    losers = [f for f, (_, speed) in tested.items() if speed.slower]
    b, best = tested[max(tested, key=lambda f: tested[f][1].ratio)]
    said = (
        f"With {b} samples each, {m} ranks are {best} as one that takes all of them; with "
        f"{tested[0.5][0]}, which is half of b*, they are {tested[0.5][1]}."
    )
    find(
        timed,
        "break-even",
        predicted=(
            0.5 in losers and 2 in winners,
            f"At half of b* one rank wins, and at twice b* {m} do, as the inequality says. {said}",
        ),
        late=(
            0.5 in losers and 2 not in winners and bool(winners),
            f"{m} ranks win later than the inequality says. {said}",
        ),
        early=(0.5 not in losers and bool(winners), f"{m} ranks do not lose at half of b*. {said}"),
        never=(not winners, f"At none of these batches do {m} ranks win. {said}"),
    )

# %% tags=["plumbing"]
top = stage.speed_up(base, alone)
said = "One device averages with nobody."
if n > 1:
    said = (
        f"A step of {n} devices in DDP takes {human_seconds(base.median)}. Computing is "
        f"{human_seconds(alone.median)} of it, and the rest is what averaging adds. The {n} are "
        f"{top} as one."
    )
first = min((f for f, (_, speed) in tested.items() if speed.faster), default=None)
find(
    timed,
    "answer",
    worth=(
        first is not None,
        f"{said} With cores that compute, {m} ranks beat one from {first or 0:g} b* on, which is "
        f"{tested[first][0] if first else 0} samples each.",
    ),
    not_worth=(first is None and bool(tested), f"{said} {m} cores that compute did not beat one."),
    not_tried=(not tested, said),
)

# %% [markdown]
"""
**Explain.** $P$ cancels, the starts of messages do not, and $R$ changes with the batch. And cores
are not devices: one that computes alone has caches and memory to itself, and may be faster than
each of several. So a plan is a bound, and a measurement decides.

For a plan of your own, {func}`~microddp.performance.worth.step_budget` does the same arithmetic,
and adds the best case: nothing exposed but what the last backward is too short to hide. Here it is
as a form, for devices and links between machines from `microddp/plan/library.toml`:
"""

# %%
for rate in (1e11, 4e14):
    plan = step_budget(1e9, 4 * rate / (3 * 8 * 1e9), 8, peak=rate, utilisation=1, bandwidth=1e9)
    assert math.isclose(plan.unhidden.speedup, 1)  # at b*, by the inequality

# %% tags=["plumbing"]
chosen = [devices()[name] for name in ("h100", "a100", "b200")]
between = [links()[name] for name in ("400gbit", "100gbit", "25gbit", "10gbit")]
figures.explore_plan(
    {
        device.name: {"peak": device.peak, "utilisation": device.utilisation, "latency": 14e-6}
        for device in chosen
    },
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

- *The clock.* A launch returns before the GPU has done the work, so a Python clock around a line
  times the launch. microddp's clock waits for the device where a phase ends; PyTorch's
  [CUDA events](https://docs.pytorch.org/docs/stable/notes/cuda.html) are recorded on the GPU's
  stream, and do not disturb it.
- *Hidden is not free.* NCCL's kernels take some of the GPU's processors and of its memory's
  bandwidth. An all-gather of 24 blocks beside a matrix product took the product from 80 to 47 % of
  an H100's peak ([NVIDIA's forum](https://forums.developer.nvidia.com/t/337991)); products were 30
  to 40 % slower while messages were under way ([PyTorch issue
  179937](https://github.com/pytorch/pytorch/issues/179937), 2026).
- *Bandwidth depends on the message.* Eight H200 reach 220 GB/s at 16 MiB, 276 at 32 MiB and 368 at
  16 GiB, around a ring on NVLink ([ML
  engineering](https://github.com/stas00/ml-engineering/tree/master/network), 2026). DDP's buckets
  have about 25 MiB. And NVLink ends at the node, or the rack: beyond, the links between nodes
  count.

`python -m microddp.bench ddp` shows steps of your GPUs. M/C of this chapter's model elsewhere, and
what overlap could give there at most:
:::
"""

# %% tags=["plumbing"]
rows = [
    (side.words, side.devices, side.ratio, side.unhidden, side.overlapped)
    for side in known_clusters(**WORKLOAD)
]
headers = ["worked out, not measured", "devices", "M/C", "nothing hidden", "all hidden that can be"]
timed.print(table(rows, headers))

# %% [markdown]
r"""
## What to take along

Before you buy a network, in this order:

1. Time the step without averaging, on as many ranks at once. What the whole step takes beyond that
   is all that can be won.
2. Look at every rank. If one works much longer, and the others wait about that long, it is the
   problem, and no network will help.
3. Split communication into exposed and hidden. Only what is exposed costs, unless computing needs
   what messages take.
4. Rank what can be changed by the milliseconds that it saves, predict before you try, and try.
5. Below $b^* = 4R / (3nB)$ samples or tokens one device is faster, if nothing is hidden. Overlap
   lowers the bound, most for two ranks.

What limits the computing itself, {func}`~microddp.performance.roofline.find_bottleneck` says; the
next chapter takes a step apart with PyTorch's profiler.

## Exercises

**The lab.** Write a function that names why a job is slow, among planted causes. {doc}`It is
checked </labs>` on 2 and 3 ranks.

```console
$ python -m microddp.labs start 08
```

1. In `predict`, make $\alpha$ larger by 100 us. By how much can the three plans grow, a gradient
   each, buckets, and one bucket? Which prediction is least certain?

   <details class="solution"><summary>Solution</summary>

   There are 24, 8 and 1 messages. Where each waits for the one before it, each pays the error of
   $\alpha$ once: 2.4 ms, 0.8 ms and 0.1 ms. Messages that backward hides pay less, so these are
   upper bounds. What the prediction leaves out for each message, the launch of an all-reduce and a
   late rank, is multiplied in the same way. So it is least certain where messages are many.

   </details>

2. A backward can also be long because the rank is starved of cores. `break_down` counts that as
   computing. Which clock tells the two apart?

   <details class="solution"><summary>Solution</summary>

   `time.thread_time()` counts only while the thread runs on a core, `time.perf_counter()` always:

   ```python
   start, on_core = time.perf_counter(), time.thread_time()
   loss.backward()
   on_core, took = time.thread_time() - on_core, time.perf_counter() - start
   ```

   If a second process is busy on the same core, `took` grows and `on_core` stays. The difference
   holds every kind of waiting. Linux counts the part in which a thread could run and got no core:
   the second number of `/proc/thread-self/schedstat`, in nanoseconds.

   </details>

3. A step of one device takes 40 ms. Of these, 4 ms do not shrink with the batch: the optimizer and
   the start of each operation. An all-reduce adds 6 ms that nothing hides, whatever the number of
   ranks. Work out the speed-up of 2, 4 and 8 ranks, with strong and with weak scaling. Which number
   does strong scaling never reach?

   <details class="solution"><summary>Solution</summary>

   Strong scaling divides 36 of the 40 ms. A step on n ranks takes $4 + 36/n + 6$ ms, and the
   speed-up is 1.43, 2.11 and 2.76. It never reaches $40 / (4 + 6) = 4$, however many ranks there
   are. With weak scaling every step takes 46 ms for n times the samples. The speed-up is
   $40n / 46$, so 1.74, 3.48 and 6.96: an efficiency of 87 % from two ranks on. A figure for
   scaling means little until it says which of the two it is.

   </details>

4. How many tokens a step does each of 8 H100 need before they are faster than one, over 10 Gbit/s
   and over 400 Gbit/s? Let an H100 reach 40 % of its 989 TFLOP/s, and gradients have 4 bytes.

   <details class="solution"><summary>Solution</summary>

   With $R = 0.4 \cdot 989 \cdot 10^{12}$ and n = 8, $4R/(3nB)$ is about 53 000 tokens a device at
   1.25 GB/s, and about 1300 at 50 GB/s. In the global batch $nb > 4R / (3B)$ the number of devices
   is gone: at 10 Gbit/s any number of them has to share about 420 000 tokens a step before it is
   faster than one. Overlap lowers the bound, and so do gradients of 2 bytes.

   </details>
"""

# %%
comms.close()
