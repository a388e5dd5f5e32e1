"""A rank of a lab's job: it loads the reader's script and runs the checks, one after the other.

What it finds it tells the process that started it, as it finds it.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import microddp
from microddp.labs.engine.bench import Bench, Wrong
from microddp.labs.engine.catalogue import LABS
from microddp.labs.engine.lab import Check, Lab, Stage
from microddp.labs.engine.script import load
from microddp.launch import is_echo, tell
from microddp.report import human_bytes

LOADING = "the script is loaded"  # what is under way before the first check
MEMORY = 2 << 30  # bytes that a rank may take beyond those it has when the script is loaded
TOLD = 10_000  # characters of what it finds that are told
PRINTED = 64 << 20  # bytes that it may print, or write to any other file


@dataclass(frozen=True)
class Passed:
    """A message: the rank has loaded the script, or has passed the next check."""


@dataclass(frozen=True)
class Failed:
    """A message: loading the script or a check has failed on this rank.

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
    """The task of a rank.

    Attributes:
        lab: its name.
        script: the reader's file.
        stage: where the ranks are.
        kept: a folder for all lives of this job.
        passed: the titles of the checks that all ranks have passed in lives before this one.
        deaths: of the checks that have ended these lives.
    """

    lab: str
    script: Path
    stage: Stage
    kept: Path
    passed: Sequence[str]
    deaths: Sequence[str]


def be_a_rank(task: Task) -> NoReturn:
    """Tell what is found; whoever started this process ends it, when all have told."""
    for message in _findings(task, LABS[task.lab]):
        tell(message)
    # To leave the job would let the others fail, before it is known that it is not their fault.
    while True:
        signal.pause()


def _die() -> NoReturn:
    tell(Died())  # first, so that it is known before the others lose their connections
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def _findings(task: Task, lab: Lab) -> Iterator[Passed | Failed]:
    try:
        comms = microddp.init("gloo")
        _count_torchs_messages(comms)
        _set_limits()
        bench = Bench(comms, load(task.script, lab.functions), task.kept, _die)
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
        result = _run(check, bench, task.script)
        yield result
        if isinstance(result, Failed):
            return


def _run(check: Check, bench: Bench, script: Path) -> Passed | Failed:
    bench.doing = ""
    try:
        check.run(bench)
    except BaseException as error:
        return _failure(error, script, bench.doing)
    return Passed()


def _failure(error: BaseException, script: Path, doing: str = "") -> Failed:
    if isinstance(error, Wrong):
        return Failed(error.expected, _cut(error.got), error.mistake)
    if isinstance(error, NotImplementedError) and str(error).isidentifier():  # the skeleton's
        return Failed("", f"{error} is not written yet")
    if isinstance(error, SystemExit):
        return Failed("", _cut(f"it called exit({error.code})"), "A function returns instead.")
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
    told = f"{doing}:\n{told}" if doing else told
    return Failed("", _cut(told), mistake, follows=is_echo(error))


def _cut(text: str) -> str:
    half = TOLD // 2
    return text if len(text) <= TOLD else f"{text[:half]} [...] {text[-half:]}"


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
