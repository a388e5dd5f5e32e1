"""How the book's figures look."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
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
    for i in reversed(range(len(names))):  # what was moved up past the top moves the others down
        places[i] = min([places[i], top, *(places[j] - gap for j in beside[i] if j > i)])
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
