"""A check, or a chapter, as a job with a time limit."""

from __future__ import annotations

import runpy
import sys

from microddp.launch import run, start_server


def run_job(what: str, ranks: int, backend: str, limit: float) -> str:
    """Run one of ``checks.CHECKS``, or a chapter by its path, and return what rank 0 said.

    When this returns or raises, no process of the job is left.

    Raises:
        JobFailed: a rank failed; as JobStopped: the job took more than ``limit`` seconds.
    """
    start_server("microddp.doctor.checks")
    # No record: it would take the place of another job's, which is to be read.
    environment = {"MPLBACKEND": "Agg", "MICRODDP_RECORD": ""}
    said: str = run(_be_a_rank, ranks, what, backend, limit=limit, environment=environment)[0]
    return said


def _be_a_rank(what: str, backend: str) -> str:
    if what.endswith(".py"):
        sys.argv = [what]
        try:
            runpy.run_path(what, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code:  # else it is how ranks leave that are not timed
                raise
        return ""
    # Only here: who starts the job needs neither, and what fails in them is this rank's story.
    from microddp.comms import init
    from microddp.doctor.checks import CHECKS

    comms = init(backend)
    said = CHECKS[what](comms)
    comms.close()
    return said
