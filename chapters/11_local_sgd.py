# %% [markdown]
r"""
# 11. Meeting less often

How rarely can ranks agree? Over a slow link most of a step is waiting for gradients. Ranks that
train by themselves, and average their *weights* every $H$ steps, send $1/H$ of the bytes. But what
they learn between two meetings may not fit together.
"""

# %% tags=["imports"]
import copy
import itertools
import math
import statistics
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import microddp
from microddp import figures
from microddp.data import shard
from microddp.datasets import CHARACTERS, load_text
from microddp.findings import Prediction, compare, find, mark_least
from microddp.hosts import relink
from microddp.local_sgd import LocalSteps, Outer
from microddp.model import ModelConfig, SimpleCNN, gradient_bytes
from microddp.report import human_seconds, table
from microddp.stage import cluster, known_clusters, set_stage
from microddp.timing import Timing, measure
from microddp.workloads import Curves

# %%
# sphinx_gallery_builds = "training whose ranks meet now and then, and DiLoCo"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown] index=["local SGD", "weight averaging"]
r"""
## Averaging weights

**Predict.** With plain SGD, to average weights after *every* step is to average gradients. From the
same $w$ rank $i$ goes to $w - \eta g_i$, and the mean of these is $w - \eta \bar g$. With a meeting
every $H$ steps, $H - 1$ of them begin at other weights on each rank, with other gradients.

**Build.** That is *local SGD* ([Stich, 2018](https://arxiv.org/abs/1805.09767)). One function
averages gradients or weights:
"""


# %%
def average(tensors):
    tensors = list(tensors)
    mean = parameters_to_vector(tensors).detach()
    comms.all_reduce_mean(mean)
    vector_to_parameters(mean, tensors)


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


# %%
def ddp(model, optimizer, _step):
    average(p.grad for p in model.parameters())
    update(optimizer)


def never(_model, optimizer, _step):
    update(optimizer)


def local_sgd(every):
    def way(model, optimizer, step):
        update(optimizer)
        if step % every == 0:
            average(model.parameters())

    return way


# %% [markdown]
"""
The ranks learn to continue Python's own help: after eight characters, the next one. Each rank has a
part of the text. Their small model:
"""

# %%
CONTEXT, BATCH, PART = 8, 32, 8192
text = load_text(CONTEXT, comms.device)
inputs, targets = (shard(t[: PART * n], rank, n) for t in text.train.tensors)
new_inputs, new_targets = (t[::12] for t in text.test.tensors)


def new_model(seed):
    torch.manual_seed(seed)
    layers = nn.Linear(16 * CONTEXT, 64), nn.GELU(), nn.Linear(64, CHARACTERS)
    return nn.Sequential(nn.Embedding(CHARACTERS, 16), nn.Flatten(), *layers).to(comms.device)


# %%
def batches(seed):
    generator = torch.Generator().manual_seed(64 * seed + rank)
    while True:
        for part in torch.randperm(len(inputs), generator=generator).split(BATCH):
            yield inputs[part], targets[part, -1]


def adamw(parameters, rate=0.01):
    return torch.optim.AdamW(parameters, lr=rate, fused=True)


# %% [markdown]
"""
Each rank's weights, and the mean of all ranks' weights, judged on new text:
"""


# %%
def flat(model):
    return parameters_to_vector(model.parameters()).detach()


@torch.no_grad()
def new_losses(model):
    mean = copy.deepcopy(model)
    average(mean.parameters())
    losses = [cross_entropy(m(new_inputs), new_targets[:, -1]) for m in (model, mean)]
    average(losses)
    return [loss.item() for loss in losses]


# %%
STEPS, LOOK = 128, 8


def train(way, seed=0, make=adamw, steps=STEPS, watch=new_losses, look=LOOK):
    """Train, at a rate that falls to 0; returns the model, and what `watch` saw."""
    model, seen = new_model(seed), []
    optimizer = make(model.parameters())
    for step, (x, y) in enumerate(itertools.islice(batches(seed), steps), start=1):
        cross_entropy(model(x), y).backward()
        way(model, optimizer, step)
        optimizer.param_groups[0]["lr"] *= (STEPS - step) / (STEPS - step + 1)
        if step % look == 0:
            seen.append(watch(model))
    return model, seen


# %% [markdown]
"""
With SGD and a meeting after each step, the weights should be DDP's, up to rounding:
"""


# %%
sgd = partial(torch.optim.SGD, lr=0.1)
begin, theirs = flat(new_model(0)), flat(train(ddp, make=sgd, steps=8)[0])
mine = flat(train(local_sgd(1), make=sgd, steps=8)[0])
off = ((mine - theirs).norm() / (theirs - begin).norm()).item()
comms.print(f"off by {off:.1e} of how far DDP's weights moved")
assert off < 1e-3

# %% [markdown] index=["post-local SGD"]
r"""
## Apart, and together again

**Predict.** If ranks drift apart at random, their distance grows as the root of the number of
steps: 4 times as far after 16 times as many. A meeting takes it to zero. **Measure.** With AdamW:
"""


# %%
def distance(model):
    """Of the ranks' weights from their mean, in % of its norm."""
    everyone = comms.all_gather(flat(model))
    mean = everyone.mean(dim=0)
    return 100 * ((everyone - mean).norm(dim=1).mean() / mean.norm()).item()


drifts = {
    name: train(way, steps=64, watch=distance, look=1)[1]
    for name, way in {"H = 4": local_sgd(4), "H = 16": local_sgd(16), "never": never}.items()
}

# %% tags=["plumbing"]
further = drifts["never"][63] / drifts["never"][3] if n > 1 else 1.0
figures.lines(
    {name: (range(1, 65), drift) for name, drift in drifts.items()},
    title=f"Never: {further:.1f} times as far apart after 64 steps as after 4",
    xlabel="step",
    ylabel="distance from the mean, %",
)
after = drifts["H = 16"][30] / drifts["H = 16"][16] if n > 1 else 1.0
said = (
    f"Never, ranks are {further:.1f} times as far apart after 64 steps as after 4, where 4 was "
    f"predicted. In the 15th step after a meeting they are {after:.1f} times as far apart as in "
    "the first; the root says 3.9."
)
find(
    comms,
    "drift",
    alone=(n == 1, "One rank has nobody to part from."),
    faster=(n > 1 and after > 15**0.5, said),
    slower=(n > 1 and after <= 15**0.5, said),
)

# %% [markdown] index=["asynchronous averaging", "large batch"]
r"""
**Explain.** The prediction took steps of equal length in directions that have nothing to do with
each other. AdamW's first steps go by the sign of one gradient, later ones by averaged gradients, at
a rate that falls; and a meeting does not share these averages, so after it each rank goes on in its
own direction. (How much each of these does, this page does not show.) *Post-local* SGD ([Lin and
others, 2018](https://arxiv.org/abs/1808.07217)) first averages gradients, then meets less often.

## Loss by steps, by bytes, by time

Why not average gradients over $H$ batches (chapter 06)? That sends as little. As a batch $H$ times
as large it gets a larger rate: $H$ times as large, as usual for SGD, or $\sqrt H$ times for Adam
([Malladi and others, 2022](https://arxiv.org/abs/2205.10287), who scale betas and epsilon, too: not
here):
"""


# %%
def accumulate(every):
    def way(model, optimizer, step):
        if step % every == 0:
            for p in model.parameters():
                p.grad /= every
            average(p.grad for p in model.parameters())
            update(optimizer)

    return way


# %% [markdown]
"""
And why wait for a meeting? Train on while the average travels. It arrives a step late, and what
was learned meanwhile is added. (One that is under way at the end is dropped here.)
"""


# %%
def late(every):
    under_way = []

    def way(model, optimizer, step):
        update(optimizer)
        if under_way:
            work, mean, sent = under_way.pop()
            work.wait()
            vector_to_parameters(mean.add_(flat(model)).sub_(sent), model.parameters())
        if step % every == 0:
            sent = flat(model)
            mean = sent.clone()
            under_way.append((comms.all_reduce_mean(mean, async_op=True), mean, sent))

    return way


# %% [markdown]
r"""
**Predict.** Ranks that *never* meet are the worst case, and DDP the best. The rarer meetings are,
the nearer to the worst. Accumulation takes one step where local SGD takes $H$.

**Measure.** Each way gets the same batches. Of each there are three runs, which together take a
while; they begin with other weights, and have their batches in another order. Ranks that meet are
judged by their mean weights, others by their own. One way is below another if it is so in all
three:
"""


# %%
def three(way, make=adamw):
    seen = [train(way, seed, make)[1] for seed in range(3)]
    return [Curves([[pair[i] for pair in run] for run in seen], LOOK) for i in (0, 1)]


WAYS = {"DDP": ddp} | {f"H = {h}": local_sgd(h) for h in (1, 4, 16, 64)} | {"never": never}
both = {name: three(way) for name, way in WAYS.items()}
both["H = 4 (late)"] = three(late(4))
for factor in (4, 16):
    make = partial(adamw, rate=factor * 0.01)
    both[f"16 batches at rate x {factor}"] = three(accumulate(16), make)
runs = {name: pair[name != "never"] for name, pair in both.items()}
TARGET = runs["DDP"].mean[max(1, STEPS // LOOK // 4) - 1]

# %% tags=["plumbing"]
rows = [
    (name, *both[name], ", ".join(map(str, runs[name].steps_to(TARGET))).replace("inf", "-"))
    for name in runs
]
comms.print(
    f"losses after {STEPS} steps (range); steps to {TARGET:.2f}, DDP's mean after a quarter"
)
comms.print(table(rows, ["", "own weights", "their mean", "steps"]))


def draw(x_of, title, xlabel):
    figures.lines(
        {k: ([x_of(k) * LOOK * i for i in range(1, len(y) + 1)], y) for k, y in drawn.items()},
        title=title,
        xlabel=xlabel,
        ylabel="loss of mean weights (never: own)",
        log="x" * (xlabel != "step"),
        zero=False,
    )


drawn = {name: runs[name].mean for name in [*WAYS, "16 batches at rate x 4"]}
last = ", ".join(f"{k} at {drawn[k][-1]:.2f}" for k in ("H = 16", "H = 64", "never"))
draw(lambda _: 1, f"By steps: DDP ends at {drawn['DDP'][-1]:.2f}, {last}", "step")

# %% tags=["plumbing"]
ALONE = n == 1, "One rank has nobody to meet."
gap = (drawn["never"][-1] - drawn["DDP"][-1]) or 1
lost = ", ".join(f"{k} loses {(drawn[k][-1] - drawn['DDP'][-1]) / gap:.0%}" for k in [*WAYS][1:5])
no_worse = [
    f"{k}, not above {more}"
    for more, k in itertools.pairwise([*WAYS][1:5])
    if runs[k].beside(runs[more]) != "above"
]
rarer = f"but for {' and '.join(no_worse)}" if no_worse else "as predicted"
sentence = (
    f"Never ends at {runs['never']}, its mean at {both['never'][1]}, DDP at {runs['DDP']}. Of the "
    f"gap to DDP {lost}. The rarer, the worse, {rarer}."
)

# %% tags=["plumbing"]
above = [k for k in runs if runs[k].beside(runs["never"]) == "above"]
worse = " and ".join(f"{k} at {runs[k]}" for k in above)
worst = n > 1 and all(runs["never"].beside(runs[k]) == "above" for k in [*WAYS][:5])
find(
    comms,
    "never",
    alone=ALONE,
    worst=(worst and not above, f"{sentence} Never is the worst case, as predicted."),
    accumulated=(
        worst and above != [],
        f"{sentence} Never is above DDP and every H. But something ends above it, against "
        f"the prediction: {worse}.",
    ),
    unclear=(n > 1 and not worst, f"{sentence} Never is not above them all."),
)

# %% tags=["plumbing"]
best = min([*runs][-2:], key=lambda k: runs[k].mean[-1])
this, other = runs["H = 16"], runs[best]
sentence = f"With as many bytes, H = 16 ends at {this}, {this.beside(other)} {best}: {other}."
find(comms, "accumulate", **this.sides(other, sentence))

# %% [markdown]
r"""
**Explain.** What $H = 1$ loses is no price of meeting rarely. With AdamW, DDP and $H = 1$ are not
the same: each rank averages and divides by its own gradients, of fewer samples. The prediction
looked at meetings only. Accumulation also takes fewer steps, which may be what it loses in a run as
short as this.

**Predict.** Let $c$ be a step of never, and $t_S$ a message of all weights. DDP hides what it can
behind backward, two thirds of $c$. Meetings add $t_S/H$ to $c$; a late one hides behind a step:
"""

# %%
STEP = {
    "never": lambda c, _: c,
    "DDP": lambda c, t: c / 3 + max(2 / 3 * c, t),
    "H = 1": lambda c, t: c + t,
    "H = 4": lambda c, t: c + t / 4,
    "H = 16": lambda c, t: c + t / 16,
    "H = 4 (late)": lambda c, t: c + max(0, t - c) / 4,
}

# %% [markdown]
"""
**Measure.** The stage is a scale model of machines with an A100 each, 25 Gbit/s, 1B parameters and
4096 tokens a device:
"""

# %%
workload = {"parameters": 1e9, "tokens": 4096, "layers": 8}
usual = comms.box and comms.box.links[0].option
if usual:
    relink(comms, "250mbit")
    comms.print("here each link has 250 Mbit/s")
stage = set_stage(comms, cluster("a100", "25gbit", nodes=n, node=1, **workload))
comms.print(stage)


def on_stage(way, steps):
    model = copy.deepcopy(stage.model)
    optimizer = stage.make_optimizer(model.parameters())
    numbers = itertools.count(1 + steps // 2)

    def call():
        for step in itertools.islice(numbers, steps):
            stage.loss_fn(model(stage.batch[0]), stage.batch[1]).backward()
            way(model, optimizer, step)

    return call


# %%
message = torch.zeros(gradient_bytes(stage.model) // 4, device=comms.device)
calls = {
    "never": (1, stage.step("none")),
    "DDP": (1, stage.step("ddp")),
    "H = 4": (4, on_stage(local_sgd(4), 4)),
    "H = 16": (16, on_stage(local_sgd(16), 16)),
    "H = 4 (late)": (4, on_stage(late(4), 4)),
    "message": (1, partial(comms.all_reduce, message)),
}
rounds = measure({k: call for k, (_, call) in calls.items()}, comms, warmup=1, repeat=3)
steps = {k: Timing(tuple(s / calls[k][0] for s in t.seconds)) for k, t in rounds.items()}
c, t_S = steps["never"].median, steps.pop("message").median
if usual:
    relink(comms, usual)

# %% tags=["plumbing"]
guesses = {k: Prediction(STEP[k](c, t_S), timing) for k, timing in steps.items()}
comms.print(f"c {human_seconds(c)}, t_S {human_seconds(t_S)}, t_S/c {t_S / c:.2f}")
rows = [
    (k, human_seconds(g.predicted), g.measured, compare(g.measured, steps["DDP"]).ratio)
    for k, g in guesses.items()
]
comms.print(table(rows, ["", "predicted", "a step (quartiles)", "times as fast as DDP"]))
worst = max(guesses, key=lambda k: abs(guesses[k].off))
find(
    comms,
    "step-time",
    **guesses[worst].sides(f"The model is off most at {worst}: {guesses[worst]}."),
)

# %% tags=["plumbing"]
this, other = runs["H = 4 (late)"], runs["H = 4"]
gain = compare(steps["H = 4 (late)"], steps["H = 4"]).than("those of meetings in time")
sentence = f"Late meetings end at {this}, {this.beside(other)} those in time, at {other}."
guess, in_time = (human_seconds(guesses[k].predicted) for k in ("H = 4 (late)", "H = 4"))
sentence += f" Their steps, predicted as {guess} beside {in_time}, are {gain}."
find(comms, "late", **this.sides(other, sentence))

# %% [markdown]
r"""
## What to pick

**Predict.** The time to a loss is its steps times the time of one, here for the stage's cluster on
several links. The unit is $C$, computing without the optimizer, and the cluster's $M/C$ is taken
for $t_S/c$ (on the stage, both are printed above). Losses were looked at every 8 steps, so steps
are good to 8, and one look may change who is first; a large model needs others. Stars mark a
column's best and what is within 15 %:
"""

# %%
STEP["H = 64"] = lambda c, t: c + t / 64
for factor in (4, 16):
    STEP[f"16 batches at rate x {factor}"] = lambda c, t: c + max(0, t - 2 / 3 * c) / 16
LINKS = {
    gbit: cluster("a100", f"{gbit}gbit", nodes=n, node=1, **workload).ratio
    for gbit in (400, 100, 25, 10)
}
LINKS[1] = 10 * LINKS[10]

# %% tags=["plumbing"]
needed = {k: statistics.median(curves.steps_to(TARGET)) for k, curves in runs.items()}
times = {g: {k: s * STEP[k](1, r) for k, s in needed.items()} for g, r in LINKS.items()}
columns = [
    mark_least([f"{t:.0f}" for t in column.values()], [*column.values()], within=1.15)
    for column in times.values()
]
headers = [f"to {TARGET:.2f}", *(f"{g} Gbit/s, M/C {r:.3g}" for g, r in LINKS.items())]
comms.print(table(zip(needed, *columns, strict=True), headers).replace("inf", "  -"))


# %% tags=["plumbing"]
def first(gbit, ways):
    least = min(times[gbit][k] for k in ways)
    return " or ".join(k for k in ways if times[gbit][k] <= 1.15 * least)


draw(
    lambda k: STEP[k](1, LINKS[25]),
    f"Of these, over 25 Gbit/s first at {TARGET:.2f}: {first(25, drawn)}",
    "time, in steps of a device alone",
)

# %% tags=["plumbing"]
answer = "; ".join(f"over {gbit} Gbit/s {first(gbit, needed)}" for gbit in LINKS)
low = min(runs[k].mean[-1] for k in runs if k[0] == "H")
known = n > 1 and needed["DDP"] < math.inf
find(
    comms,
    "how-rarely",
    alone=ALONE,
    known=(
        known,
        f"How rarely can ranks agree? First at a loss of {TARGET:.2f}, or within 15 %: {answer}. "
        f"Steps are good to {LOOK}. This is for one loss: DDP ends at {drawn['DDP'][-1]:.2f}, and "
        f"no H with plain means ends below {low:.2f}.",
    ),
    unknown=(n > 1 and not known, "These runs are too short."),
)

# %% tags=["plumbing"]
said = "; ".join(
    f"with {k} it takes {needed[k]:.0f} steps of {STEP[k](1, LINKS[25]):.2f}, "
    f"{times[25][k]:.0f} in all"
    for k in ("H = 4", "H = 4 (late)")
)
reached = math.isfinite(needed["H = 4"] + needed["H = 4 (late)"])
find(
    comms,
    "late-in-all",
    reached=(reached, f"Over 25 Gbit/s, in units of C, {said}. A look is {LOOK} steps."),
    unreached=(not reached, "With H = 4, in time or late, these runs do not all get there."),
)

# %% [markdown] index=["DiLoCo", "outer optimizer", "pseudo-gradient"]
r"""
**Explain.** The slower a link, the more time the same saved messages would take there, and the more
steps rare meetings may add and still be the faster way.

## DiLoCo

The mean of what the ranks did since the last meeting is a direction. *DiLoCo* ([Douillard and
others, 2023](https://arxiv.org/abs/2311.08105)) gives it to an *outer* optimizer: SGD with Nesterov
momentum, often with a rate of 0.7 and a momentum of 0.9. The *inner* one is AdamW. An optimizer
goes against its gradient; so the *pseudo-gradient* is where the ranks came from minus where they
went.

**Build.**
"""


# %%
class DiLoCo:
    def __init__(self, every, sign=1, **outer):
        self.every, self.sign, self.options = every, sign, outer

    def __call__(self, model, optimizer, step):
        if step == 1:
            self.shared = flat(model)
            self.outer = torch.optim.SGD([self.shared], **self.options)
        update(optimizer)
        if step % self.every == 0:
            self.shared.grad = self.sign * (self.shared - flat(model))
            comms.all_reduce_mean(self.shared.grad)
            self.outer.step()
            vector_to_parameters(self.shared.clone(), model.parameters())


# %%
def theirs(model, optimizer, step):
    if step == 1:
        optimizer.local = LocalSteps(model, comms, 16, outer=Outer(0.7, 0.9))
    update(optimizer)
    optimizer.local.after_step()


def nesterov(momentum):
    return DiLoCo(16, lr=0.7, momentum=momentum, nesterov=True)


same = torch.equal(*(flat(train(way, steps=64)[0]) for way in (nesterov(0.9), theirs)))
comms.print(f"bitwise microddp's: {same}")
assert same

# %% [markdown]
r"""
**Predict.** If all meetings agreed, with rate $\eta$ and momentum $\mu$ the shared weights would in
the end go $\eta / (1 - \mu)$ times as far as the ranks: 7 times, or 1.4 with $\mu = 0.5$. But the
inner rate falls, and what momentum carries on from early, larger steps goes too far later. So a
small momentum should do better.

**Measure.**
"""

# %%
outer = {momentum: three(nesterov(momentum))[1] for momentum in (0.9, 0.5)}

# %% tags=["plumbing"]
plain = runs["H = 16"]
sentence = (
    f"Momentum 0.9 ends at {outer[0.9]}, {outer[0.9].beside(plain)} the plain mean of H = 16, at "
    f"{plain}. Momentum 0.5 ends at {outer[0.5]}, {outer[0.5].beside(plain)} it. "
    f"(Never: {runs['never']}.)"
)
find(comms, "diloco", **outer[0.9].sides(plain, sentence))

# %% [markdown]
r"""
**Explain.** So short a run is no test of 0.9, which is meant for tens of thousands of steps,
hundreds between meetings: there DiLoCo's authors report the quality of synchronous training for 500
times less communication (C4, 8 workers, 2023). [Streaming DiLoCo](https://arxiv.org/abs/2501.18512)
(2025) sends its pseudo-gradients in *fragments*, in turns, each late.

## Where it breaks: the wrong sign

The pseudo-gradient is easily turned round; [torchft had it
so](https://github.com/meta-pytorch/torchft/pull/233). **Predict.** Then each meeting takes the
ranks back to beyond where they came from. Without momentum:
"""

# %%
seen = {}
for name, sign in {"right": 1, "wrong sign": -1}.items():
    way = DiLoCo(16, sign, lr=0.7)
    seen[name] = [own for own, _ in train(way, steps=64, look=1)[1]]

# %% tags=["plumbing"]
right, jumps = ([y[i] - y[i - 1] for i in (15, 31, 47, 63)] for y in seen.values())
figures.lines(
    {name: (range(1, 65), losses) for name, losses in seen.items()},
    title=f"At meetings the loss changes by {min(right):+.2f} to {max(right):+.2f}, "
    f"with the wrong sign by {min(jumps):+.2f} to {max(jumps):+.2f}",
    xlabel="step",
    ylabel="loss on new text",
)
assert jumps[0] > 0

# %% [markdown]
"""
Between meetings the inner optimizer works against it. Compare losses before and after a *meeting*.

## Where it breaks: what is not a weight

Batch normalisation has running statistics, of which each rank has its own: the model would depend
on who saves it. microddp refuses, on every rank:
"""

# %%
try:
    LocalSteps(SimpleCNN(ModelConfig(channels=(8,))).to(comms.device), comms, 16)
except ValueError as error:
    comms.print(error)
else:
    raise AssertionError("expected running statistics to be refused")

# %% [markdown]
r"""
AdamW's moments are not averaged, either: a checkpoint has to hold those of all ranks.

:::{admonition} On GPUs
Losses are the same, up to rounding. $t_S/c$ changes, and with it the best $H$: below two thirds DDP
hides its messages, and rare meetings only lose steps. Measure your $c$ and $t_S$. PyTorch has
`PostLocalSGDOptimizer`, torchft DiLoCo.
:::

Worked out, not measured, for 1B parameters in bf16 (fp32 weights double $t_S$) and 4096 tokens a
device. Where a step of DDP is below $1.1\,c$, DDP; else $H = 10\,t_S/c$, beyond which meetings cost
less than a tenth of $c$:
"""

# %% tags=["plumbing"]
sides = known_clusters(parameters=1e9, tokens=4096, layers=24)
rows = [
    (
        side.words,
        side.ratio,
        "DDP" if 1 / 3 + side.ratio < 1.1 else f"H = {math.ceil(10 * side.ratio)}",
    )
    for side in sides
]
comms.print(table(rows, ["", "t_S / c", "DDP, or H at most"]))

# %% [markdown]
r"""
## What to take along

- With plain SGD, averaging weights after each step is averaging gradients. With another optimizer
  it is another algorithm: compare its losses with DDP's, and with those of ranks that never meet.
- A step takes $c + t_S/H$: beyond $H = 10\,t_S/c$ less than a tenth of $c$ is left to win.

## Exercises

**The lab.** Write DiLoCo's outer step, and the training around it. {doc}`It is checked </labs>` on
1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 11
```

1. How good is the mean of ranks that never met if they also begin with *different* weights?

   <details class="solution"><summary>Solution</summary>

   Worse than each of them. It averages unlike neurons: networks that compute the same can have them
   in another order ([Entezari and others, 2021](https://arxiv.org/abs/2110.06296)).

   </details>

2. Leave out `.clone()` in `DiLoCo`. What becomes of the pseudo-gradient, and of the ranks?

   <details class="solution"><summary>Solution</summary>

   `vector_to_parameters` makes the parameters views of what it is given. So from the first meeting
   on, every inner step moves `shared`, too, and the pseudo-gradient is zero. What is left is
   old momentum, if any. The ranks never agree again, and there is no error.

   </details>
"""

# %%
comms.close()
