"""Report of a benchmark: its rows as a table, sentences on them, and a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tqdm import tqdm

from microddp.comms import Comms
from microddp.report import table
from microddp.results import write_result
from microddp.timing import Timing


def report(
    rows: Sequence[Any],
    cells: Sequence[Mapping[str, object]],
    sentences: Sequence[str],
    options: argparse.Namespace,
    comms: Comms,
) -> None:
    """Print, on the rank that calls it; write the JSON file that was asked for.

    Args:
        rows: dataclasses, for the file, each as :func:`numbers_of` writes it.
        cells: texts for each row, by the columns' headers.
        sentences: conclusions from the rows.
        options: command line, with ``json``.
        comms: ranks that took part.
    """
    print(table([cell.values() for cell in cells], [*cells[0]]))
    for sentence in sentences:
        print(sentence)
    if comms.crowded:
        print("More ranks than cores or GPUs: the ranks wait for each other's turn on one.")
    if options.json:
        write_result(options.json, comms.describe(), rows=[numbers_of(row) for row in rows])


def progress_bar(rounds: int, comms: Comms) -> tqdm[NoReturn]:
    """Make a bar of so many rounds, which is seen on rank 0 in a terminal."""
    hidden = None if comms.rank == 0 else True  # None: where nobody looks
    return tqdm(total=rounds, disable=hidden, unit="round", leave=False)


def quartiles(timing: Timing, form: str, unit: float = 1.0) -> str:
    """Write the quartiles of a timing, in units of so many seconds, or those of a ratio."""
    return " to ".join(format(seconds / unit, form) for seconds in timing.spread)


def numbers_of(row: Any) -> dict[str, object]:
    """Return a row's fields, with the median and quartiles of each timing.

    Those of a field ``time`` are in milliseconds; any other timing is a ratio.
    """
    numbers: dict[str, object] = {}
    for name, value in vars(row).items():
        if not isinstance(value, Timing):
            numbers[name] = value
        elif name == "time":
            low, high = value.spread
            numbers |= {"median_ms": value.median * 1e3, "low_ms": low * 1e3, "high_ms": high * 1e3}
        else:
            low, high = value.spread
            numbers |= {name: value.median, f"{name}_low": low, f"{name}_high": high}
    return numbers
