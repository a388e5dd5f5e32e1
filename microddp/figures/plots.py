"""Plots of measurements: curves, bars, buckets, times by size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from microddp.figures.style import COLORS, drawing, label_ends, new_axes
from microddp.figures.timelines import gradient_order as gradient_order
from microddp.figures.timelines import timeline as timeline
from microddp.figures.timelines import timelines as timelines
from microddp.figures.who_has_what import holdings as holdings
from microddp.report import human_bytes as human_bytes
from microddp.report import human_seconds as human_seconds
from microddp.report import mark_least as mark_least
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
) -> Figure:
    """Curves of y against x, each named at its end.

    Args:
        series: the x and y values by name.
        title: the finding, in words.
        xlabel: with unit.
        ylabel: with unit.
        log: the axes with a logarithmic scale: ``"x"``, ``"y"``, ``"xy"`` or neither.
        zero: whether a linear y axis begins at 0, so that heights compare as the values do.
        crosses: moments to mark, x and y.
    """
    figure, axes = new_axes(title, xlabel, ylabel)
    ends: dict[str, tuple[float, float, str]] = {}
    # Dashes let a curve show where another one lies on it, and differ without colour.
    colors, dashes = itertools.cycle(COLORS), itertools.cycle(["-", "--", ":", "-."])
    for color, dash, (name, (x, y)) in zip(colors, dashes, series.items(), strict=False):
        marker = "o" if len(x) < 20 else None
        axes.plot(x, y, dash, marker=marker, markersize=4, color=color)
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
        axes.set_ylim(bottom=0)
    for cross in crosses:
        axes.plot(*cross, "x", color=axes.xaxis.label.get_color(), markersize=9, markeredgewidth=2)
    label_ends(axes, ends)
    return figure


@drawing
def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    xlabel: str,
    formatter: Callable[[float, object], str] = human_seconds,
) -> Figure:
    """One horizontal bar for each name, divided into the same named parts.

    Args:
        bars: the size of each part by its name, by the bar's name.
        title: the finding, in words.
        xlabel: with unit.
        formatter: writes a size.
    """
    figure, axes = new_axes(title, xlabel, "", height=1.2 + 0.45 * len(bars))
    names = list(bars)
    total = max(sum(parts.values()) for parts in bars.values())
    left = [0.0] * len(names)
    for color, part in zip(itertools.cycle(COLORS), next(iter(bars.values())), strict=False):
        sizes = [bars[name][part] for name in names]
        axes.barh(names, sizes, left=left, color=color, label=part)
        for row, size in enumerate(sizes):
            if size > 0.09 * total:  # narrower ones have no room for their size
                at = left[row] + size / 2
                axes.text(at, row, formatter(size, None), ha="center", va="center", color="black")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(formatter))
    if formatter is human_bytes:  # whose round numbers are powers of two
        axes.xaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(total / 6))))
    figure.legend(loc="outside lower left", ncols=4)
    return figure


@drawing
def buckets(plans: Mapping[str, Sequence[Sequence[int]]], *, title: str) -> Figure:
    """Which parameters share a bucket: a bar for each plan, a colour for each of its buckets.

    Args:
        plans: by name, for each bucket in the order of sending, the bytes of its parameters.
        title: the finding, in words.
    """
    figure, axes = new_axes(title, "gradients, first sent first", "", 1.1 + 0.55 * len(plans))
    total = max(sum(map(sum, plan)) for plan in plans.values())
    for row, plan in enumerate(plans.values()):
        start = 0
        for color, members in zip(itertools.cycle(COLORS), plan, strict=False):
            size = sum(members)
            left = list(itertools.accumulate(members[:-1], initial=start))
            axes.barh(row, members, left=left, color=color, edgecolor="black", linewidth=0.6)
            if size > 0.09 * total:  # a narrower one has no room for its size
                text = axes.text(start + size / 2, row, human_bytes(size), ha="center", va="center")
                text.set(color="black", bbox={"pad": 2, "facecolor": color, "edgecolor": "none"})
            start += size
    axes.set_yticks(range(len(plans)), list(plans))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(human_bytes))
    axes.xaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(total / 6))))
    return figure


@drawing
def times_by_size(
    timings: Mapping[str, Mapping[int, Timing]],
    *,
    title: str,
    models: Mapping[str, Callable[[int], float]] | None = None,
) -> Figure:
    """Time against size, both logarithmic: the median with a band from quartile to quartile.

    Args:
        timings: by algorithm and by size in bytes.
        title: the finding, in words.
        models: predicted seconds by size, dashed in the colour of the algorithm of that name.
    """
    figure, axes = new_axes(title, "size of the tensor", "time (median and quartiles)", height=3.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends: dict[str, tuple[float, float, str]] = {}
    for color, (name, by_size) in zip(itertools.cycle(COLORS), timings.items(), strict=False):
        sizes = sorted(by_size)
        medians = [by_size[size].median for size in sizes]
        low, high = zip(*(by_size[size].spread for size in sizes), strict=True)
        axes.plot(sizes, medians, marker="o", markersize=4, color=color)
        axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
        ends[name] = (sizes[-1], medians[-1], color)
        if models and name in models:
            predicted = [models[name](size) for size in sizes]
            axes.plot(sizes, predicted, linestyle="--", linewidth=1.2, color=color)
            ends[f"{name}, predicted"] = (sizes[-1], predicted[-1], color)
    axes.xaxis.set_major_formatter(FuncFormatter(human_bytes))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(human_seconds))
    axes.yaxis.set_minor_locator(NullLocator())
    label_ends(axes, ends)
    return figure


@drawing
def pauses(series: Mapping[str, Sequence[float]], *, title: str, xlabel: str) -> Figure:
    """How often a call took how long: the share of calls that took longer than x.

    Args:
        series: seconds of every call, by name.
        title: the finding, in words.
        xlabel: what was timed.
    """
    figure, axes = new_axes(title, xlabel, "share of calls that took longer")
    for color, (name, seconds) in zip(itertools.cycle(COLORS), series.items(), strict=False):
        ordered = sorted(seconds)
        share = [1 - i / len(ordered) for i in range(len(ordered))]
        axes.step(ordered, share, where="post", color=color, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(human_seconds))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    axes.legend()
    return figure
