# %% [markdown]
r"""
# 09. Case study: a language model

What does a second device gain on a model that people train? Whoever pays for it wants to know, and
what to set so that it gains more. The model is SmolLM2-360M, a decoder of 32 layers, or on a CPU a
small one of its kind, trained to tell whether two sentences say the same. A *global batch of 16
pairs* is taken by one device, or split. Then a scale model of a published run climbs a ladder of
changes, in milliseconds a pair.

It needs `pip install "microddp[llm]"`; without the Hugging Face hub, `transformers` is enough.
"""

# %% tags=["imports"]
import copy
import gc
import itertools
import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import microddp
from microddp import figures
from microddp.buckets import plan_buckets
from microddp.ddp import DDP
from microddp.findings import Prediction, compare, find
from microddp.hosts import relink
from microddp.model import gradient_bytes, parameter_count
from microddp.performance import profile_steps
from microddp.program import Layer, Work
from microddp.report import human_bytes, human_seconds, table
from microddp.stage import PausingOptimizer, cluster, pausing_model
from microddp.timing import Timing, measure
from microddp.workloads import batches, load_case, new_model

# %%
# sphinx_gallery_builds = "one language model trained on one device and on several"
# sphinx_gallery_hosts = "2 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
timed = comms.timed()  # ranks without a core or GPU of their own leave
rank, n = timed.rank, timed.world_size
timed.print(f"{n} of {comms.world_size} ranks are timed")

# %% [markdown]
"""
## The case

The course that this book continues, [microddp](https://github.com/kiankyars/microddp), published
two timings in 2025, in fp32 on MRPC, pairs of sentences from the news (one task of the collection
GLUE): seconds a batch, of 16 pairs on one GPU, and of 8 + 8 on two of a node:
"""

# %%
ONE_GPU, TWO_GPUS = 0.0751, 0.0551
timed.print(f"published: two GPUs are {ONE_GPU / TWO_GPUS:.2f} times as fast as one")

# %% [markdown]
"""
Weights and pairs come from the hub. Without it, weights are random, and the sentences are NumPy's
and PyTorch's documentation: what both say of the same function is a *paraphrase*. On a CPU, and on
GPUs that ranks share or that have no room, the model is a small one, always of random weights:
"""

# %%
ON_GPUS, SIZE = timed.device.type == "cuda" and not timed.crowded, "small"
with torch.device("meta"):  # shapes without memory
    full = new_model("full", pad=0)
if ON_GPUS:
    needed = 40 * gradient_bytes(full)  # seven models with AdamW's moments, and activations
    free = min(timed.all_gather_data(torch.cuda.mem_get_info()[0]))
    SIZE = "full" if needed <= free else "small"  # all choose alike
case = load_case(SIZE, timed)
total = gradient_bytes(case.model)
timed.print(case.origin)

# %% tags=["plumbing"]
rows = [
    ("parameters", f"{parameter_count(case.model):,}"),
    ("gradients", human_bytes(total)),
    *case.statistics(),
]
timed.print(table(rows, []))
tokens, mask, labels = case.train.tensors

# %% [markdown]
"""
## The same losses

**Predict.** The loss of a batch is the mean over its pairs. Shards are equal, so the mean of the
ranks' losses is the loss of the batch, and the averaged gradients are its gradients. Both runs
should agree up to rounding. (A short run shows
that, not learning.)

**Build.** One step, for the whole chapter, of one or several micro-batches, of which only the last
averages gradients (chapter 06):
"""


# %%
def step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for i, batch in enumerate(micro_batches, start=1):
        with nullcontext() if i == len(micro_batches) else model.no_sync():
            loss = model(**batch).loss / len(micro_batches)
            loss.backward()
    optimizer.step()
    return loss.detach()


# %%
def adamw(model):  # trained weights want a smaller step than random ones
    return torch.optim.AdamW(model.parameters(), lr=2e-5 if case.pretrained else 3e-4)


# %%
STEPS = 12


def train(model, data):
    optimizer = adamw(model)
    return [step(model, optimizer, [batch]).item() for batch in itertools.islice(data, STEPS)]


# %%
size = n * max(1, 16 // n)  # 16, or the nearest below that divides by the ranks
whole = batches(case.train, size, timed, whole=True)
alone = train(copy.deepcopy(case.model), whole) if rank == 0 else []
alone = timed.all_gather_data(alone)[0]
split = train(DDP(copy.deepcopy(case.model), timed), batches(case.train, size, timed))
split = [sum(losses) / n for losses in zip(*timed.all_gather_data(split), strict=True)]
_ = gc.collect()  # a wrapper, its hooks and its model refer to each other

# %%
worst = max(abs(a - b) for a, b in zip(alone, split, strict=True))
tolerance = 1e-3 if SIZE == "small" else 1e-2  # a GPU picks other kernels for other shapes
assert worst < tolerance
figures.lines(
    {"one device": (range(STEPS), alone), f"{n} devices": (range(STEPS), split)},
    title=f"{STEPS} steps on one device and on {n}: losses differ by {worst:.0e} at most",
    xlabel="step",
    ylabel="loss of the global batch",
)

# %% [markdown]
r"""
**Explain.** A split of the same batch is the same training. A larger batch (a second micro-batch,
the ladder's last two rungs) is another, and bf16 rounds.

## On real cores

**Predict.** The small model really computes here, a rank on each core. A split saves half of its
computing, and adds an all-reduce. Backward ends with the embedding, a third of the bytes. The
default buckets (1 MiB, then 25) are two; the larger holds the embedding, so it leaves after
backward. With `bucket_cap_mb=1` more is sent before. (The last row, twice the pairs, is for the
next section.)
"""

# %%
batch = next(batches(case.train, size, timed, whole=True))
shards = [b for b, _ in zip(batches(case.train, size, timed), range(2), strict=False)]
replica = DDP(copy.deepcopy(case.model), timed)
optimizer = adamw(replica)


def time_batches():
    models = [copy.deepcopy(case.model) for _ in range(2)]
    small_buckets, first = DDP(models[1], timed, bucket_cap_mb=1), adamw(models[0])
    calls = {
        "one device, whole batch": lambda: rank == 0 and step(models[0], first, [batch]),
        "split": partial(step, replica, optimizer, shards[:1]),
        "split, bucket_cap_mb=1": partial(step, small_buckets, adamw(small_buckets), shards[:1]),
        "split, 2 micro-batches": partial(step, replica, optimizer, shards),
    }
    return measure(calls, timed, warmup=1, repeat=5)


# %%
times = time_batches()
_ = gc.collect()
timed.print(table(times.items(), [f"{size} pairs on {n} x {timed.device.type}", "a batch"]))
if timed.box:
    wire = 2 * (n - 1) / n * total * timed.box.seconds_per_byte
    timed.print(f"the gradients alone take {human_seconds(wire)} on the link")

# %% tags=["plumbing"]
one, split, small_buckets, two = times.values()
gain, finer = compare(split, one), compare(small_buckets, split)
said = gain.say(f"A batch on {n} ranks of this machine", "the whole on one of them")
if n > 1:
    find(timed, "cores", **gain.sides(f"{said}."))
    said = finer.say("A split with `bucket_cap_mb=1`", "one with the default buckets")
    find(timed, "cores-small-buckets", **finer.sides(f"{said}."))

# %% [markdown] index=["profiler", "profile"]
r"""
**Explain.** Half a batch computes for half as long at best, and what the link then takes is above.
Cores also share caches and memory, and carry the messages; what either costs, this page does not
show.

## The profile

GPUs run *kernels*, small programs; the sum of their durations is the *kernel time*. The course's
profile, on four H100, gives all-reduce 42.2 % of it, and 25 % with accumulation over two
micro-batches. (The GPU is used for 15.2 % of a step, and the CPU, which starts kernels, for 61.1 %:
so kernel time is a small part of that step, and 42.2 % is a share of the small part.)

**Predict.** Let $s$ be the share of all-reduce. A step of $k$ micro-batches computes $k$ times as
much and sends once, so its share is

$$ s_k = \frac{s}{s + k\,(1 - s)}, $$

and a second micro-batch makes the step longer by its computing alone.

**Measure.** A rank that is late makes the others wait in the all-reduce, so one profile may be
disturbed. Each is taken three times, in turns; the one with the middle share counts. (On a CPU the
share is of operations and all-reduces together.)
"""


# %%
def predicted_share(share, k):
    return share / (share + k * (1 - share))


profiles = {1: [], 2: []}
for k in (1, 2) * 3:
    one_step = partial(step, replica, optimizer, shards[:k])
    profiles[k].append(profile_steps(one_step, timed, steps=1))
once, twice = (sorted(p, key=lambda p: p.busy_share)[len(p) // 2] for p in profiles.values())

# %% tags=["plumbing"]
shares = [p.busy_share for p in profiles[2]]
low, high, guess = min(shares), max(shares), predicted_share(once.busy_share, 2)
rows = [
    ("published, 4 H100", 0.422, predicted_share(0.422, 2), 0.25, ""),
    (
        f"here, {n} x {timed.device.type}",
        once.busy_share,
        guess,
        twice.busy_share,
        f"{low:.1%} to {high:.1%}",
    ),
]
headers = ["all-reduce's share", "1 micro-batch", "2, predicted", "2, measured", "of three"]
timed.print(table(rows, headers, floats=".1%"))

# %% tags=["plumbing"]
said = (
    f"With a second micro-batch all-reduce's share is {twice.busy_share:.1%} ({low:.1%} to "
    f"{high:.1%} in three profiles); {guess:.1%} was predicted."
)
sums = [(p.mean("busy") - p.mean("all_reduce"), p.mean("all_reduce")) for p in (once, twice)]
grown = [new / (old or 1.0) for old, new in zip(*sums, strict=True)]
why = (
    f"The prediction is for 2 times the computing and as much all-reduce; in the two profiles that "
    f"count they took {grown[0]:.2f} and {grown[1]:.2f} times as long."
)

# %% tags=["plumbing"]
held, higher = low <= guess <= high, guess < low
if n > 1:
    find(
        timed,
        "share",
        held=(held, f"{said} That held. {why}"),
        higher=(higher, f"{said} All three are higher. {why}"),
        lower=(not held and not higher, f"{said} All three are lower. {why}"),
    )

# %% tags=["plumbing"]
longer = split.median + once.mean("computing")
accumulated = Prediction(longer / 2 / size, Timing(tuple(t / 2 / size for t in two.seconds)))
said = (
    f"Outside the profiler a pair takes {human_seconds(split.median / size)} with one micro-batch, "
    f"and with two {accumulated}."
)
said += " What else takes time then, this page does not show." if accumulated.longer else ""
find(timed, "accumulated-pair", **accumulated.sides(said))

# %% [markdown] index=["mixed precision", "bf16", "autocast"]
"""
## bf16

**Predict.** *Autocast* multiplies in bf16 and keeps the weights in fp32. So gradients are fp32, and
no message gets shorter: if computing gets faster, all-reduce's share grows. To send half the bytes,
a communication hook (chapter 06) has to convert the gradients.

**Build.** It converts, divides, sends, and puts what comes back into the fp32 bucket:
"""

# %%
sent = []


def halved(group, bucket):
    small = bucket.buffer().to(torch.bfloat16).div_(group.size())
    sent.append(small.nbytes)
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


# %%
def gradients(hook=None, autocast=False):
    replica = DDP(copy.deepcopy(case.model), timed)
    if hook:
        replica.register_comm_hook(timed.group, hook)
    with torch.autocast(timed.device.type, torch.bfloat16, enabled=autocast):
        loss = replica(**shards[0]).loss
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in replica.parameters())
    return torch.cat([p.grad.flatten() for p in replica.parameters()])


# %%
exact, rows = gradients(), []
for name, arguments in {
    "autocast": (None, True),
    "halved": (halved,),
    "torch's bf16_compress_hook": (bf16_compress_hook,),
}.items():
    got = gradients(*arguments)
    rows.append((name, got.nbytes, ((got - exact).norm() / exact.norm()).item()))
    gc.collect()
timed.print(table(rows, ["", "bytes of .grad", "off by"], floats=".1e"))
timed.print(f"'halved' sent {sum(sent):,} bytes, {sum(sent) / total:.2f} of the gradients'")
assert 2 * sum(sent) == total
assert max(row[2] for row in rows[1:]) < 2**-7  # bf16 keeps 8 bits
del exact, got

# %% [markdown]
r"""
## The scale model

What GPUs gain, the stage of chapter 03 shows: devices pause as long as a GPU computes, and messages
are real. PyTorch fills buckets from the end of the model, and splits no parameter. So the last one,
which starts when backward has ended, holds at least the embedding:
"""


# %%
def buckets(cap):
    """Bytes of the full model's buckets, in the order of sending."""
    backwards = list(full.parameters())[::-1]
    return [sum(backwards[i].nbytes for i in b) for b in plan_buckets(backwards, (cap << 20,))]


S = gradient_bytes(full)
last = {cap: buckets(cap)[-1] / S for cap in (25, 1)}
rows = [(cap, len(buckets(cap)), f"{last[cap]:.1%}") for cap in last]
embedding = human_bytes(full.model.embed_tokens.weight.nbytes)
timed.print(f"{human_bytes(S)} of gradients, of which {embedding} are the embedding's")
timed.print(table(rows, ["bucket_cap_mb", "messages", "bytes in the last"]))

# %% [markdown]
r"""
How long a GPU computes follows from the two published times. A step of 8 pairs takes 55.1 ms, less
the last bucket's message over NVLink (at the 368 GB/s measured on 8 H200, ring, [ML
engineering](https://github.com/stas00/ml-engineering), August 2026). With the 75.1 ms of 16 pairs
that makes two equations for a step of $b$ pairs, $t(b) = f + c\,b$. We take the part $f$ to be the
same for any number of pairs, as starts of kernels, reading of weights, and the optimizer are. (With
two micro-batches the formula below counts $f$ twice, and so the optimizer, which runs once a step.
How much of $f$ it is, was not published. Nor do two times show that they lie on a line.)
"""


# %%
def messages(link):
    """The cluster's side: .messages is M. A link is its name, nodes, devices a node."""
    name, nodes, node = link
    sizes = {"parameters": S / 4, "layers": 32, "tokens": 1, "value_size": 4}
    return cluster("h100", name, nodes=nodes, node=node, **sizes)


# %%
eight = TWO_GPUS - last[25] * messages(("400gbit", 1, 2)).messages
c = (ONE_GPU - eight) / 8
f = ONE_GPU - 16 * c
timed.print(f"derived: f = {f * 1e3:.0f} ms a step, c = {c * 1e3:.1f} ms a pair")

# %% [markdown]
r"""
**Predict.** Messages begin with backward, which we take for two thirds of $t$, and the last bucket
of share $l$ begins when it ends. So $k$ micro-batches of $b$ pairs, with messages of $M$ in all,
take

$$ k\,t(b) + \max(l M, \; M - \tfrac{2}{3} t(b)) . $$

The first rung is the split alone, in buckets of 25 MiB (DDP's default without its small first one).
It is changed by a smaller cap, which makes $l$ smaller, and so helps where a step waits for the
last bucket alone; or by bf16, which halves $M$. On top of bf16, two micro-batches share one $M$; on
top of both, more pairs a device share one $f$.
"""

# %%
SHARE = size // n  # pairs of a device
LINKS = {"in a node, NVLink": ("400gbit", 1, n), "between machines, 100 Gbit/s": ("100gbit", n, 1)}
LADDER = {  # the rung it adds to, pairs a device, bucket_cap_mb, hook, micro-batches
    "split alone": ("one device", SHARE, 25, None, 1),
    "bucket_cap_mb=1": ("split alone", SHARE, 1, None, 1),
    "bf16 messages": ("split alone", SHARE, 25, halved, 1),
    "+ 2 micro-batches": ("bf16 messages", SHARE, 25, halved, 2),
    "+ 16 pairs a device": ("+ 2 micro-batches", 16, 25, halved, 2),
}


def predict(rung, M, n):
    """Seconds a pair."""
    _, pairs, cap, hook, k = LADDER[rung]
    pairs = pairs if rung == "+ 16 pairs a device" else size / n
    compute, M = f + c * pairs, M / 2 if hook else M
    return (k * compute + max(last[cap] * M, M - compute * 2 / 3)) / (k * n * pairs)


# %% [markdown]
"""
**Build.** The full model on the stage: gradients so many times smaller, and the caps with them. A
layer has four equal ones. PyTorch's own DDP sends:
"""


# %%
class ToScale(nn.Module):
    def __init__(self, pairs, slower, smaller):
        super().__init__()
        layers = full.model.layers
        blocks = [full.model.embed_tokens, *layers, nn.ModuleList([full.model.norm, full.score])]
        each = (f + c * pairs) * slower / len(layers)
        work = []
        for block, seconds in zip(blocks, [0.0, *[each] * len(layers), 0.0], strict=True):
            values = sum(p.numel() for p in block.parameters()) / smaller
            tensors = (max(1, round(values / 4)),) * 4 if seconds else (math.ceil(values),)
            work.append(Layer(seconds / 3, seconds * 2 / 3, tensors))
        self.layers = pausing_model(Work(tuple(work)), comms.device)

    def forward(self, x):
        return SimpleNamespace(loss=self.layers(x).sum())


# %%
def rung_step(model, micro_batches, cap=None, hook=None):
    to_scale = isinstance(model, ToScale)
    optimizer = PausingOptimizer(model.parameters()) if to_scale else adamw(model)
    if cap:
        options = {"process_group": timed.group, "gradient_as_bucket_view": True}
        model = TorchDDP(model, bucket_cap_mb=cap, **options)
        if hook:
            model.register_comm_hook(timed.group, hook)
    return partial(step, model, optimizer, micro_batches)


# %%
def on_stage(where, smaller):
    """A step of each rung, and how many times slower than the cluster the stage is."""
    sent_here = 2 * (n - 1) / n * sum(p.nbytes for p in ToScale(0, 0, smaller).parameters())
    slower = sent_here * timed.box.seconds_per_byte / messages(LINKS[where]).messages
    x = {"x": torch.zeros(1, 1, requires_grad=True)}
    calls = {"one device": rung_step(ToScale(size, slower, smaller), [x])}
    for name, (_, pairs, cap, hook, k) in LADDER.items():
        calls[name] = rung_step(ToScale(pairs, slower, smaller), [x] * k, cap / smaller, hook)
    return calls, slower


# %% [markdown]
"""
GPUs (NCCL) climb without a stage, with the case's own model:
"""


# %%
def on_gpus():
    whole = next(batches(case.train, size, timed, whole=True))
    calls = {"one device": rung_step(copy.deepcopy(case.model), [whole])}
    for name, (_, pairs, cap, hook, k) in LADDER.items():
        data = batches(case.train, n * pairs, timed)
        micro_batches = list(itertools.islice(data, k))
        calls[name] = rung_step(copy.deepcopy(case.model), micro_batches, cap, hook)
    return calls, 1.0


# %% [markdown]
"""
## The ladder

**Measure.** All rungs in turns, for each kind of link, at the stage's speed: slow steps, so this
takes a while. Times are divided by how much slower the stage is. Ratios are taken round by round;
two rungs are told apart if both quartiles of their ratio, with two decimals, are on one side of
1.00:
"""


# %%
def climb(calls, slower):
    """Seconds a pair, to the cluster's scale, of each rung."""
    pairs = {"one device": size} | {name: k * n * b for name, (_, b, _, _, k) in LADDER.items()}
    got = measure(calls, timed, warmup=1, repeat=3)
    scale = {name: 1 / slower / pairs[name] for name in got}
    return {name: Timing(tuple(s * scale[name] for s in got[name].seconds)) for name in got}


# %%
climbed, start, usual = {}, {}, timed.box and timed.box.links[0].option
if usual:
    relink(timed, "250mbit")  # a quarter of the usual: messages may be four times smaller
if ON_GPUS:
    climbed["these GPUs"] = climb(*on_gpus())
elif timed.box and n > 1:
    tiny = {"start": partial(timed.all_reduce, torch.zeros(64))}
    for where, smaller in zip(LINKS, (2500, 220), strict=True):
        calls, slower = on_stage(where, smaller)
        climbed[where] = climb(calls, slower)
        start[where] = measure(tiny, timed)["start"].median / slower  # to scale
else:
    timed.print("Left out: the ladder takes two ranks, and links of known speed.")

# %% tags=["plumbing"]
speeds = {}
for where, rungs in climbed.items():
    alone = rungs["one device"]
    speeds[where] = {name: compare(rungs[name], alone) for name in LADDER}
    known = where in LINKS
    M = messages(LINKS[where]).messages if known else None
    rows = [("one device", ONE_GPU / 16 * 1e3 if known else None, str(alone), 1.0)]
    for name in LADDER:
        guess = predict(name, M, n) * 1e3 if known else None
        rows.append((name, guess, str(rungs[name]), speeds[where][name].ratio))
    if known:
        ratio, least = M / (f + c * SHARE), messages(LINKS[where]).start
        timed.print(f"{where}: M = {human_seconds(M)}, M / t({SHARE}) = {ratio:.2f}, to start a")
        timed.print(f"message {human_seconds(start[where])} to scale, {human_seconds(least)} there")
    headers = [f"a pair, {n} devices", "predicted, ms", "measured (quartiles)", "times as fast"]
    timed.print(table(rows, headers, floats=("", ".2f", "", ".2f")))

# %% tags=["plumbing"]
top, plain = list(LADDER)[-1], "split alone"
for where, rungs in speeds.items():
    title = f"{n} devices {where}: {rungs[plain].ratio:.2f}, at the top {rungs[top].ratio:.2f}"
    figures.speed_ups({name: speed.times for name, speed in rungs.items()}, n, title=title)

# %% tags=["plumbing"]
WORDS = ("faster", "slower", "not told apart")
for name, where in zip(("in-a-node", "between-machines"), LINKS, strict=True):
    if where in climbed:
        rungs, best = climbed[where], speeds[where][top]
        beside = {rung: compare(rungs[rung], rungs[LADDER[rung][0]]) for rung in LADDER}
        one, first, last_rung = (f"{rungs[r].median * 1e3:.1f}" for r in ("one device", plain, top))
        sorted_out = "; ".join(
            f"{word}: {', '.join(r for r in LADDER if getattr(beside[r], side)) or 'none'}"
            for side, word in zip(("faster", "slower", "alike"), WORDS, strict=True)
        )
        said = (
            f"To scale, {where}, a pair takes {one} ms on one GPU, {first} split on {n}, "
            f"and {last_rung} on the top rung, which is {best.than('one')}. "
            f"Beside the rung that each adds to, {sorted_out}."
        )
        find(timed, name, **best.sides(said))

# %% tags=["plumbing"]
where = "in a node, NVLink"
if where in climbed and n == 2:
    published = Prediction(TWO_GPUS / 16, climbed[where][plain])
    find(
        timed,
        "published",
        **published.sides(
            f"To scale, a pair of 8 + 8 takes {published}. That is no independent "
            f"check: f and c were derived from the published time."
        ),
    )

# %% tags=["plumbing"]
same, said = [rung for rung, (_, pairs, *_, k) in LADDER.items() if k * pairs == SHARE], []
for where, speed in speeds.items():
    best = max(same, key=lambda rung, speed=speed: speed[rung].ratio)
    first = f"{speed[plain].ratio:.2f} times as fast as one by the split alone"
    if best != plain:
        first += f", at best {speed[best].ratio:.2f} times ({best})"
    longest = f"the top rung, with a larger batch, {speed[top].ratio:.2f} times"
    said.append(f"{where}, {n} devices train {first}; {longest}")
gains = [any(speed[rung].faster for rung in same) for speed in speeds.values()]
ask = f"At the same global batch, to scale: {'. At the same global batch, '.join(said)}."
find(
    timed,
    "answer",
    gains=(bool(gains) and all(gains), ask),
    depends=(any(gains) and not all(gains), ask),
    nothing=(bool(gains) and not any(gains), ask),
    left_out=(not gains, "Left out: it takes two ranks, and GPUs or links of known speed."),
)

# %% [markdown]
r"""
The top rung has a larger batch. How much of its gain is the batch's? One device could take as many
pairs at once as all of them do in a micro-batch:
"""

# %%
one_small, one_large = ONE_GPU / 16, f / (16 * n) + c
all_large = predict(top, messages(("400gbit", 1, max(2, n))).messages, n)
rows = [
    ("one device, 16 pairs", one_small * 1e3, 1.0),
    (f"one device, {16 * n} pairs", one_large * 1e3, one_small / one_large),
    ("top rung, in a node", all_large * 1e3, one_small / all_large),
]
timed.print(table(rows, ["by the formula", "ms a pair", "times as fast"], floats=".2f"))
timed.print(f"beside one device with as many: {one_large / all_large:.2f} times as fast")

# %% [markdown]
r"""
**Explain.** In a node messages are short beside the computing, so by the formula no change to them
gains much; each device pays $f$ in full, however few its pairs. In the published profile kernels
run in a small part of a step, and the CPU, which starts them, works through most of it. So larger
micro-batches, `torch.compile` or CUDA graphs are what to try first. By the formula one GPU with 32
pairs takes $f/32 + c = 3.6$ ms a pair, hardly more than two with 8 pairs each, 3.4. So where the
batch may grow, fill one GPU before you add another. Between machines bytes come first, at the same
global batch: send half, if two devices are worth it at all (above). Where the batch may grow, more
pairs a device share both $f$ and $M$.

The formula leaves out the Python that runs between the pauses, of one device's step, too; the
starts of messages, of which a smaller cap needs more (chapter 03 says what a start is); and the
hook, which converts on the CPU, but only once for two micro-batches, which gain that, too. None of
these was slowed down with the stage as the computing was, and all only add time.

:::{admonition} On GPUs
By the formula what rungs gain by their messages follows from $M/t$, and what they gain by more
pairs from $f$ and $c$. All of these are to scale on the stage. The starts of messages, which are
dearer here, are not. NCCL's kernels take processors from backward while they send, so less is
hidden than the formula says. Run it with `torchrun --nproc-per-node=2` on a GPU node. Here is the
formula for 8 devices, with the same 16 pairs (on the top rung 16 for each device, twice):
:::
"""

# %% tags=["plumbing"]
rows = []
for words, shape in {
    "8 H100 of a node, NVLink": ("400gbit", 1, 8),
    "8 machines of an H100, 400 Gbit/s": ("400gbit", 8, 1),
    "8 machines of an H100, 100 Gbit/s": ("100gbit", 8, 1),
    "8 machines of an H100, 25 Gbit/s": ("25gbit", 8, 1),
}.items():
    M = messages(shape).messages
    seconds = [predict(rung, M, 8) for rung in (plain, "bf16 messages", top)]
    rows.append((words, M / (f + 2 * c), *(ONE_GPU / 16 / s for s in seconds)))
headers = ["worked out, not measured", "M / t(2)", plain, "bf16 messages", "top rung"]
timed.print(table(rows, headers, floats=("", *[".2f"] * 4)))

# %% [markdown] index=["padding"]
"""
## Where it breaks: the padding token

Pairs of different lengths share a batch, so shorter ones are filled up with a *padding token*. The
*head*, which makes the answer, reads the vector of a pair's last real token. SmolLM2 has no padding
token of its own, and the common repair is to name *some* token.

**Predict.** If batches are padded with another one, the head reads padding in all rows but the
longest, and nothing complains. A pair's answer then depends on its longest neighbour. Where shards
are padded on their own, N devices train another model than one:
"""


# %%
def logits(pad, length):
    """Of the shortest pair, padded to a length."""
    classifier = new_model("small", case.pad, max(int(tokens.max()) + 1, 4096)).to(timed.device)
    classifier.config.pad_token_id = pad
    row = mask.sum(1).argmin()
    with torch.no_grad():
        return classifier(*(x[row, None, :length].to(timed.device) for x in (tokens, mask))).logits


shortest, more = int(mask.sum(1).min()), 20
rows = []
for name, pad in (("the wrong token", case.pad + 1), ("the token of the batches", case.pad)):
    tight, padded = (logits(pad, shortest + extra) for extra in (0, more))
    rows.append((name, (tight - padded).abs().max().item()))
timed.print(table(rows, ["pad_token_id is", f"{more} more columns change logits by"], floats=".1e"))
assert rows[0][1] > 1e-3
assert rows[1][1] < 1e-5

# %% [markdown] index=["FSDP", "fully_shard", "ZeRO", "sharding"]
r"""
The fix: give the tokenizer a padding token, and set `model.config.pad_token_id` to it. If every
shard is padded to its own length, the comparison of losses finds the mistake, too; here all are
padded to the longest pair of the global batch, so it cannot.

## A model that does not fit

DDP keeps everything on every rank: weights, gradients and AdamW's two moments, 16 bytes for each
parameter in fp32, and 4 more in buckets if gradients are no views of them. Where that is too much,
each rank keeps an n-th ({doc}`chapter 16 <16_sharding>`).

## What to take along

- The same global batch on N devices is the same training. Check it on losses before you time it.
- Two numbers tell what a split gains: M beside a shard's computing, and the part of a step that a
  smaller shard does not shorten.
- Short messages: give each device more pairs. Long ones: bf16
  messages, and more pairs for each average.
- A bucket cap moves bytes forward, except those of the parameter whose gradient comes last.
- Say of what a share is: of a step, of kernel time, of computing and messages. And take a profile
  more than once.

## Exercises

1. Let the optimizer take the share o of kernel time, and put it into the formula of the profile.
   Which o would explain the published pair, 42.2 % and 25 %?

   <details class="solution"><summary>Solution</summary>

   The optimizer runs once a step, as the all-reduce does, so

   $$ s_k = \frac{s}{s + o + k\,(1 - s - o)} . $$

   Solved for o with $s_2 = 0.25$, that is $o = 0.422 + 2 \cdot 0.578 - 0.422 / 0.25 = -0.11$. No
   optimizer takes less than nothing. So something else changed: the second run's all-reduce must
   have been shorter beside a micro-batch.

   </details>

2. From how many pairs a device on are two machines with 100 Gbit/s ahead of one device with 16
   pairs, if nothing else is changed? Take $f = 34$ ms, $c = 2.57$ ms and $M = 116$ ms.

   <details class="solution"><summary>Solution</summary>

   One device takes $75.1 / 16 = 4.69$ ms a pair. Two with $b$ pairs each take $t + M - \frac{2}{3}
   t$ for $2b$ pairs, as the messages are longer than backward. So $\frac{1}{3} (34 + 2.57\,b) + 116
   < 2b \cdot 4.69$, and $b > 127.3 / 8.52 = 14.9$: from 15 pairs on, a global batch of 30.

   </details>

3. Up to which $M/t$ does a step wait for its last bucket alone, of 14.4 % of the bytes? Which links
   between two machines do that for 8 pairs a device, with $t = 54.5$ ms?

   <details class="solution"><summary>Solution</summary>

   As long as $M - \frac{2}{3} t \le 0.144\,M$, so up to $M/t = 0.667 / 0.856 = 0.78$. Then $M$ is
   at most 42.4 ms. Two devices send all of the 1.447 GB once, so links of 34 GB/s, or 273 Gbit/s,
   do.

   </details>
"""

# %%
if usual:
    relink(timed, usual)
comms.close()
