"""What a lab is: functions to write, and checks of what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microddp.labs.engine.bench import Bench

WORLD_SIZES = (1, 2, 3, 4)
FOLDER = Path(__file__).parents[1]  # with a folder for each lab


@dataclass(frozen=True)
class Check:
    """One thing that a reader's functions must do.

    Attributes:
        title: what must hold, in words.
        read: the heading of the chapter's section that explains it.
        run: called on every rank. If it does not hold, it raises
            :class:`~microddp.labs.engine.bench.Wrong`.
        ranks: the world sizes it is run with.
        link: of each rank's own host, as ``"200mbit"``; empty for ranks on this machine.
    """

    title: str
    read: str
    run: Callable[[Bench], None]
    ranks: Sequence[int]
    link: str


@dataclass(frozen=True, order=True)
class Stage:
    """Where some of a lab's checks run, as one job.

    Attributes:
        link: of each rank's own host; empty for ranks on this machine.
        ranks: how many.
    """

    link: str
    ranks: int

    def __str__(self) -> str:
        """In words: ``"on 2 ranks"``."""
        ranks = f"on {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{ranks} with links of {self.link}" if self.link else ranks


class Lab:
    """A step of the course for the reader to build. Its checks are added by :meth:`check`.

    Args:
        name: of its file, ``"lab02_ring"``; the number is the chapter's.
        title: what is built, in a few words.
        chapter: the name of its file, without ending.
        functions: what is to be written: ``"step"``, or ``"Counter.add"`` for a method.
        hints: the first gives the least away.
        patience: seconds for a check; if none of the ranks says anything for so long, they hang.
        hindrance: why a stage cannot be had on this machine; empty: nothing is known to be wrong.
    """

    def __init__(
        self,
        name: str,
        title: str,
        chapter: str,
        functions: Sequence[str],
        hints: Sequence[str],
        patience: float = 5.0,
        hindrance: Callable[[Stage], str] = lambda _: "",
    ) -> None:
        self.name = name
        self.title = title
        self.chapter = chapter
        self.functions = functions
        self.hints = hints
        self.patience = patience
        self.hindrance = hindrance
        self.checks: list[Check] = []

    @property
    def number(self) -> str:
        """Two digits, those of the chapter."""
        return self.name[3:5]

    @property
    def solution(self) -> Path:
        """The file with a right solution."""
        return FOLDER / self.name / "solution.py"

    @property
    def stages(self) -> list[Stage]:
        """Where its checks run, in order, first on this machine and on the fewest ranks."""
        return sorted({Stage(check.link, ranks) for check in self.checks for ranks in check.ranks})

    def checks_on(self, stage: Stage) -> list[Check]:
        """Those of its checks that run there, in their order."""
        return [c for c in self.checks if c.link == stage.link and stage.ranks in c.ranks]

    def check(
        self, title: str, read: str, ranks: Sequence[int] = WORLD_SIZES, link: str = ""
    ) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
        """Add a check; what it takes is what :class:`Check` has."""

        def add(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
            self.checks.append(Check(title, read, run, ranks, link))
            return run

        return add
