"""Lab 14: token weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from microddp.ddp import DDP
from microddp.labs.engine.bench import Bench, Seen
from microddp.labs.engine.lab import Lab
from microddp.labs.engine.training import flat

LAB = Lab(
    "lab14_token_weights",
    "tokens, not samples",
    "14_your_script",
    ["accumulate"],
    [
        "Write down the gradient that one process would get: a sum over all tokens, divided by one "
        "number. Who knows this number, and when?",
        'The number is known before the first forward pass: it is in the targets. With `"sum"`, '
        "each micro-batch contributes its losses, whatever number of tokens it has.",
        "DDP divides by n what you want added up. So each loss is `sum * n / tokens`, where "
        "`tokens` is all-reduced once, and at least 1.",
    ],
    ranks=(1, 2, 3),
)
TOKENS = "Tokens, not samples"
CLASSES, LENGTH, LEFT_OUT = 11, 8, -100
MicroBatch = tuple[torch.Tensor, torch.Tensor]
Step = list[list[MicroBatch]]  # by rank


def build() -> nn.Module:
    """Return a model, the same one on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(CLASSES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def drawn(generator: torch.Generator, rows: int) -> MicroBatch:
    """Return rows of unequal length, each of one token at least."""
    inputs, targets = torch.randint(CLASSES, (2, rows, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
    return inputs, targets.where(torch.arange(LENGTH) < lengths, LEFT_OUT)


def step_of(n: int, micro: int = 4) -> Step:
    """Return a step in which all micro-batches have tokens, and unlike numbers of rows."""
    generator = torch.Generator().manual_seed(14)
    return [[drawn(generator, 1 + (rank + i) % 3) for i in range(micro)] for rank in range(n)]


def without(step: Step, *places: tuple[int, int]) -> Step:
    """Return a step whose micro-batches at some places, by rank and number, have no tokens."""
    return [
        [
            (inputs, torch.full_like(targets, LEFT_OUT) if (rank, i) in places else targets)
            for i, (inputs, targets) in enumerate(each)
        ]
        for rank, each in enumerate(step)
    ]


def gradients_of_sums(step: Step) -> torch.Tensor:
    """Return the gradient of each micro-batch's summed loss, ``(ranks, micro-batches, values)``."""
    model, rows = build(), []
    for each in step:
        for inputs, targets in each:
            model.zero_grad()
            logits = model(inputs).flatten(0, 1)
            cross_entropy(logits, targets.flatten(), reduction="sum").backward()
            rows.append(flat(p.grad for p in model.parameters() if p.grad is not None))
    return torch.stack(rows).view(len(step), -1, len(rows[0]))


def counts_of(step: Step) -> torch.Tensor:
    """Return the number of tokens of each micro-batch, ``(ranks, micro-batches, 1)``."""
    counts = [[(targets != LEFT_OUT).sum() for _, targets in each] for each in step]
    return torch.tensor(counts).unsqueeze(-1)


def mistakes_of(step: Step, rank: int) -> Mapping[str, torch.Tensor]:
    """Return the gradients that usual mistakes give, by the sentences that name them."""
    sums, counts = gradients_of_sums(step), counts_of(step)
    n = len(step)
    rows = torch.tensor([[[len(x)] for x, _ in each] for each in step])
    means = sums / counts
    right = sums.sum((0, 1)) / counts.sum()
    by_own = (sums.sum(1) / counts.sum(1)).sum(0)
    of_means = (
        "A mean of means: each micro-batch counts as much as any other, however few tokens it has. "
        "Divide sums by the tokens of the whole step."
    )
    own = (
        "This rank's loss was divided by this rank's tokens: all ranks count alike, however few "
        "tokens they have. The number to divide by is that of all ranks: all-reduce it."
    )
    return {
        of_means: means.mean((0, 1)),
        "The means of the micro-batches were added up: each counts as much as any other, and the "
        "more there are, the larger the gradient. Divide sums by the tokens of the step.": (
            means.sum(1).mean(0)
        ),
        "Each micro-batch counts by its number of rows, and not by its tokens.": (
            (means * rows).sum((0, 1)) / rows.sum()
        ),
        "Targets that fill up were counted, as if they were tokens: those of -100 are none.": (
            sums.sum((0, 1)) / (rows.sum() * LENGTH)
        ),
        own: by_own / n,
        f"{own} ": by_own,
        "It is n times too small. DDP takes the mean over the ranks, and wanted is a sum over all "
        "tokens: multiply by n.": right / n,
        "It is n times too large. Multiply by n once: DDP divides by it once.": right * n,
        "It is this rank's own: nothing was averaged. The last micro-batch runs outside of "
        "no_sync().": n * sums[rank].sum(0) / counts.sum(),
    }


def accumulated(bench: Bench, step: Step) -> tuple[torch.Tensor, Seen]:
    """Return the gradient that the reader's function leaves, and what this rank sent for it."""
    module = build()
    model = DDP(module, bench.comms)
    with bench.seen() as seen:
        bench.work.accumulate(model, step[bench.rank], bench.comms)
    grads = []
    for name, parameter in module.named_parameters():
        bench.expect(
            parameter.grad is not None,
            f"a gradient of {name}",
            "None",
            "Was backward run on every rank? DDP's backward is a collective: a rank without tokens "
            "takes part in it, with a gradient of zeros.",
        )
        grads += [] if parameter.grad is None else [parameter.grad]
    return flat(grads), seen


def gradient_of_mean(step: Step) -> torch.Tensor:
    """Return the gradient of the mean loss over all tokens; zeros if there are none."""
    total: torch.Tensor = gradients_of_sums(step).sum((0, 1))
    return total / counts_of(step).sum().clamp(min=1)


@LAB.check("the gradient of the mean over all tokens", read=TOKENS)
def mean(bench: Bench) -> None:
    for micro in (4, 1):
        step = step_of(bench.n, micro)
        bench.doing = f"with {micro} micro-batch{'es' if micro > 1 else ''} on each rank"
        got, _ = accumulated(bench, step)
        mistakes = mistakes_of(step, bench.rank)
        right = gradient_of_mean(step)
        bench.near(got, right, f"the gradient {bench.doing}", mistakes, atol=1e-9)


@LAB.check("no tokens count as nothing", read=TOKENS)
def nothing(bench: Bench) -> None:
    whole, last = step_of(bench.n), bench.n - 1
    numbers = range(len(whole[0]))
    cases = {
        "one micro-batch has no tokens": [(0, 1)],
        "the last micro-batch of a rank has no tokens": [(last, numbers[-1])],
        "all micro-batches of a rank have no tokens": [(last, i) for i in numbers],
        "nobody has a token": [(rank, i) for rank in range(bench.n) for i in numbers],
    }
    for case, places in cases.items():
        bench.doing = f"where {case}"
        step = without(whole, *places)
        got, _ = accumulated(bench, step)
        bench.expect(
            bool(got.isfinite().all()),
            f"a finite gradient {bench.doing}",
            "NaN or inf",
            "Something was divided by a number of tokens that is 0. If nobody has one, divide by "
            "1: the sum is zero anyway.",
        )
        bench.near(got, gradient_of_mean(step), f"the gradient {bench.doing}", atol=1e-9)


@LAB.check("gradients once a step, and one count", read=TOKENS, ranks=(2, 3))
def sent(bench: Bench) -> None:
    step = step_of(bench.n)
    bench.doing = f"with {len(step[0])} micro-batches on each rank"
    got, seen = accumulated(bench, step)
    large = [size for size in seen.sizes if size >= got.nbytes]
    bench.expect(
        sum(large) == got.nbytes,
        f"{got.nbytes} bytes of gradients sent in a step",
        f"{sum(large)} in {len(large)} collectives",
        "Of a step's micro-batches, gradients travel once, after the last: run the others within "
        "no_sync(). Forward decides, so it has to be in there as well.",
    )
    others = len(seen.collectives) + len(seen.messages) - len(large)
    bench.expect(
        others <= 2,
        "at most two collectives besides, and one is enough",
        others,
        "Add up on this rank first, and send one number.",
    )
