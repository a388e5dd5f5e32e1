# %% [markdown]
r"""
# 18. A thousand devices

What will a training do on 8, on 64, on 1024 devices, with which link and which way of sharing? Few
can try. This chapter asks a simulator: a clock for each device, and rules for what takes how long.
It builds one in fifteen lines. Then it feeds microddp's with measurements of two hosts, and holds
it against four and eight, hosts in a box on one machine, and against what others have published.
What it says after that of a thousand is worth at most what it was worth here.
"""

# %% tags=["imports"]
import copy
import time
from functools import partial
from textwrap import fill

import torch
from torch.nn.functional import mse_loss

import microddp
from microddp import figures
from microddp.model import FullMLP
from microddp.performance import (
    Failures,
    Network,
    Port,
    Variation,
    Way,
    measure_compute,
    measure_network,
    measured_work,
    simulate,
    step_budget,
)
from microddp.plan import compare_published, devices, links, network_of, plan
from microddp.plan.__main__ import main as ask_plan
from microddp.plan.planning import Training
from microddp.plan.published import summary
from microddp.program import Layer, Work
from microddp.report import human_seconds, table
from microddp.shared import carrier
from microddp.stage import pausing_batch, pausing_loss, pausing_model
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

**Build.** All devices run one program: compute, start a collective, wait for one. So a step is
played by going through the program once, with a clock for each device, and one for the network:
when it is free again. A collective starts when the *last* device has come to it, and the one before
is over. What it takes is alpha-beta's, of a ring (chapter 02):
"""


# %%
def ring(n, nbytes, bandwidth, latency):
    return 2 * (n - 1) * (latency + nbytes / n / bandwidth)


def play(layers, n, bandwidth, latency):
    """Seconds of a DDP step; of each layer: forward, backward, bytes of its gradient."""
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
That is a whole simulator, of one strategy. microddp's
{func}`~microddp.performance.simulator.simulate` plays the programs of naive averaging, hooks, DDP,
local SGD and the stages of sharding, and knows networks: nodes, several links of a node (*rails*),
links that are shared. Where both can say something
they say the same:
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
## Is it right? Where that can be measured

**Measure.** Eight hosts stand here, with links of known speed, but with few cores. Eight ranks that
compute would take turns on those, and no cluster has that. So the devices of this section compute
as an accelerator seems to, seen from its host: for a while, without taking a core. They are chapter
03's *devices of known speed*: a layer pauses, forward and backward, and then has a real gradient.
What is sent is real, and so is all of microddp's code that sends it.
"""

# %% tags=["plumbing"]
MODELS = {  # layers, values of each, seconds of its forward
    "16 x 256 KiB": (16, 1 << 16, 1.5e-3),
    "4 x 2 MiB": (4, 1 << 19, 8e-3),
}
WAYS = {  # the strategy, and the cap of its buckets
    "naive": ("naive", None),
    "hooks": ("hooks", None),
    "DDP, 1 MiB": ("ddp", 1),
    "DDP, one bucket": ("ddp", 25),
    "stage 1": ("zero1", 1),
    "stage 3": ("zero3", None),
}
BATCH = pausing_batch(comms.device)
SGD = partial(torch.optim.SGD, lr=1e-4)


# %% tags=["plumbing"]
def pausing(name):
    count, values, seconds = MODELS[name]
    return pausing_model(Work((Layer(seconds, 2 * seconds, (values,)),) * count), comms.device)


def step_of(way, model, timed):
    kind, cap = WAYS[way]
    model = copy.deepcopy(model)
    if kind == "ddp":
        model = microddp.DDP(model, timed, bucket_cap_mb=cap, all_reduce=carrier("ring", timed))
    options = {"collectives": "ring"} if kind.startswith("zero") else {}
    strategy = STRATEGIES[kind](model, timed, cap, **options)
    return partial(take_step, strategy, pausing_loss, SGD(strategy.parameters()), BATCH)


# %% [markdown]
"""
**Fit**, on two hosts: a port's latency, the bandwidth being known; what the machine's processors
have to do for a message and for a byte, since they carry those of all hosts; and the times of
layers, optimizer and copying. Optimizer and copying are assumed to take as many times as long as
there are ranks for a core. Nothing is fitted again:
"""

# %%
works, port, processor = {}, None, None
two = comms.subgroup(range(2)) if comms.world_size > 1 else None
if two:
    port, processor = measure_network(two)
    for name in MODELS:
        model = pausing(name)
        counts = {key: p.numel() for key, p in model.named_parameters()}
        compute = measure_compute(model, pausing_loss, BATCH, lambda m: SGD(m.parameters()), two, 5)
        works[name] = partial(measured_work, compute, counts)
    two.print(f"a message takes {human_seconds(port.latency)} to start")
    if processor:
        two.print(f"and keeps all cores busy for {human_seconds(processor.message)}")

# %% [markdown]
"""
**Ask**, for four and eight hosts, and for slower links. A prediction gets nothing of what was
measured there:
"""


# %%
def predicted(name, way, n, bandwidth):
    network = Network(n, Port(bandwidth, port.latency), processor=processor)
    kind, cap = WAYS[way]
    crowd = max(1.0, n / comms.cores) if comms.device.type == "cpu" else 1.0
    return simulate(works[name](crowd=crowd), network, Way(kind, "ring", cap)).step


def ask(n, bandwidth, name, ways):
    """Measurements on n ranks, and what is predicted by rank 0, which has the fit."""
    rows = []
    if timed := comms.subgroup(range(n)):
        model = pausing(name)
        steps = {way: step_of(way, model, timed) for way in ways}
        times = measure(steps, timed, warmup=1, repeat=3)
        for way, timing in times.items() if port else ():
            guess = predicted(name, way, n, bandwidth or port.bandwidth)
            rows.append((n, bandwidth, name, way, timing.median, guess))
    comms.barrier()
    return rows


# %%
checked, box = [], comms.box
cases = [("1gbit", name, list(WAYS)) for name in MODELS]
if box:
    cases.append(("300mbit", "4 x 2 MiB", ["hooks", "DDP, 1 MiB", "stage 3"]))
for speed, name, ways in cases:
    bandwidth = None
    if box:
        link = box.relink(speed)
        bandwidth = 1 / link.seconds_per_byte
        if comms.rank == 0:
            link.set_up()
    comms.barrier()
    for n in (4, 8):
        if n <= comms.world_size:
            checked += ask(n, bandwidth, name, ways)
checked = comms.all_gather_data(checked)[0]

# %% tags=["plumbing"]
rows = []
for n, bandwidth, name, way, measured, guess in checked:
    link = f"{8e-9 * bandwidth:g} Gbit/s" if bandwidth else "as it is"
    error = f"{guess / measured - 1:+.1%}"
    rows.append((n, link, name, way, human_seconds(measured), human_seconds(guess), error))
headers = ["ranks", "link", "layers", "strategy", "measured", "simulated", "error"]
comms.print(table(rows, headers) if rows else "fewer than four ranks: nothing to ask")

# %% tags=["plumbing"]
if checked:
    median, ninety, most = summary([guess / measured - 1 for *_, measured, guess in checked])
    comms.print(
        f"{len(checked)} cases. Error without its sign: median {median:.1%}, nine of ten within "
        f"{ninety:.1%}, at most {most:.1%}"
    )
    least, greatest = (f(case[4] for case in checked) for f in (min, max))
    figures.lines(
        {"equal": ([1e3 * least, 1e3 * greatest], [1e3 * least, 1e3 * greatest])},
        crosses=[(1e3 * measured, 1e3 * guess) for *_, measured, guess in checked],
        title=f"Fitted on two ranks, asked for more: median error {median:.1%}",
        xlabel="measured step, ms",
        ylabel="simulated step, ms",
        log="xy",
    )

# %% [markdown]
r"""
**Explain.** Each cross is a case, and the line is where simulated equals measured. An error above
zero is a step that was simulated too *long*. Look for the largest of either sign. Too long may be
what has many small messages on eight hosts: there the processors are simulated as a floor under
each round, and they may do better than two hosts let expect. Too short may be stage 3, which gives
memory back and takes it anew, in time that no part of the simulator knows. Neither was measured by
itself.

## Is it right? Where others measured

What stands in publications can be asked as well: what is known of the model, the tokens, the
devices and the links goes in, and how fast each device was on the smallest number of them. For
trainings the share of that speed is predicted which each of more devices keeps, for all-reduces the
bus bandwidth. Here an error above zero is what was simulated too *fast*. Latencies are NCCL's,
unless the source sets or includes them, and the quickest algorithm counts of those that the source
may have used. What else it does not say is assumed, and marked (*). For the Playbook that is much:
model, tokens and precision are the likeliest by its authors' scripts and by the curve itself, so
that its rows are partly a fit.
"""

# %%
published = compare_published()
rows = [
    (
        row.name + (" *" if row.assumed else ""),
        row.what,
        f"{row.published:.4g}",
        f"{row.simulated:.4g}",
        f"{row.error:+.1%}",
    )
    for row in published
]
comms.print(table(rows, ["source", "what", "published", "simulated", "error"]))
for kind, is_training in (("trainings", True), ("all-reduces", False)):
    errors = [row.error for row in published if row.what.startswith("speed") == is_training]
    median, ninety, most = summary(errors)
    comms.print(f"{kind}: median {median:.1%}, nine of ten within {ninety:.1%}, at most {most:.0%}")

# %% [markdown] index=["scaling to many devices", "weak scaling"]
r"""
**Explain.** There are misses, and they teach most.

- *Trainings whose devices have much to compute* keep nearly everything, and the simulator says so.
  That is the easy part: there is not much to be wrong about.
- *The Playbook's* has few tokens for what its links carried: its own all-reduces, measured on the
  same machines, get slower with every doubling. With those as the network the simulated curve falls
  as well. (llm-foundry's 13B has as few tokens, on quicker links and with half the bytes a value.)
- *Goyal's*, and *Horovod's Inception*, kept 90 %. Simulated, backward hides nearly all messages, so
  something else took a tenth. *Horovod's VGG-16* sends six times the bytes over the same links.
  That is what a simulator of bytes sees.
- *ZeRO-3 of 2021* fell by two thirds from 384 to 1536 devices at one batch for all. By bytes, on
  links that give what they promise, it need not have. What it lost the simulator does not know.
- *Single all-reduces* have the larger errors in the median. Where switches add, large ones are
  simulated much too fast: by a port's specification, which this benchmark did not reach.

So an answer of the simulator is what bytes and rounds demand of the algorithms that it knows, on
links that keep their word. Most misses are of its being too quick.

## Does efficiency fall with n?

**Predict.** Every device has the same tokens in a step, whatever n is. A ring's bytes,
$2\frac{n-1}{n}S$, hardly grow. Will 1024 devices be about as efficient as 64? Write down your
guess.

**Simulate.** One billion parameters, 2048 tokens a device and step, H100 in nodes of eight, one
link of 400 Gbit/s a node. What is below is simulated; nobody measured it:
"""

# %%
H100 = devices()["h100"]
COUNTS = [8 << k for k in range(8)]


def efficiency(n, algorithm, tokens=2048, link="400gbit"):
    work = Work.from_operations(1e9, 16, tokens, H100.rate)
    network = network_of(H100, links()[link], n)
    return work.seconds / simulate(work, network, Way("ddp", algorithm)).step


curves = {
    name: (COUNTS, [efficiency(n, name) for n in COUNTS])
    for name in ("ring", "tree", "hierarchical")
}
figures.lines(
    curves,
    title="the same tokens for each device",
    xlabel="devices",
    ylabel="efficiency",
    log="x",
    simulated=True,
)

# %% tags=["plumbing"]
drop = {name: (values[0], values[3], values[-1]) for name, (_, values) in curves.items()}
rows = [(name, *(f"{value:.1%}" for value in values)) for name, values in drop.items()]
comms.print(table(rows, ["simulated", "8 devices", "64", "1024"]))
assert all(first > last for first, _, last in drop.values())
left = {name: last / middle for name, (_, middle, last) in drop.items()}
assert left["tree"] > left["hierarchical"] > left["ring"]

# %% [markdown] index=["tokens per device"]
r"""
**Explain.** The largest loss comes early: the link between nodes is slower than those inside, and a
node has one for its eight devices. From two nodes on a ring's bytes hardly grow, and those of the
others' busiest port grow for some doublings. After that it is rounds, each with its latency: a flat
ring has $2(n-1)$ of them, a hierarchy those of its nodes and of a ring of nodes, and a tree a few
for each doubling. So from 64 to 1024 devices the tree loses little, the hierarchy more, the ring
nearly all.

## Why one curve keeps 39 % and another 97 %

**Simulate.** 256 devices with the bandwidths that the Playbook measured, and its likeliest model; a
step's tokens change:
"""

# %%
between, inside = Port(64.9e9 / 8, 0.0), Port(436e9, 0.0)  # of all-reduces, latency included
PLAYBOOK = Network(256, between, node=8, inside=inside, rails=8)
rows = []
for tokens in (1024, 4096, 16384, 65536):
    work = Work.from_operations(1.342e9, 16, tokens, 6 * 1.342e9 * 40150, value_size=4)
    step = min(simulate(work, PLAYBOOK, Way("ddp", name)).step for name in ("ring", "hierarchical"))
    rows.append((tokens, human_seconds(work.seconds), f"{work.seconds / step:.0%}"))
comms.print(table(rows, ["tokens", "computing, simulated", "efficiency, simulated"]))
kept = [float(row[2][:-1]) for row in rows]
assert kept == sorted(kept)
assert kept[0] < 39 < kept[1] < kept[-1]

# %% [markdown]
r"""
**Explain.** A step sends what the model's size says, and computes that size times the tokens. So an
efficiency means nothing before tokens for each device and step are known. At its likeliest, 4096,
the simulator does not quite fall to the published 39 %; tokens alone move it from the least to the
most of this table. torchtitan's curve keeps 97 % with 16384, and has another network, too: how much
of that is due to the tokens, this table does not say.

More devices for *one batch* divide the tokens. **Predict.** The same billion parameters, a batch of
four million tokens: from which number on do more devices make training slower?
"""

# %%
BATCH_TOKENS = 4 << 20
MANY = [8 << k for k in range(11)]


def speed_in_all(n, algorithm, link):
    share = efficiency(n, algorithm, BATCH_TOKENS / n, link)
    return share * n * H100.rate / 6e9 / 1e6  # millions of tokens a second


faster = {
    "100 Gbit/s": [speed_in_all(n, "ring", "100gbit") for n in MANY],
    "8 x 400 Gbit/s": [speed_in_all(n, "ring", "8x400gbit") for n in MANY],
}
figures.lines(
    {name: (MANY, values) for name, values in faster.items()},
    title="one batch, divided: all devices together, by a flat ring",
    xlabel="devices",
    ylabel="million tokens a second",
    log="xy",
    simulated=True,
)
for name, values in faster.items():
    comms.print(f"simulated, {name} a node: most at {MANY[values.index(max(values))]} devices")
assert all(max(values) > values[-1] for values in faster.values()), "then it becomes slower"
tree = [speed_in_all(n, "tree", "8x400gbit") for n in MANY]
assert tree == sorted(tree)

# %% [markdown]
r"""
Each device computes half as long with every doubling, and a ring's bytes take no less. When they
outlast computing, more devices add hardly anything. That it then becomes *slower* is, on both
links, the latency of more and more rounds. A tree has few, and in this simulation does not fall.

## Where stage 3 pays

Stage 3 sends half as much again as DDP (chapter 16), in return for memory. **Simulate.** Eight
billion parameters on 64 devices, 8192 tokens each. A star is what fits into 80 GB, before any
activation:
"""

# %%
rows = []
for link in ("100gbit", "400gbit", "8x400gbit"):
    row = [links()[link].name]
    for strategy in ("ddp", "zero1", "zero3"):
        found = plan(Training(8e9, 32, 8192), H100, links()[link], 64, strategy)
        fits = "*" if found.fits else " "
        row.append(f"{human_seconds(found.step)}, {found.memory / 1e9:.0f} GB {fits}")
    rows.append(row)
comms.print(table(rows, ["simulated", "DDP", "stage 1", "stage 3"]))

# %% [markdown]
r"""
Stage 1 sends what DDP sends, and can hide some of it behind forward. Stage 3 sends more, which
shows where the link is slow. So it is for what fits in no other way, and then the link has to carry
it.

## A thousand have bad luck

**Predict.** A device has to wait for something else, once in a hundred steps: its disk, its host, a
retried message. That takes it as long as a step. For one device that is 1 %. For 1024?

**Simulate**, with that, and with the variation of computing that is measured here: forty steps of
two ranks, of which the slower one counts. Messages take no time, so that only waiting for others
shows:
"""

# %%
factors = []
if timed := two if comms.world_size > 1 else comms:
    model = FullMLP(256, depth=4).to(timed.device)
    batch = torch.randn(2, 64, 256, device=timed.device).unbind()
    strategy = STRATEGIES["none"](model, timed)
    alone = partial(take_step, strategy, mse_loss, SGD(model.parameters()), batch)
    timing = measure({"": alone}, timed, repeat=40)[""]
    factors = [seconds / timing.median for seconds in timing.seconds]
factors = comms.all_gather_data(factors)[0]

# %%
work = Work.from_operations(1e9, 16, 4096, H100.rate)
rows = []
for n in (1, 8, 64, 1024):
    network = Network(n, Port(1e15, 0.0))  # whose messages take no time
    played = [
        simulate(work, network, Way("ddp"), steps=400, variation=variation).steps.mean()
        for variation in (
            Variation(tuple(factors)),
            Variation(rare=0.01, pause=work.seconds),
        )
    ]
    hit = 1 - 0.99**n
    rows.append((n, *(f"{seconds / work.seconds:.2f}" for seconds in played), f"{hit:.1%}"))
headers = ["devices", "varied as here", "1 % pauses", "steps with one, by formula"]
comms.print("simulated step, in the time of computing alone")
comms.print(table(rows, headers))
assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)

# %% [markdown] index=["mean time between failures", "checkpoint interval"]
r"""
**Explain.** A step is as long as that of the slowest device. With what was measured here, 1024
devices nearly always have one as late as the latest of the forty. With $n$ devices none has bad
luck in
$0.99^n$ of the steps, and at 1024 that is hardly ever. What one in a hundred has is the rule for
all. Chapter 12 finds who it is.

## A thousand fail

**Predict.** In the training of Llama 3 16384 devices had 419 unexpected interruptions in 54 days
([Llama Team, 2024](https://arxiv.org/abs/2407.21783), section 3.3.4): for each device one in about
six years, if they come with the number of devices. A checkpoint takes a minute, a restart ten. How
often should 1024 devices save, and how much of the time is left?

Too often costs checkpoints, too seldom costs what is trained again. Young's rule is the root of
twice the checkpoint's time times the time between failures. How much is left is by Daly's formula
(2006), and by drawing failures, one after the other:
"""

# %%
HOUR = 3600
one = 54 * 24 * HOUR * 16384 / 419  # seconds between failures of one device
minutes = [1 << k for k in range(11)]
curves, rows = {}, []
for n in (1024, 16384):
    failures = Failures.of_devices(n, one, checkpoint=60, restart=600)
    curves[f"{n} devices"] = (minutes, [100 * failures.useful(60 * m) for m in minutes])
    best = failures.best_interval
    drawn = failures.play(best, 20_000)
    row = (failures.between, best, f"{failures.useful(best):.1%}", f"{drawn:.1%}")
    rows.append((n, *map(human_seconds, row[:2]), *row[2:]))
    assert abs(drawn - failures.useful(best)) < 0.02
figures.lines(
    curves,
    title="time that is left for training, by the interval of checkpoints",
    xlabel="minutes from one checkpoint to the next",
    ylabel="% of the time",
    log="x",
    simulated=True,
)
headers = ["devices", "between failures", "best interval", "left, by formula", "drawn"]
comms.print(table(rows, headers))

# %% [markdown] index=["plan a training", "price of a training"]
"""
**Explain.** Sixteen times the devices fail sixteen times as often. So they should save four times
as often, and lose more, to checkpoints and to what is trained again.

## Ask for your own

`python -m microddp.plan` puts this together: for a number of parameters or a model's `config.json`,
devices and links from a library whose figures have sources, and strategies. It tries algorithms:
`halving` exchanges with partners at doubling distances. *Exposed* is what a device waits for
messages. *Limit* is `memory` where it does not fit, `messages` where a device waits for more than
half of the step. *Left* is the share of the time that checkpoints and failures leave. Every answer
says how far off the simulator was in two earlier builds of this page; another one may be worse, as
the table above may be. Llama 3 8B on H100:
"""

# %%
if comms.rank == 0:
    asked = "--parameters 8.03e9 --layers 32 --tokens 8192 --devices 8 64 512 1024 --in-all 15e12"
    ask_plan(asked.split())

# %% [markdown]
r"""
With `--price` a training costs something, and `--cheapest` searches.

The form of chapter 08 is quicker to ask, and knows less: no buckets, one ring, no nodes. It takes a
step's computing and bytes, and hides of the bytes as much as can be. How far off is that, in the
cases that were measured above?
"""

# %%
STAGES = {"DDP, 1 MiB": 0, "stage 1": 1, "stage 3": 3}
off = []
for n, bandwidth, name, way, measured, _ in checked if comms.rank == 0 else ():
    if way in STAGES:
        size = MODELS[name][0] * MODELS[name][1]
        device = {"peak": 6 * size / works[name]().seconds, "utilisation": 1.0}
        link = {"bandwidth": bandwidth or port.bandwidth, "latency": port.latency}
        found = step_budget(size, 1, n, **device, **link, stage=STAGES[way])
        off.append(found.overlapped.step / measured - 1)

# %% tags=["plumbing"]
how_far = "Never checked: this build had no ranks to check it with."
if off:
    middle, ninety, most = summary(off)
    how_far = (
        f"Checked on {len(off)} steps of 4 and 8 ranks that were measured in this chapter: off by "
        f"{middle:.0%} in the median, by {ninety:.0%} or less in nine of ten, with as much hidden "
        f"as possible. Beyond, it was not checked."
    )
comms.print(fill(how_far, 90))
some = [devices()[key] for key in ("h100", "a100", "h200", "b200")]
between = [links()[key] for key in ("8x400gbit", "8x200gbit", "400gbit", "100gbit")]
start = {"parameters": 8e9, "tokens": 8192, "ranks": 64, "gradient_bytes": 2}
figures.explore_plan(
    {
        each.name: {"peak": each.peak, "utilisation": each.utilisation, "latency": 14e-6}
        for each in some
    },
    {each.name: min(each.bandwidth * each.rails, some[0].inside) for each in between},
    budget=step_budget,
    checked=how_far,
    **start,
)

# %% [markdown]
"""
Here a link is all of a node's, since a ring goes out of each node once; up to eight devices the
form still takes it for the link between them. How fast is the simulator itself?
"""

# %%
network = network_of(H100, links()["8x400gbit"], 1024)
work = Work.from_operations(8e9, 32, 8192, H100.rate)
start = time.perf_counter()
found = simulate(work, network, Way("zero3"), steps=100, variation=Variation((1.0, 1.05)))
took = time.perf_counter() - start
comms.print(
    f"1024 devices, 32 layers, 100 steps: {found.events / 1e6:.0f} million events in "
    f"{human_seconds(took)}, {found.events / took / 1e6:.0f} million a second"
)
comms.print("(an addition serves the clocks of all devices)")

# %% [markdown]
r"""
## Where it breaks

**Believing a fit.** A parameter that is fitted to one value is right there, whatever it means. Here
a "simulator" that knows no rounds, only a bandwidth, is fitted to what `ring` says of two ranks and
1 MiB. Then it is asked for 64 ranks and 64 KiB, where rounds count:
"""


# %%
def true_time(n, nbytes):
    return ring(n, nbytes, bandwidth=1e9, latency=50e-6)


fitted = (1 << 20) / true_time(2, 1 << 20)  # bytes a second
rows = []
for n, nbytes in ((2, 1 << 20), (8, 1 << 20), (64, 1 << 16)):
    naive = 2 * (n - 1) / n * nbytes / fitted
    rows.append(
        (n, nbytes, human_seconds(true_time(n, nbytes)), f"{true_time(n, nbytes) / naive:.1f}")
    )
comms.print(table(rows, ["ranks", "bytes", "by rounds", "times the fit's"]))
assert true_time(64, 1 << 16) > 5 * (2 * 63 / 64 * (1 << 16) / fitted)

# %% [markdown]
r"""
So check a model where it was *not* fitted: on other numbers of ranks, other sizes, other links. An
error at the fitted point says nothing.

## What to take along

- A step is a program for each device, and a collective waits for the last. With alpha-beta's rounds
  and a topology that says what bytes and latencies demand of many devices. What else slows them
  down it does not say, and the one curve above a thousand devices was missed by far.
- Efficiency depends on tokens for each device and step and on the link between nodes; of many
  devices also on the number of rounds, and on luck.
- A simulator is worth what it was worth where it was checked, on data it was not fitted to.

## Exercises

1. In `play`, a device never waits for messages in forward. Change it to stage 1, in which
   parameters are gathered in forward (chapter 16), half an all-reduce for each layer, the first
   layer's first.

   <details class="solution"><summary>Solution</summary>

   Half an all-reduce takes `ring(...) / 2`. Before forward all gathers are started: `free +=
   ring(...) / 2` for each layer, in order, and its end is kept in a list of its own. Before a
   layer's forward `clock.clamp_(min=gathered[layer])`. In backward each layer's collective takes
   half as well.

   </details>

2. A tree has $2\log_2 n$ rounds, but a ring is bandwidth optimal. For which sizes is the ring
   quicker on 64 devices with links of 1 GB/s and 10 us? Use `Network.seconds`.

   <details class="solution"><summary>Solution</summary>

   Compare `Network(64, Port(1e9, 1e-5)).seconds("all_reduce", name, nbytes)` for both names. The
   ring is quicker from about 1.3 MiB on, by a tenth at most. Its latency is $126 \cdot 10$ us =
   1.26 ms whatever the size; a tree's is a tenth of that for the smallest. But a tree has to send
   $2S$ through its busiest port, in pieces, and its pipe has to fill: with 64 pieces that is
   $\frac{75}{64} \cdot 2S$, where the ring sends $\frac{126}{64} S$.

   </details>

3. A failure is noticed after a time-out of ten minutes, and a restart takes ten more. What does
   that change for 16384 devices, and what is worth more: a time-out of one minute, or checkpoints
   that take half as long?

   <details class="solution"><summary>Solution</summary>

   `Failures.of_devices(16384, one, 60, 1200)` at its best interval, then with `restart=660`, then
   with `checkpoint=30` and `restart=1200`. What is left falls from 85.2 % of the time to 80.8 %.
   The time-out of a minute brings that to 84.8 %, half the checkpoint to 83.4 %: each failure costs
   the restart as a whole, and of a checkpoint's cost only the root counts.

   </details>
"""

# %%
comms.close()
