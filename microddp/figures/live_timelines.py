"""Live timelines: switch between steps, choose ranks, zoom, and ask each span what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microddp.figures.chrome_trace import nanoseconds
from microddp.figures.gantt import kind_of
from microddp.figures.live import Live
from microddp.figures.style import looks
from microddp.report import human_bytes, human_seconds, table
from microddp.step_times import StepTimes, break_down, tracks
from microddp.timing import Span

MOST_RANKS = 4  # drawn of a larger job, because each rank's spans are bytes of the page


def explore_timelines(steps: Mapping[str, Sequence[Span]], *, title: str) -> Live:
    """Timelines on one scale, each from its own beginning, to switch between.

    Where a job has more than four ranks, the picture has the first four, and says so.

    Args:
        steps: spans of all ranks, as :meth:`microddp.timing.timeline.Timeline.gather` returns
            them, by the name of the step; at least one span of each rank.
        title: subject of the picture, in words.

    Raises:
        ValueError: a rank has spans in one step and none in another.
    """
    everyone = sorted({span.rank for spans in steps.values() for span in spans})
    for name, spans in steps.items():
        if missing := sorted(set(everyone) - {span.rank for span in spans}):
            raise ValueError(f"{name}: expected spans of ranks {everyone}, got none of {missing}")
    ranks = everyone[:MOST_RANKS]
    shown = {name: [s for s in spans if s.rank in ranks] for name, spans in steps.items()}
    every = [span for spans in shown.values() for span in spans]
    styles = looks(dict.fromkeys(map(kind_of, every)))
    kinds = list(styles)
    lanes = list(dict.fromkeys(span.lane for span in every))
    names = list(dict.fromkeys((span.name, kinds.index(kind_of(span))) for span in every))
    places = {name: i for i, name in enumerate(names)}

    def step(name: str, spans: Sequence[Span]) -> dict[str, object]:
        origin = min(nanoseconds(span.start) for span in spans)
        rows = [
            (
                span.rank,
                lanes.index(span.lane),
                places[span.name, kinds.index(kind_of(span))],
                nanoseconds(span.start) - origin,
                nanoseconds(span.end) - origin,
                span.nbytes,
                track,
            )
            for span, track in zip(spans, tracks(spans), strict=True)
        ]
        return {
            "name": name,
            "origin": origin,
            "sums": [
                [rank, *map(nanoseconds, (times.total, times.exposed, times.hidden))]
                for rank, times in _of_each(spans, ranks).items()
            ],
            "spans": rows,
        }

    data = {
        "ranks": ranks,
        "world": len(everyone),
        "lanes": lanes,
        "kinds": [(kind, look.color) for kind, look in styles.items()],
        "names": names,
        "steps": [step(name, spans) for name, spans in shown.items()],
    }
    return Live("timeline", title, data, _table(shown, ranks, len(everyone)))


def _of_each(spans: Sequence[Span], ranks: Sequence[int]) -> dict[int, StepTimes]:
    """Take each rank's step apart."""
    return {rank: break_down([span for span in spans if span.rank == rank]) for rank in ranks}


def _table(steps: Mapping[str, Sequence[Span]], ranks: Sequence[int], world: int) -> str:
    """Write an HTML table of the sums for each step and rank."""
    rows: list[tuple[object, ...]] = []
    for name, spans in steps.items():
        for rank, step in _of_each(spans, ranks).items():
            sent = [s for s in spans if s.rank == rank and s.lane == "communication"]
            known = [span.nbytes for span in sent if span.nbytes is not None]
            total = human_bytes(sum(known)) if len(known) == len(sent) else None
            parts = step.total, step.forward, step.backward, step.exposed, step.hidden
            rows.append((name, rank, *map(human_seconds, parts), len(sent), total))
    headers = ["", "rank", "step", "forward", "backward", "exposed", "hidden"]
    headers += ["all-reduces", "bytes"]
    omitted = f"<p>Ranks {ranks[0]} to {ranks[-1]} of {world}.</p>" if world > len(ranks) else ""
    return table(rows, headers, form="html") + omitted
