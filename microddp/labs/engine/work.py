"""A reader's folder: the scripts, and how far each one has come."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from microddp.labs.engine.lab import Lab
from microddp.labs.engine.listener import Outcome
from microddp.labs.engine.skeleton import skeleton
from microddp.results import whole_file


@dataclass(frozen=True)
class Result:
    """What the last check of a script found.

    Attributes:
        passed: how many of the lab's checks hold on all numbers of ranks.
        checks: how many there are.
        script: a hash of the script as it was.
        date: when.
    """

    passed: int
    checks: int
    script: str
    date: str


class Work:
    """A folder with one script for each lab that was started.

    Args:
        folder: made when the first lab is started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def script(self, lab: Lab) -> Path:
        """Where a lab's script is, or will be."""
        return self.folder / f"{lab.name}.py"

    def start(self, lab: Lab, *, overwrite: bool = False) -> Path:
        """Write a lab's skeleton.

        Raises:
            FileExistsError: there is a script already, and it is not to be overwritten.
        """
        path = self.script(lab)
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{path} is there already. To begin anew, and lose what is in it: --overwrite"
            )
        with whole_file(path) as unfinished:
            unfinished.write_text(skeleton(lab.solution.read_text(), lab.functions))
        return path

    def note(self, lab: Lab, outcomes: Sequence[Outcome]) -> Result:
        """Keep what the checks of a script found."""
        held = [
            all(
                check.title in outcome.passed
                for outcome in outcomes
                if check in lab.checks_on(outcome.stage)
            )
            for check in lab.checks
        ]
        digest = self._digest(lab)
        result = Result(sum(held), len(held), digest, time.strftime("%Y-%m-%d %H:%M"))
        results = {**self._results(), lab.name: asdict(result)}
        with whole_file(self._notes) as unfinished:
            unfinished.write_text(json.dumps(results, indent=2) + "\n")
        return result

    def state(self, lab: Lab) -> str:
        """How far a lab has come, in words."""
        if not self.script(lab).exists():
            return "not started"
        kept = self._results().get(lab.name)
        if kept is None:
            return "started"
        result = Result(**kept)
        text = f"{result.passed} of {result.checks} checks passed, {result.date}"
        return text if result.script == self._digest(lab) else f"{text}; changed since"

    @property
    def _notes(self) -> Path:
        return self.folder / "progress.json"

    def _results(self) -> dict[str, dict[str, Any]]:
        if not self._notes.exists():
            return {}
        results: dict[str, dict[str, Any]] = json.loads(self._notes.read_text())
        return results

    def _digest(self, lab: Lab) -> str:
        return hashlib.blake2b(self.script(lab).read_bytes(), digest_size=8).hexdigest()
