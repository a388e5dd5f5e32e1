"""Lab 04: an all-reduce that starts inside backward."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from microddp.comms import name_ranks
from microddp.labs.engine.bench import Bench, Seen
from microddp.labs.engine.lab import Lab

LAB = Lab(
    "lab04_hooks",
    "an all-reduce that starts inside backward",
    "04_hooks",
    ["OverlappedGradients.__init__", "OverlappedGradients._ready", "OverlappedGradients.finish"],
    [
        "Register `self._ready` on each of `model.parameters()` that has `requires_grad`. That "
        "list has every parameter once, however often it is used.",
        "In `_ready`, divide `parameter.grad` by the number of ranks, in place. Then start its "
        "all-reduce with `async_op=True`, and append what that returns to a list.",
        "In `finish`, call `wait()` on all that is in the list, and empty it.",
    ],
)
CHAPTER = "An all-reduce inside backward"
HELD = 3.0  # seconds after which a rank that is not past its backward must be waiting for another
PAUSE = 0.2  # seconds for a rank to return from finish(), if it does not wait there
LAYERS, BACKWARD, MESSAGE = 8, 0.04, 0.03  # seconds of a layer, and of its gradient on the link
# A step may be disturbed. One that hides nothing hides nothing in any.
TRIES, LEAST = 3, 1 / 3


def chain(rank: int = 0) -> nn.Module:
    """A model whose gradients all differ in size, with weights of a rank's own."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3))


class Tied(nn.Module):
    """A weight that is used twice, one that is frozen, and one that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = (nn.Linear(4, 4, bias=i == 0) for i in range(3))
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.spare = nn.Parameter(torch.zeros(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.frozen(self.first(x)))
        return y


def loss(model: nn.Module, bench: Bench, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    """Of a rank's own samples; by default this one's."""
    dtype = next(model.parameters()).dtype
    x = bench.values(32, rank, seed).view(8, 4).to(dtype) / 10
    y: torch.Tensor = model(x).square().mean()
    return y


def each_ranks(make: Callable[[int], nn.Module], bench: Bench, seed: int = 0) -> torch.Tensor:
    """The gradients that each rank has of its own, one rank's in each row."""
    models = [make(rank) for rank in range(bench.n)]
    for rank, model in enumerate(models):
        loss(model, bench, rank, seed).backward()  # type: ignore[no-untyped-call]
    return torch.stack([flat(model) for model in models])


def flat(model: nn.Module) -> torch.Tensor:
    """A model's gradients side by side."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def averaged(bench: Bench, model: nn.Module, each: torch.Tensor, step: str = "") -> None:
    """Go on if a model's gradients are the mean of what each rank has, one rank's in each row."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    parts = torch.split(each, [gradient.numel() for _, gradient in named], dim=1)
    for (name, gradient), part in reversed(list(zip(named, parts, strict=True))):
        own, mean = part[bench.rank], part.mean(0)
        mistakes = {
            "That is the sum: divide by the number of ranks.": part.sum(0),
            "That is this rank's own gradient: the mean was not written to .grad.": own,
            "That is this rank's own gradient, divided. Either it was not added up, or it was "
            "taken before wait() returned: wait first.": own / bench.n,
            "That is divided twice by the number of ranks.": mean / bench.n,
        }
        got = gradient.flatten().double()
        what = f"the gradient of {name}{step}"
        bench.near(got, mean, what, mistakes, rtol=1e-4, atol=1e-5)
    bench.same(f"the gradients' bits{step}", flat(model), "Each rank must add in the same order.")


class Ready:
    """Notes when gradients are ready, by hooks. Made before others, its hooks are called first.

    Attributes:
        times: of the gradients' parameters, as they came; nanoseconds since 1970.
    """

    def __init__(self, model: nn.Module) -> None:
        self.times: dict[torch.Tensor, int] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: torch.Tensor) -> None:
        self.times[parameter] = time.time_ns()


def with_one_late(bench: Bench, backward: Callable[[], object], finish: Callable[[], None]) -> None:
    """A step in which the last rank begins its backward when all others are past theirs.

    Raises:
        Wrong: a rank waits for the last one inside backward, or returns from ``finish()`` before
            the last one's backward has begun.
    """
    store = dist.distributed_c10d._get_default_store()
    others = [f"rank {rank} is past backward" for rank in range(bench.n - 1)]
    if bench.rank == bench.n - 1:
        end = time.monotonic() + HELD
        while not store.check(others) and time.monotonic() < end:
            time.sleep(0.005)
        inside = [rank for rank, key in enumerate(others) if not store.check([key])]
        bench.expect(
            not inside,
            f"the others past backward before rank {bench.rank} begins its own",
            f"{name_ranks(inside)} still inside after {HELD:g} s",
            "A hook waits for the other ranks, and backward with it. Start the all-reduce with "
            "async_op=True, and wait in finish().",
        )
        time.sleep(PAUSE)
        store.set("the last rank begins", "")
        backward()
        finish()
    else:
        backward()
        store.set(others[bench.rank], "")
        finish()
        bench.expect(
            store.check(["the last rank begins"]),
            f"finish() to wait for rank {bench.n - 1}, which has not begun its backward",
            "finish() returned",
            "finish() must call wait() on what each all-reduce returned. Until then .grad is not "
            "the mean.",
        )


class LargeFirst(nn.Module):
    """A gradient of 8 MiB that is ready first, and a small one that comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(1, 1), nn.Linear(1, 2 << 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.large(self.small(x))
        return y


def waits_for_all(bench: Bench, model: LargeFirst, finish: Callable[[], None]) -> None:
    """Go on if ``finish()`` waits for what was sent first, too, which is through last.

    Raises:
        Wrong: the large gradient is not the mean when ``finish()`` returns.
    """
    with torch.no_grad():
        model.small.weight.fill_(1.0)
        model.small.bias.fill_(0.0)
    # The gradient of each large weight is what goes in, this rank's number plus 1.
    model(torch.tensor([bench.rank + 1.0])).sum().backward()
    finish()
    gradient = model.large.weight.grad
    own, mean = bench.rank + 1.0, (bench.n + 1) / 2
    if gradient is None or any(gradient.eq(x).all() for x in (own, mean * bench.n, mean / bench.n)):
        return  # what is wrong with all values alike, the means will show
    wrong = int((gradient != mean).sum())
    bench.expect(
        wrong == 0,
        f"a mean of {mean:g} in all {2 << 20} values of a large gradient, sent before a small one",
        f"others in {wrong} of them",
        "finish() returned before the large one was through. Wait for every all-reduce, not for "
        "the last: one that was begun later may be through earlier.",
    )


def held(hooks: object) -> dict[str, int]:
    """How much is in the lists, dicts and sets that an object has."""
    kept = getattr(hooks, "__dict__", {}).items()
    return {name: len(what) for name, what in kept if isinstance(what, list | dict | set | deque)}


def emptied(bench: Bench, after_steps: Sequence[dict[str, int]]) -> None:
    """Go on if nothing that an object holds is more after the last step than after the first."""
    first, last = after_steps[0], after_steps[-1]
    for name, count in last.items():
        bench.expect(
            count <= first.get(name, count),
            f"as much in self.{name} after step {len(after_steps)} as after step 1: "
            f"{first.get(name)}",
            count,
            f"What is over stays in self.{name}, more with each step: empty it in finish().",
        )


@LAB.check("each all-reduce begins when its gradient is ready", read=CHAPTER)
def moment(bench: Bench) -> None:
    model = chain()
    ready = Ready(model)
    hooks = bench.work.OverlappedGradients(model, bench.comms)
    tensor_hooks = any(p._backward_hooks for p in model.parameters())
    with bench.seen() as seen:
        loss(model, bench).backward()  # type: ignore[no-untyped-call]
        over = time.time_ns()
        hooks.finish()
    begun = [call.created for call in seen.collectives]
    came = list(ready.times.values())
    count = len(came)
    late = sum(created > over for created in begun)
    bench.expect(
        not late,
        f"{count} all-reduces that begin inside backward",
        f"{len(begun)}, of which {late} began after it",
        "finish() starts them, when nothing is left to hide behind. Start each in the hook.",
    )
    bench.expect(
        len(begun) == count,
        f"{count} all-reduces, one for each gradient",
        len(begun),
        ""
        if begun
        else "No hook was called, or it started no all-reduce: register self._ready in __init__.",
    )
    early = sum(b < t for b, t in zip(begun, came, strict=True))
    mistake = "It began before the gradient was in .grad."
    if tensor_hooks:
        mistake = "A tensor hook is called with what is about to be added to .grad. To have the "
        mistake += "mean added, it would have to wait for the other ranks."
    bench.expect(
        not early,
        "each all-reduce to begin when its gradient is in .grad",
        f"{early} of {count} that began earlier",
        f"{mistake} Use register_post_accumulate_grad_hook.",
    )
    waits = sum(b > t for b, t in zip(begun, came[1:], strict=False))
    bench.expect(
        not waits,
        "each all-reduce to begin before the next gradient is ready",
        f"{waits} of {count} that began later",
        "Start it in the hook of its own gradient.",
    )
    nbytes, gradients = [call.nbytes for call in seen.collectives], [p.nbytes for p in ready.times]
    bench.expect(
        nbytes == gradients,
        f"all-reduces of the gradients' bytes, {gradients}",
        nbytes,
        "Reduce parameter.grad itself, as it is.",
    )


@LAB.check("backward waits for no other rank, finish() for all", read=CHAPTER, ranks=(2, 3, 4))
def one_late(bench: Bench) -> None:
    model = chain()
    hooks = bench.work.OverlappedGradients(model, bench.comms)
    with_one_late(bench, loss(model, bench).backward, hooks.finish)


@LAB.check("finish() waits for every all-reduce", read=CHAPTER, ranks=(2, 3, 4))
def all_through(bench: Bench) -> None:
    model = LargeFirst()
    hooks = bench.work.OverlappedGradients(model, bench.comms)
    waits_for_all(bench, model, hooks.finish)


@LAB.check("every gradient is the mean over all ranks", read=CHAPTER)
def means(bench: Bench) -> None:
    each = each_ranks(chain, bench)
    model = chain()
    hooks = bench.work.OverlappedGradients(model, bench.comms)
    weights = chain(bench.rank).state_dict()  # so that it is seen if somebody averages them
    model.load_state_dict(weights)
    loss(model, bench).backward()  # type: ignore[no-untyped-call]
    hooks.finish()
    bench.expect(
        all(torch.equal(value, weights[name]) for name, value in model.state_dict().items()),
        "parameters that stay as they are",
        "other ones",
        "A post-accumulate hook is given the parameter. What has to be averaged is parameter.grad.",
    )
    averaged(bench, model, each)


def three_steps(
    bench: Bench,
    make: Callable[[], nn.Module],
    watch: Callable[[nn.Module], Any],
    sent: Callable[[str, Seen], None],
) -> None:
    """Take three steps with the same hooks, the second without forgetting the first's gradients.

    Args:
        bench: the ranks.
        make: a model, the same on every rank.
        watch: gives a model the reader's hooks, and returns what has ``finish()``.
        sent: expects something of what a step sent, whose name it gets: ``"step 1"``.

    Raises:
        Wrong: the gradients are not the mean, or the hooks hold more after the last step.
    """
    model = make()
    hooks, total, after_steps = watch(model), torch.zeros(()), []
    for step, zero in enumerate((True, False, True)):
        if zero:
            model.zero_grad(set_to_none=step == 0)
        with bench.seen() as seen:
            loss(model, bench, seed=step).backward()  # type: ignore[no-untyped-call]
            hooks.finish()
        name = f"step {step + 1}"
        sent(name, seen)
        new = each_ranks(lambda _: make(), bench, step)
        total = new if zero else total + new
        averaged(bench, model, total, f" in {name}" + ("" if zero else ", added to step 1's"))
        after_steps.append(held(hooks))
    emptied(bench, after_steps)


@LAB.check("three steps, one after the other", read=CHAPTER)
def steps(bench: Bench) -> None:
    count = len(list(chain().parameters()))

    def sent(step: str, seen: Seen) -> None:
        bench.expect(
            len(seen.collectives) == count,
            f"{count} all-reduces in {step}",
            len(seen.collectives),
            "finish() must leave everything as it was before the first backward.",
        )

    three_steps(
        bench, chain, lambda model: bench.work.OverlappedGradients(model, bench.comms), sent
    )


@LAB.check("parameters that are used twice, frozen or not used", read="The order")
def tied(bench: Bench) -> None:
    model = Tied()
    hooks = bench.work.OverlappedGradients(model, bench.comms)
    with bench.seen() as seen:
        loss(model, bench).backward()  # type: ignore[no-untyped-call]
        hooks.finish()
    nbytes = [call.nbytes for call in seen.collectives]
    bench.expect(
        sorted(nbytes) == [16, 64],
        "two all-reduces: of a bias of 16 bytes, and of a weight of 64 that is used twice",
        f"all-reduces of {nbytes} bytes",
        "A parameter that is used twice has one gradient, and needs one hook: take "
        "model.parameters(), which has it once."
        if nbytes.count(64) > 1
        else "",
    )
    averaged(bench, model, each_ranks(lambda _: Tied(), bench))


def slow(weights: nn.Module) -> torch.Tensor:
    """A loss whose backward takes a known time for each weight."""
    x = torch.zeros((), requires_grad=True)
    for weight in weights.parameters():
        x = x + weight.sum()
        x.register_hook(lambda _: time.sleep(BACKWARD))  # type: ignore[no-untyped-call]
    return x


@LAB.check(
    "most of the communication is hidden", read="What it looks like", ranks=(2,), link="200mbit"
)
def hidden(bench: Bench) -> None:
    assert bench.comms.box is not None
    # With two ranks, each sends as many bytes as a gradient has.
    size = int(MESSAGE / bench.comms.box.seconds_per_byte) // 4
    model = nn.ParameterList([torch.zeros(size) for _ in range(LAYERS)])
    hooks = bench.work.OverlappedGradients(model, bench.comms)
    travels, shares = LAYERS * MESSAGE, [0.0]
    while len(shares) <= TRIES and shares[-1] <= LEAST:
        model.zero_grad()
        output = slow(model)
        bench.comms.barrier()
        began = time.monotonic()
        output.backward()  # type: ignore[no-untyped-call]
        hooks.finish()
        exposed = time.monotonic() - began - LAYERS * BACKWARD
        shares.append(1 - max(bench.comms.all_gather_data(exposed)) / travels)
    bench.expect(
        shares[-1] > LEAST,
        f"of {travels * 1e3:.0f} ms on the link more than a third hidden behind a backward of "
        f"{LAYERS * BACKWARD * 1e3:.0f} ms",
        f"{max(shares):.0%}",
        "The rest comes after backward, or makes it longer: start each all-reduce in its hook, and "
        "wait in finish() only.",
    )
