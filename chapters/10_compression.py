# %% [markdown]
r"""
# 10. Gradient compression

How few bits are enough? You care if your steps wait for the network: what is not sent is not waited
for. First send 16 bits instead of 32: one line, no state. Only where that is too slow, send less:
8 bits, the largest values, thin matrices. This chapter builds them, counts their bytes, follows
what they leave out, and asks on which links they pay.
"""

# %% tags=["imports"]
import itertools
import math
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import parameters_to_vector

import microddp
from microddp import figures
from microddp.allreduce import ring_all_reduce
from microddp.compression import Compression, compress_hook, compressor
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.ddp import DDP
from microddp.findings import Prediction, compare, find
from microddp.hosts import relink
from microddp.message_counter import MessageCounter
from microddp.model import FullMLP, parameter_count
from microddp.report import human_bytes, table
from microddp.shared import on_thread
from microddp.stage import cluster, known_clusters, set_stage
from microddp.timing import Timing, measure

# %%
# sphinx_gallery_builds = "bf16 messages, top-k with error feedback, and sums in two phases"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())
usual = comms.box and comms.box.links[0].option

# %% [markdown] index=["bf16", "compression hook"]
r"""
## Half the bits

DDP calls a *communication hook* with each full bucket, and waits for the *future* that it returns
(chapter 06). *bf16* is the upper half of a 32-bit number: sign, exponent, and 8 significant bits
instead of 24.

**Build.** Divide, round, add up, write back. microddp's
{func}`~microddp.shared.comm_hook.on_thread` runs a call on a thread beside backward, and returns
its future:
"""


# %%
def in_bf16(flat, comms):
    half = flat.div(comms.world_size).bfloat16()
    comms.all_reduce(half)
    flat.copy_(half)


def hook(state, bucket):
    average, group = state
    return on_thread(partial(average, comms=group), bucket.buffer())


# %% [markdown]
r"""
**Predict.** The stage is a scale model of eight machines with an A100 and 25 Gbit/s each (chapter
03), on links of 200 Mbit/s. There are two buckets: one leaves halfway through backward, one at its
end. With $M$ for all messages alone a step takes $\max(C, \frac{2}{3}C + \frac{1}{2}M) +
\frac{1}{2}M$. In bf16 $M$ is half.

**Measure.**
"""

# %%
if usual:
    relink(comms, "200mbit")
own = comms.subgroup(range(n))  # connections that begin at this speed
WORK = {"parameters": 355e6, "tokens": 24_576, "layers": 24}
there = cluster("a100", "25gbit", nodes=n, node=1, value_size=4, **WORK)
stage = set_stage(own, there, layer_bytes=1 << 17)
comms.print(stage)


# %%
def step_with(*arguments):
    strategy = stage.strategy("ddp", 1.5)
    if arguments:
        strategy.module.register_comm_hook(*arguments)
    return stage.step(strategy)


calls = {"one device": stage.step("none"), "fp32": step_with()}
calls["bf16"] = step_with((in_bf16, own), hook)
steps = measure(calls, comms, warmup=1, repeat=5)


# %% tags=["plumbing"]
def in_two_buckets(C, M):
    return max(C, 2 / 3 * C + M / 2) + M / 2


gain = compare(steps["bf16"], steps["fp32"])
speeds = {name: stage.speed_up(steps[name], steps["one device"]) for name in ("fp32", "bf16")}
said = (
    f"{n} devices are {speeds['bf16'].ratio:.1f} times as fast as one with bf16 messages, and "
    f"{speeds['fp32'].ratio:.1f} times with fp32: a step is {gain.than('in fp32')}."
)
if stage.sides:
    C, M = stage.sides[1].compute, stage.sides[1].messages
    ideal = in_two_buckets(C, M) / in_two_buckets(C, M / 2)
    said += f" By C and M alone it would be {ideal:.2f} times as fast."
find(comms, "half", **gain.sides(said if n > 1 else "One rank has nothing to send."))
figures.speed_ups(
    {name: speed.times for name, speed in speeds.items()},
    n,
    title=f"bf16 messages: {gain} as fp32",
)

# %% [markdown]
r"""
$C$ and $M$ leave out the starts of messages (chapter 03), what a device alone takes beyond $C$, and
what the hook does beside sending, of which *Where it pays* measures an example, on two ranks.

PyTorch has this hook, too: `ddp.register_comm_hook(group, bf16_compress_hook)`.

## The dtype of a sum

**Predict.** Around a ring a sum passes $n - 1$ hops, and each stores it in bf16, off by up to
$2^{-8}$ of itself. The errors pile up. The *noise* of a gradient, from the choice of the samples,
shrinks with their number. So rounding counts for more, the more ranks there are.

**Measure.** A small network has learned the digits for an epoch. The gradients of the first $n$ of
64 shards are added up as a ring of $n$ ranks would, here without messages; or rounded once, added
up in fp32, and rounded again:
"""

# %%
digits = load_digits(comms.device)


def new_model():
    torch.manual_seed(0)
    return FullMLP(128, 3, inputs=64, outputs=10).to(comms.device)


def gradient_of(model, x, y):
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


# %%
model = new_model()
sizes = [p.numel() for p in model.parameters()]
for x, y in ShardedBatches(digits.train, 96, 0, 1).epoch(0):
    step = 0.1 * gradient_of(model, x, y)
    for p, part in zip(model.parameters(), step.split(sizes), strict=True):
        p.data -= part.view_as(p)
xs, ys = (tensor[: 64 * 22].chunk(64) for tensor in digits.train.tensors)
shards = torch.stack([gradient_of(model, x, y) for x, y in zip(xs, ys, strict=True)])


# %%
def around_a_ring(values, dtype):
    total = values[0].to(dtype)
    yield total
    for value in values[1:]:
        total = total + value.to(dtype)
        yield total


# %%
COUNTS, curves = [2, 4, 8, 16, 32, 64], []
hops = list(around_a_ring(shards, torch.bfloat16))
for count in COUNTS:
    some = shards[:count].double()
    mean, in_fp32 = some.mean(dim=0), some.bfloat16().float().sum(dim=0).bfloat16()
    ring, once = (total.double() / count - mean for total in (hops[count - 1], in_fp32))
    noise = some.std(dim=0) / math.sqrt(count)
    curves.append([100 * (error.norm() / mean.norm()).item() for error in (ring, once, noise)])

# %% tags=["plumbing"]
ring, once, noise = zip(*curves, strict=True)
names = "rounded at each hop", "added up in fp32", "noise of the samples"
figures.lines(
    {name: (COUNTS, curve) for name, curve in zip(names, (ring, once, noise), strict=True)},
    title=f"64 ranks: a ring's bf16 sum is {ring[-1]:.1f} % off, a sum in fp32 {once[-1]:.1f} %",
    xlabel="ranks",
    ylabel="off, % of the mean gradient",
    log="xy",
)
said = (
    f"From 2 to 64 ranks a bf16 sum's error grows from {ring[0]:.1f} % to {ring[-1]:.1f} % of the "
    f"mean; with sums in fp32 it is {once[-1]:.1f} % at 64. The noise is {noise[0] / ring[0]:.0f} "
    f"times the ring's error at 2 ranks, and {noise[-1] / ring[-1]:.0f} times at 64."
)
below = ring[-1] < noise[-1]
find(comms, "dtype-of-a-sum", below=(below, said), above=(not below, said))

# %% [markdown]
r"""
**Explain.** Roundings up and down can cancel, as long as a rank's share is larger than the sum's
last bit. **Predict.** With 8 significant bits $256 + 1$ has no room for the 1. Equal shares stop
counting at 256 ranks:
"""

# %%
ones = [total.item() for total in around_a_ring(torch.ones(512, 1), torch.bfloat16)]
for count in (64, 96, 256, 384, 512):
    comms.print(f"{count} ranks send 1: the mean is {ones[count - 1] / count:.2f}")
assert ones[255:] == [256.0] * 257

# %% [markdown]
r"""
Models of 1B and 7B trained well on 96 GPUs with bf16 sums, were unstable on 384, and stable again
with sums in fp32 ([PyTorch issue 106395](https://github.com/pytorch/pytorch/issues/106395), August
2023, which does not tell whether this was the reason). With hundreds of ranks, add up in fp32:
`MixedPrecisionPolicy(reduce_dtype=torch.float32)` for `fully_shard`, which sends 32 bits again, or
as below, with 16.

## Where it breaks: sums in fp16

*fp16* has 11 significant bits, but less room than bf16: its largest value is 65504, its smallest
0.00000006, and what is below half of that becomes 0. **Predict.** The sum of two values of 60000
does not fit. Divided before the sum it does, with sums on the way rounded to 11 bits; but small
values vanish:
"""

# %%
for way, before, after in (("sum first", 1, n), ("divide first", n, 1)):
    half = (torch.tensor([6e4, 4e-8]) / before).half().to(comms.device)
    comms.all_reduce(half)
    large, small = (half.float() / after).tolist()
    comms.print(f"{way}: the mean of 60000 is {large:.0f}, that of 4e-8 {small:.0e}")
    assert n == 1 or (large == math.inf if before == 1 else small == 0)

# %% [markdown] index=["top-k", "error feedback"]
r"""
## The largest values

Send only the $k$ largest values by magnitude, with their places: eight bytes for each.

**Build.** What was not sent is kept, and added to the next gradient: [*error
feedback*](https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent-and-application-to-data-parallel-distributed-training-of-speech-dnns/)
(Seide and others, 2014), for each parameter, because DDP deals its buckets anew after the first
step. Every rank has other places, so each needs what all have sent: an all-gather.
"""


# %%
class TopK:
    def __init__(self, share, comms, keeps=True):
        self.share, self.comms, self.keeps, self.kept = share, comms, keeps, {}

    def average(self, parameters, flat):
        rest = flat + self.from_before(parameters)
        places = rest.abs().topk(math.ceil(self.share * len(rest))).indices
        values, theirs = map(self.comms.all_gather, (rest[places], places.int()))
        flat.zero_()
        for value, place in zip(values, theirs, strict=True):
            flat.index_add_(0, place, value, alpha=1 / len(values))
        rest[places] = 0
        if self.keeps:
            parts = rest.split([p.numel() for p in parameters])
            self.kept.update(zip(parameters, parts, strict=True))

    def from_before(self, parameters):
        return torch.cat([self.kept.get(p, torch.zeros_like(p).flatten()) for p in parameters])


def top_k_hook(state, bucket):
    return on_thread(partial(state.average, bucket.parameters()), bucket.buffer())


# %% [markdown]
"""
Two ranks learn the digits by SGD, all gradients in one bucket. The others wait:
"""

# %%
if usual:
    relink(comms, "4gbit")
pair = comms.subgroup(range(min(2, n)))
EPOCHS, VALUES = 8, parameter_count(model)


def train(*arguments, momentum=0.0):
    model, losses = new_model(), []
    begin = parameters_to_vector(model.parameters()).clone()
    ddp = DDP(model, pair, bucket_cap_mb=1000.0)
    if arguments:
        ddp.register_comm_hook(*arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for epoch in range(EPOCHS):
        for x, y in ShardedBatches(digits.train, 96, pair.rank, pair.world_size).epoch(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    end = parameters_to_vector(model.parameters()).detach()
    by_epoch = pair.all_gather(torch.stack(losses)).mean(dim=0).view(EPOCHS, -1).mean(dim=1)
    return by_epoch, (begin != end).float().mean().item(), end


# %% [markdown]
r"""
## Where it breaks: what was not sent is forgotten

**Predict.** Without error feedback a value that is never among the largest is never sent. With it,
what is kept grows until, in time, it is large enough, and is sent as a whole.

**Measure.** One value in a hundred or in a thousand is sent, the rest kept or forgotten:
"""

# %%
results = {"all": train()} if pair else {}
for share, keeps in itertools.product((0.01, 0.001), (True, False)) if pair else ():
    name = f"{share:.1%}, rest {'kept' if keeps else 'forgotten'}"
    results[name] = train(TopK(share, pair, keeps), top_k_hook)

# %% tags=["plumbing"]
if pair:
    rows = [
        (name, f"{moved:.0%}", losses[-1].item()) for name, (losses, moved, _) in results.items()
    ]
    headers = ["values sent in a step", "weights that moved", "loss, last epoch"]
    pair.print(table(rows, headers, floats=".3f"))
    _, one, one_lost, few, few_lost = rows  # each its name, weights that moved, loss
    figures.lines(
        {name: (range(1, EPOCHS + 1), losses.tolist()) for name, (losses, *_) in results.items()},
        title=f"One in a thousand: loss {few[2]:.2f} if the rest is kept, {few_lost[2]:.2f} if not",
        xlabel="epoch",
        ylabel="loss, mean of the epoch",
    )
    said = (
        f"With 0.1% sent and the rest kept, {few[1]} of the weights move, to a loss of "
        f"{few[2]:.2f}; with 1% sent and the rest forgotten, {one_lost[1]}, to {one_lost[2]:.2f}."
    )
    better = few[2] < one_lost[2]
    find(pair, "kept", better=(better, said), worse=(not better, said))

# %%
runs, kept = {}, {}  # losses by epoch and what this rank kept, by name and momentum


def run(name, momentum):
    state = Compression(compressor(name), pair)
    losses, _, weights = train(state, compress_hook, momentum=momentum)
    runs[name, momentum], kept[name, momentum] = losses, torch.cat([*state.residuals.values()])
    return weights


if pair:
    assert one[2] < one_lost[2]
    assert few[2] < few_lost[2]
    assert torch.equal(run("top-k:0.01", 0.0), results["1.0%, rest kept"][2])
    pair.print("bitwise the weights that microddp's top-k trains")

# %% [markdown] index=["int8", "sign", "quantization", "two-phase compression", "all-to-all"]
r"""
**Explain.** With feedback a value carries all that has waited for it. The price is a copy of all
gradients on each rank, which microddp's {class}`~microddp.compression.feedback.Compression` keeps.

## Two phases

*Quantising* sends every value with fewer bits: `int8` a whole number from -127 to 127, times a
scale; `sign` one bit, times the mean magnitude. Each block of 1024 values has its scale, because
one large value makes it coarse. Ranks have different scales, so messages cannot be added up on the
way. To gather them, $s$ bytes each, costs a rank $s(n-1)$.

**Predict.** The ring's idea helps (chapter 02). Each rank is sent its part of all gradients,
compressed, and adds it up in fp32; then it compresses the mean, and sends it to all. Each phase
sends $\frac{n-1}{n}s$ bytes: together a quarter of a plain all-reduce for int8, a 32nd for sign,
and half for bf16, with a sum in fp32, for any $n$. (Scales come on top, and here whole blocks:
microddp's own does not pad.)

**Build.** The first phase is an *all-to-all* (chapter 07):
"""


# %%
def pack(blocks):
    scale = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return torch.cat([scale.view(torch.int8), (blocks / scale).round().to(torch.int8)], dim=-1)


def unpack(packed):
    scale = packed[..., :4].contiguous().view(torch.float32)
    return packed[..., 4:] * scale


# %%
def two_phases(flat, comms, pack=pack, unpack=unpack):
    n = comms.world_size
    parts = pad(flat, (0, -len(flat) % (1024 * n))).view(n, -1, 1024)
    mine = unpack(comms.all_to_all(pack(parts))).mean(dim=0)  # in fp32
    everyone = comms.all_gather(pack(mine))
    flat.copy_(unpack(everyone).flatten()[: len(flat)])


# %%
mean = shards[:n].mean(dim=0)


def off(flat):
    return f"{((flat - mean).norm() / mean.norm()).item():.1%}"


in_bf16_twice = partial(two_phases, pack=torch.Tensor.bfloat16, unpack=torch.Tensor.float)
for name, average in ("bf16", in_bf16), ("in two phases", in_bf16_twice), ("int8", two_phases):
    average(flat := shards[rank].clone(), own)
    comms.print(f"our {name}: {off(flat)} from the mean")
    torch.testing.assert_close(flat, mean, rtol=0.1, atol=0.02 * mean.abs().max().item())

# %% [markdown]
r"""
What the second rounding leaves out is an error of the mean. In microddp's `int8` and `sign` the
rank that rounds a part of the mean keeps $n$ times its error, and adds that to its own next
gradient, which counts for an $n$-th of the next mean.

**Measure.** The bytes that leave a rank, by the formulas of {mod}`microddp.compression` and
counted, and how far one message is from the mean. `random-k` sends values at places that all ranks
draw alike; `power` is the next section's:
"""

# %%
NAMES = ("bf16", "int8", "sign", "top-k:0.01", "random-k:0.01", "power:4")
rows = [("all-reduce", human_bytes(8 * VALUES * (n - 1) / n), None, None)]
for name in NAMES:
    state, flat = Compression(compressor(name), comms), shards[rank].clone()
    with MessageCounter(comms) as counter:
        state.average(list(model.parameters()), flat)
    counted = sum(message.nbytes for sent in counter.gather() for message in sent) / n
    assert math.isclose(counted, state.sent_bytes())
    rows.append((name, human_bytes(state.sent_bytes()), human_bytes(counted), off(flat)))
comms.print(table(rows, ["", "predicted", f"counted, {n} ranks", "from the mean"]))

# %% [markdown]
"""
And by ranks, for a layer of 4096 x 4096 values; int8 and sign also as if they were gathered:
"""

# %%
MANY, LAYER = [2**i for i in range(1, 9)], torch.Size((4096, 4096))


def share(name, ranks):
    plain = 8 * LAYER.numel() * (ranks - 1) / ranks
    return compressor(name).sent_bytes([LAYER], 4, ranks) / plain


shares = {name: [share(name, ranks) for ranks in MANY] for name in NAMES if name[0] != "r"}
shares["int8, gathered"] = [ranks / 8 for ranks in MANY]
shares["sign, gathered"] = [ranks / 64 for ranks in MANY]
assert shares["sign"][-1] < 0.04

# %% tags=["plumbing"]
figures.lines(
    {name: (MANY, curve) for name, curve in shares.items()},
    title=f"At {MANY[-1]} ranks a gathered sign sends {shares['sign, gathered'][-1]:.0f} times a "
    f"plain all-reduce, in two phases {shares['sign'][-1]:.1%} of it",
    xlabel="ranks",
    ylabel="bytes sent / bytes of a plain all-reduce",
    log="xy",
)

# %% [markdown] index=["PowerSGD"]
r"""
## Thinner matrices

[*PowerSGD*](https://arxiv.org/abs/1905.13727) (Vogels and others, 2019) sends a matrix $G$ as two
thin ones, $P Q^T$, of $r$ columns each. A rank sends $G Q$, and then $G^T P$. Both are linear in
$G$, so they add up on the way. To multiply by $G$ and $G^T$ in turn brings out the directions in
which $G$ is largest; the QR decomposition makes the columns of $P$ perpendicular and of length 1.
The next step begins with this step's $Q$. **Predict.** If each rank has a column times a row, $n$
columns find their mean exactly:
"""


# %%
def low_rank(matrix, q, comms):
    p = matrix @ q
    comms.all_reduce_mean(p)
    p = torch.linalg.qr(p).Q
    q = matrix.mT @ p
    comms.all_reduce_mean(q)
    return p @ q.mT, q


# %%
torch.manual_seed(rank)
left, right, random = torch.randn(3, 64, n, dtype=torch.float64).to(comms.device)
comms.broadcast(random)
matrix = torch.outer(left[:, 0], right[:, 0])
got, _ = low_rank(matrix, random, comms)
torch.testing.assert_close(got, comms.all_gather(matrix).mean(dim=0))

# %% [markdown] index=["momentum"]
r"""
## Momentum

**Predict.** Error feedback makes gradients late. In a valley of curvature $L$ SGD with a rate of
$\eta$ is stable while $\eta L < 2$; with gradients that are $\tau$ steps old, for many steps, only
while $\eta L < \pi/(2\tau)$. Momentum of 0.9 is ten times the rate in the end. So where most waits,
runs should diverge first. A rough measure of how many gradients wait: the norm of what ranks keep
at the end without momentum (their mean), divided by that of the mean gradient above, which is of a
younger model.

**Measure.** A rate of 0.1. A run *diverges* if its last epoch's loss is above its first:
"""

# %%
waiting = {"all-reduce": 0.0}
if pair:
    runs["all-reduce", 0.0] = results["all"][0]
    runs["all-reduce", 0.9] = train(momentum=0.9)[0]
for name in NAMES if pair else ():
    for momentum in (0.0, 0.9):
        if (name, momentum) not in runs:
            run(name, momentum)
    waits = pair.all_gather(kept[name, 0.0]).mean(dim=0)
    waiting[name] = (waits.norm() / mean.norm()).item()

# %% tags=["plumbing"]
if pair:
    final = {key: run[-1].item() if run[-1] <= run[0] else None for key, run in runs.items()}
    cells = {key: "diverges" if end is None else f"{end:.3f}" for key, end in final.items()}
    rows = [(k, f"{waiting[k]:.2g}", cells[k, 0.0], cells[k, 0.9]) for k in waiting]
    headers = ["", "waiting / gradient", "last loss, no momentum", "momentum 0.9"]
    pair.print(table(rows, headers))

# %% tags=["plumbing"]
if pair:
    lost = {m: [k for k in waiting if final[k, m] is None] for m in (0.0, 0.9)}
    with_it = " and ".join(f"{k} ({waiting[k]:.2g} gradients waiting)" for k in lost[0.9])
    held = max((k for k in waiting if k not in lost[0.9]), key=waiting.get, default="none")
    least = min((waiting[k] for k in lost[0.9]), default=math.inf)
    most = waiting.get(held, 0.0)
    said = (
        f"Diverged with momentum 0.9: {with_it or 'none'}; without: "
        f"{' and '.join(lost[0.0]) or 'none'}; of {len(waiting)} each. The most that waited where "
        f"momentum did not diverge: {most:.2g} gradients ({held})."
    )
    order = "not in the predicted order, but " if least < most else ""
    near = f"{said} Where it did, it was at least {least:.2g}: {order}too near to give a threshold."
    mixed = f"{said} Where it did, it was {least:.2g} and more: the estimate gives no order."

# %% tags=["plumbing"]
if pair:
    known = all(map(math.isfinite, waiting.values()))
    find(
        pair,
        "momentum",
        apart=(known and 1.5 * most < least < math.inf, said),
        near=(known and most / 1.5 <= least <= 1.5 * most, near),
        mixed=(known and least < most / 1.5, mixed),
        none=(known and least == math.inf, said),
        unknown=(not known, "One diverged without momentum, too: what waited has no estimate."),
    )

# %% [markdown]
r"""
**Explain.** `random-k:0.01` sends a value once in a hundred steps. `sign` sends a block's mean
magnitude for every value: too much for small ones, which are taken back later, and too little for
large ones, which wait. `top-k` sends the largest of what has piled up. (Which of that makes a run
diverge, this page does not show.) Where much waits, by the formula a lower rate helps; [deep
gradient compression](https://arxiv.org/abs/1712.01887) applies momentum before the choice (Lin and
others, 2018).

## Where it pays

To compress costs $c$ seconds, of the processor and of more messages. With $S_0$ bytes to send, or
$S_c$ compressed, and none hidden, both take equally long over a link of

$$ B^* = \frac{S_0 - S_c}{c} $$

bytes a second, the *break-even*. On a slower link compression pays.

**Measure.** Two ranks, 8 MiB, messages alone, over 1 Gbit/s. Of each round $c$ is the compressed
time, less the plain one, plus the sending that was saved, $(S_0 - S_c)/B$. Noise can make it
negative. So its upper quartile counts, and gives a cautious $B^*$:
"""

# %%
known = pair and n > 1 and usual  # links whose speed can be set
PAYS = ("bf16", "int8", "sign", "top-k:0.01", "power:4")
matrices = [torch.zeros(512, 512, device=comms.device) for _ in range(8)]
flat = torch.randn(1 << 21, generator=torch.Generator().manual_seed(rank)).to(comms.device)
made = {name: Compression(compressor(name), pair) for name in PAYS} if known else {}


def saved(name, bits):
    return 8 * (flat.nbytes - made[name].sent_bytes()) / bits


# %%
calls, c = {"plain": lambda: ring_all_reduce(flat.clone(), pair, "mean")}, {}
for name, state in made.items():
    calls[name] = partial(lambda s: s.average(matrices, flat.clone()), state)
if known:
    relink(pair, "1gbit")
    times = measure(calls, pair, repeat=9)
    for name in made:
        both = zip(times[name].seconds, times["plain"].seconds, strict=True)
        c[name] = Timing(tuple(way - plain + saved(name, 1e9) for way, plain in both))


# %% tags=["plumbing"]
def pays_below(name):
    _, dear = c[name].spread
    below = f"{saved(name, 1e9) / dear:.1f}" if dear > 0 else "any speed"
    return f"{name} {below} (c {1e3 * dear:.1f} ms)"


if pair:
    said = "On these cores, by the upper quartile of c, they pay below, in Gbit/s: "
    said += f"{'; '.join(map(pays_below, made))}."
    missing = "Left out: it takes two ranks on links whose speed can be set."
    find(pair, "break-even", measured=(bool(made), said), left_out=(not made, missing))

# %% [markdown]
r"""
**Explain.** A break-even belongs to a processor, and to two ranks: with more, bytes and $c$ are
others. If backward hides $b$ seconds of the plain all-reduce, $B^*$ shrinks, at worst, with nothing
compressed hidden, to $(S_0 - S_c)/(c + b)$.

## From slow links to a cluster's

**Predict.** A step in two buckets takes what the formula above gives with the $M$ of what is sent.
Fewer bytes gain most where $M$ is most of it; once $M$ is below $\frac{2}{3}C$, half of $M$ at
best. And what leaves out much may need more steps: what counts is steps, times a step.

**Measure.** The stage's devices, with this chapter's own hooks, on links from 100 Mbit/s to 800.
Steps over the slowest are long, and so is this measurement:
"""


# %%
def in_four_columns(flat, comms):
    matrices = flat.view(-1, 128, 128)
    q = torch.ones(len(matrices), 128, 4, device=flat.device).tril()
    flat.copy_(low_rank(matrices, q, comms)[0].flatten())


HOOKS = {"bf16": in_bf16, "int8": two_phases, "power:4": in_four_columns}

# %%
comms.barrier()
by_link, ways = {}, {}
LINKS = (800, 200, 100) if usual and n > 1 else ()
if LINKS:
    own.close()  # connections that began on slower links stay slow
    relink(comms, f"{LINKS[0]}mbit")
    own = comms.subgroup(range(n))
    stage = replace(stage, comms=own)
    ways = {"one device": stage.step("none"), "all-reduce": step_with()}
    ways |= {name: step_with((average, own), hook) for name, average in HOOKS.items()}
    ways["top-k:0.01"] = step_with(TopK(0.01, own), top_k_hook)
for mbit in LINKS:
    relink(comms, f"{mbit}mbit")
    by_link[mbit] = measure(ways, comms, warmup=mbit == LINKS[0], repeat=3)

# %% [markdown]
"""
int8's first phase is an all-to-all, in which each rank sends to all others at once. Where several
send to the same one, they share its link, and another link is idle. Does that cost time? The same
parts, alone, on the slowest links: at once, and in rounds, a start each, in which every link has
one sender:
"""


# %%
def in_rounds(parts):
    got = torch.empty_like(parts)
    for i in range(1, n):
        to, source = (rank + i) % n, (rank - i) % n
        comms.sendrecv(parts[to], to, got[source], source)


if LINKS:
    parts = pack(torch.zeros(n, -(-384 // n), 1024))  # of a bucket of 1.5 MiB
    calls = {"at once": partial(comms.all_to_all, parts), "in rounds": partial(in_rounds, parts)}
    phases = measure(calls, comms, repeat=5)
    by_bytes = (n - 1) * parts[0].numel() * comms.box.seconds_per_byte

# %% [markdown]
r"""
The steps are those of the digits, 14 an epoch, to the loss that the all-reduce has after six of its
eight epochs, by a straight line between epochs. They come from the two ranks with `Compression`,
without momentum. It keeps what is not sent, also for bf16, int8 and power:4; what that costs a
step is not in these times. What is within 15 % of the fastest counts as not told apart:
"""


# %%
def reached(losses, target):
    for epoch, (before, loss) in enumerate(itertools.pairwise(losses), start=1):
        if loss <= target:
            return epoch + (before - target) / (before - loss)
    return math.inf


BUILT = ("all-reduce", *HOOKS, "top-k:0.01")
epochs = torch.zeros(len(BUILT), device=comms.device)
if pair:
    target = runs["all-reduce", 0.0][3 * EPOCHS // 4 - 1].item()
    for i, name in enumerate(BUILT):
        epochs[i] = reached(runs[name, 0.0].tolist(), target)
comms.broadcast(epochs)
needed = {name: e for name, e in zip(BUILT, epochs.tolist(), strict=True) if e < math.inf}

# %% tags=["plumbing"]
to_loss = {}
for m, t in by_link.items():
    ratios = {k: compare(t[k], t["all-reduce"]).ratio for k in needed}
    to_loss[m] = {k: 14 * e * t["all-reduce"].median / ratios[k] for k, e in needed.items()}
comms.print("epochs to the loss:", ", ".join(f"{k} {e:.1f}" for k, e in needed.items()))


def winner(mbit):
    times = to_loss[mbit]
    best = min(times, key=times.get)
    close = [k for k in times if k != best and times[k] < 1.15 * times[best]]
    if "all-reduce" in (best, *close):
        return "nothing is ahead by 15 %"
    beside = f" (not told apart: {', '.join(close)})" if close else ""
    return f"{best}{beside}, {times['all-reduce'] / times[best]:.1f} times as fast"


# %% tags=["plumbing"]
missing, said = "Left out: it takes two ranks on links whose speed can be set.", ""
if LINKS:
    figures.lines(
        {name: (LINKS[::-1], [to_loss[m][name] for m in LINKS[::-1]]) for name in needed},
        title=f"To the loss at 100 Mbit/s: {winner(100)}",
        xlabel="speed of each link, Mbit/s",
        ylabel="seconds to the loss",
        log="xy",
    )
    said = (
        f"Fastest to the loss, against the all-reduce: at 100 Mbit/s {winner(100)}; on the named "
        f"cluster's links to scale, 200 Mbit/s, {winner(200)}; at 800 Mbit/s {winner(800)}."
    )
find(comms, "links", measured=(bool(LINKS), said), left_out=(not LINKS, missing))

# %% tags=["plumbing"]
if LINKS:
    at_once, one_by_one = (Prediction(by_bytes, phases[way]) for way in phases)
    gain = compare(phases["in rounds"], phases["at once"])
    said = (
        f"An all-to-all over {LINKS[-1]} Mbit/s took {at_once}, by its bytes. In rounds it took "
        f"{one_by_one}: {gain.say('the second', 'the first')}."
    )
    find(comms, "all-to-all", **gain.sides(said))
if LINKS and stage.sides:
    C, M = stage.sides[1].compute, stage.sides[1].messages * 200 / 800
    gain = compare(by_link[800]["int8"], by_link[800]["all-reduce"])
    ideal = in_two_buckets(C, M) / in_two_buckets(C, M / 4)
    said = f"Over 800 Mbit/s a step with int8 is {gain.than('one in fp32')}; by C and M alone it is"
    find(comms, "fast-link", **gain.sides(f"{said} {ideal:.2f} times as fast."))

# %% [markdown]
r"""
**Explain.** $C$ and $M$ leave out several things: copies, which int8 shortens, too; starts, of
which two phases have two; $c$, which devices that share a machine's cores may pay more dearly; and
what an all-to-all takes beside its bytes (above). In a ring each link has one sender. And the
digits do not tell how many more steps *your* model takes.

Of more than 200 set-ups on GPUs in data centres, compression beat a well-tuned synchronous training
in 6 ([Agarwal and others](https://arxiv.org/abs/2103.00543), MLSys 2022): there links are fast,
backward hides much, and what is gathered grows with the ranks.

:::{admonition} On GPUs
With rings bytes and losses stay; NCCL's rings and trees add bf16 hop by hop, too (with NVLS the
switch adds). $c$ shrinks: to round is a pass through a memory much faster than any link. Try
`bf16_compress_hook` first: if $M/C$ is then below two thirds, all but the last bucket's can be
hidden. PyTorch's PowerSGD sends whole gradients in the first `start_powerSGD_iter` steps (1000, if
not set).
:::
"""

# %% tags=["plumbing"]
rows = [(side.words, 2 * side.ratio, side.ratio, side.ratio / 2) for side in known_clusters(**WORK)]
headers = ["M/C, worked out, not measured", "fp32", "bf16", "int8"]
comms.print(table(rows, headers, floats=".2f"))
hidden = sum(row[1] < 2 / 3 for row in rows)
comms.print(f"all but the last bucket can hide, in fp32 already: {hidden} of {len(rows)}")

# %% [markdown]
r"""
## What to take along

- bf16 messages first: half the bytes, and no state, as PyTorch's hook does it. With hundreds of
  ranks, add up in fp32.
- What is not sent has to be kept. It arrives late, and momentum repeats it: by the formula a lower
  rate helps.
- What is quantised travels in two phases, and is the same share of a plain all-reduce for any
  number of ranks. What has places of its own is gathered, and grows.
- Compression pays below a bandwidth of $(S_0 - S_c)/c$, lower if backward hides messages. Compare
  times to a loss, not of a step.

On either wrapper: `ddp.register_comm_hook(*microddp.compression.hook("power:4", comms))`; for a
whole training run, `python -m microddp.train --compress power:4`. The next chapter sends less
often.

## Exercises

**The lab.** Write top-k with error feedback. {doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 10
```

1. At how many ranks does a rank send as much as in a plain all-reduce with `top-k:0.01`? With
   `int8` and `sign`, if they are gathered? Leave the scales out.

   <details class="solution"><summary>Solution</summary>

   Gathered messages of $s$ bytes cost $s(n-1)$, a plain all-reduce $2S(n-1)/n$: equal at
   $n = 2S/s$. For top-k, $s = 2 \cdot S/100$: 100 ranks. For int8, $s = S/4$: 8 ranks. For sign,
   $s = S/32$: 64 ranks. In the figure the lines cross 1 there.

   </details>

2. At how many ranks does a ring's sum of equal values stop growing in fp16? What if a tree adds
   them up, two and two?

   <details class="solution"><summary>Solution</summary>

   At 2048: fp16 has 11 significant bits, and $2048 + 1$ has no room for the 1. A tree adds numbers
   of equal size, and $2^i + 2^i$ is exact, up to the largest number. With other values a tree
   rounds $\log_2 n$ times instead of $n - 1$.

   </details>
"""

# %%
if usual:
    relink(comms, usual)
comms.close()
