"""All labs, by the names of their files: each module in ``checks/`` has one."""

from __future__ import annotations

import importlib
import pkgutil

from microddp.labs import checks
from microddp.labs.lab import Lab

NAMES = sorted(module.name for module in pkgutil.iter_modules(checks.__path__))
LABS: dict[str, Lab] = {
    name: importlib.import_module(f"{checks.__name__}.{name}").LAB for name in NAMES
}


def find(number: str) -> Lab:
    """The lab of a number, as ``"2"`` or ``"02"``, or of a name.

    Raises:
        ValueError: there is none.
    """
    for lab in LABS.values():
        if number in (lab.name, lab.number, lab.number.lstrip("0") or "0"):
            return lab
    numbers = ", ".join(lab.number for lab in LABS.values())
    raise ValueError(f"expected the number of a lab ({numbers}), got {number!r}")
