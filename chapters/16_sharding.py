# %% [markdown]
r"""
# 16. Sharded

Must every rank keep everything? A model that does not fit one GPU cannot be trained by DDP on a
thousand. Yet an all-reduce is a reduce-scatter and an all-gather, and between the two each rank has
an n-th of the sum: all it needs to update an n-th of the model. This chapter puts the optimizer
there, then frees what is no longer needed, until a rank keeps an n-th of the state, and a block or
two, and measures when that costs time.
"""

# %% tags=["imports"]
import copy
import os
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.functional import mse_loss, pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import microddp
from microddp import figures
from microddp.allreduce import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from microddp.findings import Prediction, compare, find
from microddp.hosts import relink
from microddp.message_counter import MessageCounter
from microddp.model import FullMLP, gradient_bytes, parameter_count
from microddp.parts import load_parts, own_parts
from microddp.performance import Sends, bytes_kept
from microddp.performance.memory import activation_bytes
from microddp.program import Layer, Work
from microddp.report import human_bytes, human_seconds, table
from microddp.sharding import elements, shard_blocks
from microddp.shared import carrier
from microddp.stage import (
    PausingOptimizer,
    Stage,
    cluster,
    known_clusters,
    pausing_batch,
    pausing_loss,
    pausing_model,
    set_stage,
    work_of,
)
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timing, measure
from microddp.workloads.transformer import Transformer, token_loss

# %%
# sphinx_gallery_builds = "training in which each rank stores an n-th of the model, in three stages"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
n, rank = comms.world_size, comms.rank
comms.print(comms.describe())

# %% [markdown] index=["ZeRO", "memory of a rank"]
r"""
## Who keeps what

Let a model have $\Psi$ parameters. In fp32 with Adam a rank keeps, of each: the parameter, its
gradient, and two running means, of the gradient and of its square. That makes 16 bytes.
Training in half precision keeps as many: 2 and 2, and 12 for the optimizer, which needs a copy of
the parameter in fp32.

ZeRO ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)) divides these among the $n$
ranks in three stages:

| stage | divided | bytes of each parameter, in fp32 |
|---|---|---|
| 0 (DDP) | nothing | $4 + 4 + 8$ |
| 1 | what the optimizer keeps | $4 + 4 + 8/n$ |
| 2 | and the gradients | $4 + 4/n + 8/n$ |
| 3 | and the parameters | $(4 + 4 + 8)/n$ |

Stage 1 leaves every rank $8\Psi$ bytes, and stage 2 $4\Psi$, however many there are. Stage 3 has no
such floor.
"""

# %% [markdown] index=["ZeroRedundancyOptimizer"]
r"""
## Stage 1: an n-th of the optimizer

**Build.** A `FlatParamGroup` lays the parameters of a module side by side in one flat tensor, as a
bucket does with gradients. An n-th of that is this rank's `shard`, in the same memory: what an
optimizer writes there, `unshard` sends to all. The methods are named as in PyTorch:
"""


# %%
class FlatParamGroup:
    def __init__(self, module):
        self.parameters = list(module.parameters())
        self.unsharded = self.padded(parameters_to_vector(self.parameters).detach())
        vector_to_parameters(self.unsharded, self.parameters)  # they are views of it now
        self.shard = nn.Parameter(self.unsharded.chunk(n)[rank])

    def padded(self, flat):
        return pad(flat, (0, -len(flat) % n))

    def post_backward(self):
        """Reduce-scatter the gradients: this rank gets its shard of their mean."""
        gradients = self.padded(parameters_to_vector([p.grad for p in self.parameters]))
        mean = ring_reduce_scatter(gradients, comms, "mean")
        self.shard.grad = mean.clone()  # so that the memory of the rest can go
        for p in self.parameters:
            p.grad = None

    def unshard(self):
        """All-gather the parameters from the ranks' shards."""
        ring_all_gather(self.unsharded, comms)


# %%
def backward(model, batch):
    inputs, targets = batch
    mse_loss(model(inputs), targets).backward()


def stage_1(model):
    group = FlatParamGroup(model)
    adam = torch.optim.Adam([group.shard])

    def step(batch):
        adam.zero_grad()
        backward(model, batch)
        group.post_backward()
        adam.step()
        group.unshard()

    return step, [group], adam


# %% [markdown]
r"""
Adam treats each value by itself, so its one parameter may as well be an n-th of all.

**Predict.** Of $S$ bytes of gradients a rank sends $\frac{n-1}{n}S$ in each half, together as much
as with DDP. And it keeps $8/n$ bytes of each parameter for Adam, instead of 8.

**Measure.** Against microddp's DDP, on the same four batches. With three ranks and more the two may
add in another order. `try_out` asserts that weights are DDP's within 0.1 % and
$10^{-5}$. It counts the bytes sent, and those behind parameters, gradients and Adam's means
whenever a layer begins to compute, or one of its gradients is ready:
"""


# %%
def build():
    torch.manual_seed(0)
    return FullMLP(256, depth=8).to(comms.device)


SIZE = gradient_bytes(build())
batches = torch.randn(4, 2, 32, 256, generator=torch.Generator().manual_seed(rank)).to(comms.device)


# %% tags=["plumbing"]
def ddp(model):
    ring = carrier("ring", comms)
    wrapped = microddp.DDP(model, comms, all_reduce=ring, gradient_as_bucket_view=False)
    adam = torch.optim.Adam(model.parameters())

    def step(batch):
        adam.zero_grad()
        backward(wrapped, batch)
        adam.step()

    return step, [], adam


# %% tags=["plumbing"]
def memory(*tensors):
    """Bytes behind tensors, each byte once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def held(model, groups, adam):
    """Bytes of parameters, gradients, and Adam's means."""
    own = [group.shard for group in groups]
    parameters = [*model.parameters(), *own, *(group.unsharded for group in groups)]
    means = [v for state in adam.state.values() for v in state.values() if v.dim()]
    gradients = [p.grad for p in [*model.parameters(), *own]]
    return memory(*parameters), memory(*gradients), memory(*means)


# %% tags=["plumbing"]
tried = {}


def try_out(name, make):
    """Train; note weights, and the last step's bytes, sent and held."""
    model, moments, made = build(), {}, []

    def look(*moment):
        return lambda *_: moments.update({moment: held(model, *made)})

    for of, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(look("backward", f"{of} has its gradient"))
    step, *made[:] = make(model)
    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(look("forward", f"layer {i} is about to compute"))
    for batch in batches:
        moments.clear()
        with MessageCounter(comms) as counter:
            step(batch)
    sent = sum(message.nbytes for message in counter.messages)
    for group in made[0]:
        group.unshard()
    tried[name] = parameters_to_vector(model.parameters()).detach(), sent, moments
    check(name)


# %% tags=["plumbing"]
def check(name):
    assert torch.allclose(tried[name][0], tried["DDP"][0], rtol=1e-3, atol=1e-5), name


# %%
try_out("DDP", ddp)
try_out("stage 1", stage_1)

# %% [markdown]
"""
## Stage 2: gradients go as they come

In stage 1 all gradients are there when backward ends, but a rank has no use for the others'
shards. **Build.** Make the groups smaller, one for each layer, and reduce-scatter a group as soon
as backward has all of its gradients. Then they are freed. (A layer's gradients are counted here. If
its bias got none, the count would be wrong in the next step, which would then fail. microddp takes
a missing gradient as zero when backward ends.)
"""


# %%
def when_all(parameters, call):
    """Call when each of the parameters has its gradient."""
    came = []

    def ready(parameter):
        came.append(parameter)
        if len(came) == len(parameters):
            came.clear()
            call()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)


# %%
def stage_2(model):
    groups = [FlatParamGroup(layer) for layer in model.layers]
    for group in groups:
        when_all(group.parameters, group.post_backward)
    adam = torch.optim.Adam([group.shard for group in groups])

    def step(batch):
        adam.zero_grad()
        backward(model, batch)
        adam.step()
        for group in groups:
            group.unshard()

    return step, groups, adam


try_out("stage 2", stage_2)

# %% [markdown] index=["FSDP", "fully_shard"]
"""
## Stage 3: parameters only while they are needed

A layer needs its parameters only when it computes, forward and backward. **Build.** A tensor is a
description, of shape and place, and a *storage*, the memory behind it. `reshard` resizes the flat
tensor's storage to nothing. The description stays, and so do its views: the layer's parameters, and
what autograd has saved of them. `unshard` resizes the storage again, puts this rank's shard in, and
gathers the others': all views are valid again.
"""


# %%
class ReshardedGroup(FlatParamGroup):
    def __init__(self, module):
        super().__init__(module)
        self.shard = nn.Parameter(self.shard.detach().clone())  # memory of its own
        self.reshard()

    def reshard(self):
        self.unsharded.untyped_storage().resize_(0)

    def unshard(self):
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        self.unsharded.chunk(n)[rank].copy_(self.shard.detach())
        super().unshard()

    def post_backward(self):
        super().post_backward()
        self.reshard()


# %% [markdown]
"""
Backward of a layer begins when the gradient of its *output* is known. A hook on that tensor is
called then, and unshards once more. Backward of the layer ends when its parameters have their
gradients: `post_backward`, as in stage 2, and it reshards:
"""


# %%
def post_forward(group, _layer, _inputs, output):
    group.reshard()
    output.register_hook(lambda _: group.unshard())


def stage_3(model):
    groups = [ReshardedGroup(layer) for layer in model.layers]
    for group, layer in zip(groups, model.layers, strict=True):
        layer.register_forward_pre_hook(lambda *_, group=group: group.unshard())
        layer.register_forward_hook(partial(post_forward, group))
        when_all(group.parameters, group.post_backward)
    adam = torch.optim.Adam([group.shard for group in groups])

    def step(batch):
        adam.zero_grad()
        backward(model, batch)
        adam.step()

    return step, groups, adam


try_out("stage 3", stage_3)

# %% [markdown]
r"""
## What was sent, what was kept

**Predict.** Parameters travel twice in stage 3, before forward and before backward, and gradients
once: $3\,\frac{n-1}{n}S$, one and a half times DDP's bytes. The most that a rank keeps is what the
table of the stages says, and besides, while backward is at a layer, the rest of its gradients in
stage 2, and in stage 3 its whole parameters, too (with a copy of this rank's shard):
"""

# %%
largest = 4 * max(parameter_count(layer) for layer in build().layers)  # bytes
gradients = (1 - 1 / n) * largest  # an n-th of them is in the table already
whole = {2: gradients, 3: gradients + largest}

# %% tags=["plumbing"]
count = parameter_count(build())
rows, at_most, off = [], {}, []
for stage, (name, (_, sent, moments)) in enumerate(tried.items()):
    to_send = (3 if stage == 3 else 2) * (n - 1) / n * SIZE
    most = max(map(sum, moments.values()))
    right = at_most[name] = bytes_kept(stage, count, n).total + whole.get(stage, 0)
    off.append(abs(most / right - 1))
    rows.append((name, *map(human_bytes, (to_send, sent, right, most))))
    assert off[-1] < 0.01, name
    assert n == 1 or abs(sent / to_send - 1) < 0.01, name
headers = ["a step", "to be sent", "counted", "kept at most, predicted", "measured"]
comms.print(f"{n} ranks, {human_bytes(SIZE)} of parameters")
comms.print(table(rows, headers))
figures.explore_kept(
    {name: list(moments.values()) for name, (_, _, moments) in tried.items()},
    at_most,
    moments=list(tried["DDP"][2]),
    kinds=["parameters", "gradients", "Adam's means"],
    title=f"What one of {n} ranks keeps during a step, with what is divided, stage by stage",
)

# %% tags=["plumbing"]
sent = {name: found[1] for name, found in tried.items()}
most = {name: max(map(sum, found[2].values())) for name, found in tried.items()}
said = (
    f"A rank of stage 3 sends {sent['stage 3'] / max(1, sent['DDP']):.3f} times what one of DDP "
    f"sends, and keeps {most['stage 3'] / most['DDP']:.2f} times as much at most. The formula for "
    f"what is kept is off by {max(off):.2%} at most."
)
find(comms, "sent-and-kept", several=(n > 1, said), alone=(n == 1, "One rank divides nothing."))

# %% [markdown] index=["DTensor", "FSDP1 and FSDP2"]
r"""
**Explain.** In DDP and in stage 1 gradients pile up in backward, whole. In stages 2 and 3 only one
layer's are whole at a time. Not counted: activations; the flat copy that `post_backward` makes to
send, which stage 1 here makes of all gradients; and DDP's buckets, here beside the gradients.

## The same in microddp

The hooks above unshard a layer when it is needed, and wait for it. microddp's
{func}`~microddp.sharding.fully_shard.fully_shard` *prefetches*: while one block, here a layer,
computes, it unshards the next one (in the order of the step before; in backward, in the reverse of
forward's), and reduce-scatters gradients while backward goes on. Two blocks are whole at a time.
`shard_blocks` calls it for each block, then for the rest. It leaves the *last* block whole after
forward, because backward begins with it.

**Predict.** Two gathers and a reduction make 3, and of $L$ equal blocks the last is gathered once:
$(3 - \frac{1}{L}) \frac{n-1}{n}S$ bytes in a step:
"""

# %%
model = build()
sharded = shard_blocks(model, comms, collectives="ring")
adam = torch.optim.Adam(model.parameters())
for batch in batches:
    adam.zero_grad()
    with MessageCounter(comms) as counter:
        backward(model, batch)
    adam.step()
sharded.remove()  # whole again

# %% tags=["plumbing"]
tried["microddp"] = (parameters_to_vector(model.parameters()).detach(),)
check("microddp")
counted = sum(message.nbytes for message in counter.messages)
to_send = (3 - 1 / len(model.layers)) * (n - 1) / n * SIZE
assert n == 1 or abs(counted / to_send - 1) < 0.01
comms.print(f"to be sent {human_bytes(to_send)}, counted {human_bytes(counted)}")

# %% tags=["plumbing"]
ours = [name for name in tried if name != "DDP"]
equal = [name for name in ours if torch.equal(tried[name][0], tried["DDP"][0])]
rounded = [name for name in ours if name not in equal]
apart = max((tried[name][0] - tried["DDP"][0]).abs().max().item() for name in ours)
said = f"After {len(batches)} steps of Adam the weights of"
find(
    comms,
    "same-training",
    bits=(not rounded, f"{said} {', '.join(ours)} are DDP's, bit for bit."),
    some=(
        bool(equal and rounded),
        f"{said} {', '.join(equal)} are DDP's, bit for bit; those of {', '.join(rounded)} "
        f"and DDP's differ by {apart:.1e} at most.",
    ),
    rounding=(not equal, f"{said} {', '.join(ours)} and DDP's differ by {apart:.1e} at most."),
)

# %% [markdown]
r"""
PyTorch's `fully_shard` (FSDP2) is used in the same way. After forward it does not reshard the
outermost module's own parameters (outside of steps they are sharded), nor the last block if
`reshard_after_forward=False` is given for it. It cuts *each parameter* into rows,
while microddp, and FSDP1 before it, cut a flat tensor wherever an n-th ends. Its parameters are
`DTensor`s: such a tensor knows its whole shape, and which part of it is here
([documentation](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), read in
November 2026). SGD and Adam are right with either. Chapter 17 has optimizers that need whole
matrices, hybrid sharding (HSDP), mixed precision and checkpoints.

## What else must fit

**Predict.** Backward needs *activations*, what forward computed. They belong to the batch, so
sharding leaves them as they are. For each token autograd saves, in a block of microddp's
transformer of width $d$: the input $d$, normalised $d$, query, key and value $3d$, attention's
output $d$, the sum $d$, normalised $d$, and $4d$ before and after GELU, in all $16 d$ values.
*Recomputation* (activation checkpointing) saves only each block's input. Backward runs a block's
forward again when it comes to it, so it has one block's activations at a time.

**Measure.** PyTorch's `saved_tensors_hooks` calls us for each tensor that autograd saves.
`most_saved` notes the most that is alive at a time, without parameters:
"""


# %% tags=["plumbing"]
class Saved:
    def __init__(self, tensor):
        self.tensor = tensor


def most_saved(model, tokens):
    live, sizes = weakref.WeakSet(), []
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage()._cdata in parameters:
            return tensor
        saved = Saved(tensor)
        live.add(saved)
        sizes.append(memory(*(each.tensor for each in live)))
        return saved

    with saved_tensors_hooks(pack, lambda saved: getattr(saved, "tensor", saved)):
        token_loss(model(tokens), tokens).backward()
    return max(sizes)


# %%
BLOCKS, D, VOCABULARY, TOKENS = 8, 128, 64, 512
model = Transformer(VOCABULARY, D, BLOCKS, heads=4, context=64).to(comms.device)
tokens = torch.randint(VOCABULARY, (TOKENS // 64, 64), device=comms.device)
saved = {"all kept": most_saved(model, tokens)}
for block in model.blocks:
    block.forward = partial(checkpoint, block.forward, use_reentrant=True)
saved["recomputed"] = most_saved(model, tokens)
end = 4 * TOKENS * (2 * D + VOCABULARY)  # a norm, the loss: gone before blocks are recomputed
by_formula = {
    "all kept": activation_bytes(TOKENS, BLOCKS, 16 * D, value_size=4) + end,
    "recomputed": activation_bytes(TOKENS, BLOCKS, 16 * D, entry=D, value_size=4),
}

# %% tags=["plumbing"]
off = {name: saved[name] / by_formula[name] - 1 for name in saved}
assert comms.device.type != "cpu" or max(map(abs, off.values())) < 0.02
said = (
    f"Of {TOKENS} tokens backward keeps {human_bytes(saved['all kept'])} at most, and "
    f"{human_bytes(saved['recomputed'])} with recomputation. The formula gives "
    f"{' and '.join(human_bytes(size) for size in by_formula.values())}"
)
close = max(map(abs, off.values())) < 0.02
find(
    comms,
    "activations",
    close=(close, f"{said}, off by less than 2 %."),
    off=(not close, f"{said}: this device's kernels save other tensors."),
)

# %% [markdown]
r"""
A block of Llama has $8d + 4f$ values of a token, $f$ being the width of its feed-forward part (keys
and values as attention gets them, repeated for all heads). How much of a published run does that
explain? torchtitan reports 82.4 GiB on each of 8 H100 of 96 GB, and 67.0 on each of 128, for Llama
3.1 8B with 16,384 tokens a GPU ([December
2024](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)).
It recomputes selectively. A block keeps its input, attention's output and, of the seven matrix
products, in order, the 1st, 3rd, 5th and 7th: query, value (a quarter of $d$, not repeated yet),
gate and down, in all $4\frac{1}{4} d + f$ values:
"""

# %% tags=["plumbing"]
GiB, D8, F8 = 2**30, 4096, 14_336
state = {devices: bytes_kept(3, 8.03e9, devices).total / GiB for devices in (8, 128)}
acts = {
    "activations, all kept": activation_bytes(16_384, 32, 8 * D8 + 4 * F8),
    "activations, as torchtitan keeps them": activation_bytes(16_384, 32, 4.25 * D8 + F8),
    "activations, recomputed": activation_bytes(16_384, 32, 8 * D8 + 4 * F8, entry=D8),
    "one copy of the logits, fp32": 4 * 16_384 * 128_256,
}
rows = [("parameters, gradients, optimizer on 8", f"{state[8]:.1f}", "")]
rows += [(name, f"{size / GiB:.1f}", "") for name, size in acts.items()]
rows += [("all, on 8", "", "82.4"), ("less on 128", f"{state[8] - state[128]:.1f}", "15.4")]
comms.print(table(rows, ["GiB a GPU, Llama 3.1 8B", "worked out", "published"]))
explained = state[8] + list(acts.values())[1] / GiB
comms.print(f"state, and activations as torchtitan keeps them: {explained:.1f} GiB of 82.4")
comms.print(f"not worked out here: {82.4 - explained:.1f} GiB")
comms.print(f"nor, of the 15.4 less on 128: {15.4 - state[8] + state[128]:.1f} GiB")

# %% [markdown]
r"""
ZeRO divides the first line only. So in the next table a star marks what is below 80 GB in mixed
precision, *with* activations of 8192 tokens, all blocks recomputed, and two copies of the logits in
fp32. Left out are blocks gathered whole, buffers, and what the allocator cannot use: a star does
not say that it fits. (Shapes of SmolLM2 1.7B and Llama 3.)
"""

# %% tags=["plumbing"]
SHAPES = {  # parameters, blocks, d, f, vocabulary
    "1.7B": (1.71e9, 24, 2048, 8192, 49_152),
    "8B": (8.03e9, 32, 4096, 14_336, 128_256),
    "70B": (70.6e9, 80, 8192, 28_672, 128_256),
}


def gigabytes(stage, name, devices):
    parameters, blocks, d, f, vocabulary = SHAPES[name]
    extra = activation_bytes(8192, blocks, 8 * d + 4 * f, entry=d) + 2 * 4 * 8192 * vocabulary
    mixed = bytes_kept(stage, parameters, devices, parameter=2, gradient=2, optimizer=12)
    kept = (mixed.total + extra) / 1e9
    return f"{kept:,.0f}{' *' if kept < 80 else '  '}"


rows = [
    (name, devices, *(gigabytes(stage, name, devices) for stage in range(4)))
    for name in SHAPES
    for devices in (8, 64)
]
headers = ["GB, worked out", "devices", "DDP", "stage 1", "stage 2", "stage 3"]
comms.print(table(rows, headers))

# %% [markdown] index=["sharding, time of"]
r"""
## When does it cost time?

Let $C$ be a device's computing in a step, $L$ the number of equal layers, and $M$ the all-reduces
of all their gradients, one after another. A strategy's messages take $f$ during forward, which
computes for a third of $C$, and $b$ during backward, which computes for the rest:

| | DDP | stages 1 and 2 | stage 3 |
|---|---|---|---|
| $f$, gathers | $0$ | $M/2$ | $M/2$ |
| $g$, the first of them | $0$ | $M/2L$ | $M/2L$ |
| $b$ | $M$ | $M/2$ | $M - M/2L$ |
| $r$, the last of them | $M/L$ | $M/2L$ | $M/2L$ |
| $w$, computing before the first | $2C/3L$ | $2C/3L$ | $0$ |

(The last layer is whole when backward begins, and stage 3 then gathers the one before.) With
nothing hidden behind computing a step takes $C + f + b$. Not all can be hidden. Forward waits for
$g$, and after the last gather one layer computes, for $\frac{C}{3L}$. Backward computes for $w$
before there is anything to send, and ends with $r$, when all is computed. So with this $C$ and $M$
no step takes less than $T_0 = F + B$, with

$$F = g + \max(\frac{1}{3} C, f - g + \frac{C}{3L})$$

$$B = \max(\frac{2}{3} C, b - r + w) + r$$

and of a step $T$, *the share hidden of what can be hidden* is

$$h = \frac{C + f + b - T}{C + f + b - T_0}$$

Below 0, a step took more than with nothing hidden; above 1, less than $C$ and $M$, timed apart,
would allow.

**Predict.** Stages 1 and 2 should beat DDP where messages take as long as computing: microddp
gathers in the next forward, and can hide up to a third of $C$ behind it.

Stage 3 prefetches one block. So as backward begins, the last layer computes for $\frac{2C}{3L}$,
and the link has one gather to carry meanwhile; as backward ends, the first layer computes as long,
beside one reduction. Each time the link waits for $\frac{2C}{3L} - \frac{M}{2L}$, if that is
positive. With both waits as its $w$, $T_0$ becomes $T_1$: what stage 3 should take. The two are
equal up to $M = \frac{2}{3} C$, and from $M = \frac{4}{3} C$ on. In both ranges stage 3 should hide
all that can be hidden, and in between a little less.

DDP starts $L$ all-reduces. Stage 3 starts $3L - 1$ gathers or reductions, each half an all-reduce.

**Measure.** On devices of known speed, which pause as long as they would compute: a scale model of
four machines with an A100 and 25 Gbit/s each, that train 355 million parameters in bf16, in four
messages, and the same with twice and half as many tokens a step. On links of $600/n$ Mbit/s a
message of a ring takes 7 ms. The stage is set by the $C$ and $M$ of its table. The steps' rounds
time both anew:
"""

# %%
usual = comms.box and comms.box.links[0].option
WORK = {"parameters": 355e6, "tokens": 24_576, "layers": 4}


def stage_on(link):
    if usual:
        relink(comms, link)
    own = comms.subgroup(range(n))  # connections that begin at this speed
    return own, set_stage(own, cluster("a100", "25gbit", nodes=n, node=1, **WORK))


slow_link = 600 // n
own, base = stage_on(f"{slow_link}mbit")
comms.print(base)


# %% tags=["plumbing"]
def with_tokens(times, stage):
    """The stage with so many times the tokens, and the computing."""
    sides = tuple(replace(side, compute=times * side.compute) for side in stage.sides)
    return replace(stage, model=pausing_model(work_of(sides[1]), comms.device), sides=sides)


stages = {1: base}
if base.sides:
    stages = {times: with_tokens(times, base) for times in (2, 1, 0.5)}
middle = 1

# %% tags=["plumbing"]
halves = 3 * WORK["layers"] - 1
taken = [halves / 2 * side.start / side.compute for side in base.sides] or [0, 0]
said = (
    f"The starts of a step of stage 3, as long as those of {halves / 2:g} of gloo's all-reduces, "
    f"take {taken[0]:.2g} times C on the cluster, and on this stage "
    f"{f'{taken[-1]:.2g} times C' if taken[-1] else 'less than its measurement can tell'}"
)
scaled, similar = n > 1 and bool(base.sides), taken[-1] - taken[0] <= 0.1
find(
    own,
    "starts",
    similar=(scaled and similar, f"{said}."),
    apart=(
        scaled and not similar,
        f"{said}: here this stage is not similar, so the steps below are not the cluster's.",
    ),
    left_out=(not scaled, "Left out: it takes several devices of known speed."),
)

# %% [markdown]
"""
In each round each strategy takes a step, and a device alone, and $M$ is timed. At the middle scale
stages 1 and 2 take steps, too, and PyTorch's `fully_shard`, so this takes a while. $M$ and DDP go
by gloo, stages 1 to 3 by microddp's rings. $M/C$ is of the medians. A share hidden is the rounds'
median, and may differ a little from what its row's medians give:
"""


# %%
def calls_on(stage, cap_mb, names):
    calls = {"alone": stage.step("none"), "M": stage.all_reduces()}
    for name in names:
        strategy = stage.strategy(name, cap_mb)
        optimizer = stage.make_optimizer(strategy.parameters())
        calls[name] = partial(take_step, strategy, stage.loss_fn, optimizer, stage.batch)
    return calls


# %% tags=["plumbing"]
def torchs_step(stage):
    model = copy.deepcopy(stage.model)
    over = DeviceMesh.from_group(stage.comms.group, stage.comms.device.type)
    for block in elements(model):
        torch_fully_shard(block, mesh=over)
    torch_fully_shard(model, mesh=over)
    return stage.step(STRATEGIES["none"](model, stage.comms))


# %% tags=["plumbing"]
def by_rings(stage):
    """What takes M, by microddp's rings."""
    sizes = map(parameter_count, elements(stage.model))
    layers = [torch.zeros(size, device=comms.device) for size in sizes]
    return lambda: [ring_all_reduce(layer, stage.comms) for layer in layers]


# %% tags=["plumbing"]
def sent_by(model):
    """Return f, g, b, r and whether there is a w, of each strategy of DDP and the stages."""
    *others, _last = elements(model)  # its blocks
    twice = sum(map(parameter_count, others)) / parameter_count(model)  # gathered twice
    one = 1 / layers_of(model)
    halves = Sends(0.5, one / 2, 0.5, one / 2)
    third = Sends(0.5, one / 2, 0.5 + twice / 2, one / 2, waits=False)
    return {"ddp": Sends(0, 0, 1, one), "zero1": halves, "zero2": halves, "zero3": third}


def layers_of(model):
    return parameter_count(model) / parameter_count(elements(model)[0])


def hidden(times, name, model):
    """Return the share hidden of what can be hidden, round by round."""
    rounds = zip(*(times[key].seconds for key in (name, "alone", "M")), strict=True)
    sends, layers = sent_by(model)[name], layers_of(model)
    return Timing(tuple(sends.hidden(*each, layers) if n > 1 else 0.0 for each in rounds))


# %%
LABELS = {"ddp": "DDP", "zero1": "stage 1", "zero2": "stage 2", "zero3": "stage 3"}
ENDS = {"ddp": "DDP", "zero3": "stage 3"}
times = {}
for key, stage in stages.items():
    calls = calls_on(stage, 0.5 if base.sides else 25, LABELS if key == middle else ENDS)
    if key == middle:
        calls |= {"PyTorch": torchs_step(stage), "rings": by_rings(stage)}
        in_the_middle = calls
    times[key] = measure(calls, own, warmup=1, repeat=4)

# %% tags=["plumbing"]
shares, rows, label = {}, [], {}
for key, found in times.items():
    C, M = found["alone"].median, found["M"].median
    label[key] = f"M/C {M / C:.2f}"
    model = stages[key].model
    shares[key] = {name: hidden(found, name, model) for name in LABELS if name in found}
    for name, share in shares[key].items():
        sends = sent_by(model)[name]
        T = sends.least(C, M, layers_of(model)), found[name].median, sends.most(C, M)
        rows.append((label[key], LABELS[name], *map(human_seconds, T), f"{share.median:.2f}"))
headers = ["", "step", "least possible", "measured", "nothing hidden", "share hidden"]
own.print(table(rows if n > 1 else [], headers))

# %% tags=["plumbing"]
speeds = {
    f"{label[key]}: {LABELS[name]}": base.speed_up(found[name], found["alone"])
    for key, found in times.items()
    for name in shares[key]
}
bars = {name: round(speed.ratio, 2) for name, speed in speeds.items()}
at_each = [
    f"{compare(found['zero3'], found['ddp']).ratio:.2f} times as fast at {label[key]}"
    for key, found in times.items()
]
figures.speed_ups(
    {name: speed.times for name, speed in speeds.items()},
    n,
    title=f"Stage 3 beside DDP: {', '.join(at_each)}",
)

# %% tags=["plumbing"]
found = times[middle]
gains = {name: compare(found[name], found["ddp"]) for name in ("zero1", "zero2")}
each = [f"a step of {LABELS[name]} is {gain.than('one of DDP')}" for name, gain in gains.items()]
beat = ("Neither", "One", "Both")[sum(gain.faster for gain in gains.values())]
said = f"{beat} of stages 1 and 2 beat DDP: at {label[middle]} {each[0]}, and {each[1]}."
if beat == "One":
    said = f"{said} Both send the same: the rounds part them, not the stages."
find(
    own,
    "stages-1-and-2",
    several=(n > 1, said),
    alone=(n == 1, "One rank gathers nothing."),
)

# %% tags=["plumbing"]
expected, said, less = {}, [], []
for key, found in times.items():
    model, C, M = stages[key].model, found["alone"].median, found["M"].median
    sends, layers, share = sent_by(model)["zero3"], layers_of(model), shares[key]["zero3"]
    predicted = sends.one_ahead(C, M, layers)
    expected[key] = sends.hidden(predicted, C, M, layers) if n > 1 else 1.0
    less += [label[key]] if share.spread[1] < expected[key] - 0.005 else []
    low, high = share.spread
    said.append(f"{share.median:.2f} ({low:.2f} to {high:.2f}; predicted {expected[key]:.2f})")
    said[-1] += f" at {label[key]}"
said = f"Of what can be hidden stage 3 hid {', '.join(said)}"
find(
    own,
    "stage-3-hides",
    held=(n > 1 and not less, f"{said}: nowhere told to be less than predicted."),
    less=(n > 1 and bool(less), f"{said}: less than predicted at {', '.join(less)}."),
    alone=(n == 1, "One rank has nothing to hide."),
)

# %% [markdown]
r"""
**Explain.** $T_0$ and $T_1$ take the $M$ of gloo, while stage 3 sends by rings in Python. Are these
slower? The rings' own $M$ was timed in the rounds of the middle scale:
"""

# %% tags=["plumbing"]
found = times[middle]
C, M, own_M = (found[key].median for key in ("alone", "M", "rings"))
rings = compare(found["rings"], found["M"])
sends, layers = sent_by(stages[middle].model)["zero3"], layers_of(stages[middle].model)
by_gloo, by_own = (sends.one_ahead(C, each, layers) if n > 1 else C for each in (M, own_M))
extra = 1e3 * (by_gloo - sends.least(C, M, layers)) if n > 1 else 0.0
took = Prediction(by_own, found["zero3"])
said = (
    f"{rings.say('The all-reduces by rings', 'by gloo').replace(' is ', ' are ')}. At "
    f"{label[middle]} the two waits make T_1 {extra:.0f} ms longer than T_0. With the rings' M a "
    f"step of stage 3 took {took}"
)
rest = "For what is left the prediction has no term" if took.longer else ""
find(own, "rings", **rings.sides(f"{said}. {rest}." if rest else f"{said}."))

# %% [markdown]
r"""
## Beside PyTorch's own

**Predict.** PyTorch's `fully_shard` prefetches on CUDA streams. A CPU has none, so there it starts
a collective and waits for it. And gloo, PyTorch's backend for CPUs, does a reduce-scatter by an
all-reduce, of twice the bytes ([PyTorch 118911](https://github.com/pytorch/pytorch/pull/118911),
2024). So it should send two gathers of each block and an all-reduce, $2 M$, and take $C + 2M$.
microddp's stage 3 sends
$(\frac{3}{2} - \frac{1}{2L}) M$. The kernel counts what leaves a host in a box:
"""


# %% tags=["plumbing"]
def sent_by_host():
    """Bytes that this host's link has sent so far, headers too."""
    interfaces = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in interfaces if name.strip() != "lo")


on_link = {}
for name in ("ddp", "zero3", "PyTorch") if comms.box and n > 1 else ():
    own.barrier()
    before = sent_by_host()
    in_the_middle[name]()
    own.barrier()
    all_reduce = 2 * (n - 1) / n * gradient_bytes(stages[middle].model)
    on_link[name] = (sent_by_host() - before) / all_reduce

# %% tags=["plumbing"]
theirs, ours = on_link.get("PyTorch", 0), on_link.get("zero3", 0)
said = (
    f"In bytes of an all-reduce, DDP puts {on_link.get('ddp', 0):.2f} on the link, stage 3 "
    f"{ours:.2f}, and PyTorch's fully_shard over gloo {theirs:.2f}."
)
find(
    own,
    "pytorch-bytes",
    counted=(bool(on_link), said),
    none=(not on_link, "Bytes on a link are counted on hosts in a box only."),
)

# %% tags=["plumbing"]
C, M, theirs = (times[middle][key] for key in ("alone", "M", "PyTorch"))
guess = Prediction(C.median + 2 * M.median, theirs)
gain = compare(times[middle]["zero3"], theirs)
said = f"{gain.say('A step of stage 3 in microddp', 'one of PyTorch')}. PyTorch's took {guess}."
if guess.longer:
    said = f"{said} For the rest the prediction has no term."
cpu = n > 1 and comms.device.type == "cpu"
find(
    own,
    "pytorch-time",
    cpus=(cpu, said),
    gpus=(
        n > 1 and not cpu,
        f"On GPUs a step of stage 3 in microddp is {gain.than('one of PyTorch')}.",
    ),
    alone=(n == 1, "One rank sends nothing, in PyTorch either."),
)
if usual:
    relink(comms, usual)
own.close()

# %% [markdown]
r"""
## Who carries?

**Predict.** A pausing device leaves its core to those that send: to rings in Python, in which each
rank waits for the latest. On links of 1 Gbit/s, with the same $M/C$, a message takes 1 ms (of four
ranks) instead of 7: cores have a seventh of the time for as many messages. So stage 3 should hide
less.

**Measure.** The last of the three scales, on links of 1 Gbit/s:
"""

# %%
last, quick, others, ratio = [*stages][-1], None, None, 0.0
if base.sides and usual:
    fast, stage = stage_on("1gbit")
    stage = with_tokens(last, stage)
    found = measure(calls_on(stage, 0.5, ENDS), fast, warmup=1, repeat=16)
    quick, others = (hidden(found, name, stage.model) for name in ("zero3", "ddp"))
    ratio = found["M"].median / found["alone"].median
    fast.close()
    relink(comms, usual)


# %% tags=["plumbing"]
def in_words(share):
    return "{:.2f} ({:.2f} to {:.2f})".format(share.median, *share.spread)


slow = shares[last]["zero3"]
said = quick and (
    f"On links of 1 Gbit/s stage 3 hid {in_words(quick)} of what can be hidden, at M/C "
    f"{ratio:.2f}, on those of {slow_link} Mbit/s {in_words(slow)}, at {label[last]}. DDP, which "
    f"gloo carries, hid {in_words(others)} and {in_words(shares[last]['ddp'])}"
    + (" (above 1: C or M took longer apart than in the steps)" if others.median > 1 else "")
)

# %% tags=["plumbing"]
usual_ratio = times[last]["M"].median / times[last]["alone"].median
judged = quick is not None and 0.8 < ratio / usual_ratio < 1.25
less = judged and quick.spread[1] < slow.spread[0]
more = judged and quick.spread[0] > slow.spread[1]
alike = judged and not less and not more

# %% tags=["plumbing"]
find(
    comms,
    "faster-links",
    less=(
        less,
        f"{said}. On faster links stage 3 hid less, as predicted; a cost of each message that "
        "is not a core's would do that, too.",
    ),
    more=(more, f"{said}. On faster links stage 3 hid more: not as predicted."),
    alike=(
        alike,
        f"{said}. Stage 3's quartiles overlap: not as predicted, the two are not told apart. If "
        "cores take a part of what stage 3 cannot hide stays open.",
    ),
    apart=(
        quick is not None and not judged,
        f"{said}. The two M/C should be alike and are not, so something else slowed the messages "
        "that were timed alone, or the computing: these shares compare nothing, and the question "
        "stays open.",
    ),
    left_out=(quick is None, "Left out: it takes hosts in a box."),
)

# %% [markdown]
r"""
**Predict.** Where CPUs compute, the same cores carry (chapter 04). So there the second gather,
which stage 3 sends beside DDP's bytes, should show while $M$ is below $\frac{2}{3} C$, where $T_0$
is $C + M/L$ for both: by half or more of the time that it takes alone. Where devices pause as long,
on the same links, it should by less than half.

**Measure.** On ranks with a core of their own (only they go on from here), and the links that this
chapter began with: a model that computes, and one that pauses as long, for messages as large:
"""

# %%
timed = comms.timed()
n, rank = timed.world_size, timed.rank
WIDTH, SAMPLES, ROUNDS = 512, 1024, 6
wide = FullMLP(WIDTH, depth=4).to(timed.device)
batch = torch.randn(2, SAMPLES, WIDTH, device=timed.device).unbind()
real = Stage(timed, wide, mse_loss, batch, partial(torch.optim.AdamW, lr=1e-4))
by = {"compute": measure(calls_on(real, 1, ENDS), timed, warmup=1, repeat=ROUNDS)}

# %%
forward = by["compute"]["alone"].median / 3 / layers_of(wide)
alike = (Layer(forward, 2 * forward, (parameter_count(layer),)) for layer in elements(wide))
pausing = pausing_model(Work(tuple(alike)), timed.device)
twin = Stage(timed, pausing, pausing_loss, pausing_batch(timed.device), PausingOptimizer)
by["pause"] = measure(calls_on(twin, 1, ENDS), timed, warmup=1, repeat=ROUNDS)

# %% tags=["plumbing"]
sends, rows, shown, tested = sent_by(wide)["zero3"], [], {}, n > 1
for name, found in by.items():
    C, M = found["alone"].median, found["M"].median
    gather = (sends.forward + sends.backward - 1) * M  # what it sends beside DDP's
    pairs = zip(found["zero3"].seconds, found["ddp"].seconds, strict=True)
    longer = Timing(tuple(sharded - whole for sharded, whole in pairs)).median
    shown[name] = round(longer / gather, 2) if n > 1 else 0.0
    tested &= M <= 2 / 3 * C
    ms = (C, found["ddp"].median, found["zero3"].median, longer, gather)
    rows.append((f"they {name}", f"{M / C:.2f}", *(f"{1e3 * seconds:.0f}" for seconds in ms)))
headers = ["M/C", "C, ms", "DDP, ms", "stage 3, ms", "longer by (rounds), ms"]
headers.append("second gather alone, ms")
timed.print(table(rows if n > 1 else [], ["", *headers]))

# %% tags=["plumbing"]
real_part, paused_part = shown.values()
said = (
    f"Where {n} ranks compute, a step of stage 3 is longer than DDP's by {real_part:.2f} of the "
    f"time that the second gather takes alone; where they pause, by {paused_part:.2f}"
)
find(
    timed,
    "second-gather",
    shows=(
        tested and real_part >= 0.5 > paused_part,
        f"{said}: half or more, and less than half, as predicted.",
    ),
    both=(
        tested and min(real_part, paused_part) >= 0.5,
        f"{said}: it shows there, too, which was not predicted.",
    ),
    hidden=(tested and real_part < 0.5, f"{said}; predicted: half or more, and less than half."),
    beyond=(n > 1 and not tested, "In these rounds M was above two thirds of C: no test."),
    alone=(n == 1, "One rank passes on nothing."),
)

# %% [markdown]
"""
On GPUs, published comparisons of stage 3 with DDP differ. In the paper on FSDP they are alike with
611 million and 2.28 billion parameters on A100s ([Zhao et al., VLDB
2023](https://arxiv.org/abs/2304.11277), section 5.2). A user of OLMo with 1 billion parameters got
8034 tokens a second from each of four GPUs by DDP, 1747 by FSDP with the model as one block, and
1790 with blocks, each whole until its backward has ended ([allenai/OLMo
762](https://github.com/allenai/OLMo/issues/762), December 2024). DDP averaged once for many
micro-batches, and FSDP gathers for each (exercise 3).

:::{admonition} On GPUs
NCCL has kernels for both halves, and FSDP2 starts them on streams of their own. But they take some
of the GPU's processors: beside them, matrix products of FSDP on H100s took twice as long ([PyTorch
143988](https://github.com/pytorch/pytorch/issues/143988), December 2024). $M/C$ is worked out below
for 8 billion parameters in bf16 and 16,384 tokens a device. While $1.5 M/C$ is below 1, computing
is enough to hide all but the first gather and the last reduction behind it. To try: `python -m
microddp.bench sharded`.
:::
"""

# %% tags=["plumbing"]
rows = [
    (side.words, f"{side.ratio:.2f}", f"{1.5 * side.ratio:.2f}")
    for side in known_clusters(parameters=8.03e9, tokens=16_384, layers=32)
]
timed.print(table(rows, ["worked out, not measured", "M/C", "stage 3: 1.5 M/C"]))

# %% [markdown]
"""
## Where it breaks

**The norm of a shard.** A rank that clips by the norm of its n-th finds too small a number, and
each rank finds another. microddp's {func}`~microddp.parts.clip_grad_norm` adds up squares over the
ranks (chapter 17); PyTorch's `clip_grad_norm_` does so for `DTensor`s.

**A checkpoint of one rank's shards.** `if rank == 0: save(model.state_dict())` was right with DDP.
Now it saves an n-th: flat shards, under the names of whole parameters. On every rank,
`sharded.whole_state_dict()` brings whole tensors to rank 0, which needs memory for all. Or every
rank saves its own shards (`own_parts`), and `load_parts` finds what a rank needs in all ranks'
files, for any number of ranks. Here each rank begins alone, with its own file only:
"""

# %%
sharded = shard_blocks(build(), timed)
mine = own_parts(sharded.context.local_params)
(alone,) = filter(None, [timed.subgroup([each]) for each in range(n)])
single = shard_blocks(build(), alone)
try:
    load_parts(single.context.local_params, alone, [mine])
    assert n == 1
except ValueError as error:
    timed.print(f"{str(error)[:110]} ...")
here = sum(entry["parts"]["parameter"].numel() for entry in mine.values())
whole = sum(values.numel() for values in sharded.whole_state_dict().values())
timed.print(f"rank 0 has {here} of {count} values, and whole_state_dict() brings it {whole}")
assert rank or whole == count

# %% [markdown]
"""
**A module used twice.** When is a layer's gradient complete? If forward calls a module twice,
autograd calls a backward hook of the *module* twice, when each use's *input* has its gradient, and
the hook of a *parameter* once, when both uses' gradients have been added up. A step that reduces at
the first call has no gradient to send yet, and frees parameters that the other use still needs.
With `checkpoint(use_reentrant=True)`, second line, the parameter's hook is called twice, too: first
with one use's gradient.
(microddp reduces a block when backward has passed the block's first use in forward.)
"""

# %%
twice, calls = nn.Linear(4, 4), []
twice.register_full_backward_hook(lambda *_: calls.append("module"))
twice.weight.register_post_accumulate_grad_hook(lambda _: calls.append("parameter"))
for use, count_of in (twice, 1), (partial(checkpoint, twice, use_reentrant=True), 2):
    calls.clear()
    use(use(torch.ones(1, 4, requires_grad=True))).sum().backward()
    timed.print(" -> ".join(calls))
    assert (calls.count("module"), calls.count("parameter")) == (2, count_of)

# %% [markdown] index=["meta device", "deferred initialisation"]
r"""
## Training that no rank could hold

**Predict.** Four ranks, each with a limit on its memory beyond what an empty job takes, train a
model whose parameters, gradients and means need twice that: $16\Psi$ bytes. In stage 3 each keeps a
quarter, and two blocks. The model is made on PyTorch's `meta` device, where tensors have shapes and
no memory, and `fully_shard` makes one block at a time, and divides it. The program is
{download}`train_limited.py <../_downloads/train_limited.py>`, which torchrun starts, too. (Here its
four processes are forked from one that has imported PyTorch: it takes less time.) This is how it
makes the model:
"""

# %%
FILE = Path(microddp.__file__).parents[1] / "docs" / "_downloads" / "train_limited.py"
source = FILE.read_text()
timed.print(source[source.index("def new_model") : source.index("def train")].strip())

# %% tags=["plumbing"]
OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith((*OF_TORCHRUN, "MICRODDP_"))}
BARE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MICRODDP_TIMEOUT": "20"}
BARE |= {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
BARE |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}

# %% tags=["plumbing"]
FOUR_RANKS = """
import os, runpy, signal, sys, traceback
import torch._dynamo, microddp.hang, microddp.sharding  # once for all
sys.argv = sys.argv[1:]
for rank in range(4):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if not os.fork():
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception:
            traceback.print_exc()
            os._exit(1)  # at once: else it would wait for the others
        sys.exit()
for rank in range(4):
    if os.wait()[1]:
        os.killpg(0, signal.SIGKILL)  # as torchrun, if one has failed
"""


# %% tags=["plumbing"]
def outcome():
    """What four ranks under a limit say: as they train with stage 3, then as DDP is refused."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = subprocess.Popen(
        [sys.executable, "-c", FOUR_RANKS, FILE, "zero3", "ddp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=BARE | {"MASTER_PORT": port},
        start_new_session=True,
        preexec_fn=on_all_cores,
    )
    try:
        printed, errors = job.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    refused = [line for line in errors.splitlines() if "allocate memory" in line]
    return printed.strip(), refused[0].partition("DefaultCPUAllocator: ")[2] if refused else ""


# %% tags=["plumbing"]
def on_all_cores():
    """This job is on no host in a box, and its ranks wait for it."""
    os.sched_setaffinity(0, range(os.cpu_count()))


# %%
said = ["", ""]
if sys.platform == "linux":
    said = outcome() if rank == 0 else []
    said = timed.all_gather_data(said)[0]
    timed.print(f"{said[0]}\nddp: {said[1]}")
    assert said[0] == "zero3: trained 3 steps"
    assert "allocate memory" in said[1]

# %% tags=["plumbing"]
needed = [human_bytes(bytes_kept(stage, 24 * 1025 * 1024, 4).total) for stage in (0, 3)]
find(
    timed,
    "limited",
    trained=(
        bool(said[0]),
        f"With 192 MiB allowed, stage 3 trained: {needed[1]} a rank by the table, and two whole "
        f"blocks. DDP was refused memory: it needs more than 192 MiB, {needed[0]} by the table.",
    ),
    left_out=(not said[0], "Left out: this system holds no process to a limit on its memory."),
)

# %% [markdown]
r"""
## What to take along

- An all-reduce is a reduce-scatter and an all-gather. Put the optimizer between them, and each rank
  keeps an n-th of its state for the same bytes.
- Stage 3 keeps an n-th of the state, and a block or two. It sends up to half as much again, for
  each micro-batch anew: work out $M/C$ before you choose it.
- Sharding divides state, not activations: count both before you say that a model fits.
- Sum squares over the ranks before you clip, let all ranks save, and reduce a gradient when all
  uses are passed, not when a module's hook says so (*A module used twice*).

## Exercises

**The lab.** Write stage 1. {doc}`It is checked </labs>` on 1, 2, 3 and 4 ranks: what is kept, what
is sent, and that it trains as DDP does.

```console
$ python -m microddp.labs start 16
```

1. A model of 8 billion parameters is trained in half precision on 80 GB GPUs. How many bytes does
   each parameter need in stage 2, and from how many devices on does that fit? And in stage 1?

   <details class="solution"><summary>Solution</summary>

   The parameter 2, the gradient $2/n$, the optimizer $12/n$: $2 + 14/n$ bytes, 16 GB and $112/n$
   GB. That alone is below 80 for $n \ge 2$: 72 GB with two. In stage 1 it is $4 + 12/n$: 32 GB and
   $96/n$ GB, which is 80 with two, and 64 with three.

   </details>

2. `stage_3` reshards each layer after forward, the last one, too. Leave it whole, as microddp does.
   How many bytes are saved, of what a step sends and of what is kept at most?

   <details class="solution"><summary>Solution</summary>

   Do not register `post_forward` for `model.layers[-1]`. That hook reshards it, and arranges the
   second unshard. So the layer is all-gathered once and reduced once,
   $2\,\frac{n-1}{n}$ times its bytes instead of 3: a twenty-fourth less for eight equal layers.
   What is kept at most stays the same: it is whole at the end of forward and when backward begins,
   while no other layer is.

   </details>

3. The OLMo user's step had 256 sequences on 4 GPUs, two at a time. In all-reduces of all gradients,
   what does DDP send in a step, and what stage 3 with many blocks? And with `no_sync()` for all but
   the last micro-batch?

   <details class="solution"><summary>Solution</summary>

   Each GPU takes $256 / 4 / 2 = 32$ micro-batches. DDP averages after the last: 1. Stage 3 gathers
   twice and reduces once for each: $32 \cdot 1.5 = 48$. (A single block, as the user's, stays whole
   after forward: 32.) With `no_sync()` it still gathers twice for each, and reduces once:
   $32 + 0.5 = 32.5$. For that each rank keeps whole gradients, 4 bytes of each parameter, as in
   stage 1. With `reshard_after_forward=False`, and PyTorch's
   `set_reshard_after_backward(False)` until the last, one gather and one reduction are left: 1, as
   DDP, with memory for whole parameters.

   </details>
"""

# %%
comms.close()
