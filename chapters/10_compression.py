# %% [markdown]
r"""
# 10. Gradient compression

How few bits are enough? What the network cannot carry need not be sent: a step does not need every
value of a gradient, and no value needs all its 32 bits. But what is left out is missing, to leave
it out takes time, and small values may round to nothing. This chapter builds three ways to send
less, counts their bytes, asks from which link on they pay, and trains a transformer on real text
over a link of 100 Mbit/s.
"""

# %% tags=["imports"]
import copy
import itertools
import math
from functools import partial

import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parameters_to_vector

import microddp
from microddp import figures
from microddp.comms import MessageCounter
from microddp.compression import Compression, compress, compressor
from microddp.data import ShardedBatches, load_digits, load_text
from microddp.ddp import DDP
from microddp.hosts import relink
from microddp.model import FullMLP, gradient_bytes, parameter_count
from microddp.report import human_bytes, human_seconds, table
from microddp.shared import on_thread
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timing, measure
from microddp.workloads import LENGTH, character_model, learn, times_by_link, token_loss

# %%
# sphinx_gallery_builds = "three ways to send less, and error feedback, which keeps the rest"
# sphinx_gallery_hosts = "4 x 10gbit"
comms = microddp.init()
comms.print(comms.describe())
rank, n = comms.rank, comms.world_size
if n == 1:
    comms.print("One rank sends nothing: add --nproc-per-node=2 for the effect of small messages.")

# %% [markdown] index=["top-k"]
r"""
## The largest values

Send only the $k$ largest values by magnitude, with their places: eight bytes for each, instead of
four for every one.

**Predict.** Every rank has other places, so what they send cannot be added up on the way: each rank
needs all of it. Around a ring, an all-gather passes on what each of the $n$ ranks has, so a rank
sends $8k(n-1)$ bytes. An all-reduce of $S$ bytes sends $2S(n-1)/n$. With $k$ a hundredth of all
values, or $S/400$, the first is $\frac{n}{100}$ of the second: a fiftieth for two ranks, and no
gain at all for a hundred.

**Build.** What was not sent is kept, and added to the next gradient. This is called [*error
feedback*](https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent-and-application-to-data-parallel-distributed-training-of-speech-dnns/)
(Seide and others, 2014). It is kept for each parameter and not for each bucket, because DDP deals
its buckets anew after the first step (chapter 06):
"""


# %%
class TopK:
    def __init__(self, k, keeps=True):
        self.k, self.keeps, self.kept = k, keeps, {}

    def average(self, parameters, flat):
        """Replace a bucket's gradients by the mean of what the ranks send of them."""
        rest = flat + self.from_before(parameters)
        places = rest.abs().topk(self.k).indices
        values, theirs = comms.all_gather(rest[places]), comms.all_gather(places.int())
        flat.zero_()
        for value, place in zip(values, theirs, strict=True):
            flat.index_add_(0, place, value, alpha=1 / n)
        rest[places] = 0
        if self.keeps:
            parts = rest.split([p.numel() for p in parameters])
            self.kept.update(zip(parameters, parts, strict=True))

    def from_before(self, parameters):
        return torch.cat([self.kept.get(p, torch.zeros_like(p).flatten()) for p in parameters])


# %% [markdown]
"""
DDP calls a *communication hook* with each bucket (chapter 06), and waits for the future that it
returns. microddp's {func}`~microddp.shared.comm_hook.on_thread` makes one of a call, which runs
on a thread of its own while backward goes on:
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
digits = load_digits(comms.device)
BATCH, EPOCHS, ONE_BUCKET = 96 - 96 % n, 12, 1000.0
VALUES = parameter_count(FullMLP(128, 3, inputs=64, outputs=10))


# %%
def train(state=None):
    torch.manual_seed(0)
    model, losses = FullMLP(128, 3, inputs=64, outputs=10).to(comms.device), []
    begin = parameters_to_vector(model.parameters()).clone()
    ddp = DDP(model, comms, bucket_cap_mb=ONE_BUCKET)
    if state:
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for x, y in ShardedBatches(digits.train, BATCH, rank, n).epoch(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    end = parameters_to_vector(model.parameters())
    return comms.all_gather(torch.stack(losses)).mean(dim=0), begin != end, end


# %% [markdown] index=["error feedback"]
r"""
## Where it breaks: what was not sent is forgotten

**Predict.** Without error feedback a value that is never among the largest is never sent, however
long it asks for the same change. What is thrown away in each step is most of the gradient. With
feedback what is kept grows until it is large enough, and is then sent as a whole.

**Measure.** One value in a hundred and one in a thousand, with error feedback and without. An epoch
has 14 steps, of which the mean is shown:
"""

# %%
FEW, FEWER = VALUES // 100, VALUES // 1000
results = {"all": train()}
for k, keeps in itertools.product((FEW, FEWER), (True, False)):
    name = f"{k} of {VALUES}" + ("" if keeps else ", rest forgotten")
    results[name] = train(TopK(k, keeps))

# %% tags=["plumbing"]
EPOCH = len(results["all"][0]) // EPOCHS
ends = {name: losses[-EPOCH:].mean().item() for name, (losses, _, _) in results.items()}
rows = []
for name, (_, moved, _) in results.items():
    rows.append((name, f"{moved.double().mean():.0%}", f"{ends[name]:.3f}"))
few_kept, few_forgotten, fewer_kept, fewer_forgotten = list(ends.values())[1:]
comms.print(table(rows, ["values sent in a step", "weights that moved", "loss, last epoch"]))
figures.lines(
    {
        name: (range(EPOCH, len(losses) + 1), losses.unfold(0, EPOCH, 1).mean(dim=1).tolist())
        for name, (losses, _, _) in results.items()
    },
    title=f"One value in a thousand: {fewer_forgotten / fewer_kept:.1f} times the loss if the rest "
    "is forgotten, not kept",
    xlabel="step",
    ylabel="loss, mean of an epoch",
)

# %%
assert few_kept < few_forgotten
assert fewer_kept < fewer_forgotten
*_, weights = train(Compression(compressor(f"top-k:{FEW}"), comms))
same = torch.equal(weights, results[f"{FEW} of {VALUES}"][2])
comms.print(f"bitwise the weights that microddp's top-k trains: {same}")
assert same

# %% [markdown] index=["int8", "sign", "PowerSGD", "quantization"]
"""
**Explain.** With and without feedback a step sends as many values. With it, each carries all that
has waited for it. Many weights do not move at all in so few steps, with feedback or without: it is
not how many move that makes the difference, but that nothing is thrown away, though some of it
still waits at the end. What is sent late is late: very few values are behind all the way, even with
feedback.

The price is memory: a rank keeps a copy of all its gradients. microddp's
{class}`~microddp.compression.feedback.Compression` keeps it for every way to send less, in
checkpoints too, and uses connections of its own, because its thread sends while others may.

## Fewer bits, and thinner matrices

**Build.** Two more ideas. *Quantising* sends every value with fewer bits, here 8: a whole number
from -127 to 127, of a scale that is sent too. **Predict.** One large value makes the scale of all
others coarse. So microddp has a scale for each block of 1024:
"""


# %%
def quantised(values):
    """Rounded to 8 bits and back, with a scale for each row."""
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    return (values / scale).round().to(torch.int8) * scale


# %%
values = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
values[0, 0] = 100
for name, rows in {"one scale": values.view(1, -1), "a scale for 1024": values}.items():
    errors = (quantised(rows) - rows).flatten()[1:]
    comms.print(
        f"{name}: {errors.norm() / rows.flatten()[1:].norm():.1%} off, but for the large one"
    )

# %% [markdown]
r"""
The other one, [*PowerSGD*](https://arxiv.org/abs/1905.13727) (Vogels and others, 2019), sends a
matrix $M$ as the product of two thin ones, $P Q^T$, of $r$ columns each. What a rank sends is $M
Q$, and then $M^T P$. Both are linear in $M$, so they can be added up on the way, by the all-reduce
that is there already. To multiply by $M$ and by $M^T$ in turn brings out the directions in which
$M$ is largest. In between, QR makes the columns of $P$ perpendicular and of length 1, so that $P
Q^T$ is $M$ as seen in those directions:
"""


# %%
def low_rank(matrix, q):
    p = matrix @ q
    comms.all_reduce_mean(p)
    p = torch.linalg.qr(p).Q
    q = matrix.T @ p
    comms.all_reduce_mean(q)
    return p @ q.T, q


# %% [markdown]
"""
**Predict.** A column times a row is the thinnest of matrices. If each process has one, their mean
is a sum of n such, and n columns find it exactly:
"""

# %%
generator = torch.Generator().manual_seed(rank)
left, right = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(2))
matrix = torch.outer(left, right).to(comms.device)
mean = comms.all_gather(matrix).mean(dim=0)
q = torch.randn(64, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
for columns in range(1, n + 1):
    found, _ = low_rank(matrix, q[:, :columns].to(comms.device))
    error = ((found - mean).norm() / mean.norm()).item()
    comms.print(f"{columns} column{'s' * (columns > 1)}: {error:.0e} from the mean")
assert error < 1e-9

# %% [markdown]
"""
Real gradients are not so simple. Here is one of a small transformer, at its first step on real
text: the help that comes with Python, by characters. For its largest layer: what do the best
columns there are leave out, and what do the largest values, for as many bytes?
"""

# %%
text = load_text(LENGTH, comms.device)
model = character_model(comms.device)
S = gradient_bytes(model)
tokens, targets = text.train[16 * rank : 16 * rank + 16]
token_loss(model(tokens), targets).backward()
widest = max(model.parameters(), key=lambda p: p.numel() if p.grad.dim() == 2 else 0).grad
mean = comms.all_gather(widest).mean(dim=0)


# %%
def left_out(squares):
    """What is missing if only the largest i are sent, as a share of the norm, for each i."""
    return (1 - squares.cumsum(0) / squares.sum()).clamp(min=0).sqrt()


# %%
by_value = left_out(mean.flatten().square().sort(descending=True).values)
by_column = left_out(torch.linalg.svdvals(mean).square())

# %% tags=["plumbing"]
sides = sum(mean.shape)
columns = [r for r in (1, 2, 4, 8, 16, 32) if r * sides < mean.numel()]
missing = {
    "largest values": [
        by_value[r * sides // 2 - 1].item() for r in columns
    ],  # a place is as large as a value
    "best columns": [by_column[r - 1].item() for r in columns],
}
shares = [100 * r * sides / mean.numel() for r in columns]
values, best = (missing[name][2] for name in missing)
figures.lines(
    {name: (shares, [100 * y for y in of]) for name, of in missing.items()},
    title=f"For {shares[2]:.0f} % of the bytes the largest values leave out {values:.0%}, the best "
    f"columns {best:.0%}",
    xlabel="bytes sent, % of the gradient's",
    ylabel="left out, % of the gradient's norm",
    log="x",
)

# %% [markdown]
"""
PowerSGD does not look for the best columns; that would take longer than to send them. It takes one
turn in each step, and begins with the columns of the step before. **Predict.** If gradients did not
change at all, it would come near to the best. Here one stays, and 4 columns are turned five times.
(How fast real ones change, this does not tell.)
"""

# %%
q = torch.randn(mean.shape[1], 4, generator=torch.Generator().manual_seed(0)).to(comms.device)
distances = []
for _ in range(5):
    found, q = low_rank(widest, q)
    distances.append(((found - mean).norm() / mean.norm()).item())
comms.print("left out: " + ", ".join(f"{d:.1%}" for d in distances) + f"; best {by_column[3]:.1%}")
assert distances[-1] < distances[0]

# %% [markdown]
r"""
## Bytes

More ways, by the names that microddp has for them. `top-k:0.01` sends one value in a hundred;
`random-k:0.01` as many, at places that all ranks draw with the same seed, so that places need not
be sent and values add up. `int8` and `sign` send 8 bits or 1 bit a value, and a scale for each
block; `power:4` has 4 columns; `fp16` sends each value in 16 bits.

**Predict.** What can be added up costs an all-reduce of what is sent. What cannot is gathered, and
grows with $n$. {mod}`microddp.compression` has a formula for each. For the gradients of the
transformer, as a share of the plain all-reduce:
"""

# %%
NAMES = ("top-k:0.01", "int8", "sign", "power:4", "fp16", "random-k:0.01")
shapes = [p.shape for p in model.parameters()]
MANY = (2, 4, 8, 16, 32, 64, 128, 256)


# %%
def share_of_bytes(name, ranks):
    plain = S * 2 * (ranks - 1) / ranks
    return compressor(name).sent_bytes(shapes, 4, ranks) / plain


# %%
shares = {name: [share_of_bytes(name, ranks) for ranks in MANY] for name in NAMES}
more = sum(of[-1] > 1 for of in shares.values())
figures.lines(
    {name: (MANY, of) for name, of in shares.items()},
    title=f"With {MANY[-1]} ranks, {more} of {len(NAMES)} send more than an all-reduce",
    xlabel="ranks",
    ylabel="bytes sent / bytes of a plain all-reduce",
    log="xy",
)

# %% [markdown]
"""
(Eight bits need not grow: rounded before a reduce-scatter, and once more before the all-gather,
they send a quarter whatever n. That rounds twice. The book leaves it out.)

**Measure.** The bytes that leave each rank are counted, and should be those of the formulas. Beside
them is how far one message is from the mean of the gradients, without any feedback yet:
"""

# %%
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
mean = comms.all_gather(gradient).mean(dim=0)
rows = []
for name in NAMES:
    state, flat = Compression(compressor(name), comms), gradient.clone()
    with MessageCounter(comms) as counter:
        state.average(list(model.parameters()), flat)
    counted = sum(message.nbytes for sent in counter.gather() for message in sent) / n
    predicted = state.sent_bytes()
    assert math.isclose(counted, predicted)
    error = ((flat - mean).norm() / mean.norm()).item()
    rows.append((name, human_bytes(predicted), human_bytes(counted), f"{error:.2%}"))
comms.print(f"plain all-reduce: {human_bytes(S * 2 * (n - 1) / n)} a rank, by formula")
comms.print(table(rows, ["", "predicted", f"counted, {n} ranks", "from the mean"]))

# %% [markdown] index=["compression", "gradient compression"]
r"""
## Where it pays

From here on time counts. Ranks that have no core or GPU of their own leave, as in the chapters
before:
"""

# %%
timed = comms.timed()
timed.print(f"{timed.world_size} of {n} ranks stay")

# %% [markdown]
r"""
Fewer bytes are not less time. To find the largest values, to round or to multiply takes the
processor time. Let a compressed step take $c$ seconds more than a plain one, apart from the bytes.
With $S_0$ and $S_c$ bytes to send, and nothing hidden behind backward, both take equally long over
a link of

$$ B^* = \frac{S_0 - S_c}{c} $$

bytes a second: the *break-even*. On a slower link compression pays, on a faster one it costs.

**Predict.** $c$ is the difference of the two steps on one link, plus the time of the bytes that
were saved there; take the mean of the two slowest links. The faster ones tell whether $B^*$ is
right. The model has wide layers, few samples and one bucket, so that most of a step is message:
"""

# %%
wide, PLAIN = FullMLP(512).to(timed.device), "all-reduce"
LINKS = [2.5, 3.5, 5, 7, 9.5, 12] if timed.box and timed.world_size > 1 else []  # Gbit/s
PAYS = ("top-k:0.01", "top-k:0.05", "int8", "power:4", "power:32", "fp16")


def strategy_of(name, model, cap=ONE_BUCKET):
    made = STRATEGIES["none" if name == "alone" else "ddp"](copy.deepcopy(model), timed, cap)
    if name not in (PLAIN, "alone"):
        compress(made, name)
    return made


def step_of(strategy, samples):
    data = torch.randn(2, samples, 512, device=timed.device).unbind()
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=1e-4)
    return partial(take_step, strategy, mse_loss, optimizer, data)


# %%
def over_links(calls, links, turns):
    """Seconds of each call, by speed: the lower quartile. Speeds take turns, as calls do."""
    seconds = {speed: dict.fromkeys(calls, ()) for speed in links}
    for speed in links * turns:
        relink(timed, f"{speed}gbit")
        for name, timing in measure(calls, timed, warmup=1, repeat=3).items():
            seconds[speed][name] += timing.seconds
    return {v: {name: Timing(s).spread[0] for name, s in of.items()} for v, of in seconds.items()}


# %% [markdown]
"""
Elsewhere in this book it is medians that are compared. Here the lower quartile: a core that
computes is disturbed more often than one that waits for the wire, and a disturbance only adds.
"""

# %%
ways = {name: strategy_of(name, wide) for name in (PLAIN, *PAYS)}
times = over_links({name: step_of(way, 64) for name, way in ways.items()}, LINKS, turns=2)


# %%
def fewer(name):
    """Gbit that a rank sends less in a step."""
    return 8e-9 * (ways[PLAIN].sent_bytes() - ways[name].sent_bytes())


def break_even(times, name):
    """Where what is saved falls to nothing, in Gbit/s: saved is linear in 1/speed."""
    saved = [(v, t[PLAIN] - t[name]) for v, t in times.items()]
    for (slow, more), (fast, less) in itertools.pairwise(saved):
        if more > 0 >= less:
            return 1 / (1 / slow - more / (more - less) * (1 / slow - 1 / fast))
    return math.inf if saved[-1][1] > 0 else 0.0


# %%
found = {}
for name in PAYS if times else ():
    costs = [fewer(name) / v - t[PLAIN] + t[name] for v, t in times.items()]
    c = (costs[0] + costs[1]) / 2
    predicted = fewer(name) / c if c > 0 else math.inf
    found[name] = c, predicted, break_even({v: times[v] for v in LINKS[2:]}, name)

# %% tags=["plumbing"]
rows = []
for name, (c, predicted, met) in found.items():
    inside = 0 < met < math.inf
    beyond = f"above {max(LINKS)}" if met else f"below {LINKS[2]}"
    ratio = predicted / met if inside else None
    rows.append((name, human_seconds(c), predicted, f"{met:.1f}" if inside else beyond, ratio))
headers = ["", "c", "predicted, Gbit/s", "measured", "predicted / measured"]
formats = ["", "", ".1f", "", ".2f"]
timed.print(table(rows, headers, floats=formats) if rows else "links of known speed: none here")
crossed = {name: met for name, (*_, met) in found.items() if 0 < met < math.inf}
if crossed:
    soonest = min(crossed, key=crossed.get)
    figures.lines(
        {k: (LINKS, [t[k] / t[PLAIN] for t in times.values()]) for k in PAYS},
        title=f"From {crossed[soonest]:.1f} Gbit/s on, {soonest} takes longer than the all-reduce",
        xlabel="speed of each link, Gbit/s",
        ylabel="step / step with the all-reduce",
        log="x",
    )

# %% tags=["plumbing"]
if times:
    slowest = min(LINKS)
    rows = []
    for speed, t in times.items():
        bits = 8e-9 * ways[PLAIN].sent_bytes()
        by_bytes = times[slowest][PLAIN] + bits * (1 / speed - 1 / slowest)
        rows.append((speed, 1e3 * by_bytes, 1e3 * t[PLAIN]))
    timed.print(
        table(rows, ["Gbit/s", "all-reduce's step by its bytes, ms", "measured"], floats=".1f")
    )

# %% [markdown]
r"""
**Explain.** The smaller $c$, the less certain is $B^*$: a millisecond more or less in a step is a
tenth of a $c$ of 10 ms. And the model holds only where the link is what everything waits for. Where
the lower table has more than the bytes at its fast end, the cores limit the all-reduce, and a
break-even beyond cannot be told; "above" is what was still ahead on the fastest link tried. Hold
the results against your own link. They belong to this machine, too: a processor that compresses
faster has a smaller $c$, and more ranks make a gathered $S_c$ larger.

The plain all-reduce has one more advantage: with buckets it hides behind backward. **Predict.** If
all of backward, $b$ seconds, is used to send, compression has to save $b$ seconds more, and $B^*$
shrinks to $(S_0 - S_c)/(c + b)$. If nothing is hidden, it stays. Four times the samples now, and
buckets of 2 MiB for the all-reduce. Backward is about two thirds of a step that computes alone
(chapter 08):
"""

# %%
HIDING = [1.5, 2.2, 3.2, 5] if times else []
hiding = {name: strategy_of(name, wide) for name in ("alone", *PAYS[1::3])}
hiding[PLAIN] = strategy_of(PLAIN, wide, cap=2.0)
hidden = over_links({k: step_of(way, 256) for k, way in hiding.items()}, HIDING, turns=1)
rows = []
for name in PAYS[1::3] if hidden else ():
    c, at_most, _ = found[name]
    b = min(t["alone"] for t in hidden.values()) * 2 / 3
    met = break_even(hidden, name)
    behind = 1e3 * (fewer(name) / met - c) if 0 < met < math.inf else None
    rows.append((name, fewer(name) / (c + b), at_most, met, 1e3 * b, behind))

# %% tags=["plumbing"]
headers = [
    "Gbit/s",
    "predicted, all hidden",
    "none hidden",
    "measured",
    "backward, ms",
    "hidden, ms",
]
timed.print(table(rows, headers, floats=".1f"))

# %% [markdown]
r"""
**Explain.** The last column is what the measured break-even says was hidden of backward. No more
can hide than the message takes, and the last bucket never does. Much of what is missing besides
went to the cores, which over gloo carry the messages and compute (chapter 04). The better a machine
hides, the nearer break-even comes to the column "all hidden".

A [survey](https://arxiv.org/abs/2103.00543) tried more than 200 set-ups on GPUs in data centres
(Agarwal and others, MLSys 2022). In 6 of them compression beat an optimized synchronous training.
Does this run agree? On links below its break-evens compression wins here, above them it loses. Data
centres have fast links, all-reduces that hide, and many ranks, with which gathered messages grow. A
slow link is another case, and the next section's.

## Loss by time

Now the link is slow, and there is something to learn. With the ranks that stayed, a rank sends less
than above: two send $S$ bytes each in an all-reduce, four $1.5\,S$. One model, the same batches,
AdamW, and each way of averaging in turn. The batches are new in every step, so a loss before the
step tells how the model does on text it has not seen.

**Predict.** A step takes what it computes, and the time of its bytes. (The model is small: all
travels in one bucket, after backward, and $c$ should not count.) The steps that it takes to a given
loss cannot be told from bytes. That loss is the one that the all-reduce has after three quarters of
its steps.

**Measure.** One run of each, one seed, one learning rate:
"""

# %%
STEPS = 112
model = character_model(timed.device)
computing = learn(strategy_of("alone", model), text, timed, STEPS).step
if timed.box:
    relink(timed, "100mbit")
runs, sent = {}, {}
for name in (PLAIN, *NAMES):
    strategy = strategy_of(name, model)
    runs[name], sent[name] = learn(strategy, text, timed, STEPS), strategy.sent_bytes()
TARGET = runs[PLAIN].smooth[3 * STEPS // 4]
reached = {name: run.seconds_to(TARGET) for name, run in runs.items()}

# %% tags=["plumbing"]
per_byte = timed.box.seconds_per_byte if timed.box else math.nan
rows = []
for name, run in runs.items():
    predicted = (computing + sent[name] * per_byte) * 1e3 if timed.box else None
    numbers = human_bytes(sent[name]), predicted, run.step * 1e3, run.smooth[-1]
    there = run.steps_to(TARGET), reached[name], reached[PLAIN] / reached[name]
    rows.append((name, *numbers, *(there if math.isfinite(reached[name]) else (None,) * 3)))
headers = ["", "sent", "ms, predicted", "ms a step", "last loss", "steps to it", "s", "speed-up"]
formats = ["", "", ".1f", ".1f", ".2f", ".0f", ".2f", ".2f"]
where = f"links of {timed.box.links[0]}" if timed.box else "this machine"
timed.print(f"{where}; computing {human_seconds(computing)} a step; to a loss of {TARGET:.2f}")
timed.print(table(rows, headers, floats=formats))

# %% tags=["plumbing"]
FROM = STEPS // 8  # the first steps would flatten all that follows
lasts = [runs[name].smooth[-1] for name in NAMES]
figures.lines(
    {name: (range(FROM + 1, STEPS + 1), run.smooth[FROM:]) for name, run in runs.items()},
    title=f"By steps: the all-reduce ends at {runs[PLAIN].smooth[-1]:.2f}, others at "
    f"{min(lasts):.2f} to {max(lasts):.2f}",
    xlabel="step",
    ylabel="loss, mean of 16 steps",
    zero=False,
)

# %% tags=["plumbing"]
best = min(reached, key=reached.get)
figures.lines(
    {
        name: (run.seconds[FROM:], run.smooth[FROM:])
        for name, run in runs.items()
        if math.isfinite(reached[name])
    },
    title=f"By time: {best} is at {TARGET:.2f} in 1/{reached[PLAIN] / reached[best]:.1f} of the "
    "all-reduce's time",
    xlabel="seconds",
    ylabel="loss, mean of 16 steps",
    zero=False,
)
assert runs["int8"].steps_to(TARGET) < 1.1 * runs[PLAIN].steps_to(TARGET)

# %% [markdown]
r"""
**Explain.** A blank means that the run ended before. The time of a step follows the bytes. The
steps to the loss follow the last column of the table of bytes, though that is of one gradient
without feedback: what comes near to the mean needs about as many as the all-reduce, what leaves out
half of it or more needs more. Kept is not the same as in time.

## Mixed precision

**Predict.** Autocast multiplies in bf16, and keeps weights and gradients in fp32 (chapter 09). So
the messages do not get shorter; a hook that rounds what is sent makes them so. PyTorch's own bf16
hook forgets what it rounds away; this one keeps it. Still over the slow link, 48 steps each:
"""

# %%
rows = []
for precision, name in (("fp32", PLAIN), ("autocast", PLAIN), ("autocast", "bf16")):
    strategy = strategy_of(name, model)
    on = torch.autocast(timed.device.type, torch.bfloat16, enabled=precision == "autocast")
    run = learn(strategy, text, timed, 48, on)
    kinds = {str(p.grad.dtype).removeprefix("torch.") for p in strategy.module.parameters()}
    nbytes = human_bytes(strategy.sent_bytes())
    numbers = nbytes, human_seconds(run.step), run.smooth[-1]
    rows.append((precision, "as it is" if name == PLAIN else name, *kinds, *numbers))
timed.print(table(rows, ["computed in", "sent in", "gradients", "sent", "a step", "loss"]))
assert {row[2] for row in rows} == {"float32"}

# %% [markdown]
r"""
**Explain.** The hook halves the bytes, and 48 steps do not tell its loss from the others. Whether
autocast computes faster depends on the processor; where it does not, only the hook saves time.

## Where it breaks: sums in 16 bits

fp16 has more digits than bf16 and less room: the largest value is 65504, the smallest 0.00000006,
and what is below half of that becomes 0. A mean is a sum and a division, and both orders can go
wrong. **Predict.** The sum of two values of 60000 does not fit. Divided before the sum it does; but
then small values vanish. With error feedback, what vanished is sent when it has added up. Six steps
of the same gradient on every rank, large and small:
"""


# %%
def sum_first(flat):
    half = flat.half()
    timed.all_reduce(half)
    return (half / timed.world_size).float()


def divide_first(flat):
    half = (flat / timed.world_size).half()
    timed.all_reduce(half)
    return half.float()


# %%
kept = Compression(compressor("fp16"), timed)
weight = torch.nn.Parameter(torch.zeros(2, device=timed.device))


def with_feedback(flat):
    kept.average([weight], flat)
    return flat


# %%
rows = []
for way in (sum_first, divide_first, with_feedback):
    steps = [way(torch.tensor([6e4, 4e-8], device=timed.device)) for _ in range(6)]
    large, small = torch.stack(steps).mean(dim=0).tolist()
    rows.append((way.__name__, f"{large:.0f}", f"{small:.1e}"))
timed.print(table(rows, ["", "mean of 6 x 60000", "mean of 6 x 4e-8"]))
assert timed.world_size == 1 or rows[0][1] == "inf"
assert math.isclose(large, 6e4, rel_tol=1e-3)
assert math.isclose(small, 4e-8, rel_tol=0.3)

# %% [markdown]
r"""
**Explain.** "sum_first" has an infinite mean of the large values. The small one is above half of
the smallest, and is rounded up to it. "divide_first" makes it less than half, and loses it. With
feedback both are right in the mean. (To *compute* in fp16 needs a loss scaler, which multiplies
gradients by a factor that it changes; what was kept would be in the old unit. So microddp's
training refuses to compute in fp16 with any compression.)

## What to pick

From this run: the steps that each way took to the loss of "Loss by time", times what a step takes
beside its bytes, plus the bytes at each speed. At 100 Mbit/s that is nearly the measurement again,
at the others a prediction. A single run does not tell small differences; stars mark all that is
within 15 % of the least of a column:
"""

# %% tags=["plumbing"]
PICK = {"10 Mbit/s": 1e7, "50 Mbit/s": 5e7, "100 Mbit/s": 1e8, "500 Mbit/s": 5e8}
tried = {name: (run, sent[name]) for name, run in runs.items() if timed.box}
rows = [(k, *cells) for k, cells in times_by_link(tried, TARGET, per_byte, PICK.values()).items()]
headers = [f"to a loss of {TARGET:.2f}", *PICK]
timed.print(table(rows, headers) if rows else "links of known speed: none here")

# %% [markdown]
r"""
The slower the link, the more the bytes decide. (In so small a model $c$ hardly counts. For millions
of values and fast links, see "Where it pays".) Before you compress, ask three things. How long does
the all-reduce take that backward does not hide? If it is little, there is nothing to gain. How many
ranks are there? Gathered messages grow with them. And how many more steps does it take *your* model
to the same loss? That only a run tells.

## What to take along

- What is not sent has to be kept, which costs a copy of the gradients on each rank. Forgotten, it
  is lost for good.
- Count the bytes at your number of ranks: what is gathered grows with it, what adds up is never
  more than twice its size.
- Compression pays below a bandwidth of $(S_0 - S_c)/c$, and what backward hides lowers it.
- Compare the time to a loss, not the time of a step.

On either wrapper: `ddp.register_comm_hook(*microddp.compression.hook("power:4", comms))`; for a
whole training run, `python -m microddp.train --compress power:4`. PyTorch brings hooks along, too:
fp16 and bf16 without error feedback, and PowerSGD with it, which sends whole gradients in the first
`start_powerSGD_iter` steps. Sending less is one way to live with a slow link. Sending less often is
the other: the next chapter.

## Exercises

**The lab.** Write top-k with error feedback. {doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 10
```

1. At how many ranks does a rank send as much as in a plain all-reduce with `top-k:0.01`, with
   `int8`, with `sign`? Leave the scales out. Does the figure agree?

   <details class="solution"><summary>Solution</summary>

   A gathered message of $s$ bytes from each rank costs $s(n-1)$, a plain all-reduce $2S(n-1)/n$. So
   they are equal at $n = 2S/s$. For top-k, $s = 2 \cdot S/100$: 100 ranks. For int8, $s = S/4$: 8
   ranks. For sign, $s = S/32$: 64 ranks. In the figure the lines cross 1 there; those with scales a
   little earlier.

   </details>

2. From how many columns on does PowerSGD send no less than the matrix, if that is 64 x 256? What
   does microddp do then?

   <details class="solution"><summary>Solution</summary>

   Two factors of $r$ columns have $r(64 + 256) = 320r$ values, the matrix 16384: from $r = 52$ on
   it is not worth it. {class}`~microddp.compression.power_sgd.PowerSGD` sends such a matrix as it
   is, and so all vectors, along with the first factors.

   </details>

3. Give the optimizer in `train` a momentum of 0.9 and half the learning rate. How do 261 values
   with error feedback compare to all now?

   <details class="solution"><summary>Solution</summary>

   On the machine this was tried on (four ranks, November 2026) momentum takes the loss of the last
   epoch from 0.168 to 0.045 if all values are sent, and from 0.170 to 0.092 with 261: behind now,
   where they had kept up. A value that waited arrives as the sum of many gradients, and momentum
   repeats it, nine more times in the end. [Deep gradient
   compression](https://arxiv.org/abs/1712.01887) (Lin and others, 2018) applies momentum before the
   largest values are chosen, and begins with more of them.

   </details>
"""

# %%
comms.close()
