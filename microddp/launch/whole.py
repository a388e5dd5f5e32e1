"""A job from start to end: what its ranks return, or which of them failed first, and how."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from microddp.launch.job import Gone, Job, started
from microddp.launch.rank import Report

GRACE = 2.0  # seconds for the other ranks to find out for themselves, once one has failed
PRINTED = 1 << 14  # bytes shown of what a rank printed that told nothing; a crash lists modules


class JobFailed(Exception):
    """The message says which rank failed first, and how; then how the others ended."""


class JobStopped(JobFailed):
    """The job took longer than its limit; the message says where each rank was."""


def run(
    function: Callable[..., Any],
    ranks: int,
    *arguments: object,
    limit: float,
    environment: Mapping[str, str],
    dies: Sequence[int] = (),
    values: bool = False,
) -> list[Any]:
    """Run a function on every rank of a job, and return the results in rank order.

    When this returns or raises, no process of the job is left.

    Args:
        function, ranks, arguments, environment, values: as :func:`~microddp.launch.job.started`'s.
        limit: seconds for the job.
        dies: ranks that must die without a word; the result of each is its exit status.

    Raises:
        JobFailed: a rank failed; as JobStopped: the job took more than ``limit`` seconds.
    """
    reports: dict[int, Report] = {}
    gone: dict[int, Gone] = {}
    with (
        tempfile.TemporaryDirectory(prefix="microddp-job-") as folder,
        started(function, ranks, arguments, Path(folder), environment, values=values) as job,
    ):
        end, failed = time.monotonic() + limit, False
        while heard := job.hear(end):
            for rank, word in heard:
                if isinstance(word, Gone):
                    gone[rank], bad = word, word.status or rank not in reports
                else:
                    reports[rank], bad = word, word.error
                if bad and rank not in dies and not failed:
                    failed, end = True, min(end, time.monotonic() + GRACE)
        job.ask([rank for rank in range(ranks) if rank not in gone])
        problems = [
            _problem(job, rank, reports.get(rank), gone.get(rank), rank in dies)
            for rank in range(ranks)
        ]
    if any(problems):
        first, *others = (told for *_, told in sorted(filter(None, problems), key=itemgetter(0, 1)))
        told = "\n".join([first, *(["Then:"] if others else []), *others])
        if failed or len(gone) == ranks:
            raise JobFailed(told)
        raise JobStopped(f"stopped after its limit of {limit:g} s: {told}")
    return [gone[rank].status if rank in dies else reports[rank].result for rank in range(ranks)]


def _problem(
    job: Job, rank: int, report: Report | None, end: Gone | None, dies: bool
) -> tuple[int, float, str] | None:
    """A problem of a rank; causes sort before what may only follow from them.

    A death without a word comes first, then exceptions, then what hangs, and last what only
    noticed that another rank was gone.
    """
    if dies:
        return (0, 0.0, f"rank {rank} should have died") if report or end is None else None
    if report and report.error:
        # NCCL tells more in what it prints.
        printed = [line for line in job.printed(rank, 1 << 20).splitlines() if "NCCL" in line]
        told = "\n".join([report.error.rstrip(), *printed])
        return (3 if report.echo else 1), report.moment, f"rank {rank} raised\n{told}"
    if end is None:
        return 2, 0.0, f"rank {rank} did not end in time\n{job.printed(rank, PRINTED)}"
    if end.status or report is None:
        return 0, 0.0, f"rank {rank} {end}, without a word\n{job.printed(rank, PRINTED)}".rstrip()
    return None
