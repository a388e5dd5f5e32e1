"""Timelines as files for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from microddp.report import whole_file
from microddp.timing.intervals import tracks
from microddp.timing.timeline import Span


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
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps({"traceEvents": events}))
