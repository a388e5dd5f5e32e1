"""Every plot of the book. They draw the data they are given; they measure nothing.

Each function draws on rank 0 and does nothing on the others, so that a chapter can call it on
every rank. It leaves the drawing as matplotlib's current figure, which notebooks and the book's
build show; returned as well, it would be shown twice. With ``MICRODDP_FIGURES=DIR`` in the
environment each figure is also written to ``DIR/<script>-<number>.png``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from microddp.history import gradient_order as gradient_order
from microddp.history import timeline as timeline
from microddp.history import timelines as timelines
from microddp.holdings import holdings as holdings
from microddp.messages import Message
from microddp.style import COLORS, drawing, label_ends, new_axes
from microddp.style import human_bytes as human_bytes
from microddp.style import human_seconds as human_seconds
from microddp.style import mark_least as mark_least
from microddp.trace import Timing


@drawing
def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log: str = "",
) -> Figure:
    """Curves of y against x, each named at its end.

    Args:
        series: the x and y values by name.
        title: the finding, in words.
        xlabel: with unit.
        ylabel: with unit.
        log: the axes with a logarithmic scale: ``"x"``, ``"y"``, ``"xy"`` or neither.
    """
    figure, axes = new_axes(title, xlabel, ylabel)
    ends: dict[str, tuple[float, float, str]] = {}
    # Dashes let a curve show where another one lies on it, and differ without colour.
    colors, dashes = itertools.cycle(COLORS), itertools.cycle(["-", "--", ":"])
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
    else:
        axes.set_ylim(bottom=0)
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
def traffic(matrices: Mapping[str, Sequence[Sequence[float]]], *, title: str) -> Figure:
    """Who sent how much to whom: one square of ranks by ranks for each algorithm.

    Args:
        matrices: bytes from row to column, by the algorithm's name.
        title: the finding, in words.
    """
    figure, panels = plt.subplots(
        1, len(matrices), figsize=(7.0, 2.5), layout="constrained", squeeze=False
    )
    largest = max(max(map(max, matrix)) for matrix in matrices.values()) or 1
    for axes, (name, matrix) in zip(panels[0], matrices.items(), strict=True):
        axes.imshow(np.ma.masked_equal(matrix, 0), cmap="Blues", vmin=0, vmax=2 * largest)
        for i, row in enumerate(matrix):
            for j, size in enumerate(row):
                if size:
                    text = human_bytes(size).replace(" ", "\n")
                    axes.text(j, i, text, ha="center", va="center", fontsize=8, color="black")
        axes.set_title(name, loc="center", fontsize=10)
        axes.set_xlabel("to rank")
        axes.set_xticks(range(len(matrix)))
        axes.set_yticks(range(len(matrix)))
        axes.grid(visible=False)
    panels[0][0].set_ylabel("from rank")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


@drawing
def ring_rounds(messages: Sequence[Sequence[Message]], nbytes: int, *, title: str) -> Figure:
    """The ring, round by round, from recorded messages: what each rank holds, and what it sends.

    A square is a chunk on a rank; the number in it says how many ranks' values it contains. A frame
    marks the chunks that travel in this round, to the rank below (the last rank's to the first).

    Args:
        messages: each rank's messages in order, one for each round.
        nbytes: the size of the reduced tensor.
        title: the finding, in words.
    """
    n = len(messages)
    rounds = len(messages[0])
    holds = [[1] * n for _ in range(n)]
    columns = min(rounds + 1, 4)
    rows = -(-(rounds + 1) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(7.0, 0.6 + 1.95 * rows), layout="constrained", squeeze=False
    )
    for step, axes in enumerate(panels.flat):
        axes.set_axis_off()
        if step > rounds:
            continue
        sent = [messages[rank][step] for rank in range(n)] if step < rounds else []
        chunks = [message.offset * n // nbytes for message in sent]
        axes.imshow(holds, cmap="Blues", vmin=0, vmax=1.6 * n)
        for rank in range(n):
            label = f"rank {rank}" if step % columns == 0 else str(rank)
            axes.text(-0.7, rank, label, ha="right", va="center", fontsize=8)
            for chunk in range(n):
                text = str(holds[rank][chunk])
                axes.text(chunk, rank, text, ha="center", va="center", fontsize=9, color="black")
        for rank, chunk in enumerate(chunks):
            corner = (chunk - 0.44, rank - 0.44)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, lw=2, ec=COLORS[1]))
        axes.set_title("result" if step == rounds else f"round {step + 1}", fontsize=9)
        before = [row.copy() for row in holds]
        for message, chunk in zip(sent, chunks, strict=True):
            arriving = before[message.src][chunk]
            mine = before[message.dst][chunk]
            holds[message.dst][chunk] = arriving if arriving == n else mine + arriving
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
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
