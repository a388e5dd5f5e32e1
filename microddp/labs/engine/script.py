"""A reader's script as a module, without the cells that try it out."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

# A cell that runs what the others define, up to the next one.
TRY = re.compile(r'^# %%[^\n]*tags=\["try"\].*?(?=^# %%|\Z)', re.MULTILINE | re.DOTALL)


def load(path: Path, functions: Sequence[str]) -> ModuleType:
    """Run a script's cells but those tagged ``try``, and return what they define.

    Raises:
        AttributeError: one of the functions is not there.
        Exception: any error of the script's.
    """
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as where Python runs the script
    kept = TRY.sub(lambda cell: "\n" * cell[0].count("\n"), path.read_text())  # lines keep numbers
    exec(compile(kept, str(path), "exec", dont_inherit=True), module.__dict__)
    for name in functions:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise AttributeError(f"expected {path.name} to define {name}")
    return module
