"""Findings: sentences that a run makes of its own results.

Typed prose can say why; what came out, only the run knows. A finding has alternatives, each with
the condition under which it is true. Exactly one has to be, the same on every rank, or the run
fails. Its numbers are the run's::

    hooks = compare(steps["hooks"], steps["naive"])
    find(
        comms,
        "hooks",
        gain=(hooks.faster, f"With hooks a step is {hooks}."),
        loss=(hooks.slower, f"Hooks lose: with them a step is {hooks}."),
        neither=(hooks.alike, f"{hooks.say('A step with hooks', 'a naive one')}."),
    )

In a terminal this prints ``> With hooks a step is 1.33 times as fast (1.30 to 1.36).`` and the name
``[hooks.gain]``. The site shows it as prose, and lists the findings of all chapters on one page.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from microddp.comms import Comms, name_ranks, odd_ranks
from microddp.report import human_seconds
from microddp.timing import Timing

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
NO_NUMBER = re.compile(r"\b(nan|inf)\b", re.IGNORECASE)
COLUMNS = 88  # of a terminal


@dataclass(frozen=True)
class Comparison:
    """A ratio of speeds: of one thing beside another of the same run.

    Attributes:
        times: the other's time divided by this one's, round by round: above 1 is faster.
    """

    times: Timing

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return self.times.median

    @property
    def faster(self) -> bool:
        """True if both quartiles are above 1, as printed, too."""
        return float(_ratio(self.times.spread[0])) > 1

    @property
    def slower(self) -> bool:
        """True if both quartiles are below 1, as printed, too."""
        return float(_ratio(self.times.spread[1])) < 1

    @property
    def alike(self) -> bool:
        """True if the run does not tell the two apart."""
        return not (self.faster or self.slower)

    def sides(self, sentence: str) -> dict[str, tuple[bool, str]]:
        """Return alternatives for :func:`find`, with one sentence for all of them."""
        sides = {"faster": self.faster, "slower": self.slower, "alike": self.alike}
        return {side: (holds, sentence) for side, holds in sides.items()}

    @property
    def _quartiles(self) -> str:
        return f"({' to '.join(map(_ratio, self.times.spread))})"

    def __str__(self) -> str:
        return f"{_ratio(self.ratio)} times as fast {self._quartiles}"

    def than(self, other: str) -> str:
        """Say how fast, beside something: ``"1.41 times as fast (1.35 to 1.45) as naive"``."""
        if self.alike:
            return f"not told apart from {other} {self._quartiles}"
        return f"{self} as {other}"

    def say(self, this: str, other: str) -> str:
        """Put the verdict into words: ``"This is 1.41 times as fast (1.35 to 1.45) as other"``."""
        if self.alike:
            return f"This run does not tell apart {_small(this)} and {other} {self._quartiles}"
        return f"{this} is {self.than(other)}"


@dataclass(frozen=True)
class Prediction:
    """A predicted time beside its measurement.

    Attributes:
        predicted: seconds.
        measured: the rounds of the measurement.
    """

    predicted: float
    measured: Timing

    @property
    def held(self) -> bool:
        """True if the prediction lies within the quartiles."""
        low, high = self.measured.spread
        return low <= self.predicted <= high

    @property
    def longer(self) -> bool:
        """True if it took longer than predicted."""
        return self.predicted < self.measured.spread[0]

    @property
    def shorter(self) -> bool:
        """True if it took less time than predicted."""
        return self.predicted > self.measured.spread[1]

    @property
    def off(self) -> float:
        """The measured median divided by the prediction, less 1; above 0 if it took longer."""
        return self.measured.median / self.predicted - 1

    def sides(self, sentence: str) -> dict[str, tuple[bool, str]]:
        """Return alternatives for :func:`find`, with one sentence for all of them."""
        sides = {"held": self.held, "longer": self.longer, "shorter": self.shorter}
        return {side: (holds, sentence) for side, holds in sides.items()}

    def __str__(self) -> str:
        predicted = human_seconds(self.predicted)
        if self.held:
            return f"{in_words(self.measured)}, with the predicted {predicted} within the quartiles"
        way = "longer" if self.longer else "less"
        measured = in_words(self.measured)
        if abs(self.off) < 0.005:
            return f"{measured}, within 0.5% of the predicted {predicted}"
        return f"{measured}, {abs(self.off):.0%} {way} than the predicted {predicted}"


def in_words(timing: Timing) -> str:
    """Put a timing into words: ``"143 ms (140 ms to 146 ms)"``, its median and quartiles."""
    low, high = map(human_seconds, timing.spread)
    return f"{human_seconds(timing.median)} ({low} to {high})"


def compare(this: Timing, other: Timing) -> Comparison:
    """Compare two timings of one run: how many times as fast ``this`` is as ``other``.

    Raises:
        ValueError: they have different numbers of rounds.
    """
    return Comparison(other.ratio(this))


def find(comms: Comms, name: str, **alternatives: tuple[bool, str]) -> None:
    """Print the one sentence that is true. A collective.

    Args:
        comms: the ranks that found it.
        name: of the finding, once in a chapter: lower case, with hyphens between words.
        alternatives: by what each means, a condition and the sentence that is true under it. Text
            between backticks is code.

    Raises:
        ValueError: on every rank: the name has another form.
        RuntimeError: on every rank: none of the alternatives or several are true, the sentence has
            a number that is none, or the ranks found different things.
    """
    who = f"rank {comms.rank}: expected"
    if not NAME.fullmatch(name):
        raise ValueError(f"{who} a finding's name of lower-case words with hyphens, got {name!r}")
    true = [side for side, (holds, _) in alternatives.items() if holds]
    text = " ".join(" ".join(alternatives[side][1] for side in true).split())
    problem = ""
    if len(true) != 1:
        problem = f"{' and '.join(true) or 'none'} of {', '.join(alternatives)}"
    elif NO_NUMBER.search(text):
        problem = f"{true[0]} with a number that is none: {text}"
    comms.fail_together(problem, f"one alternative of the finding {name} to be true")
    said = comms.all_gather_data(f"{name}.{true[0]}")
    usual, odd = odd_ranks(said)
    if odd:
        raise RuntimeError(
            f"{who} the same finding on every rank, got {said[odd[0]]} on {name_ranks(odd)} and "
            f"{usual} on the others"
        )
    _show(comms, text, said[0])


def _show(comms: Comms, text: str, label: str) -> None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if hasattr(shell, "kernel"):  # a notebook, or a console that may show more than text
        if comms.rank == 0:
            ipython.display.display(ipython.display.Markdown(f"{text} <small>[{label}]</small>"))  # type: ignore[union-attr]
        return
    lines = textwrap.wrap(
        f"{text} [{label}]",
        COLUMNS,
        initial_indent="> ",
        subsequent_indent="> ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    comms.print("\n".join(lines))


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _small(text: str) -> str:
    """The text as it begins within a sentence: in lower case, but for an abbreviation or a name."""
    first = text.partition(" ")[0]
    return text[:1].lower() + text[1:] if first[1:] == first[1:].lower() else text


def mark_least(cells: Sequence[str], values: Sequence[float], within: float = 1) -> list[str]:
    """The cells of a table, with a star behind the one whose value is the least.

    The others get a blank, so that they stay aligned.

    Args:
        cells: of a row or column.
        values: of the cells.
        within: so many times the least has a star, too.
    """
    most = min(values) * within
    return [f"{cell} {'*' if v <= most else ' '}" for cell, v in zip(cells, values, strict=True)]
