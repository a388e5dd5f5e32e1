"""How things are timed: repeated measurements of a call, and a timeline of a step on every rank."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

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
        """The lower and upper quartile in seconds; half of all measurements lie between."""
        return self.percentile(25), self.percentile(75)

    def ratio(self, other: Timing) -> Timing:
        """This by another timing of the same run, round by round, so that both had the same luck.

        Raises:
            ValueError: they have different numbers of rounds.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Timing(tuple(mine / theirs for mine, theirs in pairs))

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.median * 1e3:.3g} ms ({low * 1e3:.3g} to {high * 1e3:.3g})"


def measure(
    calls: Mapping[str, Callable[[], object]],
    comms: Comms,
    *,
    warmup: int = 3,
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
        repeat: rounds that are counted, at least 1.
        prepare: run before each call, outside the measurement.
        progress: run after each round.

    Returns:
        A :class:`Timing` for each name, the same on every rank.

    Raises:
        ValueError: nothing to repeat.
    """
    if repeat < 1:
        raise ValueError(f"rank {comms.rank}: expected at least one repeat, got {repeat}")
    mine = torch.zeros(repeat, len(calls), dtype=torch.float64)
    turns = list(enumerate(calls.values()))
    order = random.Random(0)  # the same on every rank
    for i in range(-warmup, repeat):
        for j, call in order.sample(turns, len(turns)):
            prepare()
            comms.barrier()
            start = seconds_now(comms.device)
            call()
            elapsed = seconds_now(comms.device) - start
            if i >= 0:
                mine[i, j] = elapsed
        progress()
    # gloo and NCCL both reduce float64; the maximum is what the job had to wait for.
    slowest = mine.to(comms.device)
    comms.all_reduce(slowest, "max")
    columns = slowest.T.tolist()
    return {name: Timing(tuple(column)) for name, column in zip(calls, columns, strict=True)}


def seconds_now(device: torch.device) -> float:
    """The clock, in seconds, once all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held so far: of the GPU's allocator, or of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


@dataclass(frozen=True)
class Span:
    """Something that happened on one rank.

    Attributes:
        rank: where.
        lane: the kind of thing, one row of the picture: ``"compute"``, ``"gradients"``,
            ``"communication"``, or ``"wait"``, in which the rank waits for communication and
            computes nothing.
        name: what it was.
        start: seconds since the timeline began on that rank.
        end: likewise; equal to ``start`` for a mark.
    """

    rank: int
    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """What began and ended when, on every rank.

    On CUDA a span is what the GPU did, by events on the current stream; on CPU it is what the
    process did. Any thread may record. Ranks on rank 0's machine share its clock, so their times
    can be compared. A rank on another machine starts its own clock when all have met in a barrier,
    and may be shifted by as much as ranks leave a barrier one after the other.

    Example:
        >>> timeline = Timeline(comms)
        >>> with timeline.span("forward"):
        ...     loss = model(x).sum()
        >>> spans = timeline.gather()
    """

    def __init__(self, comms: Comms) -> None:
        self.comms = comms
        self._spans: list[tuple[str, str, Instant, Instant]] = []
        self._under_way: list[torch.futures.Future[None]] = []
        comms.barrier()
        if comms.device.type == "cuda":  # with no work queued, events and host clock begin as one
            torch.cuda.synchronize(comms.device)
        self._origin = Instant(comms.device)

    @contextmanager
    def span(self, name: str, lane: str = "compute") -> Iterator[None]:
        """Record the block as one span, also if it raises."""
        start = Instant(self.comms.device)
        try:
            yield
        finally:
            self._spans.append((lane, name, start, Instant(self.comms.device)))

    def mark(self, name: str, lane: str = "gradients") -> None:
        """Record that something happened now."""
        now = Instant(self.comms.device)
        self._spans.append((lane, name, now, now))

    def launched(self, name: str, work: dist.Work, lane: str = "communication") -> None:
        """Record from now until an asynchronous collective is complete, without waiting for it.

        Most of the span may be spent in a queue, behind collectives that were launched earlier.

        Args:
            name: what is on its way.
            work: what the call with ``async_op=True`` returned.
        """
        start = Instant(self.comms.device)
        # NCCL calls back at once, on a stream that waits for the collective; gloo when it is done.
        clock = self.comms.device if self.comms.backend == "nccl" else torch.device("cpu")

        def complete(_: torch.futures.Future[Any]) -> None:
            self._spans.append((lane, name, start, Instant(clock)))

        self._under_way.append(work.get_future().then(complete))

    def take(self) -> list[Span]:
        """This rank's spans in the order they were recorded; the timeline forgets them.

        Waits for the collectives that were :meth:`launched`.
        """
        if not self._spans:
            return []
        rank = self.comms.rank
        spans = [Span(rank, *span) for span in self._recorded()]
        self._spans.clear()
        self._under_way.clear()
        return spans

    def at(self, instant: Instant) -> float:
        """When that was, in seconds since the timeline began on this rank."""
        return self._origin.until(instant)

    def gather(self) -> list[Span]:
        """Every rank's spans, rank by rank in the order they were recorded. A collective.

        Waits for the collectives that were :meth:`launched`.
        """
        mine = self._recorded()
        everyone = self.comms.all_gather_data((platform.node(), self._origin.seconds, mine))
        machine, zero, _ = everyone[0]
        gathered = []
        for rank, (node, origin, spans) in enumerate(everyone):
            shift = origin - zero if node == machine else 0.0
            for lane, name, start, end in spans:
                gathered.append(Span(rank, lane, name, start + shift, end + shift))
        return gathered

    def _recorded(self) -> list[tuple[str, str, float, float]]:
        for future in self._under_way:
            future.wait()
        return [
            (lane, name, self._origin.until(start), self._origin.until(end))
            for lane, name, start, end in self._spans
        ]


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


def exposed(spans: Sequence[Span], rank: int) -> float:
    """Seconds in which a rank only waited for communication: its spans in the lane ``"wait"``."""
    return covered([span for span in spans if span.rank == rank and span.lane == "wait"])


def overlapped(spans: Sequence[Span], rank: int) -> float:
    """Seconds in which a rank computed while communication of its was under way."""
    mine = [span for span in spans if span.rank == rank]
    compute = [span for span in mine if span.lane == "compute"]
    communication = [span for span in mine if span.lane == "communication"]
    return in_both(compute, communication)


class Interval(Protocol):
    """What began and ended, at a number of seconds each."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def in_both(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds in which at least one of ``some`` and one of ``others`` were going on."""
    return max(0.0, covered(some) + covered(others) - covered([*some, *others]))  # but for rounding


def covered(spans: Sequence[Interval]) -> float:
    """Seconds in which at least one of the spans was going on."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def tracks(spans: Sequence[Span]) -> list[int]:
    """For each span a track, from 0, on which no two spans of its rank and lane overlap."""
    numbers = [0] * len(spans)
    ends: dict[tuple[int, str], list[float]] = {}
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[i]
        taken = ends.setdefault((span.rank, span.lane), [])
        free = (track for track, end in enumerate(taken) if end <= span.start)
        numbers[i] = next(free, len(taken))
        taken[numbers[i] : numbers[i] + 1] = [span.end]
    return numbers


def save_chrome_trace(spans: Sequence[Span], path: str | Path) -> None:
    """Write spans as a file that Perfetto and chrome://tracing open: a process for each rank.

    Each lane is a thread, and where spans of a lane overlap, as collectives do, several. The file
    appears whole or not at all.
    """
    places = [(span.lane, track) for span, track in zip(spans, tracks(spans), strict=True)]
    lanes = list(dict.fromkeys(lane for lane, _ in places))
    ordered = sorted(set(places), key=lambda place: (lanes.index(place[0]), place[1]))
    threads = {place: i for i, place in enumerate(ordered)}
    events: list[dict[str, object]] = [
        {"name": key, "ph": "M", "pid": rank, "tid": tid, "args": {"name": label}}
        for rank in sorted({span.rank for span in spans})
        for key, tid, label in (
            ("process_name", 0, f"rank {rank}"),
            *(
                ("thread_name", i, f"{lane} {track + 1}" if track else lane)
                for (lane, track), i in threads.items()
            ),
        )
    ]
    for span, place in zip(spans, places, strict=True):
        event: dict[str, object] = {
            "name": span.name,
            "pid": span.rank,
            "tid": threads[place],
            "ts": span.start * 1e6,  # the format counts in microseconds
        }
        if span.end == span.start:
            events.append({**event, "ph": "i", "s": "t"})  # an instant, of its thread
        else:
            events.append({**event, "ph": "X", "dur": (span.end - span.start) * 1e6})
    write_whole(Path(path), json.dumps({"traceEvents": events}))


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    # Several ranks may write it at once.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(text)
    unfinished.replace(path)
