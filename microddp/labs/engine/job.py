"""Running a reader's script on several ranks: who starts them, listens, and ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from microddp.doctor.diagnosis import diagnose, whereabouts
from microddp.doctor.hang import examine
from microddp.hosts import Cluster, Link
from microddp.labs.engine.lab import Lab, Stage
from microddp.labs.engine.listener import Listener, Outcome
from microddp.labs.engine.rank import Task, be_a_rank, printed_by

SERVER = multiprocessing.get_context("forkserver")
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
    # No rank has to import PyTorch, nor what a process's first optimizer imports, for a second.
    SERVER.set_forkserver_preload(["microddp.labs.engine.rank", "torch._dynamo"])
    forkserver.ensure_running()
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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="microddp-lab-")))
        try:
            tasks = stack.enter_context(_tasks(lab, script, outcome, folder, kept))
        except RuntimeError as error:
            outcome.refused = str(error)
            return
        processes, pipes = stack.enter_context(_started(tasks))
        outcome.failure = Listener(lab, outcome, progress).listen(processes, pipes)
        outcome.printed = {
            rank: said for rank in range(stage.ranks) if (said := _end_of(printed_by(folder, rank)))
        }
        if outcome.failure and outcome.failure.hangs:  # to ask them lets them print, too
            outcome.failure = replace(outcome.failure, story=_story(folder, stage))


@contextmanager
def _tasks(
    lab: Lab, script: Path, outcome: Outcome, folder: Path, kept: Path
) -> Iterator[list[Task]]:
    """What each rank has to do; while the block runs, its host and the job's store are there."""
    stage = outcome.stage
    if hindrance := lab.hindrance(stage):
        raise RuntimeError(hindrance)
    with ExitStack() as stack:
        if stage.link:
            cluster = Cluster([Link.parse(stage.link)] * stage.ranks)
            stack.enter_context(cluster)
            hosts: list[tuple[int, int] | None] = [
                cluster.processes(host) for host in range(stage.ranks)
            ]
            shared = {
                **cluster.environment,
                "MASTER_ADDR": cluster.address(0),
                "MASTER_PORT": str(PORT),
                "LOCAL_WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
            }
        else:
            store = _store_of_this_machine()
            hosts = [None] * stage.ranks
            shared = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "LOCAL_WORLD_SIZE": str(stage.ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        shared |= {
            "WORLD_SIZE": str(stage.ranks),
            "MICRODDP_RECORD": str(folder),
            "CUDA_VISIBLE_DEVICES": "",  # the same everywhere: what is counted depends on nothing
        }
        yield [
            Task(
                lab.name,
                script,
                stage,
                folder,
                kept,
                tuple(outcome.passed),
                tuple(outcome.deaths),
                {"LOCAL_RANK": str(rank), **shared, "RANK": str(rank)},
                hosts[rank],
            )
            for rank in range(stage.ranks)
        ]


def _store_of_this_machine() -> TCPStore:
    """A job's store, which nobody reaches from elsewhere: left to itself it listens everywhere."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


@contextmanager
def _started(tasks: Sequence[Task]) -> Iterator[tuple[list[ForkServerProcess], list[Connection]]]:
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    try:
        for task in tasks:
            ours, theirs = SERVER.Pipe(duplex=False)
            pipes.append(ours)
            process = SERVER.Process(target=be_a_rank, args=(theirs, task), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        yield processes, pipes
    finally:
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _end_of(file: Path) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as text:
        text.seek(max(0, file.stat().st_size - PRINTED))
        return text.read().decode(errors="replace").strip()


def _story(folder: Path, stage: Stage) -> str:
    """Where ranks are that hang."""
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
