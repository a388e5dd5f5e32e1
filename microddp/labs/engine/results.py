"""The results of a lab's checks, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from microddp.comms import name_ranks
from microddp.labs.engine.lab import Lab
from microddp.labs.engine.listener import Failure, Outcome
from microddp.labs.engine.rank import LOADING, Failed
from microddp.report import table

WIDTH = 96
LINES = 10  # shown of what each rank printed
SHOWN = 2  # different findings in full; further ranks are only named


def first_failure(lab: Lab, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the job that failed in the earliest of the lab's checks."""
    titles = [LOADING, *(check.title for check in lab.checks)]
    failed = {titles.index(o.failure.title): o for o in reversed(outcomes) if o.failure}
    return failed[min(failed)] if failed else None


def overview(lab: Lab, outcomes: Sequence[Outcome]) -> str:
    """Return a table of checks by world sizes."""
    headers = ["", *(str(outcome.stage).removeprefix("on ") for outcome in outcomes)]
    rows = []
    for check in lab.checks:
        cells = []
        for outcome in outcomes:
            runs = check in lab.checks_on(outcome.stage)
            cells.append(_cell(check.title, outcome) if runs else "")
        rows.append((check.title, *cells))
    return table(rows, headers)


def _cell(title: str, outcome: Outcome) -> str:
    if title in outcome.passed:
        return "ok"
    failed = outcome.failure is not None and outcome.failure.title == title
    return "FAILED" if failed else "not run"


def explain(lab: Lab, outcome: Outcome) -> str:
    """Explain a job's failure: what was expected, what came, on which rank, and what to read."""
    failure = outcome.failure
    assert failure is not None
    blocks = [f"{str(outcome.stage).capitalize()}, this does not hold: {failure.title}."]
    found = _alike(failure.found)
    blocks += [_block(ranks, what) for what, ranks in list(found.items())[:SHOWN]]
    if others := [rank for ranks in list(found.values())[SHOWN:] for rank in ranks]:
        blocks.append(f"Likewise {name_ranks(sorted(others))}.")
    mistakes = dict.fromkeys(what.mistake for what in found if what.mistake)
    blocks += [textwrap.fill(mistake, WIDTH) for mistake in mistakes]
    blocks += [failure.story] if failure.story else []
    blocks += [_printed(outcome.printed)] if outcome.printed else []
    return "\n\n".join([*blocks, _where_to_read(lab, failure)])


def _alike(found: Mapping[int, Failed]) -> dict[Failed, list[int]]:
    """Return the ranks by what they found."""
    alike: dict[Failed, list[int]] = {}
    for rank, failed in sorted(found.items()):
        alike.setdefault(failed, []).append(rank)
    return alike


def _block(ranks: Sequence[int], found: Failed) -> str:
    lines = [f"{name_ranks(ranks)}:"]
    if found.expected:
        lines += [f"  expected  {found.expected}", f"  got       {found.got}"]
    else:
        lines += textwrap.indent(found.got, "  ").splitlines()
    return "\n".join(lines)


def _printed(printed: Mapping[int, str]) -> str:
    lines = ["Printed meanwhile:"]
    for rank, text in printed.items():
        said = text.splitlines()
        lines += [f"  [rank {rank}] ... {len(said) - LINES} lines"] if len(said) > LINES else []
        lines += [f"  [rank {rank}] {line[:WIDTH]}" for line in said[-LINES:]]
    return "\n".join(lines)


def _where_to_read(lab: Lab, failure: Failure) -> str:
    section = f', "{failure.read}"' if failure.read else ""
    return (
        f"Read: chapter {lab.chapter}{section}. A hint: python -m microddp.labs hint {lab.number}"
    )
