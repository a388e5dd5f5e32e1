"""Timelines as files for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from microddp.results import whole_file
from microddp.step_times import tracks
from microddp.timing import Span


def nanoseconds(seconds: float) -> int:
    """A time in whole nanoseconds, as files and pictures have it: no clock here is finer."""
    return round(seconds * 1e9)


def save_chrome_trace(spans: Sequence[Span], path: str | Path) -> None:
    """Write spans as a file that Perfetto and chrome://tracing open: a process for each rank.

    Each lane is a thread, and where spans of a lane overlap, as collectives do, several. Times are
    in microseconds, to the nanosecond; what a span knows of its bytes is among its arguments. The
    file appears whole or not at all.
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
        start, end = nanoseconds(span.start), nanoseconds(span.end)
        event: dict[str, object] = {
            "name": span.name,
            "pid": span.rank,
            "tid": threads[place],
            "ts": start / 1000,  # the format counts in microseconds
        }
        if span.nbytes is not None:
            event["args"] = {"bytes": span.nbytes}
        if end == start:
            events.append({**event, "ph": "i", "s": "t"})  # an instant, of its thread
        else:
            events.append({**event, "ph": "X", "dur": (end - start) / 1000})
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps({"traceEvents": events}))
