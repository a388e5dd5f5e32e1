"""Figures of a collective: the values on each rank, and the bytes from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from microddp.figures.drawing import Drawing, drawing, is_narrow, new_panels, width
from microddp.figures.style import COLORS, GREY
from microddp.report import BYTE_UNITS, human_bytes

Rows = Sequence[Sequence[int]]  # the values on each rank, in rank order
WIDTH = 4.9  # inches: narrower than the other figures, as its squares need no more
CELL = 0.3  # inches, the height of a square
SIZE = 0.86  # of a square; the rest is the gap to the next one


def contributors(value: int) -> list[int]:
    """List the ranks whose values are in a sum: its decimal digits, from the right, that are not 0.

    Rank r's part p is written as ``(p + 1) * 10**r``. Each rank has a digit of its own, so a sum
    tells who is in it.

    Example:
        >>> contributors(3033)
        [0, 1, 3]
    """
    return [rank for rank, digit in enumerate(reversed(str(value))) if digit != "0"]


@drawing
def holdings(panels: Mapping[str, tuple[Rows, Rows]], *, title: str) -> Drawing:
    """Draw the values on each rank before and after a collective: a row of squares for each rank.

    On a phone "after" lies below "before". A square has its number in it, on the colour of the rank
    whose value that is; in a sum, each digit is on the colour of its own rank.

    Args:
        panels: values on every rank before and after a collective, by its name, as numbers that
            :func:`contributors` can read. A rank may hold nothing.
        title: finding, in words.
    """
    sides = [side for panel in panels.values() for side in panel]
    ranks = max(map(len, sides))
    columns = max(1, *(len(row) for side in sides for row in side))
    inches = min(WIDTH, width())
    sides_below = 2 if is_narrow() else 1
    height = 0.6 + len(panels) * sides_below * (0.4 + CELL * ranks)
    figure, axes = new_panels(len(panels), 1, height, inches=inches)
    figure.headline(title)
    # Where the squares of "after" begin.
    left, top = (0.0, ranks + 1.3) if is_narrow() else (columns + 0.8, 0.0)
    for ax, (name, (before, after)) in zip(axes[:, 0], panels.items(), strict=True):
        ax.set_axis_off()
        ax.set(xlim=(-0.3 * columns, left + columns), ylim=(top + ranks, -0.9))
        for rank in range(ranks):
            for y in dict.fromkeys((0.0, top)):
                ax.text(-0.15, y + rank + SIZE / 2, f"rank {rank}", ha="right", va="center")
        _draw_side(ax, before, (0.0, 0.0), f"before {name}")
        _draw_side(ax, after, (left, top), f"after {name}")
    figure.tell(f"Before and after, on {ranks} ranks", list(panels))
    return figure


def _draw_side(axes: Axes, rows: Rows, corner: tuple[float, float], heading: str) -> None:
    left, top = corner
    axes.text(left, top - 0.2, heading)
    for rank, values in enumerate(rows):
        if not values:
            axes.text(left, top + rank + SIZE / 2, "nothing", va="center", style="italic")
        for column, value in enumerate(values):
            _draw_square(axes, left + column, top + rank, value)


def _draw_square(axes: Axes, left: float, top: float, value: int) -> None:
    sources = contributors(value)
    stripes = [(source, str(value)) for source in sources]
    if len(sources) != 1:  # a stripe for each digit, of which the last one is rank 0's
        stripes = list(enumerate(reversed(str(value))))[::-1]
    width = SIZE / len(stripes)
    for i, (rank, text) in enumerate(stripes):
        color = COLORS[rank % len(COLORS)] if rank in sources else GREY
        corner = (left + i * width, top)
        axes.add_patch(Rectangle(corner, width, SIZE, facecolor=color, linewidth=0))
        middle = (left + (i + 0.5) * width, top + SIZE / 2)
        fontsize = 10 if len(stripes) < 4 else 9
        axes.text(*middle, text, ha="center", va="center", fontsize=fontsize, color="black")


def _short(size: float) -> str:
    """Write a size with two digits at least, and no 0 before a point: squares are small."""
    return f"{size:.0f}" if size >= 10 else f"{size:.2g}".removeprefix("0")


@drawing
def traffic(matrices: Mapping[str, Sequence[Sequence[float]]], *, title: str) -> Drawing:
    """Draw the bytes from rank to rank: one square of ranks by ranks for each algorithm.

    Args:
        matrices: bytes from row to column, by the algorithm's name.
        title: finding, in words.
    """
    shape = (len(matrices), 1) if is_narrow() else (1, len(matrices))
    figure, panels = new_panels(*shape, 3.4 * shape[0] if is_narrow() else 3.0)
    figure.headline(title)
    largest = max(max(map(max, matrix)) for matrix in matrices.values()) or 1
    unit = human_bytes(largest).split()[1]
    unit_bytes = 1024 ** BYTE_UNITS.index(unit)
    fontsize = 10 if is_narrow() else 8
    for axes, (name, matrix) in zip(panels.flat, matrices.items(), strict=True):
        boxes = []
        axes.imshow(np.ma.masked_equal(matrix, 0), cmap="Blues", vmin=0, vmax=2 * largest)
        for i, row in enumerate(matrix):
            for j, size in enumerate(row):
                if size:
                    style = {"ha": "center", "va": "center", "fontsize": fontsize}
                    axes.text(j, i, _short(size / unit_bytes), color="black", **style)
                    place = (j - 0.5, j + 0.5, i + 0.5, i - 0.5)
                    boxes.append((place, f"rank {i} to rank {j}: {human_bytes(size)}"))
        figure.boxes(axes, name, boxes)
        axes.set_title(name, loc="center")
        axes.set_xlabel("to rank")
        axes.set_xticks(range(len(matrix)))
        axes.set_yticks(range(len(matrix)))
        axes.grid(visible=False)
        if axes is panels.flat[0] or is_narrow():
            axes.set_ylabel(f"from rank (squares: {unit})")
    figure.tell("Squares", list(matrices))
    return figure
