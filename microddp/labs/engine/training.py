"""Models, batches and oracles that the checks of several labs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss

from microddp.comms import Comms
from microddp.labs.engine.bench import Bench, Seen

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets
MOST_SENT = {
    "broadcast": "A broadcast sends all of rank 0's tensor to every other rank.",
    "all_gather": "An all-gather sends every rank's tensor to every other rank.",
}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers, the same ones for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of their values, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mse_loss,
    forget: bool = True,
) -> torch.Tensor:
    """Take a step on each batch in one process, and return the weights.

    Args:
        model: changed in place.
        optimizer: the model's.
        batches: of all ranks together, if it is the oracle of a data-parallel training.
        loss_fn: takes outputs and targets to a mean loss.
        forget: whether gradients are zeroed before each backward.
    """
    for x, y in batches:
        if forget:
            optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return flat(model.parameters())


def together(parts: Sequence[Batch]) -> Batch:
    """Return one batch with the samples of all ranks."""
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return x, y


def network(seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a model of 32 inputs and 16 outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).to(dtype)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, those that a state dictionary leaves out, too."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def used_model(seed: int, steps: int = 1) -> nn.Module:
    """Return a model of 15 tensors in two dtypes, as if trained or loaded.

    It has buffers, and its first layer is frozen.
    """
    model = network(seed, torch.float32).insert(1, nn.BatchNorm1d(64))
    model[0].requires_grad_(False)
    model.append(nn.BatchNorm1d(16))
    model[1].register_buffer("not_saved", torch.zeros(4), persistent=False)
    for tensor in tensors_of(model).values():
        tensor += (seed + 1) * steps * (1 if tensor.is_floating_point() else 2**24 + 1)
    return model


def expect_equal_models(bench: Bench, start: Callable[[nn.Module, Comms], None]) -> None:
    """Expect that the reader's function copies rank 0's model to all ranks, in place."""
    models = [tensors_of(used_model(rank)) for rank in range(bench.n)]
    model, new = used_model(bench.rank), tensors_of(used_model(0, steps=0))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    start(model, bench.comms)
    for name, got in tensors_of(model).items():
        kind = "parameter" if name in parameters else "buffer"
        mistakes = {
            f"It is this rank's own still. Broadcast every {kind}, too, in place.": (
                models[bench.rank][name]
            ),
            "It is a new model's: rank 0's may have been trained or loaded, so copy what it "
            "has.": new[name],
            "It went through float32, which rounds whole numbers above 2^24: send every dtype by "
            "itself, or as bytes.": models[0][name].float().to(got.dtype),
        }
        bench.near(got, models[0][name], f"rank 0's {kind} {name}", mistakes, rtol=0.0, atol=0.0)
    bench.expect(
        all(parameters[name] is tensor for name, tensor in model.named_parameters()),
        "the parameters to be overwritten in place",
        "other parameters in the model",
        "An optimizer that was made before would go on with the old ones.",
    )
    bench.expect(
        all(buffers[name] is tensor for name, tensor in model.named_buffers()),
        "the buffers to be overwritten in place",
        "other buffers in the model",
        "Who holds a buffer, as a wrapper does, would keep the old one.",
    )


def expect_frugal(bench: Bench, seen: Seen, most: int, remedy: str) -> None:
    """Expect that all ranks together sent no more than needed. A collective.

    Args:
        bench: the ranks.
        seen: what this rank sent. A collective counts as its best algorithm would send it.
        most: bytes needed; 1 KiB a rank is allowed beyond.
        remedy: the sentence for what to do instead.
    """
    n, most = bench.n, most + 1024 * bench.n
    factors = {"all_reduce": 2.0 * (n - 1) / n, "all_gather": n - 1.0}  # of a rank's own tensor
    others = (n - 1) / n  # one rank has it or gets it: it travels n - 1 times, not n
    mine = sum(factors.get(call.name, others) * call.nbytes for call in seen.collectives)
    got = round(sum(bench.comms.all_gather_data(mine + seen.sent_bytes)))
    names = [call.name for call in seen.collectives] + ["message"] * len(seen.messages)
    calls = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    large = [call.name for call in seen.collectives if call.nbytes > 1024]
    reason = MOST_SENT.get(large[0], "") if large else ""
    bench.expect(
        got <= most,
        f"at most {most} bytes sent by all ranks together",
        f"{got}, with {calls or 'nothing'} on this rank",
        f"{reason} {remedy}".strip(),
    )
