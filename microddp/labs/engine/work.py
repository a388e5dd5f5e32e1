"""The reader's folder: the scripts, and the last result of each."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from microddp.labs.engine.lab import Lab
from microddp.labs.engine.listener import Outcome
from microddp.labs.engine.skeleton import skeleton
from microddp.results import whole_file


class Work:
    """A folder with one script for each lab that was started.

    Args:
        folder: made when the first lab is started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def script(self, lab: Lab) -> Path:
        """Return the path of a lab's script, which may not be there yet."""
        return self.folder / f"{lab.name}.py"

    def start(self, lab: Lab, *, overwrite: bool = False) -> Path:
        """Write a lab's skeleton.

        Raises:
            FileExistsError: there is a script already, and ``overwrite`` is off.
        """
        path = self.script(lab)
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{path} is there already. To begin anew, and lose what is in it: --overwrite"
            )
        with whole_file(path) as unfinished:
            unfinished.write_text(skeleton(lab.solution.read_text(), lab.functions))
        return path

    def note(self, lab: Lab, outcomes: Sequence[Outcome], digest: str) -> str:
        """Keep the result of checks; return it in words: ``"5 of 5 checks"``.

        Args:
            lab: the lab.
            outcomes: of its stages.
            digest: of the script when they began.

        Raises:
            ValueError: the file of results is damaged.
        """
        held = [
            all(
                check.title in outcome.passed
                for outcome in outcomes
                if check in lab.checks_on(outcome.stage)
            )
            for check in lab.checks
        ]
        result = {"passed": sum(held), "checks": len(held), "script": digest}
        result["date"] = time.strftime("%Y-%m-%d %H:%M")
        with whole_file(self._notes) as unfinished:
            results = {**self._results(), lab.name: result}
            unfinished.write_text(json.dumps(results, indent=2) + "\n")
        return f"{sum(held)} of {len(held)} checks"

    def state(self, lab: Lab) -> str:
        """Say how far a lab has come."""
        if not self.script(lab).exists():
            return "not started"
        result = self._results().get(lab.name)
        if result is None:
            return "started"
        text = f"{result['passed']} of {result['checks']} checks passed, {result['date']}"
        return text if result["script"] == self.digest(lab) else f"{text}; changed since"

    @property
    def _notes(self) -> Path:
        return self.folder / "progress.json"

    def _results(self) -> dict[str, dict[str, Any]]:
        if not self._notes.exists():
            return {}
        try:
            results: dict[str, dict[str, Any]] = json.loads(self._notes.read_text())
            if not isinstance(results, dict) or not all(map(_is_result, results.values())):
                raise ValueError("expected a result for each lab")
        except ValueError as error:
            raise ValueError(f"{self._notes} is damaged, delete it: {error}") from error
        return results

    def digest(self, lab: Lab) -> str:
        """Return a hash of a lab's script."""
        return hashlib.blake2b(self.script(lab).read_bytes(), digest_size=8).hexdigest()


def _is_result(value: object) -> bool:
    return isinstance(value, dict) and value.keys() >= {"passed", "checks", "script", "date"}
