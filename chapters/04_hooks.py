# %% [markdown]
r"""
# 04. Hooks

When is each gradient ready? The naive step of chapter 03 does not ask: it communicates when all
of backward is over. But a gradient is final as soon as backward has passed its parameter. PyTorch
can call a function at that moment, a *hook*. This chapter starts an all-reduce in each hook, and
asks how much of the communication then disappears behind backward.
"""

# %% tags=["imports"]
import copy
import itertools
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import microddp
from microddp import figures
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.findings import Prediction, compare, find
from microddp.hooks import AllReduceHooks, demonstrate_hook_order
from microddp.hosts import relink
from microddp.model import FullMLP, SimpleCNN, gradient_bytes
from microddp.performance import measure_compute, measured_work
from microddp.program import Layer, Work
from microddp.replicas import check_replicas
from microddp.report import human_bytes, human_seconds, table
from microddp.stage import (
    cluster,
    known_clusters,
    pausing_batch,
    pausing_loss,
    pausing_model,
    set_stage,
)
from microddp.step import take_step
from microddp.step_times import break_down, in_both
from microddp.strategies import STRATEGIES
from microddp.timing import Timeline, measure

# %%
# sphinx_gallery_builds = "an all-reduce that starts inside backward"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown] index=["hook", "gradient hook"]
"""
## Two kinds of hooks

A *tensor hook* is called with a gradient, before it is added to the parameter's `.grad`. What it
returns, if anything, is used in the gradient's place. A *post-accumulate hook* is called after
that, with the **parameter**. Here are both on one weight of value 5. Its loss is 3 times the
weight, so its gradient is 3, and backward runs twice:
"""

# %%
weight = nn.Parameter(torch.tensor(5.0))
calls = []


def tensor_hook(gradient):
    calls.append(("tensor", gradient.item(), weight.grad and weight.grad.item()))


def post_accumulate_hook(parameter):
    calls.append(("post-accumulate", parameter.item(), parameter.grad.item()))


# %%
weight.register_hook(tensor_hook)
weight.register_post_accumulate_grad_hook(post_accumulate_hook)
for _ in range(2):
    (3 * weight).backward()
rows = [(kind, given, str(grad)) for kind, given, grad in calls]
comms.print(table(rows, ["hook", "is given", ".grad at that time"], floats=".1f"))
assert calls == [
    *[("tensor", 3.0, None), ("post-accumulate", 5.0, 3.0)],
    *[("tensor", 3.0, 3.0), ("post-accumulate", 5.0, 6.0)],
]

# %% [markdown]
"""
The tensor hook sees each new gradient by itself; the post-accumulate hook finds what an optimizer
would find. Averaging uses the second: a tensor hook has to return the average at once, so it would
wait, and hide nothing (exercise 1).

## The order

**Predict.** Backward goes through the model from its end to its beginning. So the gradients of
the last layer are ready first, and those of the first layer last.
{func}`~microddp.hooks.demonstrate_hook_order` runs one backward with a post-accumulate hook on
every parameter, prints when each was called, and checks that the ranks saw the same order. The
model, a stack of eight linear layers, computes for real, so two ranks run it, and the others wait:
"""

# %%
torch.manual_seed(0)
half = FullMLP(512, depth=8, inputs=64, outputs=10).to(comms.device)
if few := comms.subgroup(range(min(2, n))):
    rows = demonstrate_hook_order(half, few)
comms.barrier()

# %%
if few:
    layers = [int(row.name.split(".")[1]) for row in rows]
    assert layers == sorted(layers, reverse=True)

# %% tags=["plumbing"]
if few:
    early = sum(row.nbytes for row in rows if row.seconds < rows[-1].seconds / 2)
    share = few.all_gather_data(early / gradient_bytes(half))[0]  # rank 0's, on all
    said = f"After half the time of backward {share:.1%} of the bytes are ready."
    find(few, "ready-early", early=(share > 0, said), late=(share == 0, said))
    ready = few.all_gather_data([row.seconds for row in rows if row.name.endswith("weight")])[0]
    gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(ready[1:-1]))
    said = f"Between the hidden layers' weights pass {gaps[0]:.2f} to {gaps[-1]:.2f} ms"
    odd = "not the same, and this page does not show why"
    even = gaps[-1] <= 1.2 * gaps[0]
    find(few, "even", even=(even, f"{said} each."), uneven=(not even, f"{said}: {odd}."))
    figures.gradient_order(
        rows,
        forward=[name for name, _ in half.named_parameters()],
        title="The gradients of the last layers are ready first",
    )

# %% [markdown]
"""
A larger dot is a larger gradient. The six hidden layers of equal size have the same work: were all
done equally fast, their dots would lie on a straight line.

A parameter that is used twice, as an embedding that is the output layer, too, is ready when both
uses are done. One that is frozen takes no hook, and one that the loss does not need is never ready,
so its row has no time.
"""

# %% [markdown] index=["overlap"]
"""
## An all-reduce inside backward

**Build.** An *asynchronous* collective returns at once, with a `Work` to wait for, while the
backend's own threads or streams carry the data. So a hook can start one and let backward go on:
"""


# %%
class Hooks:
    def __init__(self, model, comms):
        self.comms, self.works = comms, []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        parameter.grad.div_(self.comms.world_size)
        work = dist.all_reduce(parameter.grad, group=self.comms.group, async_op=True)
        self.works.append(work)

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()


# %% [markdown]
"""
Nothing in a message says which gradient it carries: the ranks' first all-reduces belong together,
then their second ones. That is right as long as every rank's gradients come in the same order.

**Measure.** Do these and microddp's {class}`~microddp.hooks.AllReduceHooks` train as one device
does on the whole batch, and exactly alike? Six steps on the digits, in `float64`:
"""

# %%
digits = load_digits(comms.device)
BATCH = 96 - 96 % n  # so that the ranks share it evenly


def train(make_hooks, rank, n, check=lambda *_: None):
    torch.manual_seed(0)
    model = FullMLP(64, depth=4, outputs=10).to(comms.device, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hooks = make_hooks(model)
    for x, y in itertools.islice(ShardedBatches(digits.train, BATCH, rank, n).epoch(0), 6):
        optimizer.zero_grad()
        loss = cross_entropy(model(x.double()), y)
        loss.backward()
        if hooks:
            hooks.finish()
        check(model, loss.detach())
        optimizer.step()
    return model


# %%
def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
ours = train(lambda model: Hooks(model, comms), rank, n)
core = train(lambda model: AllReduceHooks(model, comms), rank, n)
alone = train(lambda _: None, 0, 1)
apart = ((flat(ours) - flat(alone)).norm() / flat(alone).norm()).item()
comms.print(f"bitwise equal to microddp's: {torch.equal(flat(ours), flat(core))}")
comms.print(f"{apart:.1e} from one device on the whole batch")
check_replicas(ours, comms)
assert torch.equal(flat(ours), flat(core))
assert apart < 1e-9

# %% [markdown]
"""
## What it looks like

**Predict.** Every all-reduce starts before backward has ended. What is then left to wait for is
called *exposed* communication, as against that which is *hidden* behind
computation. In the naive step all of it is exposed.

The stage is that of chapter 03: devices of known speed, to the scale of machines with an A100 each
and 25 Gbit/s between them; the start of a message is measured anew, and varies from run to run. The
timeline has up to four lanes: what the rank computes, a tick for every gradient that is ready, each
all-reduce from start to end, and waiting. Of three steps of each kind, the one of median length is
drawn, on rank 0. (The next section times others.)
"""

# %%
WORKLOAD = {"parameters": 355e6, "tokens": 24_576, "layers": 24}
there = cluster("a100", "25gbit", nodes=n, node=1, **WORKLOAD)
stage = set_stage(comms, there, layer_bytes=3 << 17)
comms.print(stage)


# %%
def length(spans):
    return max(span.end for span in spans) - min(span.start for span in spans)


def median_step(kind):
    strategy, recorded = stage.strategy(kind), []
    step = stage.step(strategy)
    for _ in range(3):
        strategy.record(timeline := Timeline(comms))
        step()
        recorded.append(timeline.gather())
    return sorted(recorded, key=length)[len(recorded) // 2]


steps = {"naive": median_step("naive"), "hooks": median_step("hooks")}


# %%
def during_compute(spans):
    compute, sent = ([s for s in spans if s.lane == x] for x in ("compute", "communication"))
    return in_both(compute, sent)


rank_0 = {name: [s for s in spans if s.rank == 0] for name, spans in steps.items()}
figures.timelines(rank_0, title="With hooks, communication begins during backward")
for r in range(n):
    mine = [s for s in steps["hooks"] if s.rank == r]
    backward = next(s for s in mine if s.name == "backward")
    started = [s.start for s in mine if s.lane == "communication"]
    assert len(started) == len(list(stage.model.parameters()))
    assert all(backward.start <= start <= backward.end for start in started)
    assert during_compute([s for s in steps["naive"] if s.rank == r]) < 1e-6

# %% tags=["plumbing"]
rows = [
    (name, during_compute(spans) * 1e3, break_down(spans).exposed * 1e3)
    for name, spans in rank_0.items()
]
headers = ["rank 0", "under way during compute (ms)", "exposed (ms)"]
comms.print(table(rows, headers))
(_, _, naively), (_, under_way, left) = rows
backward = 1e3 * sum(s.end - s.start for s in rank_0["hooks"] if s.name == "backward")
said = (
    f"In the drawn steps rank 0 waits {naively:.0f} ms naively, and {left:.0f} ms with hooks, "
    f"{left / (naively or 1):.0%} of that. With hooks a message is under way or queued in "
    f"{under_way:.0f} ms of its computing; its backward took {backward:.0f} ms"
)
said += f", of which {1e3 * stage.sides[1].compute * 2 / 3:.0f} are pauses." if stage.sides else "."
find(comms, "hidden", several=(n > 1, said), alone=(n == 1, "One rank has nothing to hide."))

# %% [markdown]
"""
An all-reduce that is under way is not always at work. It may queue behind earlier ones, or wait
until the slowest rank has started it.

The same spans can be opened in [Perfetto](https://ui.perfetto.dev), where each one can be clicked:
with `MICRODDP_TRACES=FOLDER` in the environment the file is kept.
"""

# %% tags=["plumbing"]
with tempfile.TemporaryDirectory() as scratch:
    path = Path(os.environ.get("MICRODDP_TRACES", scratch), "04_hooks.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    figures.save_chrome_trace(steps["hooks"], path)
    comms.print(f"{path.name}: {len(steps['hooks'])} spans, {human_bytes(path.stat().st_size)}")

# %% [markdown]
r"""
## What it saves

**Predict.** The naive step takes $C + M$, and the starts of its messages. If messages need nothing
that computing needs, one with hooks takes $\max(C, M)$ at least, because the longer hides the
shorter. Nothing hides behind forward, in which there is no gradient yet. Forward takes a third of
$C$, so no step can take less than the *limit*, $\max(C, \frac{1}{3} C + M)$. It is a bound. For a
guess of the step itself, put the measured time of a device alone in place of $C$, and in place of
$M$ that of all messages: one after another for the naive step, all started at once for hooks, since
a hook does not wait for its message.

**Measure.** Both steps in turns, a device alone, and the messages alone, one after another and all
at once:
"""

# %%
kinds = {"one by one, after backward": "naive", "one by one, by hooks": "hooks"}
calls = {name: stage.step(kind) for name, kind in kinds.items()}
calls |= {"alone": stage.step("none"), "in turn": stage.all_reduces()}
gradients = [torch.zeros_like(parameter) for parameter in stage.model.parameters()]


def all_at_once():
    for work in [comms.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()


# %%
times = measure({**calls, "at once": all_at_once}, comms, warmup=1, repeat=5)
speeds = {name: stage.speed_up(times[name], times["alone"]) for name in kinds}
naive, hooks = (times[name] for name in kinds)

# %% tags=["plumbing"]
gain, best = compare(hooks, naive), speeds["one by one, by hooks"]
said = gain.say("A step with hooks", "the naive one")
if gain.alike:
    said += ": it does not show that hooks gain anything"
elif gain.slower:
    said += ": hooks lose"
said += f". {n} devices with hooks are {best} as one."
find(comms, "hooks", **gain.sides(said if n > 1 else "One rank has nothing to average."))
figures.speed_ups(
    {name: speed.times for name, speed in speeds.items()},
    n,
    title=f"{n} devices with hooks: {best}",
)

# %% tags=["plumbing"]
if stage.sides and n > 1:
    here = stage.sides[1]
    least = max(here.compute, here.compute / 3 + here.messages)
    device, turns, once = (times[name].median for name in ("alone", "in turn", "at once"))
    naively = Prediction(device + turns, naive)
    guess = Prediction(max(device, device / 3 + once), hooks)
    at_once = compare(times["at once"], times["in turn"])
    said = at_once.say("Sending all messages at once", "sending them one after another")
    said = f"{said}: {human_seconds(once)} and {human_seconds(turns)}."
    find(comms, "at-once", **at_once.sides(said))
    said = (
        f"C, M and the table's starts make "
        f"{human_seconds(here.compute + here.messages + here.layers * here.start)}, a device alone "
        f"and the messages one after another {human_seconds(device + turns)}: the naive step took "
        f"{naively}. The limit of one with hooks is {human_seconds(least)}, "
        f"the guess {human_seconds(guess.predicted)}. It took {guess}. By the two guesses hooks "
        f"would be {naively.predicted / guess.predicted:.2f} times as fast; they were "
        f"{gain.ratio:.2f} times."
    )
    find(comms, "hooks-guess", **guess.sides(said))

# %% [markdown]
r"""
**Explain.** Backward is two thirds of $C$, and more than that it cannot hide. Nothing is sent
until the first gradient is there, and the last one is ready when backward ends. Every gradient
still travels on its own, and pays for its start. (Where either step takes longer than was guessed,
this page does not show why.) Sending fewer and larger messages is the next chapter.

:::{admonition} On GPUs
Where starts are short, the limit follows from $n$ and $M/C$. Here are both steps for the same model
on clusters that people have, worked out from the figures of `microddp/plan/library.toml`. Two
things keep a GPU from that limit: NCCL's kernels take some of its processors while they send, and
the CPU, which starts them, must stay ahead of the GPU.
:::
"""

# %% tags=["plumbing"]
rows = [
    (side.words, side.devices, side.ratio, side.unhidden, side.overlapped)
    for side in known_clusters(**WORKLOAD)
]
headers = [
    "worked out, not measured",
    "devices",
    "M/C",
    "naive, times as fast as one",
    "by the limit, at most",
]
comms.print(table(rows, headers))

# %% [markdown]
"""
## Where it breaks: the hook is given the parameter

An argument's name does not change what it is. This hook calls it `grad`, and averages it:
"""


# %%
class AveragesWhatItIsGiven(Hooks):
    def ready(self, grad):
        grad.div_(self.comms.world_size)
        self.works.append(dist.all_reduce(grad, group=self.comms.group, async_op=True))


# %%
def train_and_watch(make_hooks):
    """The mean loss in every step, and how far the ranks' last gradients were from equal."""
    losses = []

    def check(model, loss):
        comms.all_reduce_mean(loss)
        grads = comms.all_gather(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses.append((loss.item(), ((grads - grads[0]).norm() / grads[0].norm()).item()))

    return train(lambda model: make_hooks(model, comms), rank, n, check), losses


# %% [markdown]
"""
There is no error. But what it averages is the weights, in the middle of backward, and the gradients
stay each rank's own. (The table has the distance of all ranks' gradients from rank 0's,
divided by the norm of rank 0's.)
"""

# %%
wrong, wrong_losses = train_and_watch(AveragesWhatItIsGiven)
right, right_losses = train_and_watch(Hooks)
assert n == 1 or min(differ for _, differ in wrong_losses) > 1e-3
assert max(differ for _, differ in right_losses) == 0

# %% tags=["plumbing"]
rows = [
    (step + 1, *wrong_losses[step], *right_losses[step]) for step in (0, 1, len(right_losses) - 1)
]
headers = ["step", "loss, wrong", "gradients differ by", "loss, right", "gradients differ by"]
comms.print(table(rows, headers, floats=".4f"))

# %%
try:
    check_replicas(wrong, comms)
except RuntimeError as error:
    comms.print(error)
else:
    assert n == 1

# %% [markdown]
"""
Every step pulls the weights together and then lets each rank take a step of its own. A step of SGD
is linear in the gradient, so the mean of the ranks' weights moves by the mean of their steps, and
the loss looks right. With Adam or gradient clipping even the mean goes astray.
{func}`~microddp.replicas.check_replicas` finds the mistake.

## Where it breaks: reading gradients before finish()

When `backward()` returns, the all-reduces may still be under way, in the very tensors that
`.grad` holds. Clip or log gradients now, and the numbers depend on who was faster. Here, after a
step to warm up, the last rank is late, so that all others read before the sums can be complete:
"""


# %%
def gradient_norm(model):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return norm.to(comms.device).reshape(1)


# %%
torch.manual_seed(0)
model = SimpleCNN().to(comms.device)
hooks = AllReduceHooks(model, comms)
mine = [tensor[: 8 * n].chunk(n)[rank] for tensor in digits.train.tensors]
for late in (0.0, 0.5):
    model.zero_grad()
    loss = cross_entropy(model(mine[0]), mine[1])
    time.sleep(late if rank == n - 1 else 0)
    loss.backward()
    early = gradient_norm(model)
    hooks.finish()
    final = gradient_norm(model)

# %%
early_norms, final_norms = (comms.all_gather(norm).flatten() for norm in (early, final))
rows = zip(range(n), early_norms.tolist(), final_norms.tolist(), strict=True)
headers = ["rank", "norm after backward", "norm after finish()"]
comms.print(table(rows, headers, floats=".4f"))
assert (final_norms == final_norms[0]).all()
assert n == 1 or early_norms[0] != final_norms[0]

# %% [markdown]
"""
A rank that reads too early finds a gradient that is divided by n already and not yet added up, or
only in parts. The rule: between `backward()` and `finish()` nobody touches a gradient.

## Where it breaks: no finish() at all

Then the optimizer takes a step with whatever is there, and where gradients stay, the next backward
adds to tensors that are still being sent. microddp's hooks notice the second backward, and say so:
"""

# %%
try:
    for _ in range(2):
        cross_entropy(model(mine[0]), mine[1]).backward()
except RuntimeError as error:
    comms.print(error)
else:
    raise AssertionError("a forgotten finish() must be an error")
hooks.finish()

# %% [markdown]
r"""
The step that the optimizer took before they cannot notice. Chapter 06 builds a wrapper that calls
`finish` by itself.

## Where the cores carry the messages

**Predict.** A device of known speed leaves the cores to the messages. A processor that computes
does not: it copies a message from process to process itself, and cannot compute meanwhile. Then
what is under way during backward makes backward longer, and hooks gain less.

**Measure.** Two ranks, on links of 30 Gbit/s, so that little of a message's time is the link's, and
a model that computes for real;
then the same gradients and messages with layers that only pause, each for its share of the time
that a step of the cores took alone. (Such a step takes something beyond its pauses, too. Ranks
without a core of their own leave here.)
"""

# %%
usual = comms.box and comms.box.links[0].option
if usual:
    relink(comms, "30gbit")  # before the group is made: a connection keeps the pace it began with
timed = comms.timed()
torch.manual_seed(0)
wide = FullMLP(512, inputs=64, outputs=10).to(timed.device)
batch = tuple(tensor[:128] for tensor in digits.train.tensors)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


# %%
def measured(model, data, loss_fn):
    steps = {}
    for kind in ("none", "naive", "hooks"):
        strategy = STRATEGIES[kind](copy.deepcopy(model), timed)
        steps[kind] = partial(take_step, strategy, loss_fn, sgd(strategy), data)
    return measure(steps, timed, warmup=1, repeat=5)


# %%
carried = {"cores": measured(wide, batch, cross_entropy)}
compute = measure_compute(wide, cross_entropy, batch, sgd, timed, repeat=3)
counts = {name: parameter.numel() for name, parameter in wide.named_parameters()}
work = measured_work(compute, counts)
scale = carried["cores"]["none"].median / work.seconds
layers = [Layer(scale * x.forward, scale * x.backward, x.tensors) for x in work.layers]
pausing = pausing_model(Work(tuple(layers)), timed.device)
carried["devices"] = measured(pausing, pausing_batch(timed.device), pausing_loss)

# %% tags=["plumbing"]
gains = {who: compare(times["hooks"], times["naive"]) for who, times in carried.items()}
rows = [(who, *map(str, times.values()), str(gains[who])) for who, times in carried.items()]
headers = ["computing is done by", "alone", "naive", "hooks", "hooks against naive (ratios)"]
timed.print(table(rows, headers))
(low, high), (from_, to) = (gains[who].times.spread for who in ("cores", "devices"))
several = timed.world_size > 1
longer = carried["devices"]["none"].median / carried["cores"]["none"].median
beyond = [f"{1e3 * (t['naive'].median - t['none'].median):.0f} ms" for t in carried.values()]

# %% tags=["plumbing"]
said = (
    f"Where cores compute and carry, hooks are {gains['cores'].than('naive')}; where they only "
    f"carry, hooks are {gains['devices'].than('naive')}. (Alone, a step of pauses takes "
    f"{longer:.2f} times as long as one of the cores. A naive step takes {beyond[0]} more than one "
    f"alone where cores compute, and {beyond[1]} more where devices do.) The gain is"
)
unseen = "Whether that is because backward is longer, this page does not show."
find(
    timed,
    "who-carries",
    less=(several and high < from_, f"{said} less where cores compute, as predicted. {unseen}"),
    more=(several and low > to, f"{said} more where cores compute. The prediction failed."),
    unclear=(several and high >= from_ and low <= to, f"{said} not told apart: no test."),
    alone=(not several, "One rank has nothing to carry."),
)

# %% [markdown]
r"""
**Explain.** Overlap removes no work. It helps as far as messages leave backward the cores, or the
part of a GPU, that it needs. A
network card that reads and writes memory by itself (RDMA) takes messages off the host. On a GPU the
sums of NCCL take some of its processors, and slow backward down. A processor that copies the
messages itself can hide them only in the time in which it would be idle.

## What to take along

- Gradients are ready one after the other, first those of the layers that forward uses last, and in
  the same order on ranks that run the same model.
- A post-accumulate hook is given the parameter. What it should average is `parameter.grad`.
- An asynchronous all-reduce in the hook moves communication into backward.
- Between `backward()` and `finish()` the gradients belong to the backend.

## Exercises

**The lab.** Write the hooks, so that no hook waits. {doc}`It is checked </labs>` on 1, 2, 3 and 4
ranks.

```console
$ python -m microddp.labs start 04
```

1. Use tensor hooks instead: average each gradient before it is accumulated, and return the
   average. Call `backward` twice before a step. Is the result right? How many all-reduces does it
   take, and can they overlap with backward?

   <details class="solution"><summary>Solution</summary>

   It is right up to rounding, because the sum of two averages is the average of the sums. It takes
   two all-reduces for each parameter. And tensor hooks hide nothing: autograd adds what the hook
   returns to `.grad` at once, so the hook must wait until it is complete.

   ```python
   def ready(self, gradient):
       mean = gradient / self.comms.world_size
       dist.all_reduce(mean, group=self.comms.group)  # gloo returns when the average is there
       return mean
   ```

   With `async_op=True` and one late rank, the gradients come out wrong, without an error.

   </details>

2. An all-reduce can hide behind backward, but not behind forward. Let forward take a third of
   $C$. Let there be many layers, all alike, and messages that need nothing that computation needs.
   For which $M$ do hooks gain most over the naive step, and how much?

   <details class="solution"><summary>Solution</summary>

   A step with hooks takes $\max(C, \frac{1}{3} C + M)$, and the naive one $C + M$. As long as
   $\frac{1}{3} C + M < C$, more communication is hidden at no cost, and the ratio grows. Beyond
   that, both steps grow alike, and the ratio falls. The best is $M = \frac{2}{3} C$, which is as
   long as backward: hooks are then $\frac{5}{3}$ times as fast.

   </details>

3. Build a model of two layers of equal shape. On rank 1, let forward use them in the other order.
   What does `AllReduceHooks` make of the gradients? Which of these finds it: `check_replicas`,
   `demonstrate_hook_order`, `MICRODDP_DEBUG=1` in the environment?

   <details class="solution"><summary>Solution</summary>

   The shapes fit, so there is no error. Each rank first sends the gradient of the layer that it
   used last: layer `b` on rank 0, layer `a` on rank 1. These two are added up, and then the other
   two. So on each rank `a.weight.grad` becomes the mean of its own gradient for `a` and the other
   rank's gradient for `b`.

   All three find it. `check_replicas` does so after the first step, `demonstrate_hook_order` before
   training, with both orders. With `MICRODDP_DEBUG=1`, backward itself raises on every rank, of
   layers without bias:
   `rank 1 calls all-reduce of the gradient of a.weight; expected all-reduce of the gradient of
   b.weight`.

   </details>
"""

# %%
if usual:
    relink(timed, usual)
comms.close()
