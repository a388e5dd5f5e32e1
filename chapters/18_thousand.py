# %% [markdown]
r"""
# 18. A thousand devices

What will a training do on 8, 64 or 1024 devices, and how far can the answer be trusted? You care
because a thousand GPUs are paid for before anybody can try them. This chapter builds a simulator in
fifteen lines, and compares microddp's simulator with hosts in a box and, next to a simple guess,
with hundreds of published figures.
"""

# %% tags=["imports"]
import contextlib
import copy
import io
import json
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce, ring_cost
from microddp.findings import compare, find
from microddp.hosts import relink
from microddp.performance import (
    Network,
    Port,
    Way,
    measure_compute,
    measure_network,
    measured_work,
    simulate,
)
from microddp.plan import Training, compare_published, count_parameters, devices, links, plan
from microddp.plan.__main__ import main as ask_plan
from microddp.plan.library import Overheads
from microddp.plan.planning import usual_failures
from microddp.plan.published import (
    Compared,
    middle,
    skill,
    usual_utilisation,
)
from microddp.program import Layer, Work
from microddp.report import human_seconds, table
from microddp.shared import carrier
from microddp.stage import (
    pausing_batch,
    pausing_loss,
    pausing_model,
    published_cluster,
    set_stage,
    work_of,
)
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.timing import measure

# %%
# sphinx_gallery_builds = "a simulator of many devices, held against what was measured"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())

# %% [markdown] index=["simulator", "discrete-event simulation"]
r"""
## A clock for each device

**Build.** All devices run one program: compute, start a collective, wait for one. To play a step,
go through it once, with a clock for each device, and one for when the network is free again. A
collective starts when the *last* device has come to it, and the one before is over. It takes
alpha-beta's time of a ring (chapter 02):
"""


# %%
def ring(n, nbytes, bandwidth, latency):
    return 2 * (n - 1) * (latency + nbytes / n / bandwidth)


def play(layers, n, bandwidth, latency):
    """Seconds of a step of hooks; of each layer: forward, backward, bytes of its gradient."""
    clock = torch.zeros(n, dtype=torch.float64)
    free, ends = 0.0, []
    for forward, _, _ in layers:
        clock += forward
    for _, backward, nbytes in reversed(layers):
        clock += backward
        free = max(free, clock.max().item()) + ring(n, nbytes, bandwidth, latency)
        ends.append(free)
    return max(clock.max().item(), *ends)


# %% [markdown]
"""
microddp's {func}`~microddp.performance.simulator.simulate` plays the programs of all the book's
strategies. Of this one it says the same:
"""

# %%
layers = [(0.010, 0.020, 4 << 20)] * 6
work = Work(tuple(Layer(f, b, (nbytes // 4,)) for f, b, nbytes in layers))
found = simulate(work, Network(64, Port(1e9, 1e-5)), Way("hooks")).step
right = play(layers, 64, 1e9, 1e-5)
comms.print(f"64 devices: {human_seconds(right)}, by microddp: {human_seconds(found)}")
assert abs(found / right - 1) < 1e-9

# %% [markdown]
r"""
## Is it right, where it can be measured?

Hosts in a box have links of known speed, and few cores. So their devices are of known speed, too
(chapter 03): a layer sleeps as long as a GPU would compute, then has a real gradient. Messages are
real, and so is microddp's code that sends them. Links are slow, 200 Mbit/s. Two models and five
strategies are asked for; zero1 and zero3 are stages 1 and 3 of chapter 16. gloo carries the
messages of naive and hooks, microddp's rings in Python those of the others:
"""

# %%
MODELS = {  # layers, values of each, seconds of its forward
    "8 x 256 KiB": (8, 1 << 16, 7.5e-3),
    "4 x 512 KiB": (4, 1 << 17, 10e-3),
}
WAYS = ("naive", "hooks", "ddp", "zero1", "zero3")
CAP, BATCH = 0.5, pausing_batch(comms.device)  # MiB of a bucket
CARRIERS = {"gloo": ("naive", "hooks"), "rings": ("ddp", "zero1", "zero3")}


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=1e-4)


# %% tags=["plumbing"]
def pausing(name, times):
    count, values, seconds = MODELS[name]
    seconds *= times
    return pausing_model(Work((Layer(seconds, 2 * seconds, (values,)),) * count), comms.device)


def strategy_of(way, model, timed, cap=CAP):
    model, options = copy.deepcopy(model), {}
    if way == "ddp":
        model = microddp.DDP(model, timed, bucket_cap_mb=cap, all_reduce=carrier("ring", timed))
    elif way.startswith("zero"):
        options = {"collectives": "ring"}
    return STRATEGIES[way](model, timed, cap, **options)


def step_of(way, model, timed):
    strategy = strategy_of(way, model, timed)
    return partial(take_step, strategy, pausing_loss, optimizer_of(strategy), BATCH)


# %% [markdown]
"""
**Measure.** The *fit* is made on two hosts. For gloo and for rings it finds a link's latency (its
bandwidth is known) and the processor time of a message and of a byte. The times of layers,
optimizer and copying are measured. Optimizer and copying are work of cores, so their times are
multiplied by ranks per core:
"""


# %%
class Fit(NamedTuple):
    times: float  # what the seconds of MODELS are multiplied by
    works: dict  # by the model
    networks: dict  # by the carrier: a port and a processor


def by_gloo(tensor, timed, op):
    timed.all_reduce(tensor, op)


def fit_on(link, times=1.0):
    if comms.box:
        relink(comms, link)
    fit = Fit(times, {}, {})
    if two := comms.subgroup(range(2)) if comms.world_size > 1 else None:
        for carried, all_reduce in (("gloo", by_gloo), ("rings", ring_all_reduce)):
            fit.networks[carried] = measure_network(two, 31, all_reduce)
        for name in MODELS:
            model = pausing(name, times)
            counts = {key: p.numel() for key, p in model.named_parameters()}
            compute = measure_compute(model, pausing_loss, BATCH, optimizer_of, two, 5)
            fit.works[name] = partial(measured_work, compute, counts)
        two.close()
    return fit


# %% tags=["plumbing"]
def say(fit):
    for carried, (port, processor) in fit.networks.items():
        core = human_seconds(processor.message * comms.cores) if processor else "nothing"
        start = human_seconds(port.latency)
        comms.print(f"{carried}: a message takes {start} to start, and {core} of a core's time")


# %%
fit = fit_on("200mbit")
say(fit)


# %% tags=["plumbing"]
def cores_of(calls, n, processor):
    """Seconds of all cores for the messages of all ranks."""
    seconds = 0.0
    for call in calls if processor else ():
        cost = ring_cost(n, call.nbytes, 2 if call.half == "all_reduce" else 1)
        seconds += n * cost.rounds * (processor.message + cost.round_bytes * processor.byte)
    return seconds


# %% [markdown]
"""
*Ask* for four and eight hosts. (Each step is really taken, at the stage's speed, so this takes a
while.) Nothing is fitted again:
"""


# %%
def predicted(name, way, n, fit):
    """Seconds of a step, and the share in which messages take all cores."""
    crowd = max(1.0, n / comms.cores) if comms.device.type == "cpu" else 1.0
    (carried,) = (key for key, ways in CARRIERS.items() if way in ways)
    port, processor = fit.networks[carried]
    network = Network(n, port, processor=processor)
    found = simulate(fit.works[name](crowd=crowd), network, Way(way, "ring", CAP))
    return found.step, cores_of(found.calls, n, processor) / found.step


# %%
class Asked(NamedTuple):
    ranks: int
    layers: str
    way: str
    measured: float  # seconds
    simulated: float
    cores: float


def ask(n, name, fit):
    """Measure on n ranks; what is predicted comes from rank 0, which has the fit."""
    timed, rows = comms.subgroup(range(n)), []
    if timed:
        model = pausing(name, fit.times)
        steps = {way: step_of(way, model, timed) for way in WAYS}
        for way, timing in measure(steps, timed, warmup=1, repeat=3).items():
            guess, cores = predicted(name, way, n, fit) if fit.networks else (0.0, 0.0)
            rows.append(Asked(n, name, way, timing.median, guess, cores))
    comms.barrier()
    return [Asked(*row) for row in comms.all_gather_data(rows)[0]]


# %%
checked = []
for n in (4, 8):
    for name in MODELS if n <= comms.world_size else ():
        checked += ask(n, name, fit)

# %% [markdown]
r"""
"Measured" is the median of three rounds. Errors are above zero where *more speed was promised than
came*. *Cores* is the share of the simulated step in which all cores would be busy with messages:
"""


# %% tags=["plumbing"]
def error_of(row):
    return row.measured / row.simulated - 1


def errors_of(cases):
    rows = [
        (*row[:3], *map(human_seconds, row[3:5]), f"{error_of(row):+.0%}", f"{row.cores:.0%}")
        for row in cases
    ]
    return table(rows, ["ranks", "layers", "strategy", "measured", "simulated", "error", "cores"])


comms.print(errors_of(checked) if checked else "fewer than four ranks: nothing to ask")


# %% tags=["plumbing"]
def off(rows):
    """Median error without its sign, and the median with it, as they are written."""
    errors = [error_of(row) for row in rows]
    return (round(median(map(abs, errors)), 2), median(errors)) if errors else (0.0, 0.0)


asked = {case.ranks for case in checked}
on_four, on_eight = ([case for case in checked if case.ranks == n] for n in (4, 8))
four, eight = off(on_four), off(on_eight)
if 8 in asked:
    least, greatest = (f(1e3 * x for case in checked for x in case[3:5]) for f in (min, max))
    figures.lines(
        {"equal": ([least, greatest], [least, greatest])},
        crosses=[(1e3 * case.measured, 1e3 * case.simulated) for case in checked],
        title=f"Fitted on two hosts: {four[0]:.0%} off on four, {eight[0]:.0%} on eight (medians)",
        xlabel="measured step, ms",
        ylabel="simulated step, ms",
    )

# %% tags=["plumbing"]
by_n = f"The median error of steps on 4 ranks is {four[0]:.0%} (signed {four[1]:+.0%})"
both = f"{by_n}, on 8 {eight[0]:.0%} (signed {eight[1]:+.0%})"
pairs = zip(on_four, on_eight, strict=True) if 8 in asked else ()
grown = [new.way for old, new in pairs if abs(error_of(new)) - abs(error_of(old)) > 0.01]
each = ", ".join(
    f"{sum(way in ways for way in grown)} of {len(ways) * len(MODELS)} ({carried})"
    for carried, ways in CARRIERS.items()
)
both += f". By more than a point errors grow in {each}"
find(
    comms,
    "errors-by-n",
    grows=(8 in asked and eight[0] > four[0] + 0.011, f"{both}: the median grows."),
    same=(
        8 in asked and eight[0] <= four[0] + 0.011,
        f"{both}: the median grows by no more than a point.",
    ),
    one=(asked == {4}, f"{by_n}. There are no eight to ask."),
    none=(not asked, "With fewer than four ranks there is nothing to ask."),
)

# %% tags=["plumbing"]
largest = max(checked, key=lambda row: abs(error_of(row)), default=None)
said = largest and (
    f"The largest error, {error_of(largest):+.0%}, is that of {largest.way} of {largest.layers} on "
    f"{largest.ranks}. By the fit messages take {largest.cores:.0%} of the cores' time in it; in "
    f"the median step on as many ranks "
    f"{median(row.cores for row in checked if row.ranks == largest.ranks):.0%}."
)
find(
    comms,
    "largest-error",
    some=(largest is not None, said or ""),
    none=(largest is None, "With fewer than four ranks there is no error."),
)

# %% [markdown]
"""
**Explain.** For each round of a ring the simulator takes the longer of two times: the link's, and
that of all cores for the round's messages. In truth a message first waits for a core, and then
takes its link. That is left out, so where both times are long too much should be promised, other
things equal: how much, this page does not measure. Errors below 0 have other causes, which it does
not show. Is the strategy that is simulated as fastest the fastest?
"""


# %% tags=["plumbing"]
def fastest_of(rows):
    """A sentence on the strategies simulated as fastest, and whether each is."""
    lost = []  # how much longer than the fastest they take
    for case in dict.fromkeys(row[:2] for row in rows):
        mine = [row for row in rows if row[:2] == case]
        chosen = min(mine, key=lambda row: row.simulated)
        lost.append(chosen.measured / min(row.measured for row in mine) - 1)
    right, most = sum(loss == 0 for loss in lost), max(lost, default=0.0)
    said = f"The strategy that is simulated as fastest is so in {right} of {len(lost)} cases"
    said += f"; else it took up to {most:.1%} longer than the fastest" if most else ""
    return f"{said}.", most == 0


said, right = fastest_of(checked)
find(
    comms,
    "fastest",
    all=(bool(checked) and right, said),
    some=(bool(checked) and not right, said),
    none=(not checked, "There is no choice to check."),
)

# %% [markdown] index=["NCCL's tuning"]
r"""
## Is it right, where others measured?

Here the simulator plays the same programs, and nothing that was fitted above goes in. What CPUs do
for messages is left out, and NCCL chooses how they go.

- *Collectives* take the best of ring and tree with one of three protocols, by the latencies in
  NCCL's [tuning.cc](https://github.com/NVIDIA/nccl/blob/v2.18.5-1/src/graph/tuning.cc). NVLS
  (chapter 15) is left out of trainings. A ring's chunk crosses the network once a *node*, not once
  a device. For trees a measured share of the bandwidth replaces NCCL's own estimate (of 16 MiB on
  4 nodes of 8 B200).
- *Computing* is slower while messages are under way, since they share memory and processors: by
  18.9 % on average, for GPT and LLaMA on A100, H100, MI210 and MI250
  ([2025](https://arxiv.org/abs/2507.03114)).
- *The rest is fitted*: how long the slowest device lets others wait, and how much of a link TCP and
  PCIe reach. Each share is predicted by a fit **without its own publisher's rows**. (Most rows were
  known when these terms were chosen.)

**Predict.** Model, tokens, devices, links, and the speed on the fewest devices go in. Out comes the
share of that speed which each of more devices keeps. The guess: *all is kept*. *Skill* is 1 minus
the quotient of the median error and the guess's median error: at 0 the simulator is worth no more
than the guess, at 1 it is right. Shares below 0.95 are *hard*; for the others the guess is nearly
right. (Bad luck makes a share hard, too, so with their signs hard ones lean to errors above zero,
and the others below.)
"""

# %%
rows = [asdict(row) for row in compare_published()] if comms.rank == 0 else []
published = [Compared(**row) for row in comms.all_gather_data(rows)[0]]
kept = [row for row in published if row.kind == "speed kept"]
hard = [row for row in kept if row.hard]


# %% tags=["plumbing"]
def sizes(rows):
    """Medians of the errors and of the guess's, without their signs."""
    return median(abs(r.error) for r in rows), median(abs(r.guess_error) for r in rows)


def line(name, rows):
    error, guess = sizes(rows)
    who = len({row.publisher for row in rows})
    signed = median(row.error for row in rows)
    numbers = (f"{x:.1%}" for x in (error, guess))
    return (name, len(rows), who, *numbers, f"{skill(rows):.2f}", f"{signed:+.1%}")


# %% tags=["plumbing"]
(off_all, guess_all), (off_hard, guess_hard) = sizes(kept), sizes(hard)
order = sorted(kept, key=lambda row: row.published)
places = range(1, len(order) + 1)
figures.lines(
    {
        "published": (places, [row.published for row in order]),
        "guess: all is kept": ([1, len(order)], [1, 1]),
        "hard: left of this": ([len(hard)] * 2, [1, 0.1]),
    },
    crosses=[(i, row.simulated) for i, row in zip(places, order, strict=True)],
    title=f"Half of the hard shares: within {off_hard:.0%}, by the guess within {guess_hard:.0%}",
    xlabel="published shares of speed, by size; crosses: predicted",
    ylabel="share kept",
)

# %% tags=["plumbing"]
bands = [("2 to 8 devices", 1, 8), ("9 to 64", 8, 64), ("65 to 512", 64, 512), ("more", 512, 1e9)]
rows = [
    line("all", kept),
    line("not hard", [row for row in kept if not row.hard]),
    line("hard", hard),
]
for name, low, high in bands:
    some = [row for row in hard if low < row.devices <= high]
    rows += [line(f"hard, {name}", some)] if some else []
headers = ["shares", "figures", "publishers", "error", "guess's", "skill", "with sign"]
comms.print("medians; above zero more speed was promised than kept")
comms.print(table(rows, headers))

# %% tags=["plumbing"]
lean = median(row.error for row in kept)
said = (
    f"Half of {len(kept)} published shares are predicted within {off_all:.1%} (guess: "
    f"{guess_all:.1%}), skill {skill(kept):.2f}; half of the {len(hard)} hard ones within "
    f"{off_hard:.1%} ({guess_hard:.1%}), skill {skill(hard):.2f}. With signs, the "
    f"median error of all is {lean:+.1%}"
)
find(
    comms,
    "skill",
    some=(skill(hard) >= 0.25, f"{said}."),
    little=(0 < skill(hard) < 0.25, f"{said}. That is little."),
    none=(skill(hard) <= 0, f"{said}. Where it is hard, the simulator is worth nothing."),
)

# %% tags=["plumbing"]
by = {}
for row in kept:
    by.setdefault(row.publisher, []).append(row)
missed = {name: sizes(rows)[0] for name, rows in by.items() if sizes(rows)[0] > 0.25}
names = ", ".join(f"{name} ({missed[name]:.0%})" for name in sorted(missed, key=missed.get)[::-1])
find(
    comms,
    "missed",
    some=(
        len(missed) > 0,
        f"For {len(missed)} of {len(by)} publishers the median error is above 25 %: {names}. No "
        "cause is known.",
    ),
    none=(not missed, f"For none of {len(by)} publishers is the median error above 25 %."),
)

# %% tags=["plumbing"]
large = [row for row in kept if row.devices > 512]
right = sum(abs(row.error) <= 0.1 for row in large)
names = "; ".join(
    f"{row.simulated:.2f} on {row.devices} ({row.publisher}: {row.published:.2f})" for row in large
)
said = f"Of predictions above 512 devices {right} of {len(large)} are within 10 %: {names}."
find(
    comms,
    "beyond-512",
    right=(right == len(large) > 0, said),
    missed=(right < len(large), f"{said} Why the others miss is not known."),
    none=(not large, "Nothing was published above 512 devices."),
)

# %% [markdown]
r"""
**On the stage.** Two of these trainings, on 4 and 2 devices, become scale models (chapter 03):
as many hosts and layers, with the planner's $M/C$. **Predict** DDP's steps by another fit on two
hosts, on links of 1 Gbit/s, and measure them:
"""

# %%
quick = fit_on("1gbit", 1 / 5) if comms.box else fit
say(quick)
SCALED = {  # publication, devices, bytes of a layer
    "4 A100": ("Baskerville, GPT-2 large, 1 to 4 A100, one a node", 4, 1 << 19),
    "2 TITAN": ("Hugging Face, gpt2, 256 tokens, 1 to 2 TITAN RTX, no NVLink", 2, 1 << 20),
}


def scaled(name, n, layer_bytes):
    if not (timed := comms.subgroup(range(n))):
        return ()
    stage = set_stage(timed, published_cluster(name, n), layer_bytes)
    there, here = stage.sides
    cap = here.nbytes / 6 / 2**20  # MiB: six buckets, since starts are dear
    ddp = strategy_of("ddp", stage.model, timed, cap)
    steps = {"ddp": stage.step(ddp), "one": stage.step("none")}
    times = measure(steps, timed, warmup=1, repeat=3)
    simulated = 0.0
    if quick.networks:
        port, processor = quick.networks["rings"]
        hosts, way = Network(n, port, processor=processor), Way("ddp", "ring", cap)
        simulated = here.compute / simulate(work_of(here), hosts, way).step
    starts = there.layers * there.start / there.compute, 6 * here.start / here.compute
    return there.ratio, *starts, simulated, compare(times["ddp"], times["one"]).ratio


# %% tags=["plumbing"]
rows, here = [], {}
for key, (name, n, size) in SCALED.items():
    if comms.box and comms.device.type == "cpu" and n <= comms.world_size:
        ratio, *starts, guess, real = comms.all_gather_data(scaled(name, n, size))[0]
        row = next(row for row in kept if (row.name, row.devices) == (name, n))
        here[key] = [round(x, 2) for x in (row.published, row.simulated, guess, real)]
        shares = (f"{x:.2f}" for x in here[key])
        rows.append((key, f"{ratio:.2f}", *(f"{x:.3f}" for x in starts), *shares))
headers = "training, M/C, starts/C there, starts/C here, published, planner, simulated, measured"
comms.print(table(rows, headers.split(", ")) if rows else "no scale models")

# %% tags=["plumbing"]
misses = {key: round(guess / real - 1, 2) for key, (*_, guess, real) in here.items()}
far = sum(abs(miss) > 0.1 for miss in misses.values())
nearer = {key: abs(plan_ - out) - abs(real - out) for key, (out, plan_, _, real) in here.items()}
near = [key for key, by in nearer.items() if round(by, 2) > 0.02]
said = ", ".join(f"{miss:+.0%} ({key})" for key, miss in misses.items())
said = f"Simulated shares differ from measured ones by {said}; {far} of "
said += f"{len(here)} by more than 10 %. The scale model comes nearer to the published share than "
said += f"the planner, by more than 0.02, in {len(near) or 'none'} of {len(here)}"
said += f": {', '.join(near)}." if near else "."
find(
    comms,
    "on-the-stage",
    close=(bool(here) and not far, said),
    off=(far > 0, said),
    none=(not here, "Scale models need hosts in a box."),
)

# %% [markdown]
r"""
**Explain.** Starts are this machine's. A stage lacks NCCL, and what the planner adds: slower
computing, and waiting for the slowest. Stage and planner have the same $M/C$. Where that is wrong,
both are. Between the A100 all-reduces alone reached half of the specified bandwidth
([2025](https://tomaslaz.github.io/scale-ops/net_1)): by that, and with the 4 bytes a gradient that
are assumed, $M/C$ would be twice the planner's.
"""

# %% [markdown]
r"""
For *speed* itself the planner counts operations, with constants fitted to all rows, also to those
that are compared, and takes the share of the peak that other publishers reach on such devices. The
guess: the speed of that model, of all that others trained on such devices, which is nearest in
size. For *memory* it adds activations and logits; the guess: the whole memory of the device. For
*all-reduces* the guess is the specified bandwidth. (Of memory and all-reduces, rows by which
a constant was set are left out.)
"""

# %% tags=["plumbing"]
SET = {"speed": "", "memory": "PyTorch", "all-reduce": "Stas Bekman"}  # who set a constant
kinds = {
    name: [row for row in published if row.kind == name and row.publisher != who]
    for name, who in SET.items()
}
said = [
    f"{len(rows)} published {name} figures half are predicted within {sizes(rows)[0]:.0%} "
    f"(guess: {sizes(rows)[1]:.0%}), skill {skill(rows):.2f}"
    for name, rows in kinds.items()
]
least = min(map(skill, kinds.values()))
said = "; of ".join(said)
on = {}
for row in kinds["speed"]:
    on.setdefault(row.device, []).append(row)
each = [f"{name.upper()} {sizes(rows)[0]:.0%} ({len(rows)} figures)" for name, rows in on.items()]
speeds = f"Speeds by device: {', '.join(each)}."

# %% tags=["plumbing"]
find(
    comms,
    "absolute",
    some=(least >= 0.25, f"Of {said}. {speeds}"),
    little=(0 < least < 0.25, f"Of {said}. Less than 0.25 is little. {speeds}"),
    none=(least <= 0, f"Of {said}. A skill of 0 or less is no better than the guess. {speeds}"),
)

# %% [markdown]
r"""
**Llama 3 8B on H100.** 15 trillion tokens took [1.3 million
GPU-hours](https://github.com/meta-llama/llama3/blob/main/MODEL_CARD.md) (Meta, April 2024; on how
many is not said). torchtitan reached [5762 tokens a
second](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)
(6667 compiled) on each of 8 H100, with 16,384 tokens each (December 2024). **Predict** them, speeds
by what others than torchtitan's publisher reach:
"""

# %%
CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
H100 = replace(devices()["h100"], utilisation=usual_utilisation("h100", without="PyTorch"))
LINK = links()["8x400gbit"]
model = dict(zip(("parameters", "layers"), count_parameters(CONFIG), strict=True))
model |= {"hidden": 4096, "vocabulary": 128256, "sequence": 8192, "recompute": "selective"}
llama = Training(tokens=16384, in_all=15e12, **model)
plans = {n: plan(llama, H100, LINK, n, "zero3") for n in (8, 128, 1024)}

# %% tags=["plumbing"]
low, high = middle([row for row in kinds["speed"] if row.device == "h100"])
rows = []
for n, each in plans.items():
    rate, hours = each.tokens_per_second, each.device_hours / 1e6
    cells = (f"{rate:,.0f} ({low * rate:,.0f} to {high * rate:,.0f})",)
    cells += (f"{hours:.2f} ({hours / high:.2f} to {hours / low:.2f})",)
    much = "" if each.memory < H100.memory else " (too much)"
    rows.append((n, *cells, f"{each.memory / 1e9:.1f}{much}"))
memory = f"GB each, of {H100.memory / 1e9:.0f}"
comms.print(table(rows, ["H100", "tokens/s each", "million GPU-hours", memory]))
comms.print("in brackets: by the errors of eight of ten published speeds on H100;")
comms.print("hours include failures")

# %% tags=["plumbing"]
HOURS, first, last = 1.3, hours / high, hours / low  # of 1024, in millions
reached = llama.in_all * llama.operations / (HOURS * 3.6e9 * H100.peak)
said = (
    f"On 1024 H100 {hours:.2f} million GPU-hours are predicted ({first:.2f} to {last:.2f}); the "
    f"published 1.3 are {HOURS / hours:.1f} times that"
)
why = (
    f"They mean {reached:.0%} of the peak; the median of what others publish is "
    f"{usual_utilisation('h100'):.0%}. A reason is not published."
)
find(
    comms,
    "llama-hours",
    within=(first <= HOURS <= last, f"{said}, within the range."),
    above=(last < HOURS, f"{said}, outside the range. {why}"),
    below=(first > HOURS, f"{said}, outside the range."),
)

# %% tags=["plumbing"]
speed, compiled = (plans[8].tokens_per_second / rate - 1 for rate in (5762, 6667))
said = (
    f"Beside torchtitan's the predicted speed is {speed:+.0%} ({compiled:+.0%} compiled). The "
    "planner knows nothing of compiling: it takes the share of the peak that others reach"
)
between = compiled <= 0 <= speed
find(
    comms,
    "llama-on-8",
    between=(between, f"{said}. The speed lies between torchtitan's two."),
    outside=(not between, f"{said}. The speed does not lie between torchtitan's."),
)

# %% [markdown] index=["scaling to many devices", "weak scaling", "tokens per device"]
r"""
## What decides at a thousand

**Predict.** A device's tokens in a step stay the same. Backward of stage 3 gathers bf16 parameters
and reduces fp32 gradients: 6 bytes a parameter through a node's link, hardly more for many nodes
than for a few. It computes 4 operations a parameter and token, attention's left out. So the number
of parameters cancels. With $F$ operations a second of a device (as trainings reach them, waits
included: $t^*$ is somewhat low), and $B$ bytes a second of a node's links together (or of NVLink,
if that is less), backward can hide its bytes from

$$ t^* = \frac{6}{4} \cdot \frac{F}{B} $$

tokens a device on. A ring's starts come on top, and grow with $n$; the planner adds attention, and
what messages slow. *Efficiency* is a device's speed, divided by that of a device that waits for
nothing.
"""

# %%
COUNTS, TOKENS, NODES = [8 << k for k in range(8)], (2048, 16384), ("8x400gbit", "400gbit")
curves = {}
for key in NODES:
    link = links()[key]
    bandwidth = min(link.bandwidth * link.rails, H100.inside)
    enough = 6 / 4 * H100.rate / bandwidth
    speeds = f"F {H100.rate / 1e12:.0f} TFLOP/s, B {bandwidth / 1e9:.0f} GB/s"
    comms.print(f"{link.name}: {speeds}, t* = {enough:,.0f} tokens")
    for tokens in TOKENS:
        training = replace(llama, tokens=tokens)
        each = [plan(training, H100, link, n, "zero3").efficiency for n in COUNTS]
        curves[f"{tokens:,} tokens, links: {link.rails}"] = (COUNTS, each)

# %% tags=["plumbing"]
ends = [values[-1] for _, values in curves.values()]
figures.lines(
    curves,
    title=f"1024 H100 reach an efficiency of {min(ends):.0%} to {max(ends):.0%}",
    xlabel="devices",
    ylabel="efficiency",
    log="x",
    simulated=True,
)

# %% tags=["plumbing"]
few_1, many_1 = ends[2:]  # tokens, with one link
gains = {
    "8 times the tokens": (ends[1] / ends[0], many_1 / few_1),
    "8 links for one": (ends[0] / few_1, ends[1] / many_1),
    "16 devices instead of them": [values[1] / values[-1] for _, values in curves.values()],
}
said = "; ".join(f"{end:.0%} ({name})" for name, end in zip(curves, ends, strict=True))
first, *others = (f"{min(x):.1f} to {max(x):.1f} times with {what}" for what, x in gains.items())
said = f"Simulated efficiency of 1024 devices: {said}. It grows {first}, {', '.join(others)}"
tokens, rails, devices_ = gains.values()
wide = min(*tokens, *rails) > max(devices_)
find(
    comms,
    "tokens",
    always=(wide, f"{said}: tokens and links count for more than devices in every case."),
    mixed=(not wide, f"{said}: not in every case do tokens and links count for more than devices."),
)

# %% [markdown]
r"""
**Explain.** Say with an efficiency how many tokens, links and devices it is for. More devices for
*one batch* have fewer tokens each; well below $t^*$ the messages, which do not shrink, set
backward's time.

## The slowest of a thousand

A step is as long as its slowest device's. If a device's steps vary with a standard deviation
$\sigma$, the slowest of $n$ is in the mean at most $\sqrt{2 \ln n}\,\sigma$ late, if draws are
normal and independent. The planner takes the expected slowest, which is somewhat less:
"""

# %% tags=["plumbing"]
usual = Overheads.usual()
late = [f"{usual.waiting(n) - 1:.0%}" for n in (8, 1024)]
find(
    comms,
    "slowest",
    late=(
        usual.jitter > 0,
        f"The deviation that fits published trainings best is {usual.jitter:.0%} of a step: with 8 "
        f"devices a step takes {late[0]} more than the mean of one, with 1024 {late[1]} more.",
    ),
    none=(usual.jitter == 0, "Published trainings are fitted best with no deviation at all."),
)

# %% [markdown] index=["mean time between failures", "checkpoint interval"]
r"""
Real steps are no such draws. On a cluster of over 10,000 GPUs, devices and links that were slow for
a while made jobs take 1.34 times as long, on average ([Wu and
others](https://ar5iv.labs.arxiv.org/html/2410.12588), 2024; listings of its abstract have 1.34 %
instead). The simulator has none of that.

## A thousand fail

**Predict.** $n$ devices fail $n$ times as often as one (chapter 13). Counts differ: 419 unexpected
interruptions in 54 days on 16,384 H100 ([Llama 3](https://arxiv.org/abs/2407.21783), 2024, section
3.3.4); one every 7.9 hours in jobs of 1024 GPUs ([Kokolis and
others](https://arxiv.org/abs/2410.21680), 2024). A checkpoint stops training for a minute, a
restart takes ten, and checkpoints come as often as is best:
"""

# %%
usual = usual_failures()
rates = {  # hours of one device, and how many were counted
    "Llama 3": (54 * 24 * 16384 / 419, 16384),
    "Kokolis": (1024 * 7.9, 1024),
}
left = {
    name: [
        replace(usual, between=3600 * hours).of(n).useful() for n in (64, 1024, 16384) if n <= most
    ]
    for name, (hours, most) in rates.items()
}

# %% tags=["plumbing"]
rows = [
    (name, f"{rates[name][0]:,.0f}", *[f"{share:.1%}" for share in shares], "")[:5]
    for name, shares in left.items()
]
comms.print(table(rows, ["failures of", "hours of one device", "64", "1024", "16,384"]))
of_1024, theirs = sorted(shares[1] for shares in left.values()), left["Llama 3"][2]
said = f"Of the time of 1024 devices {of_1024[0]:.0%} to {of_1024[-1]:.0%} are left, by the rate. "
said += f"Llama 3 kept over 90 % on 16,384, where the model leaves {theirs:.0%} by its own rate"
find(
    comms,
    "failures",
    less=(theirs < 0.9, f"{said}: it lost less than modelled."),
    enough=(theirs >= 0.9, f"{said}."),
)

# %% [markdown] index=["plan a training", "price of a training"]
"""
## Ask for your own

`python -m microddp.plan` takes a model's `config.json`, and tokens a second of each of the devices
that you have. Here torchtitan's 5762 on 8 stands for yours. *Exposed* is what a device waits for
messages (waiting for the slowest comes on top), *left* the share of the time that failures leave:
"""

# %%
answer = io.StringIO()
if comms.rank == 0:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(answer):
        path = Path(folder, "config.json")
        path.write_text(json.dumps(CONFIG))
        asked = f"--config {path} --tokens 16384 --recompute selective --strategies zero3"
        asked += " --measured 5762@8 --devices 8 128 1024 --in-all 15e12"
        ask_plan(asked.split())
comms.print(answer.getvalue().partition("Error ")[0].strip())

# %% [markdown]
r"""
After that the command prints how far off it was where it was checked. (On 128 torchtitan also
published 5605: its H100 have 96 GB, and not 80, the limit `memory` here.) `--library` lists devices
and links, with sources.

Ask it what share of a measured speed more devices of one class keep, up to some 512: beyond, little
is published to check it (above). How links, stages and numbers of tokens compare was not checked.
Do not ask it for days and a price without a measurement, which of two classes of machine is faster,
or what a network does that falls short of its specification. It knows no tensor or pipeline
parallelism, and no experts.

## Where it breaks: believing a fit

**Predict.** With links and devices five times as fast, everything takes a fifth of the time, except
what cores do, and the starts of messages. The fit on links of 1 Gbit/s has that, but not how long
one of eight ranks waits until it gets a core. So it should promise more than on slow links, beside
what is measured, if the rest of it is right:
"""

# %%
checked_quick = []
for name in MODELS if comms.box and comms.world_size >= 8 else ():
    checked_quick += ask(8, name, quick)
comms.print(errors_of(checked_quick) if checked_quick else "fewer than eight hosts")

# %% tags=["plumbing"]
fast = off(checked_quick)
less = sum(error_of(row) < 0 for row in checked_quick)
ends = []
for cases in (checked_quick, on_eight):
    found = sorted((error_of(row), f"{row.way} of {row.layers}") for row in cases) or [(0.0, "")]
    ends.append(" to ".join(f"{error:+.0%} ({what})" for error, what in (found[0], found[-1])))
said = (
    f"On links of 1 Gbit/s half of the steps on 8 are off by {fast[0]:.0%} or less (signed "
    f"{fast[1]:+.0%}), from {ends[0]}, on slow links from {ends[1]}. {less} of "
    f"{len(checked_quick)} took less time than simulated. In the median"
)


# %% tags=["plumbing"]
def start_of(fit):
    return fit.networks["rings"][0].latency if fit.networks else 0.0


def with_other_starts(row):
    """Simulate it with the starts that were fitted on slow links."""
    pairs = ((key, quick.networks[key], fit.networks[key][0]) for key in CARRIERS)
    networks = {
        key: (replace(port, latency=other.latency), busy) for key, (port, busy), other in pairs
    }
    step, _ = predicted(row.layers, row.way, 8, quick._replace(networks=networks))
    return step / row.simulated - 1


starts = [*map(start_of, (fit, quick))]
changed = [with_other_starts(row) for row in checked_quick] if quick.networks else []
starts, changed = comms.all_gather_data((starts, changed))[0]  # rank 0's, which has the fits

# %% tags=["plumbing"]
factor = max(starts) / min(starts) if checked_quick and min(starts) > 0 else 0.0
slow_start, fast_start = map(human_seconds, starts)
words = (
    f"A ring's start was fitted as {slow_start} on slow links, and as {fast_start} on fast ones. "
    "They should be equal. With the starts of slow links, gloo's and the rings', simulated steps "
    f"on fast ones change by {min(changed, default=0):+.1%} to {max(changed, default=0):+.1%}"
    + ("" if any(changed) else " (it counts only where it is waited for)")
)
find(
    comms,
    "starts-fitted",
    alike=(0 < factor <= 1.2, f"{words}."),
    near=(1.2 < factor <= 3, f"{words}. Why they are {factor:.1f} times apart is not shown."),
    apart=(factor > 3, f"{words}. They are {factor:.0f} times apart, so a fit was disturbed."),
    none=(factor == 0, "No start was fitted on both."),
)

# %% tags=["plumbing"]
apart, there = fast[1] - eight[1], bool(checked_quick)
rarer = ", though not in each case" if less else ""
by_carrier = " and ".join(
    " after ".join(
        f"{off([row for row in rows if row.way in ways])[1]:+.0%}"
        for rows in (checked_quick, on_eight)
    )
    + f" ({carried})"
    for carried, ways in CARRIERS.items()
)

# %% tags=["plumbing"]
by_carrier = f"By carriers the signed medians are, after those on slow links, {by_carrier}; why "
by_carrier = f"{by_carrier}they differ, this page does not show."
said = f"{fastest_of(checked_quick)[0]} {by_carrier} {said}"
find(
    comms,
    "faster-links",
    more=(
        there and apart > 0.02,
        f"{said} more was promised than on slow links, as predicted{rarer}.",
    ),
    less=(
        there and apart < -0.02,
        f"{said} less was promised than on slow links: not as predicted.",
    ),
    alike=(
        there and abs(apart) <= 0.02,
        f"{said} as much was promised as on slow links: not as predicted.",
    ),
    none=(not there, "It takes eight hosts in a box."),
)

# %% [markdown]
r"""
:::{admonition} On GPUs
Before you trust a plan, train on one node and on two, give the first as `--measured`, and hold the
plan for two against what you got. Networks may fall short of their specification: in the
[Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook) (February 2025) a
training kept 39 % of its speed from 8 to 256 H100. Measure yours with `all_reduce_perf` of
nccl-tests.
:::

## What to take along

- Programs, latency and bandwidth say what messages demand, not what else slows devices down.
- Hold a model against a guess that needs none, where it was not fitted.
- From $t^* = \frac{6}{4} \frac{F}{B}$ tokens a device on, backward can hide its bytes. Starts, the
  slowest device and failures cost more with more devices.

## Exercises

1. In `play`, a device never waits in forward. Change it to stage 1, where parameters are gathered
   in forward (chapter 16): half an all-reduce for each layer, the first layer's first.

   <details class="solution"><summary>Solution</summary>

   First, for each layer in order, `free += ring(...) / 2`, and keep its end. Before its forward
   `clock.clamp_(min=gathered[layer])`. In backward each collective takes `ring(...) / 2`, too.

   </details>

2. Gradients are reduced in bf16, too. What becomes of $t^*$? And for DDP with fp32 gradients?

   <details class="solution"><summary>Solution</summary>

   Backward sends $2 + 2$ bytes a parameter instead of 6: $t^* = \frac{4}{4} \frac{F}{B}$, a third
   fewer tokens. DDP's all-reduce sends each gradient twice: $t^* = \frac{8}{4} \frac{F}{B}$.

   </details>

3. To notice a failure takes ten minutes more. What is left of the time of 16,384 devices, with
   Llama 3's rate? And with one minute?

   <details class="solution"><summary>Solution</summary>

   `replace(usual, restart=1200).of(16384).useful()`, then `restart=660`: 80.8 %, 84.8 %.

   </details>
"""

# %%
comms.close()
