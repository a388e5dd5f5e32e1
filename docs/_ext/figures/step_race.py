"""Draw the moving figure of the landing page: one step of each strategy, from a recording.

It is HTML and CSS: bars that are uncovered once, all at one speed, so that slow steps end last.
"""

import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from microddp.report import human_seconds
from pages.scripts import load_where

SECONDS = 4.5  # of the animation; one of more than 5 needs a way to stop it
KINDS = ("forward", "backward", "optimizer", "communication", "wait")
Bar = tuple[str, float, float]  # kind, start and end in seconds


class StepRace(SphinxDirective):
    """The steps of rank 0 in a chapter's live timeline: `{step-race} 08_performance`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Draw the steps, or say that the chapter did not run."""
        page = Path(self.env.srcdir, "chapters", f"{self.arguments[0]}.md")
        self.env.note_dependency(str(page))
        steps = recorded(page.read_text(encoding="utf-8"))
        if not steps:
            return [nodes.paragraph("", "Not measured in this build.", classes=["measured-on"])]
        return [nodes.raw("", draw(steps), format="html")]


def recorded(page: str) -> dict[str, list[Bar]]:
    """Return the bars of rank 0 by strategy, from the data of a page's live timeline."""
    found = re.search(
        r'data-live="timeline">.*?<script type="application/json">(.*?)</script>', page, re.DOTALL
    )
    if found is None:
        return {}
    data = json.loads(found[1])
    return {step["name"]: bars_of(data, step["spans"]) for step in data["steps"]}


def bars_of(data: dict[str, Any], rows: Iterable[list[Any]]) -> list[Bar]:
    """Return the bars of rank 0; spans of a kind that overlap are one bar."""
    bars: list[Bar] = []
    for rank, lane, name, start, end, *_ in sorted(rows, key=lambda row: row[3]):
        kind = data["lanes"][lane]
        if kind == "compute":
            kind = data["names"][name][0]
        if rank != 0 or kind not in KINDS:
            continue
        last = next((i for i, bar in enumerate(bars) if bar[0] == kind and bar[2] >= start), None)
        if last is None:
            bars.append((kind, start, end))
        else:
            bars[last] = (kind, bars[last][1], max(end, bars[last][2]))
    return [(kind, start / 1e9, end / 1e9) for kind, start, end in bars]


def draw(steps: dict[str, list[Bar]]) -> str:
    """Return the figure; all steps begin at its left edge and share one scale."""
    lengths = {name: max(bar[2] for bar in bars) for name, bars in steps.items()}
    longest = max(lengths.values())
    rows = []
    for name, bars in steps.items():
        waits = sum(end - start for kind, start, end in bars if kind == "wait")
        told = f"{human_seconds(lengths[name])}, waits {human_seconds(waits)}"
        lanes = "".join(
            f'<div class="lane">{_lane(bars, kinds, longest)}</div>'
            for kinds in (KINDS[:3], KINDS[3:4], KINDS[4:])
        )
        rows.append(f"<dt>{escape(name)} <span>{told}</span></dt><dd>{lanes}</dd>")
    legend = "".join(f'<li><i class="{kind}"></i>{kind}</li>' for kind in KINDS)
    slower = f"Slowed down {SECONDS / longest:.0f} times"
    return (
        '<figure class="race"><dl>' + "".join(rows) + f'</dl><ul class="legend">{legend}</ul>'
        f'<figcaption><span class="slower">{slower}.</span></figcaption></figure>'
    )


def _lane(bars: list[Bar], kinds: Iterable[str], longest: float) -> str:
    return "".join(
        f'<i class="{kind}" style="left:{start / longest:.2%};'
        f'width:{(end - start) / longest:.2%}"></i>'
        for kind, start, end in bars
        if kind in kinds
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("step-race", StepRace)
    load_where('<figure class="race">', "race.js", app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
