# %% [markdown]
r"""
# 08. Where the time goes

Where does the time of a step go, and when is a second device worth it? The chapters before timed
whole steps. This one takes them apart, predicts them from their parts, works out the bandwidth
below which training on several devices is slower than on one, and ends with a verdict on what
limits a step. All of it is measured, so ranks that have no core or GPU of their own leave at the
start: the numbers are those of the ranks that stay.
"""

# %% tags=["imports"]
import copy
import itertools
import math
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy, mse_loss

import microddp
from microddp import figures
from microddp.allreduce import bus_bandwidth, estimate_communication_time
from microddp.ddp import DDP
from microddp.hosts import human_bits, relink
from microddp.model import FullMLP, ModelConfig, SimpleCNN, gradient_bytes
from microddp.performance import (
    DDPPerformanceAnalyzer,
    Overhead,
    cores_for_each_rank,
    find_bottleneck,
    measure_all_reduce,
    measure_compute,
    measure_rates,
    measure_scaling,
    plan_by_name,
    predict_step,
    profile_steps,
    step_budget,
)
from microddp.report import MIB, human_bytes, human_seconds, table
from microddp.step import take_step
from microddp.step_times import break_down
from microddp.strategies import STRATEGIES
from microddp.timing import Timeline, Timing, measure
from microddp.workloads import Transformer, token_loss

# %%
# sphinx_gallery_builds = "a clock for every part of a step, and a prediction to hold against it"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
timed = comms.timed()
n = timed.world_size
timed.print(f"{n} of {comms.world_size} ranks stay")
if n == 1:
    timed.print("One rank waits for nobody; add --nproc-per-node=2 to see communication.")

# %% [markdown] index=["exposed communication"]
r"""
## Taking a step apart

A collective can be under way while the rank computes, or while the rank waits for it. The second
always costs time, the first only where processors move the bytes. So three things are wanted of
each step: what the phases take *without* the waiting inside them, how long communication was
*exposed*, and how long it was *hidden*.

**Predict.** If gradients are averaged one by one after backward, all of it is exposed. If hooks
start it during backward, some is hidden; the last message never is, because it waits for the last
gradient.

**Build.** The timelines of chapters 03 and 04 hold all that is needed: their spans of
communication, and those of waiting for it. Spans of one kind may overlap, so their union counts:
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
**Measure.** Steps of one model on all ranks. They differ in *strategy*: how gradients are averaged.
`microddp.strategies.STRATEGIES` is the table. A timeline begins when all ranks have met, and
strategies take turns. The batch is large, so backward can hide something:
"""

# %%
torch.manual_seed(0)
DIM = 256
model = FullMLP(DIM).to(timed.device)
batch = torch.randn(2, 64, DIM, device=timed.device).unbind()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=1e-3)


def speed_of(group):
    """Bytes a second of a link; of one of 10 Gbit/s where nobody knows."""
    return 1 / group.box.seconds_per_byte if group.box else 1.25e9


# %%
kinds = {name: make for name, make in STRATEGIES.items() if make.replicas}  # not in parts
ways = {name: make(copy.deepcopy(model), timed, bucket_cap_mb=1) for name, make in kinds.items()}
optimizers = {name: sgd(strategy.module) for name, strategy in ways.items()}
recorded = {name: [] for name in ("naive", "hooks", "bucketed", "ddp")}
large = torch.randn(2, 768, DIM, device=timed.device).unbind()
for _ in range(9):
    for name, steps in recorded.items():
        timeline = Timeline(timed)
        ways[name].record(timeline)
        take_step(ways[name], mse_loss, optimizers[name], large)
        steps.append(timeline.gather())

# %% [markdown]
"""
The book's own {func}`~microddp.step_times.break_down` follows the same rule, and adds the
phases. Of each strategy's steps, the one of median length on rank 0 is kept, after two to warm up:
"""


# %%
def on_rank_0(spans):
    return [span for span in spans if span.rank == 0]


rows, medians = [], {}
for name, steps in recorded.items():
    steps = sorted(steps[2:], key=lambda spans: break_down(on_rank_0(spans)).total)
    medians[name] = steps[len(steps) // 2]
    apart, times = (each(on_rank_0(medians[name])) for each in (take_apart, break_down))
    assert abs(apart["exposed"] - times.exposed) + abs(apart["hidden"] - times.hidden) < 1e-9
    rows.append((name, *(t * 1e3 for t in (times.total, times.exposed, times.hidden))))
timed.print(table(rows, ["ms, rank 0's median step", "step", "exposed", "hidden"]))

# %% [markdown]
"""
Here are these steps, rank by rank. Look where the first all-reduce begins, and how much of the
green lies above the hatched wait. (In "ddp" the wait is a part of backward, which the wrapper
ends.) A span of communication lasts from its launch until it is complete: it may queue, wait for a
late rank or for a core. So it may move fewer bytes a second than the link can.
"""

# %%
figures.explore_timelines(medians, title="The median steps, rank by rank")

# %% [markdown]
"""
{class}`~microddp.performance.analyzer.DDPPerformanceAnalyzer` times steps of any strategy,
PyTorch's DDP included: there it watches when gradients come and when the group has sent something.
Here are all of them, in turns, on 64 samples. "none" does not average, "ddp" is the book's wrapper,
and "torch" PyTorch's:
"""

# %%
analyzers = {name: DDPPerformanceAnalyzer(timed) for name in ways}
for _ in range(15):
    for name, strategy in ways.items():
        timed.barrier()
        analyzers[name].time_step(strategy, *batch, optimizers[name], loss_fn=mse_loss)

# %%
for analyzer in analyzers.values():
    del analyzer.steps[:3]  # to warm up
summaries = {name: analyzer.summary() for name, analyzer in analyzers.items()}
timed.print(summaries["ddp"])
assert n == 1 or summaries["naive"].ranks[0].hidden == 0

# %% tags=["plumbing"]
PARTS = ("forward", "backward", "exposed", "optimizer")
bars = {name: {p: getattr(s.ranks[0], p) for p in PARTS} for name, s in summaries.items()}
waits = {name: summary.ranks[0].exposed for name, summary in summaries.items()}
figures.stacked_bars(
    bars,
    title=f"'ddp' waits {waits['ddp'] / max(waits['naive'], 1e-9):.0%} as long as 'naive'",
    xlabel="time of a step on rank 0 (medians)",
)
rows = []
for name in ("hooks", "bucketed", "ddp"):
    ours, first = summaries[name].ranks[0], summaries["naive"].ranks[0]
    rows.append((name, *(getattr(ours, p) * 1e3 - getattr(first, p) * 1e3 for p in PARTS[1:3])))
timed.print(table(rows, ["ms more than naive", "backward", "exposed"], floats=("", "+.1f", "+.1f")))

# %% [markdown]
"""
**Explain.** On a GPU hidden communication is almost free: as chapter 04 said, NCCL takes only a few
of its many processors. Over gloo the host's processor moves the bytes. Where every core computes,
what the cores do for a message, the hooks included, is taken from backward. So what hooks save in
the last column they may lose in the one before it. Buckets also have fewer messages to start, which
saves waiting without hiding any.
"""

# %% [markdown]
r"""
## Against the speed of the link

**Predict.** An all-reduce of $S$ bytes sends $\frac{2(n-1)}{n}S$ over each link, which takes some
time $t$. If nothing of it is hidden, averaging takes $t / (c + t)$ of a step that computes for $c$.
Backward is about two thirds of $c$, as it has 4 of 6 operations. If as much of $t$ as that is
hidden, $t$ shrinks by $\frac{2}{3}c$, down to nothing. What a step really takes should lie between
the two.

**Measure.** On hosts in a box, `relink` changes the speed of every host's link while the job runs.
One convolutional network trains on all of these:
"""

# %%
SPEEDS = ("100mbit", "300mbit", "1gbit", "3gbit", "10gbit")
images = torch.randn(16, 64, device=timed.device), torch.arange(16, device=timed.device) % 10


def overhead_of(cnn):
    return DDPPerformanceAnalyzer(timed).analyze_communication_overhead(cnn, *images, repeat=3)


def share(seconds, alone):
    return seconds / (alone + seconds)


# %%
def new_cnn(channels):
    return SimpleCNN(ModelConfig(channels, hidden=2 * channels[1])).to(timed.device)


small = new_cnn((96, 192, 384))
usual, by_speed = timed.box and timed.box.links[0].option, {}
for speed in SPEEDS if timed.box else ():
    relink(timed, speed)
    overhead = overhead_of(small)
    t, c = estimate_communication_time(overhead.nbytes, n, speed_of(timed)), overhead.alone.median
    rest = max(0.0, t - 2 * c / 3)
    by_speed[timed.box.links[0]] = share(t, c), overhead.share, share(rest, c)

# %% tags=["plumbing"]
if by_speed:
    relink(timed, usual)
    names = ("nothing hidden", "measured", "all of backward hides")
    x = [link.bits_per_second / 1e9 for link in by_speed]
    columns = zip(*by_speed.values(), strict=True)
    (slow, (_, first, _)), *_, (fast, (_, last, _)) = by_speed.items()
    figures.lines(
        {name: (x, [100 * y for y in column]) for name, column in zip(names, columns, strict=True)},
        title=f"Averaging takes {first:.0%} of a step at {slow}, {last:.0%} at {fast}",
        xlabel="speed of each link, Gbit/s",
        ylabel="share of the step, %",
        log="x",
    )
    above = sum(measured > most + 0.01 for most, measured, _ in by_speed.values())
    below = sum(measured < least - 0.01 for _, measured, least in by_speed.values())
    between = len(by_speed) - above - below
    timed.print(f"between the two, to a percentage point: {between}; above {above}, below {below}")
    wire = min(1, t / overhead.seconds)
    timed.print(f"at {fast} the wire takes {wire:.0%} of what averaging adds")
timed.print("links of known speed: " + (", ".join(map(str, by_speed)) or "none here"))

# %% [markdown]
r"""
**Explain.** On slow links the two predictions are near each other: what backward can hide is little
beside what has to travel. A share above both means that averaging cost time that neither the wire
nor this model has: the start of each message, and cores that carry messages and do not compute
meanwhile. The faster the link, the more that weighs. Three steps each leave noise, too.

## Against the size of the model

The course that this book continues, [microddp](https://github.com/kiankyars/microddp) (2025), gives
a rule of thumb, without the hardware it holds for: at 10 Gbit/s, communication takes about 60 % of
the step of a model of 1M parameters, 40 % at 5M and 20 % at 20M. Is a larger model easier to train
on several devices?

**Predict.** A model of P parameters sends 4P bytes. If each parameter is used equally often for a
sample, its computing grows as P as well, and the share stays as it is. It falls only if a larger
model uses each parameter more often, or if what weighed was the start-up of messages.

**Measure.** The rule's device computes faster than this one, or less for each byte. So the links
are set to a speed that gives the smallest model about the rule's 60 %, with nothing hidden. That is
the same ratio of computing to bytes. For each MiB of gradients the table has the computing, too:
"""

# %%
# The channels of each network, and the share of communication by the rule of thumb.
RULE = {(96, 192, 384): 0.6, (208, 416, 832): 0.4, (432, 864, 1728): 0.2}
if by_speed and n > 1:
    wanted = bus_bandwidth(overhead.nbytes, 1.5 * overhead.alone.median, n)
    relink(timed, f"{wanted * 8e-6:.0f}mbit")
rows, cnns = [], {}

# %%
for channels, rule in RULE.items():
    cnn = new_cnn(channels)
    overhead = overhead_of(cnn)
    alone, millions = overhead.alone.median, overhead.nbytes / 4e6
    t = estimate_communication_time(overhead.nbytes, max(n, 2), speed_of(timed))
    shares = (share(t, alone), overhead.share, rule)
    times = (
        human_bytes(overhead.nbytes),
        *map(human_seconds, (alone, alone / overhead.nbytes * MIB)),
    )
    rows.append((f"{millions:.1f}M", *times, *(f"{part:.0%}" for part in shares)))
    cnns[f"CNN, {millions:.1f}M"] = cnn

# %% tags=["plumbing"]
headers = ["parameters", "gradients", "computing", "a MiB", "none hidden", "measured", "the rule"]
timed.print(f"links of {human_bits(8 * speed_of(timed))}")
timed.print(table(rows, headers))
if by_speed:
    relink(timed, usual)

# %% [markdown] index=["strong scaling", "weak scaling", "scaling efficiency"]
"""
**Explain.** The prediction follows the ratio of computing to bytes, and not the size: where the
computing for each MiB grows, as larger layers leave the caches or are used more often, the share
falls; where it shrinks, the share rises. Were each parameter used equally often, and equally fast,
that column would be the same in all rows. So a larger model is easier only if it computes more
with each parameter. A measured share well below the prediction shows what backward hides, one well
above it start-ups and busy cores; a few percentage points are noise. The rule names neither the
device nor the batch, and both move the result: for a device that computes ten times faster, the
wait is ten times as long beside the computing. Where the speed of the links is not known, the
prediction takes 10 Gbit/s.

## More ranks

*Strong* scaling divides one batch among more ranks; *weak* scaling gives each rank as much as
before. The *speed-up* says how many times as many samples a second there are as on one rank.
Divided by the number of ranks, it is the *efficiency*.

**Predict.** Weak scaling has more to compute for the same bytes, so its efficiency is higher. And
no run can beat what the machine gives when its ranks only compute: they share memory and caches,
and with strong scaling each has a smaller batch, which takes more than its share of the time. That
ceiling is measured too, by steps without communication on as many ranks at once.
"""


# %%
def train_step(net, optimizer, batch, loss_fn):
    optimizer.zero_grad()
    loss_fn(net(batch[0]), batch[1]).backward()
    optimizer.step()


# %%
def make_steps(group, samples):
    data = torch.randn(2, samples, DIM, device=timed.device).unbind()
    alone, wrapped = copy.deepcopy(model), DDP(copy.deepcopy(model), group)
    return tuple(partial(train_step, m, sgd(m), data, mse_loss) for m in (wrapped, alone))


# %%
curves = {}
for kind in ("strong", "weak"):
    scaling = measure_scaling(make_steps, timed, 384, weak=kind == "weak", repeat=7)
    timed.print(f"{kind} scaling\n{scaling}\n")
    counts = [point.ranks for point in scaling.points]
    curves[kind] = (counts, [scaling.speedup(point) for point in scaling.points])
    allowed = [scaling.allowed(point) for point in scaling.points]
    curves[f"{kind}, computing alone"] = (counts, allowed)

# %%
figures.lines(
    {**curves, "ideal": (counts, counts)},
    title=f"{counts[-1]} ranks: speed-up {curves['weak'][1][-1]:.2f} with weak scaling, "
    f"{curves['strong'][1][-1]:.2f} with strong",
    xlabel="ranks",
    ylabel="speed-up",
)

# %% [markdown]
r"""
**Explain.** Between a curve and its "computing alone" lies what communication costs. A speed-up
below 1 means that the ranks together are slower than one of them by itself.

## What changes the share

**Predict.** Four things can be set.

- *Bucket size*: small buckets pay more start-ups, and a single large one hides little (chapter 05).
- *Accumulation*: K micro-batches with one average send the bytes once in K backward passes. The
  added time stays and the step grows, so a share $s$ becomes about $s / (s + K (1 - s))$.
- *Batch size*: in the same direction, with more work in the same passes.
- *Precision*: `autocast` changes the time to compute, but gradients stay in 32 bits, as the
  parameters are. A communication hook that sends bf16 (16 bits) halves the bytes.
"""


# %%
def accumulate(K, batch, autocast, net, optimizer):
    optimizer.zero_grad()
    for k in range(K):
        apart = net.no_sync() if k < K - 1 and isinstance(net, DDP) else nullcontext()
        with apart, torch.autocast(timed.device.type, torch.bfloat16, enabled=autocast):
            loss = mse_loss(net(batch[0]), batch[1]) / K
            loss.backward()
    optimizer.step()


# %%
def variant(K=1, samples=64, cap=1.0, autocast=False, half_messages=False):
    """A step alone and a step together."""
    data = torch.randn(2, samples, DIM, device=timed.device).unbind()
    alone, wrapped = copy.deepcopy(model), DDP(copy.deepcopy(model), timed, bucket_cap_mb=cap)
    if half_messages:
        wrapped.register_comm_hook(timed.group, bf16_compress_hook)
    return [partial(accumulate, K, data, autocast, m, sgd(m)) for m in (alone, wrapped)]


# %%
VARIANTS = {f"buckets of {cap:g} MiB": {"cap": cap} for cap in (0.1, 1, 25)}
VARIANTS |= {f"accumulation of {K}": {"K": K} for K in (1, 2, 4, 8)}
VARIANTS |= {f"batch of {size}": {"samples": size} for size in (16, 64, 256)}
VARIANTS |= {"bf16 autocast": {"autocast": True}, "bf16 messages": {"half_messages": True}}
calls = {}
for name, options in VARIANTS.items():
    calls[name, "alone"], calls[name, "together"] = variant(**options)

# %%
times = measure(calls, timed, repeat=5)
overheads = {
    name: Overhead(gradient_bytes(model), times[name, "alone"], times[name, "together"])
    for name in VARIANTS
}

# %% tags=["plumbing"]
shares = {name: max(overhead.share, 0.0) for name, overhead in overheads.items()}
bars = {
    f"{name} ({human_seconds(overheads[name].together.median)})": {
        "computing": 1 - share,
        "averaging": share,
    }
    for name, share in shares.items()
}
once, eight = (shares[f"accumulation of {K}"] for K in (1, 8))
figures.stacked_bars(
    bars,
    title=f"Averaging: {once:.0%} of a step, {eight:.0%} after 8 micro-batches",
    xlabel="share of the step (its time)",
    formatter=lambda share, _: f"{share:.0%}",
)

# %% tags=["plumbing"]
caps = [name for name in VARIANTS if name.startswith("buckets")]
best = min(caps, key=lambda name: overheads[name].together.median)
told = all(overheads[best].together.clearly_below(overheads[c].together) for c in caps if c != best)
timed.print(f"shortest step: {best}{'' if told else ', not clearly below the others'}")
same = [shares[name] for name in ("buckets of 1 MiB", "accumulation of 1", "batch of 64")]
timed.print(f"one and the same step, timed three times: {min(same):.1%} to {max(same):.1%}")
rows = [(K, shares[f"accumulation of {K}"], once / (once + K * (1 - once))) for K in (2, 4, 8)]
timed.print(f"accumulation, from {once:.0%} without")
timed.print(table(rows, ["micro-batches", "measured", "predicted"], floats=".0%"))

# %% [markdown]
r"""
**Explain.** The step that accumulates is another step, with other weights after it: it sees K times
the samples for each update. What averaging adds need not stay the same, nor need four times the
samples take four times as long, so a share may fall otherwise than the formula says. Autocast helps
where the processor has instructions for bf16 and hurts where it converts instead. So its share can
go either way while the bytes stay. Three of the bars are one and the same step: what they differ by
is noise. Shares of different bucket sizes have that noise in their computing, too, so compare their
times, as the first line below the figure does. Half the bytes pay where the link takes longer than
the two conversions.

## Predicted from its parts

**Predict.** A step of any plan, from what is measured one part at a time: forward, backward with
the moment of each gradient, the optimizer, and of an all-reduce the start-up $\alpha$ and the time
per byte $\beta$. Buckets travel one after the other:

$$\text{start}_b = \max(\text{ready}_b, \text{end}_{b-1}), \qquad
\text{end}_b = \text{start}_b + \alpha + \beta S_b .$$

**Build.** That is a loop:
"""


# %%
def backward_ends(ready, sizes, backward, alpha, beta):
    """When gradients are averaged: seconds since backward began."""
    end = 0.0
    for moment, nbytes in zip(ready, sizes, strict=True):
        end = max(moment, end) + alpha + beta * nbytes
    return max(end, backward)


# %% [markdown]
"""
The parts come from the library. {func}`~microddp.performance.prediction.measure_compute` times a
step without communication, with a hook on each parameter, and
{func}`~microddp.performance.prediction.plan_by_name` says which gradients travel together:
"""


# %%
def predict(net, compute, cost, cap):
    plan = plan_by_name("ddp", net, compute.ready, cap)
    ready = [max(compute.ready[name] for name in bucket.names) for bucket in plan]
    sizes = [bucket.nbytes for bucket in plan]
    backward = backward_ends(ready, sizes, compute.backward, cost.alpha, cost.beta)
    return compute.forward + backward + compute.optimizer


# %%
cost = measure_all_reduce(timed, repeat=5)
timed.print(
    f"all-reduce: alpha {human_seconds(cost.alpha)}, beta {cost.beta * 1e9:.3f} ns/byte, "
    f"{cost.cores:.2f} cores of each rank busy"
)

# %% [markdown]
r"""
The book's own {func}`~microddp.performance.prediction.predict_step` takes two more things into
account. To copy gradients into buckets takes time. And where processors move the bytes, a bucket
that travels keeps some of the cores busy, and backward goes on with what is left of them. Without
the two, both must agree:
"""

# %%
compute = measure_compute(model, mse_loss, batch, sgd, timed)
bare = replace(compute, copy=0.0), replace(cost, cores=0.0)
for cap in (0.1, 1.0, 25.0):
    core = predict_step("ddp", model, *bare, bucket_cap_mb=cap).step
    assert abs(predict(model, *bare, cap) / core - 1) < 1e-9

# %% [markdown]
r"""
**Measure.** A model that only explains what it was fitted to explains little. So steps are timed on
links of two other speeds. Beta is a link's time for $\frac{2(n-1)}{n}$ bytes, known for each.
Alpha, from messages of up to 16 KiB, stays, as does what the cores do for a byte. Four models are
predicted and timed in {class}`~microddp.ddp.wrapper.DistributedDataParallel`, in turns:
"""


# %%
tokens = torch.randint(512, (4, 64), device=timed.device)
decoder = Transformer(512, dim=192, depth=3, heads=3, context=64).to(timed.device)
CASES = {f"MLP of width {d}": (FullMLP(d).to(timed.device), d, mse_loss) for d in (128, 512)}
CASES = {
    name: (net, torch.randn(2, 64, dim, device=timed.device).unbind(), loss_fn)
    for name, (net, dim, loss_fn) in CASES.items()
}
smallest, cnn = next(iter(cnns.items()))
CASES[smallest] = (cnn, images, cross_entropy)
CASES["transformer"] = (decoder, (tokens, tokens.roll(-1, 1)), token_loss)


# %%
def on_this_link(cost):
    """The cores spend as much on a byte as before, while it travels for longer or shorter."""
    if timed.box is None:
        return cost
    beta = 2 * (n - 1) / n / speed_of(timed)
    return replace(cost, beta=beta, cores=cost.cores * cost.beta / beta)


def both(net, data, loss_fn, cap=1.0):
    """This chapter's prediction and the book's."""
    compute, now = measure_compute(net, loss_fn, data, sgd, timed, repeat=4), on_this_link(cost)
    whole = predict_step("ddp", net, compute, now, cores_for_each_rank(timed), cap)
    return predict(net, compute, now, cap), whole.step


# %%
rows, errors = [], {}
speeds = ("500mbit", "2gbit") if timed.box else ("as it is",)
for speed, (name, (net, data, loss_fn)) in itertools.product(speeds, CASES.items()):
    if timed.box:
        relink(timed, speed)
    wrapped = DDP(copy.deepcopy(net), timed, bucket_cap_mb=1.0)
    step = partial(train_step, wrapped, sgd(wrapped), data, loss_fn)
    predicted, seconds = [], []
    for _ in range(2):  # in turns, because a machine changes its pace
        predicted.append(both(net, data, loss_fn))
        seconds += measure({"": step}, timed, warmup=1, repeat=4)[""].seconds
    both_medians = [statistics.median(each) for each in zip(*predicted, strict=True)]
    measured = Timing(tuple(seconds))
    link = human_bits(8 * speed_of(timed)) if timed.box else "this machine's"
    missed = [seconds / measured.median - 1 for seconds in both_medians]
    errors.setdefault(link, []).append(missed)
    rows.append((name, link, *map(human_seconds, both_medians), measured, *missed))

# %% tags=["plumbing"]
if timed.box:
    relink(timed, usual)
headers = ["model", "link", "predicted", "the book's", "measured (quartiles)", "error", "its error"]
timed.print(table(rows, headers, floats=("", "", "", "", "", "+.0%", "+.0%")))
flat = [missed for of_link in errors.values() for missed in of_link]
middle = [statistics.median(map(abs, column)) for column in zip(*flat, strict=True)]
timed.print(f"median error {middle[0]:.0%}, of the book's {middle[1]:.0%}")
spreads = [[quartile / t.median - 1 for quartile in t.spread] for *_, t, _, _ in rows]
inside = sum(
    low <= of_book <= high for (low, high), (_, of_book) in zip(spreads, flat, strict=True)
)
timed.print(f"within the quartiles of what was measured: {inside} of the book's {len(flat)}")
for link, of_link in errors.items():
    signed = statistics.median(error for _, error in of_link)
    longer = sum(error < 0 for _, error in of_link)
    timed.print(f"{link}: {longer} of {len(of_link)} steps took longer than the book predicts,")
    timed.print(f"  which is {signed:+.0%} in the middle")

# %% [markdown] index=["break-even"]
r"""
**Explain.** The predictions leave out what ranks do to each other. One that is late makes all wait,
and threads that want the same core take turns by the scheduler's choice. Both make a real step
longer than the predicted one: then the error is negative. And each part is measured at another
moment than the step, so an error can be positive, too. One within the quartiles is no error that
this run can see.

## When is it worth it?

**Predict.** Each of n ranks computes $6Pb$ operations for its b samples, at a rate R: 2 for each
parameter and sample in forward, 4 in backward. One device needs n times as long for the same batch.
Without overlap, n ranks are faster if an all-reduce takes less than what they save. With links of
bandwidth B and a start-up L, that is:

$$L + \frac{2(n-1)}{n}\,\frac{4P}{B} \;<\; (n-1)\,\frac{6Pb}{R}
\qquad\Longrightarrow\qquad
B \;>\; \frac{8P\,(n-1)/n}{6Pb\,(n-1)/R - L} .$$

For large models L does not matter and P cancels out: the bandwidth that is needed depends on the
device, on n and on b alone. For small ones the start-up can be more than all there is to save.

This machine's R is that of the fastest of several large products, and L is its $\alpha$ times the
rounds. An H100 enters with its maker's figure, 989 TFLOP/s in dense bf16 ([NVIDIA, H100 data
sheet](https://www.nvidia.com/en-us/data-center/h100/), SXM, 2024). Large trainings reach about 40 %
of it ([Llama 3](https://arxiv.org/abs/2407.21783), table 4: 38 to 43 %, 2024). Its start-up is
taken to be the time of an all-reduce of 1 MiB, at 40 GB/s bus bandwidth on 8 H200 ([ML
engineering](https://github.com/stas00/ml-engineering), network, 2025).
"""

# %%
RANKS, SAMPLES = 8, 1024
rates = measure_rates(timed)
H100 = 0.4 * 989e12, 2**20 * 2 * (RANKS - 1) / RANKS / 40e9
HERE = rates.flops, cost.alpha * (RANKS - 1) / max(n - 1, 1)  # start-ups grow with the rounds


def break_even(parameters, rate, start_up):
    saved = 6 * parameters * SAMPLES * (RANKS - 1) / rate - start_up
    return 8 * parameters * (RANKS - 1) / RANKS / saved if saved > 0 else float("inf")


# %% tags=["plumbing"]
def curve(rate, start_up):
    sizes = [10 ** (k / 4) for k in range(16, 45)]
    points = [(size, break_even(size, rate, start_up) / 1e9) for size in sizes]
    x, y = zip(*(point for point in points if point[1] < 1e3), strict=True)
    return x, y


# %% tags=["plumbing"]
LINKS = {"10 Gbit/s Ethernet": 1.25, "PCIe 4.0 x16": 31.5, "NVLink 4 (H100)": 450}
if n > 1 and cost.beta > 0:
    LINKS["this machine's all-reduce"] = bus_bandwidth(1, cost.beta, n) / 1e9
need_here, need_h100 = (break_even(1e9, *device) / 1e9 for device in (HERE, H100))
timed.print(f"1e9 parameters need {need_here:.3g} GB/s here, and {need_h100:.3g} GB/s on H100s")
assert need_here < need_h100
if n > 1:
    least = 4 * rates.flops / (3 * n * speed_of(timed))
    timed.print(f"{n} ranks are faster here, nothing hidden, from {least:.0f} samples a rank on")
    timed.print(f"(above, they had {384 // n} with strong scaling, and 384 with weak)")

# %% tags=["plumbing"]
ends = (1e4, 1e11)
figures.lines(
    {
        "H100, computing": curve(*H100),
        "this device, computing": curve(*HERE),
        **{name: (ends, (gigabytes, gigabytes)) for name, gigabytes in LINKS.items()},
    },
    title="A link above a device's curve makes 8 of them faster than one",
    xlabel=f"parameters of the model ({SAMPLES} samples or tokens a rank and step)",
    ylabel="bandwidth of a link, GB/s",
    log="xy",
)

# %% [markdown]
"""
The links by their specifications, in each direction: 10 Gbit/s; PCIe 4.0 with 16 lanes of 16
GT/s; NVLink 4 with 18 links of 25 GB/s, from NVIDIA's data sheet.

For a plan of your own, {func}`~microddp.performance.worth.step_budget` does the same, and adds a
bound: nothing exposed but what the last backward is too short to hide.
"""

# %%
for rate, start_up in (H100, HERE):
    device = {"peak": rate, "utilisation": 1, "latency": start_up / (2 * RANKS - 2)}
    planned = step_budget(1e9, SAMPLES, RANKS, bandwidth=1e9, **device).unhidden
    assert math.isclose(planned.break_even, break_even(1e9, rate, start_up))

# %% tags=["plumbing"]
devices = {
    "H100": {"peak": 989e12, "utilisation": 0.4, "latency": H100[1] / (2 * RANKS - 2)},
    "this machine's": {"peak": HERE[0], "utilisation": 1, "latency": HERE[1] / (2 * RANKS - 2)},
}
links = sorted(((name, 1e9 * speed) for name, speed in LINKS.items()), key=lambda link: -link[1])
figures.explore_plan(
    devices, dict(links), parameters=1e9, tokens=SAMPLES, ranks=RANKS, budget=step_budget
)

# %% [markdown]
"""
## The verdict

What limits a step? {func}`~microddp.performance.roofline.find_bottleneck` counts each operation's
arithmetic and bytes. At this machine's rates each operation would take some time to be computed
(*compute*), some to move its bytes (*memory*), and some to be started at all (*host*). The longest
of the three is what limits it. Communication is added as it was measured. The percentages are of
the time that the rates explain, which "together" compares with the whole step; a step that is
shorter than that ran above the measured rates, out of a cache, say. Here are three
models made to be limited by one thing each, and then the model of this chapter:
"""


# %%
def judge(net, data, make_optimizer=sgd, times=None):
    step = partial(train_step, net, make_optimizer(net), data, mse_loss)
    if times:  # a step that was timed with its communication
        return find_bottleneck(step, rates, measured=times.total, exposed=times.exposed)
    return find_bottleneck(step, rates, measured=measure({"": step}, timed, repeat=3)[""].median)


def case(dim, depth, samples, make_optimizer=sgd):
    data = torch.randn(2, samples, dim, device=timed.device).unbind()
    return judge(FullMLP(dim, depth).to(timed.device), data, make_optimizer)


def adam(net):
    return torch.optim.Adam(net.parameters())


# %%
verdicts = {
    "wide layers, large batch": case(512, 4, 1024),
    "wide layers, one sample": case(1024, 4, 1, adam),
    "64 layers of width 8": case(8, 64, 4),
    "this chapter's, naive": judge(ways["none"].module, batch, times=summaries["naive"].ranks[0]),
}
for name, verdict in verdicts.items():
    timed.print(f"{name}: {verdict}\n")
if timed.device.type == "cpu":
    assert [v.bottleneck for v in verdicts.values()][:3] == ["compute", "memory", "host"]

# %% [markdown]
"""
## Where it breaks

**One slow rank looks like a slow network.** Here, to load a batch takes the last rank as long as
two of the steps of "ddp" above:
"""


# %%
def slow_loader(batches=8):
    for _ in range(batches):
        if timed.rank == n - 1:
            time.sleep(2 * summaries["ddp"].ranks[0].total)
        yield batch


# %%
net = DDP(copy.deepcopy(model), timed)
optimizer, analyzer = sgd(net), DDPPerformanceAnalyzer(timed)
for inputs, targets in analyzer.batches(slow_loader()):
    analyzer.time_step(net, inputs, targets, optimizer, loss_fn=mse_loss)

# %%
summary = analyzer.summary()
timed.print(summary)
figures.stacked_bars(
    summary.bars,
    title=f"Rank {summary.slowest} works {summary.spread:.1f} times as long, and waits least",
    xlabel="time of a step (medians)",
)
first, last = summary.ranks[0].exposed, summary.ranks[-1].exposed
timed.print(f"of rank 0's wait, {human_seconds(first)}, the late rank explains")
timed.print(f"at least {human_seconds(first - last)}, as it waits {human_seconds(last)} itself")
assert summary.slowest == n - 1
assert n == 1 or first > last

# %% [markdown]
r"""
Rank 0 sees nothing but communication that takes long, and no network would change what the late
rank explains of it. Exposed time is waiting, for the network *or* for another rank. Look at all
ranks: where some wait much less than the others, they are the *stragglers*, which the others wait
for.

## What to take along

Before you buy a network, in this order:

1. Warm up, let the ranks meet before each measurement, repeat; report a median with its spread.
2. Time the step without averaging, on as many ranks at once. What the whole step takes beyond that
   is all that can be won.
3. Look at every rank. If one works much longer, and the others wait about that long, it is the
   problem, and no network will help.
4. Split communication into exposed and hidden. Only the exposed part costs, unless processors move
   the bytes.
5. If start-ups weigh, use larger buckets; if bytes weigh, accumulate, enlarge the batch, or send
   fewer bits where to make them costs less than to send them.
6. If computing weighs, you are done: a faster network has nothing left to give.

## Appendix: what the clock costs

A clock should not slow what it measures. Here are steps on four times the samples, with and without
the analyzer; a change within the quartiles is none:
"""

# %%
net = DDP(copy.deepcopy(model), timed)
optimizer, analyzer = sgd(net), DDPPerformanceAnalyzer(timed)
longer = [torch.cat([tensor] * 4) for tensor in batch]

# %%
calls = {
    "plain": partial(train_step, net, optimizer, longer, mse_loss),
    "watched": partial(analyzer.time_step, net, *longer, optimizer, loss_fn=mse_loss),
}
clocked = measure(calls, timed, repeat=30)
added = clocked["watched"].ratio(clocked["plain"]).median - 1
timed.print(f"with the analyzer, a step of {clocked['plain']} changes by {added:+.1%}")

# %% [markdown]
"""
## Appendix: the profiler

PyTorch's profiler records every operation, at a price. So it is the tool for *what* takes the time,
after a clock has said *how much* there is to find. The book's
{func}`~microddp.performance.profiler.profile_steps` sums it up, and writes a trace for each rank
that [Perfetto](https://ui.perfetto.dev) opens:
"""

# %%
net = DDP(copy.deepcopy(model), timed, bucket_cap_mb=1)
with tempfile.TemporaryDirectory() as folder:
    step = partial(train_step, net, sgd(net), batch, mse_loss)
    timed.print(profile_steps(step, timed, folder=folder))

# %% [markdown]
r"""
The first table is by kind of operation, as means over steps and ranks. Over gloo its shares are of
the step's time, and may add up to more than 100 %, since all-reduces run beside the rest. The
second table takes the step of each rank apart. Time in which none of these is under way is *idle*;
on a CPU the host is the device, so "host busy" repeats "computing".

## Exercises

**The lab.** Write a function that names why a job is slow, among planted causes. {doc}`It is
checked </labs>` on 2 and 3 ranks.

```console
$ python -m microddp.labs start 08
```

1. `predict_step` takes any strategy. Predict a step of this chapter's model with `"hooks"`, and
   with `"ddp"` at caps of 1 and 25 MiB, and again with an $\alpha$ that is 100 us larger. Which
   prediction moves most, and why?

   <details class="solution"><summary>Solution</summary>

   The one of the hooks. The plans have 32, 4 and 1 messages. Where each message waits for the
   one before it, each pays the error of $\alpha$ once: the step grows by 3.2 ms, 0.4 ms and 0.1 ms.
   Messages that backward hides pay less, so these are upper bounds. What the prediction leaves out
   for each message, the launch of an all-reduce and a late rank, is multiplied in the same way. So
   the prediction is least certain where messages are many and small.

   </details>

2. A backward can also be long because the rank is starved of cores. `break_down` counts that as
   computing. Which clock tells the two apart? Try it with a second process that is busy on the same
   core.

   <details class="solution"><summary>Solution</summary>

   `time.thread_time()` counts only while the thread runs on a core, `time.perf_counter()` always:

   ```python
   start, on_core = time.perf_counter(), time.thread_time()
   loss.backward()
   on_core, took = time.thread_time() - on_core, time.perf_counter() - start
   ```

   With `OMP_NUM_THREADS=1` and both processes pinned to one core by `os.sched_setaffinity`, the
   backward took twice as long as alone, and its time on the core stayed the same. So a span would
   have to record both clocks. The difference holds every kind of waiting. Linux counts the part in
   which a thread could run and got no core: the second number of `/proc/thread-self/schedstat`, in
   nanoseconds.

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

4. Solve the inequality for b, for a model so large that L does not matter. How many tokens a step
   does each of 8 H100 need over 10 Gbit/s, and over NVLink? Then put in your own device and link.

   <details class="solution"><summary>Solution</summary>

   $P$ and $n - 1$ cancel out, and what is left is

   $$b > \frac{8R}{6nB} = \frac{4R}{3nB} .$$

   With $R = 0.4 \cdot 989 \cdot 10^{12}$ and n = 8 that is about 53 000 tokens a rank at 1.25 GB/s,
   and about 150 at 450 GB/s. In the global batch $nb > 4R / (3B)$ the number of ranks is gone: at
   10 Gbit/s any number of them has to share about 420 000 tokens a step before it is faster than
   one. Overlap lowers the bound, and so do gradients of 2 bytes.

   </details>
"""

# %%
comms.close()
