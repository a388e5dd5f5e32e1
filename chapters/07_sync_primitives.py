# %% [markdown]
r"""
# 07. Collectives, and when they hang

Which other collectives are there, what do they cost, and what if one hangs? A job that hangs prints
nothing, or an error on a rank that did nothing wrong: to read it, you must know what every rank
was to do. The first half of this chapter draws who has what before and after, and counts what is
sent. The second half makes mistakes, most of which hang, and reads
them.
"""

# %% tags=["imports"]
import contextlib
import itertools
import math
import os
import re
import socket
import struct
import time
from functools import partial
from textwrap import fill, shorten

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

import microddp
from microddp import figures
from microddp.allreduce import ring_reduce_scatter
from microddp.comms import name_ranks
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.ddp import DDP
from microddp.findings import compare, find
from microddp.hang import torch_calls
from microddp.model import FullMLP, SimpleCNN
from microddp.report import human_bytes, table
from microddp.timing import measure

# %%
os.environ.pop("MICRODDP_DEBUG", None)  # a later section sets it where it belongs
# sphinx_gallery_builds = "the chores of a training job, and mistakes that hang or spoil one"
# sphinx_gallery_hosts = "4 x 1gbit"
comms = microddp.init()
rank, n = comms.rank, comms.world_size
comms.print(comms.describe())

# %% [markdown] index=["barrier"]
"""
## Who waits: the barrier

Nobody leaves a *barrier* before everybody has come to it. It is needed before something that is not
a message: before a clock is read, or a file that another rank wrote. Before a collective you need
none: who receives in it waits for the data, and who sends may have to wait until it is taken.
"""

# %% [markdown] index=["collectives", "all_gather", "reduce_scatter", "subgroup"]
r"""
## Who has what

The others move data:

- *Broadcast*: every rank gets a copy of what one rank has. DDP's replicas start so.
- *Scatter*: one rank deals its tensor out, a part for each rank.
- *Gather*: one rank collects a part from every rank, in rank order.
- *All-gather*: every rank collects: in sharded training the parameters (chapter 16).
- *Reduce-scatter*: all tensors are added up, and each rank keeps one part of the sum: in sharded
  training that of the gradients.
- *All-to-all*: every rank deals out, and every rank collects: in a mixture of experts, where ranks
  hold different parts of a layer, each token travels to the ranks that are to compute it.

**Predict.** To see who has what, let part $p$ of rank $r$ be the number $(p + 1) \cdot 10^r$. Then
every rank writes to a decimal digit of its own, and a sum should tell who is in it. Four ranks are
a group: all ranks call `subgroup` for every group, in one order. `BRINGS` has what this rank
brings:
"""

# %%
fours = [comms.subgroup(range(first, min(first + 4, n))) for first in range(0, n, 4)]
drawn = fours[rank // 4]
parts = range(1, drawn.world_size + 1)
whole = torch.tensor([part * 10**drawn.rank for part in parts], device=comms.device)
own = whole[drawn.rank : drawn.rank + 1]
BRINGS = {"broadcast": whole, "scatter": whole, "gather": own, "all-gather": own}
BRINGS |= {"reduce-scatter": whole, "all-to-all": whole, "all-reduce": whole}
if drawn.rank > 0:
    BRINGS["scatter"] = whole[:0]

# %% [markdown]
"""
**Measure.** Broadcast and all-reduce overwrite their tensor, the others return a new one:
"""


# %%
def call(name, group, x):
    result = getattr(group, name.replace("-", "_"))(x)
    return x if name in ("broadcast", "all-reduce") else result


panels = {}
for name, brings in BRINGS.items():
    got = call(name, drawn, brings.clone())
    held = brings, whole[:0] if got is None else got.flatten()
    panels[name] = [drawn.all_gather_data(tensor.tolist()) for tensor in held]

# %% tags=["plumbing"]
assert panels["reduce-scatter"][1] == [[part * (10 ** len(parts) // 9)] for part in parts]
figures.holdings(panels, title="One rank gives, one rank collects, or all do both")

# %% [markdown] index=["device mesh"]
"""
A square has the colour of the rank whose number it is; of a sum, each digit has its rank's. A
reduce-scatter and then an all-gather make an all-reduce (chapter 02's ring).

## What they are for

Large jobs arrange ranks in a grid, a *device mesh*, with a group for each row and column
({func}`microddp.register_mesh`); chapter 17 uses one. Three uses of collectives have a trap.

**Stop together: the maximum of flags.** Each rank looks at the loss on *its* images to decide
whether to stop. One that stopped alone would leave the others waiting. So each says 0 or 1, and the
maximum counts:
"""

# %%
digits = load_digits(comms.device)
images, labels = (tensor[:359] for tensor in digits.test.tensors)
images = images.double()
cuts = [349 * r // (n - 1) for r in range(1, n)]  # the last has ten
x, y = (tensor.tensor_split(cuts)[rank] for tensor in (images, labels))
batches = ShardedBatches(digits.train, 96 - 96 % n, rank, n)

# %%
torch.manual_seed(0)
module = FullMLP(64, depth=4, outputs=10).to(comms.device, torch.float64)
model = DDP(module, comms)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(1, 21):
    for a, b in batches.epoch(epoch):
        optimizer.zero_grad()
        cross_entropy(model(a.double()), b).backward()
        optimizer.step()
    with torch.no_grad():
        content = cross_entropy(module(x), y).item() < 0.17
    flag = torch.tensor([int(content)], device=comms.device)
    comms.all_reduce(flag, "max")
    if flag.item():
        break

# %% tags=["plumbing"]
wish = [r for r, content in enumerate(comms.all_gather_data(content)) if content]
find(
    comms,
    "stop-together",
    parted=(
        0 < len(wish) < n,
        f"All stop after epoch {epoch}, because of {name_ranks(wish)}. The others would have gone "
        "on, and waited in the next all-reduce.",
    ),
    alike=(len(wish) in (0, n), f"After epoch {epoch} all ranks decide alike."),
)

# %% [markdown]
"""
**A metric: sums and counts.** In the mean of the ranks' means, an image of a smaller part weighs
more. The sums of all ranks, divided by the count of all, are what one device would have found.

**Predictions, in the right order.** Gathers join parts in rank order. PyTorch's
`DistributedSampler`, if it does not shuffle, gives rank r the images r, r + n, r + 2n and so on
(and some twice, so that all ranks have equally many). Their predictions have to be dealt back, one
from each rank in turn, and cut to length:
"""

# %%
mine = torch.tensor(list(DistributedSampler(images, n, rank, shuffle=False)))
with torch.no_grad():
    sums = torch.stack([cross_entropy(module(x), y, reduction="sum"), x.new_tensor(len(x))])
    everyone = comms.all_gather(module(images[mine.to(comms.device)]).argmax(1))
means = sums[0] / sums[1]
comms.all_reduce_mean(means)
comms.all_reduce(sums)
joined, dealt = (predicted.flatten()[: len(labels)] for predicted in (everyone, everyone.T))

# %% tags=["plumbing"]
with torch.no_grad():
    scores = module(images)
single, off = cross_entropy(scores, labels).item(), means.item()
assert abs((sums[0] / sums[1]).item() - single) < 1e-12
assert dealt.equal(scores.argmax(1))
hits = [(predicted == labels).double().mean().item() for predicted in (dealt, joined)]
find(
    comms,
    "put-together",
    several=(
        n > 1,
        f"By sums and counts the loss is {single:.3f}, by the mean of means {off:.3f}: "
        f"{abs(off / single - 1):.1%} off. Dealt back, {hits[0]:.0%} of the predictions are right, "
        f"and joined rank by rank {hits[1]:.0%}.",
    ),
    alone=(n == 1, "One rank has one mean and one order."),
)

# %% [markdown]
r"""
## What they cost

**Predict.** Let $S$ be the bytes of a rank's largest tensor, before or after. What counts is the
busiest link: the most that a rank sends, or receives.

- gloo broadcasts by a tree. Each of $\lceil\log_2 n\rceil$ rounds reaches twice as many ranks, and
  rank 0 sends $S$ in each.
- NCCL broadcasts around a ring, and in no other way (its
  [tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc) skips all others):
  each rank passes on a piece as soon as it has it. So nobody sends more than $S$.
- In the others a rank sends, or receives, $n-1$ parts of $S/n$; in an all-reduce twice as many.

`COST` has the bytes in units of $S$, over gloo and with NCCL's rings. (Except for broadcast, NCCL
has other ways, too; it makes gather, scatter and all-to-all of single messages.) A rank that has
neither a link, nor a core, nor a GPU of its own leaves; `m` stay. Chapter 02's ring has a
reduce-scatter, too:
"""

# %%
timed = comms.timed(computing=False)
m = timed.world_size
x = torch.zeros(m * 2**18, device=timed.device)
part = x[: 2**18]  # 1 MiB
calls = {name: partial(call, name, timed, part if "gather" in name else x) for name in BRINGS}
calls["reduce-scatter, our ring"] = partial(ring_reduce_scatter, x, timed)
levels, most = math.ceil(math.log2(m)), (m - 1) / m
COST = dict.fromkeys(sorted(calls), (most, most))
COST["all-reduce"] = 2 * most, 2 * most
COST["broadcast"] = levels, min(levels, 1)

# %% [markdown]
"""
**Measure.** gloo's messages travel over TCP, and Linux counts what each connection has carried
(`TCP_INFO`). So Linux says what a collective sent, whatever the backend does inside:
"""


# %% tags=["plumbing"]
def carried():
    """Bytes sent and bytes received over this process's TCP connections."""
    total = torch.tensor([0, 0])
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # not TCP, or an old Linux
            connection = socket.socket(fileno=int(fd))
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
            finally:
                connection.detach()  # not ours to close
            received, sent, again = (struct.unpack_from("Q", info, at)[0] for at in (128, 200, 208))
            total += torch.tensor([sent - again, received])
    return total


# %%
def carried_by(collective):
    timed.barrier()
    time.sleep(0.05)  # until buffers are empty
    before = carried()
    collective()
    timed.barrier()  # then all has arrived; its own bytes do not count beside it
    return max(timed.all_gather_data((carried() - before).max().item()))


S = x.nbytes
can_count = m > 1 and timed.backend == "gloo" and hasattr(socket, "TCP_INFO")
can_count = can_count and all(timed.all_gather_data(carried().any().item()))
counted = {name: carried_by(calls[name]) / S for name in COST if can_count}
both = "reduce-scatter, our ring", "reduce-scatter"
took = measure({name: calls[name] for name in both}, timed, warmup=1, repeat=7)

# %% tags=["plumbing"]
rows = [(name, float(gloo), counted.get(name), float(nccl)) for name, (gloo, nccl) in COST.items()]
timed.print(f"{timed.backend}, {m} of {n} ranks: the busiest link's bytes, in S = {human_bytes(S)}")
timed.print(table(rows, ["", "gloo, predicted", "counted", "NCCL, worked out"]))
real = {name: gloo for name, (gloo, _) in COST.items()}
real["reduce-scatter"] = real["all-reduce"]
assert all(abs(counted[name] - real[name]) < 0.02 for name in counted)
ring = compare(*(took[name] for name in both))
find(
    timed,
    "bytes",
    counted=(
        can_count,
        "The busiest link carried what was predicted, except in gloo's reduce-scatter: there "
        f"{counted.get('reduce-scatter', 0.0):.2f} S, as in an all-reduce. "
        + ring.say(f"A ring's reduce-scatter, with {most:.2f} S,", "gloo's")
        + ".",
    ),
    not_counted=(
        not can_count,
        "Bytes are counted for two ranks and more, on gloo, under Linux.",
    ),
)

# %% [markdown]
r"""
**Explain.** PyTorch makes gloo's reduce-scatter from all-reduces, after which every rank throws all
parts but its own away ("2x communication", says [its
author](https://github.com/pytorch/pytorch/pull/118911)). A collective's name says who has what at
the end, not what it costs to get there.

:::{admonition} On GPUs
Who has what stays, and so does the order of calls. A broadcast's bytes do not grow with $n$; a
reduce-scatter has half an all-reduce's. On 8 H200, with 16 GiB, a link carried 368 GB/s in an
all-reduce around a ring (`NCCL_NVLS_ENABLE=0`), 363 in a reduce-scatter and 361 in an all-gather
([ML engineering](https://github.com/stas00/ml-engineering/tree/master/network), August 2026):
within 2 %, so half the bytes take about half the time. On yours, run `reduce_scatter_perf` of
nccl-tests.
:::
"""

# %% [markdown] index=["time-out", "timeout"]
r"""
## When it hangs

Collectives are paired by their order, and a rank in one waits for the others, to send or to take,
until the time-out. Each mistake below is a function. All ranks call it, with a group and most often
with the ranks that go wrong in it. `outcomes` calls it with a new group, whose time-out is one
second, and returns how each rank fared: its error, or "went on". (With NCCL a time-out ends the
process, so there nothing is called that would wait for it.)
"""

# %%
STUCK = m > 1 and timed.backend == "gloo"  # whether there is somebody to wait for
GROUPS = {}  # PyTorch's name of the group, by mistake


def outcomes(mistake, *args, debug="0"):
    os.environ["MICRODDP_DEBUG"] = debug  # read when a group is made; a later section turns it on
    timed.barrier()  # the time-out counts while the group is made, too
    hasty, ending = timed.subgroup(range(m), timeout=1.0), "went on"
    os.environ["MICRODDP_DEBUG"] = "0"
    GROUPS[mistake.__name__] = hasty.group.group_name if STUCK else ""
    try:
        if timed.backend == "gloo":
            mistake(hasty, *args)
    except RuntimeError as error:
        ending = re.sub(r"\[\S*/", "[", str(error))  # without the source's folder
    endings = timed.all_gather_data(shorten(ending, 150, placeholder=" ..."))
    hasty.close()
    return endings


# %% tags=["plumbing"]
FARED = {}  # by mistake


def show(endings):
    for r, ending in enumerate(endings):
        timed.print(fill(f"[rank {r}] {ending}", 90, subsequent_indent=" " * 9))


# %% [markdown] index=["deadlock"]
"""
## Where it breaks: only rank 0 enters

Only rank 0 prints a number, so only rank 0 averages it. (The loss that is printed comes from a
second call, in which all ranks average, as they should.)
"""


# %%
def log_loss(group, away):
    loss = torch.ones(1, device=timed.device)
    if group.rank not in away:
        group.all_reduce_mean(loss)
    group.print(f"loss {loss.item():.3f}")


FARED["only rank 0 enters"] = endings = outcomes(log_loss, range(1, m))
show(endings)
assert [ending != "went on" for ending in endings] == [STUCK] + [False] * (m - 1)
assert set(outcomes(log_loss, [])) == {"went on"}  # nobody is away: all average, one prints

# %% [markdown]
"""
The error names neither the collective nor the ranks that did not come. It is raised where the
program is right to wait. The culprits went on: with a time-out of minutes they would now hang at
their own next collective, somewhere else.

## Where it breaks: another order, another shape

Rank 0 broadcasts a threshold and then sums up a loss; the others do it the other way round:
"""


# %%
def two_orders(group, odd):
    loss, threshold = torch.ones(2, 1, device=timed.device)
    calls = [lambda: group.all_reduce(loss), lambda: group.broadcast(threshold)]
    for call in reversed(calls) if group.rank in odd else calls:
        call()


FARED["two orders"] = endings = outcomes(two_orders, [0])
assert all((ending != "went on") == STUCK for ending in endings)

# %% [markdown]
"""
All ranks wait until the time-out. That is the lucky case. Two calls of one kind and
shape fit, and add up what does not belong together. A loop over a `set` of names does that: Python
hashes strings differently in every process. Another shape may fit, too. Below, the last rank
expects one number more than rank 0 sends:
"""


# %%
def swapped_sums(group, odd):
    sums = {"loss": 0.5, "images": 100.0}
    for name in sorted(sums, reverse=group.rank in odd):
        total = torch.tensor([sums[name]], device=timed.device)
        group.all_reduce(total)
        sums[name] = total.item()
    group.print(f"0.5 and 100, summed over {m} ranks: {sums}; right: {m / 2:g} and {100 * m}")


def other_shape(group, odd):
    tensor = torch.full((4 if group.rank in odd else 3,), float(group.rank), device=timed.device)
    group.broadcast(tensor)
    received = timed.all_gather_data(tensor.tolist())
    group.print(f"rank 0 sent {received[0]}, the last rank has {received[-1]}")


# %%
FARED["sums in another order"] = outcomes(swapped_sums, [0])
FARED["another shape"] = outcomes(other_shape, [m - 1])
assert {*FARED["sums in another order"], *FARED["another shape"]} == {"went on"}

# %% [markdown]
"""
Nor can you count on that: a tensor too *long* for its receiver ends the process in gloo (not tried
here, where the page would end with it), and NCCL promises nothing ("undefined behavior, including
hangs, crashes, or data corruption", [its user
guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html)).

With `MICRODDP_DEBUG=1` all ranks first tell each other what they are about to do. On a difference
all raise and name the ranks that differ from the most frequent call.
(PyTorch's own: `TORCH_DISTRIBUTED_DEBUG=DETAIL`.) It is blind to swapped sums, of which all say the
same, and sees the other shape:
"""

# %%
endings = outcomes(other_shape, [m - 1], debug="1")
show(endings[:1])
assert all(("the ranks disagree" in ending) == STUCK for ending in endings)

# %% [markdown]
"""
The fix is one order and one shape by construction: a list instead of a set, and shapes that are
told before they are used.

## Where it breaks: evaluation through the wrapper

One rank is enough to evaluate. Does the model know? The forward pass of a `DDP` begins with a
collective if the model has buffers: rank 0's are broadcast (chapter 06). Here rank 0 evaluates
between two training steps: through the wrapper or through `.module`, the model inside it, with or
without gradients, and with or without a barrier of all ranks afterwards:
"""


# %%
def evaluation(group, wrap, through, gradients, barrier):
    model = wrap(SimpleCNN().to(timed.device), group)
    evaluated = model if through == "wrapper" else model.module
    a, b = next(batches.epoch(0))
    for step in range(4):
        if step == 3 and group.rank == 0:
            with torch.set_grad_enabled(gradients):
                evaluated.eval()(images.float())
        if step == 3 and barrier:
            group.barrier()
        cross_entropy(model.train()(a), b).backward()


def torch_ddp(module, group):
    return TorchDDP(module, process_group=group.group)


_ = torch_ddp(nn.Linear(1, 1).to(timed.device), timed)  # imports longer than the time-out

# %%
HANG = [("wrapper", True, False), ("wrapper", False, True)]
GO_ON = [("wrapper", False, False), ("module", True, True)]
rows = []
for case, wrap in itertools.product(HANG + GO_ON, (DDP, torch_ddp)):
    endings = outcomes(evaluation, wrap, *case)
    FARED.setdefault("evaluation through the wrapper", endings)
    hangs = {ending != "went on" for ending in endings}
    name = "microddp" if wrap is DDP else "torch"
    rows.append((*case, name, "hangs" if any(hangs) else "goes on"))
    assert hangs == {STUCK and case in HANG}

# %% tags=["plumbing"]
headers = ["rank 0 evaluates", "gradients", "barrier", "DDP", "the job"]
timed.print(table(rows, headers))

# %% [markdown]
"""
**Explain.** With gradients, rank 0 broadcasts its buffers once more than the others, and the next
collective of each meets the wrong one. Under `no_grad` and without a barrier nothing hangs, by
luck: after a forward without gradients the wrapper skips its next broadcast, because nothing was
trained in between. The numbers of collectives agree again; with a barrier, their order does not.
The fix is the last case: evaluate through `.module`. Or let all ranks evaluate, each a part.

## Where it breaks: save, then barrier

Rank 0 saves, and the others wait until the file is there. Two lines, and one indentation:
"""


# %%
def save(group):
    if group.rank == 0:
        torch.save(module.state_dict(), os.devnull)
        group.barrier()  # belongs after the if


FARED["save, then barrier"] = endings = outcomes(save)
assert [ending != "went on" for ending in endings] == [STUCK] + [False] * (m - 1)

# %% tags=["plumbing"]
late = [name for name, endings in FARED.items() if set(endings) != {"went on"}]
silent = [name for name in FARED if name not in late]
find(
    timed,
    "mistakes",
    made=(
        STUCK,
        f"Of these {len(FARED)} mistakes in calls {len(late)} hang until an error ends them, and "
        f"{len(silent)} end in wrong numbers and no error: {' and '.join(silent)}.",
    ),
    not_made=(not STUCK, "Left out: mistakes that hang take two ranks, and gloo."),
)

# %% [markdown] index=["flight recorder"]
r"""
## The flight recorder

**Predict.** The time-out did not name who did not come. A list of each rank's calls can: a group
numbers its collectives (here number 1 is the barrier with which `subgroup` makes a group), so a
rank that is behind has a smaller last number. (For ranks that stay away, gloo also has
`dist.monitored_barrier`, which with `wait_all_ranks=True` names them all.) PyTorch keeps such a
list, the *flight recorder*, for NCCL and for gloo: the last collectives of each process, as many as
`TORCH_FR_BUFFER_SIZE` says, with number, sizes and stack.

**Measure.** An early `continue` on one rank, and the two orders of above, which are still in the
record. `torch_calls` reads it, by a private call of PyTorch's
(`torch._C._distributed_c10d._dump_fr_trace`). The line is the one in the mistake's function; in
`two_orders` one line, `call()`, makes both calls:
"""


# %%
def early_continue(group, odd):
    for batch in range(4):
        if group.rank in odd and batch == 2:
            continue  # "this loss is not finite, leave it out"
        group.all_reduce(torch.ones(4, device=timed.device))


# %%
def last_of(mistake, calls):
    """A rank's last collective in the group of a mistake: number, call, line."""
    last = [c for c in calls if c["process_group"][0] == GROUPS[mistake.__name__]][-1]
    line = next(f["line"] for f in last["frames"] if f["name"] == mistake.__name__)
    what = f"{last['profiling_name']} of {last['input_sizes'][0]}"
    return [last["collective_seq_id"], what, line]


seen, READS = {}, STUCK and torch_calls() is not None
if READS:
    outcomes(early_continue, [m - 1])
    calls = torch_calls(stacks=True)
    for mistake in (early_continue, two_orders):
        seen[mistake.__name__] = timed.all_gather_data(last_of(mistake, calls))

# %% tags=["plumbing"]
rows = [(name, r, *last) for name, ranks in seen.items() for r, last in enumerate(ranks)]
timed.print(table(rows, ["mistake", "rank", "last number", "last collective", "line"]))
numbers = [number for number, *_ in seen.get("early_continue", ())]
ahead, behind = max(numbers, default=0), min(numbers, default=0)
absent = [r for r, number in enumerate(numbers) if number < ahead]
assert absent == [m - 1] or not READS
assert len({number for number, *_ in seen.get("two_orders", ())}) <= 1
find(
    timed,
    "not-come",
    named=(
        READS,
        f"Others wait in collective {ahead}, and {name_ranks(absent)}'s last was {behind}: that is "
        "who did not come. With two orders the numbers are equal, and the calls differ.",
    ),
    not_made=(not READS, "Left out: nobody waits, so there is nothing to read."),
)

# %% [markdown] index=["watchdog"]
"""
(In `early_continue` number 4 came back, though batch 3 of one rank was added to batch 2 of the
others: a sum of ones does not show it.) So look for ranks that are behind, and on them not for the
recorded line but for where they are *now*: `py-spy dump --pid` shows the stack of a running
process. If no rank is behind, compare the calls. (While a job hangs, the field `retired` says
whether a call is over; gloo's `state` stays "scheduled".) {doc}`Chapter 13 <13_faults>` has a
program that does all this on a job that hangs.

## With NCCL

NCCL's calls return before anything has moved. They put a *kernel*, a program for the GPU, on a
*stream*, a queue of the GPU, and `wait()` makes another stream wait, not Python, which goes on to
queue more. So a hang is seen late and elsewhere. Python stops where it needs a number from the GPU,
at `loss.item()` or `synchronize()`. There `py-spy` finds it, any number of lines behind the
collective that hangs. Nor can that collective's line raise an error: it has returned.

Instead a thread of PyTorch's, the *watchdog*, looks after each collective. At the time-out (10
minutes, if nothing else was set) it prints what it found and ends the process. From one such
job ([NVIDIA/nccl 1409](https://github.com/NVIDIA/nccl/issues/1409), August 2024):

```text
[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST,
    NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE,
    NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds before timing
    out.
```

Read it as the table above: one number, two calls. So these ranks had parted: look at program, data
and versions before you look at the network. Other lines tell the last collective that was *queued*,
and the program's line or `Stack trace of the failed collective not found, potentially because
FlightRecorder is disabled`. Where the recorder is on, each rank's record can be in a file after the
time-out (`TORCH_NCCL_DUMP_ON_TIMEOUT`), and [PyTorch's
tutorial](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) has a script
that compares them.

Meta found over 60 % of such time-outs to come from the CPU side, mostly from ranks that part ways
([PyTorch's blog][blog], March 2026): mistakes like those above. One more is of NCCL alone. There
PyTorch makes a barrier of an all-reduce on a GPU, and a process that has not said which GPU is its
own may take another's. Pass `device_ids=[local_rank]` to `dist.barrier`, or `device_id` to
`init_process_group`.

[blog]:
https://pytorch.org/blog/flight-recorder-a-new-lens-for-understanding-nccl-watchdog-timeouts/

## What to take along

- A collective is who has what before and after. What it sends depends on the backend: count.
- For a metric, add up sums and counts. For predictions, know the order of the samples. To stop,
  agree.
- Every rank must make the same calls in the same order with the same shapes. One that does not
  shows up as a time-out somewhere else, a process that ends, or a wrong number.
- At a hang, ask every rank for its last collective, and those behind for their stack.

## Exercises

**The lab.** Start and end a job with the right collectives, counted in bytes. {doc}`It is checked
</labs>` on 1, 2, 3 and 4 ranks.

```console
$ python -m microddp.labs start 07
```

1. Let rank 1 sleep for two seconds before an all-reduce in a group with a time-out of one. What
   do the others see, and what does rank 1 see?

   <details class="solution"><summary>Solution</summary>

   After one second the others raise an error: whoever waits cannot tell late from absent. Rank 1
   comes after two, to a group that was given up. With gloo it reads `Connection closed by peer`,
   "typically caused by a remote worker crashing". But none has crashed: the rank that is late is
   told that the fault is another's. Of such errors, look for the one that was raised first, and for
   the rank that did not raise it.

   </details>

2. Replace the maximum in the early stop by a vote of the majority. Which operation does it take?
   What does it do with two ranks?

   <details class="solution"><summary>Solution</summary>

   Add the flags up, and stop if `2 * flag.item() > n`. All ranks read the same sum, so all decide
   alike. More than half of two ranks is both, so with two the vote is the minimum.

   </details>
"""

# %%
drawn.close()
comms.close()
