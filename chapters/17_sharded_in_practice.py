# %% [markdown]
r"""
# 17. Sharded in practice

How is sharded training run? You care because stage 3 over all devices sends all parameters and
gradients over the slowest links, too, and what helps (two levels, what to keep whole, precision,
accumulation, the right optimizer) is easily set the wrong way, without an error. This chapter
builds small versions of two of these, tries the others, and counts what leaves a node.
"""

# %% tags=["imports"]
import contextlib
import copy
import gc
import math
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import get_total_norm, parameters_to_vector

import microddp
from microddp import figures
from microddp.allreduce import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from microddp.findings import compare, find
from microddp.hosts import relink
from microddp.message_counter import MessageCounter
from microddp.parts import clip_grad_norm, load_parts, own_parts
from microddp.performance import Sends, bytes_alive
from microddp.report import human_bytes, table
from microddp.sharding import OwnedOptimizer, elements, fully_shard, nodes_of, owners
from microddp.stage import cluster, set_stage
from microddp.strategies import STRATEGIES
from microddp.timing import measure

with warnings.catch_warnings(action="ignore"):  # PyTorch's own
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

# %%
# sphinx_gallery_builds = "two levels of sharding, and a sharded Muon"
# sphinx_gallery_hosts = "8 x 1gbit"
comms = microddp.init()
n = comms.world_size
comms.print(comms.describe())
own = comms.subgroup(range(n))

# %% [markdown] index=["HSDP", "hybrid sharding", "device mesh"]
r"""
## Two levels

GPUs of a node share fast links; nodes share slow ones. *Hybrid sharding* (HSDP) uses both: the $k$
ranks of a node divide the parameters, as in stage 3, and the $m$ nodes keep replicas, as in DDP. It
is chapter 07's grid, a *device mesh*: a row is a node; ranks of a column hold the same shard.
Here two of 8 ranks are a node, four of 16; on GPUs, those of a machine if there are several:
"""

# %%
local = comms.local_world_size
k = local if comms.device.type == "cuda" and n % local == 0 and local < n else math.isqrt(n)
k = k if n % k == 0 and n > k else 1  # ranks of a node
m = n // k  # nodes
inside, across = nodes_of(own, k)
comms.print(f"{m} nodes of {k}: rows of {inside.world_size} ranks, columns of {across.world_size}")

# %% [markdown]
r"""
**Build.** After backward each rank has a block's whole gradient, flat, of its own samples. Inside
the node it is reduce-scattered. Then each shard, a $k$-th, is averaged with its replicas:
"""


# %%
def reduce_by_levels(flat, shard, replicate):
    """Leave each rank its shard of the mean over all ranks."""
    mine = ring_reduce_scatter(flat, shard, "mean")
    ring_all_reduce(mine, replicate, "mean")
    return mine


# %%
mean = torch.arange(24.0 * n, device=comms.device) * own.rank
mine = reduce_by_levels(mean.clone(), inside, across)
own.all_reduce_mean(mean)
torch.testing.assert_close(mine, mean.tensor_split(k)[inside.rank])

# %% [markdown]
r"""
Counters see the messages of rows, of columns, and of a ring of all ranks, in which a message
crosses nodes if its sender and its receiver are in different ones. Summed over the ranks of a node,
"between" is what the node's uplink, its link to other nodes, carries:
"""


# %% tags=["plumbing"]
def crossed(call, *arguments):
    """Bytes that this node's ranks send inside the node, and to other nodes."""
    counters = [MessageCounter(ranks) for ranks in (own, inside, across)]
    with contextlib.ExitStack() as stack:
        for counter in counters:
            stack.enter_context(counter)
        call(*arguments)
    flat, near, far = (counter.messages for counter in counters)
    far = far + [msg for msg in flat if msg.src // k != msg.dst // k]
    near = near + [msg for msg in flat if msg.src // k == msg.dst // k]
    mine = [sum(msg.nbytes for msg in messages) for messages in (near, far)]
    everyone = own.all_gather_data(mine)
    node = everyone[own.rank // k * k :][:k]
    return tuple(map(sum, zip(*node, strict=True)))


# %% [markdown]
r"""
**Predict.** Let $S$ be the bytes of all parameters, as many as of all gradients, in $L$ equal
blocks. Stage 3 gathers a block for its forward, frees it, and gathers it again for its backward.
The last block stays whole in between, since backward begins with it (chapter 16). Bytes that leave
a node:

- DDP, one ring of all: it leaves each node once, so $2\frac{n-1}{n}S$.
- Stage 3 over all: $2 - \frac{1}{L}$ gathers and one reduction, so
  $(3 - \frac{1}{L})\frac{n-1}{n}S$.
- HSDP: each of $k$ ranks all-reduces $S/k$ over $m$ nodes: $2\frac{m-1}{m}S$. The gathers stay
  inside.
- HSDP with its dimensions swapped: shards across nodes, replicas inside. All $k$ ranks of a node
  gather and reduce the whole between nodes: $(3 - \frac{1}{L})k\frac{m-1}{m}S$.

**Measure.** With a model of four layers, and microddp's
{func}`~microddp.sharding.fully_shard.fully_shard`, which takes the column as `replicas`. PyTorch's
takes a mesh, of which the second dimension is sharded and the first replicated:
"""

# %%
WIDTH, LAYERS = 96, 4
SIZE = 4 * LAYERS * WIDTH**2  # S, bytes


def build():
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return nn.Sequential(*layers).to(comms.device)


# %%
def shard_each(model, shard, replicate, keep=1, **options):
    """Shard each block; the last so many stay whole from forward to backward."""
    blocks = elements(model)
    options |= {"replicas": replicate, "collectives": "ring"}
    for i, block in enumerate(blocks):
        fully_shard(block, shard, reshard_after_forward=i < len(blocks) - keep, **options)
    return fully_shard(model, shard, reshard_after_forward=False, **options)


def by_levels(*grid, **options):
    model = build()
    return model, shard_each(model, *grid, **options)


def by_pytorch(*dimensions):
    model, names = build(), ("replicate", "shard")[-len(dimensions) :]
    ranks = torch.arange(n).view(dimensions)
    mesh = DeviceMesh(comms.device.type, ranks, mesh_dim_names=names)
    for module in (*model, model):
        torch_fully_shard(module, mesh=mesh)
    return model


# %%
def backward(model, step=0):
    generator = torch.Generator().manual_seed(100 * step + own.rank)
    x, y = torch.randn(2, 128, WIDTH, generator=generator).to(comms.device)
    mse_loss(model(x).float(), y).backward()


flat = torch.zeros(SIZE // 4, device=comms.device)
GRIDS = {
    "stage 3 over all": (own, None),
    "HSDP": (inside, across),
    "HSDP, swapped": (across, inside),
}
sent = {"DDP, one ring": crossed(ring_all_reduce, flat, own)}
for name, grid in GRIDS.items():
    sent[name] = crossed(backward, by_levels(*grid)[0])

# %% tags=["plumbing"]
once, thrice = 2 * (n - 1) / n, 3 - 1 / LAYERS
between = [once, thrice / 2 * once, 2 * (m - 1) / m, thrice * k * (m - 1) / m]  # times S
divided = [1, n, k, m]
rows = []
for (name, (near, far)), right, parts in zip(sent.items(), between, divided, strict=True):
    assert math.isclose(far, right * SIZE, rel_tol=0.02)
    row = (name, human_bytes(16 * SIZE / 4 / parts), human_bytes(near))
    rows.append((*row, human_bytes(right * SIZE), human_bytes(far)))
headers = ["", "a rank keeps, by formula", "sent inside a node", "between, predicted", "counted"]
comms.print(f"{human_bytes(SIZE)} of parameters, Adam; sent: a node's bytes in a step")
comms.print(table(rows, headers))
if n > 1:
    figures.stacked_bars(
        {name: {"in the node": near, "out of it": far} for name, (near, far) in sent.items()},
        title=f"Out of a node go {human_bytes(sent['HSDP'][1])} with HSDP, "
        f"{human_bytes(sent['stage 3 over all'][1])} with stage 3 over all",
        xlabel="bytes that a node's ranks send in a step",
        formatter=human_bytes,
    )

# %% tags=["plumbing"]
hsdp, stage_3, swapped = (max(1, sent[name][1]) for name in ("HSDP", *[*GRIDS][::2]))
find(
    comms,
    "levels",
    two=(
        k > 1,
        f"Stage 3 over all sends {stage_3 / hsdp:.2f} times as much out of a node as HSDP. HSDP "
        f"with its dimensions swapped sends {swapped / hsdp:.2f} times as much, and no error says "
        "so.",
    ),
    one=(k == 1 < n, "With one rank in a node HSDP is DDP, and swapped it is stage 3."),
    alone=(n == 1, "One rank sends nothing."),
)

# %% [markdown]
r"""
The price is memory: a rank keeps a $k$-th of everything, not an $n$-th. `torchrun` numbers the
ranks of a machine in a row. So the mesh is `(nodes, GPUs of a node)`, and the second dimension, the
sharded one, is a machine's; `mesh.mesh` shows the rows.

## In time

**Predict.** This book's stage is a scale model of four nodes of two A100, a link of 100 Gbit/s for
each node, NVLink inside, and messages in fp32. A node's hosts share an uplink of 100 Mbit/s; inside
they have 10 times as much (A100s: 19 times). Let $C$ be a step's computing, two thirds of it
backward, and $M$ the all-reduces of all $L$ blocks' gradients around one ring. By chapter 16 no
step takes less than $T_0 = F + B$, with $F = g + \max(\frac{1}{3} C, f - g + \frac{C}{3L})$ and
$B = \max(\frac{2}{3} C, b - r + w) + r$. Messages take $f$ in forward, the first gather of
these $g$, and $b$ in backward, the last reduction of these $r$; the link waits $w$ for the first
gradient:

| | $f$ | $g$ | $b$ | $r$ | $w$ |
|---|---|---|---|---|---|
| DDP | $0$ | $0$ | $M$ | $b/L$ | $2C/3L$ |
| stage 3 | $M/2$ | $M/2L$ | $M - M/2L$ | $M/2L$ | $0$ |
| HSDP | $0$ | $0$ | $\frac{m-1}{m}\frac{n}{n-1} M$ | $b/L$ | $2C/3L$ |

(Times are taken in proportion to what leaves a node: what stays inside is neglected for HSDP.)
$T_0$ allows $n$ devices to be $nC/T_0$ times as fast as one. ($C$ and $M$ are those of the rounds
below, where $M$ is $L$ all-reduces. The stage's table has its own, of one all-reduce of all
gradients. Both are timed apart from the steps, so a step may seem to take a little less than
$T_0$.)

**Measure.** These three and one device, in the same rounds as what later sections compare, which
therefore take a while; a ratio is the median of the rounds' ratios:
"""

# %%
usual = comms.box and len(comms.box.links) == n and comms.box.links[0].option
for first in range(0, n, k) if usual else ():
    relink(comms, "100mbit", None, list(range(first, first + k)))
WORK = {"parameters": 1.3e9, "tokens": 16_384, "layers": LAYERS, "value_size": 4}
stage = set_stage(own, cluster("a100", "100gbit", nodes=m, node=k, **WORK), layer_bytes=1 << 18)
comms.print(stage)


# %%
def on_stage(shard, replicate=None, **options):
    model = copy.deepcopy(stage.model)
    shard_each(model, shard, replicate, **options)
    return stage.step(STRATEGIES["none"](model, own))


KEEP = {"nothing": 0, "the last block": 1, "all blocks": math.inf}
calls = {"one device": stage.step("none"), "DDP": stage.step("ddp", 0.25)}
calls |= {"stage 3": on_stage(own), "HSDP": on_stage(inside, across)}
calls |= {kept: on_stage(own, keep=KEEP[kept]) for kept in ("nothing", "all blocks")}
calls["M"] = stage.all_reduces()
bf16, fp32 = torch.bfloat16, torch.float32
for sums in (fp32, bf16):
    calls[sums] = on_stage(inside, across, param_dtype=bf16, reduce_dtype=sums)
steps = measure(calls, own, repeat=4, warmup=1)
speeds = {name: stage.speed_up(steps[name], steps["one device"]) for name in [*calls][1:4]}
C, M = (steps[name].median for name in ("one device", "M"))

# %% tags=["plumbing"]
rows = [(name, str(steps[name]), str(speed)) for name, speed in speeds.items()]
headers = ["", "a step", f"{n} devices beside one"]


def allowed(sends):
    """Put n C/T_0 into words."""
    return f"{n * C / sends.least(C, M, LAYERS):.2f} times"


half = 0.5 / LAYERS
third = Sends(0.5, half, 1 - half, half, waits=False)
if usual and n > 1:
    ddp, hsdp = (Sends(0, 0, b, b / LAYERS) for b in (1, between[2] / between[0]))
    three = (ddp, third, hsdp)
    rows = [(*row, allowed(sends)) for row, sends in zip(rows, three, strict=True)]
    headers.append("T_0 allows")
else:
    comms.print("Left out: what T_0 allows, since these links have no known speed.")
blank = [None] * (len(headers) - 2)
alone = [(name, str(steps[name]), *blank) for name in ("one device", "M")]
comms.print(table([*alone, *rows], headers))

# %% tags=["plumbing"]
gain, beside = (compare(steps["HSDP"], steps[name]) for name in ("stage 3", "DDP"))
said = (
    f"With HSDP {n} devices are {speeds['HSDP'].ratio:.2f} times as fast as one, with DDP "
    f"{speeds['DDP'].ratio:.2f} times, with stage 3 over all {speeds['stage 3'].ratio:.2f} times: "
    f"a step of HSDP is {gain.than('one of stage 3')}, and {beside.than('one of DDP')}."
)
if usual and n > 1:
    bounds = {name: s.least(C, M, LAYERS) for name, s in zip(speeds, three, strict=True)}
    same = sorted(bounds, key=bounds.get) == sorted(bounds, key=lambda name: steps[name].median)
    said += f" The order of the medians is {'that' if same else 'not that'} of T_0."
find(comms, "levels-in-time", **gain.sides(said if n > 1 else "One rank has nothing to send."))
figures.speed_ups(
    {name: speed.times for name, speed in speeds.items()},
    n,
    title=f"{m} nodes of {k}: a step of HSDP is {gain.than('one of stage 3')}",
)
if usual:
    relink(comms, usual)

# %% [markdown]
r"""
**Explain.** $T_0$ lets messages follow each other without a pause. Stage 3 gathers one block ahead,
so its link waits twice in backward, and $T_0$ becomes $T_1$ (chapter 16). (What HSDP takes beyond
its $T_0$, this page does not take apart.)
"""

# %% tags=["plumbing"]
waits = third.one_ahead(C, M, LAYERS) - third.least(C, M, LAYERS) if n > 1 else 0.0
by_round = zip(*(steps[name].seconds for name in ("stage 3", "one device", "M")), strict=True)
over = median(step - third.least(*each, LAYERS) for step, *each in by_round)
more = f"{1e3 * over:.0f} ms more than" if over >= 5e-4 else "no more than"
said = f"In the median of the rounds a step of stage 3 took {more} T_0"
known = bool(usual) and n > 1

# %% tags=["plumbing"]
find(
    comms,
    "stage-3-waits",
    part=(
        known and 0 < waits <= over,
        f"{said}. By T_1 {1e3 * waits:.0f} ms of it are those waits; it has no term for the rest.",
    ),
    less=(
        known and waits > max(0, over),
        f"{said}. T_1 has {1e3 * waits:.0f} ms of waits, which are not seen in full.",
    ),
    none=(known and waits == 0, f"{said}. At this M/C those waits cost nothing."),
    left_out=(not known, "Left out: these links have no known speed, or there is one rank."),
)

# %% [markdown]
r"""
With 16 hosts (`python -m microddp.hosts --hosts 16 -- chapters/17_sharded_in_practice.py`) it is
four nodes of four.

## What to keep whole

**Predict.** With `reshard_after_forward=False` a block stays whole until its backward, and its
second gather is saved. If $j$ of $L$ blocks stay, $jS/L$ is kept after forward, stage 3 sends $(3 -
\frac{j}{L}) \frac{n-1}{n}S$, and $b = (1 - \frac{j}{2L}) M$.

The last block is the first to keep. It is whole when forward ends, and when backward begins.
*Prefetch* (a block is gathered while the one before it computes) could hide its second gather only
behind what follows the blocks: head and loss, which this model lacks. ($T_0$ has no term for that.)
Each further block costs memory, and by $T_0$ saves time only while $b - r$ is above $\frac{2}{3}
C$. With all of them whole, backward gathers nothing: $w$ is $2C/3L$, as in DDP, and the two waits
of $T_1$ are saved.

**Measure.** Stage 3 over all keeps nothing, the last block (as microddp's strategies do, by
{func}`~microddp.sharding.fully_shard.shard_blocks`), or all:
"""

# %%
x = torch.ones(1, WIDTH, device=comms.device)
held = {}
for kept, keep in KEEP.items():
    model, sharded = by_levels(own, None, keep=keep)
    far = crossed(backward, model)[1]
    loss = model(x).sum()
    groups = sharded.context.groups  # the flat tensors of all blocks
    held[kept] = sum(group.unsharded.untyped_storage().nbytes() for group in groups), far
    loss.backward()

# %% tags=["plumbing"]
steps["the last block"] = steps["stage 3"]
rows, headers = [], ["stage 3 keeps", "whole after forward", "predicted", "leaves a node"]
least = {}  # seconds, by T_0
for kept, keep in KEEP.items():
    part = min(keep, LAYERS) / LAYERS
    right = (3 - part) * once / 2 * SIZE
    assert held[kept][0] == part * SIZE
    assert math.isclose(held[kept][1], right, rel_tol=0.02)
    bytes_ = map(human_bytes, (held[kept][0], right, held[kept][1]))
    row = (kept, *bytes_, str(steps[kept]))
    sends = Sends(0.5, 0.5 / LAYERS, 1 - part / 2, 0.5 / LAYERS, waits=keep > 1)
    rows.append((*row, allowed(sends)) if usual and n > 1 else row)
    least[kept] = sends.least(C, M, LAYERS)
headers += ["a step", "T_0 allows"][: len(rows[0]) - len(headers)]
comms.print(table(rows, headers))

# %% tags=["plumbing"]
last_block = least["the last block"]
last, every = (
    compare(steps[kept], steps[other])
    for kept, other in (("the last block", "nothing"), ("all blocks", "the last block"))
)
said = (
    f"Stage 3 that keeps the last block whole is {last.than('one that keeps nothing')}; one that "
    f"keeps all is {every.than('one that keeps the last')}"
)
by_least, by_waits = (each / least["all blocks"] for each in (last_block, last_block + waits))
from_none = least["nothing"] / last_block
said += f" (T_0 allows {from_none:.2f} times for the first and {by_least:.2f} for the second, "
said += f"{by_waits:.2f} with T_1 for the last block)."
find(comms, "what-to-keep", **last.sides(said if n > 1 else "One rank gathers nothing."))

# %% [markdown]
r"""
By default PyTorch keeps only the outermost module's own parameters whole. For the last block set
`reshard_after_forward=False`. Where more than 8 ranks share a block, `reshard_after_forward=8`
keeps an eighth of it on each rank. That takes more memory than freeing all of it, but the second
gather stays among 8 ranks.

## Where it breaks: the norm over all ranks

Clipping needs the norm of the whole gradient. **Predict.** In HSDP the shards of a *node* are the
whole gradient, once. Squares that are summed over all ranks count each value $m$ times: the norm is
$\sqrt m$ times as large, and clips too much. **Measure.** The norm over all ranks, over a node's
shards, and of whole gradients, averaged:
"""

# %%
model, _ = by_levels(inside, across)
backward(model)
shards = [p.grad for p in model.parameters() if p.grad.numel()]
squares = get_total_norm(shards).square()
own.all_reduce(squares)
over_all = squares.sqrt().item()
norm = clip_grad_norm(model.parameters(), 1.0, inside).item()

whole = build()
backward(whole)
for p in whole.parameters():
    own.all_reduce_mean(p.grad)
right = get_total_norm([p.grad for p in whole.parameters()]).item()
assert math.isclose(norm, right, rel_tol=1e-4)
assert math.isclose(over_all, right * math.sqrt(m), rel_tol=1e-4)

# %%
PYTORCH = not comms.through_host  # to try its own, too; over gloo DTensors crash on GPUs
if PYTORCH:
    on_mesh = by_pytorch(m, k)
    backward(on_mesh)
    theirs = get_total_norm([p.grad for p in on_mesh.parameters()]).full_tensor().item()
    assert math.isclose(theirs, right, rel_tol=1e-4)

# %% tags=["plumbing"]
find(
    comms,
    "norm",
    wrong=(
        m > 1,
        f"The gradient's norm is {right:.4f}, whole as over a node's shards. Over all "
        f"ranks it comes out as {over_all:.4f}, {over_all / right:.2f} times as large.",
    ),
    right=(m == 1, "With one node, all ranks are the node's."),
)

# %% [markdown]
r"""
PyTorch's gradients are DTensors, which know the mesh: its `get_total_norm` and `clip_grad_norm_`
are right. Your own `all_reduce` of a norm over all ranks is not.
"""

# %% [markdown] index=["mixed precision", "master weights", "MixedPrecisionPolicy"]
r"""
## Precision: three choices

Choose a dtype for each of three: the shards that the optimizer updates (*masters*), the parameters
that are gathered, and the gradients that are summed. **Predict.** For each parameter outside of the
last block two gathers and one reduction take $4 + 4 + 4$ bytes in fp32, $2 + 2 + 4$ with
`param_dtype=bfloat16` and sums in fp32, $2 + 2 + 2$ all in bf16. But HSDP's uplinks carry sums
only. So on the stage gathers in bf16 should gain nothing; sums in bf16 halve $b$.

**Measure.** Bytes of this chapter's model, and time on the stage; masters stay in fp32:
"""

# %%
policies = {"fp32, fp32": (fp32, fp32), "bf16, fp32": (bf16, fp32), "bf16, bf16": (bf16, bf16)}
moved = {}
for name, (gathered, reduced) in policies.items():
    model, _ = by_levels(inside, across, param_dtype=gathered, reduce_dtype=reduced)
    moved[name] = crossed(backward, model)
    assert {p.dtype for p in model.parameters()} == {fp32}
    assert {p.grad.dtype for p in model.parameters()} == {fp32}
often = 2 - 1 / LAYERS  # gathers of a parameter, on average
less = (2 * often + 4) / (4 * often + 4)
assert math.isclose(moved["bf16, fp32"][0], less * moved["fp32, fp32"][0])

# %% tags=["plumbing"]
times = [str(steps[name]) for name in ("HSDP", fp32, bf16)]
rows = [(*row, time) for row, time in zip(moved.items(), times, strict=True)]
rows = [(name, *map(human_bytes, bytes_), time) for name, bytes_, time in rows]
comms.print(table(rows, ["gathered, summed in", "sent inside a node", "between", "a step"]))
gain, both = (compare(steps[sums], steps["HSDP"]) for sums in (fp32, bf16))
verdict = "failed" if gain.faster else "is not contradicted"
said = (
    f"The prediction that gathers in bf16 gain nothing {verdict}: with them HSDP's step is "
    f"{gain.than('one in fp32')}. With sums in bf16, too, it is {both.than('one in fp32')}."
)
if usual and n > 1:
    halved = hsdp.least(C, M, LAYERS) / hsdp.least(C, M / 2, LAYERS)
    said += f" T_0 allows {halved:.2f} times for that"
    said += "." if halved <= both.times.spread[1] else ", and why less came, the run does not show."
find(comms, "precision-in-time", **both.sides(said if n > 1 else "One rank sends nothing."))

# %% [markdown]
r"""
Why sums in fp32? In bf16 they round the more, the more ranks add up ({doc}`chapter 10
<10_compression>`). Why masters in fp32? **Predict.** bf16 has 8 significant bits. 100 updates of
0.001 to a weight of 1, each less than half a last bit, do nothing:
"""

# %%
masters = {dtype: torch.ones((), dtype=dtype) for dtype in (fp32, bf16)}
for weight in masters.values():
    for _ in range(100):
        weight += 1e-3
assert masters[bf16] == 1

# %% tags=["plumbing"]
find(
    comms,
    "precision",
    rounds=(
        masters[bf16].item() == 1,
        f"After 100 updates of 0.001 a master in fp32 is {masters[fp32].item():.2f}, and one in "
        "bf16 still 1.",
    ),
)

# %% [markdown] index=["no_sync", "gradient accumulation"]
r"""
## Accumulation three ways

With four micro-batches to a step, when are gradients reduced?

- *Each time*: they stay sharded, and are sent four times. It is the default.
- *Whole, once* (`no_sync`): each rank keeps whole gradients until the last micro-batch.
- *Sharded, averaged once* (`no_all_reduce`): a reduce-scatter in the node each time; between nodes
  once.

**Predict.** Inside, each reduction costs a node $(k-1)S$ and the gathers of each micro-batch $(2 -
\frac{1}{L})(k-1)S$. Between nodes each reduction costs $2\frac{m-1}{m}S$. Kept between two
micro-batches: $S/k$, $S$, $S/k$.

**Measure.** Kept is what tensors have grown by after three micro-batches:
"""

# %%
MICRO = 4


def accumulate(way):
    model, sharded = by_levels(inside, across)
    backward(model)  # makes what stays
    model.zero_grad()
    gc.collect()
    before, kept = bytes_alive(), []

    def micro_batches():
        with getattr(sharded, way)() if way else contextlib.nullcontext():
            for step in range(MICRO - 1):
                backward(model, step)
        time.sleep(0.01)  # until a lane's thread lets its last tensor go
        kept.append(bytes_alive() - before)
        backward(model, MICRO - 1)

    bytes_ = crossed(micro_batches)
    return *bytes_, kept[0], torch.cat([p.grad.flatten() for p in model.parameters()])


# %%
WAYS = {"each time": "", "whole, once": "no_sync", "sharded, averaged once": "no_all_reduce"}
gc.freeze()  # for speed
found = {name: accumulate(way) for name, way in WAYS.items()}
gc.unfreeze()
each, whole_once, averaged_once = found.values()
for *_, gradients in found.values():
    torch.testing.assert_close(gradients, each[-1], rtol=1e-4, atol=1e-6)

# %% tags=["plumbing"]
rows = [(name, *map(human_bytes, numbers)) for name, (*numbers, _) in found.items()]
comms.print(table(rows, ["reduced", "sent inside a node", "between", "gradients a rank keeps"]))
gathered = (2 - 1 / LAYERS) * (k - 1) * MICRO * SIZE
reductions = (MICRO, MICRO), (1, 1), (MICRO, 1)  # inside, between
for (near, far, *_), (inner, outer) in zip(found.values(), reductions, strict=True):
    assert math.isclose(near, gathered + inner * (k - 1) * SIZE, rel_tol=0.02)
    assert math.isclose(far, outer * between[2] * SIZE, rel_tol=0.02)
find(
    comms,
    "accumulation",
    both=(
        k > 1,
        f"Averaged once, {MICRO} micro-batches send {human_bytes(averaged_once[1])} out of a node "
        f"instead of {human_bytes(each[1])}, and a rank keeps {human_bytes(averaged_once[2])} of "
        f"gradients meanwhile. Whole ones take {human_bytes(whole_once[2])}.",
    ),
    one=(k == 1, "With one rank in a node a shard is the whole gradient: the last two are alike."),
)

# %% [markdown]
r"""
PyTorch has switches, methods of the outermost module
([documentation](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)):

| before each but the last micro-batch | its effect | microddp |
|---|---|---|
| `set_requires_gradient_sync(False)` | whole gradients are kept | `no_sync()` |
| `set_requires_all_reduce(False)` | reduce-scatter only: shards are kept | `no_all_reduce()` |
| `set_reshard_after_backward(False)` | parameters stay whole for the next forward | none |

The switches keep their value. Set reductions on again *before* the last backward, or each `p.grad`
stays `None`: the optimizer's `step()` changes nothing, without an error. On two nodes of 8 A100
with Ethernet and HSDP, a step of one micro-batch took 22.2 s, so that four averaged each take
88.8 s; averaged once, they took 54.3 s
([cosmos-framework 162](https://github.com/NVIDIA/cosmos-framework/pull/162), August 2026).
"""

# %% [markdown] index=["Muon", "ownership"]
r"""
## Optimizers that need whole matrices

Adam treats each value by itself, so a shard is as good as a parameter.
[Muon](https://kellerjordan.github.io/posts/muon/) replaces a matrix's update $U \Sigma V^T$ by
about $U V^T$: all directions get one length, and only the whole matrix has these directions.
**Predict.** Muon on the halves of a matrix makes *them* orthogonal, another update; Adam's is the
same:
"""


# %%
def update_of(optimizer, parts):
    """How a step with a random gradient changes a matrix that is given to it in parts."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(WIDTH, WIDTH, generator=generator).chunk(parts)
    slices = [nn.Parameter(torch.zeros_like(part)) for part in gradients]
    for p, part in zip(slices, gradients, strict=True):
        p.grad = part.clone()
    optimizer(slices, lr=0.02).step()
    return torch.cat([p.detach() for p in slices])


def off_by(found, right):
    return ((found - right).norm() / right.norm()).item()


adam, muon = torch.optim.Adam, torch.optim.Muon
off = {each.__name__: off_by(update_of(each, 2), update_of(each, 1)) for each in (adam, muon)}
assert off["Adam"] == 0

# %% tags=["plumbing"]
find(
    comms,
    "slices",
    other=(
        off["Muon"] > 0.05,
        f"In two slices Muon's update is {off['Muon']:.0%} off that of the whole matrix, and "
        "Adam's is the same bits. No error says so.",
    ),
    same=(off["Muon"] <= 0.05, f"In two slices Muon's update is {off['Muon']:.1%} off."),
)

# %% [markdown]
r"""
PyTorch's DTensors know that they are slices: of a product $AB$ each rank computes its rows, and for
that gathers all of $B$. **Predict.** Each of Muon's five iterations has three products: 15
all-gathers for a square matrix, each of which a product waits for. **Measure.** With the gradients
of the section on norms:
"""


# %%
gathers = apart = rounding = 0
if PYTORCH:
    p = next(on_mesh.parameters())
    assert k == 1 or (p @ p.T).placements == p.placements  # rows again
    muon(whole.parameters(), lr=0.02).step()
    with warnings.catch_warnings(action="ignore"), CommDebugMode() as counter:
        muon(on_mesh.parameters(), lr=0.02).step()
    counts = counter.get_comm_counts().items()
    gathers = sum(count for call, count in counts if "all_gather" in str(call)) / LAYERS
    begin, right = (parameters_to_vector(each.parameters()).detach() for each in (build(), whole))
    found = torch.cat([p.full_tensor().detach().flatten() for p in on_mesh.parameters()])
    apart = off_by(found - begin, right - begin)
    assert apart < 0.1
    scaled = build()
    for p, same in zip(scaled.parameters(), whole.parameters(), strict=True):
        p.grad = 1.001 * same.grad  # the same directions
    muon(scaled.parameters(), lr=0.02).step()
    rounding = off_by(parameters_to_vector(scaled.parameters()).detach() - begin, right - begin)

# %% tags=["plumbing"]
gathers = own.all_gather_data(gathers)[0]
find(
    comms,
    "muon-on-shards",
    gathers=(
        gathers > 0,
        f"PyTorch's Muon on HSDP's DTensors updates as on whole matrices, within {apart:.1%}, with "
        f"{gathers:g} all-gathers for each matrix. Muon computes in bf16: 1.001 times the same "
        f"gradients, which should change nothing, change its update by {rounding:.1%}.",
    ),
    whole=(PYTORCH and gathers == 0, "With one rank in a node there is nothing to gather."),
    untried=(not PYTORCH, "PyTorch's own was not tried here."),
)

# %% [markdown]
r"""
And all $m$ nodes compute the same. So give ranks whole matrices: no iteration waits, and no node
repeats another's work. (It takes the place of HSDP: parameters stay whole on every rank, as in
stage 1.) The optimizer itself reduces, updates and gathers, as
[nanochat's](https://github.com/karpathy/nanochat/blob/master/nanochat/optim.py) does. **Build.**
Matrices of one shape lie in one tensor, in rank order. Here each rank owns two:
"""


# %%
class OwnedMuon:
    def __init__(self, matrices):
        self.matrices = matrices
        self.flat = torch.stack([p.detach() for p in matrices])
        for p, values in zip(matrices, self.flat, strict=True):
            p.data = values  # a view
        self.owned = [nn.Parameter(values) for values in self.flat.chunk(n)[own.rank]]
        self.muon = torch.optim.Muon(self.owned, lr=0.02)

    @torch.no_grad()
    def step(self):
        gradients = torch.stack([p.grad for p in self.matrices])
        mean = ring_reduce_scatter(gradients, own, "mean")  # 1: reduce to the owners
        for p, gradient in zip(self.owned, mean.view(-1, WIDTH, WIDTH), strict=True):
            p.grad = gradient
        self.muon.step()  # 2: update
        ring_all_gather(self.flat, own)  # 3: gather from the owners


# %% [markdown]
r"""
nanochat has several such groups, and starts all reductions; then, group by group, it waits,
updates, and starts to gather: a group's messages travel while another is updated. microddp's
{class}`~microddp.sharding.owned.OwnedOptimizer` does that for any shapes. Both train, beside one
process with all ranks' batches:
"""


# %% tags=["plumbing"]
def new_matrices():
    torch.manual_seed(1)
    values = torch.randn(2 * n, WIDTH, WIDTH) / WIDTH**0.5
    return [nn.Parameter(each) for each in values.to(comms.device)]


def loss_of(matrices, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(2, 256, WIDTH, generator=generator).to(comms.device)
    return sum(mse_loss(x @ matrix, y) for matrix in matrices)


def trained(make, ranks, steps=3):
    matrices = new_matrices()
    optimizer = make(matrices)
    for step in range(steps):
        for p in matrices:
            p.grad = None
        for rank in ranks:
            (loss_of(matrices, rank, step) / len(ranks)).backward()
        optimizer.step()
    return torch.stack([p.detach() for p in matrices])


# %%
begin = torch.stack([p.detach() for p in new_matrices()])
one_process = trained(partial(muon, lr=0.02), range(n)) - begin
makes = OwnedMuon, partial(OwnedOptimizer, muon, comms=own, collectives="ring", lr=0.02)
changes = [trained(make, [own.rank]) - begin for make in makes]
difference = max(off_by(change, one_process) for change in changes)
assert difference < 0.1
assert n > 2 or difference == 0  # a sum of two has one order

# %% tags=["plumbing"]
find(
    comms,
    "owned",
    bits=(
        difference == 0,
        "OwnedMuon and OwnedOptimizer train the weights of one process, to the bit.",
    ),
    rounded=(
        difference > 0,
        f"In three steps OwnedMuon and OwnedOptimizer move the weights as one process does, "
        f"within {difference:.1%}. More than two ranks add up in another order, and bf16 rounds: "
        "which of these it is, this page does not show.",
    ),
)

# %% [markdown]
r"""
**Whose work?** A rank that owns more makes the others wait. With $s$ the smaller side of a matrix
and $l$ the larger, Muon's three products take $2 s^2 l + s^3$ multiplications. **Predict.** The
largest matrix first, each to the rank that has least so far
({func}`~microddp.sharding.owned.owners`): here that is nearly even as long as a rank's mean share
is more than the largest matrix; with more ranks, that matrix's owner sets the time. The model is
SmolLM2-360M (chapter 09) without embeddings, 224 matrices:
"""

# %% tags=["plumbing"]
SHAPES = {"q": (960, 960), "k": (320, 960), "v": (320, 960), "o": (960, 960)}
SHAPES |= {"gate": (2560, 960), "up": (2560, 960), "down": (960, 2560)}
sides = [sorted(shape) for shape in SHAPES.values()]
works = [2 * s * s * large + s**3 for s, large in sides] * 32
RANKS, shares = [8, 16, 32, 64, 128, 256, 512], {}
for name in ("in turn", "largest first"):
    shares[name] = []
    for ranks in RANKS:
        in_turn = [i % ranks for i in range(len(works))]
        owner = in_turn if name == "in turn" else owners(works, ranks)
        work = torch.zeros(ranks, dtype=torch.float64)
        work.index_add_(0, torch.tensor(owner), torch.tensor(works, dtype=torch.float64))
        shares[name].append((work.max() / work.mean()).item())

# %% tags=["plumbing"]
even = shares["largest first"]
figures.lines(
    {name: (RANKS, curve) for name, curve in shares.items()},
    title=f"The busiest rank's work: {even[0]:.2f} times the mean of 8, {even[-1]:.1f} of 512",
    xlabel="ranks",
    ylabel="busiest rank's work / mean",
    log="x",
)
find(
    comms,
    "balance",
    ends=(
        even[0] < even[-1],
        f"With the largest matrix first, the busiest of 8 ranks has {even[0]:.2f} times the mean "
        f"work; of 64 ranks {even[3]:.2f} times ({shares['in turn'][3]:.2f} in turn); of 512, more "
        f"than there are matrices, {even[-1]:.1f} times.",
    ),
    never=(even[0] >= even[-1], f"The busiest of 8 ranks has {even[0]:.2f} times the mean work."),
)

# %% [markdown]
r"""
On your data: `python -m microddp.train --optimizer muon --schedule owned` (Muon for matrices, Adam
for the rest; owners by numbers of values). In Megatron-LM on 32 GB300 an owner for each matrix, by
the same rule, took the optimizer's step from 632 ms, where every rank gathers and computes all (356
ms where they split each matrix), to 157 ms ([issue
6676](https://github.com/NVIDIA/Megatron-LM/issues/6676), August 2026).

## Checkpoints

**Predict.** In HSDP each shard exists $m$ times, and should be written once. microddp: only the
ranks of one node save their parts. PyTorch's `torch.distributed.checkpoint` (DCP) is called on all
ranks; it sees in the DTensors which ranks hold the same values, and one of them writes. Both must
load into another grid, here stage 3 over all; microddp first:
"""


# %%
def train(model, steps=4):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        backward(model, step)
        sgd.step()


# %%
folder = Path(own.all_gather_data(tempfile.mkdtemp() if own.rank == 0 else "")[0])
model, sharded = by_levels(inside, across)
train(model)
if across.rank == 0:
    torch.save(own_parts(sharded.context.local_params), folder / f"{inside.rank}.pt")
own.barrier()
other, loaded = by_levels(own, None)
files = [torch.load(folder / f"{r}.pt") for r in range(k)]
load_parts(loaded.context.local_params, own, files)
written = sum(path.stat().st_size for path in folder.glob("*.pt"))
for handle in (sharded, loaded):
    handle.remove()  # whole again
weights = parameters_to_vector(model.parameters()).detach()
assert torch.equal(parameters_to_vector(other.parameters()).detach(), weights)

# %%
dcp_written = 0
if PYTORCH:
    with warnings.catch_warnings(action="ignore"):  # DCP's own
        model = by_pytorch(m, k)
        train(model)
        dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
        other = by_pytorch(n)
        dcp.load(state := other.state_dict(), checkpoint_id=folder / "dcp")
        other.load_state_dict(state)
        wholes = [p.full_tensor().flatten().detach() for p in other.parameters()]
    torch.testing.assert_close(torch.cat(wholes), weights, rtol=1e-4, atol=1e-6)
    dcp_written = sum(path.stat().st_size for path in folder.glob("dcp/*.distcp"))
own.barrier()
if own.rank == 0:
    shutil.rmtree(folder)

# %% tags=["plumbing"]
ours, theirs = own.all_gather_data([written, dcp_written])[0]
wrote = f"{human_bytes(SIZE)} of parameters, replicas: {m}. microddp writes {human_bytes(ours)}"
wrote += f", DCP {human_bytes(theirs)} and an index" if theirs else ""
like = "; DCP loads those of the same training in PyTorch, equal to them within 0.01 % and 1e-6"
find(
    comms,
    "checkpoint",
    once=(
        max(ours, theirs) < 1.5 * SIZE,
        f"{wrote}. Loaded as stage 3 over all, microddp's weights are the saved ones, bit for bit"
        f"{like if theirs else ''}.",
    ),
    more=(max(ours, theirs) >= 1.5 * SIZE, f"{wrote}."),
)

# %% [markdown] index=["fully_shard", "DTensor", "torch.distributed.checkpoint"]
r"""
The optimizer's state is saved in the same way: `own_parts(shards, optimizer)`, and DCP's
`get_state_dict`.

## In PyTorch's words

The mesh is microddp's `nodes_of`. Each parameter becomes a DTensor, cut by rows; microddp cuts a
block's flat values. Without `reduce_dtype` sums are in `param_dtype`:

```python
mesh = init_device_mesh("cuda", (m, k), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    last = block is model.blocks[-1]
    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())  # after sharding
for micro_batches in steps:
    for i, (x, y) in enumerate(micro_batches, 1):
        model.set_requires_all_reduce(i == len(micro_batches))
        (loss_fn(model(x), y) / len(micro_batches)).backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loggable = norm.full_tensor()  # of a DTensor: a collective, called on every rank
```

## Where other parallelism begins

Sharding divides what is *kept*; each device still computes whole layers on its own samples. That
ends where one layer, or one sample's activations, do not fit, or where a device's samples are too
few to hide a gather. *Tensor parallelism* divides each matrix product, and sends activations
several times a layer, so it stays inside a node
([tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html)). *Pipeline
parallelism* divides the layers into stages, which send activations to neighbours only, and idle
while the pipeline fills and drains
([documentation](https://docs.pytorch.org/docs/stable/distributed.pipelining.html)). They are
further dimensions of the mesh: Llama 3 405B was trained on 16,384 H100 with 8 ranks for tensors, 16
for the pipeline, and 128 for sharded data parallelism ([2024, table
4](https://arxiv.org/abs/2407.21783)).

:::{admonition} On GPUs
With rings the bytes kept and sent are the same on GPUs. Times change with the ratio of the links.
Eight network cards of 400 Gbit/s together carry what a ring over H100's NVLink does (368 GB/s,
measured on H200), a ratio near 1; with a single link of 100 Gbit/s it is 29. With many nodes HSDP
also saves latency: each ring of stage 3 pays it $n-1$ times. On 64 H100 in nodes of 8 (with
pipeline and expert parallelism), a run of Qwen3-30B-A3B went from 293,000 to 392,000 tokens a
second by HSDP instead of sharding over all, for 5.6 GB more on each device ([PithTrain
40](https://github.com/mlc-ai/pith-train/pull/40), May 2026). On yours: `python -m microddp.bench
sharded --ranks-per-node 8`, beside PyTorch's.
:::

## What to take along

- Two levels: reduce-scatter in the node, all-reduce between nodes. Count what leaves a node to
  find a swapped mesh.
- Of what fits, time what sends least between nodes, and what sends little more, as the least need
  not be the fastest. In one precision least is HSDP; then stage 3
  that keeps all (as much as DDP's one ring); then stage 3 that keeps the last block. With gathers
  in bf16 and sums in fp32 count again (exercise 1).
- Sum the squares of a norm over the ranks of one node (the shard dimension), not over all.
- Gather in bf16: whole blocks and gathers halve. Sum in fp32, keep masters in fp32.
- Accumulate sharded, and average between nodes once.
- Give an optimizer of whole matrices owners of whole ones; on slices (DTensor) it gathers one of
  two matrices for every product.

## Exercises

**The lab.** Write HSDP's two reductions. {doc}`They are checked </labs>` in all grids of 4 and 6
ranks: the values, and the bytes on both levels.

```console
$ python -m microddp.labs start 17
```

1. A model of 8 billion parameters in mixed precision (16 bytes a parameter) is trained on 8 nodes
   of 8 GPUs with 80 GB. How much does a rank keep by HSDP, and how much by stage 3 over all, before
   activations? How many bytes leave a node in a step by each, with each block gathered twice in
   bf16, and sums in fp32?

   <details class="solution"><summary>Solution</summary>

   128 GB divided by 8 is 16 GB, divided by 64 is 2 GB. HSDP all-reduces in fp32: $2 \cdot
   \frac{7}{8} \cdot 32 = 56$ GB leave a node. Stage 3: two gathers of 16 GB and a reduce-scatter of
   32 GB, $\frac{63}{64} \cdot 64 = 63$ GB. By bytes HSDP saves a ninth. It saves more by short
   rings; and with accumulation, since stage 3 gathers from all nodes for each micro-batch. Stage 3
   that keeps all blocks gathers once: 47 GB, less than HSDP, and a rank keeps 18 GB instead of 2.

   </details>

2. Why does HSDP reduce-scatter *first*? What would an all-reduce between nodes before the
   reduce-scatter in the node send out of a node?

   <details class="solution"><summary>Solution</summary>

   The same sums, but each of $k$ ranks would all-reduce $S$ instead of $S/k$: $k$ times as much out
   of the node.

   </details>

3. With `no_sync` on HSDP, does the uplink carry less than with `no_all_reduce`? When would you
   choose it?

   <details class="solution"><summary>Solution</summary>

   It carries the same: one all-reduce of $S/k$ by each rank. `no_sync` saves the reduce-scatters
   inside the node, which are fast, and keeps $S$ instead of $S/k$ bytes of gradients. Choose it
   only where these fit, and links inside the node are slow, too.

   </details>
"""

# %%
comms.close()
