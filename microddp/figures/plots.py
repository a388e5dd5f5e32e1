"""Plots of measurements: curves, bars, buckets, times by size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import (
    FuncFormatter,
    LogFormatter,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullLocator,
)

from microddp.figures.drawing import (
    ROW,
    Drawing,
    Place,
    bar_in_row,
    drawing,
    is_narrow,
    label_ends,
    name_bars,
    new_axes,
    text_width,
    width,
)
from microddp.figures.style import COLORS, GREY, looks
from microddp.report import human_bytes, human_seconds
from microddp.timing import Timing


@drawing
def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log: str = "",
    zero: bool = True,
    crosses: Sequence[tuple[float, float]] = (),
    simulated: bool = False,
) -> Drawing:
    """Draw curves of y against x, each named at its end; on a phone below the plot.

    Args:
        series: x and y values of each curve, by its name.
        title: finding, in words.
        xlabel: label of the x axis, with unit.
        ylabel: label of the y axis, with unit.
        log: axes with a logarithmic scale: ``"x"``, ``"y"``, ``"xy"`` or neither.
        zero: whether a linear y axis begins at 0, so that heights compare as the values do.
        crosses: points to mark, x and y.
        simulated: whether the values are simulated: then the title and the ground say so.
    """
    figure, axes = new_axes(f"Simulated: {title}" if simulated else title, xlabel, ylabel)
    if simulated:
        axes.text(
            0.5, 0.5, "simulated", transform=axes.transAxes, rotation=20, ha="center", va="center",
            fontsize=40, color=GREY, alpha=0.18, zorder=0,
        )  # fmt: skip
    ends: dict[str, tuple[float, float, str]] = {}
    # Dashes let a curve show where another one lies on it, and differ without colour.
    colors, dashes = itertools.cycle(COLORS), itertools.cycle(["-", "--", ":", "-."])
    for color, dash, (name, (x, y)) in zip(colors, dashes, series.items(), strict=False):
        marker = "o" if len(x) < 20 else None
        axes.plot(x, y, dash, marker=marker, markersize=4, color=color, label=name)
        if len(series) > 1:
            ends[name] = (x[-1], y[-1], color)
    xs = [value for x, _ in series.values() for value in x]
    if "x" in log and max(xs) > 1e4 * min(xs):
        axes.set_xscale("log")
    elif "x" in log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    elif all(isinstance(value, int) for value in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "y" in log:
        axes.set_yscale("log")
    elif zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    for axis in (axes.xaxis, axes.yaxis):
        plain = isinstance(axis.get_major_formatter(), FuncFormatter)
        if is_narrow() and axis.get_scale() == "log" and not plain:
            axis.set_major_formatter(LogFormatter())  # with no exponents, which would be small
            axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    for cross in crosses:
        axes.plot(*cross, "x", color=axes.xaxis.label.get_color(), markersize=9, markeredgewidth=2)
    if crosses:
        figure.points(axes, "marked", *zip(*crosses, strict=True))
    for name, (x, y) in series.items():
        figure.points(axes, name if len(series) > 1 else "", x, y)
    figure.tell("Curves", list(ends))
    _name_curves(figure, axes, ends)
    return figure


def _name_curves(figure: Drawing, axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Name each curve by its right end and colour: there, or below the plot if that is narrow."""
    if not is_narrow():
        label_ends(axes, ends)
    elif ends:
        curves = [line for line in axes.lines if line.get_label() in ends]
        figure.taller(1)
        figure.legend_below(curves, [str(line.get_label()) for line in curves])


@drawing
def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    xlabel: str,
    formatter: Callable[[float, object], str] = human_seconds,
) -> Drawing:
    """Draw a horizontal bar for each name, divided into named parts.

    A part that has a role in a step, such as ``"forward"`` or ``"exposed"``, has the role's colour.

    Args:
        bars: size of each part by its name, by the bar's name.
        title: finding, in words.
        xlabel: label of the x axis, with unit.
        formatter: function that writes a size.
    """
    figure, axes = new_axes(title, xlabel, "", height=1.2 + ROW[is_narrow()] * len(bars))
    names = list(bars)
    top, height = bar_in_row()
    total = max(sum(sizes.values()) for sizes in bars.values()) or 1.0
    left = [0.0] * len(names)
    rows: list[list[tuple[Place, str]]] = [[] for _ in names]
    parts = list(dict.fromkeys(part for sizes in bars.values() for part in sizes))
    handles = []
    for part, look in looks(parts).items():
        sizes = [bars[name].get(part, 0.0) for name in names]
        tops = [row + top for row in range(len(names))]
        drawn = axes.barh(tops, sizes, height, left=left, align="edge", **look.style)
        handles.append(drawn[0])
        for row, size in enumerate(sizes):
            text = formatter(size, None)
            right = left[row] + size
            if part in bars[names[row]]:
                place = (left[row], right, tops[row] + height, tops[row])
                rows[row].append((place, f"{part}: {text}"))
            _write_inside(axes, text, left[row], right, tops[row] + height / 2, total, look.color)
            left[row] = right
    name_bars(axes, names)
    for name, boxes in zip(names, rows, strict=True):
        figure.boxes(axes, name, boxes)
    figure.tell("Bars", names)
    figure.tell("Parts", parts)
    axes.xaxis.set_major_formatter(FuncFormatter(formatter))
    if formatter is human_bytes:  # whose round numbers are powers of two
        axes.xaxis.set_major_locator(_whole_bytes(total))
    figure.legend_below(handles, parts)
    return figure


def _whole_bytes(total: float) -> MultipleLocator:
    """Put ticks at powers of two."""
    return MultipleLocator(2 ** math.ceil(math.log2(total / (4 if is_narrow() else 6))))


def _write_inside(
    axes: Axes, text: str, left: float, right: float, y: float, total: float, color: str
) -> None:
    """Write in the middle of a bar, of the given colour, if it has room for that."""
    inches = width() * (0.9 if is_narrow() else 0.7)  # of the longest bar, about
    if (right - left) / total * inches > text_width(text) + 0.06:
        written = axes.text((left + right) / 2, y, text, ha="center", va="center", color="black")
        written.set_bbox({"pad": 1.5, "facecolor": color, "edgecolor": "none"})


@drawing
def buckets(plans: Mapping[str, Sequence[Sequence[int]]], *, title: str) -> Drawing:
    """Draw plans of buckets: a bar for each plan, a colour for each of its buckets.

    Args:
        plans: bytes of the parameters of each bucket, in the order of sending, by the plan's name.
        title: finding, in words.
    """
    height_of_row = 0.62 if is_narrow() else 0.55
    height = 1.1 + height_of_row * len(plans)
    figure, axes = new_axes(title, "gradients, first sent first", "", height)
    top, height = bar_in_row()
    total = max(sum(map(sum, plan)) for plan in plans.values())
    for row, (name, plan) in enumerate(plans.items()):
        start = 0
        boxes: list[tuple[Place, str]] = []
        for number, members in enumerate(plan, start=1):
            color, size = COLORS[(number - 1) % len(COLORS)], sum(members)
            left = list(itertools.accumulate(members[:-1], initial=start))
            bars = axes.barh(row + top, members, height, left=left, align="edge", color=color)
            for bar in bars:
                bar.set(edgecolor="black", linewidth=0.6)
            _write_inside(
                axes, human_bytes(size), start, start + size, row + top + height / 2, total, color
            )
            for at, member in zip(left, members, strict=True):
                said = f"bucket {number} of {len(plan)}: {human_bytes(size)}"
                place = (at, at + member, row + top + height, row + top)
                boxes.append((place, f"{said}\nparameter: {human_bytes(member)}"))
            start += size
        figure.boxes(axes, name, boxes)
    name_bars(axes, list(plans))
    figure.tell("Bars", [f"{name} ({len(plan)} buckets)" for name, plan in plans.items()])
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(human_bytes))
    axes.xaxis.set_major_locator(_whole_bytes(total))
    return figure


@drawing
def times_by_size(
    timings: Mapping[str, Mapping[int, Timing]],
    *,
    title: str,
    models: Mapping[str, Callable[[int], float]] | None = None,
) -> Drawing:
    """Draw time against size, both logarithmic: the median with a band between the quartiles.

    Args:
        timings: time by size in bytes, by algorithm.
        title: finding, in words.
        models: function from size to predicted seconds, by algorithm; drawn dashed.
    """
    figure, axes = new_axes(title, "size of the tensor", "time (median and quartiles)", height=3.8)
    axes.set_xscale("log", base=2)
    if is_narrow():
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=5))
    axes.set_yscale("log")
    ends: dict[str, tuple[float, float, str]] = {}
    drawn: list[tuple[str, list[int], list[float], list[str]]] = []
    for color, (name, by_size) in zip(itertools.cycle(COLORS), timings.items(), strict=False):
        sizes = sorted(by_size)
        medians = [by_size[size].median for size in sizes]
        low, high = zip(*(by_size[size].spread for size in sizes), strict=True)
        axes.plot(sizes, medians, marker="o", markersize=4, color=color, label=name)
        axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
        ends[name] = (sizes[-1], medians[-1], color)
        texts = [
            f"{human_seconds(median)} ({human_seconds(first)} to {human_seconds(third)})"
            for median, first, third in zip(medians, low, high, strict=True)
        ]
        drawn.append((name, sizes, medians, texts))
        if models and name in models:
            predicted = [models[name](size) for size in sizes]
            label = f"{name}, predicted"
            axes.plot(sizes, predicted, "--", linewidth=1.2, color=color, label=label)
            ends[label] = (sizes[-1], predicted[-1], color)
            drawn.append((label, sizes, predicted, []))
    axes.xaxis.set_major_formatter(FuncFormatter(human_bytes))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(human_seconds))
    axes.yaxis.set_minor_locator(NullLocator())
    for name, xs, ys, texts in drawn:
        figure.points(axes, name, xs, ys, texts)
    figure.tell("Curves", list(ends))
    _name_curves(figure, axes, ends)
    return figure
