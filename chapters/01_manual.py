# %% [markdown]
r"""
# 01. Splitting a batch by hand

What does it mean to split a batch? Two copies of a model live in one process here. Each sees half
of the batch, and their gradients are averaged by hand. No message is sent yet. This chapter is
about which numbers have to agree, and about three ways to get them wrong.
"""

# %% tags=["imports"]
# sphinx_gallery_builds = "two replicas in one process, their gradients averaged by hand"
# sphinx_gallery_ranks = 1
import copy

import torch
from torch.nn.functional import cross_entropy

import microddp
from microddp import figures
from microddp.data import ShardedBatches, shard
from microddp.datasets import load_digits
from microddp.findings import find
from microddp.model import FullMLP
from microddp.report import table

# %%
comms = microddp.init()
comms.print(comms.describe())

# %% [markdown]
r"""
## The mean of the gradients is the gradient of the mean

**Predict.** The loss of a batch of $B$ samples is the mean of the samples' losses $\ell_i$, and
differentiation is linear. Cut the batch into $n$ parts of equal size, its *shards*. Then the
gradient of the whole is the mean of the gradients of the shards:

$$
\nabla \frac{1}{B} \sum_{i=1}^{B} \ell_i
= \frac{1}{n} \sum_{k=1}^{n} \left( \frac{n}{B} \sum_{i \in \text{shard } k} \nabla \ell_i \right)
$$

In exact arithmetic the two sides are equal. In floating point they divide and sum in different
orders, so they should differ by rounding: a few times $10^{-7}$ of the gradient at most in
`float32`, a few times $10^{-16}$ in `float64`.

**Build.** One model, one batch of real digits, and a function for the gradient of any part of it:
"""

# %%
digits = load_digits(comms.device)
torch.manual_seed(0)
original = FullMLP(128, inputs=64, outputs=10).to(comms.device)
images, labels = (tensor[:96] for tensor in digits.train.tensors)


def gradient(model, x, y):
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


# %% [markdown]
"""
**Measure.** Here is the relative distance between the two sides, for 2, 3 and 4 shards. Beside it
is the *rounding unit*, the relative step from 1 to the next number of the dtype:
"""

# %%
rows = []
for dtype in (torch.float32, torch.float64):
    model, x = copy.deepcopy(original).to(dtype), images.to(dtype)
    whole = gradient(model, x, labels)
    for n in (2, 3, 4):
        parts = [gradient(model, shard(x, k, n), shard(labels, k, n)) for k in range(n)]
        error = distance(torch.stack(parts).mean(0), whole)
        rows.append((str(dtype), n, error, torch.finfo(dtype).eps))
        assert error < 10 * torch.finfo(dtype).eps

comms.print(table(rows, ["dtype", "shards", "distance", "rounding unit"], floats=".2e"))

# %% tags=["plumbing"]
most = max(error / eps for *_, error, eps in rows)
said = f"The farthest mean of shards is {most:.1f} rounding units from the gradient of the whole."
find(comms, "rounding", rounding=(most < 10, said))

# %% [markdown]
"""
**Explain.** What is left comes from the order in which each side sums and divides: it decides where
numbers are rounded.

## Two replicas that stay together

Equal gradients are worth something only if they keep the models equal. Here are two copies of a
model, its *replicas*, with an optimizer each. Before every step, each replica computes the gradient
of its half of the batch. If asked to, both then put the average in place of their own:
"""


# %%
def split_step(replicas, optimizers, x, y, average=True):
    n = len(replicas)
    for k, replica in enumerate(replicas):
        replica.zero_grad()
        cross_entropy(replica(shard(x, k, n)), shard(y, k, n)).backward()
    if average:
        for copies in zip(*(r.parameters() for r in replicas), strict=True):
            mean = torch.stack([p.grad for p in copies]).mean(0)
            for p in copies:
                p.grad.copy_(mean)
    for optimizer in optimizers:
        optimizer.step()


# %% [markdown]
"""
**Predict.** With averaging, both replicas take the same step from the same place. Their distance
should be exactly zero, and their distance to a single model that sees the whole batch should be
rounding. Without averaging, each follows its own half of the data, and they drift apart.
"""


# %%
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# %%
def train(average, dtype=torch.float64):
    """After each step: how far apart the replicas are, how far from a model on whole batches.

    And the share of the weights that are equal to that model's at the end.
    """
    replicas = [copy.deepcopy(original).to(dtype) for _ in range(2)]
    single = copy.deepcopy(original).to(dtype)
    optimizers, alone = [sgd(r) for r in replicas], sgd(single)
    apart, from_single = [], []
    for x, y in ShardedBatches(digits.train, 96, rank=0, world_size=1).epoch(0):
        split_step(replicas, optimizers, x.to(dtype), y, average)
        gradient(single, x.to(dtype), y)
        alone.step()
        apart.append(distance(weights(replicas[0]), weights(replicas[1])))
        from_single.append(distance(weights(replicas[0]), weights(single)))
    equal = (weights(replicas[0]) == weights(single)).double().mean().item()
    return apart, from_single, equal


# %%
apart, from_single, equal = train(average=True)
apart32, from_single32, equal32 = train(average=True, dtype=torch.float32)
drift, drift_from_single, _ = train(average=False)
assert max(apart) == max(apart32) == 0.0
assert from_single[-1] < 1e-9 < 1e-3 < drift[-1]

# %% tags=["plumbing"]
rows = [
    ("averaged, float64", apart[-1], from_single[-1]),
    ("averaged, float32", apart32[-1], from_single32[-1]),
    ("on their own, float64", drift[-1], drift_from_single[-1]),
]
headers = [f"after {len(drift)} steps", "between replicas", "to a single model"]
comms.print(table(rows, headers, floats=".1e"))

# %% tags=["plumbing"]
steps = range(1, len(drift) + 1)
figures.lines(
    {
        "replicas on their own": (steps, drift),
        "averaged, float32": (steps, from_single32),
        "averaged, float64": (steps, from_single),
    },
    title="On their own, replicas part at once; averaged, they follow the single model",
    xlabel="training steps",
    ylabel="relative distance of the weights",
    log="y",
)

# %% [markdown]
r"""
**Explain.** The averaged replicas are bitwise equal, and a distance of zero has no place on a
logarithmic axis: the two lower curves are their distance from a single model. Every average is
right to rounding, but roundings can add up, and training may amplify them. (A weight that agrees to
the bit adds nothing to the distance, so a distance can be below one rounding unit.)
"""

# %% tags=["plumbing"]
times = from_single32[-1] / from_single[-1]
find(
    comms,
    "float64",
    nearer=(
        times > 1,
        f"After {len(drift)} steps an averaged replica is {from_single32[-1]:.1e} from the single "
        f"model in float32, where {equal32:.0%} of the weights are equal to the bit, and "
        f"{from_single[-1]:.1e} in float64, where {equal:.0%} are. Replicas on their own are "
        f"{drift[-1]:.1e} apart.",
    ),
)

# %% [markdown] index=["unequal shards"]
r"""
A rounding of `float64` is $2^{29}$ times smaller than one of `float32`. So tests in this book that
compare whole training runs use `float64`, where a mistake stands out that rounding would hide in
`float32`.

## Where it breaks: unequal shards

The formula needed shards of equal size. The last batch of an epoch may not divide evenly. With
text, the loss is a mean over tokens, and shards with equally many sentences have different numbers
of tokens. So suppose a batch of 96 is cut into parts of $a$ and $96-a$ samples. The mean of the two
parts' mean losses gives the samples in the small part too much weight:
"""

# %%
cuts = (4, 12, 24, 36, 48)
whole = gradient(original, images, labels)
wrong, right = [], []
for a in cuts:
    small = gradient(original, images[:a], labels[:a])
    large = gradient(original, images[a:], labels[a:])
    wrong.append(distance((small + large) / 2, whole))
    right.append(distance((a * small + (96 - a) * large) / 96, whole))

# %% tags=["plumbing"]
rows = list(zip(cuts, (96 - a for a in cuts), wrong, right, strict=True))
headers = ["first shard", "second shard", "mean of means", "weighted by samples"]
comms.print(table(rows, headers, floats=".1e"))
figures.lines(
    {"mean of means": (cuts, wrong), "weighted": (cuts, right)},
    title="The mean of two means is right only for equal halves",
    xlabel="samples in the first shard, of 96",
    ylabel="relative error of the gradient",
    log="y",
)

# %% tags=["plumbing"]
said = (
    f"With the batch cut into {cuts[0]} and {96 - cuts[0]} samples, the mean of means is off by "
    f"{wrong[0]:.0%} of the gradient"
)
find(
    comms,
    "mean-of-means",
    more=(wrong[0] > 1, f"{said}'s norm: by more than the gradient itself."),
    less=(wrong[0] <= 1, f"{said}'s norm."),
)

# %%
assert wrong[0] > 0.1
assert max(right) < 1e-5
assert wrong[-1] < 1e-5

# %% [markdown]
r"""
The fix is to weight each shard by its number of samples. In practice, divide the *sum* of a shard's
losses by the number of samples in the *whole* batch, and then add the gradients. In this part of
the book batches divide evenly. {class}`~microddp.data.ShardedBatches` refuses those that do not:
"""

# %%
try:
    ShardedBatches(digits.train, batch_size=96, rank=0, world_size=5)
except ValueError as error:
    comms.print(error)

# %% [markdown]
r"""
## Where it breaks: adding, and averaging the wrong thing

Two more mistakes raise no error. The first *adds* the gradients and does not divide. With SGD
every step is then $n$ times as long, as if the learning rate had been multiplied by $n$. The
second averages the *weights* after each replica's own step, and not the gradients before it. Here
is one step with each mistake, for two optimizers, against the step of a single model, in `float64`.
(In `float32` each weight is rounded after its step. A step changes a weight by a small part of
itself, so beside the step that rounding is not small.)
"""


# %%
def one_step(optimizer_class, lr, mistake):
    begin, x = copy.deepcopy(original).double(), images.double()
    single, replicas = copy.deepcopy(begin), [copy.deepcopy(begin) for _ in range(2)]
    gradient(single, x, labels)
    optimizer_class(single.parameters(), lr=lr).step()
    optimizers = [optimizer_class(r.parameters(), lr=lr) for r in replicas]
    if mistake == "weights averaged":
        split_step(replicas, optimizers, x, labels, average=False)
        result = torch.stack([weights(r) for r in replicas]).mean(0)
    else:
        for k in range(2):  # backward adds to the gradient that is there
            loss = cross_entropy(replicas[0](shard(x, k, 2)), shard(labels, k, 2))
            loss.backward()
        optimizers[0].step()
        result = weights(replicas[0])
    moved = weights(single) - weights(begin)
    return ((result - weights(single)).norm() / moved.norm()).item()


# %%
rows = [
    (name, *(one_step(kind, lr, mistake) for mistake in ("summed", "weights averaged")))
    for name, kind, lr in (("SGD", torch.optim.SGD, 0.01), ("Adam", torch.optim.Adam, 0.001))
]
headers = ["optimizer", "gradients summed", "weights averaged"]
comms.print("distance from the right step, as a share of that step")
comms.print(table(rows, headers, floats=".1e"))
assert abs(rows[0][1] - 1) < 0.01
assert rows[0][2] < 1e-9 < 1e-3 < rows[1][2]

# %% tags=["plumbing"]
(_, sgd_sum, sgd_mean), (_, adam_sum, adam_mean) = rows
find(
    comms,
    "hidden-by-optimizer",
    each=(
        sgd_sum > adam_sum and adam_mean > sgd_mean,
        f"Summed gradients: SGD misses by {sgd_sum:.2f} of a step, Adam by only {adam_sum:.4f}. "
        f"Averaged weights: Adam misses by {adam_mean:.2f}, and SGD by {sgd_mean:.0e} of a step: "
        "roundings, since weights are much larger than their steps.",
    ),
)

# %% [markdown]
r"""
Summed gradients make SGD's step twice as long, so it misses by the whole length of a step. Adam
divides by the size of the gradient and hides the mistake, until something depends on that size: a
limit for clipping that only the summed gradient exceeds, for example. Apart from rounding,
averaging weights is harmless with plain SGD, whose step is linear in the gradient. Adam's is not,
and the result is another algorithm. A mistake that one optimizer hides is found by testing with
another.

:::{admonition} On GPUs
All of this holds there, with larger roundings. A matrix product may use TF32, with 11 significant
bits, where PyTorch is told that it may (`torch.backends.cuda.matmul.fp32_precision`); bf16, which
layers compute in where `torch.autocast` says so, has 8 of them. A sum's order can also change from
run to run, where a kernel adds atomically. So compare replicas with each other, to the bit, on
GPUs, and with one device in `float64`, on a CPU.
:::

## What to take along

- With equal starting weights, shards of equal size, a mean loss and averaged gradients, n replicas
  take the step of one device on the whole batch. The model must treat each sample by itself (no
  batch normalisation) and without randomness (no dropout).
- They take it up to rounding, because the sums are formed in another order. The replicas among
  themselves stay bitwise equal.
- The average had to bring all gradients to one place. In one process that was a line of code.
  Between processes it is the next chapter.

## Exercises

**The lab.** Take a step with replicas by hand, also where the batch does not divide. {doc}`It is
checked </labs>` on one device.

```console
$ python -m microddp.labs start 01
```

1. Start the two replicas from different seeds, and average their gradients. Do they approach each
   other, stay as far apart, or part?

   <details class="solution"><summary>Solution</summary>

   They stay as far apart as they start, up to rounding. Both optimizers get the same gradients and
   have the same state, so both replicas make the same steps, and the difference of their weights
   never changes. That holds for SGD, with momentum or without, and for Adam. The gradient is an
   average over two different models and fits neither.

   With SGD, weight decay brings them together, because its step depends on the weights. Without
   momentum it multiplies their difference by $1 - \eta \lambda$ in each step, where
   $\eta$ is the learning rate and $\lambda$ the decay. For $\eta = 0.01$ and $\lambda = 10^{-4}$ it
   takes about 700,000 steps to halve the difference.

   </details>

2. Let the loss be the *sum* over the samples. Which of the rules above change?

   <details class="solution"><summary>Solution</summary>

   Three of them. The gradient of the whole batch is now the *sum* of the gradients of the shards.
   To add is right, and to average makes a step of SGD $n$ times too short. Shards of unequal sizes
   need no weights: cuts of 4 and 92 samples, or 24 and 72, give the right gradient to rounding.

   The price is that the gradient grows with the batch. For 96 samples it is 96 times that of the
   mean, so SGD needs a learning rate 96 times smaller. Then it makes the same steps as before.

   </details>

3. Put a batch normalisation layer before the model's first layer. Why is the split step no longer
   the step of the whole batch, although the gradients are averaged? Name ways out.

   <details class="solution"><summary>Solution</summary>

   The layer subtracts the mean of the batch that it sees and divides by its standard deviation. A
   replica sees half of the batch, so the same sample comes out differently, and its loss depends on
   the rest of the shard. The loss is then no sum of terms that belong to one sample each, as the
   formula needs.

   Layer normalisation, which looks at one sample only, brings the distance back to rounding. So
   does batch normalisation in `eval()` mode, with a fixed mean and deviation. A third way is to
   exchange the statistics: `torch.nn.SyncBatchNorm` computes them over all ranks, on GPUs.

   </details>
"""

# %%
comms.close()
