"""Lab 00: the timed training loop."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import mse_loss

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import Lab
from microddp.labs.engine.training import flat

LAB = Lab(
    "lab00_training_loop",
    "a timed training loop",
    "00_baseline",
    ["train"],
    [
        "Write the four lines of a step first: zero the gradients, compute the loss, go backward, "
        "step. Then read the clock between them.",
        "Four readings are enough for three parts: the end of one part is the beginning of the "
        "next. The first reading comes when the batch is there and the gradients are zeroed.",
        "`loss.item()` is a number and holds no graph. It is a mean over the batch, so multiply it "
        "by the batch's samples, add up, and divide once at the end by all samples.",
    ],
    ranks=(1,),
)
SIZES = (4, 4, 4, 4, 2)  # samples of each batch
RIGHT = {
    "forward": ("the model", "the loss"),
    "backward": ("the backward pass",),
    "optimizer": ("the step",),
}
WORK = [what for part in RIGHT.values() for what in part]
WHAT = ["loading", "zeroing", *WORK, "work on warm-up batches"]


class Clock:
    """A clock that only advances with work: each kind of ``WHAT`` takes a power of 100 of its own.

    Args:
        warmup: number of batches at first whose work counts as the last kind.

    Attributes:
        happened: how often each kind of work was done.
        reads: how often the clock was read.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.happened: Counter[str] = Counter()
        self.reads = 0
        self._seconds = 0.0

    def __call__(self) -> float:
        self.reads += 1
        return self._seconds

    def spend(self, what: str) -> None:
        """Do one piece of work, and let its seconds pass."""
        self.happened[what] += 1
        if what in WORK and self.happened["the model"] <= self.warmup:
            what = WHAT[-1]
        self._seconds += 100.0 ** WHAT.index(what)


def done_in(seconds: float) -> dict[str, int] | None:
    """Return how often each kind of work fits in these seconds; None if they are no such sum."""
    if seconds < 0 or not float(seconds).is_integer():
        return None
    times = {what: int(seconds) // 100**i % 100 for i, what in enumerate(WHAT)}
    return {what: count for what, count in times.items() if count}


class Model(torch.nn.Linear):
    """A model that takes time, and counts the graphs of its passes that are still in memory."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(3, 2)
        self.clock = clock
        self.graphs: list[weakref.ref[object]] = []
        self.left = 0  # graphs in memory when a forward pass began, at most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs, with a hook that lives as long as the graph and sees backward."""
        self.left = max(self.left, sum(graph() is not None for graph in self.graphs))
        self.clock.spend("the model")
        outputs = super().forward(x)

        def passed(_: torch.Tensor) -> None:
            self.clock.spend("the backward pass")

        if outputs.requires_grad:
            outputs.register_hook(passed)
            self.graphs.append(weakref.ref(passed))
        return outputs


def takes(clock: Clock, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also spends time on the clock."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.spend(what)
        return function(*args, **kwargs)

    return timed


class Trial:
    """One training of a small model, by the reader's ``train`` or in an order of lines.

    Args:
        warmup: number of batches that are not timed.
    """

    def __init__(self, warmup: int = 0) -> None:
        torch.manual_seed(0)
        self.clock = Clock(warmup)
        self.model = Model(self.clock)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.loss_fn = takes(self.clock, "the loss", mse_loss)
        for owner, name, what in (
            (self.optimizer, "step", "the step"),
            (self.optimizer, "zero_grad", "zeroing"),
            (self.model, "zero_grad", "zeroing"),
        ):
            setattr(owner, name, takes(self.clock, what, getattr(owner, name)))
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.batches = [(torch.randn(size, 3), torch.randn(size, 2) + size) for size in SIZES]

    def loaded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Load the batches, one after the other."""
        for batch in self.batches:
            self.clock.spend("loading")
            yield batch

    def by(self, bench: Bench) -> tuple[dict[str, float], float]:
        """Train with the reader's function; return its seconds and loss, if these have the form."""
        found = bench.work.train(
            self.model, self.loss_fn, self.optimizer, self.loaded(), self.clock, self.clock.warmup
        )
        parts = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], dict)
        form = "a pair, a dictionary with the seconds of each part, and the loss"
        bench.expect(parts, form, repr(found), "Return both: `return seconds, loss`.")
        expected, got = set(RIGHT), set(found[0])
        bench.expect(got == expected, f"seconds of {sorted(expected)}", sorted(got, key=str))
        bench.expect(
            all(isinstance(seconds, float | int) for seconds in found[0].values()),
            "a number of seconds for each part",
            repr(found[0]),
            "Add the seconds of all timed batches up.",
        )
        return found[0], found[1]

    def ordered(self, order: str, first: int = 0) -> tuple[torch.Tensor, list[float]]:
        """Train with the lines in this order; return the weights and each batch's loss."""
        losses: list[float] = []
        for x, y in self.batches[first:]:
            for line in order.split():
                if line == "zero":
                    self.optimizer.zero_grad()
                elif line == "forward":
                    loss = self.loss_fn(self.model(x), y)
                    losses.append(loss.item())
                elif line == "backward":
                    loss.backward()
                else:
                    self.optimizer.step()
        return self.weights(), losses

    def weights(self) -> torch.Tensor:
        """Return the model's weights as one vector."""
        return flat(self.model.parameters())


STEP = "zero forward backward step"


@LAB.check("the weights of a loop without a clock", read="A network that learns")
def weights(bench: Bench) -> None:
    trial = Trial(warmup=2)
    trial.by(bench)
    bench.near(
        trial.weights(),
        Trial().ordered(STEP)[0],
        "the weights after training",
        {
            "The model has not changed: the step comes after backward, and the gradients are "
            "zeroed before backward, not between the two.": Trial().weights(),
            "Gradients add up, here over all batches: zero them in each step, before "
            "backward.": Trial().ordered("forward backward step")[0],
            "The first backward pass added to gradients that the model came with: zero them before "
            "it, not only after the step.": Trial().ordered("forward backward step zero")[0],
            "The step comes before backward, so it uses the gradients of the batch "
            "before.": Trial().ordered("forward step zero backward")[0],
            "The warm-up batches are trained on like all others: only their seconds are left "
            "out.": Trial().ordered(STEP, first=2)[0],
        },
    )


@LAB.check("the mean loss over all samples", read="A network that learns")
def mean_loss(bench: Bench) -> None:
    _, loss = Trial(warmup=2).by(bench)
    bench.expect(
        isinstance(loss, float),
        "the loss as a float",
        f"a {type(loss).__name__}",
        "`loss.item()` is the number in a tensor. A tensor may keep its graph in memory.",
    )
    of_batch = torch.tensor(Trial().ordered(STEP)[1], dtype=torch.float64)
    size = torch.tensor(SIZES)
    added = of_batch * size
    warm = added[2:].sum() / size[2:].sum()
    mistakes = {
        "That is the mean over the batches, but the last one is smaller: weight each batch's loss "
        "by its samples.": of_batch.mean(),
        "That is a sum of losses: divide it by the samples of all batches.": added.sum(),
        "That is the sum of the batches' mean losses: multiply each by its samples, and divide by "
        "all samples.": of_batch.sum(),
        "That is the last batch's loss.": of_batch[-1],
        "The warm-up batches are not in it: only their seconds are left out.": warm,
    }
    got = torch.tensor(loss, dtype=torch.float64)
    bench.near(got, added.sum() / size.sum(), "the mean loss", mistakes)


@LAB.check("no graph outlives its batch", read="Memory")
def graphs(bench: Bench) -> None:
    trial = Trial()
    trial.by(bench)
    bench.expect(
        trial.model.left <= 1,
        "at most one graph in memory when a forward pass begins, that of the batch before",
        f"{trial.model.left} of them",
        "A loss that is kept, or added to others, keeps its graph in memory: `loss.item()` or "
        "`loss.detach()` does not.",
    )


@LAB.check("the seconds of each part", read="Where the time goes")
def parts(bench: Bench) -> None:
    expect_times(bench, warmup=0)


@LAB.check("warm-up batches are not timed", read="Where it breaks: timing without a warm-up")
def warm(bench: Bench) -> None:
    for warmup in (2, len(SIZES) + 1):
        expect_times(bench, warmup)


def expect_times(bench: Bench, warmup: int) -> None:
    """Expect for each part the seconds of its own work, in the batches after warm-up."""
    trial = Trial(warmup)
    seconds, _ = trial.by(bench)
    timed = max(0, len(SIZES) - warmup)
    for part, belongs in RIGHT.items():
        right = dict.fromkeys(belongs, timed) if timed else {}
        done = done_in(seconds[part])
        bench.expect(
            done == right,
            f"the seconds of {part} to be those of {in_words(right)} ({len(SIZES)} batches, "
            f"{min(warmup, len(SIZES))} of them warm-up)",
            f"{seconds[part]:.3g} seconds" if done is None else in_words(done),
            likely_mistake(trial.clock, seconds[part], right),
        )


def likely_mistake(clock: Clock, seconds: float, right: dict[str, int]) -> str:
    """Return the sentence for the likely reason of a part's wrong seconds."""
    done = done_in(seconds)
    add = "Add up the seconds of all timed batches: no mean, and not the last one's alone."
    if not clock.reads:
        return "The clock that is given was never read: take the time from `now()`."
    if done is None:
        return add
    more = set(done) - set(right)
    if more & set(WORK):
        return (
            "Another part is in it, too: read the clock where a part begins and where it ends, in "
            "each batch anew."
        )
    if more:
        return {
            "loading": "Loading is in it: read the clock when the batch is there, inside the loop.",
            "zeroing": "Zeroing the gradients is in it: do that before the clock is read.",
            WHAT[-1]: "Train on the first `warmup` batches, but do not add their seconds.",
        }[min(more, key=WHAT.index)]
    if "the loss" in set(right) - set(done):
        return "The loss belongs to the forward pass: read the clock when it is computed."
    if any(done.get(what, 0) < count for what, count in right.items()):
        return add
    return "Some seconds are in it more than once: add the difference of two readings."


def in_words(times: dict[str, int]) -> str:
    """Write down what was done, and how often."""
    words = [f"{f'{count} times' if count > 1 else 'once'} {what}" for what, count in times.items()]
    return ", ".join(words) or "nothing"
