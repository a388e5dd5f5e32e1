# %% [markdown]
r"""
# 06. The rest of DistributedDataParallel

What else does the real one do? Chapter 05's bucketed hooks ask two favours of their user: equal
models at the start, and a `finish()` after each backward. PyTorch's `DistributedDataParallel`, or
DDP, asks for neither, and has an answer where averaging gradients is not enough. This chapter
builds a small wrapper, goes through those answers with the book's own
{class}`~microddp.ddp.wrapper.DistributedDataParallel`, and puts it beside PyTorch's.
"""

# %% tags=["imports"]
import copy
import os
import time
from contextlib import nullcontext
from functools import partial
from itertools import islice
from textwrap import fill

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.bucketing import BucketedDDPHooks
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.ddp import DDP
from microddp.findings import compare, find
from microddp.model import FullMLP, SimpleCNN
from microddp.replicas import broadcast_parameters, check_replicas
from microddp.report import human_seconds, table
from microddp.shared import all_reduce_hook
from microddp.stage import cluster, set_stage
from microddp.timing import Timing, measure

# %%
os.environ.pop("MICRODDP_DEBUG", None)  # its checks are collectives, and would be counted
# sphinx_gallery_builds = "a small wrapper, and see what the full one adds"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
"""
## From hooks to a wrapper

**Predict.** The first favour takes a broadcast in the constructor. For the second, the wrapper must
know when backward ends. A parameter's hook cannot know whether it is the last. Autograd can: during
backward you may queue a *callback* that runs when it ends. (The call is not documented; PyTorch's
DDP uses it, too.) So the first gradient that comes queues one, and `finish()` can run there. Then
the user's loop is that of one device, and its result should be too, up to rounding.

**Build.**
"""


# %%
class SmallDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        broadcast_parameters(module, comms)
        self.module = module
        self.hooks = BucketedDDPHooks(module, comms)
        self.end_is_awaited = False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.gradient_came)

    def gradient_came(self, _parameter):
        if not self.end_is_awaited:
            self.end_is_awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ended)

    def backward_ended(self):
        self.end_is_awaited = False
        self.hooks.finish()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# %% [markdown]
"""
**Measure.** The same loop trains three models for five steps: a plain one on whole batches, and one
in each wrapper on this rank's shards. The wrapped ones start from another seed on each rank:
"""

# %%
digits = load_digits(comms.device)
K = 4  # micro-batches, in a later section
BATCH = n * K * max(1, 96 // (n * K))  # so that the ranks share it evenly


def new_model(seed, dtype=torch.float64, dim=64):
    torch.manual_seed(seed)
    return FullMLP(dim, inputs=64, outputs=10).to(comms.device, dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


# %%
def batches(for_rank, of):
    for x, y in islice(ShardedBatches(digits.train, BATCH, for_rank, of).epoch(0), 5):
        yield x.double(), y


# %%
def train(model, data, optimizer=None):
    optimizer = optimizer or sgd(model)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


# %%
single = train(new_model(seed=0), batches(0, 1))
rows = []
for name, wrap in {"SmallDDP": SmallDDP, "microddp.DDP": partial(DDP, comms=comms)}.items():
    wrapped = train(wrap(new_model(seed=rank)), batches(rank, n))
    check_replicas(wrapped, comms)
    rows.append((name, distance(weights(wrapped), weights(single))))
    assert rows[-1][1] < 1e-9
comms.print(table(rows, ["wrapper", "relative distance to one device"], floats=".1e"))

# %% [markdown]
"""
**Explain.** Broadcast and callback are enough where every parameter gets a gradient in every
backward, no buffer changes, each step has one backward, and all ranks have as many batches. What
follows is the rest.

## One iteration, call by call

**Predict.** The first iteration knows no order of gradients yet, so all of them travel in one
bucket. The second forward sends rank 0's order to all, and from then on there is one all-reduce
for each bucket. Each forward here also broadcasts rank 0's *buffers*, the model's tensors that are
not trained, all at once. A group numbers its collectives, so a call's count is the difference of
the numbers before it and after it:
"""


# %%
def collectives(call, *args):
    """How many collectives this rank's group runs during a call."""
    before = comms.group._get_sequence_number_for_group()
    call(*args)
    return comms.group._get_sequence_number_for_group() - before


def one_iteration(model, x, y):
    cross_entropy(model(x), y).backward()


# %%
cnn = DDP(SimpleCNN().to(comms.device, torch.float64), comms, bucket_cap_mb=0.5)
x, y = next(batches(rank, n))
counts = [collectives(one_iteration, cnn, x, y) for _ in range(3)]
buckets = len(cnn.reducer.buckets.all)
predicted = [1 + 1, 1 + 1 + buckets, 1 + buckets]
comms.print(f"buckets: {buckets}")
rows = zip((1, 2, 3), predicted, counts, strict=True)
comms.print(table(rows, ["collectives in iteration", "predicted", "counted"]))
assert counts == predicted

# %% [markdown]
"""
## Where it breaks: models that are not the same

A rank with another layer size would add numbers that do not belong together, or hang. So
microddp's constructor compares names, shapes and dtypes. Here the last rank has wider layers:
"""


# %% tags=["plumbing"]
def shown(call):
    """Print the error of a call that fails on every rank; say whether it did."""
    try:
        call()
    except RuntimeError as error:
        comms.print(fill(str(error), 90))
        return True
    comms.print("No error: this one needs two ranks; torchrun --nproc-per-node=4 starts four.")
    return False


# %%
odd = new_model(seed=0, dim=80 if rank == n - 1 else 64)
assert shown(lambda: DDP(odd, comms)) == (n > 1)

# %% [markdown]
"""
Different values are no error: rank 0's replace the others', and a checkpoint that only another rank
has loaded is lost. With `verify_replicas=True`, which PyTorch's wrapper lacks, they must be equal
already:
"""

# %%
assert shown(lambda: DDP(new_model(seed=rank), comms, verify_replicas=True)) == (n > 1)

# %% [markdown] index=["forward_sync_buffers", "broadcast_buffers", "buffers"]
"""
## Buffers: whose statistics?

Batch normalisation keeps a running mean and variance of what it has seen, in buffers. No gradient
flows into them, so nothing averages them.

**Predict.** Without help, each rank has the statistics of its own shards. With
`forward_sync_buffers=True`, the default, a forward pass starts from rank 0's. (Before PyTorch 2.13:
`broadcast_buffers`.) But the pass then adds each rank's own batch, so the ranks agree at the start
of a pass and not after it. And what they agree on has seen no samples but rank 0's.
"""


# %% tags=["plumbing"]
def statistics(model):
    return torch.cat([b.flatten() for b in model.buffers() if b.is_floating_point()])


def apart(everyone):
    """How far the ranks' rows are from rank 0's, at most."""
    return max(distance(row, everyone[0]) for row in everyone)


def new_cnn():
    torch.manual_seed(0)
    return SimpleCNN().to(comms.device, torch.float64)


# %%
alone = statistics(train(new_cnn(), batches(0, 1)))
rows = []
for sync in (False, True):
    cnn = train(DDP(new_cnn(), comms, forward_sync_buffers=sync), batches(rank, n))
    trained = comms.all_gather(statistics(cnn))
    cnn.eval()(digits.test.tensors[0][:96].double())
    evaluated = comms.all_gather(statistics(cnn))
    rows.append((sync, apart(trained), apart(evaluated), distance(evaluated[0], alone)))

# %% tags=["plumbing"]
headers = ["forward_sync_buffers", "trained", "evaluated", "rank 0 and one device"]
comms.print("relative distance of statistics: between ranks, and of rank 0 to one device")
comms.print(table(rows, headers, floats=".1e"))
assert rows[1][2] == 0.0
assert n == 1 or min(rows[0][1], rows[0][2], rows[1][1]) > 1e-3
assert abs(rows[0][3] - rows[1][3]) < 1e-9

# %% [markdown] index=["no_sync", "gradient accumulation"]
"""
**Explain.** The evaluation went through the wrapper, and so began with a broadcast. Through
`cnn.module` each rank would evaluate a model of its own. The broadcast makes the ranks agree, and
does no more: rank 0's statistics are as far from one device's with it as without.
`torch.nn.SyncBatchNorm` takes the statistics over all ranks instead, with collectives in the
forward pass; it works on GPUs only.

## Gradient accumulation, right and wrong

A batch that is too large for a device is cut into *micro-batches*, whose gradients add up in
`.grad` before one optimizer step. Only the sum has to be averaged over the ranks. Inside
`no_sync()` no gradient is sent, and the first backward outside averages all that has accumulated:
"""


# %%
def right(model, x, y, last):
    with nullcontext() if last else model.no_sync():
        loss = cross_entropy(model(x), y) / K
        loss.backward()


# %% [markdown]
"""
Each line can go wrong. A batch has the *mean* loss, so each loss must be divided by the number of
micro-batches. This one forgets that:
"""


# %%
def undivided(model, x, y, last):
    with nullcontext() if last else model.no_sync():
        loss = cross_entropy(model(x), y)
        loss.backward()


# %% [markdown]
"""
Whether gradients are averaged is decided where `forward` runs, so `no_sync()` around backward alone
comes too late. The version after it sets the flag that `no_sync()` sets, also too late: a forward
finds the flag of the micro-batch before.
"""


# %%
def around_backward(model, x, y, last):
    loss = cross_entropy(model(x), y) / K
    with nullcontext() if last else model.no_sync():
        loss.backward()


def flag_after_forward(model, x, y, last):
    loss = cross_entropy(model(x), y) / K
    model.require_backward_grad_sync = last
    loss.backward()


# %% [markdown]
"""
Last, the loop has to find the last micro-batch of a step, at `(i + 1) % K == 0`. The slip is
`i % K == 0`: the first step then has a single micro-batch, and the last ones of the run get no step
at all.
"""


# %%
def accumulate(micro_step, is_last=lambda i: (i + 1) % K == 0, steps=5):
    model = DDP(new_model(seed=0), comms, bucket_cap_mb=25)  # one bucket: if not set, 1 MiB first
    optimizer = sgd(model)
    large = list(batches(rank, n))[:steps]
    micro = [pair for x, y in large for pair in zip(x.chunk(K), y.chunk(K), strict=True)]
    count = 0
    for i, (x, y) in enumerate(micro):
        count += collectives(micro_step, model, x, y, is_last(i))
        if is_last(i):
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), count


# %% [markdown]
"""
**Predict.** The model fits into one bucket, so there is one all-reduce for each backward that
averages, and once a broadcast of the order. The right version averages in one backward of K.
`no_sync()` around backward averages in each, and should still get the right result: the average
of an average and new gradients is the average of all. An undivided loss makes gradients, and the
first step, K times as long: after it the weights miss by K - 1 times the right step. After that the
weights differ, and so do their gradients. The flag set too late averages only the first
micro-batch of a step, and the ranks part. The loop that is off by one groups the micro-batches
wrongly, in the same way on every rank.

**Measure.** Each version, in five steps, against one device that takes the large batches whole; the
undivided loss also in one. "Missed by" is the
distance of rank 0's weights from that device's, divided by how far its weights moved; "ranks
apart" the largest distance from rank 0's, divided by how far those moved:
"""

# %%
begin = weights(new_model(seed=0))
moved = {k: weights(train(new_model(0), islice(batches(0, 1), k))) - begin for k in (1, 5)}
rows = []
for name, arguments in {
    "right": (right,),
    "undivided loss": (undivided,),
    "no_sync around backward only": (around_backward,),
    "flag set after forward": (flag_after_forward,),
    "off by one": (right, lambda i: i % K == 0),
}.items():
    result, count = accumulate(*arguments)
    everyone = comms.all_gather(result) - begin
    rows.append((name, count, distance(everyone[0], moved[5]), apart(everyone)))
once, count = accumulate(undivided, steps=1)
everyone = comms.all_gather(once) - begin
rows.append(("undivided loss, one step", count, distance(everyone[0], moved[1]), apart(everyone)))

# %% tags=["plumbing"]
headers = ["version", "collectives", "missed by", "ranks apart"]
comms.print(table(rows, headers, floats=".1e"))

# %%
assert (rows[0][1], rows[2][1]) == (5 + 1, 5 * K + 1)
assert max(rows[0][2], rows[2][2]) < 1e-9
assert min(rows[1][2], rows[4][2]) > 0.01
assert abs(rows[5][2] - (K - 1)) < 1e-6
assert n == 1 or min(rows[3][2:]) > 1e-3

# %% [markdown] index=["find_unused_parameters", "unused parameters"]
"""
**Explain.** Ranks that part are found by comparing replicas. The undivided loss and the loop that
is off by one keep them equal: only a comparison with one device tells. And `no_sync()` around
backward alone changes no result: only the count of collectives tells.

The flag set too late is a real mistake. In build-nanogpt, with four micro-batches a step, the
validation loss after 1000 steps was 4.88, and 4.15 once the flag was set before forward ([pull
request 30](https://github.com/karpathy/build-nanogpt/pull/30), June 2024, eight A100 GPUs).

## Parameters that get no gradient

A bucket waits for all of its gradients. If a forward pass leaves a parameter out, as models with
branches do, one bucket is never full. This model has three heads, of which every rank picks one of
the first two:
"""


# %%
class ThreeHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.heads = nn.ModuleList(nn.Linear(32, 10) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](torch.relu(self.body(x)))


# %%
torch.manual_seed(0)
heads = ThreeHeads().to(comms.device, torch.float64)
x, y = next(batches(rank, n))
mine = rank % 2  # head 1 is left out by some ranks, head 2 by all
strict = DDP(copy.deepcopy(heads), comms)
cross_entropy(strict(x, mine), y).backward()
assert shown(lambda: strict(x, mine))

# %% [markdown]
"""
The backward itself did not complain: a model may have two outputs with a backward for each, so the
wrapper cannot know whether more gradients are to come. The next forward shows that none are. With
`find_unused_parameters=True` the wrapper follows the graph of the output back to the parameters,
before backward. Those that it does not meet count as zero.

**Predict.** Head 0 gets the mean of the gradients of the ranks with even numbers and zeros for
the others; head 1 that of the odd ones. Head 2 was used nowhere, so its `.grad` stays `None`: a
gradient of zero would still let momentum or weight decay change it. The ranks have to agree on
who used what, which takes one more all-reduce:
"""


# %% tags=["plumbing"]
def norms(model):
    """The norm of each head's gradient on every rank."""
    grads = [head.weight.grad for head in model.heads]
    texts = ["None" if grad is None else f"{grad.norm().item():.3f}" for grad in grads]
    return [", ".join(texts) for texts in zip(*comms.all_gather_data(texts), strict=True)]


# %%
alone, patient = copy.deepcopy(heads), DDP(heads, comms, find_unused_parameters=True)
cross_entropy(alone(x, mine), y).backward()
count = collectives(lambda: cross_entropy(patient(x, mine), y).backward())
rows = list(zip(("head 0", "head 1", "head 2"), norms(alone), norms(heads), strict=True))
comms.print("norm of the gradient on each rank")
comms.print(table(rows, ["", "alone", "averaged"]))
comms.print(f"collectives for {len(patient.reducer.buckets.all)} bucket: {count}")
assert count == 2
assert heads.heads[2].weight.grad is None

# %% tags=["plumbing"]
for i in range(min(n, 2)):
    weight = alone.heads[i].weight
    mean = torch.zeros_like(weight) if weight.grad is None else weight.grad
    comms.all_reduce_mean(mean)
    torch.testing.assert_close(heads.heads[i].weight.grad, mean)

# %% [markdown] index=["join", "uneven inputs"]
"""
A rank that did not use head 1 needs its gradient to take the same step as the others. The walk
through the graph and the all-reduce are paid for in every iteration. If every iteration leaves out
the same parameters, `static_graph=True` finds out once.

## Where it breaks: uneven inputs

Suppose rank 0 has one batch fewer than the others. It leaves its loop; the others call an
all-reduce, and wait for a rank that does not come, until the time-out, which is set to one second
here and usually is minutes. (With NCCL a time-out ends the process, so there this cell does
nothing.)
"""

# %%
if n > 1 and comms.backend == "gloo":
    comms.barrier()  # the time-out counts while the group is made, too
    hasty, problem = comms.subgroup(range(n), timeout=1.0), "has finished"
    try:
        train(DDP(new_model(seed=0), hasty), list(batches(rank, n))[: 2 if rank == 0 else 3])
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problems = comms.all_gather_data(problem)
    comms.print(f"rank 0: {problems[0]}\n{fill(problems[1], 90)}")
    assert [text == "has finished" for text in problems] == [True] + [False] * (n - 1)
    hasty.close()
else:
    comms.print("No error: this one needs two ranks, and gloo.")

# %% [markdown]
r"""
Inside `with model.join():` a rank that has run out takes part in the others' collectives with
gradients of zero, and at the end it gets the weights of a rank that trained to the end. What
remains is the question of chapter 01: which average?

**Predict.** Take a step for which rank 0 has no samples, and every other rank has 16. The mean
over *all* ranks, which is the default, counts the missing gradient as zero, so the step is
$\frac{n-1}{n}$ of what one device would do with the same samples: it misses by $\frac{1}{n}$. The
mean over the ranks that have a batch (`divide_by_initial_world_size=False`) is right:
"""


# %%
def uneven_step(by_all):
    """What a step without samples on rank 0 misses, as a share of the right step."""
    images, labels = (tensor[: 16 * (n - 1)] for tensor in digits.train.tensors)
    model, begin = DDP(new_model(0), comms), weights(new_model(0))
    single = train(new_model(0), [(images.double(), labels)])
    mine = slice(16 * (rank - 1), 16 * rank)
    with model.join(divide_by_initial_world_size=by_all):
        if rank > 0:
            train(model, [(images[mine].double(), labels[mine])])
    check_replicas(model, comms)
    return distance(weights(model) - begin, weights(single) - begin)


# %%
if n > 1:
    means = {"all ranks": True, "ranks with a batch": False}
    rows = [(name, uneven_step(by_all)) for name, by_all in means.items()]
    comms.print(table(rows, ["mean over", "step misses by"], floats=".1e"))
    assert abs(rows[0][1] - 1 / n) < 1e-9
    assert rows[1][1] < 1e-9
else:
    comms.print("Uneven inputs take two ranks; torchrun --nproc-per-node=4 starts four.")

# %% [markdown] index=["communication hook", "comm hook"]
r"""
**Explain.** If rank 0 has a smaller batch instead of none, neither mean is right: it counts as much
as the others. Then divide the *sum* of a rank's losses by the samples of all ranks, and multiply by
$n$, because the wrapper divides by $n$.

## Something else instead of an all-reduce

The all-reduce can be replaced. A *communication hook* is given each full bucket, and returns a
*future*: a promise of what the bucket should become. The book's buckets have the methods of
PyTorch's, so PyTorch's hooks work on them: `fp16_compress_hook` sends half the bytes of `float32`.
And {func}`~microddp.shared.comm_hook.all_reduce_hook` takes any all-reduce of chapter 02.

**Predict.** The ring adds in an order of its own, so it may round differently. Numbers in `float16`
have 11 significant bits, so each rounding is off by up to $2^{-12}$ to $2^{-11}$ of a number, and
the gradient by a few $10^{-4}$ of itself:
"""


# %%
def gradient(*hook):
    model = DDP(new_model(0, torch.float32), comms)
    if hook:
        model.register_comm_hook(*hook)
    x, y = next(batches(rank, n))
    one_iteration(model, x.float(), y)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %%
plain = gradient()
rows = [("none", 0.0)]
for name, state, hook in (
    ("fp16_compress_hook", comms.group, fp16_compress_hook),
    ("all_reduce_hook, ring", (comms, ring_all_reduce), all_reduce_hook),
):
    rows.append((name, distance(gradient(state, hook), plain)))
comms.print(table(rows, ["hook", "gradient off by"], floats=".1e"))
assert rows[1][1] < 1e-3
assert rows[2][1] < 1e-6

# %% [markdown]
r"""
Half the bytes cost 13 of the 24 significant bits of each gradient, and much of the range: what is
below $3 \cdot 10^{-8}$ after the division by $n$ becomes zero.

## Face to face

**Predict.** Both wrappers divide before the sum, fill the same buckets with the same gradients, and
call the same all-reduces in the same order. So every gradient and weight must agree bit for bit.
"""

# %%
ours = DDP(new_model(0, torch.float32, dim=128), comms, bucket_cap_mb=0.25)
theirs = TorchDDP(copy.deepcopy(ours.module), process_group=comms.group, bucket_cap_mb=0.25)
optimizers = [sgd(ours), sgd(theirs)]
rows = []

# %%
for i, (x, y) in enumerate(islice(batches(rank, n), 3)):
    counts = []
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        optimizer.zero_grad()
        counts.append(collectives(one_iteration, model, x.float(), y))
        optimizer.step()
    rows.append((i + 1, *counts))
    assert i == 1 or counts[0] == counts[1]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert torch.equal(p, q)

# %% tags=["plumbing"]
headers = ["collectives in iteration", "microddp.DDP", "torch DDP"]
comms.print(table(rows, headers))

# %% tags=["plumbing"]
mine = ", ".join(str(bucket.buffer().nbytes) for bucket in ours.reducer.buckets)
other = theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
rows = [("microddp.DDP", mine), ("torch DDP", other)]
comms.print(table(rows, ["wrapper", "buckets, bytes"]))
assert mine == other

# %% [markdown]
r"""
The asserts found every bit equal. In the second iteration the ranks agree on the buckets: PyTorch
sends the buckets' parameters and then their sizes, this wrapper only the order of the gradients,
from which every rank makes the same plan.

## What it all gained

**Predict.** On the stage of chapters 03 to 05, a step that averages naively takes $C + M$ and all
starts. Hooks, buckets and both wrappers hide what they can, and nothing can take less than $\max(C,
\frac{1}{3} C + M)$. ($C$ is the pauses alone; speed-ups count the whole step of one device.) The
wrappers send what the buckets send, and should take as long.

**Measure.** All ways, in turns, buckets with a cap of 1 MiB:
"""

# %%
there = cluster("a100", "25gbit", nodes=n, node=1, parameters=355e6, tokens=24_576, layers=24)
stage = set_stage(comms, there, layer_bytes=3 << 17)
comms.print(stage)
WAYS = {
    "naive (03)": ("naive", None),
    "hooks (04)": ("hooks", None),
    "buckets (05)": ("bucketed", 1),
    "microddp.DDP": ("ddp", 1),
    "PyTorch's DDP": ("torch", 1),
}
calls = {"one device": stage.step("none")}
calls |= {name: stage.step(*way) for name, way in WAYS.items()}

# %% [markdown]
"""
Hooks in Python take processor time, where PyTorch's are C++. So the processor time of both wrappers
is taken in the same steps:
"""

# %%
spent = {"microddp.DDP": [], "PyTorch's DDP": []}


def counting(name, call):
    """A call that also keeps the seconds of processor time that this rank takes in it."""

    def counted():
        begun = time.process_time()
        call()
        spent[name].append(time.process_time() - begun)

    return counted


# %%
calls |= {name: counting(name, calls[name]) for name in spent}
steps = measure(calls, comms, warmup=1, repeat=5)
device = steps.pop("one device")

# %%
speeds = {name: stage.speed_up(step, device) for name, step in steps.items()}
best = max(speeds, key=lambda name: speeds[name].ratio)
figures.speed_ups(
    {name: speed.times for name, speed in speeds.items()},
    n,
    title=f"{n} devices, by how gradients are averaged: up to {speeds[best].ratio:.2f}",
)

# %% tags=["plumbing"]
predicted = dict.fromkeys(WAYS, "")
if stage.sides and n > 1:
    here = stage.sides[1]
    least = human_seconds(max(here.compute, here.compute / 3 + here.messages))
    predicted = dict.fromkeys(WAYS, f"at least {least}")
    guess = here.compute + here.messages + here.layers * here.start
    predicted["naive (03)"] = human_seconds(guess)
rows = [(name, predicted[name], step, str(speeds[name])) for name, step in steps.items()]
rows = [("one device", "", device, ""), *rows]
headers = ["", "predicted", "step, median (quartiles)", "beside one device (ratios)"]
comms.print(table(rows, headers))

# %% tags=["plumbing"]
gain, top = compare(steps[best], steps["naive (03)"]), speeds[best]
rivals = [name for name in WAYS if name != best and not compare(steps[best], steps[name]).faster]
beside = f", not told apart from {' and '.join(rivals)}" if rivals else ""
said = (
    f"{best}{beside}: its step is {gain} as averaging after backward, and {n} devices are {top} "
    f"as one, {n - top.ratio:.2f} short of {n}."
)

# %% tags=["plumbing"]
find(
    comms,
    "climax",
    overlap=(n > 1 and gain.faster, f"Fastest is {said}"),
    nothing=(n > 1 and not gain.faster, f"No way clearly beats the naive one. Fastest is {said}"),
    alone=(n == 1, "One rank has nothing to average."),
)
buckets = compare(steps["buckets (05)"], steps["hooks (04)"])
said = buckets.say("A step of buckets", "one of hooks")
said += ", so it shows nothing of what chapter 05 measures." if buckets.alike else "."
find(comms, "buckets", **buckets.sides(said))
wrappers = compare(steps["microddp.DDP"], steps["PyTorch's DDP"])
said = wrappers.say("A step of microddp.DDP", "one of PyTorch's DDP")
for name in spent:
    as_long = compare(steps[name], steps["buckets (05)"])
    said += f". {as_long.say(f'One of {name}', 'one of the buckets, which send the same')}"
    said += "" if as_long.alike else ": against the prediction"
said += "."
find(comms, "wrappers", **wrappers.sides(said))

# %% [markdown]
"""
**Explain.** None of these can hide what takes longer than backward. (Where a step takes another
time than was predicted, or than another way that sends the same, this page does not show why.) To
send fewer bytes is the subject of chapters 10 and
11. And the processor time, the mean over the ranks? Where ranks share cores, a millisecond of each
rank is several of a core:
"""

# %% tags=["plumbing"]
steps_timed = len(device.seconds)  # without the first, which warms up
taken = torch.tensor([seconds[-steps_timed:] for seconds in spent.values()], device=comms.device)
comms.all_reduce_mean(taken)
mine, theirs = (round(1e3 * Timing(tuple(row)).median, 1) for row in taken.tolist())
crowd = comms.ranks_on_cores / comms.cores
said = f"A step takes {mine:.1f} ms of a rank's processor time with microddp.DDP, {theirs:.1f} ms"
said = f"{said} with PyTorch's"
ours, pytorchs = (1e3 * steps[name].median for name in spent)
find(
    comms,
    "processor-time",
    shared=(
        n > 1 and crowd > 1,
        f"{said}. All {comms.ranks_on_cores} ranks together keep the {comms.cores} cores busy for "
        f"{crowd * mine / ours:.0%} of a step with microddp.DDP, {crowd * theirs / pytorchs:.0%} "
        f"with PyTorch's. The difference in processor time, of all ranks by the cores, is "
        f"{crowd * (mine - theirs):+.1f} ms a step, and the steps differ by "
        f"{ours - pytorchs:+.1f} ms. Whether one is the cause of the other is not shown.",
    ),
    own=(n > 1 and crowd <= 1, f"{said}, and each rank has a core."),
    alone=(n == 1, "One rank waits for no other."),
)

# %% [markdown]
"""
## What I would set

| argument | set it | because |
|---|---|---|
| `gradient_as_bucket_view` | `True` | half the memory of gradients and buckets (chapter 05) |
| `bucket_cap_mb` | try 5, 25 and 100 | the best depends on alpha, beta and backward (chapter 05) |
| `find_unused_parameters` | only if a forward leaves some out | it searches each forward's graph |
| `static_graph` | if every step uses the same parameters | it finds unused ones once |
| `forward_sync_buffers` | `False` if no buffer ever changes | it serves nobody then |
| `no_sync()` | around forward *and* backward of all but the last | one average a step |

:::{admonition} On GPUs
What each way can gain at most follows from $n$ and $M/C$, and where messages are many, from their
starts. What differs from this stage: the CPU only queues work, so Python costs nothing as long as
the GPU has some left; and NCCL's kernels compute the sums on the GPU itself, and slow backward down
meanwhile. Small models leave a GPU nothing: on an H100, NCCL with one rank, a step of
`microddp.DDP` was 0.96 times as fast as one of PyTorch's (geometric mean of the twelve cases of
`python -m microddp.bench ddp`, torch 2.11, the same on 26 and on 28 November 2026). In the worst
case, 16 buckets of 4 MiB, it was 0.79 times as fast on the first day, and 0.84 on the second. With
$M/C$ below two thirds all can be hidden (chapter 04). Far below, as on 8 H100 of a node, there is
little to hide, and the ways hardly differ.
:::

## What to take along

- A broadcast, hooks and a callback at the end of backward make `loss.backward()` average.
- Gradients are averaged, buffers are not: rank 0's are copied. Whether gradients are averaged is
  decided where `forward` runs.
- A missing gradient is an error in the next forward, and a missing rank one after the time-out. A
  sample or a micro-batch that counts too much is no error at all: compare with one device.

## Exercises

**The lab.** Write a small DDP that has no `finish()`. {doc}`It is checked </labs>` on 1, 2, 3 and 4
ranks.

```console
$ python -m microddp.labs start 06
```

1. Remove the broadcast from `SmallDDP`. Which line of this chapter is the first to notice? Put it
   back, and wrap `ThreeHeads`. When does `SmallDDP` complain about the other heads, when does the
   full wrapper, and for which model does the difference matter?

   <details class="solution"><summary>Solution</summary>

   The first to notice is `check_replicas` after the training: every rank applies the same averages
   to weights of its own.

   `SmallDDP` raises at the end of the first `backward()`, where its `finish()` finds buckets that
   are not full. The full wrapper raises in the next forward. This matters for a model with two
   outputs and a backward for each: there the full wrapper and PyTorch's wait for the second
   backward, and average then.

   </details>

2. Clip the gradients to a norm, with accumulation. Where in the loop must the clipping stand? What
   happens if it stands inside `no_sync()`, and which check finds that?

   <details class="solution"><summary>Solution</summary>

   It stands once in a step, after the last backward and before `optimizer.step()`. There every rank
   has the gradient of the whole batch, and scales it as one device would.

   ```python
   with nullcontext() if last else model.no_sync():
       (cross_entropy(model(x), y) / K).backward()
   if last:
       nn.utils.clip_grad_norm_(model.parameters(), 0.5)
       optimizer.step()
       optimizer.zero_grad()
   ```

   Inside `no_sync()` each rank scales a part of its own sum by a factor of its own, and the last
   micro-batch is not scaled at all. The average comes after that, so the ranks stay equal to the
   bit, and `check_replicas` finds nothing. Only a comparison with one device does.

   </details>

3. Call the model twice before any backward, `a = loss(model(x1))` and `b = loss(model(x2))`, as
   training loops with two losses do. Compare `(a + b).backward()` with `a.backward()` and then
   `b.backward()`. What is averaged in each, with this wrapper and with PyTorch's?

   <details class="solution"><summary>Solution</summary>

   The sum has one backward. Each hook is called once, with the sum of both gradients, and that is
   averaged. With two backwards, only the first is: the second adds each rank's own gradient to the
   average. There is no error, and the ranks part at the next step. PyTorch's wrapper does the same.
   (With buffers that backward needs, a second forward before it is an error there: it overwrites
   them.)
   Add the losses, or finish one backward before the next forward.

   </details>
"""

# %%
comms.close()
