"""Figures that can be drawn again for a phone, and whose values can be pointed at.

In the book, ``docs/_ext/figures/scraper.py`` writes a value's place and text to the page, and
``docs/_static/live/values.js`` answers who points.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import torch.distributed as dist
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter

from microddp.figures.style import NAMES, NARROW, STYLE, WIDE
from microddp.results import whole_file

P = ParamSpec("P")
MOST_VALUES = 128  # of a series; of more, values are left out in equal steps
LINE = 0.2  # inches, the height of a line of text
ROW = (0.45, 0.62)  # inches from bar to bar; on a phone there is a name between two
Place = tuple[float, float, float, float]  # left, right, bottom and top of a box
# Now, and not inside the first rc_context: a notebook's back end turns interactive drawing on when
# it is loaded, and leaving the context would turn it off again.
plt.switch_backend(plt.get_backend())


@dataclass
class Series:
    """Drawn values: points of a curve, bars of a row, spans of a lane.

    A place is x and y of a point, or left, right, bottom and top of a box, in the axes' data.
    """

    axes: Axes
    name: str
    labels: tuple[str, ...] = ()  # of the first texts of each value
    places: list[tuple[float, ...]] = field(default_factory=list)
    texts: list[tuple[str, ...]] = field(default_factory=list)


class Drawing(Figure):
    """A figure that can be drawn again, narrow, and whose values can be pointed at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.series: list[Series] = []
        self.told: list[str] = []  # sentences that name all that is drawn, for screen readers
        self.narrow: Callable[[], Figure] | None = None  # draws it again

    def tell(self, what: str, names: Sequence[str]) -> None:
        """Name the drawn parts of a kind, once each. Names can contain commas."""
        if named := "; ".join(dict.fromkeys(" ".join(name.split()) for name in names)):
            self.told.append(f"{what}: {named}")

    def headline(self, title: str) -> None:
        """Set the figure's title, in as many lines as it needs."""
        text = wrapped(title, self.get_figwidth() - 0.15, plt.rcParams["figure.titlesize"])
        self.suptitle(text, x=0.01, ha="left")
        self.taller(text.count("\n"))

    def taller(self, lines: int) -> None:
        """Make room for so many lines of text."""
        self.set_figheight(self.get_figheight() + lines * LINE)

    def legend_below(self, handles: Sequence[Artist], names: Sequence[str]) -> None:
        """Draw a legend below the figure, in as many columns as fit."""
        widest = max(map(text_width, names)) + 0.55
        columns = max(1, min(len(names), 4, int(self.get_figwidth() / widest)))
        self.legend(
            handles, names, loc="outside lower left", ncols=columns, columnspacing=1, borderpad=0.2
        )
        self.taller(-(-len(names) // columns) - 1)

    def points(
        self,
        axes: Axes,
        name: str,
        xs: Sequence[float],
        ys: Sequence[float],
        texts: Sequence[str] = (),
    ) -> None:
        """Let the points of a curve be pointed at.

        Args:
            axes: axes of the curve, with their labels and formatters of ticks.
            name: name of the curve.
            xs: values along the x axis.
            ys: values along the y axis.
            texts: text about each point; by default y as the axis writes it.
        """
        labels = (axes.get_xlabel(), axes.get_ylabel() or axes.get_title(loc="left"))
        series = Series(axes, name, tuple(" ".join(label.split()) for label in labels))
        last = len(xs) - 1
        count = min(len(xs), MOST_VALUES)
        for i in dict.fromkeys(round(k * last / max(1, count - 1)) for k in range(count)):
            series.places.append((float(xs[i]), float(ys[i])))
            y = texts[i] if texts else written(axes.yaxis, ys[i])
            series.texts.append((written(axes.xaxis, xs[i]), y))
        self.series.append(series)

    def boxes(self, axes: Axes, name: str, boxes: Sequence[tuple[Place, str]]) -> None:
        """Let boxes be pointed at: the place of each and the text about it. Places can be equal."""
        places = [tuple(map(float, place)) for place, _ in boxes]
        texts = [tuple(text.split("\n")) for _, text in boxes]
        self.series.append(Series(axes, name, (), places, texts))


def drawing(draw: Callable[P, Drawing]) -> Callable[P, None]:
    """Draw in the book's style, on rank 0 only, and save if asked to.

    The figure keeps its data, to be drawn again narrow.
    """

    def draw_in_width(inches: float, *args: P.args, **kwargs: P.kwargs) -> Drawing:
        with plt.rc_context({**STYLE, "figure.figsize": (inches, 3.4)}):
            return draw(*args, **kwargs)

    @functools.wraps(draw)
    def on_rank_0(*args: P.args, **kwargs: P.kwargs) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        figure = draw_in_width(WIDE, *args, **kwargs)
        figure.narrow = functools.partial(draw_in_width, NARROW, *args, **kwargs)
        if folder := os.environ.get("MICRODDP_FIGURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            stem = Path(sys.argv[0]).stem or "figure"
            figure.savefig(Path(folder) / f"{stem}-{figure.number}.png", dpi=150)

    # It returns nothing, whatever `draw` does: the reference is to say so.
    on_rank_0.__annotations__ = {**draw.__annotations__, "return": None}
    return on_rank_0


def save(path: Path) -> None:
    """Write the figure that was drawn last, as its suffix says; the file appears whole."""
    with whole_file(path) as unfinished:
        plt.savefig(unfinished, dpi=150, facecolor="white", format=path.suffix[1:])


def width() -> float:
    """Return the width of the figure that is drawn now, in inches."""
    return float(plt.rcParams["figure.figsize"][0])


def is_narrow() -> bool:
    """Return whether the figure that is drawn now is for a phone."""
    return width() < WIDE


def new_panels(
    rows: int, columns: int, height: float, *, inches: float | None = None, **options: Any
) -> tuple[Drawing, Any]:
    """Make a figure with its axes, an array of shape (rows, columns).

    Args:
        rows: number of rows of axes.
        columns: number of columns of axes.
        height: height of the figure in inches; titles of several lines add to it.
        inches: width of the figure, by default the page's.
        options: options of ``plt.subplots``.
    """
    figure, panels = plt.subplots(
        rows,
        columns,
        figsize=(inches or width(), height),
        layout="constrained",
        squeeze=False,
        FigureClass=Drawing,
        **options,
    )
    assert isinstance(figure, Drawing)
    return figure, panels


def new_axes(title: str, xlabel: str, ylabel: str, height: float = 3.4) -> tuple[Drawing, Axes]:
    """Make a figure of the page's width with one pair of axes; the height is in inches.

    On a phone the name of the y axis lies above it.
    """
    figure, panels = new_panels(1, 1, height)
    axes: Axes = panels[0, 0]
    figure.headline(title)
    if is_narrow():
        axes.set_title(wrapped(ylabel, width() - 0.3))
        axes.set_xlabel(wrapped(xlabel, width() - 0.7))
    else:
        axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def text_width(text: str, size: float | None = None) -> float:
    """Measure a line of text in inches; its size is in points."""
    font = FontProperties(size=size or plt.rcParams["font.size"])
    points, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(points) / 72


def wrapped(text: str, inches: float, size: float | None = None) -> str:
    """Break a text into lines that are no wider, unless a word is; its size is in points."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > inches:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def written(axis: Axis, value: float) -> str:
    """Write a value as its axis does, if that has a format of its own, else with four digits."""
    formatter = axis.get_major_formatter()
    if isinstance(formatter, FuncFormatter):
        return formatter(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def name_rows(axes: Axes, rows: Mapping[str, tuple[float, float]]) -> None:
    """Name rows by their top and middle, y pointing down: on their left, or above on a phone."""
    axes.grid(axis="y", visible=False)
    few_ticks(axes)
    if not is_narrow():
        axes.set_yticks([middle for _, middle in rows.values()], list(rows))
        return
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    across = axes.get_yaxis_transform()
    for name, (top, _) in rows.items():
        label = axes.annotate(name, (0, top), xycoords=across, xytext=(0, 4))
        label.anncoords = "offset points"


def bar_in_row() -> tuple[float, float]:
    """Return the upper edge and the height of a bar within its row, from -0.5 to 0.5."""
    return (-0.02, 0.46) if is_narrow() else (-0.4, 0.8)


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Name bars, one a row, from the top down."""
    top, height = bar_in_row()
    axes.set_ylim(len(names) - 0.5, -0.5)
    name_rows(axes, {name: (row + top, row + top + height / 2) for row, name in enumerate(names)})


def few_ticks(axes: Axes) -> None:
    """Leave room between the sizes or times along the x axis of a plot for a phone."""
    if is_narrow():
        axes.locator_params(axis="x", nbins=4)


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Name each curve at its right end, in its colour, moving labels apart where they would meet.

    The least gap is a 14th of the axis: about one line of text. A label that begins an eighth of
    the axis to the side of another one does not meet it.
    """
    transform, across = axes.yaxis.get_transform(), axes.xaxis.get_transform()
    bottom, top = (float(transform.transform(limit)) for limit in axes.get_ylim())
    left, right = (float(across.transform(limit)) for limit in axes.get_xlim())
    gap = (top - bottom) / 14
    names = sorted(ends, key=lambda name: ends[name][1])
    places = [float(transform.transform(ends[name][1])) for name in names]
    sides = [float(across.transform(ends[name][0])) for name in names]
    beside = [
        [j for j in range(len(names)) if j != i and abs(sides[i] - sides[j]) < (right - left) / 8]
        for i in range(len(names))
    ]
    for i in range(len(names)):
        places[i] = max([places[i], *(places[j] + gap for j in beside[i] if j < i)])
    for i in reversed(range(len(names))):  # a label that was moved past the top moves others down
        places[i] = min([places[i], top, *(places[j] - gap for j in beside[i] if j > i)])
    for name, place in zip(names, places, strict=True):
        x, _, color = ends[name]
        axes.annotate(
            name,
            (x, float(transform.inverted().transform(place))),
            xytext=(6, 0),
            textcoords="offset points",
            color=NAMES[color],
            va="center",
            annotation_clip=False,
        )
