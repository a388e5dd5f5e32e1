"""A torchrun job, seen from the build and from torchrun.

A job has an agent on each host it runs on, most often one. `run_job` starts each as this file,
`gallery_launcher_job.py FOLDER NUMBER`, in a program of its own, behind the host's prefix. That
program is torchrun with the arguments that `agentNUMBER.json` in the folder gives, and does two
things more. It stops its ranks when its standard input closes, a pipe that only the build holds
open (through the prefix, as `ssh` does), so that no rank outlives the build. And if a rank fails,
it leaves `exitsNUMBER.json` in the folder: `[rank, status]` for each rank that did not end well,
the first one noticed first; a negative status is a signal.
"""

import json
import logging
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from gallery_launcher_rank import Job

_RANK_PROGRAM = Path(__file__).with_name("gallery_launcher_rank.py")
# Set in every process of a job, to a value of that job's own.
_MARK = "GALLERY_LAUNCHER_JOB"
# torchrun gives its ranks this long between SIGTERM and SIGKILL, then has to end itself.
_SECONDS_FOR_RANKS = 5
_SECONDS_FOR_TORCHRUN = 8
_SECONDS_FOR_OTHER_AGENTS = 5
_SECONDS_AFTER_PREFIX = 3


class JobFailed(Exception):
    """A job gave no result; the message says which rank failed, and how."""


@dataclass(order=True)
class _Failure:
    """How a rank failed; failures sort by how likely they are to be the cause."""

    secondary: bool
    time: float
    rank: int
    text: str


@dataclass(frozen=True)
class Agent:
    """One torchrun of a job, on a host that has this interpreter and the job's folders.

    With several agents, `address` is where the others reach the host.
    """

    ranks: int
    prefix: Sequence[str] = ()  # what starts a command on the host, as ("ssh", "node1")
    address: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def run_job(
    job: Job, folder: Path, agents: Sequence[Agent], timeout: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a job and return what rank 0 left in `result.pkl`.

    `folder` is emptied first; it holds the ranks' logs afterwards. `say` is called, from other
    threads, with each line that a rank writes. When this returns or raises, no process of the job
    is left on this machine, and those elsewhere have been told to stop.

    Raises `JobFailed` if a rank fails or the job takes more than `timeout` seconds.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.pkl").write_bytes(pickle.dumps(tuple(job)))
    mark = uuid.uuid4().hex
    programs: list[subprocess.Popen[str]] = []
    relays: list[threading.Thread] = []
    deadline = time.monotonic() + timeout
    try:
        meeting = _meeting_place(agents)
        for number, agent in enumerate(agents):
            programs.append(_start(job, folder, number, agent, mark, meeting))
            relay = threading.Thread(target=_relay, args=(programs[-1].stdout, say), daemon=True)
            relay.start()
            relays.append(relay)
        statuses = _wait(programs, deadline)
    except OSError as error:  # a prefix that is no program
        raise JobFailed(f"The agent of host {len(programs)} did not start: {error}") from error
    finally:
        _stop(programs, folder, mark)
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


def _meeting_place(agents: Sequence[Agent]) -> list[str]:
    """How the agents find each other, as arguments of torchrun."""
    if len(agents) == 1:
        return ["--standalone"]
    with socket.socket() as free:  # here, which on the first host is likely
        free.bind(("", 0))
        port = free.getsockname()[1]
    # A fixed number for each node: rank 0 is to be the first agent's.
    where = f"--master-addr={agents[0].address}", f"--master-port={port}"
    return [f"--nnodes={len(agents)}", *where]


def _start(
    job: Job, folder: Path, number: int, agent: Agent, mark: str, meeting: Sequence[str]
) -> "subprocess.Popen[str]":
    # Unless told otherwise, torchrun numbers the ranks of each host from 0.
    prefix = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]:"}
    own = {_MARK: mark, "MPLBACKEND": "Agg", **prefix, **agent.environment}
    arguments = [
        *(*meeting, f"--node-rank={number}", f"--nproc-per-node={agent.ranks}", "--role=rank"),
        *(f"--log-dir={folder / f'agent{number}'}", "--tee=3"),
        *(f"--shutdown-timeout={_SECONDS_FOR_RANKS}", str(_RANK_PROGRAM), str(folder)),
    ]
    order = {"cwd": str(Path(job.chapter).parent), "environment": own, "arguments": arguments}
    (folder / f"agent{number}.json").write_text(json.dumps(order))
    command = [sys.executable, "-u", __file__, str(folder), str(number)]
    if agent.prefix and Path(agent.prefix[0]).name == "ssh":  # whose other end is a shell
        command = [shlex.quote(word) for word in command]
    return subprocess.Popen(
        [*agent.prefix, *command],
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the build, which then stops the job
    )


def _wait(programs: "Sequence[subprocess.Popen[str]]", deadline: float) -> list[int] | None:
    """The statuses of the agents that ended, all of them if all is well; none if it took too long.

    When one has failed the others get a while to notice, and to say what they saw.
    """
    last = deadline
    while time.monotonic() < last:
        statuses = [program.poll() for program in programs]
        if None not in statuses:
            break
        if last == deadline and any(statuses):
            last = min(deadline, time.monotonic() + _SECONDS_FOR_OTHER_AGENTS)
        time.sleep(0.02)
    ended = [status for program in programs if (status := program.poll()) is not None]
    return ended if len(ended) == len(programs) or any(ended) else None


def _relay(output: IO[str], say: Callable[[str], None]) -> None:
    for line in output:
        say(line.rstrip("\n"))


def _stop(programs: "Sequence[subprocess.Popen[str]]", folder: Path, mark: str) -> None:
    """End whatever still runs of a job, also what its ranks started and left behind."""
    try:
        for program in programs:
            program.terminate()
        end = time.monotonic() + _SECONDS_FOR_TORCHRUN
        told = len(programs) * [False]
        while time.monotonic() < end and not all(told):
            for number, program in enumerate(programs):
                if program.poll() is not None:
                    # What a prefix started may outlive it, and notices this.
                    program.stdin.close()  # type: ignore[union-attr]
                told[number] = (folder / f"ended{number}").exists()
            if all(program.poll() is not None for program in programs):
                end = min(end, time.monotonic() + _SECONDS_AFTER_PREFIX)
            time.sleep(0.02)
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # ended meanwhile, or somebody else's
                if process.environ().get(_MARK) == mark:
                    process.kill()
        for program in programs:
            program.kill()
            program.wait()
            program.stdin.close()  # type: ignore[union-attr]


def _explain_failure(folder: Path, statuses: Sequence[int]) -> str:
    reports = sorted(folder.glob("rank*.json"))
    failures = [_Failure(**json.loads(report.read_text())) for report in reports]
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
        stack = folder / f"rank{rank}.stack"
        frames = stack.read_text().splitlines()[1:] if stack.exists() else []
        # Below the chapter's own frames are only those that started it.
        inside = [i for i, frame in enumerate(frames) if f'"{job.chapter}"' in frame]
        shown = frames[: inside[-1] + 1] if inside else frames
        lines += ["", f"Rank {rank}, most recent call first:", *shown]
        if not frames:
            lines[-1] = f"Rank {rank} had ended, or not begun."
    return "\n".join(lines)


def _stop_when_the_build_ends() -> None:
    build = os.dup(0)
    # The ranks inherit standard input; theirs is to be empty.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        os.read(build, 1)
        os.kill(os.getpid(), signal.SIGTERM)  # on which torchrun stops its ranks

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, number: int) -> int:
    """Be torchrun; return 0 if every rank ended well, and leave `endedNUMBER` in any case."""
    _stop_when_the_build_ends()
    order = json.loads((folder / f"agent{number}.json").read_text())
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    # The build has no use for torch: only this program imports it.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its advice on OMP_NUM_THREADS would come with every chapter, and the failure that it logs
    # as the first is the first by whole seconds only.
    logging.disable(logging.ERROR)
    try:
        run.main(order["arguments"])
    except ChildFailedError as error:
        exits = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        (folder / f"exits{number}.json").write_text(json.dumps(exits))
        return 1
    except SignalException:
        return 1
    finally:
        (folder / f"ended{number}").touch()
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(status)  # to take torch apart would keep a core busy for half a second
