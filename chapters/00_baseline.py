# %% [markdown]
r"""
# 00. One device, measured

How fast is one device, and why is that not enough? This chapter trains a small network on one
device, splits the time and the memory of a step into parts, and works out how long a large data set
would take.
"""

# %% tags=["imports"]
# sphinx_gallery_builds = "a training loop that is timed part by part"
# sphinx_gallery_ranks = 1
import copy
from functools import partial

import torch
from torch.nn.functional import cross_entropy, mse_loss

import microddp
from microddp import figures
from microddp.data import ShardedBatches
from microddp.datasets import SyntheticDataset, load_digits
from microddp.findings import Prediction, compare, find
from microddp.model import FullMLP, gradient_bytes, parameter_count
from microddp.report import human_bytes, human_seconds, table
from microddp.timing import Timeline, Timing, measure

# %%
comms = microddp.init()
comms.print(comms.describe())

# %% [markdown]
"""
`comms` stands for the processes that train together, the *ranks*. Until chapter 02 there is only
one, number 0. The line that it prints, below the title on the website, names the machine and the
*backend*, the library that carries messages between ranks. With one rank the backend has
nothing to send. The rank's device is the GPU or, without one, all cores that the process may use.

## A network that learns

The model is a stack of 16 linear layers with ReLU between them. It is deep and plain on purpose:
each layer has its own gradient, ready at its own time, and later chapters send those gradients
between devices. The data are scanned handwritten digits, 8 by 8 pixels:
"""

# %%
digits = load_digits(comms.device)
torch.manual_seed(0)
model = FullMLP(128, depth=16, inputs=64, outputs=10).to(comms.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
comms.print(f"{len(digits.train)} images to learn from, {len(digits.test)} to test on")
comms.print(f"{parameter_count(model):,} parameters in {len(model.layers)} layers")

# %% [markdown]
"""
One training step has three parts. The *forward* pass computes the loss and keeps what the
backward pass will need. The *backward* pass computes a gradient for every parameter. The
*optimizer* changes each parameter a little, against its gradient:
"""


# %%
def step(model, loss_fn, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def accuracy(model, dataset):
    images, labels = dataset.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


# %% [markdown]
"""
`ShardedBatches` divides every batch among the ranks. Their number is the *world size*, here 1, so
rank 0 gets all of it. The very first step that this process takes is timed, on a copy of the model;
the last section needs it:
"""

# %%
batches = ShardedBatches(digits.train, batch_size=48, rank=0, world_size=1)
copied = copy.deepcopy(model)
copied_sgd = torch.optim.SGD(copied.parameters(), lr=0.01, momentum=0.9)
one_step = {"step": partial(step, copied, cross_entropy, copied_sgd, *next(batches.epoch(0)))}
first = measure(one_step, comms, warmup=0, repeat=1)["step"]

# %% [markdown]
"""
An *epoch* is one pass over the data. Here are twenty, each in a new order; images that do not fill
a batch are left out:
"""

# %%
progress = []
for epoch in range(20):
    losses = [step(model, cross_entropy, optimizer, x, y) for x, y in batches.epoch(epoch)]
    progress.append((torch.stack(losses).mean().item(), accuracy(model, digits.test)))


# %%
rows = [(epoch + 1, *progress[epoch]) for epoch in (0, 4, 9, 19)]
comms.print(table(rows, ["epoch", "training loss", "test accuracy"], floats=".3f"))
assert progress[-1][1] > 0.93, "the network should read more than 93 % of the test images"

# %% [markdown]
r"""
The network reads digits it has never seen. Where does the time of its training go?

## Where the time goes

**Predict.** A linear layer with $P$ weights does one multiplication and one addition for each
weight and sample, so $2P$ operations a sample in the forward pass. The backward pass does that
twice: once for the gradient of the weights, once for the gradient of the layer's input, which the
first of the 16 layers does not need. So it should take $31/16 = 1.94$ times as long as the forward
pass. The optimizer reads and writes each weight once, whatever
the batch, so its share of the step should shrink as the batch grows.

To time the arithmetic and not the data, the rest of this chapter uses a wider network and
synthetic samples that are made on the device:
"""

# %%
wide = FullMLP(256, depth=16).to(comms.device)
sgd = torch.optim.SGD(wide.parameters(), lr=1e-4, momentum=0.9)
samples = SyntheticDataset(1024, 256, 256, device=comms.device)
comms.print(
    f"{parameter_count(wide):,} parameters, {human_bytes(gradient_bytes(wide))} of gradients"
)

# %% [markdown]
"""
**Build.** A {class}`~microddp.timing.timeline.Timeline` records when each part began and ended. The
parts run 15 times; the first five warm the caches up and are not counted:
"""


# %%
PHASES = ("forward", "backward", "optimizer")


def phases(batch):
    x, y = (tensor[:batch] for tensor in samples.tensors)
    timeline = Timeline(comms)
    for _ in range(15):
        sgd.zero_grad()
        with timeline.span("forward"):
            loss = mse_loss(wide(x), y)
        with timeline.span("backward"):
            loss.backward()
        with timeline.span("optimizer"):
            sgd.step()
    spans = [span for span in timeline.gather() if span.rank == 0]
    times = {name: [s.end - s.start for s in spans if s.name == name] for name in PHASES}
    return {name: torch.tensor(seconds[5:]).median().item() for name, seconds in times.items()}


# %%
split = {f"batch {batch}": phases(batch) for batch in (16, 128, 1024)}
assert split["batch 1024"]["backward"] > split["batch 1024"]["forward"]

# %% [markdown]
"""
**Measure.** The medians, and the same as a picture:
"""

# %% tags=["plumbing"]
rows = [
    (name, *map(human_seconds, parts.values()), parts["backward"] / parts["forward"])
    for name, parts in split.items()
]
comms.print(table(rows, ["", *PHASES, "backward / forward"], floats=".2f"))
shares = [parts["optimizer"] / sum(parts.values()) for parts in split.values()]
figures.stacked_bars(split, title="A step's phases, by batch", xlabel="time of one step")

# %% tags=["plumbing"]
ratios = {name: parts["backward"] / parts["forward"] for name, parts in split.items()}
small, middle, large = ratios.values()
off_small, off_middle, off = (ratio / (31 / 16) - 1 for ratio in ratios.values())
said = (
    f"Backward takes {small:.2f} times as long as forward at batch 16, {middle:.2f} at 128 and "
    f"{large:.2f} at 1024, for the predicted 1.94 at each. At 1024 that is"
)
others = f"At 16 and 128 it is {off_small:+.0%} and {off_middle:+.0%}."
why = "This page does not show why: the prediction counts matrix products only."
find(
    comms,
    "backward",
    as_predicted=(abs(off) <= 0.05, f"{said} right within 5%. {others}"),
    more=(off > 0.05, f"{said} {off:.0%} more. {others} {why}"),
    less=(off < -0.05, f"{said} {-off:.0%} less. {others} {why}"),
)

# %% tags=["plumbing"]
falls = shares[-1] < shares[0]
said = (
    f"The optimizer's share {'falls' if falls else 'does not fall: it goes'} from {shares[0]:.0%} "
    f"of a step at batch 16 to {shares[-1]:.0%} at batch 1024. It takes "
    f"{', '.join(human_seconds(parts['optimizer']) for parts in split.values())}, for equal work"
)
work = [parts["optimizer"] for parts in split.values()]
said += "; why these differ, this page does not show." if max(work) > 1.1 * min(work) else "."
find(comms, "optimizer", falls=(falls, said), stays=(not falls, said))

# %% [markdown] index=["throughput"]
"""
**Explain.** Where a small batch takes more time a sample than a large one, not all of a step grows
in proportion to the batch. A layer's call takes time of its own, and its weights have to be read,
for one sample as for many. How much of a step each of these is, and whether something else plays a
part, this page does not show. (Nor does it show why backward and forward have another ratio at each
batch.) The optimizer does the same work at every batch.

## Throughput

*Throughput* is the number of samples that are trained on in a second.

**Predict.** Suppose a step costs a fixed start-up time plus a time for each sample. Then the times
of a step lie on a line over the batch. Throughput rises almost as fast as the batch while start-up
is nearly all of a step, and the less, the more of a step is for samples.

**Measure.** The batch sizes take turns, so that a disturbance of the machine meets all of them.
Beside the median stand the *quartiles*, between which half of all steps lie:
"""

# %%
SIZES = (1, 4, 16, 64, 256, 1024)
steps = {}
for batch in SIZES:
    x, y = (tensor[:batch] for tensor in samples.tensors)
    steps[str(batch)] = lambda x=x, y=y: step(wide, mse_loss, sgd, x, y)

timings = measure(steps, comms)
rates = [int(batch) / timing.median for batch, timing in timings.items()]
assert rates[-1] > 3 * rates[0], "a batch should use the device better than single samples"

# %% tags=["plumbing"]
rows = [
    (batch, str(timing), rate) for (batch, timing), rate in zip(timings.items(), rates, strict=True)
]
headers = ["batch", "step: median (quartiles)", "samples/s"]
comms.print(table(rows, headers, floats=",.0f"))
figures.lines(
    {"measured": (SIZES, rates)},
    title="Larger batches use the device better",
    xlabel="batch size",
    ylabel="samples per second",
    log="xy",
)


# %% tags=["plumbing"]
def of_a_sample(batch, less=0):
    """Seconds by which each further sample lengthens a step, repetition by repetition."""
    before = timings[str(less)].seconds if less else [0.0] * len(timings[str(batch)].seconds)
    pairs = zip(timings[str(batch)].seconds, before, strict=True)
    return Timing(tuple((more - fewer) / (batch - less) for more, fewer in pairs))


low, middle, high = SIZES[-3:]
four = compare(timings["1"], timings["4"]).say("A step of one sample", "one of four")
gain = compare(of_a_sample(high), of_a_sample(middle))
said = gain.say(f"A batch of {high}, sample for sample,", f"one of {middle}")
said = f"{four}. {said}"
find(
    comms,
    "throughput",
    rises=(gain.faster, f"{said}."),
    flat=(gain.alike, f"{said}: four times the batch gains nothing that can be told here."),
    falls=(gain.slower, f"{said}: the larger batch is the slower one."),
)

# %% tags=["plumbing"]
costs = [of_a_sample(middle, low), of_a_sample(high, middle)]
rising = all(cost.spread[0] > 0 for cost in costs)
straight = rising and compare(costs[1], costs[0]).alike
low_cost, high_cost = (human_seconds(cost.median) for cost in costs)
said = f"From {low} to {middle} a further sample costs {low_cost}, from {middle} to {high}"
said = f"{said} {high_cost} (medians over repetitions)"
why = "the times do not lie on a line, and this page does not show why."
single, start = timings["1"].median, timings[str(low)].median - low * costs[0].median
below = f"By {low} and {middle} a step of one sample would take"
below = f"{below} {human_seconds(start + costs[0].median)}; it took {human_seconds(single)}."
find(
    comms,
    "line",
    line=(straight, f"{said}: not told apart, as if these three lay on a line. {below}"),
    bent=(rising and not straight, f"{said}: {why} {below}"),
    flat=(not rising, f"{said}: a step is not told to take longer with more samples."),
)

# %% tags=["plumbing"]
beside = Prediction(sum(split["batch 1024"].values()), timings["1024"])
said = f"The three phases of a step of 1024 added up to {human_seconds(beside.predicted)} above"
said = f"{said}, where that batch ran by itself; here, in turns with the others, a step took"
said = f"{said} {str(beside).replace('predicted ', '')}."
said += "" if beside.held else " Why, this page does not show."
find(comms, "phases-and-step", **beside.sides(said))

# %% [markdown] index=["memory"]
r"""
**Explain.** The simplest model adds up start-up and arithmetic: a step of $b$ samples takes
$t_0 + c\,b$. On that line each further sample costs the same. The larger the batch, the smaller the
share of $t_0$, and throughput comes nearer to $1/c$.

## Memory

**Predict.** With $P$ parameters of 4 bytes, training holds $4P$ bytes of weights, $4P$ of
gradients and $4P$ of *momentum*, the sum of past gradients, older ones fading, that SGD steps
along. None of them depends on the batch. The *activations*, what layers compute on the way, do:
every layer keeps its input until the backward pass has used it, and the loss keeps the output and
the target. That makes 16 + 2 rows of 256 numbers a sample. ReLU adds nothing, because what it
needs, its output, is the next layer's input.

**Build.** Autograd calls a function of ours, a *hook*, with every tensor that it saves. Weights
are among them, but they are counted already:
"""


# %%
def saved_bytes(batch):
    x, y = (tensor[:batch].clone() for tensor in samples.tensors)
    weights = {p.untyped_storage().data_ptr() for p in wide.parameters()}
    saved = {}

    def remember(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        mse_loss(wide(x), y).backward()
    return sum(saved.values())


# %% [markdown]
"""
**Measure.** The bytes of weights, gradients, momentum and activations, for three batches:
"""

# %%
weights = sum(p.nbytes for p in wide.parameters())
gradients = sum(p.grad.nbytes for p in wide.parameters())
momentum = sum(state["momentum_buffer"].nbytes for state in sgd.state.values())
parts, rows = {}, []
for batch in (16, 128, 1024):
    kept = saved_bytes(batch)
    predicted = batch * 256 * 4 * (16 + 2)  # the inputs of 16 layers, the output, the target
    kinds = {"weights": weights, "gradients": gradients, "momentum": momentum, "activations": kept}
    parts[f"batch {batch}"] = kinds
    rows.append((batch, *map(human_bytes, (predicted, kept, sum(kinds.values())))))
    assert abs(kept - predicted) < 0.1 * predicted
assert weights == gradients == momentum == gradient_bytes(wide)

# %% tags=["plumbing"]
headers = ["batch", "activations predicted", "counted", "with weights, gradients, momentum"]
comms.print(table(rows, headers))
figures.stacked_bars(
    parts,
    title="Only the activations grow with the batch",
    xlabel="memory",
    formatter=human_bytes,
)

# %% [markdown]
"""
**Explain.** The model's share is fixed and is needed again on every device that holds a copy of
the model. The activations are divided when the batch is. That is the first argument for *data
parallelism*, in which each device has a copy of the model and a part of the batch.

## A million samples

**Predict.** At the highest throughput in the table of batch sizes, one, ten and a hundred epochs of
a million samples take this long:
"""

# %%
best = max(rates)
rows = [
    (devices, *(human_seconds(1e6 * epochs / best / devices) for epochs in (1, 10, 100)))
    for devices in (1, 2, 4, 8)
]
headers = ["devices", "1 epoch", "10 epochs", "100 epochs"]
comms.print(
    f"1M samples at {best:,.0f} samples/s on one device, as measured in turns; on more, if they "
    "split it perfectly"
)
comms.print(table(rows, headers))

# %% [markdown]
"""
The other rows are a hope: they assume that n devices are n times as fast. The rest of this book
finds out when that holds. And the network is small. The operations of a step grow in proportion to
the parameters. If its time does, too:
"""

# %%
large = human_seconds(1000 * 1e6 * 100 / best)
comms.print(f"100 epochs, one device, a network 1000 times as large: {large}")

# %% [markdown]
"""
That is the wall this book is about.

## Where it breaks: timing without a warm-up

The first call of anything also allocates memory and loads code. On a GPU it also compiles or picks
*kernels*, the programs that run there. The first step of this run was timed at the top of the page.
Here are later ones of the same network, on the same batch:
"""

# %%
later = measure(one_step, comms, warmup=3, repeat=15)["step"]
comms.print(f"first step {human_seconds(first.median)}, later steps {later}")

# %% tags=["plumbing"]
times = first.median / later.median
find(
    comms,
    "first-step",
    longer=(
        first.median > later.spread[1],
        f"The first step took {times:.1f} times as long as the median of the later ones.",
    ),
    alike=(
        first.median <= later.spread[1],
        f"The first step took {times:.2f} times the median of the later ones, no longer than "
        "many of them.",
    ),
)

# %% [markdown]
r"""
A benchmark of one call, in a process of its own, reports the first number. On a GPU there is a
second trap: a call returns as soon as the work is queued, so a benchmark must wait for the device
before it reads the clock. {func}`microddp.timing.clock.measure` warms up, and waits. With several
ranks, it also lets all of them begin each call together.

:::{admonition} On GPUs
The same shape, with other numbers: a call costs some microseconds of the CPU, which queues it, and
a GPU has so much arithmetic that a small network leaves most of it idle. Published trainings of a
transformer reached, for example, 64 % of an A100's 312 TFLOP/s ($10^{12}$ operations a second) in
bf16, numbers of 2 bytes, and 46 % of an H100's 989 (MPT-7B on eight, sequences of 2048,
[llm-foundry](https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking)).
:::

## What to take along

- The backward pass does nearly twice the operations of the forward pass; the optimizer's work does
  not depend on the batch.
- Throughput rises with the batch as long as start-up is a large part of a step. After that only
  faster code or more devices help.
- Weights, gradients and optimizer state are held whole on every device; activations follow the
  batch.

## Exercises

**The lab.** Train a model against the clock, part by part. {doc}`It is checked </labs>` on one
device.

```console
$ python -m microddp.labs start 00
```

1. Double the width of the wide network, from 256 to 512. Predict the new throughput at batch 1024
   from the operations that a sample needs. Then measure it.

   <details class="solution"><summary>Solution</summary>

   A layer's weights go from 256 times 256 to 512 times 512. So a sample takes 4 times the
   operations, and about a quarter of the throughput is left. `FlopCounterMode` of
   `torch.utils.flop_counter` counts exactly 4 times as many in forward and backward.

   What does not grow fourfold leaves more: ReLU and the loss have only twice the work, and the
   calls cost what they did before. So does a device that the narrow network did not fill.

   </details>

2. Replace SGD by Adam. Which of the four parts in the memory figure grows, and by how much?

   <details class="solution"><summary>Solution</summary>

   The part called *momentum*, the optimizer's state, doubles, from 4 bytes a parameter to 8. SGD
   with momentum keeps one number for each parameter. Adam keeps two, the running means of the
   gradient and of its square. It also counts its steps, in one number for each of the 32 tensors of
   parameters, which adds 128 bytes.

   ```python
   state = sum(t.nbytes for tensors in adam.state.values() for t in tensors.values())
   ```

   </details>

3. At which batch size is half of the best throughput reached? What does it say about the start-up
   time of a step?

   <details class="solution"><summary>Solution</summary>

   Let a step of $b$ samples take $t_0 + c\,b$, as if that held for few, too. The best throughput is
   $1/c$, for a very large batch. Half of it is reached where $t_0 + c\,b = 2\,c\,b$, so at
   $b = t_0 / c$. There, half of the step is start-up. The start-up time is therefore that batch
   size, divided by the best throughput. Where the throughput in your table rises faster or slower
   than $b / (t_0 + c\,b)$, its times are not on that line.

   </details>
"""

# %%
comms.close()
