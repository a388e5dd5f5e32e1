"""Scripts that readers may hand in: for each lab two right ones, and many wrong ones."""

import importlib
from dataclasses import dataclass
from pathlib import Path

from microddp.labs.engine.catalogue import LABS
from microddp.labs.engine.job import run_job
from microddp.labs.engine.results import explain
from microddp.labs.engine.skeleton import skeleton


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        lab: name of its lab.
        name: what is right or wrong with it, in words.
        script: its text.
        says: a regular expression for what the check must say of it; None if it is right.
    """

    lab: str
    name: str
    script: str
    says: str | None = None

    def __str__(self) -> str:
        return f"{self.lab}: {self.name}"


def cases(lab: str) -> list[Case]:
    """Return all scripts for a lab.

    Its ``WRONG`` has, by what is wrong: what is replaced in the solution, and what the check must
    say of it.
    """
    path = LABS[lab].solution
    solution = path.read_text()
    given = skeleton(solution, LABS[lab].functions)
    found = [
        Case(lab, "the skeleton", given, "is not written yet"),
        Case(lab, "the solution", solution),
        Case(lab, "a second solution", path.with_name("second.py").read_text()),
    ]
    wrong = importlib.import_module(f"microddp.labs.{lab}.wrong")
    for name, (replacements, says) in wrong.WRONG.items():
        found.append(Case(lab, name, replaced(solution, replacements), says))
    return found


def replaced(text: str, replacements: dict[str, str]) -> str:
    """Return the text with parts replaced.

    Raises:
        ValueError: a part is not there.
    """
    for old, new in replacements.items():
        if old not in text:
            raise ValueError(f"expected {old!r} in the solution")
        text = text.replace(old, new)
    return text


def verdict(case: Case, folder: Path) -> str:
    """Run a script's checks; return what they say, nothing if all that can run here are passed."""
    lab = LABS[case.lab]
    script = folder / f"{case.lab}.py"
    script.write_text(case.script)
    for stage in lab.stages:
        outcome = run_job(lab, script, stage)
        if outcome.failure:
            return explain(lab, outcome)
    return ""
