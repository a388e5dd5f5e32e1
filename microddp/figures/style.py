"""The look of the book's figures: sizes, and colours that mean the same in all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from cycler import cycler

WIDE, NARROW = 7.0, 3.75  # inches: on a desk, and on a phone, of about 96 pixels an inch
# Text and axes. The ground is transparent. On a dark page a copy of the picture is shown in which
# the colours of DARK are replaced; all text then has a contrast of 4.5 and more on both grounds.
INK = "#57606a"
GREY = "#7d8590"  # for marks and for empty squares
# Curves, and parts that have no role. They differ in lightness for greyscale readers.
COLORS = ("#3b8bd9", "#e08214", "#1b9e77", "#c2589b", "#8c6bb1", "#9a8428")
# The same as text, for a curve's name: on a light ground, and on a dark one.
_ON_LIGHT = ("#1d6bb5", "#a15a00", "#0f7557", "#a83f80", "#74529b", "#75651a")
_ON_DARK = ("#6db1f2", "#f0a04a", "#3fc59b", "#e086be", "#b497d6", "#cdb855")
NAMES = dict(zip(COLORS, _ON_LIGHT, strict=True))
DARK = {INK: "#a9b1bb", **dict(zip(_ON_LIGHT, _ON_DARK, strict=True))}


class Look(NamedTuple):
    """The look of a bar or a span: its colour, and the hatching over it."""

    color: str
    hatch: str | None = None
    hatch_color: str = ""

    @property
    def style(self) -> dict[str, Any]:
        """Keyword arguments of a matplotlib patch."""
        edge = self.hatch_color or self.color  # hatching has the colour of the edge
        return {"facecolor": self.color, "edgecolor": edge, "linewidth": 0.5, "hatch": self.hatch}


FORWARD, BACKWARD, OPTIMIZER = Look(COLORS[0]), Look(COLORS[1]), Look(COLORS[3])
COMMUNICATION = Look(COLORS[2])
COMPUTING = Look("#6f94c4")  # not told apart into forward, backward and optimizer
HIDDEN = Look(COMPUTING.color, "///", "#0b5a43")  # computing, with communication below it
WAITING = Look("#e0524d", "////", "#8e1f1b")  # for communication, which nothing hides
WAITING_FOR_RANKS = Look("#ec9a96", "\\\\\\\\", "#8e1f1b")
# By the names that the chapters give to parts of a step.
ROLES = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "optimizer": OPTIMIZER,
    "computing": COMPUTING,
    "works": COMPUTING,
    "computing during all-reduce": HIDDEN,
    "hidden": HIDDEN,
    "all-reduce": COMMUNICATION,
    "averaging": COMMUNICATION,
    "bucket": COMMUNICATION,
    "busiest link": COMMUNICATION,
    "all-reduce, not hidden": WAITING,
    "exposed": WAITING,
    "waiting for communication": WAITING,
    "waits for transfers": WAITING,
    "waits for ranks": WAITING_FOR_RANKS,
    "gradient ready": Look(GREY),
    "idle": Look("#a9afb7"),
    "data": Look("#b0a58f"),
}
# For parts without a role, so that none takes a role's colour.
OTHERS = (COLORS[4], COLORS[5], "#3d93a3", "#b0663f", "#8f969f")

STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "figure.figsize": (WIDE, 3.4),
    "figure.titlesize": 11,
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.color": INK,
    "hatch.linewidth": 1.2,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def looks(parts: Any) -> dict[str, Look]:
    """Choose the look of each named part, in order: its role's, else the next of ``OTHERS``."""
    others = [part for part in parts if part not in ROLES]
    return {
        part: ROLES.get(part) or Look(OTHERS[others.index(part) % len(OTHERS)]) for part in parts
    }
