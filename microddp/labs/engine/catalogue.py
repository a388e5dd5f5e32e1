"""All labs by name, each a folder ``labNN_name`` beside the engine."""

from __future__ import annotations

import importlib

from microddp.labs.engine.lab import FOLDER, Lab

NAMES = sorted(path.name for path in FOLDER.glob("lab[0-9]*"))
LABS: dict[str, Lab] = {
    name: importlib.import_module(f"microddp.labs.{name}.checks").LAB for name in NAMES
}


def find(number: str) -> Lab:
    """Return the lab with this number, ``"2"`` or ``"02"``, or this name.

    Raises:
        ValueError: there is none.
    """
    for lab in LABS.values():
        if number in (lab.name, lab.number, lab.number.lstrip("0") or "0"):
            return lab
    numbers = ", ".join(lab.number for lab in LABS.values())
    raise ValueError(f"expected the number of a lab ({numbers}), got {number!r}")
