"""Lab 03: the naive data-parallel step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector

from microddp.comms import Comms
from microddp.labs.engine.bench import Bench, Seen, Wrong
from microddp.labs.engine.lab import Lab
from microddp.replicas import tensor_digest

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
WHAT_THEY_SEND = {
    "broadcast": "A broadcast sends all of rank 0's tensor to every other rank.",
    "all_gather": "An all-gather sends every rank's tensor to every other rank.",
}
Batch = tuple[torch.Tensor, torch.Tensor]


class Shares(nn.Module):
    """A model whose gradients tell whose samples they come from.

    Every sample of rank r is 1 in column r and 0 elsewhere. So are the gradients of a shard's mean.
    Of a mean over all ranks, value r is the share that rank r's shard has in it.
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
    """The model after one step of the reader's on a shard of so many samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=weight_decay)
    x = torch.eye(bench.n, dtype=torch.float64)[bench.rank].expand(size, -1)
    bench.work.naive_step(model, product, optimizer, x, x.new_ones(size), bench.comms)
    return model


def network(seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype)


def shards(sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Of each rank its inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes), 48, generator=generator, dtype=torch.float64).to(dtype)
    return [(part[:, :32], part[:, 32:]) for part in torch.split(rows, list(sizes))]


def whole(parts: Sequence[Batch]) -> Batch:
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return x, y


def vector(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def one_device(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Sequence[Batch],
    forget: bool = True,
) -> torch.Tensor:
    """The weights of a single process after a step on each batch; ``forget`` old gradients."""
    model = network(seed=0)
    optimizer = make(model)
    for x, y in batches:
        if forget:
            optimizer.zero_grad()
        mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return vector(model)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def equal_models(bench: Bench, start: Callable[[nn.Module, Comms], None]) -> None:
    """Expect that the reader's function copies rank 0's model, of 14 tensors in two dtypes."""
    model, models = trained(bench.rank), [trained(rank).state_dict() for rank in range(bench.n)]
    parameters = dict(model.named_parameters())
    start(model, bench.comms)
    for name, got in model.state_dict().items():
        kind = "parameter" if name in parameters else "buffer"
        own = f"It is this rank's own still. Broadcast every {kind}, too, in place."
        new = "It is a new model's: rank 0's may have been trained or loaded, so copy what it has."
        rounded = (
            "It went through float32, which rounds whole numbers above 2^24: send every dtype by "
            "itself, or as bytes."
        )
        mistakes = {
            own: models[bench.rank][name],
            new: trained(0, steps=0).state_dict()[name],
            rounded: models[0][name].float().to(got.dtype),
        }
        bench.near(got, models[0][name], f"rank 0's {kind} {name}", mistakes, rtol=0.0, atol=0.0)
    bench.expect(
        all(parameters[name] is tensor for name, tensor in model.named_parameters()),
        "the parameters to be overwritten in place",
        "other parameters in the model",
        "An optimizer that was made before would go on with the old ones.",
    )


def trained(seed: int, steps: int = 1) -> nn.Module:
    """A model that is another one on each rank, as if trained or loaded, with buffers."""
    model = network(seed, torch.float32).insert(1, nn.BatchNorm1d(64))
    model.append(nn.BatchNorm1d(16))
    for tensor in model.state_dict().values():
        tensor += (seed + 1) * steps * (1 if tensor.is_floating_point() else 2**24 + 1)
    return model


def frugal(bench: Bench, seen: Seen, most: int, remedy: str) -> None:
    """Expect that all ranks together sent so many bytes, and 1 KiB a rank. A collective.

    Counted is what the best algorithms send. ``remedy`` is what to do instead.
    """
    n, most = bench.n, most + 1024 * bench.n
    factors = {"all_reduce": 2.0 * (n - 1) / n, "all_gather": n - 1.0}  # of a rank's own tensor
    others = (n - 1) / n  # one rank has it or gets it: it travels n - 1 times, not n
    mine = sum(factors.get(call.name, others) * call.nbytes for call in seen.collectives)
    got = round(sum(bench.comms.all_gather_data(mine + seen.sent_bytes)))
    names = [call.name for call in seen.collectives] + ["message"] * len(seen.messages)
    calls = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    large = [call.name for call in seen.collectives if call.nbytes > 1024]
    reason = WHAT_THEY_SEND.get(large[0], "") if large else ""
    bench.expect(
        got <= most,
        f"at most {most} bytes sent by all ranks together",
        f"{got}, with {calls or 'nothing'} on this rank",
        f"{reason} {remedy}".strip(),
    )


@LAB.check("every rank has rank 0's model", read="Replicate")
def equal(bench: Bench) -> None:
    equal_models(bench, bench.work.start_equal)


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
    model = network(seed=0)
    bench.work.naive_step(model, mse_loss, adam(model), *parts[bench.rank], bench.comms)
    alone = torch.stack([one_device(adam, [part]) for part in parts])
    mistakes = {
        "Those are the mean of weights that each rank got from its own gradient. Average the "
        "gradients before optimizer.step(): Adam's step is not linear in them.": alone.mean(0),
    }
    want = one_device(adam, [whole(parts)])
    bench.near(vector(model), want, "the weights after a step of Adam", mistakes, 1e-9, 1e-9)


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
    try:
        stepped(bench, model, 2, weight_decay=0.1)
    except Exception as error:
        raise Wrong(
            "a step of a model of which one parameter is not used",
            f"{type(error).__name__}: {error}",
            "The grad of such a parameter is None, on every rank: leave it out.",
        ) from error
    mistakes = {
        "A gradient of zeros is not none: weight decay and momentum move the parameter. Leave its "
        "grad at None.": 0.9 * ones
    }
    bench.near(model.unused.detach(), ones, "the parameter that is not used, as it was", mistakes)


@LAB.check("the weights of one device, step after step", read="Shard, backward, all-reduce")
def steps(bench: Bench) -> None:
    model = network(seed=bench.rank)
    bench.work.start_equal(model, bench.comms)
    optimizer = momentum(model)
    # In each step another rank has the largest shard.
    sizes = [(SIZES[i:] + SIZES[:i])[: bench.n] for i in range(4)]
    batches = [shards(each, seed=i) for i, each in enumerate(sizes)]
    for i, parts in enumerate(batches):
        bench.work.naive_step(model, mse_loss, optimizer, *parts[bench.rank], bench.comms)
        done = [whole(before) for before in batches[: i + 1]]
        mistakes = {
            "The gradients of the step before are in it: call optimizer.zero_grad() before "
            "backward().": one_device(momentum, done, forget=False)
        }
        what = f"the weights after step {i + 1}, with momentum"
        bench.near(vector(model), one_device(momentum, done), what, mistakes, 1e-9, 1e-9)


@LAB.check("the same bits on every rank", read="Replicate", ranks=(2, 3, 4))
def bits(bench: Bench) -> None:
    model = network(0, torch.float32)
    x, y = shards(SIZES[: bench.n], 0, torch.float32)[bench.rank]
    bench.work.naive_step(model, mse_loss, momentum(model), x, y * 10**bench.rank, bench.comms)
    digests = bench.comms.all_gather_data(tensor_digest(vector(model)))
    bench.expect(
        len(set(digests)) == 1,
        "the same weights on every rank after a step in float32",
        "; ".join(f"bits {text} on rank {rank}" for rank, text in enumerate(digests)),
        "Each rank adds the gradients in an order of its own, or scales them in another way: the "
        "sums differ in the last bits, and the models drift apart.",
    )


@LAB.check("each gradient is all-reduced once", read="What it costs", ranks=(2, 3, 4))
def sent(bench: Bench) -> None:
    model = network(0, torch.float32)
    optimizer = momentum(model)
    x, y = shards(SIZES[: bench.n], 0, torch.float32)[bench.rank]
    with bench.seen() as seen:
        bench.work.naive_step(model, mse_loss, optimizer, x, y, bench.comms)
    size = sum(parameter.nbytes for parameter in model.parameters())
    remedy = "All-reduce each gradient once a step, in its own dtype, and send no weights."
    frugal(bench, seen, 2 * (bench.n - 1) * size, remedy)
