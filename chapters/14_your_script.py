# %% [markdown]
r"""
# 14. Your own script

How do I bring my own script? The chapters before this one built everything by hand, to see it. To
train, PyTorch has it all: `torchrun`, `DistributedDataParallel`, `DistributedSampler`. This chapter
takes a script for one device, as people have it, and changes it for many, one change at a time.
Most are left out once, on purpose, to see what goes wrong then. At the end there is a file to
download, with all of them. It reads handwritten digits from scikit-learn: `pip install
scikit-learn`, if it is not there.
"""

# %% tags=["imports"]
import contextlib
import itertools
import os
import pkgutil
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import microddp
from microddp import figures
from microddp.data import CHARACTERS, ShardedBatches, load_digits, load_text
from microddp.findings import find
from microddp.report import table
from microddp.workloads import Transformer, token_loss

# %%
# sphinx_gallery_builds = "a script of stock PyTorch for any number of devices, to download"
# sphinx_gallery_ranks = 2
comms = microddp.init()
rank, n, device = comms.rank, comms.world_size, comms.device
comms.print(comms.describe())

# %% [markdown]
r"""
From here on, `comms` prints, and collects what ranks have to show. How ranks train is stock
PyTorch.

## The script

A model, a loader, a loop. The data are the digits of chapter 00:
"""

# %%
digits = load_digits()
BATCH = 96 - 96 % n  # over all ranks; so that each has as many


def new_model():
    torch.manual_seed(0)
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
**Predict.** What do $n$ ranks do if `torchrun` starts this script as it is? Each has the same seed
and all the data, and none knows of the others. So there should be $n$ times the same training:
"""

# %%
loader = DataLoader(digits.train, BATCH, shuffle=True, drop_last=True)
losses = train(new_model(), loader)
last = comms.all_gather_data(losses[-1])
comms.print(f"{len(losses)} steps; the last loss on each rank: {', '.join(map(str, last))}")
assert len(set(last)) == 1

# %% [markdown] index=["DistributedDataParallel", "init_process_group"]
r"""
The same number on each rank, to the last digit, and as many steps as on one device. Nothing was
gained, and nothing failed. A script that was not changed at all looks as if it worked.

## Four lines

What is missing, in the order of chapters 01 to 06: a group of ranks, a device for each, a shard for
each, and averaged gradients.

```python
dist.init_process_group()                                    # join the job
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))         # a GPU for each rank of a machine
sampler = DistributedSampler(data, seed=0, drop_last=True)   # a shard for each rank
model = DistributedDataParallel(model.to(device))            # averaged gradients
```

The first two happened above, in `microddp.init()`. Where the second is forgotten, all ranks take
GPU 0, and NCCL refuses. The loader takes the sampler in place of `shuffle=True`, and the batch of a
rank is an $n$th of the batch:
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
**Measure.** The sampler deals one permutation out to the ranks in turn, so the batch of all ranks
is the one that a single rank would take. One process is therefore an oracle:
"""


# %%
def distance(model, other):
    mine, theirs = (parameters_to_vector(m.parameters()) for m in (model, other))
    return ((mine - theirs).norm() / theirs.norm()).item()


alone = new_model()
expected = train(alone, *sharded(of=1, index=0))
mean = sum(comms.all_gather_data(losses[-1])) / n
comms.print(f"last loss, of one process {expected[-1]:.6f}, mean over the ranks {mean:.6f}")
comms.print(f"weights {distance(model, alone):.0e} from those of one process")
assert distance(model, alone) < 1e-4

# %% [markdown] index=["sampler", "DistributedSampler", "set_epoch"]
r"""
Equal up to rounding. That is the test to have for a script of one's own: few steps, no noise, $n$
ranks against one, before anything else is changed.

## What the sampler has to be told

`DistributedSampler` makes its order from the seed and the epoch, so that the ranks agree without a
message. It does not count epochs. It has to be told, by `set_epoch`. And where the samples do not
divide by $n$, it fills up with some that others have, unless `drop_last` says to leave some out.
"""

# %%
rows = []
for name, told in (("told the epoch", True), ("not told", False)):
    _, order = sharded()
    firsts = []
    for epoch in range(3):
        if told:
            order.set_epoch(epoch)
        firsts.append(", ".join(str(i) for i in itertools.islice(order, 4)))
    rows.append((name, *firsts))
comms.print(table(rows, ["first samples of rank 0", "epoch 0", "epoch 1", "epoch 2"]))

# %% [markdown]
r"""
Not told, each epoch has the order of the first, and each rank sees the same shard in all of them.
There is no error.

**Seeds.** Weights must be equal on all ranks; `DistributedDataParallel` sees to it, with a
broadcast from rank 0. Noise should *not* be equal: dropout, random crops, masks. With one seed on
all ranks, every rank draws the same:
"""


# %%
def noise(seed):
    torch.manual_seed(seed)
    drawn = [round(value, 3) for value in torch.rand(3).tolist()]
    return "; ".join(map(str, comms.all_gather_data(drawn)))


comms.print("one seed for all ranks:", noise(0))
comms.print("seed + rank:           ", noise(0 + rank))

# %% [markdown] index=["batch size", "learning rate", "warm-up"]
r"""
So: build the model, then seed once more with the rank. The file below makes the seed of each epoch
from seed, epoch and rank. A resumed run then draws what the whole one drew, if no process of a
loader draws, and if the number of ranks is the same.

## Batch size and learning rate

Here the batch was shared: $n$ ranks, an $n$th each, the same training. People more often keep the
batch *of a rank*, as that keeps a device busy. Then the batch of all grows $n$ times, an epoch has
$n$ times fewer steps, and it is another training.

**Predict.** The *linear scaling rule* ([Goyal and others, 2017](https://arxiv.org/abs/1706.02677))
multiplies the learning rate by as much as the batch. For $k$ small steps with rate $\eta$ go about
as far as one step with rate $k\eta$ on all their samples, as long as the weights do not change much
meanwhile. In the beginning they do, so the rate *warms up*: it grows over the first steps. The
paper held it on ImageNet up to batches of 8192. With a batch so large that few steps are left, it
should fail at some point.

What matters here is the batch, not who computes it. So each rank trains some of the configurations,
alone, over the same number of samples: digits with SGD, and text with the transformer of chapter 10
and AdamW.
"""


# %%
def final_loss(model, loss_fn, data, optimizer, batch, warm, epochs):
    """Train on whole batches; returns the mean loss over the samples afterwards."""
    steps = epochs * (len(data) // batch)
    warm = max(2, steps // 5) if warm else 1
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm)
    for epoch in range(epochs):
        for x, y in ShardedBatches(data, batch, 0, 1).epoch(epoch):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            ramp.step()
    with torch.no_grad():
        return loss_fn(model(data.tensors[0]), data.tensors[1]).item()


# %%
RULES = {"same rate": (0, False), "rate x k": (1, False), "rate x k, warm-up": (1, True)}
small = load_text(32)
small_text = type(small.train)(*(tensor[:1024] for tensor in small.train.tensors))


def on_digits(k, power, warm):
    model = new_model().cpu()
    sgd = torch.optim.SGD(model.parameters(), 0.02 * k**power, momentum=0.9)
    return final_loss(model, cross_entropy, digits.train, sgd, 8 * k, warm, epochs=4)


def on_text(k, power, warm):
    torch.manual_seed(0)
    model = Transformer(CHARACTERS, 32, 1, 2, 32)
    adamw = torch.optim.AdamW(model.parameters(), 0.001 * k**power)
    return final_loss(model, token_loss, small_text, adamw, 8 * k, warm, epochs=1)


# %% tags=["plumbing"]
TASKS = {"digits": (on_digits, (1, 2, 4, 8, 16, 32)), "text": (on_text, (1, 4, 16, 64))}
runs = [(task, rule, k) for task, (_, ks) in TASKS.items() for rule in RULES for k in ks]
mine = [(run, TASKS[run[0]][0](run[2], *RULES[run[1]])) for run in runs[rank::n]]
after = {tuple(run): loss for part in comms.all_gather_data(mine) for run, loss in part}
for task, (_, ks) in TASKS.items():
    figures.lines(
        {rule: (ks, [after[task, rule, k] for k in ks]) for rule in RULES},
        title=f"Loss on the {task} after as many samples",
        xlabel="k, times the batch of 8",
        ylabel="loss on what was trained on",
        log="xy",
    )

# %% tags=["plumbing"]
rows = [
    (task, rule, *(f"{after[task, rule, k]:.2f}" if k in ks else "" for k in (1, 4, 8, 16, 32, 64)))
    for task, (_, ks) in TASKS.items()
    for rule in RULES
]
comms.print(table(rows, ["loss", "k =", "1", "4", "8", "16", "32", "64"]))
assert after["digits", "rate x k", 8] < after["digits", "same rate", 8] / 2
assert after["digits", "rate x k", 32] > 2
assert after["text", "rate x k", 16] < after["text", "same rate", 16]

# %% tags=["plumbing"]
left = {k: after["digits", "rate x k", k] for k in TASKS["digits"][1]}
held = [k for k in left if left[k] < after["digits", "same rate", k]]
lost = [k for k in left if k > max(held, default=0)]
most, end = max(held, default=1), left[lost[0]] if lost else 0.0
said = f"On the digits k times the rate learns more than the same rate up to k = {most}"
find(
    comms,
    "rate",
    breaks=(
        bool(lost),
        f"{said}. At the next k it ends at {end:.2f}.",
    ),
    holds=(not lost, f"{said}, which is all that was tried."),
)

# %% [markdown]
r"""
**Explain.** With the rate as it was, a larger batch learns less from the same samples: it takes
fewer steps, and no longer ones. With $k$ times the rate it goes as far in fewer steps, until a step
is too long. A loss of 2.30 is that of guessing among ten digits. The text is trained with AdamW,
whose steps have about the length of the rate, whatever the gradient. (For Adam people also take
$\sqrt k$.) All of this is the loss on what was trained on; the paper's claim is about what was not.
Where the rule stops depends on the task: try two or three doublings from your own batch on.
"""

# %% [markdown] index=["evaluation"]
r"""
## Evaluation

On rank 0 alone, all others would wait. So each evaluates its share, here one of its own size. Two
mistakes are in the way there. A `DistributedSampler` without `drop_last` counts some samples twice,
with `drop_last` it leaves some out: right for training, wrong for a result. And the mean of the
ranks' means is the mean only of equal shares. What is right adds up counts:
"""

# %%
bare = model.module.eval()
tested = Subset(digits.test, range(355))
ends = [0, *(40 + 315 * (i + 1) // n - 315 // n for i in range(n))]
mine = range(ends[rank], 355 if rank == n - 1 else ends[rank + 1])  # rank 0 has but 40


@torch.no_grad()
def right_of(indices):
    """How many of the samples with these numbers the model reads right."""
    images, digit = next(iter(DataLoader(Subset(tested, list(indices)), len(indices))))
    return (bare(images.to(device)).argmax(1).cpu() == digit).sum().item()


# %%
counts = torch.tensor([right_of(mine), len(mine)], device=device)
dist.all_reduce(counts)
padded = list(DistributedSampler(tested, shuffle=False))
means = comms.all_gather_data([right_of(mine) / len(mine), right_of(padded) / len(padded)])
rows = [
    ("one process", right_of(range(355)) / 355),
    ("sums of counts", counts[0].item() / counts[1].item()),
    ("mean of means", sum(mean for mean, _ in means) / n),
    ("padded shares", sum(mean for _, mean in means) / n),
]
comms.print(table(rows, ["read right", "share"], floats=".4f"))
assert rows[0][1] == rows[1][1]

# %% [markdown]
r"""
Another number of ranks would give the last two other results. The model is the bare one,
`model.module`, not the wrapper: a forward through the wrapper may broadcast buffers, and a rank
that calls it alone waits for the others.

## One voice

What prints, draws a progress bar or writes a file does it $n$ times. Let each rank write a log to
the same file:
"""

# %%
folder = Path(comms.all_gather_data(tempfile.mkdtemp() if rank == 0 else "")[0])
with open(folder / "log", "w") as log:
    for step in range(3):
        dist.barrier()
        log.write(f"step {step} of rank {rank}\n")
        log.flush()
dist.barrier()
comms.print((folder / "log").read_text())

# %% [markdown]
r"""
Each has written from the start of the file, over what the others wrote; whose lines are left is
chance. So rank 0 alone writes: `if dist.get_rank() == 0`, and `tqdm(..., disable=rank > 0)`.

## Where it breaks: what rank 0 does alone

What stands behind that `if` must not need the others. A forward through the wrapper may, since it
sends buffers, and a mean over all ranks does. Rank 0 then waits for ranks that do not come, here
for two seconds instead of the usual 30 minutes of gloo, or 10 of NCCL:
"""

# %%
impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
if rank == 0:
    try:
        dist.all_reduce(torch.tensor(1.0), group=impatient)
    except RuntimeError as error:
        comms.print(textwrap.fill(str(error), 90))
dist.barrier()

# %% [markdown] index=["clipping", "clip_grad_norm"]
r"""
Chapter 13 reads such a hang. So: compute on all ranks, then print on one.

## Clipping

Clipping by the global norm belongs where the gradients are those of the whole batch: after
`backward`, in which the wrapper has averaged them. Then each rank finds the same norm, and no
message is needed. Who averages by hand, or accumulates within `no_sync`, is tempted to clip
earlier:
"""


# %%
images, digit = (tensor[: 32 * n].to(device) for tensor in digits.train.tensors)
shard = slice(rank * 32, rank * 32 + 32)


def clipped(early):
    model = DistributedDataParallel(new_model())
    with model.no_sync() if early else contextlib.nullcontext():
        cross_entropy(model(images[shard]), digit[shard]).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1).item()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    if early:  # only now the average
        dist.all_reduce(gradient.div_(n))
    return gradient, norm


# %% tags=["plumbing"]
reference = new_model()
cross_entropy(reference(images), digit).backward()
found = clip_grad_norm_(reference.parameters(), 0.1).item()
wanted = torch.cat([p.grad.flatten() for p in reference.parameters()])
rows = [("one process, whole batch", f"{found:.4f}", wanted.norm().item(), 0.0)]
for name, early in (("clipped after the average", False), ("clipped before", True)):
    gradient, norm = clipped(early)
    norms = ", ".join(f"{value:.4f}" for value in comms.all_gather_data(norm))
    apart = (gradient - wanted).norm() / wanted.norm()
    rows.append((name, norms, gradient.norm().item(), apart.item()))
headers = ["gradient", "norm found on each rank", "clipped to", "distance"]
comms.print(table(rows, headers, floats=("", "", ".4f", ".1e")))
assert rows[1][3] < 1e-5

# %% [markdown] index=["GradScaler", "mixed precision"]
r"""
Clipped early, each rank has scaled its gradient by a norm of its own. With several ranks the mean
of these is another gradient, and shorter than the limit.

## Precision

`torch.autocast` with bf16 around forward and loss is all that bf16 needs. Products are computed in
it; weights, gradients and so messages stay float32:
"""

# %%
half = new_model()
with torch.autocast(device.type, torch.bfloat16):
    outputs = half(images)
    loss = cross_entropy(outputs, digit)
loss.backward()
gradient = torch.cat([p.grad.flatten() for p in half.parameters()])
reference.zero_grad()
cross_entropy(reference(images), digit).backward()
full = torch.cat([p.grad.flatten() for p in reference.parameters()])
comms.print(f"outputs {outputs.dtype}, gradients {gradient.dtype}")
comms.print(f"distance from the gradient in float32: {(gradient - full).norm() / full.norm():.1%}")

# %% [markdown]
r"""
fp16 also needs a `GradScaler`, because small gradients would become zero: it multiplies the loss,
divides the gradients, and skips a step in which they overflow. (Who clips calls
`scaler.unscale_(optimizer)` before.) Let one rank overflow:
"""


# %%
def overflow(averaged):
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    factor = float("inf") if rank == n - 1 else 1.0
    with contextlib.nullcontext() if averaged else model.no_sync():
        scaler.scale(cross_entropy(model(images[shard]), digit[shard]) * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = distance(model, new_model()) > 0
    return f"{'steps' if moved else 'skips'}, scale {scaler.get_scale():g}"


for name, averaged in (("averaged", True), ("each rank's own gradients", False)):
    comms.print(f"{name}:", "; ".join(comms.all_gather_data(overflow(averaged))))

# %% [markdown] index=["torch.compile", "compile"]
r"""
Averaged, what is not finite on one rank is not finite on any: all skip the step, and all halve the
scale, without a message for it. Where the scaler looks at gradients that are not averaged yet, one
rank skips a step that the others take, and their weights differ from then on.

## torch.compile

**Predict.** A compiled model computes backward in few large pieces, and gradients come out when
their piece is done. If the whole model is one piece, all come at the end, and no computation is
left to hide an all-reduce behind. So PyTorch cuts a model that it compiles at the borders of the
wrapper's buckets, where it knows of the wrapper. Around it, in `torch.compile(DDP(model))`, it
does. Does it inside, in `DDP(torch.compile(model))`? A *backend* turns a piece into code; one of
our own counts the pieces, and leaves them to `aot_eager`, which only traces. When does the first
gradient come, as a share of the time to the last?
"""


# %%
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


# %%
def compiled(way):
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = way != "inside, not cut"
    pieces, ready = [], []
    aot = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        pieces.append(graph)
        return aot(graph, inputs)

    model = Layers().to(device)
    if way.startswith("inside"):
        model = torch.compile(model, backend=backend)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    run = torch.compile(ddp, backend=backend) if way == "around" else ddp
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
    for _ in range(3):  # the buckets are dealt once more after the first step
        loss, begun = run(torch.ones(512, 512, device=device)).square().mean(), time.perf_counter()
        ready.clear()
        loss.backward()
    return way, len(pieces), f"{(ready[0] - begun) / (ready[-1] - begun):.0%}"


# %%
rows = [compiled(way) for way in ("not compiled", "inside", "around", "inside, not cut")]
comms.print(table(rows, ["torch.compile", "pieces", "first gradient after"]))
torch._dynamo.config.optimize_ddp = True

# %% [markdown] index=["SyncBatchNorm", "batch normalization"]
r"""
**Explain.** Both are cut, because a model is cut when it is compiled, and that happens in the first
forward, in which the wrapper is there. Not cut, here by a switch, it is one piece, and the first
gradient comes with the last. The same happens to a model that was compiled and run before it was
wrapped. Two things differ. A compiled model puts `_orig_mod.` before each name in its state, so
keep the bare one at hand, to save it. And around the wrapper of a bare `nn.Sequential` nothing is
compiled at all (PyTorch 2.13), since only PyTorch's own code runs there: the model must be a class
of yours. So the file compiles inside. (PyTorch's [note on
DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) says to wrap first, and to compile what is
wrapped.)

## Batch normalisation

A `BatchNorm` layer takes mean and deviation of the batch that it sees, which is a rank's shard.
Each rank then normalises with another mean, and keeps another running mean. `DDP` sends rank 0's
around before each forward. `SyncBatchNorm` takes both over all ranks, at the price of a collective
for each layer in forward and one in backward. It is made for GPUs:
"""

# %%
layer = nn.BatchNorm1d(64).to(device)
layer(images[shard])
means = comms.all_gather(layer.running_mean)
apart = (means - means.mean(0)).norm(dim=1) / means.mean(0).norm()
comms.print("running means, from their mean:", ", ".join(f"{x:.1%}" for x in apart.tolist()))
together = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(64)).to(device)
try:
    together(images[shard])
    means = comms.all_gather(together.running_mean)
    comms.print("SyncBatchNorm: the same on all ranks:", bool((means == means[0]).all()))
except ValueError as error:
    comms.print(f"SyncBatchNorm: {error}")

# %% [markdown] index=["DataLoader", "num_workers", "pinned memory"]
r"""
Where a model has such layers, and a rank few samples, it matters. Layers that look at one sample
only, `LayerNorm` or `GroupNorm`, need nothing.

## The loader

With $n$ ranks, $n$ loaders read at once, and each has `num_workers` processes. On one machine they
share its cores, with each other and with what feeds the devices.

**Predict.** Let a sample cost $t$ seconds of a core. Then $r$ ranks with $w$ workers each load at
most $\min(\text{cores}, r \max(1, w)) / t$ samples a second: more ranks load more until the cores
are used up, and then no more, however fast the devices are. A sample here is unpacked, which takes
a few milliseconds:
"""

# %%
packed = zlib.compress(torch.rand(1 << 18).numpy().tobytes(), 1)


class Packed(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.float32)[:256]


def load(ranks, workers):
    """Samples a second, of all ranks that load; the slowest counts."""
    forked = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    loader = DataLoader(Packed(), 4, num_workers=workers, **forked) if rank < ranks else []
    rates = []
    for _ in range(4):  # the first also starts the workers
        dist.barrier()
        begun = time.perf_counter()
        for _ in loader:
            pass
        seconds = max(comms.all_gather_data(time.perf_counter() - begun))
        rates.append(ranks * 32 / seconds)
    return sorted(rates[1:])[1]


# %%
rows, base = [], load(1, 0)
for ranks in (count for count in (1, 2, 4, 8) if count <= n):
    for workers in (0, 1, 2):
        most = base * min(comms.cores, ranks * max(1, workers))
        rows.append((ranks, workers, most, load(ranks, workers)))
headers = ["ranks", "workers each", "samples/s, at most about", "measured"]
comms.print(table(rows, headers, floats=".0f"))

# %% tags=["plumbing"]
best = max(rows, key=lambda row: row[3])
short = min(rows, key=lambda row: row[3] / row[2])
said = (
    f"Fastest are {best[0]} ranks with {best[1]} workers each, {best[3]:.0f} samples a second. "
    f"Farthest below its bound: {short[0]} with {short[1]}, at {short[3] / short[2]:.0%} of it."
)
find(comms, "loader", some=(best[1] > 0, said), none=(best[1] == 0, said))

# %% [markdown] index=["checkpoint", "resume"]
r"""
**Explain.** One rank without workers uses one core. More workers or more ranks use the others.
Where all are busy, an extra worker only takes time from the others, and turns cost time, too. Then
what helps is less work for each sample, such as data that were unpacked once and kept, or more
cores for each device.

On a GPU, `pin_memory=True` makes a loader put batches where the GPU can fetch them by itself. Then
`.to(device, non_blocking=True)` returns at once, and the process goes on to queue work. This run
had no GPU to show it, unless the first line names one.

## Checkpoints

The file below keeps what a run needs to go on: weights of `model.module`, without the wrapper, so
that they fit one device as well; the optimizer; the schedule; and the epoch. Rank 0 writes, beside
the old file, and renames. It reads, too, and sends what it has read to the others: so all go on
from the same epoch, also where only rank 0 sees the file.

**Predict.** The batch is that of all ranks, the order depends on seed and epoch, and this model
draws no noise. So another number of ranks should go on with the same training, up to rounding.

Two processes train, and one is killed after the first epoch. Then one process goes on. Another run
is not disturbed:
"""

# %% tags=["plumbing"]
FILE = Path(microddp.__file__).parents[1] / "docs" / "_downloads" / "train_ddp.py"
OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith((*OF_TORCHRUN, "MICRODDP_"))}
BARE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("localhost", 0))
        return str(any_port.getsockname()[1])


# %%
def start(ranks, checkpoint):
    """What torchrun does: a process for each rank, which knows where to meet the others."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", FILE, "--epochs", "3", "--checkpoint", checkpoint]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return [
        subprocess.Popen(command, env=BARE | where | {"RANK": str(i), "LOCAL_RANK": str(i)}, **said)
        for i in range(ranks)
    ]


def killed_and_resumed():
    whole, killed = start(1, folder / "whole.pt"), start(2, folder / "killed.pt")
    first = killed[0].stdout.readline()
    killed[1].kill()
    first += killed[0].stdout.read()  # it may have come further
    ends = [process.wait() for process in killed]
    resumed = start(1, folder / "killed.pt")
    return first, ends, resumed[0].communicate()[0], whole[0].communicate()[0]


# %% tags=["plumbing"]
first, ends, rest, whole = comms.all_gather_data(killed_and_resumed() if rank == 0 else None)[0]
comms.print(f"two processes, one killed:\n{first}exit codes {ends}\none goes on:\n{rest}")
comms.print(f"not disturbed:\n{whole}")
epochs, same = (re.findall(r"epoch (\d): loss ([\d.]+)", text) for text in (first + rest, whole))
assert [epoch for epoch, _ in same] == ["0", "1", "2"]
assert {*epochs} >= {*same[1:]}

# %% [markdown] index=["slow", "debugging"]
r"""
**Explain.** One process goes on where two stopped, to the same printed losses. (The other one of
the two fails, since its partner has gone. With `torchrun --max-restarts=9` both would be started
again, with the store in which the dead have written where they can be reached. Over gloo a second
start that reads it fails with "Connection refused", or waits for good. So in the file below each
start has a `PrefixStore` of its own.) Where the number of ranks stays the same, the weights are the
same to the bit; this book's tests check that on one, two and four ranks.

## When something is wrong

Most of what can be wrong, this book has met. Ask in this order, and take the first yes:
"""

# %% tags=["plumbing"]
QUESTIONS = {
    "It is slow": [
        ("Is one device alone as slow?", "profile that first: torch.profiler (00, 08)"),
        ("Do the devices wait for data?", "time the loader alone; workers, pinned memory (14)"),
        ("Does one rank hold up the others?", "straggler report: slow rank or link (12)"),
        (
            "Is communication exposed?",
            "buckets, accumulation (05, 08); send less, more seldom (10, 11)",
        ),
    ],
    "It is stuck": [
        ("Has a rank ended?", "torchrun names the first; read that rank's own log (13)"),
        ("Is a rank missing in a call?", "MICRODDP_RECORD=DIR; python -m microddp.doctor DIR (13)"),
        ("Are all in the same call?", "the network: python -m microddp.doctor --report FILE"),
    ],
}

# %% tags=["plumbing"]
QUESTIONS["It learns worse"] = [
    ("Do n ranks part from one, without noise?", "compare ten steps; check_replicas (03)"),
    ("Is the batch larger than before?", "learning rate and warm-up (14)"),
    ("Has each epoch one order, or each rank the same noise?", "set_epoch; seed + rank (14)"),
    ("Is it only the measure?", "add up counts over ranks, not means (14)"),
]
figures.questions(QUESTIONS)

# %% [markdown]
r"""
The numbers are chapters: [00](00_baseline.py), [03](03_naive_dp.py), [05](05_bucketing.py),
[08](08_performance.py), [10](10_compression.py), [11](11_local_sgd.py), [12](12_uneven.py),
[13](13_faults.py), and this one.

## Under other names

What this book built, and what takes its place in PyTorch. The code looks up every name with dots,
so that none is there that the running version does not have:
"""

# %% tags=["plumbing"]
NAMES = """
02 microddp.init                          torch.distributed.init_process_group
02 microddp.Comms.all_reduce              torch.distributed.all_reduce
02 microddp.Comms.sendrecv                torch.distributed.batch_isend_irecv
03 microddp.data.ShardedBatches           torch.utils.data.DistributedSampler
03 microddp.replicas.broadcast_parameters part:of:making:the:wrapper
04 microddp.hooks.AllReduceHooks          torch.Tensor.register_post_accumulate_grad_hook
05 microddp.buckets.GradientBucket        torch.distributed.GradBucket
06 microddp.DDP                           torch.nn.parallel.DistributedDataParallel
06 microddp.DDP.no_sync                   torch.nn.parallel.DistributedDataParallel.no_sync
07 microddp.Comms.subgroup                torch.distributed.new_group
07 microddp.register_mesh                 torch.distributed.init_device_mesh
08 microddp.performance.analyzer          torch.profiler
10 microddp.DDP.register_comm_hook     torch.nn.parallel.DistributedDataParallel.register_comm_hook
10 microddp.compression.PowerSGD         torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook
11 microddp.local_sgd.LocalSteps         torch.distributed.algorithms.model_averaging.averagers
13 microddp.train.checkpoint             torch.distributed.checkpoint
13 microddp.doctor.hang                  the:flight:recorder
13 microddp.elastic.Members              torchft:(not:part:of:PyTorch)
"""

# %% tags=["plumbing"]
rows = [line.split() for line in NAMES.strip().splitlines()]
for _, here, other in rows:
    for name in {here, other if ":" not in other else here}:
        pkgutil.resolve_name(name)
rows = [(chapter, here, other.replace(":", " ")) for chapter, here, other in rows]
comms.print(table(rows, ["chapter", "here", "in PyTorch"]))

# %% [markdown]
r"""
## The file

All changes together: {download}`train_ddp.py <../_downloads/train_ddp.py>`. It was
{download}`train_single.py <../_downloads/train_single.py>`. Neither needs microddp.

```console
$ diff train_single.py train_ddp.py
$ python train_ddp.py
$ torchrun --nproc-per-node=2 train_ddp.py --checkpoint run.pt
```

## What to take along

- A script that was not changed runs under `torchrun`, and does the same work $n$ times. First test
  that $n$ ranks train as one does.
- Equal on all ranks: weights, order, step. Different: shards and noise.
- Say whether a batch is a rank's or all ranks', and scale the learning rate with the latter.
- Results are sums of counts, taken over all ranks.
- What looks at gradients, such as clipping or a scaler, comes after they are averaged.
- A checkpoint that holds no trace of the number of ranks goes on with any.

## Exercises

1. Let `train_ddp.py` accumulate over two micro-batches of half the size, with `no_sync`. What has
   to change, so that the losses stay the same, up to rounding?

   <details class="solution"><summary>Solution</summary>

   The loader takes half the batch. Of each pair of micro-batches the first runs, forward and
   backward, within `model.no_sync()`. Each loss is halved before `backward`, since gradients add
   up. Clipping, the optimizer and the schedule run once for each pair, and `zero_grad` before it:
   an epoch may end with half a pair, which must not be added to the next.

   ```python
   for i, (x, y) in enumerate(loader):
       last = i % 2 == 1
       if not last:
           optimizer.zero_grad()
       with nullcontext() if last else model.no_sync():
           (cross_entropy(model(x), y) / 2).backward()
       if last:
           nn.utils.clip_grad_norm_(model.parameters(), 1.0)
           optimizer.step()
           schedule.step()
   ```

   </details>

2. Leave the extra backward out of `train_ddp.py`, the one before `resume`. On how many ranks does a
   resumed run still have the bits of a whole one?

   <details class="solution"><summary>Solution</summary>

   On one and two. The first backward after a start has its gradients in other places of the bucket
   than all later ones, since the wrapper first guesses their order and then takes the one it saw.
   gloo cuts the bucket into a part for each rank, and adds up each part in an order of its own. So
   in other places a value may be added up in another order. One or two ranks have only one order,
   as $a + b = b + a$. On four, the weights of the resumed run differ in the last bits.

   </details>

3. Train with `--lr 0.1`, for 8 epochs, on one rank and on two. The last losses differ in the first
   digits. Is something wrong? How would you find out?

   <details class="solution"><summary>Solution</summary>

   On the machine this was tried on (November 2026) they were 0.0724 and 0.0918, and with the usual
   rate, 0.05, the same to all printed digits. Nothing is wrong. Two ranks add in another order than
   one, so their first losses differ in the seventh digit. With a rate so high that the loss jumps,
   such a difference grows with each step. A mistake shows in the first steps, if they are of plain
   SGD. So compare the first ten steps, not the last; or compute in `float64`, where the difference
   begins a billion times smaller.

   </details>
"""

# %%
comms.close()
