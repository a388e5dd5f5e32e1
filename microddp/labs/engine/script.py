"""A reader's script as a module: all of its cells but those that try it out."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

CELL = re.compile(r"^# %%.*$", re.MULTILINE)
TRY = 'tags=["try"]'  # a cell that runs what the others define


def load(path: Path, functions: Sequence[str]) -> ModuleType:
    """Run the script's cells, but for those that are tagged ``try``, and return what they define.

    Raises:
        AttributeError: one of the functions is not there.
        Exception: whatever the script raises.
    """
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(_without_trying(path.read_text()), str(path), "exec"), module.__dict__)
    for name in functions:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise AttributeError(f"expected {path.name} to define {name}")
    return module


def _without_trying(script: str) -> str:
    """The script, with nothing but line breaks where its cells to try are."""
    starts = [match.start() for match in CELL.finditer(script)] or [0]
    cells = [script[: starts[0]]]
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        cell = script[start:end]
        cells.append("\n" * cell.count("\n") if TRY in cell.partition("\n")[0] else cell)
    return "".join(cells)
