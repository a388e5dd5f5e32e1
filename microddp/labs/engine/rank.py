"""A rank of a lab's job: it loads the reader's script and runs the checks, one after the other.

What it finds it tells the process that started it, through a pipe, as it finds it.
"""

from __future__ import annotations

import functools
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import microddp
from microddp.hosts import namespaces
from microddp.labs.engine.bench import Bench, Wrong
from microddp.labs.engine.catalogue import LABS
from microddp.labs.engine.lab import Check, Lab, Stage
from microddp.labs.engine.script import load
from microddp.labs.engine.seal import Seal
from microddp.report import human_bytes

LOADING = "the script is loaded"  # what is under way before the first check
MEMORY = 2 << 30  # bytes that a rank may take beyond those it has when the script is loaded
OTHERS_ARE_GONE = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Socket closed",
)  # gloo's words
PRINTED = 64 << 20  # bytes that it may print, or write to any other file


Claims = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Begun:
    """A rank has begun something: a check, or to load the script."""

    title: str


@dataclass(frozen=True)
class Passed:
    """What was begun last is over, and well.

    Attributes:
        claims: what must be the same on every rank: its value and the sentence for if it is not.
    """

    claims: Claims = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """What was begun last does not hold on this rank.

    Attributes:
        expected: in words; empty where the script raised an error.
        got: in words, or the traceback.
        mistake: what is probably the reason.
        dead: whether the rank's process is gone.
        follows: whether it may be so only because another rank has gone.
    """

    expected: str
    got: str
    mistake: str = ""
    dead: bool = False
    follows: bool = False


@dataclass(frozen=True)
class Died:
    """A rank's process kills itself, because the check under way wants it to."""


@dataclass(frozen=True)
class Task:
    """What a rank has to do.

    Attributes:
        lab: its name.
        script: the reader's file.
        stage: where the ranks are.
        folder: for this job alone: what ranks print, and their records.
        kept: a folder for all lives of this job.
        passed: the titles of the checks that all ranks have passed in lives before this one.
        deaths: of the checks that have ended these lives.
        variables: of the environment, as torchrun would set them.
        host: the processes by which this rank's host in a box is entered; none for this machine.
    """

    lab: str
    script: Path
    stage: Stage
    folder: Path
    kept: Path
    passed: Sequence[str]
    deaths: Sequence[str]
    variables: Mapping[str, str]
    host: tuple[int, int] | None = None


def be_a_rank(pipe: Connection, task: Task) -> None:
    """Be a rank of the job, in a process of its own: outside of a host, if it is to be on one.

    Does not return: whoever started it ends it, when all have told what they found.
    """
    # A group of processes of its own, so that what the script starts can be ended with it.
    os.setsid()
    if task.host is None:
        _work(pipe, task)
    else:
        namespaces.end(namespaces.enter(*task.host, lambda: _work(pipe, task)))


def _work(pipe: Connection, task: Task) -> NoReturn:
    threading.Thread(target=_end_with_listener, args=(pipe,), daemon=True).start()
    os.environ |= task.variables
    rank = int(task.variables["RANK"])
    printed = os.open(printed_by(task.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(printed, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    for message in _findings(task, LABS[task.lab], functools.partial(_die, pipe)):
        pipe.send(message)
    # To leave the job would let the others fail, before it is known that it is not their fault.
    while True:
        signal.pause()


def _end_with_listener(pipe: Connection) -> None:
    # The parent is the server that forks ranks, and lives as long as one of them does.
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()  # until nobody has the other end any more
    os.killpg(0, signal.SIGKILL)


def printed_by(folder: Path, rank: int) -> Path:
    """The file with what a rank printed."""
    return folder / f"rank{rank}.printed"


def _die(pipe: Connection) -> NoReturn:
    pipe.send(Died())  # first, so that it is known before the others lose their connections
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def _findings(
    task: Task, lab: Lab, die: Callable[[], NoReturn]
) -> Iterator[Begun | Passed | Failed]:
    yield Begun(LOADING)
    try:
        comms = microddp.init("gloo")
        _count_torchs_messages(comms)
        seal = Seal()
        _set_limits()
        bench = Bench(comms, load(task.script, lab.functions), task.kept, die)
    except BaseException as error:
        yield _failure(error, task.script)
        return
    yield Passed()
    for check in lab.checks_on(task.stage):
        if check.title in task.passed:
            continue
        bench.life = task.deaths.count(check.title)
        bench.folder = task.kept / f"check{lab.checks.index(check)}"
        bench.folder.mkdir(exist_ok=True)
        yield Begun(check.title)
        result = _run(check, bench, task.script)
        if broken := seal.broken():
            result = Failed(
                "what counts and compares to stay as it is",
                f"another {', '.join(broken)}",
                "The script replaces what the check relies on.",
            )
        yield result
        if isinstance(result, Failed):
            return


def _run(check: Check, bench: Bench, script: Path) -> Passed | Failed:
    bench.claims, bench.doing = {}, ""
    try:
        check.run(bench)
    except BaseException as error:
        return _failure(error, script, bench.doing)
    return Passed(bench.claims)


def _failure(error: BaseException, script: Path, doing: str = "") -> Failed:
    if isinstance(error, Wrong):
        return Failed(error.expected, error.got, error.mistake)
    if isinstance(error, NotImplementedError):
        return Failed("", f"{error} is not written yet")
    if isinstance(error, SystemExit):
        return Failed("", f"it called exit({error.code})", "A function returns instead.")
    mistake = ""
    if "init() was called before" in str(error):
        mistake = 'Only a cell tagged "try" (# %% tags=["try"]) joins the job: the check has.'
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        mistake = f"A rank may take {human_bytes(MEMORY)} more than it has in the beginning."
    story = traceback.TracebackException.from_exception(error)
    theirs = [i for i, frame in enumerate(story.stack) if frame.filename == str(script)]
    ours = len(story.stack) if isinstance(error, SyntaxError) else 0  # which has its own line
    story.stack = traceback.StackSummary.from_list(story.stack[theirs[0] if theirs else ours :])
    told = "".join(story.format()).rstrip()
    follows = any(words in str(error) for words in OTHERS_ARE_GONE)
    return Failed("", f"{doing}:\n{told}" if doing else told, mistake, follows=follows)


def _set_limits() -> None:
    _limit(resource.RLIMIT_FSIZE, PRINTED)
    if sys.platform == "linux":  # macOS does not enforce it
        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * resource.getpagesize()
        _limit(resource.RLIMIT_DATA, data + MEMORY)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(kind, (most, hard))


def _count_torchs_messages(comms: microddp.Comms) -> None:
    """Have messages counted, too, that ``torch.distributed`` sends: all by way of ``isend``."""
    isend = c10d.isend

    @functools.wraps(isend)
    def counted(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, **to: Any) -> Any:
        if comms.on_send:
            comms.on_send(tensor, to.get("group_dst", dst))
        return isend(tensor, dst, group, tag, **to)

    for module in (dist, c10d):
        vars(module)["isend"] = counted
