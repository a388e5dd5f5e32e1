"""Lab 10: top-k with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import SEVERAL, Lab

LAB = Lab(
    "lab10_top_k",
    "top-k with error feedback",
    "10_compression",
    ["TopK.average"],
    [
        "Add the residual first, into a tensor of its own. Then choose the places, send, keep the "
        "rest, and only at the end write the mean into the gradient.",
        "`rest.abs().topk(k).indices` are the places. Gather `rest[places]` and `places.int()`: "
        "row r of each is rank r's. Set `rest[places] = 0`, and `rest` is the new residual.",
        "Set the gradient to 0. Then add each rank's values at that rank's places, one rank after "
        "the other, divided by n: `gradient.index_add_(0, places_of_r, values_of_r, alpha=1 / n)`.",
    ],
)
SENT = "The largest values"
KEPT = "Where it breaks: what was not sent is forgotten"


class Step(NamedTuple):
    """The tensors of one step, with a row for each rank."""

    gradient: torch.Tensor
    rest: torch.Tensor  # the gradient plus the residual
    sent: torch.Tensor  # 0 where nothing was
    mean: torch.Tensor  # over the ranks, without rows


# The residual that a rank keeps, by mistake.
MISKEPT: dict[str, Callable[[Step], torch.Tensor]] = {
    "What was not sent is forgotten: keep it, and add it to the next gradient before you choose "
    "the places.": lambda step: torch.zeros_like(step.rest),
    "What was sent is kept as well, and so sent again: set the residual to 0 at the places that "
    "this rank sent.": lambda step: step.rest,
    "The residual is overwritten with what is left of the last gradient alone. What was kept "
    "before and not sent now must stay in it.": lambda step: torch.where(
        step.sent == 0, step.gradient, 0.0
    ),
    "The residual is this rank's values minus the mean of all ranks. Subtract what this rank sent "
    "itself.": lambda step: step.rest - step.mean,
    "The residual and the gradient are the same memory, so the mean became the residual: keep it "
    "in a tensor of its own.": lambda step: step.mean.expand_as(step.rest),
}
EARLY = "The places are chosen before the residual is added. Choose the largest of the sum of both."
BARE = "The residual chooses the places, but is not sent. Send values of gradient plus residual."
SHARED = "It has what another TopK did not send: keep the residual in self, for each TopK its own."


def sent_of(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the values at these places and 0 elsewhere, with a row for each rank."""
    return torch.zeros_like(values).scatter(1, places, values.gather(1, places))


def means(gradients: Sequence[torch.Tensor], k: int, mistake: str = "") -> Iterator[torch.Tensor]:
    """Yield the mean of each step, right or with one of the mistakes above."""
    residual = torch.zeros_like(gradients[0])
    for gradient in gradients:
        rest = gradient + residual
        places = (gradient if mistake == EARLY else rest).abs().topk(k).indices
        sent = sent_of(gradient if mistake == BARE else rest, places)
        mean = sent.mean(0)
        yield mean
        residual = rest - sent_of(rest, places)
        if mistake in MISKEPT:
            residual = MISKEPT[mistake](Step(gradient, rest, sent, mean))


def everyone(bench: Bench, size: int, seed: int) -> torch.Tensor:
    """Return each rank's gradient, shape (ranks, size), in which no two magnitudes are alike."""
    rows = []
    for rank in range(bench.n):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        magnitudes = torch.randperm(1000, generator=generator)[:size] + 1
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        rows.append((magnitudes * signs).float())
    return torch.stack(rows)


@LAB.check("the mean of the k largest of each rank, by magnitude", read=SENT)
def largest(bench: Bench) -> None:
    n, k, size = bench.n, 3, 8
    all_of = torch.arange(1.0, size + 1).repeat(n, 1)
    for rank, row in enumerate(all_of):
        row[0] = -100 - rank  # among the largest of all ranks
        row[2 + rank] = 60 + rank  # of this one alone
        row[1 if rank % 2 == 0 else 7] = -40 - rank  # of some
    all_of *= 12  # which 1 to 4 ranks divide
    places = all_of.abs().topk(k).indices
    sent = sent_of(all_of, places)
    values = all_of.gather(1, places)
    last = torch.zeros(size)
    for row, place in zip(values, places, strict=True):
        last[place] = row / n
    zeros, mine = torch.zeros(size), all_of[bench.rank]
    mistakes = {
        "The tensor still has this rank's own gradient: write the mean into it, in place.": mine,
        "Those are the largest with their signs. A large negative value is as much to be sent: "
        "choose by abs(), and send the values with their signs.": sent_of(
            all_of, all_of.topk(k).indices
        ).mean(0),
        "Those are magnitudes. Of rest.abs().topk(k) take the places alone, and send "
        "rest[places].": sent.abs().mean(0),
        "That is the sum: divide by the number of ranks.": sent.sum(0),
        "Each value is divided by the number of ranks that sent it. The mean counts all ranks: "
        "who does not send a value counts as 0.": sent.sum(0) / (sent != 0).sum(0).clamp(min=1),
        "Where several ranks sent the same place, only one of them arrived. Assignment "
        "overwrites, and += through an index adds only one of equal places. Add one rank after "
        "the other, with index_add_.": last,
        "Nothing was left out: that is the mean of the whole gradients.": all_of.mean(0),
        "Only this rank's own values are in it: gather those of all ranks.": sent[bench.rank],
        "Every rank sent its values at rank 0's places. Each rank chooses its own places, and "
        "sends them, too.": zeros.index_copy(0, places[0], all_of[:, places[0]].mean(0)),
        "The values of all ranks were added at rank 0's places. Row r of the gathered places is "
        "for row r of the values.": zeros.index_copy(0, places[0], values.mean(0)),
        "The values of all ranks were added at this rank's places: gather the places, "
        "too.": zeros.index_copy(0, places[bench.rank], values.mean(0)),
    }
    gradient = mine.clone()
    bench.work.TopK(k, bench.comms).average(gradient)
    bench.near(gradient, sent.mean(0), f"the mean with k={k}", mistakes)
    other = all_of.flip(1)
    gradient = other[bench.rank].clone()
    bench.work.TopK(k, bench.comms).average(gradient)
    _, mixed = means([all_of, other], k)
    what = "the mean of another gradient by another TopK"
    bench.near(gradient, next(means([other], k)), what, {SHARED: mixed})


@LAB.check("what was not sent is added to the next gradient", read=KEPT)
def feedback(bench: Bench) -> None:
    k, gradients = 3, [everyone(bench, 12, seed) for seed in range(5)]
    top, got = bench.work.TopK(k, bench.comms), []
    for gradient in gradients:
        got.append(gradient[bench.rank].clone())
        top.average(got[-1])
    mistakes = {}
    for text in (*MISKEPT, EARLY, BARE):  # only what explains all steps
        wrong = list(means(gradients, k, text))
        if torch.allclose(torch.stack(got), torch.stack(wrong), atol=1e-3):
            mistakes[text] = wrong
    for step, expected in enumerate(means(gradients, k)):
        explained = {text: wrong[step] for text, wrong in mistakes.items()}
        bench.near(got[step], expected, f"the mean of step {step + 1}", explained)


@LAB.check("k may be larger than the gradient", read=SENT)
def short(bench: Bench) -> None:
    gradients = everyone(bench, 5, seed=20)
    gradient = gradients[bench.rank].clone()
    with bench.noting("That was with 5 values and k=7: send min(k, size) of them."):
        bench.work.TopK(7, bench.comms).average(gradient)
    bench.near(gradient, gradients.mean(0), "the mean of 5 values with k=7")


@LAB.check("k values and k places of each rank", read="The largest values")
def sent(bench: Bench) -> None:
    k, size = 10, 1000
    top, gradient = bench.work.TopK(k, bench.comms), everyone(bench, size, seed=30)[bench.rank]
    with bench.seen() as seen:
        top.average(gradient)
    given = sum(seen.sizes) + seen.sent_bytes // max(1, bench.n - 1)  # or passed round a ring
    names = " and ".join(call.name for call in seen.collectives) or "messages"
    mistake = "Only the k values and their places have to travel."
    if given == 12 * k:
        mistake = "topk returns places in int64: send them as int32, which takes half."
    if given >= 4 * size:
        mistake = "The whole tensor travels, with its zeros. Gather the k values and their places."
    bench.expect(
        given <= 8 * k,
        f"at most {8 * k} bytes from each rank, {k} values and {k} places in int32",
        f"{given} bytes by {names}",
        mistake,
    )


@LAB.check("a long gradient, in another dtype", read=SENT)
def long(bench: Bench) -> None:
    size = 70_000
    gradient, mean = torch.zeros(2, size, dtype=torch.bfloat16)
    gradient[-1 - bench.rank] = 12.0  # each rank has one value
    mean[-bench.n :] = 12.0 / bench.n
    bench.work.TopK(1, bench.comms).average(gradient)
    places, got = (values.nonzero().flatten().tolist() for values in (mean, gradient))
    bench.expect(
        got == places,
        f"values at places {places}, of {size} in bfloat16",
        got[: 2 * bench.n],
        "Send places as int32: shorter integers, and short floats, do not reach so far.",
    )
    bench.near(gradient, mean, f"the mean of {size} values", rtol=1e-2)


@LAB.check("the same bits on every rank", read=SENT, ranks=SEVERAL)
def bits(bench: Bench) -> None:
    top = bench.work.TopK(500, bench.comms)
    for step in (1, 2):
        gradient = bench.rounded(1000).roll(step)
        top.average(gradient)
        bench.same(
            f"the mean of step {step}",
            gradient,
            "Every rank must add the ranks' values in the same order. If each begins with its own, "
            "the sums differ in the last bits, and the models drift apart.",
        )
