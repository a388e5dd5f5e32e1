# %% [markdown]
r"""
# Meeting less often

How seldom can ranks agree? Until now they agreed in every step, on gradients. Over a slow link that
is most of the time. In this chapter each rank trains by itself, and at times they meet and average
their *weights*. What is sent shrinks by any factor you like. What is learned between two meetings
may not fit together. Where is the balance?
"""

# %% tags=["imports"]
import itertools
import math

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import microddp
from microddp import figures
from microddp.data import ShardedBatches, load_text
from microddp.hosts import human_bits
from microddp.local_sgd import LocalSteps, Outer
from microddp.model import ModelConfig, SimpleCNN
from microddp.report import MIB, human_bytes, human_seconds, mark_least, table
from microddp.schedule import STRATEGIES, Local, take_step
from microddp.workloads import LENGTH, character_loss, character_model, learn

# %%
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
few = comms.timed()
rank, n = few.rank, few.world_size
few.print(f"{n} of {comms.world_size} ranks stay")
if n == 1:
    few.print("One rank is the average of itself: add --nproc-per-node=2.")

# %% [markdown]
r"""
## Averaging weights

The model, the text and the batches are those of chapter 10: a small transformer that continues
Python's own help, by characters.

**Predict.** With plain SGD, to average weights after *every* step is to average gradients. Let all
ranks begin a step with the same $w$. Rank $i$ goes to $w - \eta g_i$, and the mean of these is $w -
\eta \bar g$. With a meeting every $H$ steps a rank takes $H - 1$ of them from weights of its own,
where its gradient is another one. So the result differs, and a message of $S$ bytes is sent once
for $H$ steps. All that stays equal is the number of samples.

**Build.** That is *local SGD*:
"""

# %%
text = load_text(LENGTH, few.device)
BATCH = n * max(1, 16 // n)


def average(model):
    flat = parameters_to_vector(model.parameters()).detach()
    few.all_reduce_mean(flat)
    vector_to_parameters(flat, model.parameters())


# %%
def local_sgd(model, make_optimizer, steps, every):
    """Train; returns how far the ranks were from their mean after each step, before any meeting."""
    optimizer, apart = make_optimizer(model.parameters()), []
    shards = ShardedBatches(text.train, BATCH, rank, n).epoch(0)
    for step, (x, y) in enumerate(itertools.islice(shards, steps), start=1):
        optimizer.zero_grad()
        character_loss(model(x), y).backward()
        optimizer.step()
        apart.append(spread(model))
        if step % every == 0:
            average(model)
    return apart


def spread(model):
    """How far the ranks' weights are from their mean, as a share of its length."""
    everyone = few.all_gather(parameters_to_vector(model.parameters()).detach())
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
    strategy = STRATEGIES["ddp"](character_model(few.device).double(), few)
    optimizer = sgd(strategy.module.parameters())
    shards = ShardedBatches(text.train, BATCH, rank, n).epoch(0)
    for batch in itertools.islice(shards, steps):
        take_step(strategy, character_loss, optimizer, batch)
    return parameters_to_vector(strategy.module.parameters()).detach()


# %%
theirs = ddp_weights(8)
for every in (1, 8):
    model = character_model(few.device).double()
    local_sgd(model, sgd, 8, every)
    mine = parameters_to_vector(model.parameters()).detach()
    error = ((mine - theirs).norm() / theirs.norm()).item()
    few.print(f"a meeting every {every} of 8 steps: {error:.0e} from DDP's weights")
    assert every > 1 or error < 1e-9

# %% [markdown]
r"""
## Apart, and together again

**Predict.** Between two meetings the ranks drift apart, since each sees other samples. How fast
depends on the size of a step. A meeting takes the distance to zero. Here it is, with AdamW, for
several $H$:
"""

# %%
drifts = {}
for every in (4, 16, 64):
    drifts[every] = local_sgd(character_model(few.device), adamw, 64, every)
largest = {every: max(drift) for every, drift in drifts.items()}
figures.lines(
    {f"H = {k}": (range(1, 65), [100 * d for d in drift]) for k, drift in drifts.items()},
    title=f"{largest[64] / max(largest[4], 1e-9):.1f} times as far apart after 64 steps as after 4",
    xlabel="step",
    ylabel="distance from the mean, % of its length",
)
assert n == 1 or largest[4] < largest[16] < largest[64] < 16 * largest[4]

# %% [markdown]
r"""
**Explain.** The distance grows slower than the number of steps: the ranks see samples of one text,
so in part they go the same way, and in part at random. What matters is whether the *mean* of
weights that are so far apart is any good. For neural networks that is not obvious. Those that began
with different weights have a worse mean than those that began together and parted for a while
(exercise 1).

## Loss by steps, by bytes, by time

**Predict.** A step of DDP takes its computing $c$ and the time of its message $t_S$. With a meeting
every $H$ steps it takes $c + t_S / H$. Over a link of 100 Mbit/s $t_S$ is several times $c$, so the
gain is large until $H$ is about $t_S / c$, and small beyond: then the step is nearly all computing.
If the steps to a given loss grow with $H$, there is a best $H$.

**Measure.** The core's {class}`~microddp.local_sgd.LocalSteps` does what `average` does, and more
of what follows. Each row trains on the same samples, in the same order. The loss of a step is that
of each rank's own weights on text that is new to it, averaged over the ranks; at the end all ranks
meet, and the weights they share are tested on text that nobody trained on. DDP runs once more than
the others, over the links as they were, for the section after next:
"""

# %%
STEPS = 192


def train(every=0, steps=STEPS, name="ddp", **options):
    """DDP, or what has another name; with a meeting every so many steps, local SGD."""
    model = character_model(few.device)
    if every:
        strategy = Local(model, few, LocalSteps(model, few, every, **options))
    else:
        strategy = STRATEGIES[name](model, few)
    run = learn(strategy, text, few, steps)
    with torch.no_grad():
        tokens, targets = text.test[:256]
        tested = character_loss(model(tokens), targets).item()
    return run, strategy.sent_bytes(), tested


# %%
alone, *_ = train(steps=40, name="none")
computing = alone.seconds[-1] / 40
fast = train()
if few.box:
    few.relink("100mbit")
runs = {"DDP": train()}
for every in (1, 4, 16, 64):
    runs[f"H = {every}"] = train(every)
TARGET = runs["DDP"][0].smooth[3 * STEPS // 4]

# %% tags=["plumbing"]
per_byte = few.box.seconds_per_byte if few.box else math.nan
rows = []
for name, (run, sent, tested) in runs.items():
    predicted = (computing + sent * per_byte) * 1e3 if few.box else None
    taken = run.seconds[-1] / STEPS * 1e3
    there, needed = run.steps_to(TARGET), run.seconds_to(TARGET)
    speedup = runs["DDP"][0].seconds_to(TARGET) / needed
    reached = (there, needed, speedup) if math.isfinite(needed) else (None,) * 3
    rows.append((name, human_bytes(sent), predicted, taken, tested, *reached))
headers = ["", "sent a step", "ms, predicted", "ms a step", "test loss", "steps to it", "s"]
formats = ["", "", ".1f", ".1f", ".3f", ".0f", ".2f", ".2f"]
where = f"links of {human_bits(few.box.links[0].bits_per_second)}" if few.box else "this machine"
few.print(f"{where}; computing {human_seconds(computing)} a step; to a loss of {TARGET:.2f}")
few.print(table(rows, [*headers, "speed-up"], floats=formats))


# %% tags=["plumbing"]
def draw(x_of, xlabel, title, log=""):
    series = {name: (x_of(run, sent), run.smooth) for name, (run, sent, _) in runs.items()}
    series = {k: (x, y) for k, (x, y) in series.items() if k != "H = 1"}
    figures.lines(series, title=title, xlabel=xlabel, ylabel="loss, mean of 16 steps", log=log)


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
        "MiB that a rank has sent",
        f"By bytes: {human_bytes(most)} for DDP, {human_bytes(least)} for a meeting in 64 steps",
        log="x",
    )

# %% tags=["plumbing"]
needed = {name: run.seconds_to(TARGET) for name, (run, _, _) in runs.items()}
best = min(needed, key=needed.get)
draw(
    lambda run, _: run.seconds,
    "seconds",
    f"By time: {best} is at {TARGET:.2f} in 1/{needed['DDP'] / needed[best]:.1f} of DDP's time",
)

# %% [markdown]
r"""
**Explain.** The time of a step follows the prediction: at 100 Mbit/s most of the gain is there at
$H = 16$. What seldom meetings cost is in two columns. "Steps to it" says how the ranks get on by
themselves, each with its own smaller batch, which has more noise. "Test loss" says what the mean of
their weights is worth. As long as both stay near DDP's, each further doubling of $H$ is a small
gain, and a bet that the ranks still fit together.

## DiLoCo

An average says: the step the ranks should have taken together is the mean of theirs. *DiLoCo*
(Douillard and others, 2023) takes it as a gradient instead, and gives it to an optimizer. That is
the *outer* one; the *inner* one is AdamW. The *pseudo-gradient* is where the ranks came from minus
where they went, averaged. With plain SGD and a rate of 1 the outer step is local SGD. DiLoCo's is
SGD with Nesterov momentum, often with a rate of 0.7 and a momentum of 0.9.

**Build.**
"""


# %%
def diloco(steps, every, sign=1):
    """Train; returns the weights and the loss of each step."""
    model, losses = character_model(few.device), []
    inner, shared = adamw(model.parameters()), parameters_to_vector(model.parameters()).detach()
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    shards = ShardedBatches(text.train, BATCH, rank, n).epoch(0)
    for step, (x, y) in enumerate(itertools.islice(shards, steps), start=1):
        inner.zero_grad()
        loss = character_loss(model(x), y)
        loss.backward()
        inner.step()
        losses.append(loss.detach())
        if step % every == 0:
            shared.grad = sign * (shared - parameters_to_vector(model.parameters()).detach())
            few.all_reduce_mean(shared.grad)
            outer.step()
            vector_to_parameters(shared.clone(), model.parameters())
    return shared, few.all_gather(torch.stack(losses)).mean(dim=0).tolist()


# %%
DILOCO = Outer(lr=0.7, momentum=0.9)
model = character_model(few.device)
strategy = Local(model, few, LocalSteps(model, few, 16, outer=DILOCO))
learn(strategy, text, few, 64)
mine, right = diloco(64, 16)
theirs = parameters_to_vector(model.parameters()).detach()
few.print(f"bitwise the core's: {torch.equal(mine, theirs)}")
assert torch.equal(mine, theirs)

# %% [markdown]
r"""
**Predict.** A link of 50 Mbit/s is a twentieth of one of 1 Gbit/s. With a meeting every 16 steps
the bytes of a step are a sixteenth. So a step should take about as long as DDP's over the fast
link: $c + t_S/16$, with the $t_S$ of the slow one.

A last idea hides messages, too. The weights are dealt into $F$ *fragments*, which meet in turns,
and while one travels the ranks compute their next step (*Streaming DiLoCo*, Douillard and others,
2025). Of a message, $t_S/F - c$ is left to wait for, or nothing. There are $F$ of them in $H$
steps, so a step takes $c + \frac{F}{H} \max(0, t_S/F - c)$.

**Measure.** DDP over 1 Gbit/s, the others over 50 Mbit/s:
"""

# %%
if few.box:
    few.relink("50mbit")
    slower = few.box.seconds_per_byte
F = 4
slow = {
    "H = 16": train(16),
    f"H = 16, {F} fragments": train(16, fragments=F),
    "DiLoCo": train(16, outer=DILOCO),
    f"DiLoCo, {F} fragments": train(16, outer=DILOCO, fragments=F),
}

# %% tags=["plumbing"]
rows = []
for name, (run, sent, tested) in {"DDP": fast, **slow}.items():
    link = ("1 Gbit/s" if run is fast[0] else "50 Mbit/s") if few.box else "this machine"
    wait = sent * (slower / 20 if run is fast[0] else slower) if few.box else math.nan
    if "fragments" in name:
        wait = F / 16 * max(0, 16 * wait / F - computing)
    predicted = 1e3 * (computing + wait) if few.box else None
    there = run.seconds_to(TARGET) if math.isfinite(run.seconds_to(TARGET)) else None
    ms = run.seconds[-1] / STEPS * 1e3
    rows.append((name, link, human_bytes(sent), predicted, ms, tested, there))
headers = ["", "link", "sent a step", "ms, predicted", "ms a step", "test loss"]
formats = ["", "", "", ".1f", ".1f", ".3f", ".2f"]
few.print(table(rows, [*headers, f"s to {TARGET:.2f}"], floats=formats))

# %% tags=["plumbing"]
figures.lines(
    {name: (run.seconds, run.smooth) for name, (run, _, _) in {"DDP, fast": fast, **slow}.items()},
    title=f"{STEPS} steps: DDP over a fast link {fast[0].seconds[-1]:.1f} s, over a slow one "
    f"{min(run.seconds[-1] for run, _, _ in slow.values()):.1f} s with fragments or without",
    xlabel="seconds",
    ylabel="loss, mean of 16 steps",
)

# %% [markdown]
r"""
**Explain.** A step may take longer than predicted: at a meeting all wait for the slowest rank, and
a core that carries a fragment computes less meanwhile. The loss is another matter. This run has
$192 / 16 = 12$ meetings. A momentum of 0.9 adds up about ten of them before it has its full effect,
and until then a rate of 0.7 is less than the whole way. DiLoCo was made for thousands of steps and
hundreds between meetings: there its authors report the quality of synchronous training for 500
times less communication (C4, 8 workers). A run of a few seconds is not that, and says nothing
against it.

The price of hiding is that a fragment arrives a step late, and is combined with what was trained
meanwhile.

## Where it breaks: the wrong sign

An optimizer *subtracts* what it is given. So the pseudo-gradient is where the ranks came from minus
where they went, and not the way they went. It is easily mistaken: a well-known library [shipped
it](https://github.com/meta-pytorch/torchft/pull/233) the other way round. **Predict.** Then each
meeting takes the ranks back, beyond where they began, and the more they had learned the further:
"""

# %%
_, wrong = diloco(64, 16, sign=-1)
firsts = [i + 1 for i in range(0, 64, 16)]
rows = [(i, right[i - 1], wrong[i - 1]) for i in firsts]
few.print(table(rows, ["step, first after a meeting", "right", "wrong"]))
figures.lines(
    {"right": (range(1, 65), right), "wrong sign": (range(1, 65), wrong)},
    title=f"The wrong sign: a loss of {wrong[-1]:.1f} after 64 steps instead of {right[-1]:.1f}",
    xlabel="step",
    ylabel="loss",
)
assert wrong[-1] > right[-1]

# %% [markdown]
"""
Between two meetings the loss falls in both, for the inner optimizer is right. Who looks at a few
steps sees nothing wrong. Compare the loss before and after a *meeting*.

## Where it breaks: what is not a weight

A meeting averages weights. A model with batch normalisation has more: running statistics, of which
each rank has its own. They would differ for ever, and the model would depend on who saves it. The
core refuses, on every rank:
"""

# %%
try:
    LocalSteps(SimpleCNN(ModelConfig(channels=(8,))).to(few.device), few, 16)
except ValueError as error:
    few.print(error)
else:
    raise AssertionError("expected running statistics to be refused")

# %% [markdown]
r"""
AdamW's moments are not averaged, either. That is by design: they tell each rank the size of its own
gradients, and are meant to stay with it. A checkpoint then has to hold those of every rank; `python
-m microddp.train --average-every 16` keeps them.

## What to pick

All ways to live with a slow link beside each other, those of chapter 10 too: from this run, the
steps to a loss, times what a step takes beside its bytes, plus the bytes at each speed. A star
marks the least of each column. What fragments hide is not in it:
"""

# %%
if few.box:
    few.relink("100mbit")
compressed = {}
for name in ("int8", "power:4"):
    strategy = STRATEGIES["ddp"](character_model(few.device), few)
    strategy.compress(name)
    compressed[name] = learn(strategy, text, few, STEPS), strategy.sent_bytes()

# %% tags=["plumbing"]
PICK = {"50 Mbit/s": 5e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
ways = {name: (run, sent) for name, (run, sent, _) in runs.items()} | compressed
ways = {k: way for k, way in ways.items() if math.isfinite(way[0].steps_to(TARGET))}
columns = []
for bits in PICK.values() if few.box else ():
    seconds = [
        run.steps_to(TARGET) * (run.seconds[-1] / STEPS + sent * (8 / bits - per_byte))
        for run, sent in ways.values()
    ]
    columns.append(mark_least([f"{s:.2f} s" for s in seconds], seconds))
rows = list(zip(ways, *columns, strict=True))
headers = [f"to a loss of {TARGET:.2f}", *PICK]
few.print(table(rows, headers) if columns else "links of known speed: none here")

# %% [markdown]
r"""
A few per cent are not told apart by one run. The table is of this model and this machine; its form
is not. Three questions remain for yours. Does it have state that is no weight? How do loss and $H$
go together, at the batch size and learning rate you use? And who has to have equal weights when,
for evaluation or a checkpoint? Between meetings nobody has *the* model.

## What to take along

- With plain SGD, averaging weights after each step is averaging gradients. Everything beyond is a
  bet that weights which parted for a while fit together again.
- A step takes $c + t_S/H$. Beyond $H = t_S/c$ there is little to gain.
- DiLoCo's meeting is a step of an optimizer; its gradient is where the ranks came from minus where
  they went.
- Fragments make messages smaller, and hide them.

## Exercises

1. Let the ranks train 192 steps without a meeting, and average once at the end. How good is the
   mean on text that nobody was trained on? And if they begin with *different* weights? (Make the
   model after `torch.manual_seed(rank)`, and take `local_sgd`, for `LocalSteps` begins with a
   broadcast.)

   <details class="solution"><summary>Solution</summary>

      On the machine this was tried on (two ranks, November 2026) a rank's own weights had a loss of
      2.68. The mean of ranks that began together had 2.80: without any meeting they part too far.
      The mean of those that began apart had 2.94. The same function can be computed by networks
      whose neurons are in another order. Trained from different weights, neuron 7 of one rank may
      do what neuron 31 of another does, and their mean does neither.

   </details>

2. DDP's step takes $c + t_S$, local SGD's $c + t_S/H$. At which $H$ is half of a step's possible
   gain reached, and at which nine tenths?

   <details class="solution"><summary>Solution</summary>

   The most that can be gained is $t_S$ for each step, and $H$ gains $t_S (1 - 1/H)$ of it: half at
   $H = 2$, nine tenths at $H = 10$. In terms of time, what is left of the messages is a tenth of
   the computing at $H = 10\, t_S / c$.

   </details>

3. What is wrong with weights that are averaged *in place* before the pseudo-gradient is taken?

   <details class="solution"><summary>Solution</summary>

   Nothing, if the average is then subtracted from the shared weights: the mean of differences is
   the difference of the mean. But if the shared weights are not a copy, and share their memory with
   the model's, they move with every inner step, and the pseudo-gradient is zero. In `diloco`, leave
   out `.clone()` and see: `vector_to_parameters` makes the parameters views of what it is given.

   </details>
"""

# %%
comms.close()
