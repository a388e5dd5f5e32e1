"""Running a reader's script on several ranks: what they have to do, and what came of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from microddp.doctor.diagnosis import diagnose, whereabouts
from microddp.doctor.hang import examine
from microddp.hosts import Cluster, Link, namespaces
from microddp.labs.engine.lab import Lab, Stage
from microddp.labs.engine.listener import Listener, Outcome
from microddp.labs.engine.rank import Task, be_a_rank
from microddp.launch import start_server, started

PORT = 29500  # free on every host in a box
PRINTED = 2000  # characters of what a rank printed that are kept


def run_job(
    lab: Lab, script: Path, stage: Stage, progress: Callable[[str], object] = lambda _: None
) -> Outcome:
    """Run a lab's checks on the ranks of a stage, up to the first that fails.

    A check may let a rank's process die. Then all are ended, and new ones begin that check again.
    When this returns or raises, no process of the job is left.

    Args:
        lab: whose checks.
        script: the reader's.
        stage: where.
        progress: called with the title of each check that is passed.
    """
    began = time.monotonic()
    outcome = Outcome(stage)
    start_server("microddp.labs.engine.rank")
    with tempfile.TemporaryDirectory(prefix="microddp-lab-") as kept:
        lives = -1
        while lives < len(outcome.deaths) and not (outcome.failure or outcome.refused):
            lives = len(outcome.deaths)
            _live(lab, script.resolve(), outcome, progress, Path(kept))
    outcome.seconds = time.monotonic() - began
    return outcome


def _live(
    lab: Lab, script: Path, outcome: Outcome, progress: Callable[[str], object], kept: Path
) -> None:
    """Start a job's processes, listen to them, up to the first death or failure, and end them."""
    stage = outcome.stage
    if hindrance := lab.hindrance(stage):
        outcome.refused = hindrance
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="microddp-lab-")))
        environment = {
            "MICRODDP_RECORD": str(folder),
            # The same everywhere: what is counted depends on nothing.
            "CUDA_VISIBLE_DEVICES": "",
            "MICRODDP_DEBUG": "0",
            "TORCH_FR_BUFFER_SIZE": "2000",
        }
        hosts: list[Callable[[Callable[[], int]], object]] = []
        if stage.link:
            try:
                cluster = stack.enter_context(Cluster([Link.parse(stage.link)] * stage.ranks))
            except RuntimeError as error:
                outcome.refused = str(error)
                return
            hosts = [partial(_on_a_host, *cluster.processes(host)) for host in range(stage.ranks)]
            environment |= {
                **cluster.environment,
                "MASTER_ADDR": cluster.address(0),
                "MASTER_PORT": str(PORT),
                "LOCAL_WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
        task = Task(lab.name, script, stage, kept, tuple(outcome.passed), tuple(outcome.deaths))
        job = stack.enter_context(
            started(be_a_rank, stage.ranks, (task,), folder, environment, hosts)
        )
        outcome.failure = Listener(lab, outcome, progress).listen(job)
        said = {rank: job.printed(rank, PRINTED) for rank in range(stage.ranks)}
        outcome.printed = {rank: text for rank, text in said.items() if text}
        if outcome.failure and outcome.failure.hangs:  # to ask them lets them print, too
            outcome.failure = replace(outcome.failure, story=_story(folder, stage))


def _on_a_host(keeper: int, host: int, run: Callable[[], int]) -> None:
    namespaces.end(namespaces.enter(keeper, host, run))


def _story(folder: Path, stage: Stage) -> str:
    """The places at which ranks hang."""
    nothing = "Nothing moved any more."
    try:
        _, ranks = examine(folder)
    except ValueError:
        return f"{nothing} The ranks have not met yet."
    now = time.time_ns()
    lines = [
        f"- rank {number}: {''.join(whereabouts(rank, now))}" for number, rank in ranks.items()
    ]
    diagnosis = diagnose(ranks, stage.ranks, now)
    told = [nothing, *(lines if lines[0] not in diagnosis else ()), "", diagnosis]
    return "\n".join(told).replace(" at <string>:1", "")  # the server's own line
