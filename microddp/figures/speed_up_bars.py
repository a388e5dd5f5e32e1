"""Speed-ups over one device, as bars up to the number of devices."""

from __future__ import annotations

from collections.abc import Mapping

from microddp.figures.drawing import (
    ROW,
    Drawing,
    bar_in_row,
    drawing,
    is_narrow,
    name_bars,
    new_axes,
)
from microddp.figures.style import COLORS, GREY, INK
from microddp.timing import Timing


@drawing
def speed_ups(times: Mapping[str, Timing], devices: int, *, title: str) -> Drawing:
    """Draw how many times as fast so many devices are as one that does all of their work.

    A bar ends at the median, its line at the quartiles.

    Args:
        times: speed-up in each round, by the name of the way.
        devices: number of devices, the most that can be reached.
        title: finding, in words.
    """
    figure, axes = new_axes(
        title, "times as fast as one device", "", height=1.2 + ROW[is_narrow()] * (len(times) + 1)
    )
    top, height = bar_in_row()
    rows = {"one device": Timing((1.0,)), **times}
    for row, (name, speed) in enumerate(rows.items()):
        low, high = speed.spread
        color = GREY if row == 0 else COLORS[2]
        axes.barh(row + top, speed.median, height, align="edge", color=color)
        middle = row + top + height / 2
        axes.plot([low, high], [middle, middle], color=INK, linewidth=1.5)
        end = high + 0.02 * devices
        axes.text(end, middle, f"{speed.median:.2f}", va="center")
        said = f"{speed.median:.2f} times as fast as one device ({low:.2f} to {high:.2f})"
        figure.boxes(axes, name, [((0, speed.median, row + top + height, row + top), said)])
    axes.axvline(devices, color=INK, linestyle="--", linewidth=1)
    axes.text(devices * 0.99, -0.45, f"all {devices}", ha="right", va="top")
    axes.set_xlim(0, 1.04 * max([devices, *(speed.spread[1] for speed in times.values())]))
    name_bars(axes, list(rows))
    figure.tell("Bars", [f"{name} ({speed.median:.2f})" for name, speed in rows.items()])
    figure.tell("Dashed line", [f"all {devices} devices"])
    return figure
