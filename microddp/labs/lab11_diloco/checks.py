"""Lab 11: DiLoCo's outer step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import vector_to_parameters

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import SEVERAL, Lab
from microddp.labs.engine.training import Batch, drawn, flat, together, train_alone

LAB = Lab(
    "lab11_diloco",
    "DiLoCo's outer step",
    "11_local_sgd",
    ["outer_step", "train"],
    [
        "A meeting: the pseudo-gradient, one all-reduce of it, the velocity, the shared weights, "
        "the model. Only the first line has anything of this rank alone.",
        "With pseudo-gradient g: `velocity` becomes `momentum * velocity + g`, in place. Then "
        "`shared` goes down by `lr * (g + momentum * velocity)`, with the new velocity.",
        "`train` clones the weights once, before the first step, and counts steps from 1. Let "
        "`vector_to_parameters` have a clone of `shared`, under `torch.no_grad()`.",
    ],
)
DILOCO = "DiLoCo"
SELDOM = "Loss by steps, by bytes, by time"
LR, MOMENTUM = 0.7, 0.9


def two(values: torch.Tensor) -> list[nn.Parameter]:
    """Return two parameters, of shapes (2, 3) and (4,), with these ten values."""
    return [nn.Parameter(values[:6].view(2, 3).clone()), nn.Parameter(values[6:].clone())]


def go(parameters: Sequence[nn.Parameter], way: torch.Tensor) -> None:
    """Add a way of ten values to the parameters, as if by training."""
    for parameter, part in zip(parameters, two(way), strict=True):
        parameter.data += part.data


@LAB.check("rate 1, no momentum: the mean of the ranks' weights", read=DILOCO)
def mean(bench: Bench) -> None:
    # 1 to 4 ranks divide 12, so that means are whole numbers.
    begin, went, last = (12 * bench.everyones(10, seed) for seed in (1, 2, 3))
    came_from, moved, mine = begin[0], went.mean(0), went[bench.rank]
    parameters, shared = two(came_from + mine), came_from.clone()
    for parameter, gradient in zip(parameters, two(last[bench.rank]), strict=True):
        parameter.grad = gradient.detach()
    bench.work.outer_step(parameters, shared, torch.zeros(10), 1.0, 0.0, bench.comms)
    mistakes = {
        "The sign is the wrong one: that is as far from where the ranks came from as the mean, but "
        "the other way. The pseudo-gradient is shared minus local.": came_from - moved,
        "The sum of what the ranks did: divide it by their number.": came_from + went.sum(0),
        "Only this rank's own way is in it: average the pseudo-gradient over the ranks.": came_from
        + mine,
        "The shared weights did not move: change the tensor in place.": came_from,
        "The mean of the weights was taken as the pseudo-gradient. It is how far the ranks went: "
        "shared minus local.": -moved,
        "The gradient of the last step was taken. The pseudo-gradient has all steps since the last "
        "meeting: shared minus local.": came_from - last.mean(0),
    }
    bench.near(shared, came_from + moved, "the shared weights", mistakes)
    bench.expect(
        not shared.requires_grad,
        "shared weights without gradient",
        "a result of autograd, which keeps the graphs of all meetings",
        "Compute the meeting under torch.no_grad().",
    )


@LAB.check("the model goes on from the shared weights, in memory of its own", read="Exercises")
def memory(bench: Bench) -> None:
    shared = bench.values(10, rank=0)
    own = shared + 12 * (bench.rank + 1)
    parameters = two(own)
    bench.work.outer_step(parameters, shared, torch.zeros(10), 0.5, 0.0, bench.comms)
    text = "The model still has this rank's own weights. It has to go on from the shared ones."
    bench.near(flat(parameters), shared, "the model's weights", {text: own})
    before = shared.clone()
    go(parameters, torch.ones(10))
    bench.expect(
        torch.equal(shared, before),
        "shared weights that stay while the model trains",
        "weights that move with the model's",
        "vector_to_parameters made the parameters views of shared, so the next pseudo-gradient "
        "would be 0. Give the model a copy: shared.clone().",
    )


@LAB.check("Nesterov momentum, as in PyTorch's SGD", read=DILOCO)
def nesterov(bench: Bench) -> None:
    shared, velocity = bench.values(10, rank=0), torch.zeros(10)
    parameters, anew = two(shared), shared.clone()
    right, plain = nn.Parameter(shared.clone()), nn.Parameter(shared.clone())
    outers = [
        torch.optim.SGD([right], LR, MOMENTUM, nesterov=True),
        torch.optim.SGD([plain], LR, MOMENTUM),
    ]
    for meeting in range(1, 5):
        ways = bench.everyones(10, seed=meeting)
        right.grad, plain.grad = -ways.mean(0), -ways.mean(0)
        for outer in outers:
            outer.step()
        anew += LR * (1 + MOMENTUM) * ways.mean(0)
        go(parameters, ways[bench.rank])
        bench.work.outer_step(parameters, shared, velocity, LR, MOMENTUM, bench.comms)
        mistakes = {
            "That is plain momentum, a step by the velocity. Nesterov's is a step by gradient + "
            "momentum * velocity, with the new velocity.": plain.detach(),
            "The velocity begins anew at each meeting: change the tensor in place, so that the "
            "next meeting finds it.": anew,
        }
        what = f"the shared weights after meeting {meeting}"
        bench.near(shared, right.detach(), what, mistakes, atol=1e-3)


@LAB.check("the same bits on every rank", read=DILOCO, ranks=SEVERAL)
def bits(bench: Bench) -> None:
    shared, velocity = bench.values(10, rank=0), torch.zeros(10)
    parameters = two(shared)
    for _ in range(3):
        go(parameters, bench.rounded(10))
        bench.work.outer_step(parameters, shared, velocity, LR, MOMENTUM, bench.comms)
    bench.same(
        "the velocity",
        velocity,
        "Each rank has a velocity of its own. Average the pseudo-gradient first, and update the "
        "velocity with the mean.",
    )
    text = "All ranks must compute the same from the same mean, in the same order."
    bench.same("the shared weights", shared, text)
    bench.same("the model's weights after a meeting", flat(parameters), text)


def tiny() -> nn.Sequential:
    """Return a model, the same one on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batches(rank: int, number: int) -> list[Batch]:
    """Return a rank's batches."""
    inputs = drawn(number, 8, 3, seed=rank, dtype=torch.float64)
    return [(x, (x * torch.tensor([1.0, -2.0, 3.0])).sum(1, keepdim=True)) for x in inputs]


@LAB.check("one all-reduce in every H steps", read=SELDOM)
def seldom(bench: Bench) -> None:
    model, begun, steps = tiny(), list[int](), 10
    nbytes = flat(model.parameters()).nbytes
    model.register_forward_pre_hook(lambda *_: begun.append(time.time_ns()))
    inner, data = torch.optim.SGD(model.parameters(), lr=0.1), batches(bench.rank, steps)
    with bench.seen() as seen:
        bench.work.train(model, inner, iter(data), 4, LR, MOMENTUM, bench.comms)
    met = [sum(at < call.created for at in begun) for call in seen.collectives]
    mistake = ""
    if not met:
        mistake = "The ranks never met."
        if seen.messages:
            mistake = "A meeting is one all-reduce of PyTorch's: messages are not counted here."
    elif set(met) >= set(range(1, steps + 1)):
        mistake = "Something was averaged in every step. Between two meetings a rank trains alone."
    elif met[0] == 0:
        mistake = "The ranks begin with the same weights: before the first step nothing is sent."
    elif set(met) == {1, 5, 9}:
        mistake = "Count the steps from 1: the first meeting is after step H."
    elif met == [4, 8, steps]:
        mistake = "Steps that follow on the last meeting need no meeting of their own."
    elif set(met) == {4, 8}:
        mistake = (
            "One all-reduce is enough, of the flat pseudo-gradient. Shared weights and velocity "
            "are the same on every rank without being sent."
        )
    kinds = sorted({f"{call.name} of {call.nbytes} bytes" for call in seen.collectives})
    got = f"{' and '.join(kinds)} after steps {', '.join(map(str, met))}" if met else "nothing"
    right = f"all_reduce of {nbytes} bytes after steps 4, 8"
    alone = bench.n == 1 and not met  # has nobody to meet
    bench.expect(alone or got == right, f"{right} of {steps}", got, mistake)


def rows(models: Sequence[nn.Module]) -> torch.Tensor:
    """Return the weights of each model as a row."""
    return torch.stack([flat(model.parameters()) for model in models])


def trained(n: int, steps: int, every: int, mistake: str = "") -> torch.Tensor:
    """Return each rank's weights after some steps as a row, right or with one of ``MISTAKES``."""
    models = [tiny() for _ in range(n)]
    inners = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    shared = nn.Parameter(rows(models))
    outer = torch.optim.SGD([shared], LR, MOMENTUM, nesterov=True)
    data = zip(*(batches(rank, steps) for rank in range(n)), strict=True)
    for step, each in enumerate(data, start=1):
        if mistake == "shared":
            shared.data = rows(models)
        for model, inner, (x, y) in zip(models, inners, each, strict=True):
            inner.zero_grad()
            mse_loss(model(x), y).backward()
            inner.step()
        if step % every:
            continue
        ways = shared.detach() - rows(models)
        shared.grad = ways.mean(0).expand_as(ways).clone()
        outer.step()
        if mistake == "velocity":
            outer.state.clear()
        for model, inner, row in zip(models, inners, shared.detach(), strict=True):
            if mistake != "model":
                vector_to_parameters(row.clone(), model.parameters())
            if mistake == "inner":
                inner.state.clear()
    return rows(models)


MISTAKES = {
    "model": "The model trains as if there were no meetings: it does not go on from the shared "
    "weights. (`model.parameters()` can be gone through once only: make a list of it.)",
    "inner": "The inner optimizer lost its state at a meeting. Only the weights are replaced.",
    "velocity": "The velocity begins anew at each meeting: make it once, before the first step.",
    "shared": "The shared weights are taken anew before each step. They are those after the last "
    "meeting: clone them once, before the first step.",
}


@LAB.check("a meeting after each step of SGD is DDP", read="Averaging weights")
def ddp(bench: Bench) -> None:
    model, steps = tiny(), 5
    data = batches(bench.rank, steps)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    bench.work.train(model, inner, iter(data), 1, 1.0, 0.0, bench.comms)
    alone = tiny()
    inner = torch.optim.SGD(alone.parameters(), lr=0.1)
    each = zip(*(batches(rank, steps) for rank in range(bench.n)), strict=True)
    right = train_alone(alone, inner, map(together, each))
    bench.near(flat(model.parameters()), right, "the weights that DDP would have")


@LAB.check("AdamW inside, Nesterov outside", read=DILOCO)
def both(bench: Bench) -> None:
    model, steps, every = tiny(), 7, 3
    inner, data = torch.optim.AdamW(model.parameters(), lr=0.05), batches(bench.rank, steps)
    bench.work.train(model, inner, iter(data), every, LR, MOMENTUM, bench.comms)
    right = trained(bench.n, steps, every)[bench.rank]
    mistakes = {
        text: trained(bench.n, steps, every, mistake)[bench.rank]
        for mistake, text in MISTAKES.items()
    }
    what = f"the weights after {steps} steps with H={every}"
    bench.near(flat(model.parameters()), right, what, mistakes)
