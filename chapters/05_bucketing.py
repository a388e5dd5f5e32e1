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
import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import microddp
from microddp import figures
from microddp.bucketing import BucketedDDPHooks
from microddp.buckets import plan_buckets
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.findings import compare, find, mark_least
from microddp.fitted import FittedCost, fit_alpha_beta
from microddp.hosts import relink
from microddp.model import FullMLP, SimpleCNN, gradient_bytes
from microddp.performance import predict_plan
from microddp.report import MIB, human_bytes, human_seconds, table
from microddp.stage import cluster, set_stage
from microddp.step_times import ComputeTimes
from microddp.timing import Timing, measure

# %%
# sphinx_gallery_builds = "a bucket plan, and hooks that follow it"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
r"""
## The price of a message

Chapter 02 fitted $t(m) = \alpha + \beta m$ to single messages. Here is a whole all-reduce, the
backend's, by size. A call sends up to eight in a row, as a step does, each of another part of a
large tensor; of large ones fewer. The time shown is of one:
"""

# %%
POOL = torch.zeros(2**23, device=comms.device)  # 32 MiB
ROW = {2**k: min(8, max(2, 2**22 // 2**k)) for k in range(12, 23, 2)}  # how many, by their bytes


def reduce_row(nbytes, starts):
    for _ in range(ROW[nbytes]):
        comms.all_reduce(POOL.narrow(0, next(starts), nbytes // 4))


calls = {}
for nbytes in ROW:
    starts = itertools.cycle(range(0, len(POOL), nbytes // 4))
    calls[nbytes] = partial(reduce_row, nbytes, starts)

# %% [markdown]
r"""
However small it is, an all-reduce has $2(n-1)$ rounds around a ring, one after the other. So this
chapter's model has a floor $t_0$; above it count the bytes, and an $\alpha$ for what a large
message takes beyond them:

$$ t(m) = \max(t_0, \; \alpha + \beta m) . $$

The floor is the median of those up to 16 KiB, $\alpha$ is fitted to those from 256 KiB on. On links
of known speed $\beta$ is theirs:
"""

# %%
rows = measure(calls, comms, warmup=1, repeat=5)
timings = {m: Timing(tuple(s / ROW[m] for s in t.seconds)) for m, t in rows.items()}
floor = statistics.median(t.median for m, t in timings.items() if m <= 2**14)
large = {m: timing.median for m, timing in timings.items() if m >= 2**18}
# Each rank sends 2 (n-1)/n of the bytes.
known = comms.box.seconds_per_byte * 2 * (n - 1) / n if comms.box and n > 1 else None
alpha, beta = fit_alpha_beta(list(large), list(large.values()))
if known:
    alpha = max(0.0, statistics.median(t - known * m for m, t in large.items()))
    beta = known


def message(nbytes):
    """Seconds of an all-reduce."""
    return max(floor, alpha + beta * nbytes)


figures.times_by_size(
    {"all-reduce": timings},
    models={"all-reduce": message},
    title=f"Small ones {human_seconds(floor)}, then {human_seconds(max(beta, 0) * MIB)} a MiB",
)

# %% tags=["plumbing"]
worth = f"as the bytes of {human_bytes(floor / beta)} alone" if beta > 0 else "as any other"
find(
    comms,
    "price",
    several=(
        n > 1,
        f"An all-reduce of up to 16 KiB takes {human_seconds(floor)} in the median, as long "
        f"{worth}. By the line a large one takes {human_seconds(alpha)} more than its bytes.",
    ),
    alone=(n == 1, "One rank sends nothing: its all-reduces are calls without a message."),
)

# %% [markdown]
r"""
**Predict.** Take a narrow, deep model. Its $P$ gradients have $S$ bytes in all. Sent one by one
they cost $P\,t(S/P)$; together, $t(S)$.

**Measure.** Both ways, without a forward or a backward beside them:
"""

# %%
narrow = FullMLP(64, depth=16).to(comms.device)


def reduce_all(tensors):
    for tensor in tensors:
        comms.all_reduce(tensor)


# %%
apart = [torch.zeros_like(p) for p in narrow.parameters()]
together = torch.cat([tensor.flatten() for tensor in apart])
P, S = len(apart), together.nbytes
many, one = measure(
    {"many": partial(reduce_all, apart), "one": partial(comms.all_reduce, together)},
    comms,
    warmup=1,
    repeat=5,
).values()
guesses = sum(message(tensor.nbytes) for tensor in apart), message(S)
rows = [(P, human_seconds(guesses[0]), many), (1, human_seconds(guesses[1]), one)]
comms.print(f"{human_bytes(S)} of gradients")
comms.print(table(rows, ["messages", "predicted", "measured, median (quartiles)"]))

# %% tags=["plumbing"]
gain = compare(one, many)
guess = guesses[0] / guesses[1]
said = (
    f"In one message the same bytes are {gain.than(f'in {P}')}; {guess:.1f} times was predicted, "
    f"and the median is {abs(gain.ratio / guess - 1):.0%} "
    f"{'more' if gain.ratio > guess else 'less'}. The {P} took "
    f"{many.median / guesses[0]:.0%} of their predicted time, the one "
    f"{one.median / guesses[1]:.0%}."
)
find(comms, "together", **gain.sides(said))

# %% [markdown] index=["bucket", "first bucket"]
r"""
## The plan

Which gradients should travel together? Those that are ready at about the same time. Backward goes
through the model from its end to its beginning, so the parameters are taken in *reverse* order.
A bucket takes one after the other until it has reached its *cap*; then the next one begins. A
parameter is never split, so a bucket may exceed its cap. The first bucket can have a smaller cap
than the others, so that communication begins early.

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
comms.print(table(rows, ["bucket", "parameters (bytes)"], form="grid"))

# %% [markdown]
"""
Reverse order is a guess: that the model uses its parameters in the order in which it names them.
This one names all its convolutions before all its normalisations. The result is right all the same,
but a bucket waits longer for its last gradient. So PyTorch's `DistributedDataParallel`, or DDP,
plans anew after the first step, in the order in which the gradients came.

## A published plan

In 2020 somebody traced the all-reduces of ResNet-18 under PyTorch's DDP, and wondered why some were
larger than the cap ([issue 48880](https://github.com/pytorch/pytorch/issues/48880)). To plan,
shapes are enough:
"""


# %% tags=["plumbing"]
def resnet18():
    """The parameters of ResNet-18, in torchvision's order, with shapes and without memory."""

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
    comms.print(f"cap {cap} MiB: {sizes(resnet, plans[cap])}, published {published}")
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
Each colour is a bucket, each cell a parameter. The first is the classifier at the end of the
network, which fills a bucket at once. PyTorch's own planner should make the same plans for more
models and caps, and so should microddp's, which also keeps dtypes and devices apart:
"""


# %% tags=["plumbing"]
def in_reverse(planner, tensors, *caps):
    """The plan of one that takes tensors in the order given."""
    last = len(tensors) - 1
    return [[last - i for i in bucket] for bucket in planner(tensors[::-1], caps)]


def torch_planner(tensors, caps):
    return dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors))[0]


# %%
models = {"CNN": tensors, "MLP": list(FullMLP(256, depth=32).parameters()), "ResNet-18": resnet}
for tensors in models.values():
    for caps in itertools.product((1, 1 << 16, MIB), (1, 1 << 18, MIB, 25 * MIB)):
        ours = plan(tensors, *caps)
        assert ours == in_reverse(plan_buckets, tensors, *caps)
        assert ours == in_reverse(torch_planner, tensors, *caps)
comms.print(f"equal to PyTorch's plan and microddp's: {', '.join(models)}, at 12 pairs of caps")

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
after those before it: all ranks must send the same buckets in the same order. `finish` waits, and
makes the buckets ready for the next step:
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
Do they train as one device does on the whole batch, and to the bit as microddp's
{class}`~microddp.bucketing.BucketedDDPHooks`? Six steps on the digits, in `float64`:
"""

# %%
digits = load_digits(comms.device)
BATCH = 96 - 96 % n  # so that the ranks share it evenly
CAP = 256 << 10


# %%
def train(hook, rank, n):
    torch.manual_seed(0)
    model = FullMLP(64, outputs=10).to(comms.device, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hooks = hook(model)
    for x, y in itertools.islice(ShardedBatches(digits.train, BATCH, rank, n).epoch(0), 6):
        optimizer.zero_grad()
        cross_entropy(model(x.double()), y).backward()
        if hooks:
            hooks.finish()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
weights = train(lambda m: Hooks(m, comms, plan(list(m.parameters()), CAP, CAP)), rank, n)
core = train(lambda m: BucketedDDPHooks(m, comms, CAP / MIB), rank, n)
alone = train(lambda _: None, 0, 1)
apart = ((weights - alone).norm() / alone.norm()).item()
comms.print(f"bitwise equal to microddp's: {torch.equal(weights, core)}")
comms.print(f"{apart:.1e} from one device on the whole batch")
assert torch.equal(weights, core)
assert apart < 1e-9

# %% [markdown] index=["bucket size", "bucket_cap_mb"]
r"""
## Step time by bucket size

**Predict.** In a model whose layers are alike, half of the gradients are ready after half of
backward, and so on. A bucket of $m$ bytes takes $t(m)$, from when it is full and the one before it
has arrived. (The code sends it as soon as it is full; then the two share the link.) What has not
arrived at the end of backward is waited for:
"""


# %%
def predict(sizes, forward, backward):
    """Seconds of a step that sends buckets of these sizes."""
    ready, arrived = forward, 0.0
    for nbytes in sizes:
        ready += backward * nbytes / sum(sizes)
        arrived = max(ready, arrived) + message(nbytes)
    return max(arrived, forward + backward)


# %% [markdown]
"""
**Measure.** The stage is that of chapters 03 and 04. This chapter's own hooks send, at caps from a
gradient alone to all in one bucket:
"""

# %%
there = cluster("a100", "25gbit", nodes=n, node=1, parameters=355e6, tokens=24_576, layers=24)
stage = set_stage(comms, there, layer_bytes=3 << 17)
comms.print(stage)

# %% [markdown]
r"""
The book has four prices. Chapter 02's $\alpha$ is of one message between two ranks. The others are
of a whole all-reduce, which has $2(n-1)$ rounds of messages: $t_0$ is all that a small one takes;
this chapter's $\alpha$ is what one of 256 KiB or more takes beyond its bytes; and the stage's
*start* is what one layer's all-reduce takes beyond its share of a single one of all gradients. By
the line the last two should be almost equal, but each is measured by itself:
"""

# %% tags=["plumbing"]
if stage.sides and n > 1:
    here = stage.sides[1]
    low, high = here.start_spread
    by_line = alpha * (1 - 1 / here.layers)
    said = (
        f"By the line a start is {human_seconds(by_line)}; the stage measured "
        f"{human_seconds(here.start)} ({human_seconds(low)} to {human_seconds(high)})"
    )
    find(
        comms,
        "two-starts",
        equal=(low <= by_line <= high, f"{said}."),
        apart=(not low <= by_line <= high, f"{said}. Why, this page does not show."),
    )

# %% [markdown]
"""
The step with buckets:
"""


# %%
def bucketed_step(stage, plan):
    replica = copy.deepcopy(stage.model)
    hooks = Hooks(replica, comms, plan)

    def step():
        replica.zero_grad()
        stage.loss_fn(replica(stage.batch[0]), stage.batch[1]).backward()
        hooks.finish()

    return step


# %%
parameters, total = list(stage.model.parameters()), gradient_bytes(stage.model)
CAPS = {"alone": 1} | {human_bytes(k * MIB): k * MIB for k in (1, 2)}
CAPS["all in one"] = total
sent = {name: sizes(parameters, plan(parameters, cap, cap)) for name, cap in CAPS.items()}
calls = {name: bucketed_step(stage, plan(parameters, cap, cap)) for name, cap in CAPS.items()}
calls |= {"one device": stage.step("none"), "naive": stage.step("naive")}
steps = measure(calls, comms, warmup=1, repeat=5)
device, naive = steps.pop("one device"), steps.pop("naive")

# %% tags=["plumbing"]
forward, backward = device.median / 3, device.median * 2 / 3
predicted = {name: predict(nbytes, forward, backward) for name, nbytes in sent.items()}
marked = mark_least([str(t) for t in steps.values()], [t.median for t in steps.values()])
rows = [
    (name, len(sent[name]), human_seconds(predicted[name]), timing)
    for name, timing in zip(CAPS, marked, strict=True)
]
comms.print(table(rows, ["cap", "all-reduces", "predicted", "measured (quartiles), * least"]))

# %% tags=["plumbing"]
average = [total / len(nbytes) / MIB for nbytes in sent.values()]
best = min(steps, key=lambda name: steps[name].median)
rivals = [name for name in CAPS if name != best and not compare(steps[best], steps[name]).faster]
beside = f", not told apart from {' and '.join(rivals)}" if rivals else ""
figures.lines(
    {
        "measured": (average, [t.median * 1e3 for t in steps.values()]),
        "predicted": (average, [seconds * 1e3 for seconds in predicted.values()]),
    },
    title=f"Least with '{best}'{beside}",
    xlabel="average bucket, MiB",
    ylabel="one step, ms",
    log="x",
)

# %% tags=["plumbing"]
words = {"alone": "gradients alone", "all in one": "all in one"}
gains = {
    cap: [compare(steps[cap], steps[end]) for end in words] for cap in CAPS if cap not in words
}
both = [cap for cap, ends in gains.items() if all(gain.faster for gain in ends)]
said = "; ".join(
    f"at a cap of {cap} a step is "
    + ", and ".join(gain.than(end) for gain, end in zip(ends, words.values(), strict=True))
    for cap, ends in gains.items()
)
find(
    comms,
    "valley",
    valley=(bool(both), f"A valley, at {' and '.join(both)}: {said}."),
    none=(not both, f"No cap is told to beat both ends: {said}."),
)

# %% tags=["plumbing"]
errors = {name: steps[name].median / predicted[name] - 1 for name in CAPS}
worst = max(errors, key=lambda name: abs(errors[name]))
chosen = min(predicted, key=predicted.get)
off = (
    f"The model is off most at '{worst}', where a step took {abs(errors[worst]):.0%} "
    f"{'more' if errors[worst] > 0 else 'less'} than predicted."
)
# %% tags=["plumbing"]
beside = compare(steps[best], steps[chosen])
first, second = sorted(predicted.values())[:2]
by = ", by less than 1 %," if second < 1.01 * first else ""
other = f"The model chooses '{chosen}'{by or ','} the run '{best}'"
find(
    comms,
    "bucket-model",
    right=(chosen == best, f"Model and run both choose '{best}'. {off}"),
    alike=(
        chosen != best and not beside.faster,
        f"{other}, which this run does not tell apart. {off}",
    ),
    wrong=(chosen != best and beside.faster, f"{other}, {beside}. {off}"),
)
names = {"naive": naive, "hooks": steps["alone"], f"buckets, cap {best}": steps[best]}
speeds = {name: stage.speed_up(timing, device) for name, timing in names.items()}
top = speeds[f"buckets, cap {best}"]
figures.speed_ups(
    {name: speed.times for name, speed in speeds.items()},
    n,
    title=f"{n} devices, buckets with a cap of {best}: {top}",
)

# %% [markdown]
r"""
**Explain.** In the model each message that is saved saves its start-up cost, and on the right a
bucket is full only when too little of backward is left to hide it. Why a step takes another time
than the model says, this page does not show. (The comparisons are medians of ratios, repetition by
repetition. So they need not be the ratios of the table's medians.)

Now choose the cap. The all-reduces are predicted with the alpha and beta of above, without the
floor; the dots are the steps that ran. Move the cap, and see when the first all-reduce leaves, and
what becomes of the exposed part:
"""

# %% tags=["plumbing"]
gradients = {name: p.nbytes for name, p in [*stage.model.named_parameters()][::-1]}
there_of = itertools.accumulate(gradients.values())
ready = {name: backward * so_far / total for name, so_far in zip(gradients, there_of, strict=True)}
figures.explore_buckets(
    gradients,
    ComputeTimes(forward, backward, ready, optimizer=0.0, copy=0.0),
    FittedCost(alpha, beta),
    {int(cap): steps[name] for name, cap in CAPS.items()},
    predict=predict_plan,
    title="Refill the buckets: a cap's plan, and the step that is predicted with it",
)

# %% [markdown] index=["similarity"]
r"""
## Does the scale matter?

**Predict.** On a stage of another speed, with the same numbers without units, the speed-ups must be
the same. Of these, $n$ and $M/C$ can be set. Start/C cannot: each stage measures its own. From all
three, and from one device as measured, a naive step's speed-up is predicted, as in chapter 03: for
the median of the start, and for its quartiles. Buckets have fewer starts, so their speed-ups on the
two stages should differ less.

**Measure.** The stage again, on links of 500 Mbit/s, beside what the first one gave:
"""

# %%
usual, slow, cap = comms.box and comms.box.links[0].option, "500mbit", CAPS["1 MiB"]
stages = {}
if usual and n > 1:
    stages[usual] = stage, {"alone": device, "naive": naive, "1 MiB": steps["1 MiB"]}
    relink(comms, slow)
    other = set_stage(comms, there, layer_bytes=3 << 17)
    calls = {"alone": other.step("none"), "naive": other.step("naive")}
    calls["1 MiB"] = bucketed_step(other, plan(parameters, cap, cap))
    stages[slow] = other, measure(calls, comms, warmup=1, repeat=4)
    relink(comms, usual)


# %% tags=["plumbing"]
def in_brackets(low, median, high):
    return f"{median:.2f} ({min(low, high):.2f} to {max(low, high):.2f})"


def with_starts(side, alone, start):
    """A naive step's speed-up, with starts of so many seconds."""
    return n * alone / (side.compute + side.messages + side.layers * start)


rows, ranges, medians, guesses = [], [], [], []
for speed, (of, got) in stages.items():
    here, alone = of.sides[1], got["alone"].median
    low, high = (max(0.0, start) for start in here.start_spread)  # none is negative
    guesses.append([with_starts(here, alone, start) for start in (low, here.start, high)])
    gains = [of.speed_up(got[name], got["alone"]).times for name in ("naive", "1 MiB")]
    ranges.append([gain.spread for gain in gains])
    medians.append([gain.median for gain in gains])
    texts = [in_brackets(gain.spread[0], gain.median, gain.spread[1]) for gain in gains]
    rows.append((speed, here.start / here.compute, in_brackets(*guesses[-1]), *texts))
headers = ["links", "start/C", "naive, predicted", "naive", "buckets of 1 MiB"]
comms.print(table(rows, headers, floats=("", ".3f", "", "", "")))

# %% tags=["plumbing"]
ways = [
    way
    for way, both in zip(("naive steps", "buckets"), zip(*ranges, strict=True), strict=bool(rows))
    if max(low for low, _ in both) > min(high for _, high in both)
]
slower = [guesses[1][1] / guesses[0][1] - 1] if rows else []  # predicted, then measured
slower += [other / one - 1 for one, other in zip(*medians, strict=True)] if rows else []
missed = [got[0] / guess[1] - 1 for got, guess in zip(medians, guesses, strict=True)]
said = rows and (
    "On the slower links the speed-up of a naive step is {1:+.0%} beside the other stage's "
    "({0:+.0%} predicted from start/C), and that of buckets {2:+.0%}.".format(*slower)
    + f" The prediction misses by {missed[0]:+.0%} on the faster links, {missed[1]:+.0%} on the "
    f"slower. A start was measured as {rows[0][1]:.2%} of C on this chapter's stage, as "
    f"{rows[1][1]:.2%} on the other, and is {there.start / there.compute:.2%} on the cluster."
)

# %% tags=["plumbing"]
apart = f"The two stages' speed-ups with {' and '.join(ways)} have quartiles that lie apart"
find(
    comms,
    "similarity",
    alike=(bool(rows) and not ways, f"No speed-up of the two stages is told apart. {said}"),
    apart=(
        bool(ways),
        f"{apart}: n and M/C are not all that counts. {said} What the prediction misses, this page "
        "does not show.",
    ),
    left_out=(not rows, "Left out: it takes links whose speed can be set."),
)

# %% [markdown]
r"""
**Explain.** The two stages have the same $n$ and $M/C$; starts differ, and each is measured, as a
difference of two times. Chapter 06 compares ways on one stage, where the speed is the same for all
of them; what it says of the cluster holds only as far as starts weigh as much there.

:::{admonition} On GPUs
By the table of chapter 02, an all-reduce of 25 MiB, PyTorch's default cap, takes eight machines
with links of 100 Gbit/s 8 % longer than its bytes do; the faster the links, the more starts weigh.
A layer of this chapter's cluster has 28 MiB, so at that cap no bucket holds two whole ones. Some of
PyTorch's developers call it too small for today's models, and one proposes 100 MB ([issue
118421](https://github.com/pytorch/pytorch/issues/118421)). Try `bucket_cap_mb` of 5, 25 and 100 on
your job. (One that you give holds for the first bucket, too, which is of 1 MiB otherwise.)
:::

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
        comms.all_reduce_mean(flat)
        parts = flat.split([gradient.numel() for gradient in self.gradients])
        for gradient, part in zip(self.gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        if self.empties:
            self.gradients.clear()


# %%
rows, results = [], []
torch.manual_seed(rank)
xs, ys = torch.randn(2, 64, 256, device=comms.device)
for empties in (False, True):
    torch.manual_seed(0)
    model = FullMLP(256, depth=4).to(comms.device)
    collector = Collector(model, empties)
    for _ in range(4):
        model.zero_grad()
        mse_loss(model(xs), ys).backward()
        collector.finish()
    rows.append(("emptied" if empties else "never emptied", *map(human_bytes, collector.sent)))
    results.append([p.grad for p in model.parameters()])

# %%
comms.print(table(rows, ["sent", *(f"step {i}" for i in range(1, 5))]))
torch.testing.assert_close(*results)
assert rows[1][1:] == (human_bytes(gradient_bytes(model)),) * 4
assert rows[0][4] == human_bytes(4 * gradient_bytes(model))

# %% [markdown]
"""
The gradients are *right* in both: old gradients travel along and are averaged once more, and nobody
reads them. So no comparison of losses or weights finds it. Count the bytes of each step, and you
see it. In the hooks above, `finish` does the emptying.

## Where it breaks: buckets sent as they fill

Why must a full bucket wait for those before it? Collectives are paired by their order, not by what
is in them. Here is a model of two branches, which even and odd ranks compute in a different order,
as a model whose path depends on its data can. These hooks send whatever is full:
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
    branches = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2)).to(comms.device)
    hooks = hook(branches, comms, [[1], [0]]) if hook else None
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    results = {i: branches[i](xs) for i in order}
    (results[0] + 2 * results[1]).square().mean().backward()
    if hooks:
        hooks.finish()
    return torch.stack([branch.weight.grad for branch in branches])


# %%
torch.manual_seed(rank)
mine = torch.randn(16, 8, device=comms.device)
whole = two_branches(None, comms.all_gather(mine).flatten(0, 1), rank=0)
for hook in (EagerHooks, Hooks):
    got = two_branches(hook, mine, rank)
    error = ((got - whole).norm() / whole.norm()).item()
    comms.print(f"{hook.__name__}: gradients {error:.1e} from those of the whole batch")
    assert (error < 1e-5) == (hook is Hooks or n == 1)

# %% [markdown]
r"""
With more than one rank, the eager hooks added one branch's gradient to the other's: no error, no
wait, only a wrong result, because the two buckets have the same size. (With other sizes gloo may
end the job, or wait until the time-out; that is not run here. And here `MICRODDP_DEBUG=1`, with
which ranks compare each call before they make it, finds different sizes only, since these hooks do
not say whose gradients they send.)

## What to take along

- An all-reduce has a price, however small it is. Join messages whose bytes take no longer than
  that.
- A plan needs three rules: reverse order, fill up to the cap, split no parameter.
- By the model the best cap depends on alpha, on beta and on the time of backward. Measure it where
  you train.
- Buckets are sent in one order on all ranks, and emptied after every step. A mistake in either may
  be no error, but a wrong average or a growing message.
"""

# %% [markdown] index=["gradient_as_bucket_view"]
r"""
## Appendix: views against copies

In the hooks above, `parameter.grad` is a view of the bucket. PyTorch's DDP does that only if asked
(`gradient_as_bucket_view=True`); else it copies the averages back, so that a gradient kept aside
stays as it is. **Predict:** with copies, gradients and buckets take twice the memory of the
gradients.
"""


# %% tags=["plumbing"]
def held(hooks):
    """Bytes of memory under gradients and buckets, shared memory counted once."""
    tensors = [p.grad for p in hooks.buckets.parameters] + [b.buffer() for b in hooks.buckets]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


# %%
bytes_of = {}
for name, as_view in {"views": True, "copies": False}.items():
    replica = copy.deepcopy(narrow)
    hooks = BucketedDDPHooks(replica, comms, 2.0, gradient_as_bucket_view=as_view)
    replica(torch.randn(8, 64, device=comms.device)).sum().backward()
    hooks.finish()
    bytes_of[name] = held(hooks)
comms.print({name: f"{nbytes / S:g} x the gradients" for name, nbytes in bytes_of.items()})
assert bytes_of == {"views": S, "copies": 2 * S}

# %% [markdown]
r"""
## Exercises

**The lab.** Write the plan and its hooks; what a forgotten `reset` does, the check tells you, too.
{doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 05
```

1. Plan the stage's model with its parameters in forward order. When does the first bucket leave?
   What does the order alone cost?

   <details class="solution"><summary>Solution</summary>

   The first bucket holds the first layer, whose gradients come last. The others wait for it. So
   every all-reduce starts in the hook of the very last gradient, with nothing to hide behind: the
   order alone costs all of the overlap.

   </details>

2. A byte of gradients takes $\beta$ seconds to send and $b$ seconds of backward to compute. Let
   messages travel during backward, and $\beta > b$: then a step waits for the network. Which bucket
   size $m$ is best for $S$ bytes of gradients, all layers alike? How much larger must a model be
   before twice that size is best?

   <details class="solution"><summary>Solution</summary>

   The first bucket is ready after $bm$ seconds of backward. Then the network sends $S/m$ messages,
   and is never idle. Together that is

   $$ bm + \frac{S}{m}(\alpha + \beta m) = bm + \frac{\alpha S}{m} + \beta S. $$

   The derivative, $b - \alpha S / m^2$, is zero at $m = \sqrt{\alpha S / b}$. The best size grows
   with the root of the model: twice the size is best for four times the model.

   </details>
"""

# %%
comms.close()
