"""What a benchmark says in the end: its rows as a table, what follows from them, and a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from microddp.comms import Comms
from microddp.report import table, write_result


def report(
    rows: Sequence[Any],
    cells: Sequence[Mapping[str, object]],
    sentences: Sequence[str],
    options: argparse.Namespace,
    comms: Comms,
) -> None:
    """Print, on the rank that calls it; write the JSON file that was asked for.

    Args:
        rows: dataclasses, for the file.
        cells: of each row, by the columns' headers.
        sentences: on what the rows show.
        options: with ``json``.
        comms: that ran.
    """
    print(table([cell.values() for cell in cells], [*cells[0]]))
    for sentence in sentences:
        print(sentence)
    if comms.crowded:
        print("More ranks than cores or GPUs: the ranks wait for each other's turn on one.")
    if options.json:
        write_result(options.json, comms.describe(), rows=[vars(row) for row in rows])
