"""Clocks for calls against each other, and timelines of every rank."""

from microddp.timing.clock import (
    Instant,
    Timing,
    measure,
    seconds_now,
    slowest_rank,
    timed_together,
)
from microddp.timing.timeline import NOT_RECORDED, Launched, Recorder, Span, Timeline
