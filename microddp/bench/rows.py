"""Report of a benchmark: its rows as a table, sentences on them, and a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tqdm import tqdm

from microddp.comms import Comms
from microddp.report import MIB, table
from microddp.results import write_result
from microddp.timing import Timing

Row = Mapping[str, Any]  # numbers and texts, by their names in the file
Column = str | Callable[[Row], object]  # the cell of a row: as for ``str.format``, or a function


def report(
    rows: Sequence[Row],
    columns: Mapping[str, Column],
    sentences: Sequence[str],
    options: argparse.Namespace,
    comms: Comms,
) -> None:
    """Print, on the rank that calls it; write the JSON file that was asked for.

    Args:
        rows: rows of the table and of the file.
        columns: what the table has of each, by the columns' headers.
        sentences: conclusions from the rows.
        options: command line, with ``json``.
        comms: ranks that took part.
    """
    cells = [
        [cell.format(**row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in rows
    ]
    print(table(cells, [*columns]))
    for sentence in sentences:
        print(sentence)
    if comms.crowded:
        print("More ranks than cores or GPUs: the ranks wait for each other's turn on one.")
    if options.json:
        write_result(options.json, comms.describe(), rows=rows)


def mib(name: str, form: str) -> Column:
    """A column of bytes, in MiB."""
    return lambda row: format(row[name] / MIB, form)


def progress_bar(rounds: int, comms: Comms) -> tqdm[NoReturn]:
    """Make a bar of so many rounds, which is seen on rank 0 in a terminal."""
    hidden = None if comms.rank == 0 else True  # None: where nobody looks
    return tqdm(total=rounds, disable=hidden, unit="round", leave=False)


def in_milliseconds(timing: Timing) -> dict[str, float]:
    """Return a row's numbers of a timing."""
    low, high = timing.spread
    return {"median_ms": timing.median * 1e3, "low_ms": low * 1e3, "high_ms": high * 1e3}


def with_quartiles(name: str, ratio: Timing) -> dict[str, float]:
    """Return a row's numbers of a ratio of timings."""
    low, high = ratio.spread
    return {name: ratio.median, f"{name}_low": low, f"{name}_high": high}
