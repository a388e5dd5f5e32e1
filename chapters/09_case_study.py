# %% [markdown]
r"""
# Case study: fine-tuning a language model

Does it hold on a real model? The models so far were made for their questions. This chapter takes
SmolLM2-360M, a decoder of 32 layers, and teaches it to tell whether two sentences say the same
(GLUE's MRPC, 3668 pairs to train on). The question is the one everybody has who gets a second
device: the *same global batch of 16*, on one device or split over N. What does the split gain, and
what takes the rest? Published figures for this model and task stand beside the measured ones.

It needs `pip install "microddp[llm]"`; with `transformers` alone it runs on made-up pairs.
"""

# %%
import copy
import itertools
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import microddp
from microddp import figures
from microddp.case_study import load_case, new_model
from microddp.ddp import DDP
from microddp.figures import human_bytes, human_seconds
from microddp.machine import cpu_cores
from microddp.model import gradient_bytes, parameter_count
from microddp.pairs import batches
from microddp.profiling import profile_steps
from microddp.trace import measure

comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown]
"""
## The case

On a GPU the model has its full size. For a processor it is too large to wait for, so there it is
smaller in every direction, with the same ratios and random weights. Change `SIZE` to decide
otherwise. The weights, the tokenizer and the sentences come from the Hugging Face hub; where it
cannot be reached, the weights are random and the pairs made up, with MRPC's lengths and its share
of paraphrases:
"""

# %%
SIZE = "full" if comms.device.type == "cuda" else "small"
case = load_case(SIZE, comms)
total = gradient_bytes(case.model)
comms.print(case.origin)
rows = [
    ("parameters", f"{parameter_count(case.model):,}"),
    ("gradients", human_bytes(total)),
    *case.statistics(),
]
comms.print(tabulate(rows, disable_numparse=True))

# %% [markdown]
"""
Random weights take as long to train as real ones, and the pairs are as long, so times and shares
mean the same. Losses do not: made-up pairs are easier to tell than English ones.

One thing is unlike the models before. The *head* reads the vector of a pair's last token, and pairs
of different lengths share a batch, so each row's end has to be found. That is what the padding
token is for, and the last section shows what happens if it is wrong.

## The same losses

**Predict.** The loss of a batch is the mean over its pairs. Shards are equal, so the mean of the
ranks' losses is the loss of the batch, the averaged gradients are its gradients, and all runs of
the same batches agree up to rounding. AdamW makes that harder than SGD: where a gradient is almost
zero, rounding decides its sign, and AdamW's first steps are as long for it as for any other.

**Build.** One step, for the whole chapter: several micro-batches, of which only the last averages
gradients (chapter 06), in fp32 or with autocast:
"""


# %%
def global_batch(comms):
    """16, or the nearest below that divides by the ranks."""
    return comms.world_size * max(1, 16 // comms.world_size)


def step(model, optimizer, micro_batches, bf16=False):
    optimizer.zero_grad()
    for batch in micro_batches:
        with nullcontext() if batch is micro_batches[-1] else model.no_sync():
            with torch.autocast(comms.device.type, torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss / len(micro_batches)
            loss.backward()
    optimizer.step()
    return loss.detach()


def adamw(model):  # real weights want a smaller step than random ones
    return torch.optim.AdamW(model.parameters(), lr=3e-4 if case.made_up else 2e-5)


# %%
STEPS = 20


def train(model, data):
    optimizer = adamw(model)
    return [step(model, optimizer, [batch]).item() for batch in itertools.islice(data, STEPS)]


size = global_batch(comms)
whole = batches(case.train, size, comms, whole=True)
alone = train(copy.deepcopy(case.model), whole) if rank == 0 else []
alone = comms.all_gather_data(alone)[0]
split = train(DDP(copy.deepcopy(case.model), comms), batches(case.train, size, comms))
split = [sum(losses) / n for losses in zip(*comms.all_gather_data(split), strict=True)]

# %%
worst = max(abs(a - b) for a, b in zip(alone, split, strict=True))
comms.print(f"global batch {size}: one device of {size} against {n} of {size // n}")
comms.print(f"losses of {STEPS} steps differ by {worst:.1e} at most")
figures.lines(
    {"one device": (range(STEPS), alone), f"{n} devices": (range(STEPS), split)},
    title=f"{STEPS} steps on one device and on {n}: losses differ by {worst:.0e} at most",
    xlabel="step",
    ylabel="loss of the global batch",
)
tolerance = 1e-3 if SIZE == "small" else 1e-2  # a GPU picks other kernels for other shapes
assert worst < tolerance
assert SIZE == "full" or not case.made_up or sum(split[-5:]) < 0.8 * sum(split[:5])

# %% [markdown]
r"""
**Explain.** The curves lie on each other: what follows compares two ways to do the same thing.

## Time per batch

**Predict.** On N devices a step computes 1/N of the batch, and averages S bytes of gradients,
however large the batch. With $t(16/N)$ for the computing and $t_S$ for the all-reduce alone, it
takes $t(16/N) + t_S$ if nothing of it is hidden behind backward, and at best the larger of the two.
Both are measured, on no more ranks than there are cores or GPUs, but at least two. The weights are
updated in either case: that is work which no split makes smaller.
"""

# %%
devices = torch.cuda.device_count() if comms.device.type == "cuda" else cpu_cores()
few = comms.subgroup(range(min(n, max(2, devices))))
timed = few is not None
if n == 1:
    comms.print("One rank sends nothing: add --nproc-per-node=2 for the effect of a split.")
if timed:
    size, N = global_batch(few), few.world_size
    model = copy.deepcopy(case.model)
    ddp = DDP(copy.deepcopy(case.model), few)
    optimizers = {m: adamw(m) for m in (model, ddp)}
    batch = next(batches(case.train, size, few, whole=True))
    shards = [b for b, _ in zip(batches(case.train, size, few), range(2), strict=False)]
    flat = torch.zeros(total // 4, device=few.device)
    calls = {
        "one": lambda: few.rank == 0 and step(model, optimizers[model], [batch]),
        "shard": lambda: step(model, optimizers[model], shards[:1]),
        "all-reduce": lambda: few.all_reduce(flat),
        "N": lambda: step(ddp, optimizers[ddp], shards[:1]),
    }
    times = measure(calls, few, warmup=3, repeat=9)
    one, shard, reducing, split = (timing.median for timing in times.values())
    few.print(f"global batch {size} on {N} of {n} ranks, {devices} cores or GPUs")

# %% [markdown]
"""
**Measure.** The published figures are those of the course this one continues: SmolLM2-360M on GLUE
MRPC in fp32, 16 pairs on one GPU, and 8 + 8 on two, where the slower rank counts. Its whole run
took 1.58 s on one and 1.16 s on two:
"""

# %%
PUBLISHED = {"one": 0.0751, "N": 0.0551}  # seconds a batch
gain = PUBLISHED["one"] / PUBLISHED["N"]
if timed:
    rows = [
        ("one device, whole batch", human_seconds(PUBLISHED["one"]), str(times["one"])),
        ("one device's shard", "", str(times["shard"])),
        ("all-reduce alone", "", str(times["all-reduce"])),
        ("split: all hidden", "", human_seconds(max(shard, reducing))),
        ("split: none hidden", "", human_seconds(shard + reducing)),
        ("split: measured", human_seconds(PUBLISHED["N"]), str(times["N"])),
        ("speed-up", f"{gain:.2f}", f"{one / split:.2f}"),
        ("speed-up / devices", f"{gain / 2:.0%}", f"{one / split / N:.0%}"),
    ]
    headers = ["a batch", "published, 2 GPUs", f"here, {N} x {few.device.type}"]
    few.print(tabulate(rows, headers=headers, disable_numparse=True))

# %% [markdown]
"""
**Explain.** Neither column reaches the number of devices, for two reasons that the rows separate.
The shard takes more than 1/N of the batch: the optimizer's work, the start of each kernel and the
time to read the weights are the same for one pair as for sixteen. And the all-reduce has its price.

Where the columns differ, the machine, the size and the software do. A processor computes slowly,
so the same work hides more; its memory carries the messages too, and its threads the adding. Two
ranks also share what lies behind their cores: caches and memory. And a rank alone may have had a
faster clock. A split can even come out above "none hidden", as in chapter 05.

At a *fixed* global batch, more devices make the first reason worse, and the second no better.
Published scaling figures near 100 % keep the batch per device instead (chapter 08).

## The profile

Where does the step's time go? `torch.profiler` records each operation. The core's summary sorts
them by kind, on every rank, and cuts the step in three: computing, waiting for an all-reduce with
nothing to compute, and idle, when the Python around the operations runs, or nothing:
"""


# %%
def profile(model, micro_batches, **options):
    optimizer = adamw(model)
    step(model, optimizer, micro_batches, **options)  # makes the optimizer's state
    return profile_steps(partial(step, model, optimizer, micro_batches, **options), few)


if timed:
    summaries = {"fp32": profile(ddp, shards[:1])}
    few.print(summaries["fp32"])

# %% [markdown]
r"""
An all-reduce's time runs from when the backend takes it up to when the result is there. The wait
for a rank that is late is in it, with NCCL's kernels as with gloo's threads. The rank that came
last did not wait: the shortest of the ranks' times is that of the *transfer* alone.

**Predict.** The published profile, on four H100, has all-reduce at 42.2 % of kernel time, and at
25 % with accumulation over two micro-batches. The first figure should tell the second. Let s be
the share of all-reduce in the time of all kernels. A step of k micro-batches computes k times as
much and reduces once, so the share becomes

$$ s_k = \frac{s}{s + k\,(1 - s)}. $$

On a processor there is no kernel time. Its counterpart is the time of operations and all-reduces
together. Waits follow no formula, so the share is given with them and for transfers alone:

**Measure.**
"""


# %%
def predicted(share, k):
    return share / (share + k * (1 - share))


if timed:
    summaries["fp32, 2 micro-batches"] = profile(ddp, shards)
    both = list(summaries.values())
    shares = [s.busy_share for s in both]
    alone = [s.transfer / (s.transfer + s.mean("computing")) for s in both]
    rows = [
        (name, first, predicted(first, 2), second)
        for name, (first, second) in {
            "published, 4 H100": (0.422, 0.25),
            f"here, {N} x {few.device.type}": shares,
            "here, transfers alone": alone,
        }.items()
    ]
    headers = ["all-reduce's share", "1 micro-batch", "2, predicted", "2, measured"]
    few.print(tabulate(rows, headers=headers, floatfmt=".1%"))
    calls = [{row.kind: row.calls for row in s.rows} for s in both]
    assert calls[0]["all-reduce"] == calls[1]["all-reduce"]
    assert calls[1]["attention"] == 2 * calls[0]["attention"]

# %% [markdown]
"""
**Explain.** The formula leaves the optimizer out, which also runs once a step, so its prediction is
a little low. And it knows nothing of waits: where cores are shared with other programs, or ranks
have sentences of other lengths, one rank is late, and all others wait for it inside the all-reduce,
which is then the longer the longer they compute. That share no network can lower. What
accumulation costs is not in any profile: a step of twice the pairs is another training run, with
half as many steps for the same data.

## bf16

**Predict.** Autocast computes multiplications in bf16 and keeps the weights in fp32. So gradients
are fp32, and the all-reduce does *not* get shorter: if computing gets faster, its share grows. To
send half the bytes, the gradients have to be converted for the journey, by a communication hook.

**Build.** The hook divides first, sends bf16, and puts what comes back into the fp32 bucket:
"""

# %%
sent = []


def halved(group, bucket):
    small = bucket.buffer().to(torch.bfloat16).div_(group.size())
    sent.append(small.nbytes)
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def gradients(hook=None, bf16=False):
    replica = DDP(copy.deepcopy(case.model), few)
    if hook:
        replica.register_comm_hook(few.group, hook)
    step(replica, torch.optim.SGD(replica.parameters(), lr=0.0), shards[:1], bf16)
    assert all(p.grad.dtype == torch.float32 for p in replica.parameters())
    return replica, torch.cat([p.grad.flatten() for p in replica.parameters()])


# %%
if timed:
    _, exact = gradients()
    rows = []
    for name, arguments in {
        "autocast": (None, True),
        "halved": (halved,),
        "torch's bf16_compress_hook": (bf16_compress_hook,),
    }.items():
        _, got = gradients(*arguments)
        rows.append((name, got.nbytes, ((got - exact).norm() / exact.norm()).item()))
    few.print(tabulate(rows, headers=["", "bytes of gradients", "off by"], floatfmt=".1e"))
    few.print(f"'halved' sent {sum(sent):,} bytes, {sum(sent) / total:.2f} of the gradients'")
    assert 2 * sum(sent) == total
    assert max(row[2] for row in rows[1:]) < 2**-7  # bf16 keeps 8 bits

# %% [markdown]
"""
**Measure.** The profile of both, beside the two from above. To compare them, times are per pair:
"""

# %%
if timed:
    for name, hook in (("bf16", None), ("bf16, halved", halved)):
        replica, _ = gradients(hook, bf16=True)
        summaries[name] = profile(replica, shards[:1], bf16=True)
    bars = {}
    for name, s in summaries.items():
        pairs = size * (2 if "micro" in name else 1)
        hidden, waiting = s.mean("hidden"), s.mean("all_reduce") - s.mean("hidden")
        parts = {
            "computing": s.mean("computing") - hidden,
            "computing during all-reduce": hidden,
            "all-reduce alone": waiting,
            "idle": s.mean("idle"),
        }
        bars[name] = {part: seconds / pairs for part, seconds in parts.items()}

# %%
if timed:
    shares = {name: summary.busy_share for name, summary in summaries.items()}
    figures.stacked_bars(
        bars,
        title=f"All-reduce: {shares['fp32']:.0%} of busy time, {shares['bf16']:.0%} in bf16",
        xlabel="time per pair",
    )
    rows = [
        (name, s.busy_share, s.overlap, s.seconds("matrix multiplication") / s.mean("wall"))
        for name, s in summaries.items()
    ]
    headers = ["", "all-reduce", "of it hidden", "multiplications, of the step"]
    few.print(tabulate(rows, headers=headers, floatfmt=".1%"))

# %% [markdown]
"""
**Explain.** Where hardware multiplies bf16 faster, on a GPU's tensor cores or a processor with AMX,
the multiplications shrink, all-reduce's share grows with autocast alone, and the hook takes part of
it back. Without such hardware bf16 is emulated or merely converted, and gains nothing. The copies
to and from bf16 are work too: an all-reduce has to be long before halving it pays for them. The
published run used no tensor cores at all, which means that bf16 is its first thing to try, and
also that its 42.2 % would rise.

## What next?

A profile says where to work, and what it can give at most. If all of the waiting, or the idle time,
or half of the multiplications' time were gone, and nothing else changed:
"""

# %%
if timed:
    s = summaries["fp32"]
    savings = {
        "every all-reduce hidden": s.mean("all_reduce") - s.mean("hidden"),
        "no idle time": s.mean("idle"),
        "multiplications twice as fast": s.seconds("matrix multiplication") / 2,
    }
    wall = s.mean("wall")
    rows = [(name, human_seconds(t), wall / (wall - t)) for name, t in savings.items()]
    headers = ["if there were", "a step saves", "speed-up at most"]
    few.print(tabulate(rows, headers=headers, floatfmt=".2f"))
    few.close()
comms.barrier()  # ranks that are not timed wait here, and leave the cores to those that are

# %% [markdown]
"""
The published run on H100 used the GPU for 15.2 % of a step, the network for 20.9 %, and the CPU
for 61.1 %. By the same reasoning its all-reduce, at 42.2 % of kernel time, is not what to attack
first. The GPU waits for Python to launch kernels: larger micro-batches, `torch.compile` or CUDA
graphs come before anything this book does to gradients. Then bf16, and only then, with kernels
that take less time than their messages, accumulation, a larger batch per device, or compression.

## Where it breaks: the padding token

SmolLM2 has no padding token of its own, as many models that were made to continue text. What
happens to a classifier without one?
"""


# %%
def logits(pad, length):
    """Of the first pair that is shorter than the others, in a batch of so many tokens."""
    tokens, mask, _ = case.train.tensors
    vocabulary = max(int(tokens.max()) + 1, 4096)
    classifier = new_model("small", pad, vocabulary).to(comms.device)
    i = int(mask.sum(1).argmin())
    rows = torch.tensor([i, i])  # a batch of two, so that rows could differ in length
    batch = (x[rows, :length].to(comms.device) for x in (tokens, mask))
    with torch.no_grad():
        return classifier(*batch).logits[0]


try:
    logits(None, 64)
    raise AssertionError("expected an error")
except ValueError as error:
    comms.print(error)

# %% [markdown]
"""
That one is loud. The common repair is to name *some* token, and it is quiet if that is not the one
that batches are padded with. **Predict.** The head then reads the last column, which is padding in
all rows but the longest. A pair's answer comes to depend on how long its batch was padded, that is
on its neighbours, and a shard has others than the whole batch: N devices train another model than
one, and nobody is told.
"""

# %%
shortest = int(case.train.tensors[1].sum(1).min())
rows, more = [], 20
for name, pad in (("the wrong token", case.pad + 1), ("the token of the batches", case.pad)):
    tight, padded = (logits(pad, shortest + extra) for extra in (0, more))
    rows.append((name, *tight.tolist(), *padded.tolist(), (tight - padded).abs().max().item()))
headers = ["pad_token_id is", "logits", "", f"with {more} more columns", "", "differ by"]
comms.print(tabulate(rows, headers=headers, floatfmt=(*("", *[".4f"] * 4), ".1e")))
assert rows[0][-1] > 1e-3
assert rows[1][-1] < 1e-5

# %% [markdown]
"""
Set `model.config.pad_token_id` to the tokenizer's `pad_token_id`, and pad on the right. The check
of this chapter's second section finds it too: the same losses on one device and on N, with every
shard padded to its own length.

## What to take along

- The same global batch on N devices is the same training. Check it on losses before you time it.
- At a fixed global batch, the gain ends where a shard's step is the optimizer and the start of
  kernels. Measure the shard alone and the all-reduce alone: together they predict the rest.
- Say what a share is a share of. The same all-reduce is one share of kernel time and another of a
  step.
- Accumulation divides all-reduce's share about as the formula says. Autocast raises it, and does
  not change what is sent.

## Exercises

1. Pass `folder="traces"` to `profile_steps`, open `rank0.json` in https://ui.perfetto.dev, and find
   the first all-reduce. Which layer's backward runs beside it?
2. Predict the share at four micro-batches, with the optimizer's part taken out of the formula.
3. Set `SIZE = "full"` on a processor with an hour to spare. Which of the rows of the first table
   grow by the ratio of the parameters, and which by more?
4. Pad each shard to its own longest pair. What does it gain, and what becomes of the slowest rank?
"""

# %%
comms.close()
