"""Lab 07: initialise, distribute and collect, each with the right primitive."""

from __future__ import annotations

from typing import Any

import torch

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import SEVERAL, Lab
from microddp.labs.engine.training import (
    expect_equal_models,
    expect_frugal,
    tensors_of,
    used_model,
)

LAB = Lab(
    "lab07_primitives",
    "a start and an end with the right primitives",
    "07_sync_primitives",
    ["initialise", "distribute", "collect"],
    [
        "Ask of each: who has the data before, and who needs it after? The pictures in the chapter "
        "are the answers. A mean takes two sums: that of the losses and that of their numbers.",
        "initialise: join all tensors of one dtype into a flat one, with torch.cat, broadcast it, "
        "and copy its pieces back. distribute: one rank deals out. collect: one rank collects.",
        "distribute is one call of `comms.scatter`, and collect one of `comms.gather` and an "
        "all-reduce of a tensor of two numbers. Every rank makes these calls, also one that has or "
        "gets nothing.",
    ],
)
LENGTHS = (5, 1, 3, 9)  # losses of each rank


def samples(*shape: int) -> torch.Tensor:
    return torch.randint(1, 1000, shape, generator=torch.Generator().manual_seed(0))


def losses(bench: Bench, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return each rank's losses."""
    return [100.0 + bench.values(lengths[rank], rank).double() for rank in range(bench.n)]


def told(bench: Bench, number: int) -> list[int]:
    """Return every rank's number."""
    numbers: list[int] = bench.comms.all_gather_data(number)
    bench.expect(
        all(isinstance(each, int) for each in numbers),
        "the same collectives on every rank",
        "a collective that only some ranks call",
        "All ranks take part in a collective: those that only receive call it, too.",
    )
    return numbers


def collect(bench: Bench, mine: torch.Tensor) -> tuple[Any, float]:
    result = bench.work.collect(mine, bench.comms)
    pair = isinstance(result, tuple) and len(result) == 2
    bench.expect(pair, "two results, losses or None and a mean", type(result).__name__)
    joined, mean = result
    number = isinstance(mean, float) or (isinstance(mean, torch.Tensor) and mean.numel() == 1)
    bench.expect(number, "a number as the mean", type(mean).__name__, "Every rank gets it.")
    return joined, float(mean)


@LAB.check("every rank has rank 0's model", read="Who has what")
def model(bench: Bench) -> None:
    expect_equal_models(bench, bench.work.initialise)


@LAB.check("the model travels once, in few calls", read="What they cost", ranks=SEVERAL)
def model_bytes(bench: Bench) -> None:
    own = used_model(bench.rank)
    with bench.seen() as seen:
        bench.work.initialise(own, bench.comms)
    tensors = list(tensors_of(own).values())
    size = sum(tensor.nbytes for tensor in tensors)
    expect_frugal(
        bench, seen, (bench.n - 1) * size, "Every rank needs rank 0's model: broadcast it."
    )
    calls = len(seen.collectives) + -(-len(seen.messages) // (bench.n - 1))
    bench.expect(
        calls <= 4,
        f"at most 4 calls for {len(tensors)} tensors of two dtypes",
        f"{calls}",
        "Each call costs a start, however small its tensor is. Join the tensors of a dtype, with "
        "torch.cat, and broadcast them as one.",
    )


@LAB.check("each sample is on one rank, in blocks", read="Who has what")
def parts(bench: Bench) -> None:
    n, rank = bench.n, bench.rank
    for whole in (samples(61, 3).float(), samples(60), samples(2, 2, 2).double()):
        part = bench.work.distribute(whole if rank == 0 else None, bench.comms)
        bench.expect(isinstance(part, torch.Tensor), "a tensor", type(part).__name__)
        sizes = told(bench, len(part))
        mistake = "The first len(samples) % n ranks get one more than the others."
        if sizes == [len(whole)] * n:
            mistake = "Every rank has all samples: each should get its own part."
        elif len(set(sizes)) == 1:
            mistake = "Samples are left out, or doubled to make parts equal: parts may differ."
        bench.expect(
            sum(sizes) == len(whole) and max(sizes) - min(sizes) <= 1,
            f"parts of {len(whole)} samples on {n} ranks that differ by at most one",
            f"parts of {', '.join(map(str, sizes))}",
            mistake,
        )
        mistakes = {
            "Those are every n-th sample. Parts are blocks: rank 0 has the first.": whole[rank::n],
            "The blocks are not in rank order.": torch.split(whole, sizes[::-1])[-1 - rank],
        }
        mistakes = {text: wrong for text, wrong in mistakes.items() if len(wrong) == len(part)}
        block = torch.split(whole, sizes)[rank]
        bench.near(part, block, f"block {rank} of the samples", mistakes)


@LAB.check("each rank is sent its part only", read="What they cost", ranks=SEVERAL)
def parts_bytes(bench: Bench) -> None:
    whole = samples(61, 128).float()
    with bench.seen() as seen:
        part = bench.work.distribute(whole if bench.rank == 0 else None, bench.comms)
    kept = told(bench, part.nbytes)[0]
    remedy = "Each rank needs its own part and no other: deal them out with a scatter."
    expect_frugal(bench, seen, whole.nbytes - kept, remedy)


@LAB.check("all losses are on rank 0, in order", read="Who has what")
def collected(bench: Bench) -> None:
    for lengths in (LENGTHS, (4, 0, 3, 0)):
        each = losses(bench, lengths)
        joined, _ = collect(bench, each[bench.rank])
        if bench.rank > 0:
            mistake = "Only rank 0 needs them: gather, and return what comes of it."
            bench.expect(joined is None, "None", type(joined).__name__, mistake)
            continue
        whole = torch.cat(each)
        longest = max(lengths[: bench.n])
        padded = isinstance(joined, torch.Tensor) and joined.numel() == bench.n * longest
        bench.expect(
            not padded or len(whole) == bench.n * longest,
            f"{len(whole)} losses of ranks that have {', '.join(map(str, lengths[: bench.n]))}",
            f"{bench.n * longest}",
            "Every rank's are padded to the longest: take the padding away, or use comms.gather, "
            "which needs none.",
        )
        mistakes = {"They are not in rank order.": torch.cat(each[::-1])}
        bench.near(joined, whole, "the losses of all ranks", mistakes)


@LAB.check("the mean of all losses is on every rank", read="What they are for")
def mean(bench: Bench) -> None:
    for lengths in (LENGTHS, (4, 0, 3, 0)):
        each = losses(bench, lengths)
        _, got = collect(bench, each[bench.rank])
        own = torch.stack([values.mean() for values in each])
        counts = ", ".join(map(str, lengths[: bench.n]))
        how = "Add up the sums and the numbers of all ranks, and divide."
        mistakes = {
            "The mean of no losses is not a number. A rank without losses brings a sum of 0 and a "
            "number of 0.": torch.tensor(torch.nan).double(),
            f"That is the mean of this rank's own losses. {how}": own[bench.rank],
            "That is a mean of the ranks' means, in which a loss of a rank with few counts more. "
            f"{how}": own.mean(),
        }
        what = f"the mean of all losses ({counts} on each rank)"
        bench.near(torch.tensor(got, dtype=torch.float64), torch.cat(each).mean(), what, mistakes)


@LAB.check("the losses go to rank 0 only", read="What they cost", ranks=SEVERAL)
def collected_bytes(bench: Bench) -> None:
    each = losses(bench, (600, 660, 630, 610))
    with bench.seen() as seen:
        bench.work.collect(each[bench.rank], bench.comms)
    size = sum(values.nbytes for values in each[1:])
    remedy = "Only rank 0 needs all of them, which a gather brings; for the mean, two sums will do."
    expect_frugal(bench, seen, size, remedy)
