"""Checks, for labs 04 and 05, of hooks that average gradients while backward runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from microddp.comms import name_ranks
from microddp.labs.engine.bench import Bench, Seen

HELD = 3.0  # seconds after which a rank that is not past its backward must be waiting for another
PAUSE = 0.2  # seconds for a rank to return from finish(), if it does not wait there
Hooks = Callable[[nn.Module], Any]  # gives a model the reader's hooks; returns what has finish()


def loss(model: nn.Module, bench: Bench, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    """Return the loss of a rank's samples; this rank's by default."""
    dtype = next(model.parameters()).dtype
    x = bench.values(32, rank, seed).view(8, 4).to(dtype) / 10
    y: torch.Tensor = model(x).square().mean()
    return y


def gradients(model: nn.Module) -> torch.Tensor:
    """Return a model's gradients as one vector."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def each_ranks(make: Callable[[int], nn.Module], bench: Bench, seed: int = 0) -> torch.Tensor:
    """Return every rank's own gradients, a rank's in each row."""
    models = [make(rank) for rank in range(bench.n)]
    for rank, model in enumerate(models):
        loss(model, bench, rank, seed).backward()
    return torch.stack([gradients(model) for model in models])


def expect_means(bench: Bench, model: nn.Module, each: torch.Tensor, step: str = "") -> None:
    """Expect that a model's gradients are the mean over the rows of ``each``."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    sizes = [gradient.numel() for _, gradient in named]
    bench.expect(
        sum(sizes) == each.shape[1],
        f"gradients of {each.shape[1]} values{step}",
        f"{sum(sizes)} values, of {', '.join(name for name, _ in named) or 'no parameter'}",
        "A parameter that got no gradient keeps None."
        if sum(sizes) > each.shape[1]
        else "A parameter has lost its gradient.",
    )
    parts = torch.split(each, sizes, dim=1)
    for (name, gradient), part in reversed(list(zip(named, parts, strict=True))):
        own, mean = part[bench.rank], part.mean(0)
        mistakes = {
            "That is the sum: divide by the number of ranks.": part.sum(0),
            "That is this rank's own gradient: the mean was not written to .grad.": own,
            "That is this rank's own gradient, divided. Either it was not added up, or it was "
            "taken before wait() returned: wait first.": own / bench.n,
            "That is divided twice by the number of ranks.": mean / bench.n,
        }
        got, what = gradient.flatten().double(), f"the gradient of {name}{step}"
        bench.near(got, mean, what, mistakes, rtol=1e-4, atol=1e-5)
    mistake = "Each rank must add in the same order."
    bench.same(f"the gradients' bits{step}", gradients(model), mistake)


class Watched:
    """A step with the reader's hooks, and the times at which gradients were ready in it.

    Attributes:
        ready: by parameter, in order, nanoseconds since 1970.
        over: end of backward, nanoseconds since 1970.
        seen: what this rank sent.
        begun: start of each collective, nanoseconds since 1970.
        late: number of collectives that began after backward.
    """

    def __init__(self, bench: Bench, model: nn.Module, hooks: Hooks) -> None:
        self.ready: dict[torch.Tensor, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:  # before the reader's hooks, to be called first
                parameter.register_post_accumulate_grad_hook(self._note)
        reader = hooks(model)
        with bench.seen() as self.seen:
            loss(model, bench).backward()
            self.over = time.time_ns()
            reader.finish()
        self.begun = [call.created for call in self.seen.collectives]
        self.late = sum(created > self.over for created in self.begun)

    def _note(self, parameter: torch.Tensor) -> None:
        self.ready[parameter] = time.time_ns()


def expect_only_finish_waits(bench: Bench, model: nn.Module, hooks: Hooks) -> None:
    """Take a step in which the last rank begins its backward when all others are past theirs.

    Raises:
        Wrong: a rank waits for the last one inside backward, or returns from ``finish()`` before
            the last one's backward has begun.
    """
    reader, output = hooks(model), loss(model, bench)
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
        output.backward()
        reader.finish()
    else:
        output.backward()
        store.set(others[bench.rank], "")
        reader.finish()
        bench.expect(
            store.check(["the last rank begins"]),
            f"finish() to wait for rank {bench.n - 1}, which has not begun its backward",
            "finish() returned",
            "finish() must call wait() on what each all-reduce returned. Until then .grad is not "
            "the mean.",
        )


def expect_waits_for_all(bench: Bench, model: nn.Module, hooks: Hooks) -> None:
    """Expect that ``finish()`` waits for every all-reduce, also for those that were begun early.

    They may be through by chance when the last one is, so what it waits for is counted.
    """
    through: dict[int, dist.Work] = {}  # kept, so that no other one gets its id
    with ExitStack() as stack:
        for name in ("wait", "is_completed", "get_future"):
            method = getattr(dist.Work, name)
            stack.enter_context(patch.object(dist.Work, name, _noted(method, through)))
        begun = len(Watched(bench, model, hooks).begun)
    # None at all: it waits in a way that Python does not see, as functional collectives do.
    bench.expect(
        not through or len(through) >= begun,
        f"finish() to wait for {begun} all-reduces",
        f"it waits for {len(through)}",
        "Wait for every all-reduce, not for the last: one that was begun later may be through "
        "earlier.",
    )


def _noted(method: Callable[..., Any], through: dict[int, dist.Work]) -> Callable[..., Any]:
    def noted(work: dist.Work, *args: Any, **options: Any) -> Any:
        if result := method(work, *args, **options):
            through[id(work)] = work
        return result

    return noted


def _held(hooks: object) -> dict[str, int]:
    """Return the lengths of an object's lists, dicts and sets, by attribute."""
    kept = getattr(hooks, "__dict__", {}).items()
    return {name: len(what) for name, what in kept if isinstance(what, list | dict | set | deque)}


def expect_three_steps(
    bench: Bench, make: Callable[[], nn.Module], hooks: Hooks, sent: Callable[[str, Seen], None]
) -> None:
    """Take three steps with the same hooks, the second without zeroing the first's gradients.

    Args:
        bench: the ranks.
        make: makes a model, the same on every rank.
        hooks: the reader's.
        sent: called with a step's name, ``"step 1"``, and what this rank sent in it.

    Raises:
        Wrong: the gradients are not the mean, or the hooks hold more after the last step.
    """
    model = make()
    reader, total, after_steps = hooks(model), torch.zeros(()), []
    for step, zero in enumerate((True, False, True)):
        if zero:
            model.zero_grad(set_to_none=step == 0)
        with bench.seen() as seen:
            loss(model, bench, seed=step).backward()
            reader.finish()
        name = f"step {step + 1}"
        sent(name, seen)
        new = each_ranks(lambda _: make(), bench, step)
        total = new if zero else total + new
        expect_means(bench, model, total, f" in {name}" + ("" if zero else ", added to step 1's"))
        after_steps.append(_held(reader))
    first, *_, last = after_steps
    for name, count in last.items():
        bench.expect(
            count <= first.get(name, count),
            f"as much in self.{name} after step 3 as after step 1: {first.get(name)}",
            count,
            f"What is over stays in self.{name}, more with each step: empty it in finish().",
        )
