"""A torchrun job, as the build sees it: start it, wait for it, stop it, explain its failure.

A job has one agent on each of its hosts; most jobs have one host. The program that runs agents is
`agent.py`: one program for each agent with a prefix, and one for all agents without.
"""

import json
import os
import pickle
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from .rank import Job
from .server import PROGRAMS, Server

# Set in the environment of every process of this build's jobs. One job runs at a time.
_MARK = "GALLERY_LAUNCHER_BUILD"
ENVIRONMENT = {
    _MARK: uuid.uuid4().hex,
    "MPLBACKEND": "Agg",
    # By default, torchrun numbers the ranks of each host from 0.
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]:",
}
_SECONDS_FOR_RANKS = 5  # between torchrun's SIGTERM and its SIGKILL
_SECONDS_FOR_TORCHRUN = 8  # to stop its ranks and to end
_SECONDS_FOR_OTHER_AGENTS = 5  # to end and to report, when one has failed
_SECONDS_AFTER_PREFIX = 3  # for what a prefix started, when the prefix itself has ended


class JobFailed(Exception):
    """A job gave no result; the message says which rank failed, and how."""


@dataclass(order=True)
class _Failure:
    """How a rank failed; failures sort by how likely they are to be the cause."""

    secondary: bool
    time: float
    rank: int
    text: str

    @classmethod
    def told_by(cls, report: Path) -> "_Failure":
        """Read a rank's report of the exception that ended it."""
        return cls(**json.loads(report.read_text()))


@dataclass(frozen=True)
class Agent:
    """One torchrun of a job, on a host that has this interpreter and the job's folders."""

    ranks: int
    prefix: Sequence[str] = ()  # starts a command on the host: ("ssh", "node1")
    address: str = ""  # at which the other agents of a job reach the host, if there are others
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to add
    # For a host that is a namespace of this machine: the import path of a function that moves the
    # calling process there, and the function's arguments. A last argument is added, a function: it
    # is to be called there, and its result returned.
    within: Sequence[str | int] = ()


@dataclass(frozen=True)
class _Program:
    """A process that runs the agents with these numbers."""

    numbers: Sequence[int]
    process: "subprocess.Popen[str]"

    def statuses(self, folder: Path) -> list[int | None]:
        """Return each agent's status: the one in its file, or else the program's own."""
        program = self.process.poll()  # first, as the files are complete when it has ended
        files = [folder / f"ended{number}" for number in self.numbers]
        left = [file.read_text() if file.exists() else "" for file in files]
        return [int(status) if status else program for status in left]


def run_job(
    job: Job,
    folder: Path,
    agents: Sequence[Agent],
    timeout: float,
    say: Callable[[str], None],
    server: Server | None,
) -> dict[str, Any]:
    """Run a job and return what rank 0 left in `result.pkl`.

    `server` has imported what the job needs; without one, each program imports for itself.
    `folder` is emptied first, and holds the ranks' logs afterwards. `say` is called with each line
    that a rank writes, from other threads. When this returns or raises, no process of the job is
    left on this machine, and processes on others have been told to stop.

    Raises `JobFailed` if a rank fails or the job takes more than `timeout` seconds.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.pkl").write_bytes(pickle.dumps(tuple(job)))
    programs: list[_Program] = []
    relays: list[threading.Thread] = []
    deadline = time.monotonic() + timeout
    port = _free_port() if len(agents) > 1 else 0
    try:
        for numbers in _on_one_machine_together(agents):
            program = _start(job, folder, numbers, agents, port, server)
            programs.append(_Program(numbers, program))
            relay = threading.Thread(target=_relay, args=(program.stdout, say), daemon=True)
            relay.start()
            relays.append(relay)
        statuses = _wait(programs, folder, deadline)
    except OSError as error:  # a prefix that is no program
        raise JobFailed(f"The agent of host {numbers[0]} did not start: {error}") from error
    finally:
        _stop(programs, folder, server)
        for relay in relays:
            relay.join()
    if statuses is None:
        raise JobFailed(
            _explain_timeout(job, folder, sum(agent.ranks for agent in agents), timeout)
        )
    result = folder / "result.pkl"
    if any(statuses) or not result.exists():
        raise JobFailed(_explain_failure(folder, statuses))
    return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]


def _free_port() -> int:
    with socket.socket() as free:  # a port that is free here is likely to be free on host 0
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def _on_one_machine_together(agents: Sequence[Agent]) -> list[list[int]]:
    """Group the numbers of agents by program: those without a prefix share one."""
    here = [number for number, agent in enumerate(agents) if not agent.prefix]
    elsewhere = [[number] for number, agent in enumerate(agents) if agent.prefix]
    return [here, *elsewhere] if here else elsewhere


def _start(
    job: Job,
    folder: Path,
    numbers: Sequence[int],
    agents: Sequence[Agent],
    port: int,
    server: Server | None,
) -> "subprocess.Popen[str]":
    """Start the program that runs the agents with these numbers, of all agents of the job."""
    meeting = ["--standalone"]
    if len(agents) > 1:
        # Each node has a fixed number, so that rank 0 is the first agent's.
        where = f"--master-addr={agents[0].address}", f"--master-port={port}"
        meeting = [f"--nnodes={len(agents)}", *where]
    orders: list[dict[str, Any]] = []
    for number in numbers:
        agent = agents[number]
        others = [] if number else [*range(1, len(agents))]  # which the first agent waits for
        arguments = [
            *(*meeting, f"--node-rank={number}", f"--nproc-per-node={agent.ranks}", "--role=rank"),
            *(f"--log-dir={folder / f'agent{number}'}", "--tee=3"),
            *(PROGRAMS, "rank", str(folder)),
        ]
        orders.append({"number": number, "arguments": arguments, "others": others, "port": port})
        orders[-1] |= asdict(agent)
    program = {
        "cwd": str(Path(job.chapter).parent),
        "sys_path": job.sys_path,
        "imports": job.imports,
        "environment": ENVIRONMENT,
        "seconds_for_ranks": _SECONDS_FOR_RANKS,
        "agents": orders,
    }
    first, prefix = orders[0]["number"], orders[0]["prefix"]
    (folder / f"program{first}.json").write_text(json.dumps(program))
    command = [sys.executable, "-u", PROGRAMS, "agent", str(folder), str(first)]
    inherited: tuple[int, ...] = ()
    if server and not prefix:
        command, inherited = server.stand_in(folder, first)
    if prefix and Path(prefix[0]).name == "ssh":  # which hands the command to a shell
        command = [shlex.quote(word) for word in command]
    return subprocess.Popen(
        [*prefix, *command],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the build alone, which stops the job
        pass_fds=inherited,
    )


def _wait(programs: Sequence[_Program], folder: Path, deadline: float) -> list[int] | None:
    """Wait until all agents have ended, or one has failed, and return the statuses of the ended.

    When one has failed, the others get a few seconds to notice and to report. Returns `None` on a
    time-out.
    """
    last = deadline
    while time.monotonic() < last:
        statuses = _statuses(programs, folder)
        if None not in statuses:
            break
        if last == deadline and any(statuses):
            last = min(deadline, time.monotonic() + _SECONDS_FOR_OTHER_AGENTS)
        time.sleep(0.1)  # rarely, as what it looks at takes a core that ranks may need
    statuses = _statuses(programs, folder)
    ended = [status for status in statuses if status is not None]
    return ended if len(ended) == len(statuses) or any(ended) else None


def _statuses(programs: Sequence[_Program], folder: Path) -> list[int | None]:
    return [status for program in programs for status in program.statuses(folder)]


def _relay(output: IO[str], say: Callable[[str], None]) -> None:
    for line in output:
        say(line.rstrip("\n"))


def _stop(programs: Sequence[_Program], folder: Path, server: Server | None) -> None:
    """End all processes of a job, including those that its ranks started and left running."""
    processes = [program.process for program in programs]
    try:
        for process in processes:
            process.terminate()
        end = time.monotonic() + _SECONDS_FOR_TORCHRUN
        told = [folder / f"ended{number}" for program in programs for number in program.numbers]
        while time.monotonic() < end and not all(file.exists() for file in told):
            for process in processes:
                if process.poll() is not None:
                    # A program that a prefix started may outlive it; it notices this.
                    process.stdin.close()  # type: ignore[union-attr]
            if all(process.poll() is not None for process in processes):
                end = min(end, time.monotonic() + _SECONDS_AFTER_PREFIX)
            time.sleep(0.02)
    finally:
        stays = server.process.pid if server and server.process else None
        for left in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                if left.environ().get(_MARK) == ENVIRONMENT[_MARK] and left.pid != stays:
                    left.kill()
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]


def _explain_failure(folder: Path, statuses: Sequence[int]) -> str:
    reports = sorted(folder.glob("rank*.json"))
    failures = [_Failure.told_by(report) for report in reports]
    told = {failure.rank for failure in failures}
    for exits in sorted(folder.glob("exits*.json")):
        for place, (rank, code) in enumerate(json.loads(exits.read_text())):
            # torchrun stops the other ranks when one fails.
            stopped = place > 0 and code in (-signal.SIGTERM, -signal.SIGKILL)
            if rank not in told and not stopped:
                failures.append(_Failure(False, 0.0, rank, _describe_exit(code)))
    if not failures:
        numbers = ", ".join(map(str, statuses))
        return f"torchrun ended with status {numbers} and rank 0 gave no result."
    first, *others = sorted(failures)
    lines = [f"Rank {first.rank} failed first:", "", first.text.rstrip()]
    for failure in others:
        lines += ["", f"Rank {failure.rank} failed, too: {failure.text.rstrip().splitlines()[-1]}"]
    return "\n".join(lines)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"It exited with status {code}, without an exception."
    names = {number.value: number.name for number in signal.Signals}
    return f"It was ended by signal {names.get(-code, -code)}."


def _explain_timeout(job: Job, folder: Path, ranks: int, timeout: float) -> str:
    lines = [f"The job was stopped after its time-out, {timeout:g} s. Where its ranks were:"]
    for rank in range(ranks):
        report = folder / f"rank{rank}.json"
        if report.exists():  # it was stopped later than others, and saw them go
            told = _Failure.told_by(report).text.rstrip()
            lines += ["", f"Rank {rank}, which others left:", told]
            continue
        stack = folder / f"rank{rank}.stack"
        frames = stack.read_text().splitlines()[1:] if stack.exists() else []
        # The frames below the chapter's own only started it.
        chapter = job.chapter.encode("ascii", "backslashreplace").decode()  # as faulthandler has it
        inside = [i for i, frame in enumerate(frames) if f'"{chapter}"' in frame]
        shown = frames[: inside[-1] + 1] if inside else frames
        lines += ["", f"Rank {rank}, most recent call first:", *shown]
        if not frames:
            lines[-1] = f"Rank {rank} had ended, or not begun."
    return "\n".join(lines)
