"""Figures of events in time: timelines of steps, and the order of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from microddp.figures.drawing import (
    Drawing,
    Place,
    drawing,
    few_ticks,
    is_narrow,
    name_rows,
    new_axes,
    new_panels,
)
from microddp.figures.style import COLORS, Look, looks
from microddp.hooks import GradientReady
from microddp.report import human_bytes, human_seconds
from microddp.step_times import tracks
from microddp.timing import Span

Lane = tuple[int, str]  # a rank, and the name of its lane: one row


@drawing
def timelines(steps: Mapping[str, Sequence[Span]], *, title: str) -> Drawing:
    """Draw steps above each other on one scale, each from its own beginning.

    Each rank has a row for each of its lanes. Spans that overlap share the height of their row. A
    mark is a tick. The lane ``"wait"``, in which nothing hides the communication, is hatched. On a
    phone a row's name lies above it.

    Args:
        steps: spans of all ranks, as :meth:`microddp.timing.timeline.Timeline.gather` returns them,
            by the name of the step; a step alone needs none.
        title: finding, in words.
    """
    shares = [_shares(spans) for spans in steps.values()]
    # Room for the panel's name, and for its rows.
    sizes = [
        0.35 * bool(name) + 0.3 * sum(height + _gap() for height in _heights(each).values())
        for name, each in zip(steps, shares, strict=True)
    ]
    figure, panels = new_panels(len(steps), 1, 1.2 + sum(sizes), height_ratios=sizes, sharex=True)
    figure.headline(title)
    legend: dict[str, Rectangle] = {}
    styles = looks(dict.fromkeys(kind_of(span) for spans in steps.values() for span in spans))
    for axes, (name, spans), each in zip(panels[:, 0], steps.items(), shares, strict=True):
        legend |= _draw_rows(figure, axes, name, spans, each, styles)
        axes.set_title(name)
    panels[-1, 0].set_xlabel("time since the step began")
    panels[0, 0].set_xlim(left=0)
    figure.tell("Rows", [series.name for series in figure.series])
    figure.tell("Spans and marks", list(legend))
    figure.legend_below(list(legend.values()), list(legend))
    return figure


def _gap() -> float:
    """Return the gap between two rows, in heights of a row: on a phone there is a name."""
    return 0.6 if is_narrow() else 0.0


def _draw_rows(
    figure: Drawing,
    axes: Axes,
    panel: str,
    spans: Sequence[Span],
    shares: Mapping[Lane, int],
    styles: Mapping[str, Look],
) -> dict[str, Rectangle]:
    """Draw every rank's lanes; return an example of each kind of span."""
    legend = {}
    heights = _heights(shares)
    steps = (height + _gap() for height in heights.values())
    tops = dict(zip(heights, itertools.accumulate(steps, initial=_gap()), strict=False))
    origin = min(span.start for span in spans)
    boxes: dict[Lane, list[tuple[Place, str]]] = {row: [] for row in heights}
    for span, track in zip(spans, tracks(spans), strict=True):
        row, kind = (span.rank, span.lane), kind_of(span)
        height = 0.8 * heights[row] / shares[row]
        left, right = span.start - origin, span.end - origin
        top = tops[row] + 0.1 * heights[row] + track * height
        # A line around it makes a mark a tick.
        patch = Rectangle((left, top), span.end - span.start, height, **styles[kind].style)
        axes.add_patch(patch)
        legend[kind] = patch
        boxes[row].append(((left, right, top + height, top), _say(span, left, right)))
    axes.autoscale_view()
    axes.set_ylim(sum(heights.values()) + len(heights) * _gap(), 0)
    names = {row: f"rank {row[0]} {row[1]}" for row in heights}
    middles = {names[row]: (tops[row], tops[row] + heights[row] / 2) for row in heights}
    name_rows(axes, middles)
    for row, name in names.items():
        figure.boxes(axes, f"{panel}: {name}" if panel else name, boxes[row])
    axes.xaxis.set_major_formatter(FuncFormatter(human_seconds))
    return legend


def _say(span: Span, left: float, right: float) -> str:
    if left == right:
        return f"{span.name}: at {human_seconds(left)}"
    whole = f"{human_seconds(left)} to {human_seconds(right)}"
    return f"{span.name}: {human_seconds(right - left)}\n{whole}"


def kind_of(span: Span) -> str:
    """Return the kind of a span, which gives it a colour and a name in the legend."""
    special = {"wait": "waiting for communication", "gradients": "gradient ready"}
    return special.get(span.lane, span.name.split()[0])


def _shares(spans: Sequence[Span]) -> dict[Lane, int]:
    """Count the tracks of each row."""
    shares: dict[Lane, int] = {}
    for span, track in zip(spans, tracks(spans), strict=True):
        row = (span.rank, span.lane)
        shares[row] = max(track + 1, shares.get(row, 1))
    return shares


def _heights(shares: Mapping[Lane, int]) -> dict[Lane, float]:
    """Return the rows from top to bottom with their heights, from 1 to 3 where many overlap."""
    lanes = list(dict.fromkeys(lane for _, lane in shares))
    ordered = sorted(shares, key=lambda row: (row[0], lanes.index(row[1])))
    return {row: min(3.0, max(1.0, shares[row] / 4)) for row in ordered}


@drawing
def gradient_order(
    rows: Sequence[GradientReady], *, title: str, forward: Sequence[str] = ()
) -> Drawing:
    """Draw when each gradient was ready: a line for each parameter, a dot larger for more bytes.

    Args:
        rows: rows of :attr:`microddp.hooks.HookTracker.rows`.
        title: finding, in words.
        forward: names of the parameters from top to bottom; by default the order of ``rows``.
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
    few_ticks(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(human_seconds))
    ready = [(row, row.seconds) for row in rows if row.seconds is not None]
    figure.points(
        axes,
        "",
        [seconds for _, seconds in ready],
        [names.index(row.name) for row, _ in ready],
        [f"{row.name}, {human_bytes(row.nbytes)}" for row, _ in ready],
    )
    figure.tell("Gradients", names)
    return figure
