"""A lab: functions to write, and checks of what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microddp.labs.engine.bench import Bench

WORLD_SIZES = (1, 2, 3, 4)
SEVERAL = (2, 3, 4)
FOLDER = Path(__file__).parents[1]  # with a folder for each lab


@dataclass(frozen=True)
class Check:
    """One thing that a reader's functions must do.

    Attributes:
        title: what must hold, in words.
        read: heading of the chapter's section that explains it.
        run: called on every rank. If it does not hold, it raises
            :class:`~microddp.labs.engine.bench.Wrong`.
        ranks: world sizes of its jobs.
        link: speed of each rank's own host's link, ``"200mbit"``; empty for ranks on this machine.
    """

    title: str
    read: str
    run: Callable[[Bench], None]
    ranks: Sequence[int]
    link: str


@dataclass(frozen=True, order=True)
class Stage:
    """The ranks that run some of a lab's checks, as one job.

    Attributes:
        link: speed of each rank's own host's link; empty for ranks on this machine.
        ranks: number of ranks.
    """

    link: str
    ranks: int

    def __str__(self) -> str:
        """In words: ``"on 2 ranks"``."""
        ranks = f"on {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{ranks} with links of {self.link}" if self.link else ranks


@dataclass(eq=False)
class Lab:
    """A step of the course for the reader to build. Its checks are added by :meth:`check`.

    Args:
        name: name of its folder, ``"lab02_ring"``, with the chapter's number.
        title: what is built, in a few words.
        chapter: name of the chapter's file, without ending.
        functions: names of what is to be written: ``"step"``, or ``"Counter.add"`` for a method.
        hints: from the one that gives the least away.
        ranks: world sizes of a check that names none itself.
        patience: seconds in which some rank must finish something; otherwise they hang.
        hindrance: called with a stage; why this machine cannot run it, or an empty text.
    """

    name: str
    title: str
    chapter: str
    functions: Sequence[str]
    hints: Sequence[str]
    ranks: Sequence[int] = WORLD_SIZES
    patience: float = 5.0
    hindrance: Callable[[Stage], str] = lambda _: ""
    checks: list[Check] = field(default_factory=list, init=False)

    @property
    def number(self) -> str:
        """The chapter's two digits."""
        return self.name[3:5]

    @property
    def solution(self) -> Path:
        """The file with a right solution."""
        return FOLDER / self.name / "solution.py"

    @property
    def stages(self) -> list[Stage]:
        """All stages of its checks, first on this machine and on the fewest ranks."""
        return sorted({Stage(check.link, ranks) for check in self.checks for ranks in check.ranks})

    def checks_on(self, stage: Stage) -> list[Check]:
        """Return the checks that run there, in their order."""
        return [c for c in self.checks if c.link == stage.link and stage.ranks in c.ranks]

    def check(
        self, title: str, read: str, ranks: Sequence[int] | None = None, link: str = ""
    ) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
        """Add the function below as a check, with the attributes of a :class:`Check`."""

        def add(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
            self.checks.append(Check(title, read, run, ranks or self.ranks, link))
            return run

        return add
