# %% [markdown]
r"""
# 14. Your own script

How do I bring my own script? You care because most mistakes on the way raise no error: the job
runs, and trains something else. This chapter changes a script for one device to one for many, with
stock PyTorch. The file at the end, which this page also runs, needs `pip install scikit-learn`.
"""

# %% tags=["imports"]
import copy
import itertools
import math
import os
import pkgutil
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.data import ShardedBatches
from microddp.datasets import CHARACTERS, load_digits, load_text
from microddp.findings import compare, find
from microddp.report import table
from microddp.shared import all_reduce_hook
from microddp.timing import measure
from microddp.workloads import Transformer, token_loss

# %%
# sphinx_gallery_builds = "a script of stock PyTorch for many devices, to download"
# sphinx_gallery_ranks = 2
comms = microddp.init()
rank, n, device = comms.rank, comms.world_size, comms.device
comms.print(comms.describe())

# %% [markdown]
r"""
## Start

A script is a model, a loader and a loop. (`comms` only prints, and collects what ranks have to
show.) The data are the digits of chapter 00:
"""

# %%
digits = load_digits()
BATCH = 96 - 96 % n  # over all ranks; so that each has as many


def new_model(seed=0):
    torch.manual_seed(seed)
    first = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    return nn.Sequential(*first, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


# %%
def train(model, loader, sampler=None):
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    for epoch in range(5):
        if sampler:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


# %% [markdown]
r"""
**Predict.** What if `torchrun` starts this script as it is? Each of the $n$ ranks has the same seed
and all the data, and none knows of the others. So all should train the same:
"""

# %%
loader = DataLoader(digits.train, BATCH, shuffle=True, drop_last=True)
losses = train(new_model(), loader)
last = comms.all_gather_data(losses[-1])
assert len(set(last)) == 1

# %% tags=["plumbing"]
said = f"took {len(losses)} steps, and ended at a loss of {last[0]!r}"
find(
    comms,
    "unchanged",
    alone=(n == 1, f"The only rank {said}."),
    copies=(n > 1, f"Each of the {n} ranks {said}, to the last bit: the same work, {n} times."),
)

# %% [markdown] index=["DistributedDataParallel", "init_process_group"]
r"""
### Four lines

What is missing: a group of ranks; for each a device, a shard, averaged gradients.

```python
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))         # a GPU for each rank of a machine
dist.init_process_group()                                    # join the job
sampler = DistributedSampler(data, seed=0, drop_last=True)   # a shard for each rank
model = DistributedDataParallel(model.to(device))            # averaged gradients
```

`microddp.init()` did the second, and on GPUs the first. (Without that all ranks take GPU 0, and
NCCL refuses.) The loader takes the sampler in place of `shuffle=True`, and an $n$th of the batch:
"""


# %%
def sharded(of=n, index=rank):
    sampler = DistributedSampler(digits.train, of, index, seed=0, drop_last=True)
    return DataLoader(digits.train, BATCH // of, sampler=sampler, drop_last=True), sampler


loader, sampler = sharded()
model = DistributedDataParallel(new_model())
losses = train(model, loader, sampler)

# %% [markdown]
r"""
**Measure.** The sampler deals one permutation out in turn, so the batch of all ranks is what one
process would take. That one is an oracle:
"""


# %% tags=["plumbing"]
def distance(this, other):
    return ((this - other).norm() / other.norm()).item()


def weights(model):
    return parameters_to_vector(model.parameters()).detach()


# %%
alone = new_model()
expected = train(alone, *sharded(of=1, index=0))[-1]
mean = sum(comms.all_gather_data(losses[-1])) / n
apart = distance(weights(model), weights(alone))
assert apart < 1e-4

# %% tags=["plumbing"]
said = f"{n} rank{'s' * (n > 1)} and one process: last loss {mean:.6f} and {expected:.6f}"
find(
    comms,
    "oracle",
    bits=(apart == 0, f"{said}, and equal weights to the last bit."),
    rounding=(apart > 0, f"{said}, and weights {apart:.0e} apart, which is rounding."),
)

# %% [markdown] index=["sampler", "DistributedSampler", "set_epoch"]
r"""
## Data

### What the sampler has to be told

`DistributedSampler` makes its order from seed and epoch, so the ranks agree without a message. It
does not count epochs: without `sampler.set_epoch(epoch)` each has the order of the first. Where the
samples do not divide by $n$, it repeats some, or with `drop_last` leaves some out.

Weights and order must be equal on all ranks. Noise must not: dropout, random crops, masks. So build
the model, then seed again with the rank (and the epoch, for a run that is resumed).
"""

# %% [markdown] index=["tokens", "loss normalisation", "gradient accumulation"]
r"""
### Tokens, not samples

The loss of a language model is a mean over *tokens*. A label of -100 does not count: that is
padding, or the prompt. A rank may also *accumulate*: take its batch in micro-batches before it
steps. `cross_entropy` gives the mean of one micro-batch on one rank. Many projects have averaged
these means again, as their pull requests and issues say: transformers
[34191](https://github.com/huggingface/transformers/pull/34191) and
[34242](https://github.com/huggingface/transformers/issues/34242), torchtune
[1875](https://github.com/meta-pytorch/torchtune/pull/1875), verl
[5625](https://github.com/verl-project/verl/issues/5625), torchtitan
[2206](https://github.com/pytorch/torchtitan/pull/2206).

**Predict.** In a mean of means, a token of a short micro-batch weighs more. To count over a rank's
micro-batches is right within a rank, and still wrong between ranks. What is right divides by all
$T$ tokens of the *global* batch: a micro-batch of $t$ tokens multiplies its mean by $t n / T$,
where $n$ undoes DDP's division. $T$ takes one all-reduce of one number:
"""

# %%
K, ROWS, LENGTH = 2, 4, 32  # micro-batches of a rank, sequences of each, tokens
x, y = (tensor[: n * K * ROWS].to(device) for tensor in load_text(LENGTH).train.tensors)
drawn = torch.rand(len(y), generator=torch.Generator().manual_seed(0))
answer = (LENGTH * drawn**3).ceil().to(device)  # tokens that count
y = y.masked_fill(torch.arange(LENGTH, device=device) < LENGTH - answer[:, None], -100)
mine = list(zip(x.chunk(n * K), y.chunk(n * K), strict=True))[rank * K : rank * K + K]

# %%
counts = torch.stack([(labels != -100).sum() for _, labels in mine]).double()
total = counts.sum()
dist.all_reduce(total)
WEIGHTS = {
    "mean of means": [1 / K] * K,
    "counted on each rank": counts / counts.sum(),
    "counted over all ranks": counts * n / total,
}


# %%
def loss_and_gradient(wrap, batches, weights):
    torch.manual_seed(0)
    model, total = wrap(Transformer(CHARACTERS, 32, 1, 2, LENGTH).to(device, torch.float64)), 0
    for weight, (inputs, labels) in zip(weights, batches, strict=True):
        loss = weight * token_loss(model(inputs), labels)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


right = loss_and_gradient(lambda model: model, [(x, y)], [1])
rows = [("one process, whole batch", right[0], 0.0)]
for name, factors in WEIGHTS.items():
    loss, found = loss_and_gradient(DistributedDataParallel, mine, factors)
    rows.append((name, sum(comms.all_gather_data(loss)) / n, distance(found, right[1])))
assert rows[-1][2] < 1e-9

# %% tags=["plumbing"]
every = comms.all_gather(counts).int().flatten().tolist()
comms.print(f"tokens of the {n * K} micro-batches: {', '.join(map(str, every))}")
comms.print(table(rows, ["loss", "value", "gradient off"], floats=("", ".6f", ".1e")))

# %% tags=["plumbing"]
means, own = (abs(value - rows[0][1]) for _, value, _ in rows[1:3])
misled = (means < own) != (rows[1][2] < rows[2][2])
said = f"Off in the gradient: a mean of means by {rows[1][2]:.0%}"
end = f"counted over all ranks by {rows[3][2]:.0e}, rounding in float64"
both = f"{said}, counted on each rank by {rows[2][2]:.0%}, {end}. Judged by the loss,"
both += f" off by {means:.4f} and {own:.4f}, the"
find(
    comms,
    "tokens",
    alone=(n == 1, f"{said}, {end}."),
    misled=(n > 1 and misled, f"{both} worse gradient looks better."),
    ranks=(n > 1 and not misled, f"{both} better gradient looks better, too."),
)

# %% [markdown]
r"""
**Explain.** The rows are the history of one project: 34191 counted on each rank, 34242 asked for
all (both October 2024). A loop that sums its tokens' losses has gradients $T/n$ times too large, as
DDP and FSDP (chapter 16) divide by $n$ only: 9 times in a test of [miles
3231](https://github.com/radixark/miles/pull/3231) (September 2026).
"""

# %% [markdown] index=["streaming", "IterableDataset"]
r"""
### Streams

Text for pretraining is a stream: an `IterableDataset`, in which rank $r$ of $n$ takes each $n$th
sample. To resume, it has to know its place. Here a sample is only its number:
"""


# %%
class Stream(IterableDataset):
    def __init__(self, shard, shards, begin=0):
        self.shard, self.shards, self.place = shard, shards, begin

    def __iter__(self):
        while True:
            self.place += self.shards  # count it before handing it out
            yield self.place - self.shards + self.shard


stream = Stream(rank, n)
batches = iter(DataLoader(stream, 4))
_ = [next(batches) for _ in range(3)]
resumed = iter(DataLoader(Stream(rank, n, begin=stream.place), 4))
assert next(resumed).equal(next(batches))  # the same sample

# %% [markdown]
r"""
**Predict.** Now on another number of ranks. Many save how many samples a *rank* has taken. After 12
each on 4 ranks, which makes 48, 3 ranks would begin at sample 36, and 8 ranks at 96. `place` counts
the samples of *all* ranks, which take equally many, so it fits any number. One process can ask all
shards:
"""


# %%
def lost_and_repeated(ranks, begin, taken=range(48)):
    streams = [Stream(shard, ranks, begin) for shard in range(ranks)]
    later = {sample for stream in streams for sample in itertools.islice(stream, 99)}
    return len({*range(max(later))} - later - {*taken}), len(later.intersection(taken))


# %% tags=["plumbing"]
rows = [(*lost_and_repeated(ranks, 12 * ranks), *lost_and_repeated(ranks, 48)) for ranks in (3, 8)]
(_, twice, *fewer), (gone, _, *more) = rows
said = (
    f"With a rank's index, 3 ranks repeat {twice} of 48 samples, and 8 leave out {gone} later ones"
)
whole = not any((*fewer, *more))
find(
    comms,
    "streams",
    whole=(whole, f"{said}. With the offset nothing is lost or repeated."),
    broken=(not whole, f"{said}. The offset does not mend it."),
)

# %% [markdown]
r"""
**Explain.** With `num_workers` each worker has a copy of the stream, and gives every sample again,
unless `get_worker_info()` splits it again. Your process's stream stays at its start. torchdata's
[`StatefulDataLoader`](https://github.com/meta-pytorch/data/blob/v0.11.0/torchdata/stateful_dataloader/README.md)
collects the states of a rank's workers, "but not across ranks". If one rank's stream ends early,
the others wait for it in their next all-reduce: all-reduce a flag before each step, and stop when
one is at its end.
"""

# %% [markdown] index=["DataLoader", "num_workers", "pinned memory"]
r"""
### The loader

$n$ ranks have $n$ loaders, and each has `num_workers` processes, on its machine's cores.

**Predict.** Let a sample cost $t$ seconds of a core, measured on one rank without workers. Then on
$r$ ranks with $w$ workers each $p = r \max(1, w)$ processes unpack, and load at most
$\min(\text{cores}, p) / t$ samples a second:
"""


# %%
class Packed(Dataset):
    content = zlib.compress(torch.rand(1 << 18).numpy().tobytes(), 1)

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return len(zlib.decompress(self.content))


# %%
FORK, WORKERS = {"multiprocessing_context": "fork", "persistent_workers": True}, (0, 2)
loaders = {w: DataLoader(Packed(), 4, num_workers=w, **(FORK if w else {})) for w in WORKERS}


def load(ranks, workers):
    return list(loaders[workers] if rank < ranks else ())


setups = [(ranks, workers) for ranks in sorted({1, n}) for workers in WORKERS]
times = measure({setup: partial(load, *setup) for setup in setups}, comms, warmup=1, repeat=3)

# %% tags=["plumbing"]
rates = {setup: setup[0] * 16 / times[setup].median for setup in setups}
most = {(r, w): rates[1, 0] * min(comms.cores, r * max(1, w)) for r, w in setups}
rows = [(r, w, r * max(1, w), most[r, w], rates[r, w]) for r, w in setups]
headers = ["ranks", "workers each", "unpack", "samples/s, predicted at most", "measured"]
comms.print(table(rows, headers, floats=".0f"))
loaders.clear()

# %% tags=["plumbing"]
crowd = setups[-1]
pair = compare(times[crowd], times[n, 0])
parts = [rates[setup] / most[setup] for setup in setups[1:]]
over = max(parts) > 1.005
said = pair.say(
    f"Loading on {n} rank{'s' * (n > 1)} with {crowd[1]} workers each", "on as many without"
)
reached = f"After the first, rows reach {min(parts):.0%} to {max(parts):.0%} of what was predicted"
reached += "; above 100%, a sample cost less than in the first" * over
find(
    comms,
    "loader",
    **pair.sides(f"{said}, by the median of the ratios, repetition by repetition. {reached}."),
)

# %% [markdown]
r"""
**Explain.** By the model, processes help up to the number of cores; then unpack once and keep the
data, or take more cores. It counts unpacking alone: what else rows lose, this page does not show.
(Workers also load while a device computes: not measured here.) On a GPU
add `pin_memory=True` and `.to(device, non_blocking=True)`, so that copies are not waited for.
"""

# %% [markdown] index=["batch size", "learning rate", "warm-up"]
r"""
## Train

### Batch size and learning rate

To keep devices busy, people keep the batch *of a rank*. Then that of all grows $n$ times, and an
epoch has $n$ times fewer steps: another training.

**Predict.** $k$ steps with rate $\eta$ go as far as one with rate $k\eta$ on all their samples, as
long as the weights change little meanwhile: the *linear rule* ([Goyal and others,
2017](https://arxiv.org/abs/1706.02677)), with a *warm-up*, in which the rate grows. It fails when a
step is too long. Adam divides a gradient by its usual size. Where that is mostly noise, $k$ times
the batch makes it $\sqrt k$ times smaller, so each step goes $\sqrt k$ times as far already: the
*root rule* ([Malladi and others, 2022](https://arxiv.org/abs/2205.10287); here without its changes
of $\beta$ and $\epsilon$).

What matters is the batch, not who computes it. So each rank trains some configurations alone, all
over the same number of samples. SGD's own rule is the linear one, AdamW's the root rule: of the
three rules each one's own should hold longest:
"""

# %%
SEEDS, KS = range(3), (1, 4, 8, 16, 32)
STEPS = 352  # at k = 1
RULES = {"same rate": 0, "rate x root k": 0.5, "rate x k": 1}
MAKE = {
    "SGD": lambda parts, k: torch.optim.SGD(parts, 0.02 * k, momentum=0.9),
    "AdamW": lambda parts, k: torch.optim.AdamW(parts, 0.001 * k, fused=True),
}


def test_loss(kind, k, factor, seed):
    model, loader = new_model(seed).cpu(), ShardedBatches(digits.train, 8 * k, 0, 1, seed)
    optimizer = MAKE[kind](model.parameters(), factor)
    data = itertools.chain(*map(loader.epoch, range(6)))
    warm = max(2, STEPS // k // 5)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm)
    for x, y in itertools.islice(data, STEPS // k):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        ramp.step()
    with torch.no_grad():
        return cross_entropy(model(digits.test.tensors[0]), digits.test.tensors[1]).item()


# %% tags=["plumbing"]
torch.set_num_threads(1)  # as torchrun sets it for several ranks
every = itertools.product(MAKE, KS, RULES.values(), SEEDS)
runs = sorted({(kind, k, k**power, seed) for kind, k, power, seed in every})  # at k = 1 all agree
mine = [(run, test_loss(*run)) for run in runs[rank::n]]
after = {tuple(run): loss for part in comms.all_gather_data(mine) for run, loss in part}


def median(kind, rule, k):
    return statistics.median(after[kind, k, k ** RULES[rule], seed] for seed in SEEDS)


def breaks(kind, rule):
    """The first k whose median loss is more than twice that of k = 1; 0 if none is."""
    return next((k for k in KS if median(kind, rule, k) > 2 * median(kind, rule, 1)), 0)


# %% tags=["plumbing"]
def show_rules(kind):
    figures.lines(
        {rule: (KS, [median(kind, rule, k) for k in KS]) for rule in RULES},
        title=f"{kind}, linear rule: twice the loss of k = 1 is passed {where(kind, 'rate x k')}",
        xlabel="k, times the batch of 8",
        ylabel="loss: median, and seeds",
        log="xy",
        crosses=[(k, loss) for (other, k, *_), loss in after.items() if other == kind],
    )


def where(kind, rule):
    k = breaks(kind, rule)
    times = median(kind, rule, k or 1) / median(kind, rule, 1)
    near = ", barely" * (times < 2.2)
    return f"at k = {k} ({times:.2f} times{near})" if k else "nowhere"


# %% tags=["plumbing"]
for kind in MAKE:
    show_rules(kind)
    same, root, linear = (where(kind, rule) for rule in RULES)
    said = (
        f"With {kind} the median loss first exceeds twice that of k = 1 {same} with the same rate, "
        f"{root} with the root rule and {linear} with the linear rule."
    )
    its, name = ("rate x k", "linear") if kind == "SGD" else ("rate x root k", "root")
    limits = {rule: breaks(kind, rule) or math.inf for rule in RULES}
    mine, others = limits.pop(its), max(limits.values())
    against = f"{said} Against the prediction, another holds longer than the {name} rule."
    find(
        comms,
        f"rate-{kind.lower()}",
        longest=(mine > others, f"{said} As predicted, the {name} rule holds longest."),
        tied=(
            mine == others,
            f"{said} Another holds as long as the {name} rule: not as predicted.",
        ),
        against=(mine < others, against),
    )

# %% [markdown]
r"""
**Explain.** A loss of 2.30 is that of guessing among ten digits. With three seeds, and a limit set
by hand, these $k$ are rough. The root rule is for gradients that are mostly noise. Measure yours.

### The noise scale

Let $G$ be the gradient over all data, and $\Sigma$ the covariance of one sample's. A mean over $b$
samples has an expected squared length of $|G|^2 + \operatorname{tr}\Sigma / b$. The *gradient noise
scale*, $\operatorname{tr}\Sigma / |G|^2$, is the batch with as much noise as signal ([McCandlish
and others, 2018](https://arxiv.org/abs/1812.06162)). Two batch sizes give two equations, and data
parallelism has both for free: a rank's own gradient, of $b$ samples, and the average, of $nb$. With
$s$ and $m$ for their squared lengths:

$$|G|^2 = \frac{n m - s}{n - 1}, \qquad \operatorname{tr}\Sigma = \frac{n b\,(s - m)}{n - 1}$$

**Predict.** With a batch as large as the noise scale, by the paper, training takes twice the fewest
possible steps. Below it gradients are mostly noise: there SGD's linear rule should hold, beyond it
no rule. A communication hook (chapter 10) sees a rank's own gradient, here along a training:
"""


# %%
def own_length(lengths, bucket):
    lengths.append(bucket.buffer().square().sum())
    return allreduce_hook(None, bucket)


def squared_lengths(b=8):
    model, lengths = DistributedDataParallel(new_model()), []
    model.register_comm_hook(lengths, own_length)
    optimizer = MAKE["SGD"](model.parameters(), n)  # by the linear rule
    for x, y in itertools.chain(*map(ShardedBatches(digits.train, n * b, rank, n).epoch, range(4))):
        lengths.clear()
        optimizer.zero_grad()
        cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        own = comms.all_gather(torch.stack(lengths).sum()).mean().item()
        yield own, sum(p.grad.square().sum() for p in model.parameters()).item()


# %%
def noise_scale(steps, b=8):
    s, m = (sum(column) for column in zip(*steps, strict=True))  # one step tells too little
    signal = (n * m - s) / (n - 1)
    return n * b * (s - m) / (n - 1) / signal if signal > 0 else float("nan")


steps = list(squared_lengths()) if n > 1 else []
half = len(steps) // 8  # of an epoch
scales = [noise_scale(steps[i * half :][:half]) for i in range(8)] if n > 1 else []

# %% tags=["plumbing"]
points = [((i + 1) / 2, scale) for i, scale in enumerate(scales) if scale > 0]
sizes, enough = [scale for _, scale in points], len(points) >= 4
low, high = (min(sizes), max(sizes)) if enough else (0, 0)
end = breaks("SGD", "rate x k") or 2 * KS[-1]
held = 8 * max(k for k in KS if k < end)
if enough:
    title = f"Noise scale of half epochs: {low:.0f} to {high:.0f} samples"
    curves = {"noise scale": tuple(zip(*points, strict=True))}
    curves["linear rule held up to"] = ((0.5, 4), (held, held))
    figures.lines(curves, title=title, xlabel="epoch", ylabel="samples", log="y")

# %% tags=["plumbing"]
early, late = end in KS and 8 * end < low, held > high
ups = sum(this > last for last, this in itertools.pairwise(sizes))
said = (
    f"Noise scale of half epochs: {', '.join(f'{size:.0f}' for size in sizes)} samples, {ups} of "
    f"{len(sizes) - 1} above the one before, the largest in the half that ends with epoch "
    f"{max(points, key=lambda point: point[1], default=(0, 0))[0]:g}. With SGD the linear rule "
    f"held up to a batch of {held}"
)
under = sum(size < held for size in sizes)
vary = f"that does not decide, as they vary {high / max(low, 1e-9):.0f}-fold"
find(
    comms,
    "noise-scale",
    early=(enough and early, f"{said} and broke below all scales: against the prediction."),
    late=(enough and late, f"{said}, above all scales: against the prediction."),
    between=(
        enough and not (early or late),
        f"{said}, above {under} of {len(sizes)} scales: {vary}.",
    ),
    unclear=(n > 1 and not enough, "These steps are too few to tell the noise scale."),
    alone=(n == 1, "One rank has only one gradient: two lengths take two ranks."),
)

# %% [markdown]
r"""
**Explain.** In the paper the scale grows along a training, as $G$ shrinks and samples still
disagree. (Where the first half epoch here has a large one, this page does not show why.) So measure
it more than once, with your optimizer (AdamW's weights go elsewhere than SGD's), and test a rule at
each doubling of your batch.

### Clipping

Clip after `backward`, in which the wrapper has averaged: each rank then finds the same norm. A loop
that averages by hand, or accumulates within `no_sync` (chapter 06), may clip earlier by mistake.
Then each rank scales by a norm of its own, and the mean has another direction.
"""

# %% [markdown] index=["GradScaler", "mixed precision"]
r"""
### Precision

For bf16, `torch.autocast` around forward and loss is all: weights, gradients and messages stay
float32. fp16 also needs a `GradScaler`, as small gradients would become zero: it multiplies the
loss, divides the gradients, and skips a step in which they overflow. Averaged, an overflow is in
every rank's gradients, so all skip. Not averaged, one rank would skip alone: weights differ.
(To clip, call `scaler.unscale_(optimizer)` first.)
"""

# %% [markdown] index=["torch.compile", "compile"]
r"""
### torch.compile

**Predict.** Compiled code hands out gradients when a *piece* of it, compiled as one, is done. With
the whole model in one piece, nothing is left to hide an all-reduce behind. So PyTorch cuts a model
at the borders of DDP's buckets, and its [note on
DDP](https://docs.pytorch.org/docs/2.13/notes/ddp.html) says to wrap before compiling, for that. But
a model is compiled in its first forward, and by then both orders have the wrapper. Count the pieces
of four layers:
"""


# %% tags=["plumbing"]
class Layers(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = torch.relu(layer(x))
        return x


def new_layers(kind=Layers):
    return kind(*(nn.Linear(512, 512) for _ in range(4))).to(device)


def ran(model):
    model(torch.ones(64, 512, device=device)).sum().backward()
    return model


# %%
ddp = partial(DistributedDataParallel, bucket_cap_mb=1)  # a bucket for each layer
ORDERS = {
    "DDP(compile(model))": lambda compiled: ddp(compiled(new_layers())),
    "compile(DDP(model))": lambda compiled: compiled(ddp(new_layers())),
    "compile(DDP(nn.Sequential))": lambda compiled: compiled(ddp(new_layers(nn.Sequential))),
}
rows = []
for name, order in ORDERS.items():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ran(ran(order(partial(torch.compile, backend=counter))))
    rows.append((name, counter.frame_count))

# %% tags=["plumbing"]
inside, around, stock = (count for _, count in rows)
said = (
    f"Pieces: {inside} if compiled inside the wrapper, {around} around it, "
    f"{stock} around a bare nn.Sequential"
)
find(
    comms,
    "compile",
    cut=(inside > 1, f"{said}. Of the first two neither order is worse: inside is cut, too."),
    whole=(inside <= 1, f"{said}. As the note would have it, inside is not cut."),
)

# %% [markdown] index=["SyncBatchNorm", "batch normalization"]
r"""
**Explain.** Around a wrapper, the compiler leaves PyTorch's own code alone, and a bare
`nn.Sequential` runs nothing else: it is not compiled, without an error. The file compiles inside,
and saves the bare model: a compiled one's state has `_orig_mod.` before each name. (After
`model.compile()`, in place, it has not.)

### Batch normalisation

A `BatchNorm` layer normalises with mean and deviation of a rank's shard ([chapter
06](06_ddp.py#buffers-whose-statistics)). Where a rank has few samples, that matters:
`nn.SyncBatchNorm.convert_sync_batchnorm(model)` takes mean and deviation over all ranks, on GPUs
only, for two collectives a layer. `LayerNorm` and `GroupNorm` look at one sample, and need nothing.
"""

# %% [markdown] index=["evaluation"]
r"""
## Compare

### Evaluation

Each rank evaluates a share. A mean of their means is right for equal shares only, as with tokens,
and a `DistributedSampler` that repeats samples counts them twice. The right way is to add up
counts:
"""

# %%
pixels, digit = (tensor[:355] for tensor in digits.test.tensors)
with torch.no_grad():
    right = (model.module(pixels.to(device)).argmax(1).cpu() == digit).float()
mine = right.tensor_split([i * (80 // n) for i in range(1, n)])[rank]  # the last has the rest
counts = torch.tensor([mine.sum(), len(mine)], device=device)
dist.all_reduce(counts)

# %% tags=["plumbing"]
shares = comms.all_gather_data(mine.mean().item())
whole, mean = right.mean().item(), sum(shares) / n
assert abs(counts[0] / counts[1] - whole) < 1e-6
said = f"One process reads {whole:.2%} right, as the sums of counts say"
find(
    comms,
    "evaluation",
    off=(abs(mean - whole) > 1e-6, f"{said}. The mean of the ranks' means says {mean:.2%}."),
    same=(abs(mean - whole) <= 1e-6, f"{said}, and the mean of the ranks' means, too."),
)

# %% [markdown]
r"""
Use the bare model, `model.module`: a forward through the wrapper may broadcast buffers, and a rank
that calls it alone waits for the others.

### Where it breaks: what rank 0 does alone

What prints or writes would do so $n$ times, so people put it behind `if rank == 0`. Compute what is
printed on all ranks: a mean over ranks is a collective, in which rank 0 alone waits for ranks that
do not come, a second here instead of the usual 30 minutes of gloo, or 10 of NCCL:
"""

# %%
impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
if rank == 0:
    try:
        dist.all_reduce(torch.tensor(1.0), group=impatient)
    except RuntimeError as error:
        comms.print(textwrap.fill(str(error), 90))
dist.barrier()

# %% [markdown] index=["reproducibility", "bitwise", "determinism"]
r"""
### Equal to the bit, or not

**Predict.** A sum in floating point depends on its order: $(a + b) + c$ is not $a + (b + c)$ to the
last bit, while $a + b$ is $b + a$. So what keeps the order keeps the bits: the same run again, or
resumed with buckets as before. What changes it changes them: another number of ranks, or a matrix
product cut for other threads. In float64 the difference begins half a billion ($2^{29}$) times
smaller, as its roundings do. One
training, with one change each time:
"""


# %%
def training(wrap=DistributedDataParallel, index=rank, of=n, **change):
    model = new_model().to(change.get("dtype", torch.float32))
    wrapped, optimizer = wrap(model), MAKE["SGD"](model.parameters(), change.get("rate", 2))
    for part, saved in zip((model, optimizer), change.get("state", ()), strict=False):
        part.load_state_dict(saved)
    data = itertools.chain(*map(ShardedBatches(digits.train, BATCH, index, of).epoch, range(9)))
    for x, y in itertools.islice(data, change.get("first", 0), change.get("last", 10)):
        optimizer.zero_grad()
        cross_entropy(wrapped(x.to(next(model.parameters()))), y.to(device)).backward()
        optimizer.step()
    return model, optimizer


# %% tags=["plumbing"]
def and_alone(**change):
    return training(**change), training(lambda model: model, 0, 1, **change)


def with_ring(model):
    wrapped = DistributedDataParallel(model)
    hook = lambda state, bucket: all_reduce_hook(state, bucket)  # noqa: E731
    wrapped.register_comm_hook((comms, ring_all_reduce), hook)
    return wrapped


def on_other_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    trained = training()
    torch.set_num_threads(before)
    return trained


# %%
plain = training()
half = [copy.deepcopy(part.state_dict()) for part in training(last=5)]
pairs = {
    "the same run again": (training(), plain),
    "resumed after 5 of 10 steps": (training(state=half, first=5), plain),
    "ring instead of the backend's sum": (training(with_ring), plain),
    "another number of threads": (on_other_threads(), plain),
    "one process": and_alone(),
    "one process, float64": and_alone(dtype=torch.float64),
    "one process, 100 steps": and_alone(last=100),
    "... at 8 times the rate": and_alone(last=100, rate=16),
}

# %% tags=["plumbing"]
begin, same, far = weights(new_model()), [], {}
for name, models in pairs.items():
    this, against = (weights(model) for model, _ in models)
    far[name] = ((this - against).norm() / (against - begin).norm()).item()
    same += [name] * torch.equal(this, against)
rows = [(name, "equal" if name in same else "differ", f"{far[name]:.0e}") for name in pairs]
comms.print(table(rows, ["changed", "bits", "apart, of how far they moved"]))

# %% tags=["plumbing"]
changes = list(far)[:5]
kept, largest = len({*changes} & {*same}), max(far[name] for name in changes)
said = f"The bits stay in {kept} of the first {len(changes)} rows; the others part by at most "
said += f"{largest:.0e} of how far they moved."
said += " (Two ranks add to the same bits in any order.)" * (n == 2)
find(
    comms,
    "bits",
    some=(0 < kept < len(changes), said),
    all=(kept == len(changes), "All of the first rows keep the bits."),
    none=(kept == 0, "None of the first rows keeps the bits, not even the same run again."),
)

# %% tags=["plumbing"]
slow, quick = [*far.values()][-2:]
said = f"After 100 steps {n} ranks and one process are apart by {slow:.0e} of how far they moved"
said += f", and by {quick:.0e} at 8 times the rate"
grow = quick > 100 * slow
find(
    comms,
    "rounding-grows",
    alone=(n == 1, "One rank is one process: nothing is added up in another order."),
    grows=(n > 1 and grow, f"{said}."),
    stays=(n > 1 and not grow, f"{said}: in this run rounding does not grow with the rate."),
)
assert far["the same run again"] == 0 or device.type != "cpu"
assert far["one process, float64"] < 1e-12

# %% [markdown]
r"""
**Explain.** Each step multiplies a difference by a factor that depends on curvature and rate: below
one it dies out, above one it grows. So compare few steps at a moderate rate, or in float64.

PyTorch [promises](https://docs.pytorch.org/docs/2.13/notes/randomness.html) no equal results
between releases, platforms, or CPU and GPU (May 2026).
"""

# %% [markdown] index=["checkpoint", "resume"]
r"""
## Save and resume

### Checkpoints

The file below keeps what a run needs to go on: the weights of the bare model, which fit one device
as well; the optimizer; the schedule; the epoch. Rank 0 writes, and keeps the last two, flushed
before they are renamed (chapter 13). It reads, too, and sends the others what it has read.

**Predict.** The batch is that of all ranks, the order depends on seed and epoch, and this model
draws no noise. So another number of ranks should go on with the same training, up to rounding. Of
two processes one is killed when the first epoch is printed; then one goes on. Another run is not
disturbed. Each process imports PyTorch anew, so this takes a while:
"""

# %% tags=["plumbing"]
FILE = Path(microddp.__file__).parents[1] / "docs" / "_downloads" / "train_ddp.py"
OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith((*OF_TORCHRUN, "MICRODDP_"))}
BARE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
folder = Path(comms.all_gather_data(tempfile.mkdtemp() if rank == 0 else "")[0])


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("localhost", 0))
        return str(any_port.getsockname()[1])


def start(ranks, checkpoint):
    """What torchrun does: a process for each rank, which knows where to meet the others."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", FILE, "--epochs", "3", "--checkpoint", checkpoint]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return [
        subprocess.Popen(command, env=BARE | where | {"RANK": str(i), "LOCAL_RANK": str(i)}, **said)
        for i in range(ranks)
    ]


# %%
def killed_and_resumed():
    killed = start(2, folder / "killed.pt")
    first = killed[0].stdout.readline()
    killed[1].kill()
    first += killed[0].stdout.read()
    resumed, whole = start(1, folder / "killed.pt"), start(1, folder / "whole.pt")
    return first, resumed[0].communicate()[0], whole[0].communicate()[0]


# %% tags=["plumbing"]
first, rest, whole = comms.all_gather_data(killed_and_resumed() if rank == 0 else None)[0]
comms.print(f"two, one killed:\n{first}\none goes on:\n{rest}\nnot disturbed:\n{whole}")
losses, whole = (dict(re.findall(r"(\d): loss ([\d.]+)", said)) for said in (first + rest, whole))
assert losses.keys() == whole.keys() == {*"012"}
apart = max(abs(float(losses[epoch]) - float(whole[epoch])) for epoch in whole)
assert apart < 1e-3
said = f"The killed job printed {first.count('epoch')} of 3 epochs. With what goes on"
said += ", the losses are "
find(
    comms,
    "resumed",
    equal=(apart == 0, f"{said}those of the run that was not disturbed, to 4 decimals."),
    rounding=(apart > 0, f"{said}within {apart:.0e} of the run that was not disturbed."),
)

# %% [markdown]
r"""
**Explain.** `torchrun --max-restarts=9` would start both again, with the old *store*: the server
through which ranks find each other, which still has the addresses of the dead. So in the file each
start has a part of the store for itself, a `PrefixStore`. (Several torchruns count their restarts
apart: there, `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives a new store each time, [PyTorch
135712](https://github.com/pytorch/pytorch/issues/135712).)

## Launch

### Who sets the rank?

`init_process_group()` reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` from the
environment. Who sets them and starts a job again (manuals read in November 2026):

:::{list-table}
:header-rows: 1

* - launcher
  - sets the variables
  - restarts
* - [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html)
  - its agent on each machine
  - the agents: all workers, `--max-restarts` times
* - Slurm's [srun](https://slurm.schedmd.com/srun.html)
  - nobody: let srun start one torchrun a machine
  - [`sbatch --requeue`](https://slurm.schedmd.com/sbatch.html)
* - Kubernetes with a [Kubeflow
  `TrainJob`](https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go)
  - torchrun, whose options come from a controller
  - [JobSet](https://github.com/kubernetes-sigs/jobset), jobs as one: all pods, `maxRestarts`
    times
* - [Ray
    Train](https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchConfig.html)
  - Ray, which also calls `init_process_group`
  - Ray: all workers, [`max_failures`
    times](https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html)
:::

The script then goes on from its checkpoint. A job script for Slurm is in {doc}`/rebuild`.

:::{admonition} On GPUs
The mistakes are the same: tokens, a stream's state, counts, an early clip. But NCCL chooses the
order of a sum by size, topology and version. Goyal and others found the linear rule to hold, with
warm-up, on ImageNet up to a batch of 8192, on 256 GPUs ([2017](https://arxiv.org/abs/1706.02677)).
Run `torchrun --nproc-per-node=8 chapters/14_your_script.py`, with one rank a GPU.
:::
"""

# %% [markdown] index=["slow", "debugging"]
r"""
## When something is wrong

Ask in this order, and take the first yes; the numbers are chapters:
"""

# %% tags=["plumbing"]
QUESTIONS = {
    "It is slow": [
        ("Is one device alone as slow?", "where its time goes (00, 08); a profile (09)"),
        ("Do the devices wait for data?", "time the loader alone; workers, pinned memory (14)"),
        ("Does one rank hold up the others?", "straggler report: slow rank or link (12)"),
        ("Is communication exposed?", "buckets (05), accumulation (06, 09); send less (10, 11)"),
    ],
    "It is stuck": [
        ("Has a rank ended?", "torchrun names the first; read that rank's own log (13)"),
        ("Is a rank missing in a call?", "MICRODDP_RECORD=DIR; python -m microddp.doctor DIR (13)"),
        ("Are all in the same call?", "the network: python -m microddp.doctor --report FILE"),
    ],
}

# %% tags=["plumbing"]
QUESTIONS["It learns worse"] = [
    ("Do n ranks part from one, without noise?", "compare ten steps; check_replicas (03, 14)"),
    ("Do micro-batches differ in tokens?", "count over all ranks, then divide (14)"),
    ("Is the batch larger than before?", "learning rate, warm-up, noise scale (14)"),
    ("Has each epoch one order, or each rank the same noise?", "set_epoch; seed + rank (14)"),
]
QUESTIONS["It crashes"] = [
    ("Does a parameter get no gradient?", "find_unused_parameters=True (06)"),
    ("Does memory run out?", "smaller micro-batches (14); sharded state (16)"),
]
figures.questions(QUESTIONS)

# %% [markdown]
r"""
## Under other names

What takes the place of this book's parts, looked up in the installed PyTorch. (Checkpoints have no
pair: `microddp.train` writes one file, by rank 0, and `torch.distributed.checkpoint` one of each
rank.)
"""

# %% tags=["plumbing"]
NAMES = """
02 microddp.init                          torch.distributed.init_process_group
03 microddp.data.ShardedBatches           torch.utils.data.DistributedSampler
04 microddp.hooks.AllReduceHooks          torch.Tensor.register_post_accumulate_grad_hook
06 microddp.DDP                           torch.nn.parallel.DistributedDataParallel
10 microddp.DDP.register_comm_hook     torch.nn.parallel.DistributedDataParallel.register_comm_hook
16 microddp.sharding.fully_shard         torch.distributed.fsdp.fully_shard
"""

# %% tags=["plumbing"]
rows = [line.split() for line in NAMES.splitlines() if line]
for name in itertools.chain(*(names for _, *names in rows)):
    pkgutil.resolve_name(name)
comms.print(table(rows, ["chapter", "here", "in PyTorch"]))

# %% [markdown]
r"""
## The file

What a script for digits needs of all this: {download}`train_ddp.py <../_downloads/train_ddp.py>`,
without token counts, streams, `GradScaler` and `SyncBatchNorm`. It began as
{download}`train_single.py <../_downloads/train_single.py>`, for one device.

```console
$ python train_ddp.py
$ torchrun --nproc-per-node=2 train_ddp.py --checkpoint run.pt
```

### The file, sharded

With FSDP2 (chapter 16) a rank keeps an $n$th of weights, gradients and momentum, and takes the same
samples. What changes in the file:

```diff
@@ imports
-from torch.nn.parallel import DistributedDataParallel
+from torch.distributed import checkpoint as dcp
+from torch.distributed.checkpoint import state_dict as dcp_state
+from torch.distributed.fsdp import fully_shard
@@ train
-    model = DistributedDataParallel(torch.compile(bare) if options.compile else bare)
+    for layer in bare[::2]:  # the blocks: here, each nn.Linear
+        fully_shard(layer)
+    model = fully_shard(bare)
     optimizer = torch.optim.SGD(bare.parameters(), options.lr, momentum=0.9)
@@ save
+    dcp.save(states(*parts), checkpoint_id=f"{path}.{epoch}.shards")
     if dist.get_rank() != 0:
         return
     with open(f"{path}.part", "wb") as file:
-        torch.save((epoch, settings, [part.state_dict() for part in parts]), file)
+        torch.save((epoch, settings), file)
@@ resume
-    epoch, before, states = found[0]
+    epoch, before = found[0]
@@ resume
-    for part, state in zip(parts, states, strict=True):
-        part.load_state_dict(state)
+    found = states(*parts)
+    dcp.load(found, checkpoint_id=f"{path}.{epoch}.shards")
+    dcp_state.set_optimizer_state_dict(*parts[:2], found["optimizer"])
@@ new
+def states(model, optimizer, schedule):
+    kept = dcp_state.get_optimizer_state_dict(model, optimizer)
+    return {"model": model, "optimizer": kept, "schedule": schedule}
+
+
 def ignore_sigterm(_worker):
```

The optimizer is made after, of sharded parameters. Clipping stays: the norm is that of all shards.
Each rank writes its part with `torch.distributed.checkpoint` (DCP, chapter 13), to a disk that all
see. Rank 0's small file comes last, and so says that a checkpoint is whole. `dcp.load` fills what
is there: a new optimizer's momentum is made first, by `get_optimizer_state_dict`. A forward is a
collective here, so ranks must evaluate equally many batches, as they do in this file. Parts of
older checkpoints stay on the disk. The script's `--compile` has no effect here.
`tests/docs/test_downloads.py` applies the listing, and demands of two ranks DDP's losses, to
$10^{-4}$, also where one goes on alone.

## What to take along

- Test first that $n$ ranks train as one does, for ten steps.
- Equal on all ranks: weights, order, step. Different: shards and noise.
- Count before you divide: losses by the tokens of the global batch, results by all samples.
- Scale the learning rate with the batch of all ranks, and try it; gradient norms before and after
  averaging give the noise scale, which varies along a training.
- Clip, and scale, gradients that are averaged.
- Save nothing that depends on the number of ranks: then another can go on.

## Exercises

**The lab.** Weigh the losses of unequal micro-batches. {doc}`It is checked </labs>` on 1, 2 and 3
ranks.

```console
$ python -m microddp.labs start 14
```

1. Let `train_ddp.py` accumulate over two micro-batches of half the size, with `no_sync`. What has
   to change, so that the losses stay the same?

   <details class="solution"><summary>Solution</summary>

   The loader takes half the batch. Of each pair of micro-batches the first runs within
   `model.no_sync()`. Each loss is halved, since gradients add up. The rest is done once a pair. An
   epoch may end with half a pair: leave it out, of the printed loss too.

   ```python
   for i, (x, y) in enumerate(islice(loader, len(loader) // 2 * 2)):
       last = i % 2 == 1
       if not last:
           optimizer.zero_grad()
       x, y = x.to(device), y.to(device)
       with nullcontext() if last else model.no_sync():
           with precision():
               loss = cross_entropy(model(x), y)
           (loss / 2).backward()
       total, count = total + loss.detach() * len(x), count + len(x)
       if last:
           nn.utils.clip_grad_norm_(model.parameters(), 1.0)
           optimizer.step()
           schedule.step()
   ```

   </details>

2. A rank of 64 has 1000 tokens that count in its micro-batch, and the others 2000 each. How much
   more than it should does a mean of means weigh one of its tokens?

   <details class="solution"><summary>Solution</summary>

   The mean of means gives its token $1/(64 \cdot 1000)$, where $1/(1000 + 63 \cdot 2000)$ is right:
   $127/64 = 1.98$ times as much.

   </details>
"""

# %%
comms.close()
