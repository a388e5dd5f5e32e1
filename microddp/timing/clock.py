"""The clock: repeated measurements of calls against each other, each the slowest rank's."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from microddp.comms import Comms


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing, each the slowest rank's time in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle measurement, seconds."""
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """The smallest measurement that ``percent`` of all do not exceed, seconds."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper quartile in seconds; half of all measurements lie between.

        Interpolated between the two nearest: of four measurements the smallest and the third would
        lean to one side.
        """
        low, high = np.quantile(self.seconds, (0.25, 0.75)).tolist()
        return low, high

    def ratio(self, other: Timing) -> Timing:
        """This by another timing of the same run, round by round, so that both had the same luck.

        Raises:
            ValueError: they have different numbers of rounds.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Timing(tuple(mine / theirs for mine, theirs in pairs))

    def __str__(self) -> str:
        low, high = self.spread
        unit, many = ("s", 1) if self.median >= 1 else ("ms", 1e3)
        return f"{self.median * many:.3g} {unit} ({low * many:.3g} to {high * many:.3g})"


def measure(
    calls: Mapping[str, Callable[[], object]],
    comms: Comms,
    *,
    warmup: int = 2,
    repeat: int = 15,
    prepare: Callable[[], object] = lambda: None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time several calls against each other, on all ranks together.

    The calls take turns, so that a disturbance of the machine meets all of them alike, and in
    another order each round: what ran before, its caches and on which core it left a thread,
    changes the time of a call by up to a tenth. Before each call the ranks wait for each other. A
    measurement is the time of the slowest rank. CUDA work is waited for before the clock is read.

    Args:
        calls: what to time, by name; every rank must pass the same names in the same order.
        warmup: rounds that are run and not counted.
        repeat: rounds that are counted, at least 1. With ``MICRODDP_ROUNDS`` in the environment, no
            more than that many, after one that is not counted: for a quick look.
        prepare: run before each call, outside the measurement.
        progress: run after each round.

    Returns:
        A :class:`Timing` for each name, the same on every rank.

    Raises:
        ValueError: nothing to repeat.
    """
    if repeat < 1:
        raise ValueError(f"rank {comms.rank}: expected at least one repeat, got {repeat}")
    if comms.most_rounds:
        warmup, repeat = min(warmup, 1), min(repeat, comms.most_rounds)
    mine = torch.zeros(repeat, len(calls), dtype=torch.float64)
    turns = list(enumerate(calls.values()))
    order = random.Random(0)  # the same on every rank
    for i in range(-warmup, repeat):
        for j, call in order.sample(turns, len(turns)):
            prepare()
            elapsed = timed_together(call, comms)
            if i >= 0:
                mine[i, j] = elapsed
        progress()
    columns = slowest_rank(mine, comms).T.tolist()
    return {name: Timing(tuple(column)) for name, column in zip(calls, columns, strict=True)}


def timed_together(call: Callable[[], object], comms: Comms) -> float:
    """Seconds that a call takes on this rank, begun when all ranks are ready. A collective."""
    comms.barrier()
    start = seconds_now(comms.device)
    call()
    return seconds_now(comms.device) - start


def slowest_rank(seconds: torch.Tensor, comms: Comms) -> torch.Tensor:
    """The longest of each time over the ranks: what the job had to wait for. A collective.

    Args:
        seconds: float64, which gloo and NCCL both reduce; the same shape on every rank.
    """
    slowest = seconds.to(comms.device, copy=True)
    comms.all_reduce(slowest, "max")
    return slowest


def seconds_now(device: torch.device) -> float:
    """The clock, in seconds, once all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Instant:
    """A point in time: of the process on CPU, of the current stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))

    def until(self, later: Instant) -> float:
        """Seconds from this instant to a later one. Waits for the GPU where there is one."""
        if self.event is None or later.event is None:
            return later.seconds - self.seconds
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3
