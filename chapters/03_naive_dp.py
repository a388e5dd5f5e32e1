# %% [markdown]
r"""
# The least that trains correctly

What is the least code that trains one model on n devices and is right? Four lines around a
training loop: give every rank the same model, give each its share of the batch, average the
gradients, step. This chapter writes them, proves that n ranks train exactly as one device does on
the whole batch, breaks them in the usual ways, and then looks at what they cost.
"""

# %%
# sphinx_gallery_ranks = 4
import torch
from tabulate import tabulate
from torch.nn.functional import cross_entropy

import microddp
from microddp import figures
from microddp.data import ShardedBatches, epoch_order, load_digits, shard
from microddp.figures import human_bytes
from microddp.machine import cpu_cores
from microddp.messages import all_reduce_cost
from microddp.model import FullMLP, gradient_bytes
from microddp.replicas import broadcast_parameters, check_replicas
from microddp.schedule import naive_data_parallel_step
from microddp.trace import Timeline, measure

comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
"""
## Replicate

Every rank needs a copy of the model, and all copies must start equal. The usual slip is a seed
that depends on the rank, or no seed at all. {func}`~microddp.replicas.check_replicas` compares a
hash of every parameter between the ranks, and on a difference raises on *all* of them, so that
nobody trains on alone:
"""


# %%
def new_model(seed, dtype=torch.float64, dim=128):
    torch.manual_seed(seed)
    return FullMLP(dim, inputs=64, outputs=10).to(comms.device, dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


try:
    check_replicas(new_model(seed=rank), comms)
except RuntimeError as error:
    comms.print(error)

# %% [markdown]
"""
The same seed on every rank would do. Broadcasting from rank 0 also covers models that were
loaded, or changed after they were made:
"""

# %%
model = new_model(seed=rank)
broadcast_parameters(model, comms)
check_replicas(model, comms)
comms.print(f"{n} equal replicas of {human_bytes(gradient_bytes(model))}")

# %% [markdown]
r"""
## Shard, backward, all-reduce

**Predict.** Chapter 01 promised that the mean of the gradients of equal shards is the gradient of
the whole batch. So after an averaging all-reduce, every rank holds the gradient that one device
would have computed, takes the same step, and the replicas stay equal. What it takes is one
all-reduce for each parameter, and together they move the bytes of all gradients:
"""

# %%
collectives = len(list(model.parameters()))
cost = all_reduce_cost("ring", n, gradient_bytes(model))
comms.print(f"{collectives} all-reduces a step, {human_bytes(gradient_bytes(model))} in all,")
comms.print(f"of which a rank sends {human_bytes(cost.most_sent)} if they run as a ring")

# %% [markdown]
"""
**Build.** The whole of naive data parallelism:
"""


# %%
def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        comms.all_reduce_mean(parameter.grad)
    optimizer.step()
    return loss.detach()


# %% [markdown]
"""
**Measure.** Three epochs on the digits. Beside it every rank also trains, alone, a model that
sees the whole batch. The global batch stays the same, whatever the number of ranks:
"""

# %%
digits = load_digits(comms.device)
BATCH = 96 if 96 % n == 0 else 96 - 96 % n


def batches(for_rank, of):
    return ShardedBatches(digits.train, BATCH, for_rank, of)


def train(dtype, epochs=3):
    """Losses of n ranks and of one device, and the distance of their weights, step by step."""
    together, alone = new_model(0, dtype), new_model(0, dtype)
    optimizers = sgd(together), sgd(alone)
    shared, single, apart = [], [], []
    for epoch in range(epochs):
        pairs = zip(batches(rank, n).epoch(epoch), batches(0, 1).epoch(epoch), strict=True)
        for (x, y), (whole_x, whole_y) in pairs:
            loss = train_step(together, optimizers[0], x.to(dtype), y)
            comms.all_reduce_mean(loss)  # of this rank's shard, until now
            shared.append(loss.item())
            optimizers[1].zero_grad()
            loss = cross_entropy(alone(whole_x.to(dtype)), whole_y)
            loss.backward()
            optimizers[1].step()
            single.append(loss.item())
            apart.append(distance(together, alone))
    check_replicas(together, comms)
    return shared, single, apart


def distance(model, reference):
    a, b = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference))
    return ((a - b).norm() / b.norm()).item()


# %%
shared, single, apart = train(torch.float64)
shared32, single32, apart32 = train(torch.float32)
rows = [
    (i + 1, single[i], shared[i], abs(shared[i] - single[i]), apart[i]) for i in (0, 13, 27, 41)
]
headers = ["step", "loss, one device", f"loss, {n} ranks", "difference", "weights apart"]
comms.print(tabulate(rows, headers=headers, floatfmt=("d", ".6f", ".6f", ".1e", ".1e")))
assert max(abs(a - b) for a, b in zip(shared, single, strict=True)) < 1e-9
assert max(apart) < 1e-9

# %%
steps = range(1, len(shared) + 1)
figures.lines(
    {f"{n} ranks": (steps, shared), "one device": (steps, single)},
    title=f"{n} ranks and one device draw the same curve",
    xlabel="training steps",
    ylabel="training loss",
)

# %% [markdown]
r"""
**Explain.** In `float64` the losses agree to $10^{-9}$ and better, and so do the weights: the
tolerance is asserted, and the build of this page fails if it does not hold. In `float32` the runs
agree only as far as chapter 01 led us to expect:
"""

# %%
comms.print(f"float32 after {len(apart32)} steps: weights {apart32[-1]:.1e} apart,")
comms.print(f"losses {abs(shared32[-1] - single32[-1]):.1e} apart; among the ranks, bitwise equal")

# %% [markdown]
"""
## Where it breaks: no averaging

Leave the all-reduce out and every rank still trains, its loss still falls, and nothing complains.
But there are now n different models, each trained on a part of the data. The distance of every
rank's weights from rank 0's:
"""

# %%
lonely = new_model(seed=0)
optimizer = sgd(lonely)
drift = []
for x, y in batches(rank, n).epoch(0):
    optimizer.zero_grad()
    cross_entropy(lonely(x.double()), y).backward()
    optimizer.step()
    everyone = comms.all_gather(torch.nn.utils.parameters_to_vector(lonely.parameters()).detach())
    drift.append(((everyone - everyone[0]).norm(dim=1) / everyone[0].norm()).tolist())

# %%
steps = range(1, len(drift) + 1)
figures.lines(
    {f"rank {r}": (steps, [row[r] for row in drift]) for r in range(1, n)} or {"": (steps, steps)},
    title="Without averaging every rank trains a model of its own",
    xlabel="training steps",
    ylabel="distance from rank 0",
)
assert n == 1 or min(drift[-1][1:]) > 1e-3
assert max(apart) < 1e-9

# %% [markdown]
"""
## Where it breaks: every rank shuffles for itself

Sharding takes for granted that the ranks cut up the *same* order of samples. If each rank
shuffles with its own generator, it takes its share of an order that nobody else has. Count how
often an epoch uses each sample:
"""


# %%
def times_used(order):
    used = torch.zeros(len(digits.train), device=comms.device)
    used[shard(order, rank, n)] += 1
    comms.all_reduce(used)
    return used


# %%
rows = []
for name, seed in (("one seed", 0), ("a seed for each rank", rank)):
    used = times_used(epoch_order(len(digits.train), epoch=0, seed=seed).to(comms.device))
    rows.append((name, int((used == 0).sum()), int((used == 1).sum()), int((used > 1).sum())))
comms.print(tabulate(rows, headers=["order from", "never used", "used once", "used again"]))
assert rows[0][1:] == (0, len(digits.train), 0)
assert n == 1 or rows[1][1] > 0

# %% [markdown]
"""
A loss curve does not show that part of the data is never seen in an epoch. The opposite slip is
to forget the epoch: then every epoch has the same order (with PyTorch's `DistributedSampler`,
that is a forgotten `set_epoch`). {class}`~microddp.data.ShardedBatches` asks for the epoch where
the batches are taken, so it cannot be forgotten:
"""

# %%
first, again, second = (epoch_order(1437, epoch) for epoch in (0, 0, 1))
comms.print("epoch 0 starts with samples", first[:8].tolist(), "on every rank")
comms.print("epoch 1 starts with samples", second[:8].tolist())
assert torch.equal(first, again)
assert not torch.equal(first, second)

# %% [markdown]
"""
## What it costs

The core's version is the same step with a place to record when things happen:

```{literalinclude} ../../microddp/schedule.py
:pyobject: naive_data_parallel_step
```

It must leave the weights that the version above leaves:
"""

# %%
ours, core = new_model(seed=0), new_model(seed=0)
ours_sgd, core_sgd = sgd(ours), sgd(core)
for x, y in batches(rank, n).epoch(0):
    train_step(ours, ours_sgd, x.double(), y)
    naive_data_parallel_step(core, cross_entropy, core_sgd, (x.double(), y), comms)
assert distance(core, ours) == 0.0

# %% [markdown]
"""
**Predict.** The first all-reduce starts when the last gradient is there. So the picture should
have two halves: all computation, then all communication, in which the processor has nothing to do
but move bytes. As in chapter 02, the clock runs on no more ranks than there are cores or GPUs:
"""

# %%
devices = torch.cuda.device_count() if comms.device.type == "cuda" else cpu_cores()
few = comms.subgroup(range(min(n, max(2, devices))))
spans = []
if few is not None:
    wide = new_model(0, torch.float32, dim=512)
    optimizer = sgd(wide)
    x, y = (shard(tensor[:BATCH], few.rank, few.world_size) for tensor in digits.train.tensors)
    for _ in range(5):
        naive_data_parallel_step(wide, cross_entropy, optimizer, (x, y), few)
    timeline = Timeline(few)
    naive_data_parallel_step(wide, cross_entropy, optimizer, (x, y), few, timeline)
    spans = timeline.gather()

# %%
if spans:
    few.print(f"{few.world_size} ranks, {human_bytes(gradient_bytes(wide))} of gradients")
    figures.timeline(spans, title="All communication comes after all computation")
    for r in range(few.world_size):
        computed = max(s.end for s in spans if s.rank == r and s.name == "backward")
        sent = [s for s in spans if s.rank == r and s.lane == "communication"]
        assert len(sent) == collectives
        assert all(span.start >= computed for span in sent)

# %% [markdown]
"""
**Measure.** One picture is one step. Here is the median of many, against one device that does the
whole batch in the same run:
"""

# %%
if few is not None:
    one = new_model(0, torch.float32, dim=512)
    one_sgd = sgd(one)
    whole = tuple(tensor[:BATCH] for tensor in digits.train.tensors)

    def local_step(batch):
        one_sgd.zero_grad()
        cross_entropy(one(batch[0]), batch[1]).backward()
        one_sgd.step()

    calls = {
        "one device, whole batch": lambda: local_step(whole),
        "one device, one shard": lambda: local_step((x, y)),
        "naive data parallel": lambda: naive_data_parallel_step(
            wide, cross_entropy, optimizer, (x, y), few
        ),
    }
    steps = measure(calls, few, repeat=21)

# %%
if few is not None:
    whole_time = steps["one device, whole batch"].median
    rows = [(name, str(timing), whole_time / timing.median) for name, timing in steps.items()]
    headers = ["step", "median (quartiles)", "times as fast"]
    few.print(tabulate(rows, headers=headers, floatfmt=".2f"))
    naive = steps["naive data parallel"].median
    share = 1 - steps["one device, one shard"].median / naive
    few.print(f"{share:.0%} of the data-parallel step is not computation")

# %% [markdown]
"""
A "device" is what one rank has: its share of the cores, or its GPU.

**Explain.** The second line is what n devices would reach if averaging were free. The third is
what they reach. Three things lie between: every gradient pays the start-up cost of a message,
although most are small; the bytes have to travel; and during both, nothing is computed. The batch
here is small for the model, which makes it worse: computation shrinks with the shard,
communication does not.

The next chapters take these apart. Gradients of the last layers are ready long before those of
the first, so their all-reduce can run while backward goes on. And small messages can travel
together.

## What to take along

- Replicate, shard, all-reduce the gradients, step: with equal shards and a mean loss this is the
  training of one device on the whole batch, to rounding.
- Nothing in the loop notices a wrong seed, a missing all-reduce or a private shuffle. Check
  replicas once at the start, and compare against one device in a test.
- The naive step communicates only after it has computed.

## Exercises

1. Halve the learning rate instead of averaging, for two ranks, and add the gradients. Why does
   that work for plain SGD?
2. Let every rank leave out the all-reduce of one bias. How long does it take until a test
   accuracy shows it? And `check_replicas`?
3. Send all gradients as one tensor: flatten, reduce once, copy back. How much of the gap closes?
   That is what buckets are for.
"""

# %%
if few is not None:
    few.close()
comms.close()
