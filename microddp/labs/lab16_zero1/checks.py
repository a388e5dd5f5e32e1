"""Lab 16: an n-th of the optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import SEVERAL, Lab
from microddp.labs.engine.training import Batch, drawn, flat, together, train_alone

LAB = Lab(
    "lab16_zero1",
    "an n-th of the optimizer",
    "16_sharding",
    ["shard", "update"],
    [
        "Lay all parameters in one flat tensor, as chapter 05 does with gradients. Which values of "
        "it should this rank's optimizer update? What does it need for that, and what do the "
        "others need of it afterwards?",
        "`parameters_to_vector(...).detach()`, filled with zeros (`pad`) until n divides its "
        "length; `vector_to_parameters` makes the parameters views of it. "
        "`nn.Parameter(unsharded.tensor_split(n)[rank])` is in the same memory.",
        "In `update`: the gradients as one flat tensor, as long as `unsharded`; "
        "`ring_reduce_scatter(gradients, comms, 'mean')` returns this rank's shard, which becomes "
        "`shard.grad`; then the optimizer's step; then `ring_all_gather(unsharded, comms)`.",
    ],
)
ADAM = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)
STAGE, SENT = "Stage 1: an n-th of the optimizer", "What was sent, what was kept"
SUMS = "A sum was taken for a mean: with Adam that hardly shows, with SGD it does."


def build() -> nn.Module:
    """Return a model of 77 values, which 2, 3 and 4 do not divide."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def batch(rank: int, step: int) -> Batch:
    rows = drawn(4, 10, seed=100 * step + rank)
    return rows[:, :7], rows[:, 7:]


def trained(bench: Bench, make: Any, steps: int) -> tuple[nn.Module, Any]:
    """Return a model that the reader's functions trained, and what ``shard`` returned."""
    model = build()
    bench.doing = "in shard"
    sharded = bench.work.shard(model, bench.comms, make)
    bench.doing = "in update"
    for step in range(steps):
        inputs, targets = batch(bench.rank, step)
        mse_loss(model(inputs), targets).backward()
        bench.work.update(sharded, bench.comms)
    return model, sharded


def by_one(bench: Bench, make: Any, steps: int, scale: float = 1.0) -> torch.Tensor:
    """Return the weights of one process that has all ranks' batches; ``scale`` times the loss."""
    model = build()
    batches = [together([batch(rank, step) for rank in range(bench.n)]) for step in range(steps)]
    return train_alone(
        model, make(model.parameters()), batches, lambda x, y: scale * mse_loss(x, y)
    )


@LAB.check("one step of SGD, as by one process", read=STAGE)
def one_step(bench: Bench) -> None:
    start = flat(build().parameters())
    model, _ = trained(bench, SGD, 1)
    right = by_one(bench, SGD, 1)
    got = flat(model.parameters())
    part = -(-len(start) // bench.n)
    own = slice(bench.rank * part, (bench.rank + 1) * part)
    only_mine = start.clone()
    only_mine[own] = right[own]
    mistakes = {
        "Nothing was updated. Is `shard` in the memory of `unsharded`, and are the parameters "
        "views of it?": start,
        SUMS: by_one(bench, SGD, 1, float(bench.n)),
        "Only this rank's shard has changed: the others' shards were not brought here.": only_mine,
    }
    bench.near(got, right, "the model's weights", mistakes, rtol=1e-4, atol=1e-6)


@LAB.check("ten steps of AdamW, as by one process", read=STAGE)
def ten_steps(bench: Bench) -> None:
    model, _ = trained(bench, ADAM, 10)
    right = by_one(bench, ADAM, 10)
    bench.near(flat(model.parameters()), right, "the model's weights", rtol=1e-3, atol=1e-4)
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    bench.expect(
        not left,
        "no gradient to be left after update",
        f"one of {', '.join(left)}",
        "The next backward would add to it: set each parameter's `.grad` to None.",
    )


@LAB.check("an n-th of what Adam keeps", read=SENT)
def kept(bench: Bench) -> None:
    model, sharded = trained(bench, ADAM, 2)
    count = sum(p.numel() for p in model.parameters())
    state = sharded.optimizer.state.values()
    moments = [value for each in state for value in each.values() if value.dim()]
    most = 2 * -(-count // bench.n)
    values = sum(moment.numel() for moment in moments)
    bench.expect(
        2 * (count // bench.n) <= values <= most,
        f"{most} values of Adam's two means on each of {bench.n} ranks, for {count} parameters",
        values,
        "The optimizer has all parameters: give it this rank's shard alone."
        if values > most
        else "",
    )


@LAB.check(
    "no more is sent than an all-reduce sends",
    read=SENT,
    ranks=SEVERAL,
)
def sent(bench: Bench) -> None:
    model = build()
    sharded = bench.work.shard(model, bench.comms, ADAM)
    inputs, targets = batch(bench.rank, 0)
    mse_loss(model(inputs), targets).backward()
    bench.comms.barrier()
    with bench.seen() as seen:
        bench.work.update(sharded, bench.comms)
    mistake = "Take the ring's two halves: messages are counted here, and not what PyTorch sends."
    if any("all_reduce" in call.name for call in seen.collectives):
        mistake = (
            "An all-reduce of gradients and a gather of parameters together send half as much "
            "again."
        )
    bench.only_messages(seen, "the two halves of a ring", mistake)
    part = 4 * -(-sum(p.numel() for p in model.parameters()) // bench.n)
    most = 2 * (bench.n - 1) * part
    bench.expect(
        seen.sent_bytes <= most,
        f"at most {most} bytes from each rank, (n-1)/n of the parameters twice",
        seen.sent_bytes,
        "All-reduced gradients are whole on every rank, which needs its shard only: a "
        "reduce-scatter brings it that.",
    )


@LAB.check("the same bits on every rank", read=STAGE, ranks=SEVERAL)
def bits(bench: Bench) -> None:
    model, _ = trained(bench, ADAM, 5)
    bench.same(
        "the model's weights after 5 steps",
        flat(model.parameters()),
        "Each shard is updated on one rank, and all others take it from there.",
    )
