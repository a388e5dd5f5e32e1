"""Every plot of the book. They draw the data they are given; they measure nothing.

Each function draws on rank 0 and does nothing on the others, so that a chapter can call it on
every rank. It leaves the drawing as matplotlib's current figure, which notebooks and the book's
build show; returned as well, it would be shown twice. With ``MICRODDP_FIGURES=DIR`` in the
environment each figure is also written to ``DIR/<script>-<number>.png``.

Functions whose name begins with ``explore_`` return a picture that readers can work with
(:class:`~microddp.figures.live.Live`): the last value of a cell is shown.
"""

from importlib import import_module
from typing import Any

# By file what it offers, loaded when it is asked for: most chapters draw one or two kinds.
_OFFERED = {
    "drawing": ["save"],
    "chrome_trace": ["save_chrome_trace"],
    "flow_chart": ["questions"],
    "live_buckets": ["explore_buckets"],
    "live_memory": ["explore_kept"],
    "live_plan": ["explore_plan"],
    "live_timelines": ["explore_timelines"],
    "speed_up_bars": ["speed_ups"],
    "plots": ["buckets", "lines", "stacked_bars", "times_by_size"],
    "ring": ["all_reduces", "ring_rounds"],
    "gantt": ["gradient_order", "timelines"],
    "who_has_what": ["contributors", "holdings", "traffic"],
}
_FILE_OF = {name: file for file, names in _OFFERED.items() for name in names}
__all__ = list(_FILE_OF)


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
