"""Losses of several runs of one way to train: their mean and range, and where two ways differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
