"""Lab 04: an all-reduce that starts inside backward."""

from __future__ import annotations

import time

import torch
from torch import nn

from microddp.labs.engine import overlap
from microddp.labs.engine.bench import Bench, Seen
from microddp.labs.engine.lab import SEVERAL, Lab

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
LAYERS, BACKWARD, MESSAGE = 8, 0.04, 0.03  # seconds of a layer, and of its gradient on the link
# A step may be disturbed. One that hides nothing hides nothing in any.
TRIES, LEAST = 3, 1 / 3


def chain(rank: int = 0) -> nn.Module:
    """Return a model whose gradients all differ in size."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3))


class Tied(nn.Module):
    """A model with a weight that is used twice, a frozen one, and one that is not used."""

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


def hooks(bench: Bench) -> overlap.Hooks:
    """Return what gives a model the reader's hooks."""
    return lambda model: bench.work.OverlappedGradients(model, bench.comms)


@LAB.check("each all-reduce begins when its gradient is ready", read=CHAPTER, ranks=SEVERAL)
def moment(bench: Bench) -> None:
    model = chain()
    step = overlap.Watched(bench, model, hooks(bench))
    tensor_hooks = any(p._backward_hooks for p in model.parameters())
    begun, came, late = step.begun, list(step.ready.values()), step.late
    count = len(came)
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
    sizes = [p.nbytes for p in step.ready]
    bench.expect(
        step.seen.sizes == sizes,
        f"all-reduces of the gradients' bytes, {sizes}",
        step.seen.sizes,
        "Reduce parameter.grad itself, as it is.",
    )


@LAB.check("backward waits for no other rank, finish() for all", read=CHAPTER, ranks=SEVERAL)
def one_late(bench: Bench) -> None:
    overlap.expect_only_finish_waits(bench, chain(), hooks(bench))


@LAB.check("finish() waits for every all-reduce", read=CHAPTER, ranks=SEVERAL)
def all_through(bench: Bench) -> None:
    overlap.expect_waits_for_all(bench, chain(), hooks(bench))


@LAB.check("every gradient is the mean over all ranks", read=CHAPTER)
def means(bench: Bench) -> None:
    each = overlap.each_ranks(chain, bench)
    model = chain()
    reader = hooks(bench)(model)
    weights = chain(bench.rank).state_dict()  # so that it is seen if somebody averages them
    model.load_state_dict(weights)
    overlap.loss(model, bench).backward()
    reader.finish()
    bench.expect(
        all(torch.equal(value, weights[name]) for name, value in model.state_dict().items()),
        "parameters that stay as they are",
        "other ones",
        "A post-accumulate hook is given the parameter. What has to be averaged is parameter.grad.",
    )
    overlap.expect_means(bench, model, each)


@LAB.check("three steps, one after the other", read=CHAPTER)
def steps(bench: Bench) -> None:
    count = len(list(chain().parameters()))

    def sent(step: str, seen: Seen) -> None:
        bench.expect(
            len(seen.collectives) == count or (bench.n == 1 and not seen.collectives),
            f"{count} all-reduces in {step}",
            len(seen.collectives),
            "finish() must leave everything as it was before the first backward.",
        )

    overlap.expect_three_steps(bench, chain, hooks(bench), sent)


@LAB.check("parameters that are used twice, frozen or not used", read="The order")
def tied(bench: Bench) -> None:
    model = Tied()
    nbytes = overlap.Watched(bench, model, hooks(bench)).seen.sizes
    bench.expect(
        sorted(nbytes) == [16, 64] or (bench.n == 1 and not nbytes),
        "two all-reduces: of a bias of 16 bytes, and of a weight of 64 that is used twice",
        f"all-reduces of {nbytes} bytes",
        "A parameter that is used twice has one gradient, and needs one hook: take "
        "model.parameters(), which has it once."
        if nbytes.count(64) > 1
        else "",
    )
    overlap.expect_means(bench, model, overlap.each_ranks(lambda _: Tied(), bench))
    reader, model.spare.grad = hooks(bench)(model), torch.ones(9)
    overlap.loss(model, bench).backward()
    reader.finish()
    bench.expect(
        bool((model.spare.grad == 1).all()),
        "a gradient of an earlier step that stays as it is, where this backward brings none",
        f"it divided by {(1 / model.spare.grad[0]).item():g}",
        "Divide in the hook, what has just come. In finish() a gradient may be an older one.",
    )


def slow(weights: nn.Module) -> torch.Tensor:
    """Return a loss whose backward takes a known time for each weight."""
    x = torch.zeros((), requires_grad=True)
    for weight in weights.parameters():
        x = x + weight.sum()
        x.register_hook(lambda _: time.sleep(BACKWARD))
    return x


@LAB.check(
    "more than a third of the communication is hidden",
    read="What it looks like",
    ranks=(2,),
    link="200mbit",
)
def hidden(bench: Bench) -> None:
    assert bench.comms.box is not None
    # With two ranks, each sends as many bytes as a gradient has.
    size = int(MESSAGE / bench.comms.box.seconds_per_byte) // 4
    model = nn.ParameterList([torch.zeros(size) for _ in range(LAYERS)])
    reader = hooks(bench)(model)
    travels, shares = LAYERS * MESSAGE, [0.0]
    while len(shares) <= TRIES and shares[-1] <= LEAST:
        model.zero_grad()
        output = slow(model)
        bench.comms.barrier()
        began = time.monotonic()
        output.backward()
        reader.finish()
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
