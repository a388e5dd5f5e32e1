# %% [markdown]
r"""
# Gradient compression

How few bits are enough? What the network cannot carry need not be sent: a step does not need every
value of a gradient, and no value needs all its 32 bits. But what is left out is missing, to leave
it out takes time, and what is small may not add up any more. This chapter builds three ways to send
less, counts their bytes, asks from which link on they pay, and trains a transformer on real text
over a link of 100 Mbit/s.
"""

# %% tags=["imports"]
import copy
import itertools
import math
import statistics
from functools import partial

import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parameters_to_vector

import microddp
from microddp import figures
from microddp.allreduce import on_thread
from microddp.comms import MessageCounter
from microddp.compression import Compression, compressor
from microddp.data import ShardedBatches, load_digits, load_text
from microddp.ddp import DDP
from microddp.hosts import human_bits
from microddp.model import FullMLP, gradient_bytes, parameter_count
from microddp.report import human_bytes, human_seconds, mark_least, table
from microddp.schedule import STRATEGIES, take_step
from microddp.timing import Timing, measure
from microddp.workloads import LENGTH, character_loss, character_model, learn

# %%
# sphinx_gallery_hosts = "4 x 10gbit"
comms = microddp.init()
comms.print(comms.describe())
few = comms.timed()
rank, n = few.rank, few.world_size
few.print(f"{n} of {comms.world_size} ranks stay")
if n == 1:
    few.print("One rank sends nothing: add --nproc-per-node=2 for the effect of smaller messages.")

# %% [markdown]
r"""
## The largest values

Most values of a gradient are small. So send the $k$ largest by magnitude, with their places: eight
bytes for each instead of four for every one.

**Predict.** Every rank has other places, so what they send cannot be added up on the way: each rank
needs all of it. Around a ring, an all-gather passes on what each of the $n$ ranks has, so a rank
sends $8k(n-1)$ bytes. An all-reduce of $S$ bytes sends $2S(n-1)/n$. With $k$ a hundredth of all
values, or $S/400$, the first is $\frac{n}{100}$ of the second: a fiftieth for two ranks, and no
gain at all for a hundred.

**Build.** What was not sent is not lost. It is kept, and added to the next gradient. This is called
*error feedback*. It is kept for each parameter and not for each bucket, because DDP deals its
buckets anew after the first step (chapter 06):
"""


# %%
class TopK:
    def __init__(self, k, keeps=True):
        self.k, self.keeps, self.kept = k, keeps, {}

    def average(self, parameters, flat):
        """Replace a bucket's gradients by the mean of what the ranks send of them."""
        rest = flat + self.from_before(parameters)
        places = rest.abs().topk(self.k).indices
        everyone = zip(few.all_gather(rest[places]), few.all_gather(places), strict=True)
        flat.zero_()
        for values, there in everyone:
            flat.index_add_(0, there, values, alpha=1 / n)
        rest[places] = 0
        parts = rest.split([p.numel() for p in parameters])
        self.kept = dict(zip(parameters, parts, strict=True)) if self.keeps else {}

    def from_before(self, parameters):
        return torch.cat([self.kept.get(p, torch.zeros_like(p).flatten()) for p in parameters])


# %% [markdown]
"""
DDP calls a *communication hook* with each bucket (chapter 06), and waits for the future that it
returns. The core's `on_thread` makes one of a call: {func}`~microddp.allreduce.comm_hook.on_thread`
runs it while backward goes on:
"""


# %%
def hook(state, bucket):
    return on_thread(partial(state.average, bucket.parameters()), bucket.buffer())


# %% [markdown]
"""
Does it learn? A small network on the handwritten digits, with plain SGD. All gradients travel in
one bucket:
"""

# %%
digits = load_digits(few.device)
BATCH, EPOCHS, ONE_BUCKET = 96 - 96 % n, 12, 1000.0
VALUES = parameter_count(FullMLP(128, 3, inputs=64, outputs=10))


# %%
def train(state=None, function=hook):
    torch.manual_seed(0)
    model, losses = FullMLP(128, 3, inputs=64, outputs=10).to(few.device), []
    begin = parameters_to_vector(model.parameters()).clone()
    ddp = DDP(model, few, bucket_cap_mb=ONE_BUCKET)
    if state:
        ddp.register_comm_hook(state, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for x, y in ShardedBatches(digits.train, BATCH, rank, n).epoch(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    end = parameters_to_vector(model.parameters())
    return few.all_gather(torch.stack(losses)).mean(dim=0), begin != end, end


# %% [markdown]
r"""
## Where it breaks: what was not sent is forgotten

**Predict.** Without error feedback a value that is never among the largest is never sent, however
long it asks for the same change. Its weight stays where it was. With it, what is kept grows until
it is large enough.

**Measure.** One value in a hundred and one in a thousand, with error feedback and without:
"""

# %%
FEW, FEWER = VALUES // 100, VALUES // 1000
whole, moved, _ = train()
curves, rows = {"all": whole}, [("all", 1.0, moved.double().mean().item(), whole[-14:].mean())]
for k, keeps in itertools.product((FEW, FEWER), (True, False)):
    name = f"{k} of {VALUES}" + ("" if keeps else ", forgotten")
    curves[name], moved, weights = train(TopK(k, keeps))
    share, last = moved.double().mean().item(), curves[name][-14:].mean()
    rows.append((name, k / VALUES, share, last))
    if k == FEW and keeps:
        ours = weights

# %% tags=["plumbing"]
rows = [(name, f"{sent:.1%}", f"{moved:.0%}", f"{last:.3f}") for name, sent, moved, last in rows]
few.print(table(rows, ["sent", "share", "weights that moved", "loss of the last 14 steps"]))
ends = {name: losses[-14:].mean().item() for name, losses in curves.items()}
smooth = {name: losses.unfold(0, 14, 1).mean(dim=1).tolist() for name, losses in curves.items()}
forgotten = ends[f"{FEWER} of {VALUES}, forgotten"] / ends[f"{FEWER} of {VALUES}"]
figures.lines(
    {name: (range(14, 14 + len(y)), y) for name, y in smooth.items()},
    title=f"One value in a thousand: forgetting the rest ends at {forgotten:.1f} times the loss",
    xlabel="step",
    ylabel="loss, mean of 14 steps",
)

# %%
assert all(ends[f"{k} of {VALUES}"] < ends[f"{k} of {VALUES}, forgotten"] for k in (FEW, FEWER))
state = Compression(compressor(f"top-k:{FEW}"), few)
same = train(state, lambda state, bucket: hook(state, bucket))[2]
few.print(f"bitwise the weights that the core's top-k trains: {torch.equal(ours, same)}")
assert torch.equal(ours, same)

# %% [markdown]
"""
**Explain.** Both send the same number of values in each step. What makes the difference is which:
error feedback gives every weight its turn, sooner or later. Sooner or later is also its price. A
gradient that is sent late was computed with older weights, so very few values learn more slowly at
first, even with feedback. The core's {class}`~microddp.compression.feedback.Compression` does the
same for every way to send less, and survives buckets that are dealt anew, other numbers of ranks
and checkpoints.

## Fewer bits, and thinner matrices

**Build.** Two more ideas. *Quantising* sends every value with fewer bits, here 8: a whole number
from -127 to 127, of a scale that is sent too. The core has a scale for each block of 1024 values,
so that one large value does not blur all others:
"""


# %%
def quantised(values):
    scale = values.abs().max() / 127
    return (values / scale).round().to(torch.int8), scale


# %% [markdown]
r"""
The other one, *PowerSGD*, sends a matrix $M$ as the product of two thin ones, $P Q^T$, with $r$
columns each. It has a property that no other way here has at so few bytes: each factor depends on
$M$ *linearly*. So what the ranks send can be added up on the way, by the all-reduce that is there
already. A single step of a power iteration finds them. It begins with the $Q$ of the step before:
"""


# %%
def low_rank(matrix, q):
    p = matrix @ q
    few.all_reduce_mean(p)
    p = torch.linalg.qr(p).Q
    q = matrix.T @ p
    few.all_reduce_mean(q)
    return p @ q.T, q


# %% [markdown]
"""
**Predict.** A mean of rank r or less is found exactly, in one step. Two ranks, each with a matrix
of rank 1, have a mean of rank 2 at most:
"""

# %%
generator = torch.Generator().manual_seed(rank)
left, right = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(2))
matrix = torch.outer(left, right).to(few.device)
mean = few.all_gather(matrix).mean(dim=0)
q = torch.randn(64, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
for r in range(1, n + 1):
    found, _ = low_rank(matrix, q[:, :r].to(few.device))
    error = ((found - mean).norm() / mean.norm()).item()
    few.print(f"{r} column{'s' * (r > 1)}: {error:.0e} from the mean")
assert error < 1e-9

# %% [markdown]
"""
Are real gradients like that? Here is one of a small transformer on real text: the help that comes
with Python, by characters. Its largest layer's gradient is taken apart in both ways. How much of it
is missing, if so much is sent?
"""

# %%
text = load_text(LENGTH, few.device)
model = character_model(few.device)
S = gradient_bytes(model)
tokens, targets = text.train[16 * rank : 16 * rank + 16]
character_loss(model(tokens), targets).backward()
widest = max(model.parameters(), key=lambda p: p.numel() if p.grad.dim() == 2 else 0)
gradient = widest.grad
squares = gradient.flatten().square().sort(descending=True).values
by_value = (1 - squares.cumsum(0) / squares.sum()).clamp(min=0).sqrt()
squares = torch.linalg.svdvals(gradient).square()
by_column = (1 - squares.cumsum(0) / squares.sum()).clamp(min=0).sqrt()

# %% tags=["plumbing"]
values, sides = gradient.numel(), sum(gradient.shape)
ranks = [r for r in (1, 2, 4, 8, 16, 32) if r * sides < values]
counts = [r * sides // 2 for r in ranks]  # a value and its place are two
left_out = {
    "largest values": [by_value[count - 1].item() for count in counts],
    "columns of two factors": [by_column[r - 1].item() for r in ranks],
}
shares = [100 * r * sides / values for r in ranks]
better = min(left_out, key=lambda name: left_out[name][2])
figures.lines(
    {name: (shares, [100 * y for y in missing]) for name, missing in left_out.items()},
    title=f"For {shares[2]:.0f} % of the bytes, {better} leave out less of this gradient",
    xlabel="bytes sent, % of the gradient's",
    ylabel="left out, % of the gradient's norm",
    log="x",
)

# %% [markdown]
r"""
## Bytes

**Predict.** What can be added up costs an all-reduce of what is sent. What cannot is gathered, and
grows with $n$. {mod}`microddp.compression` has a formula for each way. For a bucket of this model,
as a share of the plain all-reduce:
"""

# %%
NAMES = ("top-k:0.01", "random-k:0.01", "int8", "sign", "power:4", "fp16")
shapes = [p.shape for p in model.parameters()]
MANY = (2, 4, 8, 16, 32, 64, 128, 256)


# %%
def share_of_bytes(name, ranks):
    plain = S * 2 * (ranks - 1) / ranks
    return compressor(name).sent_bytes(shapes, 4, ranks) / plain


# %%
shares = {name: [share_of_bytes(name, ranks) for ranks in MANY] for name in NAMES}
gathered = [name for name, of in shares.items() if of[-1] > 1]
figures.lines(
    {name: (MANY, of) for name, of in shares.items()},
    title=f"With {MANY[-1]} ranks, {len(gathered)} of {len(NAMES)} send more than an all-reduce",
    xlabel="ranks",
    ylabel="bytes sent / bytes of a plain all-reduce",
    log="xy",
)

# %% [markdown]
"""
`random-k` sends values at places that all ranks draw with the same seed. So places need not be
sent, and values add up. `sign` sends one bit a value, and the mean magnitude of each block.

**Measure.** The bytes that leave each rank are counted, and should be those of the formulas. Beside
them is how far one message is from the mean of the gradients, without any feedback yet:
"""

# %%
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
mean = few.all_gather(gradient).mean(dim=0)
rows = []
for name in NAMES:
    state, flat = Compression(compressor(name), few), gradient.clone()
    with MessageCounter(few) as counter:
        state.average(list(model.parameters()), flat)
    sent = [sum(message.nbytes for message in mine) for mine in counter.gather()]
    predicted = state.sent_bytes()
    assert math.isclose(sum(sent) / n, predicted)
    error = ((flat - mean).norm() / mean.norm()).item()
    rows.append((name, human_bytes(predicted), human_bytes(sum(sent) / n), f"{error:.1%}"))
few.print(f"all-reduce: {human_bytes(S * 2 * (n - 1) / n)} a rank")
few.print(table(rows, ["", "predicted", "counted", "from the mean"]))

# %% [markdown]
r"""
## Where it pays

Fewer bytes are not less time. To find the largest values, to round or to multiply takes time of the
processor that computes the step. Let that be $c$ more than a plain all-reduce takes beside its
bytes. With $S_0$ and $S_c$ bytes to send, and nothing hidden behind backward, both take equally
long over a link of

$$ B^* = \frac{S_0 - S_c}{c} $$

bytes a second. On a slower link compression pays, on a faster one it costs.

**Predict.** $c$ is measured at a single speed: the difference of the two steps there, plus the time
of the bytes that were saved. The model has 16 wide layers, few samples and one bucket, so nearly
all is message:
"""

# %%
wide = FullMLP(512).to(few.device)
LINKS = [2, 4, 6, 9, 12] if few.box and n > 1 else []  # Gbit/s; c is measured at the first


def step_of(name, samples, cap=ONE_BUCKET):
    strategy = STRATEGIES["none" if name == "alone" else "ddp"](copy.deepcopy(wide), few, cap)
    if name in NAMES:
        strategy.compress(name)
    data = torch.randn(2, samples, 512, device=few.device).unbind()
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=1e-4)
    return partial(take_step, strategy, mse_loss, optimizer, data)


# %%
def over_links(calls, links, turns):
    """Times of each call at each speed. Speeds take turns: a machine changes its pace."""
    times = {speed: dict.fromkeys(calls, ()) for speed in links}
    for speed in links * turns:
        few.relink(f"{speed}gbit")
        for name, timing in measure(calls, few, repeat=4).items():
            times[speed][name] += timing.seconds
    return {v: {name: Timing(s) for name, s in of.items()} for v, of in times.items()}


# %%
PLAIN = "all-reduce"
calls = {name: step_of(name, 64) for name in (PLAIN, *NAMES)}
times = over_links(calls, LINKS, turns=2)


# %% [markdown]
"""
Lower quartiles are compared here. What disturbs a round only adds to it, and more so where the
cores compute than where they wait for the wire: two threads may meet on one core, for example.
"""


# %%
def saved(name):
    """Seconds that compression saves, by speed."""
    return {speed: t[PLAIN].spread[0] - t[name].spread[0] for speed, t in times.items()}


def break_even(by_speed):
    """Where what is saved comes to nothing, in Gbit/s. Between two speeds it goes as 1/speed."""
    points = sorted(by_speed.items())
    for (slow, more), (fast, less) in itertools.pairwise(points):
        if more > 0 >= less:
            return 1 / (1 / slow + more / (more - less) * (1 / fast - 1 / slow))
    return math.inf if points[-1][1] > 0 else 0.0


def written(speed, links):
    beyond = {math.inf: f"above {max(links)}", 0: f"below {min(links)}"}
    return beyond.get(speed, f"{speed:.1f}")


# %%
found = {}
for name in NAMES if times else ():
    (slowest, seconds), *others = saved(name).items()
    fewer = 8e-9 * (calls[PLAIN].args[0].sent_bytes() - calls[name].args[0].sent_bytes())  # Gbit
    c = fewer / slowest - seconds
    found[name] = c, fewer / c if c > 0 else math.inf, break_even(dict(others))

# %% tags=["plumbing"]
rows = []
for name, (c, predicted, measured) in found.items():
    ratio = predicted / measured if 0 < measured < math.inf else None
    rows.append((name, human_seconds(c), predicted, written(measured, LINKS[1:]), ratio))
headers = ["", "c", "predicted, Gbit/s", "measured", "predicted / measured"]
formats = ["", "", ".1f", "", ".2f"]
few.print(table(rows, headers, floats=formats) if rows else "links of known speed: none here")
crossed = [m for *_, m in found.values() if 0 < m < math.inf]
if crossed:
    drawn = [PLAIN, *(name for name in NAMES if name != "sign")]
    figures.lines(
        {k: (x := sorted(times), [times[v][k].spread[0] * 1e3 for v in x]) for k in drawn},
        title=f"Break-even is crossed from {min(crossed):.0f} to {max(crossed):.0f} Gbit/s",
        xlabel="speed of each link, Gbit/s",
        ylabel="step (lower quartile), ms",
        log="x",
    )

# %% [markdown]
r"""
**Explain.** Compare them to your own link. And they are not a property of the compressor alone: a
processor that compresses faster has a smaller $c$, and more ranks make a gathered $S_c$ larger.

The plain all-reduce has one more advantage: with buckets it hides behind backward. A compressor
that runs on the processor that computes backward hides little. **Predict.** If all of backward, $b$
seconds, hides messages, compression has to save $b$ seconds more: $B^*$ shrinks by a factor of $1 +
b/c$. If nothing is hidden, it stays. Four times the samples, and buckets of 2 MiB for the
all-reduce:
"""

# %%
hiding = {PLAIN: step_of(PLAIN, 256, cap=2.0), "alone": step_of("alone", 256)}
hiding |= {name: step_of(name, 256) for name in ("top-k:0.01", "power:4")}
one_bucket, times = times, over_links(hiding, LINKS[1:], turns=1)
rows = []
for name in list(hiding)[2:] if times else ():
    c, at_most, _ = found[name]
    backward = min(t["alone"].spread[0] for t in times.values()) * 2 / 3
    measured = break_even(saved(name))
    rows.append((name, at_most / (1 + backward / c), at_most, written(measured, LINKS[1:])))
headers = ["Gbit/s", "predicted, all hidden", "none hidden", "measured"]
few.print(table(rows, headers, floats=".1f"))

# %% [markdown]
r"""
**Explain.** Near the first prediction, backward hides the messages. Near the second it does not, as
where the cores that compute backward also carry the messages (chapter 05). With NCCL and a GPU it
does, for the most part. The better it hides, the slower the link has to be for compression to pay.

A [survey](https://arxiv.org/abs/2103.00543) tried more than 200 set-ups on GPUs in data centres
(Agarwal and others, MLSys 2022). In 6 of them compression beat well-tuned synchronous training.
Does this run agree? So many pairs of compressor and link it tells apart from the plain all-reduce:
"""

# %% tags=["plumbing"]
rows = []
for title, table_of in {"one bucket, 64 samples": one_bucket, "hidden, 256": times}.items():
    for speed in sorted(table_of):
        timings = table_of[speed]
        pairs = [(timings[k], timings[PLAIN]) for k in timings if k in NAMES]
        faster = sum(mine.clearly_below(plain) for mine, plain in pairs)
        slower = sum(plain.clearly_below(mine) for mine, plain in pairs)
        rows.append((title, f"{speed:.3g}", faster, slower, len(pairs) - faster - slower))
few.print(table(rows, ["all-reduce", "Gbit/s", "compression faster", "slower", "not told apart"]))

# %% [markdown]
r"""
## Loss by time

Now the link is slow, and there is something to learn. One model, the same batches, AdamW, and each
way of averaging in turn. The batches are new in every step, so a loss before the step tells how the
model does on text it has not seen.

**Predict.** A step takes what it computes, and the time of its bytes; the model is small, so all
travels in one bucket, after backward. The steps it takes to a given loss cannot be predicted from
bytes.

**Measure.**
"""

# %%
STEPS = 200
alone = learn(STRATEGIES["none"](character_model(few.device), few), text, few, 40)
computing = alone.seconds[-1] / 40
if few.box:
    few.relink("100mbit")
runs, sent = {}, {}
for name in (PLAIN, *NAMES):
    strategy = STRATEGIES["ddp"](character_model(few.device), few)
    if name in NAMES:
        strategy.compress(name)
    runs[name], sent[name] = learn(strategy, text, few, STEPS), strategy.sent_bytes()
TARGET = runs[PLAIN].smooth[3 * STEPS // 4]
reached = {name: run.seconds_to(TARGET) for name, run in runs.items()}

# %% tags=["plumbing"]
per_byte = few.box.seconds_per_byte if few.box else math.nan
rows = []
for name, run in runs.items():
    predicted = (computing + sent[name] * per_byte) * 1e3 if few.box else None
    taken = run.seconds[-1] / STEPS * 1e3
    numbers = human_bytes(sent[name]), predicted, taken, run.smooth[-1]
    there = run.steps_to(TARGET), reached[name], reached[PLAIN] / reached[name]
    rows.append((name, *numbers, *(there if math.isfinite(reached[name]) else (None,) * 3)))
headers = ["", "sent", "ms, predicted", "ms a step", "last loss", "steps to it", "s", "speed-up"]
formats = ["", "", ".1f", ".1f", ".2f", ".0f", ".2f", ".2f"]
where = f"links of {human_bits(few.box.links[0].bits_per_second)}" if few.box else "this machine"
few.print(f"{where}; computing {human_seconds(computing)} a step; to a loss of {TARGET:.2f}")
few.print(table(rows, headers, floats=formats))

# %% tags=["plumbing"]
figures.lines(
    {name: (range(1, STEPS + 1), run.smooth) for name, run in runs.items()},
    title=f"By steps: the all-reduce ends at {runs[PLAIN].smooth[-1]:.2f}, others at "
    f"{min(runs[k].smooth[-1] for k in NAMES):.2f} to {max(runs[k].smooth[-1] for k in NAMES):.2f}",
    xlabel="step",
    ylabel="loss, mean of 16 steps",
)

# %% tags=["plumbing"]
best = min(reached, key=reached.get)
figures.lines(
    {name: (run.seconds, run.smooth) for name, run in runs.items()},
    title=f"By time: {best} is at {TARGET:.2f} in 1/{reached[PLAIN] / reached[best]:.1f} of the "
    "all-reduce's time",
    xlabel="seconds",
    ylabel="loss, mean of 16 steps",
)
assert runs["int8"].steps_to(TARGET) < 1.1 * runs[PLAIN].steps_to(TARGET)

# %% [markdown]
r"""
**Explain.** A blank means that the run ended before. What counts is steps times the time of a step,
and they pull in opposite directions. Eight bits follow the mean closely (last column of the table
of bytes), and need about as many steps as the all-reduce. What leaves out most of a message has to
make up for it later. AdamW may make that harder: it divides by the size that gradients had lately,
and a value that comes rarely, and then as the sum of many, is larger than that.

## Mixed precision

**Predict.** Under autocast the operations are in bf16, and weights and gradients stay in fp32. So
the messages do not get shorter; a hook that rounds what is sent makes them so. PyTorch's own, of
chapter 09, forgets what it rounds away. Here it is kept:
"""

# %%
rows = []
for precision, name in (("fp32", None), ("autocast", None), ("autocast", "bf16")):
    strategy = STRATEGIES["ddp"](character_model(few.device), few)
    if name:
        strategy.compress(name)
    on = torch.autocast(few.device.type, torch.bfloat16, enabled=precision == "autocast")
    run = learn(strategy, text, few, 48, on)
    kinds = {str(p.grad.dtype).removeprefix("torch.") for p in strategy.module.parameters()}
    nbytes = human_bytes(strategy.sent_bytes())
    took = human_seconds(statistics.median(b - a for a, b in itertools.pairwise(run.seconds)))
    rows.append((precision, name or "as it is", *kinds, nbytes, took, run.smooth[-1]))
few.print(table(rows, ["computed in", "sent in", "gradients", "sent", "a step", "loss"]))
assert {row[2] for row in rows} == {"float32"}

# %% [markdown]
r"""
## Where it breaks: sums in 16 bits

fp16 has more digits than bf16 and less room: nothing above 65504, nothing below 0.00000006. A mean
is a sum and a division, and both orders can go wrong. **Predict.** The sum of two values of 60000
does not fit. Divided before the sum it does; but then small values vanish. With error feedback,
what vanished is sent when it has added up. Six steps of the same gradient on every rank, large and
small:
"""


# %%
def sum_first(flat):
    few.all_reduce(half := flat.half())
    return (half / n).float()


def divide_first(flat):
    few.all_reduce(half := (flat / n).half())
    return half.float()


# %%
kept = Compression(compressor("fp16"), few)
weight = torch.nn.Parameter(torch.zeros(2, device=few.device))


def with_feedback(flat):
    kept.average([weight], flat)
    return flat


# %%
rows = []
for way in (sum_first, divide_first, with_feedback):
    steps = [way(torch.tensor([6e4, 4e-8], device=few.device)) for _ in range(6)]
    large, small = torch.stack(steps).mean(dim=0).tolist()
    rows.append((way.__name__, f"{large:.0f}", f"{small:.1e}"))
few.print(table(rows, ["", "mean of 6 x 60000", "mean of 6 x 4e-8"]))
assert n == 1 or rows[0][1] == "inf"
assert math.isclose(large, 6e4, rel_tol=1e-3)
assert math.isclose(small, 4e-8, rel_tol=0.3)

# %% [markdown]
r"""
## What to pick

From this run: the steps that each way took to the loss of the section before last, times what a
step takes beside its bytes, plus the bytes at each speed. The column of the link that was measured
is nearly what was measured; the others are predictions. A star marks the least of each column:
"""

# %% tags=["plumbing"]
PICK = {"50 Mbit/s": 5e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
arrived = {name: runs[name].steps_to(TARGET) for name in runs if math.isfinite(reached[name])}
beside = {k: runs[k].seconds[-1] / STEPS - sent[k] * per_byte for k in arrived} if few.box else {}
columns = []
for bits in PICK.values():
    needed = [arrived[k] * (beside[k] + sent[k] * 8 / bits) for k in beside]
    columns.append(mark_least([f"{seconds:.2f} s" for seconds in needed], needed) if beside else [])
rows = [(name, *cells) for name, *cells in zip(beside, *columns, strict=True)]
headers = [f"to a loss of {TARGET:.2f}", *PICK]
few.print(table(rows, headers) if rows else "links of known speed: none here")

# %% [markdown]
r"""
Two rows that differ by a few per cent are not told apart by a single run. Before you compress, ask
three things. How long does the all-reduce take that backward does not hide? If it is little, there
is nothing to gain. How many ranks are there? Gathered messages grow with them. And how many more
steps does it take *your* model to the same loss? That only a run tells.

## What to take along

- What is not sent is kept, and sent later. Without error feedback some weights never move.
- Count the bytes at your number of ranks: what is gathered grows with it, what adds up does not.
- Compression pays below a bandwidth of $(S_0 - S_c)/c$, and what backward hides lowers it.
- Compare the time to a loss, not the time of a step.

On either wrapper: `ddp.register_comm_hook(*microddp.compression.hook("power:4", comms))`; for a
whole training run, `python -m microddp.train --compress power:4`. Sending less is one way to live
with a slow link. Sending less often is the other: the next chapter.
"""

# %% [markdown]
r"""
## Exercises

1. From how many ranks on does a rank send more than a plain all-reduce with `top-k:0.01`, with
   `int8`, with `sign`? Leave the scales out. Does the figure agree?

   <details class="solution"><summary>Solution</summary>

   A gathered message of $s$ bytes from each rank costs $s(n-1)$, a plain all-reduce $2S(n-1)/n$. So
   they are equal at $n = 2S/s$. For top-k, $s = 2 \cdot S/100$: 100 ranks. For int8, $s = S/4$: 8
   ranks. For sign, $s = S/32$: 64 ranks. In the figure the lines cross 1 there; those with scales a
   little earlier.

   </details>

2. From which rank of its factors on does PowerSGD send no less than the matrix, if that is 64 x
   256? What does the core do then?

   <details class="solution"><summary>Solution</summary>

   Two factors of $r$ columns have $r(64 + 256) = 320r$ values, the matrix 16384: from $r = 52$ on
   it is not worth it. {class}`~microddp.compression.power_sgd.PowerSGD` sends such a matrix as it
   is, and so all vectors, along with the first factors.

   </details>

3. Give the optimizer in `train` a momentum of 0.9 and half the learning rate. How do 261 values
   with error feedback compare to all now?

   <details class="solution"><summary>Solution</summary>

   On the machine this was tried on (two cores, November 2026) the losses are further apart than
   without momentum: 0.19 against 0.08 after eight epochs. A value that waited arrives as the sum of
   many gradients, and momentum repeats it for about ten more steps. Some methods correct for it, by
   applying momentum before the largest values are chosen (Lin and others, "Deep gradient
   compression", 2018).

   </details>
"""

# %%
comms.close()
