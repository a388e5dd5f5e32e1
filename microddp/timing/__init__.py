"""Clocks for calls against each other, and timelines of every rank."""

from microddp.timing.clock import (
    Instant,
    Timing,
    measure,
    seconds_now,
    slowest_rank,
    timed_together,
)
from microddp.timing.intervals import common, covered, exposed, in_both, overlapped, tracks, union
from microddp.timing.step_times import Bucket, ComputeTimes, Prediction, StepTimes, break_down
from microddp.timing.timeline import NOT_RECORDED, Launched, Recorder, Span, Timeline
