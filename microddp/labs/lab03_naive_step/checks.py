"""Lab 03: the naive data-parallel step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss

from microddp.labs.engine import training
from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import SEVERAL, Lab

LAB = Lab(
    "lab03_naive_step",
    "the naive data-parallel step",
    "03_naive_dp",
    ["start_equal", "naive_step"],
    [
        "`model.parameters()` and `model.buffers()` are all there is of a model: broadcast each. "
        "The step is that of one device, with the gradients averaged between backward() and "
        "optimizer.step().",
        "The gradient of the whole batch is a weighted mean of the shards' gradients: each counts "
        "with its samples, divided by the samples of all ranks. An all-reduce of one number tells "
        "every rank the latter.",
        "Multiply each gradient by this rank's share of the samples, then all-reduce it: the sum "
        "of what all ranks bring is the weighted mean. Where `parameter.grad` is None there is "
        "nothing to average.",
    ],
)
SIZES = (5, 1, 2, 4)  # samples of the ranks' shards


class Shares(nn.Module):
    """A model whose gradients tell whose samples they come from.

    Every sample of rank r is 1 in column r and 0 elsewhere, and so are the gradients of a shard's
    mean. Value r of a mean over all ranks is then the share of rank r's shard.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, 1, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(n, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:, 0] + x @ self.bias


def product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).mean()


def stepped(bench: Bench, model: Shares, size: int, weight_decay: float = 0.0) -> Shares:
    """Return the model after a step of the reader's on a shard of ``size`` samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=weight_decay)
    x = torch.eye(bench.n, dtype=torch.float64)[bench.rank].expand(size, -1)
    bench.work.naive_step(model, product, optimizer, x, x.new_ones(size), bench.comms)
    return model


def shards(
    sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float64
) -> list[training.Batch]:
    """Return each rank's inputs and targets."""
    rows = training.drawn(sum(sizes), 48, seed=seed, dtype=torch.float64).to(dtype)
    return [(part[:, :32], part[:, 32:]) for part in torch.split(rows, list(sizes))]


def one_device(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Sequence[training.Batch],
    forget: bool = True,
) -> torch.Tensor:
    """Return the weights of a single process after a step on each batch."""
    model = training.network(seed=0)
    return training.train_alone(model, make(model), batches, forget=forget)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@LAB.check("every rank has rank 0's model", read="Replicate")
def equal(bench: Bench) -> None:
    training.expect_equal_models(bench, bench.work.start_equal)


@LAB.check("equal shards count alike, once", read="Shard, backward, all-reduce")
def mean(bench: Bench) -> None:
    n, size = bench.n, 3
    for name, parameter in stepped(bench, Shares(n), size).named_parameters():
        counted = 0.0 - parameter.detach().flatten()  # the step was one gradient long
        ones = torch.ones_like(counted)
        mistakes = {
            "There was no step: call optimizer.step() when the gradients are averaged.": 0 * ones,
            "Only this rank's own shard counted. Average every gradient, of weights and of biases, "
            "after backward() and before optimizer.step().": torch.eye(n)[bench.rank].double(),
            "That is the sum of the ranks' gradients, and a step n times as long: an all-reduce "
            "adds, so divide, too.": ones,
            "It is divided twice: before the all-reduce and after it, or by samples and by "
            "ranks.": ones / n**2,
            "It is multiplied by this rank's samples: divide by those of all ranks.": ones * size,
        }
        what = f"the share of each rank's shard in the step of {name}"
        bench.near(counted, ones / n, what, mistakes)


@LAB.check("the gradients are averaged, not the weights", read="Shard, backward, all-reduce")
def gradients(bench: Bench) -> None:
    parts = shards([4] * bench.n, seed=1)
    model = training.network(seed=0)
    bench.work.naive_step(model, mse_loss, adam(model), *parts[bench.rank], bench.comms)
    alone = torch.stack([one_device(adam, [part]) for part in parts])
    mistakes = {
        "Those are the mean of weights that each rank got from its own gradient. Average the "
        "gradients before optimizer.step(): Adam's step is not linear in them.": alone.mean(0),
    }
    want = one_device(adam, [training.together(parts)])
    what = "the weights after a step of Adam"
    bench.near(training.flat(model.parameters()), want, what, mistakes, 1e-9, 1e-9)


@LAB.check("each sample counts alike in uneven shards", read="Shard, backward, all-reduce")
def uneven(bench: Bench) -> None:
    n = bench.n
    sizes = torch.tensor(SIZES[:n], dtype=torch.float64)
    for name, parameter in stepped(bench, Shares(n), SIZES[bench.rank]).named_parameters():
        mistakes = {
            f"A mean of means: every shard counts 1/{n}, whatever its size. Weight it by its "
            "samples.": torch.ones_like(sizes) / n,
        }
        counts = ", ".join(map(str, SIZES[:n]))
        what = f"the share of each rank's shard (samples: {counts}) in the step of {name}"
        bench.near(0.0 - parameter.detach().flatten(), sizes / sizes.sum(), what, mistakes)


@LAB.check("parameters without a gradient are left alone", read="Shard, backward, all-reduce")
def alone(bench: Bench) -> None:
    model, ones = Shares(bench.n), torch.ones(2, dtype=torch.float64)
    model.unused = nn.Parameter(ones.clone())
    with bench.noting("A parameter is not used. Its grad is None, on every rank: leave it out."):
        stepped(bench, model, 2, weight_decay=0.1)
    mistakes = {
        "A gradient of zeros is not none: weight decay and momentum move the parameter. Leave its "
        "grad at None.": 0.9 * ones
    }
    bench.near(model.unused.detach(), ones, "the parameter that is not used, as it was", mistakes)


@LAB.check("the weights of one device, step after step", read="Shard, backward, all-reduce")
def steps(bench: Bench) -> None:
    model = training.network(seed=bench.rank)
    bench.work.start_equal(model, bench.comms)
    optimizer = momentum(model)
    # In each step another rank has the largest shard.
    sizes = [(SIZES[i:] + SIZES[:i])[: bench.n] for i in range(4)]
    batches = [shards(each, seed=i) for i, each in enumerate(sizes)]
    for i, parts in enumerate(batches):
        bench.work.naive_step(model, mse_loss, optimizer, *parts[bench.rank], bench.comms)
        done = [training.together(before) for before in batches[: i + 1]]
        mistakes = {
            "The gradients of the step before are in it: call optimizer.zero_grad() before "
            "backward().": one_device(momentum, done, forget=False)
        }
        what = f"the weights after step {i + 1}, with momentum"
        want = one_device(momentum, done)
        bench.near(training.flat(model.parameters()), want, what, mistakes, 1e-9, 1e-9)


@LAB.check("the same bits on every rank", read="Replicate", ranks=SEVERAL)
def bits(bench: Bench) -> None:
    model = training.network(0, torch.float32)
    x, y = shards(SIZES[: bench.n], 0, torch.float32)[bench.rank]
    bench.work.naive_step(model, mse_loss, momentum(model), x, y * 10**bench.rank, bench.comms)
    bench.same(
        "the weights after a step in float32",
        training.flat(model.parameters()),
        "Each rank adds the gradients in an order of its own, or scales them in another way: the "
        "sums differ in the last bits, and the models drift apart.",
    )


@LAB.check("each gradient is all-reduced once", read="What it costs", ranks=SEVERAL)
def sent(bench: Bench) -> None:
    model = training.network(0, torch.float32)
    optimizer = momentum(model)
    x, y = shards(SIZES[: bench.n], 0, torch.float32)[bench.rank]
    with bench.seen() as seen:
        bench.work.naive_step(model, mse_loss, optimizer, x, y, bench.comms)
    size = sum(parameter.nbytes for parameter in model.parameters())
    remedy = "All-reduce each gradient once a step, in its own dtype, and send no weights."
    training.expect_frugal(bench, seen, 2 * (bench.n - 1) * size, remedy)
