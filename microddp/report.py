"""Results in words: bytes, times, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

MIB = 1 << 20  # bytes
BYTE_UNITS = ("B", "KiB", "MiB", "GiB")  # each 1024 times the one before


def human_bytes(count: float, _position: object = None) -> str:
    """Bytes in words: ``"64 KiB"``."""
    for unit in BYTE_UNITS:
        if abs(count) < 1023.5 or unit == "GiB":  # from there on it would read "1024"
            break
        count /= 1024
    return f"{count:.3g} {unit}" if abs(count) < 100 else f"{count:.0f} {unit}"


def human_seconds(seconds: float, _position: object = None) -> str:
    """A time in words: ``"1.5 ms"``, ``"3 h"``."""
    if seconds == 0:
        return "0"
    for factor, unit in ((1e-6, "us"), (1e-3, "ms")):
        if abs(seconds) < 999.5 * factor:  # from there on it would read "1e+03"
            return f"{seconds / factor:.3g} {unit}"
    for factor, unit, limit in ((1, "s", 60), (60, "min", 60), (3600, "h", 48)):
        if abs(seconds) < factor * limit:
            return f"{seconds / factor:.3g} {unit}"
    days = seconds / 86400
    return f"{days:.3g} days" if abs(days) < 999.5 else f"{days:,.0f} days"


def table(
    rows: Iterable[Iterable[object]],
    headers: Sequence[str],
    *,
    floats: str | Sequence[str] = ".2f",
    form: str = "simple",
) -> str:
    """Rows under headers; a column of numbers, or of texts that begin with one, to the right.

    Args:
        rows: a cell for each header; ``None`` is left blank.
        headers: with units; none at all for rows that name themselves.
        floats: how floating point numbers are written; one format, or one for each column.
        form: ``"simple"`` for a terminal, ``"grid"`` where cells have several lines, ``"html"`` for
            a page.
    """
    values = [tuple(row) for row in rows]
    width = len(headers) or max(map(len, values), default=0)
    formats = [floats] * width if isinstance(floats, str) else list(floats)
    cells = [[_cell(value, how) for value, how in zip(row, formats, strict=True)] for row in values]
    columns = zip(*cells, strict=True) if cells else [()] * width
    align = ["right" if all(map(_is_quantity, column)) else "left" for column in columns]
    text: str = tabulate(
        cells,
        headers=list(headers),
        tablefmt=form,
        colalign=align,
        disable_numparse=True,
        preserve_whitespace=True,  # of cells that are aligned by themselves
    )
    return text


def _cell(value: object, how: str) -> str:
    if value is None:
        return ""
    return format(value, how) if isinstance(value, float) else str(value)


def _is_quantity(cell: str) -> bool:
    return cell.strip().lower() in ("", "inf", "nan", "none") or cell.lstrip(" +-~<")[:1].isdigit()
