"""Timelines to look into: switch between steps, choose ranks, zoom, ask each span what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from microddp.figures.live import Live
from microddp.figures.style import looks
from microddp.figures.timelines import kind_of
from microddp.report import human_bytes, human_seconds, table
from microddp.timing import Span, covered, exposed, in_both, nanoseconds, tracks

MOST_RANKS = 4  # what is drawn of a larger job: each rank's spans are bytes of the page


def explore_timelines(steps: Mapping[str, Sequence[Span]], *, title: str) -> Live:
    """Timelines on one scale, each from its own beginning, to switch between.

    Where a job has more than four ranks, the picture has the first four, and says so.

    Args:
        steps: the spans of all ranks, as :meth:`microddp.timing.timeline.Timeline.gather` returns
            them, by the name of the step; at least one span each.
        title: what there is to see, in words.
    """
    everyone = sorted({span.rank for spans in steps.values() for span in spans})
    ranks = everyone[:MOST_RANKS]
    shown = {name: [s for s in spans if s.rank in ranks] for name, spans in steps.items()}
    every = [span for spans in shown.values() for span in spans]
    styles = looks(dict.fromkeys(map(kind_of, every)))
    colors = {kind: look.color for kind, look in styles.items()}
    kinds = list(colors)
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
        sums = {rank: _sums(spans, rank) for rank in ranks}
        return {
            "name": name,
            "origin": origin,
            "sums": [
                [rank, *(nanoseconds(each[part]) for part in ("step", "exposed", "hidden"))]
                for rank, each in sums.items()
            ],
            "spans": rows,
        }

    data = {
        "ranks": ranks,
        "world": len(everyone),
        "lanes": lanes,
        "kinds": list(colors.items()),
        "names": names,
        "steps": [step(name, spans) for name, spans in shown.items()],
    }
    return Live("timeline", title, data, _table(shown, ranks, len(everyone)))


def _sums(spans: Sequence[Span], rank: int) -> dict[str, float]:
    """Seconds of a rank's step, as :func:`microddp.performance.analyzer.break_down` has them."""
    mine = [span for span in spans if span.rank == rank]
    waits = [span for span in mine if span.lane == "wait"]
    under_way = [span for span in mine if span.lane == "communication"]
    phases = {
        name: [span for span in mine if span.name == name] for name in ("forward", "backward")
    }
    return {
        "step": max(span.end for span in mine) - min(span.start for span in mine),
        **{name: covered(phase) - in_both(phase, waits) for name, phase in phases.items()},
        "exposed": exposed(mine, rank),
        "hidden": covered(under_way) - in_both(under_way, waits),
    }


def _table(steps: Mapping[str, Sequence[Span]], ranks: Sequence[int], world: int) -> str:
    """What the picture adds up to, for each step and rank, in HTML."""
    rows: list[tuple[object, ...]] = []
    for name, spans in steps.items():
        for rank in ranks:
            sent = [s for s in spans if s.rank == rank and s.lane == "communication"]
            known = [span.nbytes for span in sent if span.nbytes is not None]
            total = human_bytes(sum(known)) if len(known) == len(sent) else None
            times = map(human_seconds, _sums(spans, rank).values())
            rows.append((name, rank, *times, len(sent), total))
    parts = ("step", "forward", "backward", "exposed", "hidden", "all-reduces", "bytes")
    omitted = f"<p>Ranks {ranks[0]} to {ranks[-1]} of {world}.</p>" if world > len(ranks) else ""
    return table(rows, ["", "rank", *parts], form="html") + omitted
