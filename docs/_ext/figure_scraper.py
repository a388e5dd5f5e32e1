"""Figures as SVG, sharp at every size, each described for those who hear the page."""

import re
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator
from sphinx_gallery.scrapers import matplotlib_scraper

MOST_NAMES = 12  # a longer list is no help


def scrape(block: Any, variables: dict[str, Any], gallery: dict[str, Any]) -> str:
    """Keep the open figures and return the reStructuredText that shows them."""
    descriptions = [describe(plt.figure(number)) for number in plt.get_fignums()]
    # The same drawing gives the same file in every build.
    with plt.rc_context({"svg.hashsalt": "figure"}):
        shown = matplotlib_scraper(block, variables, gallery, format="svg", metadata={"Date": None})
    return re.sub(r"(?<=:alt: ).*", lambda _: descriptions.pop(0), shown)


def describe(figure: Figure) -> str:
    """Return the figure's titles, what its axes count, and what is named in it."""
    titles, scales, names = [], [], []
    if figure.get_suptitle():
        titles.append(figure.get_suptitle())
    for axes in figure.axes:
        titles.append(axes.get_title(loc="left") or axes.get_title())
        scales.append(" against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel()))))
        names += axes.get_legend_handles_labels()[1] + named(axes)
    for legend in figure.legends:
        names += [text.get_text() for text in legend.get_texts()]
    # Words, maybe with a number ("2 devices"), but no sizes and times of an axis ("64 KiB").
    worded = (name for name in names if re.match("[A-Za-z]{2}|.*[A-Za-z]{4}", name))
    what = list(dict.fromkeys(worded))
    parts = [*dict.fromkeys(filter(None, titles)), *dict.fromkeys(filter(None, scales))]
    if what:
        more = [f"{len(what) - MOST_NAMES} more"] if len(what) > MOST_NAMES else []
        parts.append(f"Shown: {', '.join([*what[:MOST_NAMES], *more])}")
    return ". ".join(" ".join(part.split()) for part in parts) + "."


def named(axes: Axes) -> list[str]:
    """Return the labels in a plot, and those of axes that count no quantity."""
    labels: list[Text] = [*axes.texts]
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_locator(), FixedLocator):
            labels += axis.get_ticklabels()
    return [label.get_text() for label in labels]
