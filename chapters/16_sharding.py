# %% [markdown]
r"""
# 16. Sharded

Must every rank keep everything? In DDP each rank has all parameters, all gradients, and all that
the optimizer remembers: n times the same. The all-reduce of chapter 02 is a reduce-scatter and an
all-gather. Between the two each rank has an n-th of the sum, and that is all it needs to update an
n-th of the model. This chapter puts the optimizer there, then frees what is no longer needed, until
a rank keeps an n-th of everything. It counts what is kept and what is sent, at each step.
"""

# %% tags=["imports"]
import copy
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss, pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import microddp
from microddp import figures
from microddp.allreduce import ring_all_gather, ring_reduce_scatter
from microddp.comms import MessageCounter
from microddp.model import FullMLP, gradient_bytes, parameter_count
from microddp.parts import clip_grad_norm, load_parts, own_parts
from microddp.performance import bytes_kept, measure_compute
from microddp.report import human_bytes, human_seconds, table
from microddp.sharding import fully_shard, shard_blocks
from microddp.shared import carrier
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.timing import measure

# %%
# sphinx_gallery_builds = "training of which each rank keeps an n-th, in three stages"
# sphinx_gallery_hosts = "2 x 1gbit"
comms = microddp.init()
comms.print(comms.describe())
timed = comms.timed()  # the ranks that have a core or a GPU of their own
n, rank = timed.world_size, timed.rank

# %% [markdown] index=["ZeRO", "memory of a rank"]
r"""
## Who keeps what

Let a model have $\Psi$ parameters. In fp32 with Adam a rank keeps, of each: the parameter, its
gradient, and two running means, of the gradient and of its square. That makes $4 + 4 + 8 = 16$
bytes. Training in half precision keeps as many: 2 and 2, and 12 for the optimizer, which needs a
copy of the parameter in fp32.

ZeRO ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)) divides these among the $n$
ranks in three stages:

| stage | what is divided | bytes of each parameter, in fp32 |
|---|---|---|
| 0 (DDP) | nothing | $4 + 4 + 8$ |
| 1 | what the optimizer keeps | $4 + 4 + 8/n$ |
| 2 | and the gradients | $4 + 4/n + 8/n$ |
| 3 | and the parameters | $(4 + 4 + 8)/n$ |

**Predict.** How many GB does a device need, before any activation is stored? A star is where that
fits into 80 GB, the memory of many GPUs:
"""

# %%
MODELS = {"360M": 0.36e9, "1.7B": 1.7e9, "8B": 8e9, "70B": 70e9}


def gigabytes(stage, count, devices):
    kept = bytes_kept(stage, count, devices).total / 1e9
    text = f"{kept:,.0f}" if kept >= 100 else f"{kept:.2g}"
    return f"{text}{' *' if kept < 80 else '  '}"


rows = [
    (name, devices, *(gigabytes(stage, count, devices) for stage in range(4)))
    for name, count in MODELS.items()
    for devices in (8, 64, 1024)
]
timed.print(table(rows, ["parameters", "devices", "DDP", "stage 1", "stage 2", "stage 3"]))

# %% [markdown] index=["ZeroRedundancyOptimizer"]
r"""
Stage 1 leaves every rank $8\Psi$ bytes, and stage 2 $4\Psi$, however many devices there are: 560
and 280 GB for 70B. Stage 3 has no such floor.

## Stage 1: an n-th of the optimizer

**Build.** A `FlatParamGroup` lays the parameters of a module side by side in one flat tensor, as a
bucket does with gradients. An n-th of that is this rank's `shard`, in the same memory: what an
optimizer writes there, `unshard` sends to all. (Where n does not divide the number of values, the
tensor is padded with zeros.) The methods `unshard`, `reshard` and `post_backward` are named as in
microddp and in PyTorch's `fully_shard`:
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
        mean = ring_reduce_scatter(gradients, timed, "mean")
        self.shard.grad = mean.clone()  # so that the memory of the rest can go
        for p in self.parameters:
            p.grad = None

    def unshard(self):
        """All-gather the parameters from the ranks' shards."""
        ring_all_gather(self.unsharded, timed)


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
That is all: backward as ever, half an all-reduce, an optimizer that does not know of the rest, and
the other half. Adam treats each value by itself, so it makes no difference that its one parameter
is an n-th of all of them.

**Predict.** It sends what DDP sends, $\frac{n-1}{n}S$ in each half, together $S$ for two ranks. And
a rank keeps $8/n$ bytes of each parameter for Adam, instead of 8.

**Measure.** Against microddp's DDP, on the same batches. With three ranks and more the two may add
in another order, and the last bits differ. What is sent is counted. What is kept is the memory
behind parameters, gradients and Adam's means, looked at whenever a layer begins to compute, or one
of its gradients has come:
"""


# %%
def build():
    torch.manual_seed(0)
    return FullMLP(256, depth=8).to(timed.device)


SIZE = gradient_bytes(build())
batches = torch.randn(4, 2, 32, 256, generator=torch.Generator().manual_seed(rank)).to(timed.device)


def ddp(model):
    wrapped = microddp.DDP(model, timed, all_reduce=carrier("ring", timed))
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
    """Bytes of parameters, of gradients, and of what the optimizer keeps."""
    own = [group.shard for group in groups]
    parameters = [*model.parameters(), *own, *(group.unsharded for group in groups)]
    means = [v for state in adam.state.values() for v in state.values() if v.dim()]
    gradients = [p.grad for p in [*model.parameters(), *own]]
    return memory(*parameters), memory(*gradients), memory(*means)


# %%
def try_out(make):
    """Train some steps; the weights, and of the last step the bytes sent, and held over time."""
    model, moments, made = build(), {}, []

    def look(*moment):
        return lambda *_: moments.update({moment: held(model, *made)})

    for name, p in model.named_parameters():  # before anything is done with it
        p.register_post_accumulate_grad_hook(look("backward", f"{name} has its gradient"))
    step, *made[:] = make(model)
    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(look("forward", f"layer {i} is about to compute"))
    for batch in batches:
        moments.clear()
        with MessageCounter(timed) as counter:
            step(batch)
    sent = sum(message.nbytes for message in counter.messages)
    for group in made[0]:
        group.unshard()
    return parameters_to_vector(model.parameters()).detach(), sent, moments


# %%
tried = {"DDP": try_out(ddp), "stage 1": try_out(stage_1)}


def check(name):
    weights, right = tried[name][0], tried["DDP"][0]
    assert torch.allclose(weights, right, rtol=1e-3, atol=1e-5), name
    same = "the same bits as" if torch.equal(weights, right) else "equal up to rounding to"
    timed.print(f"{name}: after {len(batches)} steps {same} DDP's weights")


check("stage 1")

# %% [markdown]
"""
## Stage 2: gradients go as they come

In stage 1 all gradients are there when backward ends. But a rank has no use for the means of the
others' shards. **Build.** Make the groups smaller, one for each layer, and reduce-scatter a group
as soon as backward has all of its gradients. Then they are freed. (A parameter that gets no
gradient keeps its group waiting here for ever; microddp takes a missing gradient for
zero when backward ends.)
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


tried["stage 2"] = try_out(stage_2)
check("stage 2")

# %% [markdown] index=["FSDP", "fully_shard"]
"""
## Stage 3: parameters only while they are needed

The same once more, with parameters. A layer needs its own when it computes, forward and backward,
and at no other time. **Build.** `reshard` gives the memory of the flat tensor back. The tensor
stays where it is, and so do the views of it that the layer has, and those that autograd keeps for
backward: there is just nothing behind them. `unshard` gets memory again, puts this rank's shard in,
and asks the others for theirs:
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


# %%
def post_forward(group, _layer, _inputs, output):
    group.reshard()
    output.register_hook(lambda _: group.unshard())  # its gradient is known: backward comes


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


tried["stage 3"] = try_out(stage_3)
check("stage 3")

# %% [markdown]
r"""
No step unshards at its end: the next forward does.

## What was sent, what was kept

**Predict.** Parameters travel twice in stage 3, before forward and before backward, and gradients
once: $3\,\frac{n-1}{n}S$, one and a half times DDP's bytes. The most that a rank keeps is what the
table of the stages says. To that comes, while backward is at a layer, what is whole then: its
gradients in stage 2, and in stage 3 its parameters, too:
"""

# %%
largest = 4 * max(parameter_count(layer) for layer in build().layers)  # bytes
gradients = (1 - 1 / n) * largest  # an n-th of them is in the table already
whole = {2: gradients, 3: gradients + largest}  # in stage 3 a rank's shard is there twice
count = parameter_count(build())
rows, at_most = [], {}
for stage, (name, (_, sent, moments)) in enumerate(tried.items()):
    to_send = (3 if stage == 3 else 2) * (n - 1) / n * SIZE
    most = max(map(sum, moments.values()))
    right = at_most[name] = bytes_kept(stage, count, n).total + whole.get(stage, 0)
    rows.append((name, *map(human_bytes, (to_send, sent, right, most)), most / right))
    assert abs(most / right - 1) < 0.01, name
    assert n == 1 or abs(sent / to_send - 1) < 0.01, name
timed.print(f"{n} ranks, {human_bytes(SIZE)} of parameters; a step")
headers = ["", "to be sent", "counted", "kept at most, predicted", "measured", "ratio"]
timed.print(table(rows, headers, floats=".3f"))

# %% tags=["plumbing"]
figures.explore_kept(
    {name: list(moments.values()) for name, (_, _, moments) in tried.items()},
    at_most,
    moments=list(tried["DDP"][2]),
    kinds=["parameters", "gradients", "Adam's means"],
    title=f"What one of {n} ranks keeps during a step, with what is divided, stage by stage",
)

# %% [markdown]
r"""
**Explain.** (Play the step, or point at a moment.) Forward is flat: nothing new is kept but
activations, which are not counted. They belong to the batch, and sharding does not change them. In
backward gradients pile up, in DDP and in stage 1 whole. (DDP's buckets keep their memory from step
to step; counted is what holds gradients.) In stages 2 and 3 only those of one layer are whole at a
time, which makes the teeth, and the rest grows by an n-th of each. Stage 3 lies lower by the
parameters that it does not have. That is what a rank keeps. What `post_backward` makes to send
comes on top for a moment: the flat copy, in stage 1 of all gradients.

## The same in microddp

The hooks above unshard a layer when it is needed, and wait for it. microddp's
{func}`~microddp.sharding.fully_shard.fully_shard` prefetches: it unshards the next block while one
computes, in the order of the step before, and reduce-scatters gradients while backward goes on.
That costs memory: two blocks, here layers, are whole at a time. The model's parameters are this
rank's shards, flat, for any optimizer that treats each value by itself. (microddp's stages 1 and 2
all-gather in forward, too, in place of a wait after the optimizer's step.) Shard block by block,
then the rest, as with PyTorch's own `torch.distributed.fsdp.fully_shard`, which takes a mesh of
devices instead of the ranks. Its source has the same words: a group of parameters with `unshard`,
`reshard` and `post_backward`, and for each module hooks before and after forward and before
backward:
"""


# %%
def by_microddp(model):
    for layer in model.layers:
        fully_shard(layer, timed)
    sharded = fully_shard(model, timed)
    adam = torch.optim.Adam(model.parameters())
    for batch in batches:
        adam.zero_grad()
        backward(model, batch)
        adam.step()
    return sharded


sharded_model = build()
by_microddp(sharded_model).remove()  # whole again
tried["microddp"] = (parameters_to_vector(sharded_model.parameters()).detach(),)
check("microddp")

# %% [markdown] index=["sharding, time of"]
r"""
## When does it cost time?

**Predict.** Let forward take $f$, backward $b$ and the optimizer $o$ on one rank, and a half of an
all-reduce $g = \frac{n-1}{n} S/B$ on a link of bandwidth $B$. If the link works while the cores do,
DDP takes $f + \max(b, 2g) + o$. Stage 3 has something to send in forward, too, and half as much
again in all: $\max(f, g) + \max(b, 2g) + o/n$. So it should cost time where the link is what a step
waits for, and less and less where computing is. What decides is how much a rank computes for each
byte: its samples, or tokens, in a step.

**Measure.** One model, more and more samples for each rank. Both send by microddp's ring, DDP in
buckets of 1 MiB, stage 3 (`"zero3"` in the table of strategies) by layers of 1 MiB:
"""

# %%
WIDTH, DEPTH = 512, 8
SAMPLES = (64, 256, 1024)
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
wide = FullMLP(WIDTH, depth=DEPTH).to(timed.device)
link = timed.box.seconds_per_byte if timed.box else None
half = (n - 1) / n * gradient_bytes(wide) * link if link else None


def step_of(name, batch):
    model = copy.deepcopy(wide)
    if name == "ddp":
        model = microddp.DDP(model, timed, bucket_cap_mb=1, all_reduce=carrier("ring", timed))
        strategy = STRATEGIES[name](model, timed)
    else:
        strategy = STRATEGIES[name](model, timed, collectives="ring")
    return partial(take_step, strategy, mse_loss, ADAMW(strategy.parameters()), batch)


# %%
def predicted(compute):
    f, b, o = compute.forward, compute.backward, compute.optimizer
    return f + max(b, 2 * half) + o, max(f, half) + max(b, 2 * half) + o / n


results, ratios = [], {}
for samples in SAMPLES:
    batch = torch.randn(2, samples, WIDTH, device=timed.device).unbind()
    steps = {name: step_of(name, batch) for name in ("ddp", "zero3")}
    times = measure(steps, timed, repeat=7)
    ratios[samples] = times["zero3"].ratio(times["ddp"])
    compute = measure_compute(wide, mse_loss, batch, lambda m: ADAMW(m.parameters()), timed, 3)
    results.append((samples, times, predicted(compute) if half else None))

# %% tags=["plumbing"]


def with_quartiles(timing):
    low, high = timing.spread
    return f"{timing.median:.2f} ({low:.2f} to {high:.2f})"


rows = []
for samples, times, right in results:
    row = [samples, *map(str, times.values()), with_quartiles(ratios[samples])]
    if right:
        row += [*map(human_seconds, right), f"{right[1] / right[0]:.2f}"]
    rows.append(row)
headers = ["samples a rank", "DDP", "stage 3", "stage 3 / DDP", "DDP, predicted"]
headers += ["stage 3, predicted", "ratio"]
timed.print(table(rows, headers[: len(rows[0])]))

# %% tags=["plumbing"]
most, least = ratios[SAMPLES[0]], ratios[SAMPLES[-1]]
if least.spread[1] < most.spread[0]:
    verdict = "a smaller part of DDP's time"
else:
    verdict = "no smaller part of DDP's time that this run can tell"
timed.print(f"With {SAMPLES[-1]} samples stage 3 adds {verdict} than with {SAMPLES[0]}.")
title = f"Stage 3 in DDP's time: {most.median:.2f} to {least.median:.2f}, by samples a rank"
figures.lines(
    {"measured": (SAMPLES, [ratios[samples].median for samples in SAMPLES])}
    | ({"predicted": (SAMPLES, [r[1] / r[0] for _, _, r in results])} if half else {}),
    title=title,
    xlabel="samples of a rank and step",
    ylabel="stage 3 / DDP",
    log="x",
)

# %% [markdown]
r"""
**Explain.** With few samples both wait for the link. DDP's forward and optimizer come on top of
that, so its time is more than $2g$, and the predicted ratio is below that of the bytes, 1.5. With
more samples there is more behind which a byte can hide. Where a measured time is above the
prediction: that knows of one link and of computing, each for itself. In stage 3 the first block of
forward has to be waited for, in DDP the last bucket. And on CPUs the cores that compute also send
(chapter 05), add up, and copy, of which stage 3 has half as much again to do. This run does not
separate the two.

Published, on GPUs, fully sharded: torchtitan trained Llama 3.1 8B on H100 with 96 GB and 400 Gbit/s
for each GPU, two sequences on each: 5762 tokens a second and GPU on 8, 5605 on 128 ([December
2024](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)).
llm-foundry, 1B parameters on H100: 45455 on 8, 44402 on 64 ([its
table](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md), read
in 2026):
"""

# %%
PUBLISHED = {"torchtitan, 8B": (8, 5762, 128, 5605), "llm-foundry, 1B": (8, 45455, 64, 44402)}
rows = [
    (name, f"{many // few_} times as many GPUs", f"{there / here:.1%} of the speed of each")
    for name, (few_, here, many, there) in PUBLISHED.items()
]
timed.print(table(rows, ["published", "", "kept"]))

# %% [markdown]
"""
## Where it breaks

**The norm of a shard.** Clipping scales gradients by the norm of all of them. A rank that has an
n-th, and takes the norm of that, finds it too small, and each rank another one. microddp's
{func}`~microddp.parts.clip_grad_norm` adds up squares over the ranks:
"""

# %%
clipped = build()
sharded = shard_blocks(clipped, timed)
backward(clipped, batches[0])
gradients = [p.grad for p in clipped.parameters() if p.grad is not None]
local = torch.stack([g.norm() for g in gradients]).norm().reshape(1)
norm = clip_grad_norm(clipped.parameters(), 1.0, timed)
norms = timed.all_gather(local).flatten()
timed.print(f"norm of each rank's shards: {', '.join(f'{x:.4f}' for x in norms.tolist())}")
timed.print(f"of all: {norm:.4f}, the root of the sum of their squares")
assert torch.allclose(norms.square().sum().sqrt(), norm)

# %% [markdown]
"""
**A checkpoint of one rank's shards.** `if rank == 0: save(model.state_dict())` was right with DDP.
Now it saves an n-th: flat shards, under the names of whole parameters. Whole tensors, which any
model can load, are one call on every rank: `sharded.whole_state_dict()` brings them to rank 0,
which needs memory for all. Or every rank saves its shards (`own_parts`), and `load_parts` takes
what a rank needs out of all ranks' files, for any number of ranks. Here each rank begins alone,
with its own file only:
"""

# %%
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
**A module used twice.** When is a layer's gradient complete? A hook on the *module* is called after
each use, and one on the *parameter* after the last, here before the second of the module's, which
waits for the gradient of the input. A step that reduces when the first is called reduces half a
gradient, and frees what the other use still needs. (microddp reduces a block when backward has come
past its first use, to what forward used before. Which of its parameters a rank has used makes no
difference: all ranks reduce in one order.)
"""

# %%
twice, calls = nn.Linear(4, 4), []
twice.register_full_backward_hook(lambda *_: calls.append("module"))
twice.weight.register_post_accumulate_grad_hook(lambda _: calls.append("parameter"))
twice(twice(torch.ones(1, 4, requires_grad=True))).sum().backward()
timed.print(" -> ".join(calls))
assert calls.index("module") < calls.index("parameter")
assert (calls.count("module"), calls.count("parameter")) == (2, 1)

# %% [markdown] index=["meta device", "deferred initialisation"]
r"""
## Training that no rank could hold

**Predict.** Four ranks, each with a limit on its memory beyond what an empty job takes, train a
model whose parameters, gradients and means need twice that: $16\Psi$ bytes. In stage 3 each keeps a
quarter, and two blocks. A model that is larger yet could not even be made, to be divided then. So
this one is made on PyTorch's `meta` device, where tensors have shapes and no memory, and
{func}`~microddp.sharding.fully_shard.fully_shard` makes one block at a time, and divides it:
"""

# %%
LIMITED = """
import resource, sys, torch, microddp
from microddp.sharding import fully_shard

comms = microddp.init()
warm = microddp.DDP(torch.nn.Linear(8, 8), comms)  # modules, threads and buffers, once for all
warm(torch.ones(1, 8)).sum().backward()
torch.optim.Adam(warm.parameters()).step()
fully_shard(layer := torch.nn.Linear(8, 8), comms)
layer(torch.ones(1, 8)).sum().backward()
used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (192 << 20),) * 2)
"""

# %%
TRAINED = """
layers = lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
if sys.argv[1] == "ddp":
    model = microddp.DDP(layers(), comms)
else:
    with torch.device("meta"):
        model = layers()
    for layer in model:
        fully_shard(layer, comms)
    fully_shard(model, comms)
adam = torch.optim.Adam(model.parameters())
for _ in range(3):
    adam.zero_grad()
    model(torch.ones(4, 1024)).square().mean().backward()
    adam.step()
comms.print("trained 3 steps")
"""

# %% tags=["plumbing"]
OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith((*OF_TORCHRUN, "MICRODDP_"))}
BARE |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MICRODDP_TIMEOUT": "20"}
BARE |= {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
FOUR = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
FOUR = [sys.executable, *FOUR, "--nproc-per-node=4"]


def outcomes(*kinds):
    """What four ranks under a limit say at the end, of each kind; jobs side by side."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "limited.py")
        script.write_text(LIMITED + TRAINED)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": BARE}
        options["preexec_fn"] = on_all_cores
        jobs = [subprocess.Popen([*FOUR, script, kind], **options) for kind in kinds]
        said = [job.communicate(timeout=100) for job in jobs]
    return [last_words(*both) for both in said]


# %% tags=["plumbing"]
def on_all_cores():
    """A host in a box has its own; these jobs are on none, and the other ranks wait for them."""
    os.sched_setaffinity(0, range(os.cpu_count()))


def last_words(printed, errors):
    """The last line, or that of the error."""
    refused = [line for line in errors.splitlines() if "allocate memory" in line]
    return refused[0].partition("DefaultCPUAllocator: ")[2] if refused else printed.strip()


# %%
count = 24 * (1024 * 1024 + 1024)
needed = [bytes_kept(stage, count, 4).total for stage in (0, 3)]
timed.print(
    f"needed: DDP {human_bytes(needed[0])}, stage 3 {human_bytes(needed[1])}; allowed: 192 MiB more"
)
if sys.platform == "linux":
    said = outcomes("ddp", "zero3") if rank == 0 else []
    ddp_said, sharded_said = timed.all_gather_data(said)[0]
    timed.print(f"DDP:     {ddp_said}\nstage 3: {sharded_said}")
    assert "allocate memory" in ddp_said
    assert sharded_said == "trained 3 steps"
else:
    timed.print("Left out: this system holds no process to a limit on its memory.")

# %% [markdown]
r"""
## What to take along

- An all-reduce is a reduce-scatter and an all-gather. What each rank does in between it need not do
  n times: stages 1 and 2 send what DDP sends, and keep less.
- Stage 3 keeps an n-th of everything, and sends half as much again. How much time that costs
  depends on how much a rank computes for each byte.
- Sum squares over the ranks before you clip, let all ranks save, and count a gradient as complete
  when its parameter says so.

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
   GB. That is below 80 for $n \ge 2$: 72 GB with two. In stage 1 it is $4 + 12/n$: 32 GB and $96/n$
   GB, which is 80 with two and fits with three. Activations have to fit, too.

   </details>

2. `stage_3` reshards each layer after forward, the last one, too, though backward begins with it.
   Leave it whole. How many bytes are saved, of what a step sends and of what is kept at most?

   <details class="solution"><summary>Solution</summary>

   Do not register `post_forward` for `model.layers[-1]`. That hook reshards the layer, and it also
   arranges the second unshard. So the layer is all-gathered once and reduced once,
   $2\,\frac{n-1}{n}$ times its bytes instead of 3: a twenty-fourth less for eight equal layers.
   What is kept at most stays the same: it is whole at the end of forward and when backward begins,
   while no other layer is.
   PyTorch leaves the outermost module's own parameters whole, for that reason.

   </details>

3. In the table of stages, what if gradients are accumulated over four micro-batches? Think of stage
   2 with a reduce-scatter after each, or after the last one only.

   <details class="solution"><summary>Solution</summary>

   After each: gradients stay sharded, $4/n$ bytes, and are sent four times (and `post_backward` has
   to add to `shard.grad` instead of replacing it). After the last: they are sent once, but each
   rank's own sums must be kept whole until then, 4 bytes of each parameter, as in stage 1.
   `no_sync()` is the second way. Memory or bytes: one of the two.

   </details>
"""

# %%
comms.close()
