"""Flow charts: questions to ask in their order."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from microddp.figures.style import COLORS, GREY, drawing

WIDTH, ROW, HEAD = 7.0, 0.62, 0.4  # inches
ASK, DO = (0.0, 2.75), (3.45, 7.0)  # inches from the left, of what is asked and of what to do
LETTERS = 12.4  # an inch, on average


@drawing
def questions(parts: Mapping[str, Sequence[tuple[str, str]]]) -> Figure:
    """Questions one below the other, each with what to do if the answer is yes.

    Args:
        parts: by its heading, a part's questions and what to do, in the order in which to ask.
    """
    height = sum(HEAD + ROW * len(part) for part in parts.values())
    figure = plt.figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-0.05, WIDTH + 0.05), ylim=(-height, 0))
    top = 0.0
    for color, (heading, part) in zip(COLORS, parts.items(), strict=False):
        axes.text(0, top - HEAD / 2, heading, color=color, weight="bold", va="center")
        top -= HEAD
        for row, (asked, answer) in enumerate(part):
            middle = top - ROW / 2
            _box(axes, ASK, middle, asked, color)
            _box(axes, DO, middle, answer, GREY)
            _arrow(axes, (ASK[1], middle), (DO[0], middle), "yes")
            if row < len(part) - 1:
                x = sum(ASK) / 2
                _arrow(axes, (x, middle - 0.22), (x, middle - ROW + 0.22), "no" if row == 0 else "")
            top -= ROW
    return figure


def _box(axes: Axes, sides: tuple[float, float], middle: float, text: str, color: str) -> None:
    left, right = sides
    box = Rectangle((left, middle - 0.22), right - left, 0.44, fill=False, edgecolor=color)
    axes.add_patch(box)
    lines = textwrap.fill(text, int((right - left) * LETTERS))
    axes.text(left + 0.08, middle, lines, va="center", fontsize=9, linespacing=1.15)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], word: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY})
    across = start[1] == end[1]
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    label = axes.annotate(word, middle, xytext=(0, 3) if across else (5, 0), fontsize=8)
    label.set(ha="center" if across else "left", va="bottom" if across else "center")
    label.anncoords = "offset points"
