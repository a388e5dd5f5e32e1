# %% [markdown]
r"""
# 05. Gradient bucketing

Why do small messages cost so much? Because a message has a price that does not depend on its
size. A model has many parameters, most of them small, and chapter 04 sends each gradient on its
own. This chapter measures that price, puts gradients into *buckets* that travel as one message,
and looks for the best size of a bucket: too small and the price is paid too often, too large and
the first message starts too late.
"""

# %% tags=["imports"]
import copy
import itertools
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import microddp
from microddp import figures
from microddp.allreduce import fit_alpha_beta
from microddp.bucketing import BucketedDDPHooks
from microddp.buckets import plan_buckets
from microddp.data import ShardedBatches, load_digits
from microddp.model import FullMLP, SimpleCNN, gradient_bytes
from microddp.performance import (
    compare_strategies,
    cores_for_each_rank,
    measure_all_reduce,
    measure_compute,
    predict_plan,
)
from microddp.report import MIB, human_bytes, human_seconds, mark_least, table
from microddp.step_times import ComputeTimes
from microddp.timing import measure
from microddp.workloads import Transformer

# %%
# sphinx_gallery_builds = "a bucket plan, and hooks that follow it"
# sphinx_gallery_hosts = "4 x 500mbit"
comms = microddp.init()
comms.print(comms.describe())

# %% [markdown]
"""
## The price of a message

As before, ranks that have no core or GPU of their own leave, and the chapter is for the others:
"""

# %%
timed = comms.timed()
rank, n = timed.rank, timed.world_size
timed.print(f"{n} of {comms.world_size} ranks stay")
if n == 1:
    timed.print("One rank sends nothing: its all-reduces below are calls without a message.")

# %% [markdown]
r"""
Chapter 02 fitted $t(m) = \alpha + \beta m$ to single messages. The same line fits a whole
all-reduce, in which $\alpha$ stands for the start of all its rounds. (It cannot be compared with
chapter 02's: fewer ranks share the cores here.) On hosts in a box only $\alpha$ needs to be fitted,
to what is left of the small messages' times: $\beta$ is the links' own. Here is the backend's, by
size. Each call reduces another part of a large tensor, because a step's gradients are not in the
cache either:
"""

# %%
POOL = torch.zeros(2**24, device=timed.device)  # 64 MiB


def reduce_next(count, starts):
    timed.all_reduce(POOL.narrow(0, next(starts), count))


calls = {}
for nbytes in (2**k for k in range(10, 24)):
    starts = itertools.cycle(range(0, len(POOL), nbytes // 4))
    calls[nbytes] = partial(reduce_next, nbytes // 4, starts)

# %%
timings = measure(calls, timed, repeat=11)
alpha, beta = fit_alpha_beta(list(timings), [t.median for t in timings.values()])
timed.print(f"alpha {human_seconds(alpha)}, beta {beta * 1e9:.3f} ns/byte")
if timed.box:  # each rank sends 2 (n-1)/n of the bytes, over a link of known speed
    known = timed.box.seconds_per_byte * 2 * (n - 1) / n
    alpha, beta = fit_alpha_beta(list(timings), [t.median for t in timings.values()], known)
    found = f"alpha {human_seconds(alpha)}, beta {beta * 1e9:.3f} ns/byte"
    timed.print(f"from the links' speed: {found}")
if beta > 0:  # else the size made no difference
    timed.print(f"{human_bytes(alpha / beta)} take as long to send as a message takes to start")
figures.times_by_size(
    {"all-reduce": timings},
    models={"all-reduce": lambda m: alpha + beta * m},
    title=f"{human_seconds(alpha)} to start, {human_seconds(max(beta, 0) * MIB)} for each MiB"
    + (", the links' own" if timed.box else ""),
)

# %% [markdown]
r"""
**Predict.** Take a narrow, deep model. Its $P$ gradients have $S$ bytes in all. Sent one by one
they cost $P\alpha + \beta S$; together, $\alpha + \beta S$.

**Measure.** Both ways, without a forward or a backward beside them:
"""

# %%
narrow = FullMLP(64, depth=128).to(timed.device)


def reduce_all(tensors):
    for tensor in tensors:
        timed.all_reduce(tensor)


# %%
apart = [torch.zeros_like(p) for p in narrow.parameters()]
together = [torch.cat([tensor.flatten() for tensor in apart])]
S = together[0].nbytes
times = measure({len(t): partial(reduce_all, t) for t in (apart, together)}, timed)
rows = [(p, human_seconds(p * alpha + beta * S), t) for p, t in times.items()]
timed.print(f"{human_bytes(S)} of gradients, {n} ranks")
timed.print(table(rows, ["messages", "predicted", "measured, median (quartiles)"]))
timed.print(f"one by one takes {times[len(apart)].ratio(times[1]).median:.2f} times as long")

# %% [markdown] index=["bucket", "first bucket"]
"""
The bytes are the same, so the difference is the starts'. A shaped link gives some of it back: what
is sent first after a pause, here 36 KiB, passes at once. So a small message takes less than the
line says.

## The plan

Which gradients should travel together? Those that are ready at about the same time. Backward goes
through the model from its end to its beginning, so the parameters are taken in *reverse* order.
A bucket takes one after the other until it has reached its *cap*; then the next one begins. A
parameter is never split, so a bucket may exceed its cap. The first bucket can have a smaller cap
than the others; a later section asks what that is good for.

**Build.**
"""


# %%
def plan(parameters, first, cap):
    """Indices of the parameters of each bucket; caps in bytes."""
    buckets, size, limit = [[]], 0, first
    for i in reversed(range(len(parameters))):
        if size >= limit:
            buckets.append([])
            size, limit = 0, cap
        buckets[-1].append(i)
        size += parameters[i].nbytes
    return buckets


# %%
def sizes(parameters, buckets):
    return [sum(parameters[i].nbytes for i in bucket) for bucket in buckets]


# %% [markdown]
"""
For a small convolutional network, with caps that suit its size:
"""

# %%
cnn = SimpleCNN()
names, tensors = zip(*cnn.named_parameters(), strict=True)
buckets = plan(tensors, first=64 << 10, cap=256 << 10)
rows = [
    (human_bytes(size), "\n".join(f"{names[i]} ({tensors[i].nbytes})" for i in bucket))
    for size, bucket in zip(sizes(tensors, buckets), buckets, strict=True)
]
timed.print(table(rows, ["bucket", "parameters (bytes)"], form="grid"))

# %% [markdown]
"""
Reverse order is a guess: that the model uses its parameters in the order in which it names them.
This model names all its convolutions before all its normalisations, though it alternates between
them. The result is right all the same, but a bucket waits longer for its last gradient. PyTorch's
`DistributedDataParallel`, or DDP, plans anew after the first step, in the order in which the
gradients came.

## A published plan

In 2020 somebody traced the all-reduces of ResNet-18 under PyTorch's DDP ([issue
48880](https://github.com/pytorch/pytorch/issues/48880)), and wondered why some were larger than
the cap. To plan, shapes are enough. Tensors on PyTorch's *meta* device have a shape and no
memory:
"""


# %%
def resnet18():
    """The parameters of ResNet-18, in torchvision's order."""

    def convolution(size, before, after):  # and the weight and bias of its normalisation
        return [(after, before, size, size), (after,), (after,)]

    shapes = convolution(7, 3, 64)
    for before, after in itertools.pairwise((64, 64, 128, 256, 512)):
        shapes += convolution(3, before, after) + convolution(3, after, after)
        if before != after:  # the shortcut changes shape, too
            shapes += convolution(1, before, after)
        shapes += convolution(3, after, after) + convolution(3, after, after)
    shapes += [(1000, 512), (1000,)]
    return [torch.empty(shape, device="meta") for shape in shapes]


# %%
PUBLISHED = {25: [2052000, 28852224, 15853824], 35: [2052000, 38297600, 6408448]}
resnet = resnet18()
plans = {cap: plan(resnet, first=MIB, cap=cap * MIB) for cap in PUBLISHED}
for cap, published in PUBLISHED.items():
    timed.print(f"cap {cap} MiB: {sizes(resnet, plans[cap])}, published {published}")
    assert sizes(resnet, plans[cap]) == published

# %% tags=["plumbing"]
figures.buckets(
    {
        f"cap {cap} MiB": [[resnet[i].nbytes for i in bucket] for bucket in buckets]
        for cap, buckets in plans.items()
    },
    title="ResNet-18, from its last parameter to its first: three buckets",
)

# %% [markdown]
"""
Each colour is a bucket, each cell a parameter. The sizes are the published ones, to the byte. The
first bucket is the classifier at the end of the network, which fills it at once.

PyTorch's own planner can be called, too. It should make the same plans for more models and caps,
and so should microddp's, which also keeps dtypes and devices apart:
"""


# %%
def in_reverse(planner, tensors, *caps):
    """The plan of one that takes tensors in the order given."""
    last = len(tensors) - 1
    return [[last - i for i in bucket] for bucket in planner(tensors[::-1], caps)]


def torch_planner(tensors, caps):
    return dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors))[0]


# %%
torch.manual_seed(0)
deep = FullMLP(256, depth=32).to(timed.device)
parameters, total = list(deep.parameters()), gradient_bytes(deep)
transformer = Transformer(vocabulary=1024, dim=128, depth=4, heads=4, context=32)

# %%
several = {"CNN": cnn, "MLP": deep, "transformer": transformer}
models = {name: list(model.parameters()) for name, model in several.items()}
models["ResNet-18"] = resnet
for tensors in models.values():
    for caps in itertools.product((1, 1 << 16, MIB), (1, 1 << 18, MIB, 25 * MIB)):
        ours = plan(tensors, *caps)
        assert ours == in_reverse(plan_buckets, tensors, *caps)
        assert ours == in_reverse(torch_planner, tensors, *caps)
timed.print(f"equal to PyTorch's plan and microddp's: {', '.join(models)}, at 12 pairs of caps")

# %% [markdown]
"""
## The hooks

**Build.** A bucket is one flat tensor, and each of its gradients has a *view* of it: a tensor of
the parameter's shape that shares the flat one's memory. What is written to the view is in the
message, without another copy:
"""


# %%
class Bucket:
    def __init__(self, parameters):
        counts = [p.numel() for p in parameters]
        self.parameters = parameters
        self.flat = parameters[0].new_zeros(sum(counts))
        parts = self.flat.split(counts)
        self.views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self.reset()

    def reset(self):
        self.missing, self.work = len(self.parameters), None


# %% [markdown]
"""
A hook on each parameter fills its view and counts. A bucket that misses nothing is sent, but only
after those before it: all ranks must send the same buckets in the same order. Backward goes on
while they travel. `finish` waits, and makes the buckets ready for the next step:
"""


# %%
class Hooks:
    def __init__(self, model, comms, plan):
        self.comms, self.sent, parameters = comms, 0, list(model.parameters())
        self.buckets = [Bucket([parameters[i] for i in members]) for members in plan]
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self.ready, bucket, view))

    def ready(self, bucket, view, parameter):
        torch.mul(parameter.grad, 1 / self.comms.world_size, out=view)
        parameter.grad = view
        bucket.missing -= 1
        self.send_full()

    def send_full(self):
        while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
            bucket = self.buckets[self.sent]
            bucket.work = self.comms.all_reduce(bucket.flat, async_op=True)
            self.sent += 1

    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.reset()
        self.sent = 0


# %% [markdown]
"""
Do they train as one device does on the whole batch, and exactly as microddp's
{class}`~microddp.bucketing.BucketedDDPHooks` with the same plan? One epoch on the digits, in
`float64`:
"""

# %%
digits = load_digits(timed.device)
BATCH = 96 - 96 % n  # so that the ranks share it evenly
CAP = 256 << 10


# %%
def train(hook, rank, n):
    torch.manual_seed(0)
    model = FullMLP(64, outputs=10).to(timed.device, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hooks = hook(model)
    for x, y in ShardedBatches(digits.train, BATCH, rank, n).epoch(0):
        optimizer.zero_grad()
        cross_entropy(model(x.double()), y).backward()
        if hooks:
            hooks.finish()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
weights = train(lambda m: Hooks(m, timed, plan(list(m.parameters()), CAP, CAP)), rank, n)
core = train(lambda m: BucketedDDPHooks(m, timed, CAP / MIB), rank, n)
alone = train(lambda _: None, 0, 1)
apart = ((weights - alone).norm() / alone.norm()).item()
timed.print(f"bitwise equal to microddp's: {torch.equal(weights, core)}")
timed.print(f"{apart:.1e} from one device on the whole batch")
assert torch.equal(weights, core)
assert apart < 1e-9

# %% [markdown] index=["bucket size", "bucket_cap_mb"]
r"""
## Step time by bucket size

**Predict.** A step has a forward, a backward and its messages. In this model all layers are
alike, so half of the gradients are ready after half of backward, and so on. A bucket of $m$ bytes
leaves when it is full and the one before it has arrived, and takes $\alpha + \beta m$. There are
two extremes. If messages travel without help from the processor, they are *hidden* behind
backward, and only what is left after it counts. If the processor has to carry them, each second
of communication is a second less for backward, and *nothing is hidden*, whenever they start:
"""


# %%
def predict(sizes, hidden, faster=1):
    """Seconds of a step that sends buckets of these sizes, over a network so many times as fast."""
    ready, arrived = forward, 0.0
    for nbytes in sizes:
        ready += backward * nbytes / total
        starts = max(ready if hidden else forward + backward, arrived)
        arrived = starts + (alpha + beta * nbytes) / faster
    return arrived


# %%
CAPS = {"alone": 1} | {human_bytes(2**k): 2**k for k in (19, 20, 21, 22, 23)}
x, y = torch.randn(2, 1152, 256, device=timed.device)
sent = {name: sizes(parameters, plan(parameters, cap, cap)) for name, cap in CAPS.items()}


# %%
def step(model, hooks):
    model.zero_grad()
    mse_loss(model(x), y).backward()
    if hooks:
        hooks.finish()


def bucketed_step(plan, comms):
    replica = copy.deepcopy(deep)
    return partial(step, replica, Hooks(replica, comms, plan))


def naive_step():
    step(deep, None)
    reduce_all([parameter.grad for parameter in parameters])


# %% [markdown]
"""
Forward and backward are measured with the same hooks in a group of one rank, which fills its
buckets and has nobody to send them to. That happens in the same rounds as the steps that are
predicted, because a machine changes its pace. There is one replica for each cap, and the naive step
of chapter 03, which sends one gradient after the other when backward is over:
"""

# %%
solo = [timed.subgroup([r]) for r in range(n)][rank]
both = bucketed_step(plan(parameters, total, total), solo)
calls = {name: bucketed_step(plan(parameters, cap, cap), timed) for name, cap in CAPS.items()}
calls |= {"naive": naive_step, "forward": lambda: mse_loss(deep(x), y), "both": both}
steps = measure(calls, timed, warmup=1, repeat=4)
naive, compute, together = (steps.pop(name) for name in ("naive", "forward", "both"))

# %%
forward = compute.median
backward = together.median - forward
predicted = {name: (predict(s, True), predict(s, False)) for name, s in sent.items()}
after = forward + backward + len(parameters) * alpha + beta * total
timed.print(f"forward {human_seconds(forward)}, backward {human_seconds(backward)}")
for i, what in enumerate(("messages are hidden", "nothing is hidden")):
    best = min(predicted, key=lambda name, i=i: predicted[name][i])
    timed.print(f"best cap if {what}: {best}, {human_seconds(predicted[best][i])} a step")

# %% [markdown]
"""
If messages are hidden, the prediction is a valley. On its left are start-up costs, unless backward
is long enough to hide them too; on its right, a message that cannot start before backward is
almost over. If nothing is hidden, larger caps can only help.

**Measure.** The steps, beside both predictions:
"""

# %% tags=["plumbing"]
marked = mark_least([str(steps[name]) for name in CAPS], [steps[name].median for name in CAPS])
rows = [
    (name, len(sent[name]), *map(human_seconds, predicted[name]), timing)
    for name, timing in zip(CAPS, marked, strict=True)
]
rows.append(("naive", len(parameters), "", human_seconds(after), f"{naive}"))
headers = ["cap", "all-reduces", "all hidden", "none hidden", "measured (quartiles), * least"]
timed.print(table(rows, headers))
best = min(steps, key=lambda name: steps[name].median)
for name in ("alone", best):
    timed.print(f"naive takes {naive.ratio(steps[name]).median:.2f} times cap '{name}', by rounds")

# %% tags=["plumbing"]
average = [total / len(s) / MIB for s in sent.values()]
curves = {"measured": [t.median * 1e3 for t in steps.values()]}
for i, name in ((1, "none hidden"), (0, "all hidden")):
    curves[name] = [pair[i] * 1e3 for pair in predicted.values()]
ends = steps["alone"], steps["8 MiB"]
valley = all(steps[best].clearly_below(end) for end in ends)
figures.lines(
    {name: (average, curve) for name, curve in curves.items()},
    title=f"A valley: buckets of {best} beat both ends"
    if valley
    else f"{best} took least in this run; it is not clearly better than both ends",
    xlabel="average bucket, MiB",
    ylabel="one step, ms",
    log="x",
)

# %% [markdown]
"""
**Explain.** From left to right, messages are saved, and with each its start-up cost. The two
predictions meet at a single bucket, which leaves nothing to hide. Left of that, the measured curve
tells who carries the messages. Over a link of its own most of a message is waiting, and all but the
left end should lie nearer to "all hidden"; over loopback the cores do all of it, and the curve
should lie nearer to "none hidden". Neither prediction knows that a message which starts inside
backward costs more than its alpha, since it takes the core from backward. That makes many small
messages dearer than "all hidden" says, and the valley's left side steeper.

Chapter 08 has a model between the extremes: a message takes from backward the cores that carry it,
and no more. It needs to know how many those are, and when each gradient is ready. Both are measured
here. Forward and backward are those of above, and what is ready after a tenth of the backward here
is taken to be ready after a tenth of that one:
"""

# %%
alone = measure_compute(
    deep, mse_loss, (x, y), lambda net: torch.optim.SGD(net.parameters()), timed, repeat=3
)
ready = {name: t / alone.backward * backward for name, t in alone.ready.items()}
# The steps above have no optimizer, and their hooks' copies are a part of backward.
alone = ComputeTimes(forward, backward, ready, optimizer=0.0, copy=0.0)

# %%
cost = replace(measure_all_reduce(timed, (MIB, 2 * MIB), repeat=3), alpha=alpha, beta=beta)
cores = cores_for_each_rank(timed)
timed.print(f"a message keeps {cost.cores:.2f} cores of a rank busy")

# %% tags=["plumbing"]
figures.explore_buckets(
    {name: p.nbytes for name, p in reversed(list(deep.named_parameters()))},
    alone,
    cost,
    cores,
    {cap: steps[name] for name, cap in CAPS.items()},
    predict=predict_plan,
    title="Refill the buckets: a cap's plan, and the step that is predicted with it",
)

# %% [markdown]
"""
The all-reduces are predicted, with the alpha and beta of above; the dots are the steps that ran.
Move the cap from one end to the other. See how the first all-reduce leaves later, and what becomes
of the exposed part. Does the cap that is predicted to take least lie near the one that took least?
Where a dot lies above the curve, its messages cost more than the model knows.

PyTorch's default cap is 25 MiB. Some of its developers call that too small for today's models,
and one proposes 100 MB ([issue 118421](https://github.com/pytorch/pytorch/issues/118421)).

## Bucketed against one by one

The same question for whole models, between microddp's two kinds of hooks: chapter 04's, which
send each gradient alone, and the buckets, with PyTorch's default cap:
"""

# %%
images, classes = torch.randn(16, 64, device=timed.device), torch.arange(16, device=timed.device)
cases = {
    "MLP": (deep, timed, (x, y), mse_loss),
    "CNN": (cnn.to(timed.device), timed, (images, classes % 10), cross_entropy),
}
kinds = ("hooks", "bucketed")
compared = {name: compare_strategies(kinds, *case, repeat=7) for name, case in cases.items()}

# %% tags=["plumbing"]
rows = []
for name, times in compared.items():
    tensors = list(cases[name][0].parameters())
    counts = [len(plan(tensors, *caps)) for caps in ((1, 1), (MIB, 25 * MIB))]
    ratio = times["bucketed"].ratio(times["hooks"]).median
    both = mark_least([*map(str, times.values())], [t.median for t in times.values()])
    rows.append((name, human_bytes(gradient_bytes(cases[name][0])), *counts, *both, ratio))
headers = ["", "gradients", "alone", "buckets", "one by one", "bucketed, * least", "second / first"]
timed.print(table(rows, headers))

# %% [markdown]
"""
*Alone* and *buckets* count the messages. What buckets can save is the start-up of the messages they
spare. It is less than their number times alpha, because a start that waits for the one before it
costs nothing of its own. With the default cap these models have one or two messages, which hide
little: the last section found a better cap for the MLP.

## Where it breaks: a bucket that is never emptied

The simplest bucket is a list. Hooks append gradients, and after backward they travel as one tensor.
The mistake is to forget the line that empties the list:
"""


# %%
class Collector:
    def __init__(self, model, empties):
        self.gradients, self.sent, self.empties = [], [], empties
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: self.gradients.append(p.grad))

    def finish(self):
        flat = torch.cat([gradient.flatten() for gradient in self.gradients])
        self.sent.append(flat.nbytes)
        timed.all_reduce_mean(flat)
        parts = flat.split([gradient.numel() for gradient in self.gradients])
        for gradient, part in zip(self.gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        if self.empties:
            self.gradients.clear()


# %%
rows, results = [], []
for empties in (False, True):
    torch.manual_seed(0)
    model = FullMLP(256, depth=4).to(timed.device)
    collector = Collector(model, empties)
    for _ in range(4):
        step(model, collector)
    rows.append(("emptied" if empties else "never emptied", *map(human_bytes, collector.sent)))
    results.append([p.grad for p in model.parameters()])

# %%
timed.print(table(rows, ["sent", *(f"step {i}" for i in range(1, 5))]))
torch.testing.assert_close(*results)
assert rows[1][1:] == (human_bytes(gradient_bytes(model)),) * 4
assert rows[0][4] == human_bytes(4 * gradient_bytes(model))

# %% [markdown]
"""
The gradients are *right* in both: old gradients travel along and are averaged once more, and nobody
reads them. So no comparison of losses or weights finds it. Only the message grows, and the memory
that holds all gradients ever computed. Count the bytes of each step, and you see it. In the hooks
above, `finish` does the emptying, where no step can forget it.

## Where it breaks: buckets sent as they fill

Why must a full bucket wait for those before it? Collectives are paired by their order, not by what
is in them. Here is a model of two branches, which even and odd ranks compute in a different order.
(A model whose path depends on its data can do that.) So its gradients come in a different order,
too. These hooks send whatever is full:
"""


# %%
class EagerHooks(Hooks):
    def send_full(self):
        for bucket in self.buckets:
            if not bucket.missing and bucket.work is None:
                bucket.work = self.comms.all_reduce(bucket.flat, async_op=True)


# %%
def two_branches(hook, xs, rank):
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2)).to(timed.device)
    hooks = hook(branches, timed, [[1], [0]]) if hook else None
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    results = {i: branches[i](xs) for i in order}
    (results[0] + 2 * results[1]).square().mean().backward()
    if hooks:
        hooks.finish()
    return torch.stack([branch.weight.grad for branch in branches])


# %%
torch.manual_seed(rank)
mine = torch.randn(16, 8, device=timed.device)
whole = two_branches(None, timed.all_gather(mine).flatten(0, 1), rank=0)
for hook in (EagerHooks, Hooks):
    got = two_branches(hook, mine, rank)
    error = ((got - whole).norm() / whole.norm()).item()
    timed.print(f"{hook.__name__}: gradients {error:.1e} from those of the whole batch")
    assert (error < 1e-5) == (hook is Hooks or n == 1)

# %% [markdown]
r"""
With more than one rank, the eager hooks added one branch's gradient to the other's: no error, no
wait, only a wrong result, because the two buckets have the same size. Had their sizes differed,
the backend would have ended the job, or waited for ever. A fixed order costs a little waiting and
nothing else. (With `MICRODDP_DEBUG=1` all ranks compare what they are about to send. That finds
different sizes, but not this.)

## What to take along

- An all-reduce costs alpha + beta m. Where m is small beside alpha / beta, send more at once.
- A plan needs three rules: reverse order, fill up to the cap, split no parameter. With them it is
  PyTorch's, to the byte.
- The best cap depends on alpha, on beta and on how much of the communication the hardware hides.
  Measure it where you train.
- Buckets are sent in one order on all ranks, and emptied after every step. A mistake in either may
  leave no trace but a wrong average or a growing message.
"""

# %% [markdown] index=["gradient_as_bucket_view"]
r"""
## Appendix: views against copies

In the hooks above, `parameter.grad` is a view of the bucket, and the optimizer reads the average
where it arrived. PyTorch's DDP does not do that unless asked (`gradient_as_bucket_view=True`): it
copies the averages back, so that a gradient kept aside stays as it is. **Predict:** with copies,
gradients and buckets take twice the memory of the gradients, and a step moves their bytes once
more.
"""


# %%
def held(hooks):
    """Bytes of memory under gradients and buckets, shared memory counted once."""
    tensors = [p.grad for p in hooks.buckets.parameters] + [b.buffer() for b in hooks.buckets]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


# %%
kinds, calls = {}, {}
for name, as_view in {"views": True, "copies": False}.items():
    replica = copy.deepcopy(deep)
    kinds[name] = BucketedDDPHooks(replica, timed, 2.0, gradient_as_bucket_view=as_view)
    calls[name] = partial(step, replica, kinds[name])
times = measure(calls, timed, repeat=5)
rows = [(name, held(hooks) / total, times[name]) for name, hooks in kinds.items()]
timed.print(table(rows, ["", "memory / gradients", "step, median (quartiles)"]))
assert held(kinds["views"]) == total
assert held(kinds["copies"]) == 2 * total

# %% [markdown]
r"""
The memory is as predicted. Where the quartiles overlap, one more pass over it is too short to be
seen. The other copy, from a new gradient into the bucket, is made in both: `zero_grad()` throws
gradients away, so backward makes new ones. With `zero_grad(set_to_none=False)` backward adds into
the view itself, after the view was filled with zeros.

## Appendix: does a small first bucket help?

PyTorch's first bucket has a cap of 1 MiB, unless you set a cap of your own. Its developers differ
on why. The answer in the thread of the published plan is that a small bucket travels *last*, and
leaves little to do after backward; but the small bucket there, the classifier's, travels *first*.
In [pull request 121640](https://github.com/pytorch/pytorch/pull/121640) a maintainer recalls that
it was made for speed, and no longer how. PyTorch 2.13 can do both: with
`DDP_SET_LAST_BUCKET_CAP=1` in the environment the last bucket is the small one.

**Predict.** A small *first* bucket lets the network begin earlier. That helps if the network is
what everything waits for. A small *last* one leaves less to send when backward ends. That helps
if the network keeps up with backward. Here is this network, and one with a tenth of its alpha and
beta:
"""

# %%
cap, small = 2 * MIB, MIB // 4
forwards = plan(parameters[::-1], small, cap)  # dealt out from the front, sent from the back
places = {
    "equal": plan(parameters, cap, cap),
    "small first": plan(parameters, small, cap),
    "small last": [[len(parameters) - 1 - i for i in b[::-1]] for b in forwards[::-1]],
}
measured = measure({k: bucketed_step(p, timed) for k, p in places.items()}, timed, repeat=5)

# %% tags=["plumbing"]
marked = mark_least([*map(str, measured.values())], [t.median for t in measured.values()])
rows = [
    (name, *(human_seconds(predict(sizes(parameters, p), True, faster)) for faster in (1, 10)), m)
    for (name, p), m in zip(places.items(), marked, strict=True)
]
timed.print(table(rows, ["", "all hidden", "network 10 x faster", "measured (quartiles), * least"]))

# %% [markdown]
"""
**Explain.** Where the quartiles of the three overlap, this run cannot tell them apart. A smaller
first bucket gains at most the time to compute what it leaves out. A smaller last one gains at most
the time to send that, and nothing if the large bucket before it is still on its way. (With "small
last" the first bucket is smaller, too: these layers do not divide evenly.)
"""

# %% [markdown]
r"""
## Exercises

**The lab.** Write the plan and its hooks; what a forgotten `reset` does, the check tells you, too.
{doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 05
```

1. Plan `deep` with its parameters in forward order. When does the first bucket leave? What does the
   order alone cost, if messages are hidden?

   <details class="solution"><summary>Solution</summary>

   The first bucket holds the first layer, whose gradients come last. The other buckets are full
   long before, and wait for it. So every all-reduce starts in the hook of the very last gradient:
   with a cap of 2 MiB all five of them do, where in reverse order the four leave one by one. With
   nothing to hide behind, such a step should take what the column "none hidden" predicts. The order
   alone costs the whole difference from "all hidden". (`predict` with `hidden=True` does not see
   it: it takes for granted that buckets are full in the order in which they are sent.)

   </details>

2. A byte of gradients takes $\beta$ seconds to send and $b$ seconds of backward to compute. Let
   messages be hidden, and $\beta > b$: the network is what everything waits for. Which bucket size
   $m$ is best for $S$ bytes of gradients, all layers alike? How much larger must a model be before
   twice that size is best?

   <details class="solution"><summary>Solution</summary>

   The first bucket is ready after $bm$ seconds of backward. From then on the network is never idle,
   and sends $S/m$ messages. Together that is

   $$ bm + \frac{S}{m}(\alpha + \beta m) = bm + \frac{\alpha S}{m} + \beta S. $$

   The derivative, $b - \alpha S / m^2$, is zero at $m = \sqrt{\alpha S / b}$. The best size grows
   with the root of the model: twice the size is best for four times the model. A cap of 25 MiB, or
   $2.6 \cdot 10^7$ bytes, is best at $S = b \, (2.6 \cdot 10^7)^2 / \alpha$.

   If $\beta < b$, the network keeps up with backward from $m = \alpha / (b - \beta)$ on, where a
   message takes as long as the gradients of the next bucket. Then only the last message counts,
   and a larger one costs more. So the best size is the smaller of $\sqrt{\alpha S / b}$ and
   $\alpha / (b - \beta)$: it stops growing with the model.

   </details>
"""

# %%
solo.close()
comms.close()
