# %% [markdown]
r"""
# 11. Meeting less often

How seldom can ranks agree? Until now they agreed in every step, on gradients. Over a slow link that
is most of the time. In this chapter each rank trains by itself, and at times they meet and average
their *weights*. What is sent shrinks by any factor you like. What is learned between two meetings
may not fit together.
"""

# %% tags=["imports"]
import itertools
import math

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import microddp
from microddp import figures
from microddp.compression import compress
from microddp.data import load_text
from microddp.hosts import relink
from microddp.local_sgd import Local, LocalSteps, Outer
from microddp.model import ModelConfig, SimpleCNN
from microddp.report import MIB, human_bytes, human_seconds, table
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.workloads import (
    LENGTH,
    character_batches,
    character_model,
    learn,
    times_by_link,
    token_loss,
)

# %%
# sphinx_gallery_builds = "training whose ranks meet now and then, and DiLoCo"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
timed = comms.timed()
n = timed.world_size
timed.print(f"{n} of {comms.world_size} ranks stay")
if n == 1:
    timed.print("One rank is the average of itself: add --nproc-per-node=2.")

# %% [markdown] index=["local SGD", "weight averaging"]
r"""
As before, ranks without a core or GPU of their own leave. The results are those of the ranks that
stay; the mean of many is further from each of them than the mean of two.

## Averaging weights

The model, the text and the batches are those of chapter 10: a small transformer that continues
Python's own help, by characters.

**Predict.** With plain SGD, to average weights after *every* step is to average gradients. Let all
ranks begin a step with the same $w$. Rank $i$ goes to $w - \eta g_i$, and the mean of these is $w -
\eta \bar g$. With a meeting every $H$ steps, $H - 1$ of them begin at weights of the rank's own,
where its gradient is another one. So the result differs, and the weights are sent once for $H$
steps. All that stays equal is the number of samples.

**Build.** That is *local SGD* ([Stich, 2018](https://arxiv.org/abs/1805.09767)), or federated
averaging where the data belong to the ranks ([McMahan and others,
2016](https://arxiv.org/abs/1602.05629)):
"""

# %%
text = load_text(LENGTH, timed.device)


def average(model):
    flat = parameters_to_vector(model.parameters()).detach()
    timed.all_reduce_mean(flat)
    vector_to_parameters(flat, model.parameters())


# %%
def local_sgd(model, make_optimizer, steps, every):
    """Train; returns how far the ranks were apart after each step, and before a meeting there."""
    optimizer, apart = make_optimizer(model.parameters()), []
    batches = itertools.islice(character_batches(text, timed), steps)
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        optimizer.step()
        apart.append(distance(model))
        if step % every == 0:
            average(model)
    return apart


def distance(model):
    """Of the ranks' weights from their mean, as a share of the mean's norm."""
    everyone = timed.all_gather(parameters_to_vector(model.parameters()).detach())
    mean = everyone.mean(dim=0)
    return ((everyone - mean).norm(dim=1).mean() / mean.norm()).item()


# %% [markdown]
"""
With SGD and a meeting after each step, it should train the weights that DDP trains, up to rounding:
"""


# %%
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3)


# %%
def ddp_weights(steps):
    strategy = STRATEGIES["ddp"](character_model(timed.device).double(), timed)
    optimizer = sgd(strategy.module.parameters())
    for batch in itertools.islice(character_batches(text, timed), steps):
        take_step(strategy, token_loss, optimizer, batch)
    return parameters_to_vector(strategy.module.parameters()).detach()


# %%
begin, theirs = ddp_weights(0), ddp_weights(8)
for every in (1, 8):
    model = character_model(timed.device).double()
    local_sgd(model, sgd, 8, every)
    mine = parameters_to_vector(model.parameters()).detach()
    off = ((mine - theirs).norm() / (theirs - begin).norm()).item()
    timed.print(f"a meeting every {every} of 8 steps: {off:.1e} of DDP's way from DDP's weights")
    assert every > 1 or off < 1e-9

# %% [markdown]
r"""
## Apart, and together again

**Predict.** Between two meetings the ranks drift apart, since each sees other samples. If they
drift at random, the distance grows as the root of the number of steps: four times as far after 16
times as many. A meeting takes it to zero. Here is the distance before meetings, with AdamW:
"""

# %%
models = {every: character_model(timed.device) for every in (4, 16, 64)}
drifts = {every: local_sgd(model, adamw, 64, every) for every, model in models.items()}

# %% tags=["plumbing"]
further = drifts[64][63] / max(drifts[64][3], 1e-9)
figures.lines(
    {f"H = {k}": (range(1, 65), [100 * d for d in drift]) for k, drift in drifts.items()},
    title=f"Without a meeting, {further:.1f} times as far apart after 64 steps as after 4",
    xlabel="step",
    ylabel="distance, % of the mean's norm",
)
assert n == 1 or max(drifts[4]) < max(drifts[16]) < max(drifts[64])
assert n == 1 or drifts[4][63] < drifts[4][3]

# %% [markdown]
"""
From the beginning on it is about a root at first, and less later. After a meeting the ranks part
more slowly than from the beginning. AdamW's first step moves each weight by the whole rate, by the
sign of its gradient alone; later ones are means, in which gradients of both signs partly cancel. So
*post-local* SGD averages gradients first, and meets less often later ([Lin and others,
2018](https://arxiv.org/abs/1808.07217)); microddp's {class}`~microddp.local_sgd.LocalSteps` has a
`warm_up` for it.

Is the mean of weights that are so far apart any good? For neural networks that is not obvious.
After 64 steps without a meeting, on text that nobody was trained on:
"""


# %%
def test_loss(model):
    """The mean over the ranks of what their own weights give."""
    with torch.no_grad():
        tokens, targets = text.test[:256]
        loss = token_loss(model(tokens), targets)
    timed.all_reduce_mean(loss)
    return loss.item()


# %%
model = character_model(timed.device)
local_sgd(model, adamw, 64, every=65)
own = test_loss(model)
average(model)
mean = test_loss(model)
model = character_model(timed.device)
learn(STRATEGIES["ddp"](model, timed), text, timed, 64)
timed.print(f"own weights {own:.3f}, their mean {mean:.3f}; with DDP {test_loss(model):.3f}")

# %% [markdown]
r"""
A mean that is no better than its parts adds nothing to what each rank has learned. With DDP each
has learned from all samples, and that is what meetings are for.

## Loss by steps, by bytes, by time

**Predict.** A step of DDP takes its computing $c$ and the time of its message $t_S$: these
gradients fit into one bucket, which hides nothing. With a meeting every $H$ steps it takes $c + t_S
/ H$. At $H = t_S / c$ that is $2c$, half of it still for messages; at ten times this $H$ messages
take a tenth of $c$. What seldom meetings cost in steps cannot be told from bytes.

**Measure.** `LocalSteps` does what `average` does, and more of what follows. Each row trains on the
same samples, in the same order, over links of 100 Mbit/s. "never" is ranks that never meet. The
loss of a step is that of each rank's own weights on text that is new to it, averaged over the
ranks. The loss to reach is DDP's after three quarters of the steps. At the end all meet, but for
"never", and what they then have is tested. (DDP runs over the faster links first, for the next
section.)
"""

# %%
STEPS = 192


def train(name="ddp", every=0, **options):
    """By a strategy of that name or, if `every` is not 0, with a meeting every so many steps."""
    model = character_model(timed.device)
    if every:
        strategy = Local(model, timed, local=LocalSteps(model, timed, every, **options))
    else:
        strategy = STRATEGIES[name](model, timed)
    run = learn(strategy, text, timed, STEPS)
    return run, strategy.sent_bytes(), test_loss(model)


# %%
fast, usual = train(), timed.box
if timed.box:
    relink(timed, "100mbit")
runs = {"DDP": train()}
for every in (1, 4, 16, 64):
    runs[f"H = {every}"] = train(every=every)
runs["never"] = train("none")
computing = runs["never"][0].step
TARGET = runs["DDP"][0].smooth[3 * STEPS // 4]

# %% tags=["plumbing"]
per_byte = timed.box.seconds_per_byte if timed.box else math.nan
rows = []
for name, (run, sent, tested) in runs.items():
    predicted = (computing + sent * per_byte) * 1e3 if timed.box else None
    needed = run.seconds_to(TARGET)
    there = (run.steps_to(TARGET), needed, runs["DDP"][0].seconds_to(TARGET) / needed)
    there = there if math.isfinite(needed) else (None,) * 3
    rows.append((name, human_bytes(sent), predicted, run.step * 1e3, tested, *there))
headers = ["", "sent a step", "ms, predicted", "ms a step", "test loss", "steps to it", "s"]
formats = ["", "", ".1f", ".1f", ".3f", ".0f", ".2f", ".2f"]
message = runs["DDP"][1] * per_byte
if timed.box:
    ratio = f"t_S / c = {message / computing:.1f}"
    timed.print(f"t_S {human_seconds(message)}, c {human_seconds(computing)}, {ratio}")
timed.print(f"to a loss of {TARGET:.2f}; sent by formula; a blank: not in {STEPS} steps")
timed.print(table(rows, [*headers, "speed-up"], floats=formats))


# %% tags=["plumbing"]
def draw(x_of, xlabel, title, log=""):
    skip = STEPS // 8  # the first steps would flatten all that follows
    series = {
        name: (x_of(run, sent)[skip:], run.smooth[skip:])
        for name, (run, sent, _) in runs.items()
        if name not in ("H = 1", "never")
    }
    ylabel = "loss, mean of 16 steps"
    figures.lines(series, title=title, xlabel=xlabel, ylabel=ylabel, log=log, zero=False)


last = {name: run.smooth[-1] for name, (run, _, _) in runs.items()}
draw(
    lambda run, _: range(1, len(run.seconds) + 1),
    "step",
    f"By steps: DDP ends at {last['DDP']:.2f}, a meeting every 64 steps at {last['H = 64']:.2f}",
)

# %% tags=["plumbing"]
if n > 1:
    most, least = (runs[name][1] * STEPS for name in ("DDP", "H = 64"))
    draw(
        lambda _, sent: [i * sent / MIB for i in range(1, STEPS + 1)],
        "MiB that a rank sends, spread evenly over the steps",
        f"By bytes: {human_bytes(most)} for DDP, {human_bytes(least)} for a meeting in 64 steps",
        log="x",
    )

# %% tags=["plumbing"]
needed = {name: run.seconds_to(TARGET) for name, (run, _, _) in runs.items() if name != "never"}
best = min(needed, key=needed.get)
draw(
    lambda run, _: run.seconds,
    "seconds",
    f"By time: {best} is at {TARGET:.2f} in 1/{needed['DDP'] / needed[best]:.1f} of DDP's time",
)

# %% [markdown] index=["DiLoCo", "outer optimizer", "pseudo-gradient"]
r"""
**Explain.** Every loss is of one run. Where rows are not in the order of $H$, their difference is
no more than noise. (DDP and $H = 1$ are not the same with AdamW: each rank divides by the size of
its own gradients.)

What do meetings cost, and what do they give? "Steps to it" is of the ranks' own weights, "test
loss" of the mean of their weights. Both have to be held against "never", where no rank learned
anything from another: what lies between DDP and "never" is all there is to lose by meeting less
often. In so short a run one rank learns nearly as fast by itself, and so seldom meetings are fast,
and none at all as well. A long run has more to lose, and no table of a short one tells where its
best $H$ is.

And why not average gradients over $H$ batches (chapter 06)? That sends as little, and is the same
as a larger batch. But it takes one step where local SGD takes $H$.

## DiLoCo

The mean of what the ranks did since the last meeting is a direction. *DiLoCo* ([Douillard and
others, 2023](https://arxiv.org/abs/2311.08105)) gives it to an optimizer of its own, the *outer*
one, whose momentum goes on in directions that meetings agree on. The *inner* one is AdamW. An
optimizer wants a gradient, and goes the other way; so the *pseudo-gradient* is where the ranks came
from minus where they went. With plain SGD and a rate of 1 the outer step is local SGD. DiLoCo's is
SGD with Nesterov momentum, often with a rate of 0.7 and a momentum of 0.9.

**Build.**
"""


# %%
def diloco(steps, every, sign=1, **outer_options):
    """Train; returns the shared weights and the loss of each step."""
    model, losses = character_model(timed.device), []
    inner, shared = adamw(model.parameters()), parameters_to_vector(model.parameters()).detach()
    outer = torch.optim.SGD([shared], **outer_options)
    batches = itertools.islice(character_batches(text, timed), steps)
    for step, (x, y) in enumerate(batches, start=1):
        inner.zero_grad()
        loss = token_loss(model(x), y)
        loss.backward()
        inner.step()
        losses.append(loss.detach())
        if step % every == 0:
            shared.grad = sign * (shared - parameters_to_vector(model.parameters()).detach())
            timed.all_reduce_mean(shared.grad)
            outer.step()
            vector_to_parameters(shared.clone(), model.parameters())
    return shared, timed.all_gather(torch.stack(losses)).mean(dim=0).tolist()


# %%
DILOCO = Outer(lr=0.7, momentum=0.9)
model = character_model(timed.device)
learn(Local(model, timed, local=LocalSteps(model, timed, 16, outer=DILOCO)), text, timed, 64)
theirs = parameters_to_vector(model.parameters()).detach()
mine, _ = diloco(64, 16, lr=0.7, momentum=0.9, nesterov=True)
timed.print(f"bitwise microddp's: {torch.equal(mine, theirs)}")
assert torch.equal(mine, theirs)

# %% [markdown]
r"""
**Predict.** A link of 50 Mbit/s is a twentieth of one of 1 Gbit/s. With a meeting every 16 steps
the bytes of a step are a sixteenth. So a step should take about as long as DDP's over the fast
link: $c + t_S/16$, with the $t_S$ of the slow one.

A last idea hides messages, too. The weights are dealt into $F$ *fragments*, which meet in turns,
and while one travels the ranks compute their next step ([Streaming
DiLoCo](https://arxiv.org/abs/2501.18512), Douillard and others, 2025, which also sends 4 bits a
value, and blends what arrives with what is there). If all fragments were equal, $t_S/F - c$ of each
message would be left to wait for, or nothing. There are $F$ of them in $H$ steps, so a step takes
$c + \frac{F}{H} \max(0, t_S/F - c)$.

**Measure.** DDP over 1 Gbit/s, the others over 50 Mbit/s, with $H = 16$:
"""

# %%
if timed.box:
    relink(timed, "50mbit")
EVERY, F = 16, 4
slow = {
    "mean": train(every=EVERY),
    f"mean, {F} fragments": train(every=EVERY, fragments=F),
    "rate 0.7, no momentum": train(every=EVERY, outer=Outer(lr=0.7)),
    "DiLoCo": train(every=EVERY, outer=DILOCO),
    f"DiLoCo, {F} fragments": train(every=EVERY, outer=DILOCO, fragments=F),
}


# %%
def predicted(name, sent, box):
    if box is None:
        return None
    wait = sent * box.seconds_per_byte  # t_S / H
    if "fragments" in name:
        wait = F / EVERY * max(0, EVERY * wait / F - computing)
    return 1e3 * (computing + wait)


# %% tags=["plumbing"]
first = f"DDP, {usual.links[0]}" if usual else "DDP"
rows = []
for name, (run, sent, tested) in {first: fast, **slow}.items():
    ms = predicted(name, sent, usual if name == first else timed.box)
    needed = run.seconds_to(TARGET) if math.isfinite(run.seconds_to(TARGET)) else None
    rows.append((name, human_bytes(sent), ms, run.step * 1e3, tested, needed))
headers = ["", "sent a step", "ms, predicted", "ms a step", "test loss", f"s to {TARGET:.2f}"]
timed.print(table(rows, headers, floats=["", "", ".1f", ".1f", ".3f", ".2f"]))

# %% tags=["plumbing"]
both = {name: run for name, (run, *_) in {first: fast, **slow}.items()}
figures.lines(
    {name: (run.seconds[STEPS // 8 :], run.smooth[STEPS // 8 :]) for name, run in both.items()},
    title=f"{STEPS} steps: DDP, fast link, ends at {fast[0].smooth[-1]:.2f}; slow link: mean "
    f"{slow['mean'][0].smooth[-1]:.2f}, DiLoCo {slow['DiLoCo'][0].smooth[-1]:.2f}",
    xlabel="seconds",
    ylabel="loss, mean of 16 steps",
    zero=False,
)

# %% [markdown]
r"""
**Explain.** A link that is 20 times slower, and a step that takes about as long. Where fragments
gain less than predicted: a core that carries a message computes less meanwhile, and with four times
as many meetings the ranks wait for each other four times as often. Nor are fragments equal, since
no parameter is split. A fragment arrives a step late, and what was trained meanwhile is added to
it; what that does to the loss, one run of each does not tell.

What of DiLoCo's loss? With Nesterov's momentum the first meeting goes $0.7 \cdot 1.9 = 1.33$ of the
way that the ranks went. If all meetings agreed, the twelfth would go $0.7\,(1 + 0.9 \cdot 7.2) =
5.2$ times that way, where 7.2 is the sum of the powers of 0.9 from 0 to 11. This run has $192 / 16
= 12$ meetings, from random weights on, where directions change most. The row without momentum is
the one to hold DiLoCo's against. DiLoCo was made for tens of thousands of steps and hundreds
between meetings: there its authors report the quality of synchronous training for 500 times less
communication (C4, 8 workers). A run of a few seconds is not that, and says nothing against it.

## Where it breaks: the wrong sign

The pseudo-gradient is where the ranks came from minus where they went, and is easily written the
other way round; a well-known library [had it so](https://github.com/meta-pytorch/torchft/pull/233).
**Predict.** Then each meeting takes the ranks back to beyond where they came from. Without outer
momentum, with a rate of 0.7:
"""

# %%
_, right = diloco(64, 16, lr=0.7)
_, wrong = diloco(64, 16, sign=-1, lr=0.7)

# %% tags=["plumbing"]
rows = [(i, right[i - 1], right[i], wrong[i - 1], wrong[i]) for i in (16, 32, 48)]
headers = ["meeting after step", "loss before", "after", "wrong sign: before", "after"]
timed.print(table(rows, headers))
jump = max(after - before for *_, before, after in rows)
figures.lines(
    {"right": (range(1, 65), right), "wrong sign": (range(1, 65), wrong)},
    title=f"The wrong sign: at a meeting the loss jumps by up to {jump:.1f}",
    xlabel="step",
    ylabel="loss",
)
assert all(after > before for *_, before, after in rows)

# %% [markdown]
"""
Between two meetings the loss falls again, for the inner optimizer is right. With a smaller rate, or
seldom meetings, that may pass for slow learning. Compare the loss before and after a *meeting*:
with the right sign it changes as from batch to batch.

## Where it breaks: what is not a weight

A meeting averages weights. A model with batch normalisation has more: running statistics, of which
each rank has its own, so that the model would depend on who saves it. microddp refuses, on every
rank. Layer or group normalisation has no such state:
"""

# %%
try:
    LocalSteps(SimpleCNN(ModelConfig(channels=(8,))).to(timed.device), timed, EVERY)
except ValueError as error:
    timed.print(error)
else:
    raise AssertionError("expected running statistics to be refused")

# %% [markdown]
r"""
AdamW's moments are not averaged, either: that would send three times as much. So each rank has its
own, and a checkpoint has to hold those of all; `python -m microddp.train --average-every 16` does.

## What to pick

Ways to live with a slow link beside each other, two of chapter 10 among them, and ranks that never
meet: the steps that each took to the loss, times what its own step takes beside its bytes, plus the
bytes at each speed. Stars mark all that is within 15 % of the least of a column; single runs do not
tell more. At 100 Mbit/s that is nearly the measurement again, at the others a prediction:
"""

# %%
if timed.box:
    relink(timed, "100mbit")
compressed = {}
for name in ("int8", "power:4"):
    strategy = STRATEGIES["ddp"](character_model(timed.device), timed)
    compress(strategy, name)
    compressed[name] = learn(strategy, text, timed, STEPS), strategy.sent_bytes()

# %% tags=["plumbing"]
PICK = {"10 Mbit/s": 1e7, "50 Mbit/s": 5e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
ways = {name: way[:2] for name, way in runs.items()} | compressed
times = times_by_link(ways, TARGET, per_byte, PICK.values()) if timed.box else {}
rows = [(k, f"{ways[k][0].steps_to(TARGET):.0f}", *cells) for k, cells in times.items()]
headers = [f"to a loss of {TARGET:.2f}", "steps", *PICK]
timed.print(table(rows, headers) if rows else "links of known speed: none here")
measured = {first: fast, f"H = {EVERY}, 50 Mbit/s": slow["mean"]}
for name, (run, *_) in measured.items():
    timed.print(f"measured: {name} {run.seconds_to(TARGET):.2f} s")

# %% [markdown]
r"""
Hold the two that were measured at another speed against the table. The slower the link, the fewer
bytes a way may send to be among the stars; the faster, the more of them are.

Before you pick, ask: does your model have state that is no weight? How do loss and $H$ go together
at your learning rate, which may need another value? Is there memory for two copies of the weights
more on each rank, the shared ones and the pseudo-gradient, and for a momentum? And who needs *the*
model when, for evaluation or a checkpoint? Between meetings nobody has it. Fewer meetings also mean
fewer waits for a rank that is slow at times.

## What to take along

- With plain SGD, averaging weights after each step is averaging gradients. Everything beyond has to
  be tried.
- A step takes $c + t_S/H$: at $H = t_S/c$ half of it is messages, at ten times that a tenth of $c$.
- DiLoCo's meeting is a step of an optimizer; its gradient is where the ranks came from minus where
  they went.
- Fragments send the same bytes in smaller messages, and hide up to a step's computing of each.

PyTorch has `PeriodicModelAverager` and `PostLocalSGDOptimizer` for local SGD; torchft has DiLoCo.

## Exercises

**The lab.** Write DiLoCo's outer step, and the training around it. {doc}`It is checked </labs>` on
1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 11
```

1. Let the ranks train 192 steps without a meeting, and average once at the end. How good is the
   mean on text that nobody was trained on? And if they begin with *different* weights? (Make the
   model after `torch.manual_seed(timed.rank)`, and take `local_sgd`, for `LocalSteps` begins with a
   broadcast.)

   <details class="solution"><summary>Solution</summary>

   On the machine this was tried on (two ranks, November 2026) rank 0's own weights had a loss of
   2.68 in both, and the mean over the ranks is "never" above. The mean of weights that began
   together had 2.80: to average once, so late, does harm. That of weights that began apart had
   2.94. One possible reason: the same function can be computed by networks whose neurons are in
   another order, and then neuron 7 of one rank does what neuron 31 of another does ([Entezari and
   others, 2021](https://arxiv.org/abs/2110.06296)).

   </details>

2. DDP's step takes $c + t_S$, local SGD's $c + t_S/H$. At which $H$ is half of what there is to
   gain reached, and at which nine tenths?

   <details class="solution"><summary>Solution</summary>

   The most that can be gained is $t_S$ for each step, and $H$ gains $t_S (1 - 1/H)$ of it: half at
   $H = 2$, nine tenths at $H = 10$, whatever $c$.

   </details>

3. Leave out `.clone()` in `diloco`. What becomes of the pseudo-gradient, and of the ranks?

   <details class="solution"><summary>Solution</summary>

   `vector_to_parameters` makes the parameters views of what it is given. So from the first meeting
   on, `shared` and the model are the same memory, and every inner step moves both. From the second
   meeting on the pseudo-gradient is zero. With a momentum the first meeting's direction goes on,
   ever more weakly. The ranks never agree again, and there is no error.

   </details>
"""

# %%
comms.close()
