"""A small transformer that learns to predict the next character of a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from microddp.comms import Comms
from microddp.data import CHARACTERS, ShardedBatches, Split
from microddp.report import mark_least
from microddp.step import FULL_PRECISION, Strategy, take_step
from microddp.timing import seconds_now, slowest_rank
from microddp.workloads.transformer import Transformer, token_loss

DIM, DEPTH, HEADS, LENGTH = 64, 2, 4, 64
BATCH = 16  # sequences, over all ranks
LR = 5e-3
WINDOW = 16  # steps to smooth the loss over: some batches are harder than others


def character_model(device: torch.device | str = "cpu") -> nn.Module:
    """Make a transformer for ``LENGTH`` characters, with random weights, the same on each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(CHARACTERS, DIM, DEPTH, HEADS, LENGTH).to(device)


@dataclass(frozen=True)
class Learned:
    """Losses and times of a training run, the same on every rank.

    Attributes:
        losses: loss of each step's global batch, before the step.
        seconds: time from the start of training to the end of each step, on the slowest rank.
    """

    losses: Sequence[float]
    seconds: Sequence[float]

    @property
    def step(self) -> float:
        """Mean seconds of a step, without the first ones, which allocate memory and connect."""
        skipped = min(WINDOW, len(self.seconds) // 4)
        begin = self.seconds[skipped - 1] if skipped else 0.0
        return (self.seconds[-1] - begin) / (len(self.seconds) - skipped)

    @property
    def smooth(self) -> list[float]:
        """For each step, the mean loss of that step and up to ``WINDOW`` - 1 steps before it."""
        windows = (self.losses[max(0, i - WINDOW) : i] for i in range(1, len(self.losses) + 1))
        return [sum(window) / len(window) for window in windows]

    def steps_to(self, loss: float) -> float:
        """Count the steps after which the smooth loss is at most ``loss``; infinite if never.

        The first ``WINDOW`` - 1 steps do not count: their smooth loss is a mean of fewer.
        """
        reached = (i for i, at in enumerate(self.smooth, start=1) if i >= WINDOW and at <= loss)
        return next(reached, float("inf"))

    def seconds_to(self, loss: float) -> float:
        """Measure the time until the smooth loss is at most ``loss``; infinite if never."""
        steps = self.steps_to(loss)
        return self.seconds[int(steps) - 1] if steps < float("inf") else steps


@dataclass(frozen=True)
class Curves:
    """Losses of several runs of one way to train, which begin differently.

    Attributes:
        losses: of each run, as many, and of the same steps.
        every: number of steps from one loss to the next.
    """

    losses: Sequence[Sequence[float]]
    every: int

    @property
    def mean(self) -> list[float]:
        """The mean loss of the runs, by step."""
        return [sum(at) / len(at) for at in zip(*self.losses, strict=True)]

    @property
    def ends(self) -> list[float]:
        """The last loss of each run."""
        return [run[-1] for run in self.losses]

    def steps_to(self, loss: float) -> list[float]:
        """Count the steps until each run is at this loss or below; infinite if it never is."""
        return [
            next((self.every * i for i, at in enumerate(run, start=1) if at <= loss), float("inf"))
            for run in self.losses
        ]

    def beside(self, other: Curves) -> str:
        """Say where these runs end beside others that began alike: where they do in all of them.

        Losses are compared as they are written.
        """
        pairs = zip(self.ends, other.ends, strict=True)
        apart = [round(mine, 2) - round(theirs, 2) for mine, theirs in pairs]
        if max(apart) < 0:
            return "below"
        return "above" if min(apart) > 0 else "not told apart from"

    def sides(self, other: Curves, sentence: str) -> dict[str, tuple[bool, str]]:
        """Return alternatives for :func:`microddp.findings.find`, with one sentence for all."""
        found = self.beside(other).partition(" ")[0]
        return {side: (found == side, sentence) for side in ("below", "above", "not")}

    def __str__(self) -> str:
        ends = self.ends
        return f"{sum(ends) / len(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"


def times_by_link(
    ways: Mapping[str, tuple[Learned, float]],
    loss: float,
    seconds_per_byte: float,
    links: Iterable[float],
) -> dict[str, list[str]]:
    """Predict the time to a loss over other links, for the runs that reached it.

    The prediction is the run's number of steps, times the measured time of a step with the time of
    its bytes replaced.

    Args:
        ways: by name, a run and the bytes that a rank sent in each step.
        loss: the loss to reach.
        seconds_per_byte: seconds a byte on the links of the runs.
        links: speeds to predict for, in bits a second.

    Returns:
        By name, a time for each link; a star marks times within 15 % of the shortest.
    """
    came = {name: way for name, way in ways.items() if way[0].steps_to(loss) < float("inf")}
    columns = []
    for bits in links if came else ():
        more = 8 / bits - seconds_per_byte
        times = [run.steps_to(loss) * (run.step + sent * more) for run, sent in came.values()]
        columns.append(mark_least([f"{seconds:.2f} s" for seconds in times], times, within=1.15))
    return {name: list(cells) for name, cells in zip(came, zip(*columns, strict=True), strict=True)}


def learn(
    strategy: Strategy,
    data: Split,
    comms: Comms,
    steps: int,
    autocast: AbstractContextManager[object] = FULL_PRECISION,
) -> Learned:
    """Train a character model with AdamW, against the clock. A collective.

    The global batches are the same for any number of ranks and any strategy.

    Args:
        strategy: has the replica, and decides what is averaged when.
        data: result of :func:`microddp.data.load_text`, on the device of the ranks.
        comms: the ranks that share each batch.
        steps: number of steps; when the text ends, it starts again in another order.
        autocast: context of forward, for its precision.
    """
    optimizer = torch.optim.AdamW(strategy.parameters(), lr=LR)
    losses, seconds = [], []
    comms.barrier()
    start = seconds_now(comms.device)
    for batch in itertools.islice(character_batches(data, comms), steps):
        losses.append(take_step(strategy, token_loss, optimizer, batch, autocast=autocast))
        seconds.append(seconds_now(comms.device) - start)
    strategy.meet()
    mean = comms.all_gather(torch.stack(losses)).mean(dim=0).tolist()
    return Learned(mean, slowest_rank(torch.tensor(seconds, dtype=torch.float64), comms).tolist())


def character_batches(data: Split, comms: Comms) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield this rank's shards of the batches that :func:`learn` trains on, without end."""
    size = comms.world_size * max(1, BATCH // comms.world_size)
    shards = ShardedBatches(data.train, size, comms.rank, comms.world_size)
    return itertools.chain.from_iterable(map(shards.epoch, itertools.count()))
