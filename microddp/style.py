"""How the book's figures look, and how it writes bytes, times and the best of them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import torch.distributed as dist
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def drawing(draw: Callable[P, Figure]) -> Callable[P, None]:
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


def new_axes(title: str, xlabel: str, ylabel: str, height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure of the book's width with one pair of axes; its height is in inches."""
    figure, axes = plt.subplots(figsize=(7.0, height), layout="constrained")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
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


def mark_least(cells: Sequence[str], values: Sequence[float]) -> list[str]:
    """The cells of a table, with a star behind the one whose value is the least.

    The others get a blank, so that they stay aligned.
    """
    least = min(values)
    return [f"{cell} {'*' if v == least else ' '}" for cell, v in zip(cells, values, strict=True)]
