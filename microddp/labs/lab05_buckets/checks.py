"""Lab 05: a bucket plan, and hooks that follow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from microddp.labs.engine import overlap
from microddp.labs.engine.bench import Bench, Seen
from microddp.labs.engine.lab import SEVERAL, Lab

LAB = Lab(
    "lab05_buckets",
    "a bucket plan, and hooks that follow it",
    "05_bucketing",
    ["plan_buckets", "BucketHooks.__init__", "BucketHooks._ready", "BucketHooks.finish"],
    [
        "Plan: keep one unfinished bucket for each dtype. Append the tensor first, then compare "
        "the bucket's bytes with its cap. In the end add what is unfinished.",
        "Keep for each bucket how many gradients it misses, and how many buckets were sent. In "
        "`_ready`, count down for the parameter's bucket. Then, while the next one to be sent "
        "misses none, flatten its gradients, join them with `torch.cat`, divide and send.",
        "In `finish`, for each bucket in order: wait, then cut the flat tensor with `split` into "
        "parts of `p.numel()` values, and give each parameter its part in its shape. Then put all "
        "counters and lists back to where they were.",
    ],
)
PLAN, HOOKS = "The plan", "The hooks"
# Values of each tensor, and caps in bytes; a value has 4 bytes.
PLANS: list[tuple[list[int], tuple[int, int]]] = [
    ([10, 10, 10, 10, 10, 10], (40, 80)),
    ([10, 10, 10, 10, 10, 10], (60, 60)),
    ([5, 30, 5, 5, 5, 5], (40, 40)),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], (1, 50)),
    ([3, 4, 5], (1000, 1000)),
]
CAPS = (60, 200)


def pytorchs(tensors: Sequence[torch.Tensor], caps: tuple[int, int]) -> list[list[int]]:
    """Return the plan of PyTorch's own DDP."""
    find = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    plan: list[list[int]] = find(list(tensors), list(caps), [False] * len(tensors))[0]
    return plan


def another(sizes: Sequence[int], caps: tuple[int, int], *, before: bool) -> list[list[int]]:
    """Return a plan with a mistake: a bucket is closed only where a tensor lifts it above the cap.

    ``before``: the bucket that the tensor would lift is closed, and not the one that it has lifted.
    """
    plan: list[list[int]] = [[]]
    for i, size in enumerate(sizes):
        held = sum(sizes[j] for j in plan[-1]) + (size if before else 0)
        if plan[-1] and held > caps[min(len(plan), 2) - 1]:
            plan.append([])
        plan[-1].append(i)
    return plan


def planned(model: nn.Module) -> list[list[torch.Tensor]]:
    """Return the parameters of each bucket in PyTorch's plan."""
    parameters = list(model.parameters())[::-1]
    return [[parameters[i] for i in members] for members in pytorchs(parameters, CAPS)]


def chain() -> nn.Module:
    """Return a model with three buckets that differ in size."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(i, j) for i, j in ((4, 9), (9, 6), (6, 5), (5, 3))])


class Mixed(nn.Module):
    """A model whose layers have two dtypes in turns; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        for layer in self.layers[1::2]:
            layer.double()
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype))
        return x


class Branches(nn.Module):
    """A model of two layers, of which odd ranks compute the second one first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.order = (0, 1) if rank % 2 == 0 else (1, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = {i: self.layers[i](x) for i in self.order}
        y: torch.Tensor = results[0] + 2 * results[1]
        return y


def hooks(bench: Bench, caps: tuple[int, int] = CAPS) -> overlap.Hooks:
    """Return what gives a model the reader's hooks."""
    return lambda model: bench.work.BucketHooks(model, bench.comms, caps)


def plan_of(
    bench: Bench, tensors: Sequence[torch.Tensor], caps: tuple[int, int]
) -> list[list[int]]:
    """Return the reader's plan, which has to be a list of lists of indices."""
    got: list[list[int]] = bench.work.plan_buckets(tensors, caps)
    lists = isinstance(got, list) and all(isinstance(bucket, list) for bucket in got)
    numbers = lists and all(isinstance(i, int) for bucket in got for i in bucket)
    mistake = "Return what was planned." if got is None else "A bucket is a list of its indices."
    kind = f"{type(got).__name__} of something else" if lists else type(got).__name__
    bench.expect(numbers, "a list of lists of indices of tensors", kind, mistake)
    return got


@LAB.check("the plan is PyTorch's", read=PLAN, ranks=(1,))
def plan(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1, 100, (12,), generator=generator).tolist() for _ in range(20)]
    for counts, caps in [*PLANS, *((counts, (200, 600)) for counts in drawn)]:
        tensors = [torch.empty(count) for count in counts]
        sizes = [tensor.nbytes for tensor in tensors]
        got, right = plan_of(bench, tensors, caps), pytorchs(tensors, caps)
        last = len(tensors) - 1
        mistakes = {
            "That asks before a tensor is added whether it would exceed the cap. Add it, then ask "
            "whether the cap is reached: so a bucket may exceed it.": another(
                sizes, caps, before=True
            ),
            "A bucket that holds exactly its cap is full.": another(sizes, caps, before=False),
            "That has the first bucket's cap for all.": pytorchs(tensors, (caps[0], caps[0])),
            "That has one cap for all: the first bucket has its own.": pytorchs(
                tensors, (caps[1], caps[1])
            ),
            "That takes the last tensor first. Take them in the order given; whoever calls it has "
            "put them in reverse.": [
                [last - i for i in bucket] for bucket in pytorchs(tensors[::-1], caps)
            ],
            "What is left in the end is a bucket, too.": right[:-1],
        }
        if [] in got:
            mistakes = {"A bucket is empty: begin one only when there is a tensor for it.": got}
        bench.expect(
            got == right,
            f"{right} for {sizes} bytes and caps of {caps[0]} and {caps[1]}",
            got,
            next((mistake for mistake, wrong in mistakes.items() if got == wrong), ""),
        )


@LAB.check("the plan keeps dtypes apart", read="A published plan", ranks=(1,))
def dtypes(bench: Bench) -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    many = [torch.empty(count, dtype=kinds[count % 4]) for count in range(1, 9)]
    two = [torch.empty(2, dtype=kinds[i in (0, 4, 5, 6)]) for i in range(7)]
    two[1:4] = [torch.empty(4)] * 3
    cases = [*((many, caps) for caps in ((1, 1), (40, 40), (16, 64), (1000, 1000)))]
    for tensors, caps in [*cases, (two, (16, 32))]:
        got, right = plan_of(bench, tensors, caps), pytorchs(tensors, caps)
        mixed = any(len({tensors[i].dtype for i in bucket}) > 1 for bucket in got)
        bench.expect(
            sorted(got) == sorted(right),
            f"{sorted(right)} for caps of {caps[0]} and {caps[1]}, and tensors of "
            + ", ".join(f"{t.nbytes} bytes in {t.dtype}".replace("torch.", "") for t in tensors),
            sorted(got),
            "There are two dtypes in one bucket: joined, they would travel as the larger one."
            if mixed
            else "Another dtype does not end a bucket: each dtype has one of its own that fills, "
            "and a first one of its own.",
        )


@LAB.check("as many messages as buckets, of their bytes", read=HOOKS)
def messages(bench: Bench) -> None:
    model = chain()
    got = overlap.Watched(bench, model, hooks(bench)).seen.sizes
    right = [sum(p.nbytes for p in bucket) for bucket in planned(model)]
    parameters = list(model.parameters())
    forward = [sum(parameters[i].nbytes for i in b) for b in pytorchs(parameters, CAPS)]
    mistakes = {
        "Nothing was sent: has a hook been called, and was a bucket ever full?": [],
        "Those are the gradients one by one: wait until a bucket misses none, and send it as one "
        "tensor.": [p.nbytes for p in parameters[::-1]],
        "That is the plan of the parameters in forward order. Its first bucket would be the last "
        "to be full: reverse them.": forward,
        "The last bucket was not sent.": right[:-1],
        "Those are the buckets in reverse: that of the last layers comes first.": right[::-1],
    }
    none_needed = bench.n == 1 and not got  # its gradients are the means
    bench.expect(
        got == right or none_needed,
        f"all-reduces of {right} bytes",
        got,
        next((mistake for mistake, wrong in mistakes.items() if got == wrong), ""),
    )


@LAB.check("a bucket leaves when it and all before it are full", read=HOOKS, ranks=SEVERAL)
def moment(bench: Bench) -> None:
    model = chain()
    step, full = overlap.Watched(bench, model, hooks(bench)), 0
    ready, begun = step.ready, step.begun
    bench.expect(
        not step.late,
        f"{len(begun)} all-reduces that begin inside backward",
        f"{step.late} that began after it",
        "finish() starts them, when nothing is left to hide behind. Start each in the hook of the "
        "gradient that fills its bucket.",
    )
    for index, bucket in enumerate(planned(model)):
        full = max(full, *(ready[p] for p in bucket))
        after = min((t for t in ready.values() if t > full), default=step.over)
        bench.expect(
            full <= begun[index] <= after,
            f"bucket {index} to leave in the hook of the gradient that fills it",
            "that it left earlier" if begun[index] < full else "that it left later",
            "Some of its gradients were not ready: count what each bucket misses."
            if begun[index] < full
            else "Look in every hook which buckets can leave now.",
        )


@LAB.check("backward waits for no other rank, finish() for all", read=HOOKS, ranks=SEVERAL)
def one_late(bench: Bench) -> None:
    model = chain()
    overlap.expect_only_finish_waits(bench, model, hooks(bench))
    overlap.expect_means(bench, model, overlap.each_ranks(lambda _: chain(), bench))


@LAB.check("finish() waits for every all-reduce", read=HOOKS, ranks=SEVERAL)
def all_through(bench: Bench) -> None:
    overlap.expect_waits_for_all(bench, chain(), hooks(bench))


@LAB.check("every gradient is the mean over all ranks", read=HOOKS)
def means(bench: Bench) -> None:
    each = overlap.each_ranks(lambda _: Mixed(), bench)
    for caps in ((1, 1), (100, 100), (1000, 1000)):
        model = Mixed()
        sent = sum(overlap.Watched(bench, model, hooks(bench, caps)).seen.sizes)
        size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        none_needed = bench.n == 1 and not sent
        bench.expect(
            sent == size or none_needed,
            f"{size} bytes of gradients in float32 and float64",
            sent,
            "Each gradient travels in its own dtype: a smaller one rounds it, a larger one is "
            "more to send.",
        )
        overlap.expect_means(bench, model, each, f" with caps of {caps[0]} bytes")


@LAB.check(
    "gradients that come in another order on some ranks",
    read="Where it breaks: buckets sent as they fill",
    ranks=SEVERAL,
)
def order(bench: Bench) -> None:
    each = overlap.each_ranks(Branches, bench)
    mean = each.mean(0)
    # What comes first and what comes second, added up: on odd ranks that is the other layer.
    first, second = (
        torch.stack(
            [row.chunk(2)[place if rank % 2 else 1 - place] for rank, row in enumerate(each)]
        ).mean(0)
        for place in (0, 1)
    )
    mixed = torch.cat([first, second] if bench.rank % 2 else [second, first])
    for caps, mistake in {
        (1, 1): "Gradients of two layers were added up. A bucket that is full must wait for those "
        "before it: all ranks send the same ones in the same order.",
        (1000, 1000): "Gradients of two layers were added up. Inside a bucket they must lie in "
        "the plan's order on every rank, and not in that in which they came.",
    }.items():
        model = Branches(bench.rank)
        reader = hooks(bench, caps)(model)
        overlap.loss(model, bench).backward()
        reader.finish()
        what = f"the gradients of two layers with caps of {caps[0]} bytes"
        bench.near(overlap.gradients(model), mean, what, {mistake: mixed}, rtol=1e-4, atol=1e-5)


@LAB.check(
    "three steps, one after the other", read="Where it breaks: a bucket that is never emptied"
)
def steps(bench: Bench) -> None:
    right = [sum(p.nbytes for p in bucket) for bucket in planned(chain())]

    def sent(step: str, seen: Seen) -> None:
        got = seen.sizes
        mistake = "finish() must put counters and buckets back to where they were."
        if sum(got) > sum(right):
            mistake = "A bucket keeps what it held in the step before: empty it in finish()."
        elif not got:
            mistake = "No bucket was full: in finish(), have each one miss all its gradients again."
        none_needed = bench.n == 1 and not got
        bench.expect(
            got == right or none_needed, f"all-reduces of {right} bytes in {step}", got, mistake
        )

    overlap.expect_three_steps(bench, chain, hooks(bench), sent)
