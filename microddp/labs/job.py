"""Running a reader's script on several ranks: who starts them, listens, and ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from microddp.comms import odd_ranks
from microddp.doctor.diagnosis import diagnose, whereabouts
from microddp.doctor.hang import examine
from microddp.hosts import Cluster, Link
from microddp.labs.lab import Lab, Stage
from microddp.labs.rank import (
    LOADING,
    Begun,
    Claims,
    Died,
    Failed,
    Passed,
    Task,
    be_a_rank,
    printed_by,
)

SERVER = multiprocessing.get_context("forkserver")
LOADS = 60.0  # seconds to start the ranks, to join them and to load the script
GRACE = 1.0  # seconds for the other ranks to find out for themselves, once one has failed
PORT = 29500  # free on every host in a box
PRINTED = 2000  # characters of what a rank printed that are kept


@dataclass(frozen=True)
class Failure:
    """What went wrong in a job.

    Attributes:
        title: of the check.
        read: the section that explains it.
        found: what each rank found that failed; nothing if all only waited.
        story: where the ranks were then.
    """

    title: str
    read: str
    found: dict[int, Failed] = field(default_factory=dict)
    story: str = ""

    @property
    def hangs(self) -> bool:
        """Whether no rank said anything any more."""
        return not self.found


@dataclass
class Outcome:
    """How a job went.

    Attributes:
        stage: where.
        passed: the titles of the checks that all ranks passed.
        deaths: the titles of the checks that let a process die, one for each time that they did.
        failure: of the first one that they did not.
        refused: why it could not run here, if it could not.
        printed: what each rank printed, if anything.
        seconds: how long it took.
    """

    stage: Stage
    passed: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    failure: Failure | None = None
    refused: str = ""
    printed: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


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
    SERVER.set_forkserver_preload(["microddp.labs.rank"])  # no rank has to import PyTorch
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
        outcome.failure = _Listener(lab, outcome, progress).listen(processes, pipes)
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
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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


class _Listener:
    """Hears what the ranks find, until all are through, one has failed, or one has to die."""

    def __init__(self, lab: Lab, outcome: Outcome, progress: Callable[[str], object]) -> None:
        self.outcome, self.progress = outcome, progress
        self.patience = lab.patience
        self.ranks = outcome.stage.ranks
        self.read = {LOADING: "", **{c.title: c.read for c in lab.checks_on(outcome.stage)}}
        self.under_way = [LOADING] * self.ranks
        self.claims: dict[str, dict[int, Claims]] = {title: {} for title in self.read}
        self.found: dict[int, Failed] = {}  # by rank, the first first
        self.death = ""  # the title of the check that lets a process die
        self.failure: Failure | None = None

    def listen(
        self, processes: Sequence[ForkServerProcess], pipes: Sequence[Connection]
    ) -> Failure | None:
        """How the job failed, if it did."""
        listening = {pipe: rank for rank, pipe in enumerate(pipes)}
        end = time.monotonic() + LOADS
        while heard := wait(list(listening), max(0.0, end - time.monotonic())):
            first = not self.found
            for pipe in heard:
                assert isinstance(pipe, Connection)
                rank = listening[pipe]
                try:
                    self._hear(rank, pipe.recv())
                except EOFError:
                    del listening[pipe]
                    self._died(rank, processes[rank])
            if self.death:
                self.outcome.deaths.append(self.death)
                if first and not any(failed.expected for failed in self.found.values()):
                    self.found.clear()  # errors of those that were left alone
                break
            everyone = len(self.found) == self.ranks
            if self.failure or everyone or len(self.outcome.passed) == len(self.read) - 1:
                break
            if first:  # from the first failure on it only counts down
                loading = LOADING in self.under_way
                patience = GRACE if self.found else LOADS if loading else self.patience
                end = time.monotonic() + patience
        else:
            if not self.found:
                title = min(self.under_way, key=list(self.read).index)
                self.failure = Failure(title, self.read[title])
        if self.found:
            dead = {rank: found for rank, found in self.found.items() if found.dead}
            causes = {rank: found for rank, found in self.found.items() if not found.follows}
            causes = dead or causes or self.found
            title = self.under_way[next(iter(causes))]
            same = {rank: f for rank, f in causes.items() if self.under_way[rank] == title}
            self.failure = Failure(title, self.read[title], same)
        return self.failure

    def _hear(self, rank: int, message: Begun | Passed | Failed | Died) -> None:
        title = self.under_way[rank]
        if isinstance(message, Begun):
            self.under_way[rank] = message.title
        elif isinstance(message, Failed):
            self.found[rank] = message
        elif isinstance(message, Died):
            self.death = title
        else:
            self.claims[title][rank] = message.claims
            if len(self.claims[title]) == self.ranks:
                self._all_passed(title)

    def _all_passed(self, title: str) -> None:
        claims = [self.claims[title][rank] for rank in range(self.ranks)]
        for what, (_, mistake) in claims[0].items():
            values = [claim[what][0] for claim in claims]
            usual, odd = odd_ranks(values)
            if odd and not self.failure:
                expected = f"{what} to be the same on every rank"
                got = f"{usual} on most or on rank {values.index(usual)}, "
                got += "; ".join(f"{values[rank]} on rank {rank}" for rank in odd)
                wrong = dict.fromkeys(odd, Failed(expected, got, mistake))
                self.failure = Failure(title, self.read[title], wrong)
        if not self.failure and title != LOADING:
            self.outcome.passed.append(title)
            self.progress(title)

    def _died(self, rank: int, process: ForkServerProcess) -> None:
        process.join(GRACE)
        code = process.exitcode
        how = (
            f"by signal {signal.Signals(-code).name}" if code and code < 0 else f"with code {code}"
        )
        self.found[rank] = Failed("", f"its process ended {how}, without a word", dead=True)


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
    return "\n".join([nothing, *(lines if lines[0] not in diagnosis else ()), "", diagnosis])
