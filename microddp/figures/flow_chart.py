"""Flow charts: questions to ask in their order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from microddp.figures.drawing import Drawing, drawing, is_narrow, new_panels, width, wrapped
from microddp.figures.style import COLORS, GREY, INK, NAMES

HEAD, BOX, GAP = 0.4, 0.44, 0.18  # inches: height of a heading, of a box, and of the gap below
INSET = 0.08  # inches, from a box's side to its text


@drawing
def questions(parts: Mapping[str, Sequence[tuple[str, str]]]) -> Drawing:
    """Draw questions one below the other, each with its action if the answer is yes.

    The action stands beside its question; on a phone below it.

    Args:
        parts: questions with their actions, in the order in which to ask, by a part's heading.
    """
    right = width()
    ask = (0.0, 3.3) if is_narrow() else (0.0, 2.75)
    do = (0.55, right) if is_narrow() else (3.45, right)
    below = BOX + GAP if is_narrow() else 0.0  # from a question to its action
    step = BOX + GAP + below
    height = sum(HEAD + step * len(part) for part in parts.values())
    figure, panels = new_panels(1, 1, height)
    axes: Axes = panels[0, 0]
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-0.05, right + 0.05), ylim=(-height, 0))
    top = 0.0
    for color, (heading, part) in zip(itertools.cycle(COLORS), parts.items(), strict=False):
        axes.text(0, top - HEAD / 2, heading, color=NAMES[color], weight="bold", va="center")
        figure.tell(heading, [f"{asked} If yes: {answer}" for asked, answer in part])
        top -= HEAD
        for row, (asked, answer) in enumerate(part):
            _box(axes, ask, top, asked, color)
            _box(axes, do, top - below, answer, GREY)
            middle = top - BOX / 2
            if is_narrow():
                _arrow(axes, (2.2, top - BOX), (2.2, top - below), "yes")
            else:
                _arrow(axes, (ask[1], middle), (do[0], middle), "yes")
            if row < len(part) - 1:
                x = 0.25 if is_narrow() else sum(ask) / 2
                _arrow(axes, (x, top - BOX), (x, top - step), "no" if row == 0 else "")
            top -= step
    return figure


def _box(axes: Axes, sides: tuple[float, float], top: float, text: str, color: str) -> None:
    left, right = sides
    axes.add_patch(Rectangle((left, top - BOX), right - left, BOX, fill=False, edgecolor=color))
    size = 10 if is_narrow() else 9
    lines = wrapped(text, 0.97 * (right - left) - 2 * INSET, size)
    axes.text(left + INSET, top - BOX / 2, lines, va="center", fontsize=size, linespacing=1.15)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], word: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})
    across = start[1] == end[1]
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    label = axes.annotate(word, middle, xytext=(0, 3) if across else (5, 0), fontsize=9)
    label.set(ha="center" if across else "left", va="bottom" if across else "center")
    label.anncoords = "offset points"
