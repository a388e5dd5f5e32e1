"""Hearing what the ranks of a lab's job find: what passed, and why it ended if not all did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from microddp.labs.engine.lab import Lab, Stage
from microddp.labs.engine.rank import LOADING, Died, Failed, Passed
from microddp.launch import Gone, Job, Report

LOADS = 60.0  # seconds to start the ranks, to join them and to load the script
GRACE = 1.0  # seconds for the other ranks to find out for themselves, once one has failed


@dataclass(frozen=True)
class Failure:
    """The failure of a job, and of which ranks.

    Attributes:
        title: of the check.
        read: the section that explains it.
        found: what each rank found that failed; nothing if all only waited.
        story: where the ranks were then.
    """

    title: str
    read: str
    found: Mapping[int, Failed] = field(default_factory=dict)
    story: str = ""

    @property
    def hangs(self) -> bool:
        """True if no rank said anything any more."""
        return not self.found


@dataclass
class Outcome:
    """The outcome of a job.

    Attributes:
        stage: where.
        passed: the titles of the checks that all ranks passed.
        deaths: the titles of the checks that let a process die, one for each time that they did.
        failure: the failure of the first check that not all ranks passed.
        refused: why the job could not run here; empty if it could.
        printed: what each rank printed, if anything.
        seconds: how long it took.
    """

    stage: Stage
    passed: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    failure: Failure | None = None
    refused: str = ""
    printed: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0


class Listener:
    """Hears what the ranks find, until all are through, one has failed, or one has to die."""

    def __init__(self, lab: Lab, outcome: Outcome, progress: Callable[[str], object]) -> None:
        self.outcome, self.progress = outcome, progress
        self.patience = lab.patience
        self.ranks = outcome.stage.ranks
        self.read = {LOADING: "", **{c.title: c.read for c in lab.checks_on(outcome.stage)}}
        titles = [title for title in self.read if title not in outcome.passed]
        self.after = dict(zip(titles, [*titles[1:], titles[-1]], strict=True))
        self.under_way = [LOADING] * self.ranks
        self.passed = Counter[str]()  # by title, on how many ranks
        self.found: dict[int, Failed] = {}  # by rank, the first first
        self.death = ""  # the title of the check that lets a process die

    def listen(self, job: Job) -> Failure | None:
        """Listen until the job is over; return its failure, if it has one."""
        self.end = time.monotonic() + LOADS
        while not self._over() and (heard := job.hear(0.0 if self.death else self.end)):
            for rank, message in heard:
                self._hear(rank, message)
        if self.death:  # errors are of ranks that were left alone
            self.outcome.deaths.append(self.death)
            self.found = {rank: failed for rank, failed in self.found.items() if failed.expected}
        elif not self._over() and not self.found:
            title = min(self.under_way, key=list(self.read).index)
            return Failure(title, self.read[title])
        return self._cause() if self.found else None

    def _over(self) -> bool:
        """True if nothing more is to be heard."""
        through = len(self.outcome.passed) == len(self.read) - 1
        return through or len(self.found) == self.ranks

    def _cause(self) -> Failure:
        """The failure from which all others may have followed."""
        dead = {rank: found for rank, found in self.found.items() if found.dead}
        causes = {rank: found for rank, found in self.found.items() if not found.follows}
        causes = dead or causes or self.found
        title = self.under_way[next(iter(causes))]
        same = {rank: f for rank, f in causes.items() if self.under_way[rank] == title}
        return Failure(title, self.read[title], same)

    def _hear(self, rank: int, message: Passed | Failed | Died | Report | Gone) -> None:
        title = self.under_way[rank]
        if isinstance(message, Failed):
            self._fails(rank, message)
        elif isinstance(message, Died):
            self.death = title
        elif isinstance(message, Report):  # what found it went wrong itself
            self._fails(rank, Failed("", message.error))
        elif isinstance(message, Gone):
            self._fails(rank, Failed("", f"its process {message}, without a word", dead=True))
        else:
            self.passed[title] += 1
            self.under_way[rank] = self.after[title]
            if self.passed[title] == self.ranks and title != LOADING:
                self.outcome.passed.append(title)
                self.progress(title)
        if not self.found:
            loading = LOADING in self.under_way
            self.end = time.monotonic() + (LOADS if loading else self.patience)

    def _fails(self, rank: int, failed: Failed) -> None:
        if not self.found:  # from the first on it only counts down
            self.end = time.monotonic() + GRACE
        self.found.setdefault(rank, failed)  # what comes after a report is only its end
