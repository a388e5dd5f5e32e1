# %% [markdown]
r"""
# 09. Case study: a language model

What does a second device gain on a model that people train? The models so far were made for their
questions. This chapter takes a decoder of SmolLM2's architecture, and teaches it to tell whether
two sentences say the same (GLUE's MRPC, 3668 pairs to train on). Where a GPU has room it is
SmolLM2-360M itself, of 32 layers; elsewhere, as on a CPU, a small one of the same kind. The *same
global batch of 16* is taken by one device, or split over N. What takes the rest of the gain?
Published figures for the full model stand beside the measured ones.

It needs `pip install "microddp[llm]"`. With `transformers` alone, or where the hub cannot be
reached, it runs on made-up pairs: then it is about times, and not about how well a model learns.
"""

# %% tags=["imports"]
import copy
import gc
import itertools
import math
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import microddp
from microddp import figures
from microddp.comms import peak_memory
from microddp.ddp import DDP
from microddp.model import gradient_bytes, parameter_count
from microddp.performance import profile_steps
from microddp.report import human_bytes, human_seconds, table
from microddp.timing import measure
from microddp.workloads import batches, load_case, new_model

# %%
# sphinx_gallery_builds = "one language model trained on one device and on several"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
timed = comms.timed()
rank, n = timed.rank, timed.world_size
timed.print(f"{n} of {comms.world_size} ranks stay")
if n == 1:
    timed.print("One rank sends nothing: add --nproc-per-node=2 for the effect of a split.")

# %% [markdown]
"""
As in the last chapter, ranks that have no core or GPU of their own left at the start. The N devices
of this chapter are the others.

## The case

The weights, the tokenizer and the sentences come from the Hugging Face hub. Where it cannot be
reached, the weights are random and the pairs made up, with MRPC's lengths and its share of
*paraphrases*, which are the pairs that say the same. On a CPU the full size would take too long.
There the model is smaller in every direction, and has random weights.

The same goes for a GPU without room. Most is needed below, where a model that trains alone stands
beside one that trains with others. Each holds weights, gradients and the two moments that AdamW
keeps of them. Add the model as it was loaded, a message of all gradients, and a second set of
buckets while they are planned anew. The activations of a batch get a quarter on top:
"""

# %%
COPIES = 1 + 2 * (1 + 1 + 2) + 1 + 1
with torch.device("meta"):  # shapes without memory
    needed = 1.25 * COPIES * gradient_bytes(new_model("full", pad=0))
timed.print(
    f"{COPIES} times the parameters; with activations {human_bytes(needed)} a rank, full size"
)


# %%
def room():
    """Bytes of this rank's GPU that are free for it, as the ranks on it share them alike."""
    gpus = torch.cuda.device_count()
    sharing = math.ceil(min(timed.local_world_size, max(2, gpus)) / gpus)
    return torch.cuda.mem_get_info()[0] / sharing


# %%
SIZE = "small"
if timed.device.type == "cuda":
    least = min(timed.all_gather_data(room()))  # all must choose alike
    timed.print(f"free for each rank: {human_bytes(least)} or more")
    SIZE = "full" if needed <= least else "small"
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

# %% [markdown]
"""
Random weights take as long to train as real ones of that size, and the pairs are as long, so their
times mean the same. Losses do not: made-up pairs are easier to tell than English ones. And shares
depend on the size (exercise 3).

One thing is unlike the models before. Pairs of different lengths share a batch, so the shorter ones
are filled up with a *padding token*. The *head*, which makes the answer, reads the vector of a
pair's last real token. To find it, the model has to know the padding token, and the last section
shows what happens if it is told a wrong one.

## The same losses

**Predict.** The loss of a batch is the mean over its pairs. Shards are equal, so the mean of the
ranks' losses is the loss of the batch, and the averaged gradients are its gradients. All runs of
the same batches should agree up to rounding.

**Build.** One step, for the whole chapter: several micro-batches, of which only the last averages
gradients (chapter 06), in fp32 or with autocast:
"""


# %%
def step(model, optimizer, micro_batches, bf16=False):
    optimizer.zero_grad()
    for batch in micro_batches:
        with nullcontext() if batch is micro_batches[-1] else model.no_sync():
            with torch.autocast(timed.device.type, torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss / len(micro_batches)
            loss.backward()
    optimizer.step()
    return loss.detach()


# %%
def adamw(model):  # real weights want a smaller step than random ones
    return torch.optim.AdamW(model.parameters(), lr=3e-4 if case.made_up else 2e-5)


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
# A wrapper, its hooks and its model refer to each other, so only the collector frees them.
_ = gc.collect()
split = train(DDP(copy.deepcopy(case.model), timed), batches(case.train, size, timed))
split = [sum(losses) / n for losses in zip(*timed.all_gather_data(split), strict=True)]
_ = gc.collect()

# %%
worst = max(abs(a - b) for a, b in zip(alone, split, strict=True))
timed.print(f"global batch {size}: one device of {size} against {n} of {size // n}")
timed.print(f"losses of {STEPS} steps differ by {worst:.1e} at most")
tolerance = 1e-3 if SIZE == "small" else 1e-2  # a GPU picks other kernels for other shapes
assert worst < tolerance
assert SIZE == "full" or not case.made_up or sum(split[-5:]) < 0.8 * sum(split[:5])

# %% tags=["plumbing"]
figures.lines(
    {"one device": (range(STEPS), alone), f"{n} devices": (range(STEPS), split)},
    title=f"{STEPS} steps on one device and on {n}: losses differ by {worst:.0e} at most",
    xlabel="step",
    ylabel="loss of the global batch",
)

# %% [markdown]
r"""
**Explain.** The curves lie on each other. So what follows compares two ways to do the same thing.

## Time per batch

**Predict.** On N devices each step computes 1/N of the batch, and averages S bytes of gradients,
however large the batch. Let $t(16/N)$ be the time of the computing and $t_S$ that of the all-reduce
alone. The step takes $t(16/N) + t_S$ if nothing is hidden behind backward, and at best the larger
of the two. Both are measured. Each rank updates all weights: that is work which no split makes
smaller.
"""

# %%
batch = next(batches(case.train, size, timed, whole=True))
shards = [b for b, _ in zip(batches(case.train, size, timed), range(2), strict=False)]


# %%
def time_batches():
    model, ddp = copy.deepcopy(case.model), DDP(copy.deepcopy(case.model), timed)
    optimizer, flat = adamw(model), torch.zeros(total // 4, device=timed.device)
    calls = {
        "one": lambda: rank == 0 and step(model, optimizer, [batch]),
        "shard": lambda: step(model, optimizer, shards[:1]),
        "all-reduce": lambda: timed.all_reduce(flat),
        "N": partial(step, ddp, adamw(ddp), shards[:1]),
    }
    return measure(calls, timed, repeat=7)


# %%
times = time_batches()
_ = gc.collect()
one, shard, reducing, split = (timing.median for timing in times.values())
if timed.device.type == "cuda":
    timed.print(f"at the peak {peak_memory(timed.device) / total:.1f} times the parameters")

# %% [markdown]
"""
**Measure.** The published figures are those of the course that this book continues,
[microddp](https://github.com/kiankyars/microddp) (2025): SmolLM2-360M on GLUE MRPC in fp32, 16
pairs on one GPU, and 8 + 8 on two, where the slower rank counts. Its whole run took 1.58 s on one
and 1.16 s on two:
"""

# %%
PUBLISHED = {"one": 0.0751, "N": 0.0551}  # seconds a batch
gain = PUBLISHED["one"] / PUBLISHED["N"]

# %% tags=["plumbing"]
rows = [
    ("one device, whole batch", human_seconds(PUBLISHED["one"]), times["one"]),
    ("one device's shard", None, times["shard"]),
    ("all-reduce alone", None, times["all-reduce"]),
    ("split: all hidden", None, human_seconds(max(shard, reducing))),
    ("split: none hidden", None, human_seconds(shard + reducing)),
    ("split: measured", human_seconds(PUBLISHED["N"]), times["N"]),
    ("speed-up", gain, one / split),
    ("speed-up / devices", f"{gain / 2:.0%}", f"{one / split / n:.0%}"),
]
timed.print(f"global batch {size} on {n} ranks")
timed.print(table(rows, ["a batch", "published, 2 GPUs", f"here, {n} x {timed.device.type}"]))

# %% tags=["plumbing"]
ideal, fixed, added = (f"{t * 1e3:.3g}" for t in (one / n, shard - one / n, split - shard))
timed.print(f"the split's {split * 1e3:.3g} ms: {ideal} are 1/{n} of one device's,")
timed.print(f"  {fixed} what a shard takes beyond that, {added} what the averaging adds")
low, high = times["N"].spread
where = "with both quartiles between the predictions"
if low > shard + reducing or high < max(shard, reducing):
    where = "outside the predictions, and so are its quartiles"
elif low < max(shard, reducing) or high > shard + reducing:
    where = "not told apart from a prediction: it lies between the quartiles"
timed.print(f"the split is {where}")
low, high = times["one"].ratio(times["N"]).spread
timed.print(f"speed-up by rounds: {low:.2f} to {high:.2f} (quartiles)")

# %% [markdown] index=["profiler", "profile"]
"""
**Explain.** A speed-up of N needs the last two to be nothing. A shard takes more than 1/N of the
batch: the optimizer's work, the start of each kernel and the time to read the weights are the same
for one pair as for sixteen. Ranks in one machine also share what lies behind their cores, caches
and memory, and one rank alone may run at a faster clock. And the averaging adds what backward does
not hide, and the wait for whoever is late. Of this model it can hide little: nearly all bytes
travel in the last bucket, which ends with the embedding, and that gradient is the last to come
(exercise 1). Where cores carry and add up the messages, what is hidden takes their time.

At a *fixed* global batch, more devices make the second part larger in relation to the first, and
the third no smaller. Scaling at a fixed batch *per device* is another question (chapter 08).

## The profile

Where does the step's time go? The profiler of chapter 08 sorts operations by kind, and takes the
step of each rank apart: computing, an all-reduce under way, both at once (*hidden*), or neither
(*idle*). When a rank is idle, the Python around the operations runs, or nothing does. Other
collectives are in none of them, and shares of the upper table add up to more than 100 % where
all-reduces run beside the rest:
"""


# %%
def profile(model, micro_batches, **options):
    one_step = partial(step, model, adamw(model), micro_batches, **options)
    return profile_steps(one_step, timed, steps=2)  # after one that makes the optimizer's state


replica = DDP(copy.deepcopy(case.model), timed)
summaries = {"fp32": profile(replica, shards[:1])}
timed.print(summaries["fp32"])

# %% [markdown]
r"""
An all-reduce's time runs from when the backend takes it up to when the result is there. It includes
the wait for a rank that is late, with NCCL's kernels as with gloo's threads. The rank that came
last waited for nobody. So the shortest of the ranks' times, taken for each all-reduce, stands for
the *transfer*.

**Predict.** *Kernel time* is the time of all kernels of a GPU, added up. In the same course's
profile, on four H100, all-reduce takes 42.2 % of it, and 25 % with accumulation over two
micro-batches. The first figure should tell the second. Let s be the share of all-reduce. A step of
k micro-batches computes k times as much and reduces once, so the share becomes

$$ s_k = \frac{s}{s + k\,(1 - s)}. $$

On a CPU there are no kernels; the counterpart is the time of operations and all-reduces together.

**Measure.** Waits follow no formula, so the share is given with them and for transfers alone:
"""


# %%
def predicted(share, k):
    return share / (share + k * (1 - share))


summaries["fp32, 2 micro-batches"] = profile(replica, shards)
del replica
_ = gc.collect()
both = list(summaries.values())
shares = [s.busy_share for s in both]
alone = [s.transfer / (s.transfer + s.mean("computing")) for s in both]
calls = [{row.kind: row.calls for row in s.rows} for s in both]
assert calls[0]["all-reduce"] == calls[1]["all-reduce"]
assert calls[1]["attention"] == 2 * calls[0]["attention"]

# %% tags=["plumbing"]
rows = [
    (name, first, predicted(first, 2), second)
    for name, (first, second) in {
        "published, 4 H100": (0.422, 0.25),
        f"here, {n} x {timed.device.type}": shares,
        "here, transfers alone": alone,
    }.items()
]
headers = ["all-reduce's share", "1 micro-batch", "2, predicted", "2, measured"]
timed.print(table(rows, headers, floats=".1%"))
misses = [f"{(row[3] - row[2]) * 100:+.1f}" for row in rows]
timed.print(f"measured less predicted, percentage points: {', '.join(misses)}")

# %% [markdown] index=["mixed precision", "bf16", "autocast"]
"""
**Explain.** The formula leaves the optimizer out, which also runs once a step. That alone would
make its predictions a little low; the published pair misses on the other side (exercise 2). And
the formula knows nothing of waits. Where cores are shared with other programs, one rank is late,
and all others wait for it inside the all-reduce, which no network can shorten. So the row of
transfers should lie nearer to its prediction than the row with waits; two profiled steps do not
tell small differences. What accumulation costs is
not in any profile: a step of twice the pairs is another training run, with half as many steps for
the same data.

## bf16

**Predict.** Autocast computes multiplications in bf16 and keeps the weights in fp32. So gradients
are fp32, and the all-reduce does *not* get shorter: if computing gets faster, its share grows. To
send half the bytes, the gradients have to be converted for the journey, by a communication hook.

**Build.** The hook converts, divides, sends, and puts what comes back into the fp32 bucket:
"""

# %%
sent = []


def halved(group, bucket):
    small = bucket.buffer().to(torch.bfloat16).div_(group.size())
    sent.append(small.nbytes)
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


# %%
def gradients(hook=None, bf16=False):
    replica = DDP(copy.deepcopy(case.model), timed)
    if hook:
        replica.register_comm_hook(timed.group, hook)
    step(replica, torch.optim.SGD(replica.parameters(), lr=0.0), shards[:1], bf16)
    assert all(p.grad.dtype == torch.float32 for p in replica.parameters())
    return replica, torch.cat([p.grad.flatten() for p in replica.parameters()])


# %%
_, exact = gradients()
rows = []
for name, arguments in {
    "autocast": (None, True),
    "halved": (halved,),
    "torch's bf16_compress_hook": (bf16_compress_hook,),
}.items():
    gc.collect()
    _, got = gradients(*arguments)
    rows.append((name, got.nbytes, ((got - exact).norm() / exact.norm()).item()))
timed.print(table(rows, ["", "bytes of gradients", "off by"], floats=".1e"))
timed.print(f"'halved' sent {sum(sent):,} bytes, {sum(sent) / total:.2f} of the gradients'")
assert 2 * sum(sent) == total
assert max(row[2] for row in rows[1:]) < 2**-7  # bf16 keeps 8 bits

# %% [markdown]
"""
**Measure.** The profile of both, beside the two from above. To compare them, times are per pair:
"""

# %%
del exact, got, _
for name, hook in (("bf16", None), ("bf16, halved", halved)):
    replica, _ = gradients(hook, bf16=True)
    summaries[name] = profile(replica, shards[:1], bf16=True)
    del replica, _
    gc.collect()

# %% tags=["plumbing"]
bars = {}
for name, s in summaries.items():
    pairs = size * (2 if "micro" in name else 1)
    hidden, waiting = s.mean("hidden"), s.mean("all_reduce") - s.mean("hidden")
    parts = {
        "computing": s.mean("computing") - hidden,
        "computing during all-reduce": hidden,
        "all-reduce, not hidden": waiting,
        "idle": s.mean("idle"),
    }
    bars[name] = {part: seconds / pairs for part, seconds in parts.items()}
taken = [human_seconds(summaries[k].transfer) for k in ("fp32", "bf16", "bf16, halved")]
figures.stacked_bars(
    bars,
    title=f"Transfers of a step: {taken[0]}, {taken[1]} with autocast, {taken[2]} halved",
    xlabel="time per pair",
)

# %% tags=["plumbing"]
rows = [
    (
        name,
        s.busy_share,
        s.overlap,
        s.seconds("matrix multiplication") / s.mean("wall"),
        human_seconds(s.mean("computing")),
        human_seconds(sum(bars[name].values())),
    )
    for name, s in summaries.items()
]
headers = ["", "all-reduce / busy", "hidden / all-reduce", "multiplications / step"]
headers += ["computing, a step", "a pair"]
timed.print(table(rows, headers, floats=".1%"))

# %% [markdown]
"""
**Explain.** Some hardware multiplies bf16 faster: a GPU's tensor cores, or a CPU with instructions
for it (AMX, or AVX-512's for bf16). There the multiplications shrink, and with autocast alone
all-reduce's share should grow with what they save, less the copies that autocast makes. How much of
it is left, the column of computing says. The hook should lower the share. Waits for a late rank,
which half the bytes do not shorten, can hide both; the title is of transfers alone. Other hardware
emulates bf16 or converts it, and gains nothing. The copies to and from bf16 are work too: whether
halving pays for them, the last column says.

## What next?

A profile says where to work, and what it can give at most. If all of the waiting, or the idle time,
or half of the multiplications' time were gone, and nothing else changed:
"""

# %%
s = summaries["fp32"]
savings = {
    "every all-reduce hidden": s.mean("all_reduce") - s.mean("hidden"),
    "no idle time": s.mean("idle"),
    "multiplications twice as fast": s.seconds("matrix multiplication") / 2,
}
wall = s.mean("wall")
rows = [(name, human_seconds(t), wall / (wall - t)) for name, t in savings.items()]
timed.print(table(rows, ["if there were", "a step saves", "speed-up at most"]))

# %% [markdown] index=["FSDP", "fully_shard", "ZeRO", "sharding"]
r"""
What would save most is what to work on. The course's profile on four H100 says 15.2 % of the step
for the GPU, 20.9 % for communication and 61.1 % for the CPU. There the GPU waits for Python to
launch kernels, so larger micro-batches, `torch.compile` or CUDA graphs come before anything this
book does to gradients. Where kernels take less time than the messages, it is time for accumulation,
a larger batch per device, or compression.

## A model that does not fit

DDP keeps everything on every rank: weights, gradients and AdamW's two moments, 16 bytes for each
parameter in fp32. PyTorch's *FSDP* (fully sharded data parallel, `fully_shard`) keeps of each only
one n-th on a rank. Weights are gathered when a layer needs them, in forward and again in backward,
and each rank gets the mean of its n-th of the gradients alone. Each of the three sends
$\frac{n-1}{n}$ of the bytes, where an all-reduce sends twice that: 1.5 times as much
([ZeRO](https://arxiv.org/abs/1910.02054), section 7, 2019). For this model at its full size, worked
out and not measured, without activations:
"""

# %%
with torch.device("meta"):
    full = gradient_bytes(new_model("full", pad=0))
rows = [
    (
        ranks,
        *map(human_bytes, (4 * full, 4 * full / ranks)),
        *map(human_bytes, (2 * sent, 3 * sent)),
    )
    for ranks, sent in ((ranks, full * (ranks - 1) / ranks) for ranks in (1, 2, 4, 8))
]
timed.print(table(rows, ["ranks", "DDP keeps", "FSDP keeps", "DDP sends", "FSDP sends"]))

# %% [markdown] index=["padding"]
"""
The layers that are gathered at the moment come on top. Sharding is for models that leave no choice,
and for links that carry the additional bytes in time.

## Where it breaks: the padding token

Like many models that were made to continue text, SmolLM2 has no padding token of its own. What
happens to a classifier without one?
"""


# %%
def logits(pad, length):
    """Of the first pair that is shorter than the others, in a batch of so many tokens."""
    tokens, mask, _ = case.train.tensors
    vocabulary = max(int(tokens.max()) + 1, 4096)
    classifier = new_model("small", case.pad, vocabulary).to(timed.device)
    classifier.config.pad_token_id = pad
    i = int(mask.sum(1).argmin())
    rows = torch.tensor([i, i])  # one row alone needs no padding token
    batch = (x[rows, :length].to(timed.device) for x in (tokens, mask))
    with torch.no_grad():
        return classifier(*batch).logits[0]


# %%
try:
    logits(None, 64)
    raise AssertionError("expected an error")
except ValueError as error:
    timed.print(error)

# %% [markdown]
"""
That one is loud. The common repair is to name *some* token. If that is not the one that batches are
padded with, nothing complains.

**Predict.** The head then reads the last column, which is padding in all rows but the longest. So a
pair's answer depends on how far its batch was padded, which is the length of its longest neighbour.
Where shards are padded on their own, a pair has other neighbours than in the whole batch: N devices
train another model than one, and nobody is told.
"""

# %%
shortest = int(case.train.tensors[1].sum(1).min())
rows, more = [], 20
for name, pad in (("the wrong token", case.pad + 1), ("the token of the batches", case.pad)):
    tight, padded = (logits(pad, shortest + extra) for extra in (0, more))
    rows.append((name, *tight.tolist(), *padded.tolist(), (tight - padded).abs().max().item()))
headers = ["pad_token_id is", "logits", "", f"with {more} more columns", "", "differ by"]
timed.print(table(rows, headers, floats=(*("", *[".4f"] * 4), ".1e")))
assert rows[0][-1] > 1e-3
assert rows[1][-1] < 1e-5

# %% [markdown]
r"""
The fix: set `model.config.pad_token_id` to the tokenizer's `pad_token_id`, and pad on the right.
The check of this chapter's second section finds the mistake too, if every shard is padded to its
own length: the losses on one device and on N then differ.

## What to take along

- The same global batch on N devices is the same training. Check it on losses before you time it.
- At a fixed global batch, a split gains until what a shard cannot make smaller, and the averaging
  that is not hidden, take as much as it saves. Measure the shard alone and the all-reduce alone: a
  split takes between the longer of them and their sum, unless cores and memory are shared.
- Say what a share is a share of. The same all-reduce is one share of kernel time and another of a
  step.
- Accumulation divides the share of the transfers roughly as the formula says; waits for a late rank
  follow no formula. Autocast does not change what is sent, so the share grows where computing gets
  faster.

## Exercises

1. Which parameters travel in the first all-reduce of a step, and which layer's backward runs beside
   it? Ask `ddp.reducer.buckets`. Then pass `folder="traces"` to `profile_steps`, open `rank0.json`
   in https://ui.perfetto.dev, and look.

   <details class="solution"><summary>Solution</summary>

   For the small model there are two buckets: `bucket.parameters()` names the tensors and
   `bucket.buffer().nbytes` the size. The first takes the head, the last norm and the three matrices
   of the last layer's MLP, which together pass the first bucket's cap of 1 MiB. So beside its
   all-reduce runs the backward of the same layer's attention. The trace shows it: `gloo:all_reduce`
   begins soon after the fourth `MmBackward0`, and `ScaledDotProductFlashAttentionForCpuBackward0`
   runs about then. The second bucket holds all the rest. It ends with the embedding, whose gradient
   is the last of backward, so next to nothing hides it.

   </details>

2. Let the optimizer take the share o of kernel time, and put it into the formula. Which o would
   explain the published pair, 42.2 % and 25 %? And what share follows at four micro-batches, for
   o = 0 and for o = 5 %?

   <details class="solution"><summary>Solution</summary>

   The optimizer runs once a step, as the all-reduce does, so

   $$ s_k = \frac{s}{s + o + k\,(1 - s - o)} . $$

   Solved for o with $s_2 = 0.25$, that is $o = 0.422 + 2 \cdot 0.578 - 0.422 / 0.25 = -0.11$. No
   optimizer takes less than nothing. So something else changed between the two runs: the all-reduce
   of the second must have been shorter in relation to a micro-batch, for example because ranks
   waited less in it. At four micro-batches the formula gives 15.4 % without an optimizer and 16.3 %
   with one of 5 %.

   </details>

3. The full model has 153 times the parameters of the small one. By which factor do the bytes of the
   all-reduce grow, and by which the multiplications of a step on the same pairs?
   {class}`~microddp.performance.roofline.WorkCounter` counts them. Why are the factors not the
   same?

   <details class="solution"><summary>Solution</summary>

   The bytes grow 153-fold, one gradient for each parameter. The multiplications of matrices grow
   200-fold. The difference is the embedding, which is looked up and multiplies nothing: it holds a
   third of the small model's parameters, and 13 % of the full one's. Without it the parameters grow
   200-fold, too. So the full model computes 1.3 times as much for each byte it sends, which lowers
   the share of its all-reduce. (The counter has no formula for the CPU's attention kernel, so
   attention itself is not in the count.)

   </details>

4. Pad each shard to its own longest pair, instead of the global batch's. How much shorter do shards
   become, and how much shorter the step?

   <details class="solution"><summary>Solution</summary>

   Over an epoch of the made-up pairs, a shard of 8 is 4.7 % shorter on average than its global
   batch, and a shard of 2, on eight ranks, 16 %. But in every step some rank has the longest pair
   of the global batch, and its shard is as long as before. The others finish earlier and wait for
   it in the all-reduce. So where each rank has a device of its own, the step gains nothing. What
   helps are global batches of pairs of similar lengths: sort the pairs of a few global batches by
   length, and cut them into batches anew. That changes which pairs share a batch, and so the
   training.

   </details>
"""

# %%
comms.close()
