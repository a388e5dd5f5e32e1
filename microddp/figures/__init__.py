"""Every plot of the book. They draw the data they are given; they measure nothing.

Each function draws on rank 0 and does nothing on the others, so that a chapter can call it on
every rank. It leaves the drawing as matplotlib's current figure, which notebooks and the book's
build show; returned as well, it would be shown twice. With ``MICRODDP_FIGURES=DIR`` in the
environment each figure is also written to ``DIR/<script>-<number>.png``.

Functions whose name begins with ``explore_`` return a picture that readers can work with
(:class:`~microddp.figures.live.Live`): the last value of a cell is shown.
"""

from microddp.figures.chrome_trace import save_chrome_trace
from microddp.figures.flow_chart import questions
from microddp.figures.live_buckets import explore_buckets
from microddp.figures.live_memory import explore_kept
from microddp.figures.live_plan import explore_plan
from microddp.figures.live_timelines import explore_timelines
from microddp.figures.plots import buckets, lines, pauses, stacked_bars, times_by_size
from microddp.figures.ring import all_reduces, ring_rounds
from microddp.figures.timelines import gradient_order, timeline, timelines
from microddp.figures.who_has_what import contributors, holdings, traffic
