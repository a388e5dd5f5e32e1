"""Figures of what happened when: timelines of steps, and the order of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from microddp.figures.style import COLORS, GREY, drawing, new_axes
from microddp.hooks import GradientReady
from microddp.report import human_seconds
from microddp.timing import Span, tracks

# The same in every figure.
PHASES = {
    "forward": COLORS[0],
    "backward": COLORS[1],
    "all-reduce": COLORS[2],
    "bucket": COLORS[2],
    "optimizer": COLORS[3],
    "gradient ready": GREY,
    "waiting for communication": "#e0524d",
}
Row = tuple[int, str]  # a rank's lane


@drawing
def timeline(spans: Sequence[Span], *, title: str) -> Figure:
    """What each rank did when: a row for each of its lanes.

    Spans that overlap share the height of their row. A mark is a tick. The lane ``"wait"``, in
    which nothing hides the communication, is hatched.

    Args:
        spans: of all ranks, as :meth:`microddp.timing.timeline.Timeline.gather` returns them.
        title: the finding, in words.
    """
    return _draw({"": spans}, title)


@drawing
def timelines(steps: Mapping[str, Sequence[Span]], *, title: str) -> Figure:
    """Timelines above each other on one scale, each from its own beginning.

    Args:
        steps: spans as for :func:`timeline`, by name.
        title: the finding, in words.
    """
    return _draw(steps, title)


def _draw(steps: Mapping[str, Sequence[Span]], title: str) -> Figure:
    # Room for the panel's name, and for its rows.
    sizes = [
        0.35 * bool(name) + 0.3 * sum(_heights(spans).values()) for name, spans in steps.items()
    ]
    figure, panels = plt.subplots(
        len(steps),
        figsize=(7.0, 1.2 + sum(sizes)),
        height_ratios=sizes,
        layout="constrained",
        sharex=True,
        squeeze=False,
    )
    legend: dict[str, Rectangle] = {}
    colors = colors_of(span for spans in steps.values() for span in spans)
    for axes, (name, spans) in zip(panels[:, 0], steps.items(), strict=True):
        legend |= _draw_rows(axes, spans, colors)
        axes.set_title(name, fontsize=10)
    panels[-1, 0].set_xlabel("time since the step began")
    panels[0, 0].set_xlim(left=0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(legend.values(), legend.keys(), loc="outside lower left", ncols=3)
    return figure


def _draw_rows(
    axes: Axes, spans: Sequence[Span], colors: Mapping[str, str]
) -> dict[str, Rectangle]:
    """Draw every rank's lanes; return an example of each kind of span."""
    legend = {}
    heights, shares = _heights(spans), _shares(spans)
    tops = dict(zip(heights, itertools.accumulate(heights.values(), initial=0.0), strict=False))
    origin = min(span.start for span in spans)
    for span, track in zip(spans, tracks(spans), strict=True):
        row, kind = (span.rank, span.lane), kind_of(span)
        color = colors[kind]
        height = 0.8 * heights[row] / shares[row]
        patch = Rectangle(
            (span.start - origin, tops[row] + 0.1 * heights[row] + track * height),
            span.end - span.start,
            height,
            facecolor="none" if span.lane == "wait" else color,
            edgecolor=color,  # which makes a mark a tick
            hatch="////" if span.lane == "wait" else None,
            linewidth=0.5,
        )
        axes.add_patch(patch)
        legend[kind] = patch
    axes.autoscale_view()
    middles = [tops[row] + height / 2 for row, height in heights.items()]
    axes.set_yticks(middles, [f"rank {rank} {lane}" for rank, lane in heights])
    axes.set_ylim(sum(heights.values()), 0)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(human_seconds))
    return legend


def kind_of(span: Span) -> str:
    """What a span is one of: it has that one's colour, and its name in the legend."""
    special = {"wait": "waiting for communication", "gradients": "gradient ready"}
    return special.get(span.lane, span.name.split()[0])


def colors_of(spans: Iterable[Span]) -> dict[str, str]:
    """The colour of every kind, in the order in which they come."""
    others = itertools.cycle(COLORS[4:])
    kinds = dict.fromkeys(map(kind_of, spans))
    return {kind: PHASES.get(kind) or next(others) for kind in kinds}


def _shares(spans: Sequence[Span]) -> dict[Row, int]:
    """By rank and lane, in how many tracks its row is divided."""
    shares: dict[Row, int] = {}
    for span, track in zip(spans, tracks(spans), strict=True):
        row = (span.rank, span.lane)
        shares[row] = max(track + 1, shares.get(row, 1))
    return shares


def _heights(spans: Sequence[Span]) -> dict[Row, float]:
    """The rows from top to bottom with their heights: up to three times one where many overlap."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    shares = _shares(spans)
    ordered = sorted(shares, key=lambda row: (row[0], lanes.index(row[1])))
    return {row: min(3.0, max(1.0, shares[row] / 4)) for row in ordered}


@drawing
def gradient_order(
    rows: Sequence[GradientReady], *, title: str, forward: Sequence[str] = ()
) -> Figure:
    """When each gradient was ready: a line for each parameter, a dot whose area is its bytes.

    Args:
        rows: as :attr:`microddp.hooks.HookTracker.rows` returns them.
        title: the finding, in words.
        forward: the parameters' names from top to bottom; by default the order of ``rows``.
    """
    names = list(forward or (row.name for row in rows))
    figure, axes = new_axes(title, "time since backward began", "", height=1.0 + 0.22 * len(names))
    largest = max(row.nbytes for row in rows)
    for row in rows:
        y = names.index(row.name)
        if row.seconds is None:
            axes.text(0, y, " no gradient", va="center")
            continue
        axes.hlines(y, 0, row.seconds, color=COLORS[0], linewidth=1, alpha=0.6)
        axes.scatter(row.seconds, y, 8 + 50 * row.nbytes / largest, color=COLORS[0], zorder=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(human_seconds))
    return figure
