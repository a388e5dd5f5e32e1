"""How things are timed: calls against each other, and what every rank did when."""

from microddp.timing.chrome_trace import save_chrome_trace
from microddp.timing.clock import Instant, Timing, measure, seconds_now
from microddp.timing.intervals import covered, exposed, in_both, overlapped, tracks
from microddp.timing.timeline import Span, Timeline

__all__ = [
    "Instant",
    "Span",
    "Timeline",
    "Timing",
    "covered",
    "exposed",
    "in_both",
    "measure",
    "overlapped",
    "save_chrome_trace",
    "seconds_now",
    "tracks",
]
