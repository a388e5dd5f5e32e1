"""Every plot of the book. They draw the data they are given; they measure nothing.

Each function draws on rank 0 and does nothing on the others, so that a chapter can call it on
every rank. It leaves the drawing as matplotlib's current figure, which notebooks and the book's
build show; returned as well, it would be shown twice. With ``MICRODDP_FIGURES=DIR`` in the
environment each figure is also written to ``DIR/<script>-<number>.png``.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import numpy as np
import torch.distributed as dist
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator

from microddp.messages import Message
from microddp.trace import Span, Timing

P = ParamSpec("P")

# Now, and not inside the first rc_context: a notebook's back end turns interactive drawing on when
# it is loaded, and leaving the context would turn it off again.
plt.switch_backend(plt.get_backend())

# Grey text and these colours keep enough contrast on a white and on a near-black page, so one
# picture with a transparent ground serves both; they differ in lightness for greyscale readers.
GREY = "#7d8590"
COLORS = ("#3b8bd9", "#e08214", "#1b9e77", "#c2589b", "#8c6bb1", "#b8a038")
STYLE: dict[Any, Any] = {
    "axes.edgecolor": GREY,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": GREY,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": "none",
    "figure.figsize": (7.0, 3.4),
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.color": GREY,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "lines.linewidth": 2,
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def _figure(draw: Callable[P, Figure]) -> Callable[P, None]:
    """Draw in the book's style, on rank 0 only, and save if asked to."""

    @functools.wraps(draw)
    def on_rank_0(*args: P.args, **kwargs: P.kwargs) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            if folder := os.environ.get("MICRODDP_FIGURES"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                stem = Path(sys.argv[0]).stem or "figure"
                figure.savefig(Path(folder) / f"{stem}-{figure.number}.png", dpi=150)

    return on_rank_0


def _axes(title: str, xlabel: str, ylabel: str, height: float = 3.4) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7.0, height), layout="constrained")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Name each curve at its right end, in its colour, moving labels apart where they would meet.

    The least gap is a 14th of the axis: about one line of text.
    """
    transform = axes.yaxis.get_transform()
    bottom, top = (float(transform.transform(limit)) for limit in axes.get_ylim())
    gap = (top - bottom) / 14
    names = sorted(ends, key=lambda name: ends[name][1])
    places = [float(transform.transform(ends[name][1])) for name in names]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    limit = top  # what was moved up past the top moves the others down
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    for name, place in zip(names, places, strict=True):
        x, _, color = ends[name]
        axes.annotate(
            name,
            (x, float(transform.inverted().transform(place))),
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            va="center",
            annotation_clip=False,
        )


def human_bytes(count: float, _position: object = None) -> str:
    """Bytes in words: ``"64 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"


def human_seconds(seconds: float, _position: object = None) -> str:
    """A time in words: ``"1.5 ms"``, ``"3 h"``."""
    if seconds == 0:
        return "0"
    for factor, unit in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * factor:  # from there on it would read "1e+03"
            return f"{seconds / factor:.3g} {unit}"
    for factor, unit, limit in ((1, "s", 60), (60, "min", 60), (3600, "h", 48)):
        if seconds < factor * limit:
            return f"{seconds / factor:.3g} {unit}"
    days = seconds / 86400
    return f"{days:.3g} days" if days < 999.5 else f"{days:,.0f} days"


@_figure
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
    figure, axes = _axes(title, xlabel, ylabel)
    ends: dict[str, tuple[float, float, str]] = {}
    # Dashes let a curve show where another one lies on it, and differ without colour.
    colors, dashes = itertools.cycle(COLORS), itertools.cycle(["-", "--", ":"])
    for color, dash, (name, (x, y)) in zip(colors, dashes, series.items(), strict=False):
        marker = "o" if len(x) < 20 else None
        axes.plot(x, y, dash, marker=marker, markersize=4, color=color)
        if len(series) > 1:
            ends[name] = (x[-1], y[-1], color)
    if "x" in log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    if "y" in log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _label_ends(axes, ends)
    return figure


@_figure
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
    figure, axes = _axes(title, xlabel, "", height=1.2 + 0.45 * len(bars))
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


@_figure
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


@_figure
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


@_figure
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
    figure, axes = _axes(title, "size of the tensor", "time (median and quartiles)", height=3.8)
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
    axes.yaxis.set_major_formatter(FuncFormatter(human_seconds))
    axes.yaxis.set_minor_locator(NullLocator())
    _label_ends(axes, ends)
    return figure


@_figure
def pauses(series: Mapping[str, Sequence[float]], *, title: str, xlabel: str) -> Figure:
    """How often a call took how long: the share of calls that took longer than x.

    Args:
        series: seconds of every call, by name.
        title: the finding, in words.
        xlabel: what was timed.
    """
    figure, axes = _axes(title, xlabel, "share of calls that took longer")
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


@_figure
def timeline(spans: Sequence[Span], *, title: str) -> Figure:
    """What each rank did when: a lane for computation and one for communication, rank by rank.

    Args:
        spans: of all ranks, as :meth:`microddp.trace.Timeline.gather` returns them.
        title: the finding, in words.
    """
    ranks = sorted({span.rank for span in spans})
    lanes = list(dict.fromkeys(span.lane for span in spans))
    names: list[str] = list(dict.fromkeys(span.name.split()[0] for span in spans))
    origin = min(span.start for span in spans)
    figure, axes = _axes(
        title, "time since the step began", "", 1.5 + 0.3 * len(ranks) * len(lanes)
    )
    rows = {
        (rank, lane): i for i, (rank, lane) in enumerate((r, la) for r in ranks for la in lanes)
    }
    for color, name in zip(itertools.cycle(COLORS), names, strict=False):
        for i, span in enumerate(s for s in spans if s.name.split()[0] == name):
            axes.barh(
                rows[span.rank, span.lane],
                span.end - span.start,
                left=span.start - origin,
                height=0.8,
                color=color,
                edgecolor="none",
                label=name if i == 0 else None,
            )
    axes.set_yticks(list(rows.values()), [f"rank {rank} {lane}" for rank, lane in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(human_seconds))
    figure.legend(loc="outside lower left", ncols=5)
    return figure
