"""Jobs of real processes: a function run on every rank of a group, bounded in time.

The environment of each process is the one torchrun sets, the store included: it lives in this
process, on a port that it found free, as it does in torchrun's agent. Processes are forked from a
server that has imported torch already, so that a job costs a fraction of a second.
"""

import faulthandler
import functools
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import microddp

WORLD_SIZES = (1, 2, 3, 4, 5)
GRACE = 2.0  # seconds in which the other ranks may still report, after the first one failed
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["preloaded"])


class JobError(AssertionError):
    """A rank raised, died or hung; the message tells of the first one, then of the others."""


@dataclass(frozen=True)
class Report:
    """How a rank ended: with a result, or with the traceback of an exception."""

    moment: float  # of the monotonic clock, which all processes of a machine share
    result: Any = None
    error: str = ""


def on_ranks(*world_sizes: int, **options: Any) -> Callable[..., Any]:
    """Make a function of ``comms`` a test that runs on every rank, once for each world size.

    Options are those of :func:`run`. Without world sizes: 1 to 5.
    """

    def decorate(body: Callable[[microddp.Comms], object]) -> Callable[[int], None]:
        @pytest.mark.parametrize("world_size", world_sizes or WORLD_SIZES)
        def test(world_size: int) -> None:
            run(test, world_size, **options)

        names = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(test, body, assigned=names, updated=())
        del test.__wrapped__  # pytest would ask for its arguments
        test.body = body  # what the ranks run, once they have found the test by its name
        return test

    return decorate


def run(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    join: bool = True,
    dies: Sequence[int] = (),
    timeout: float = 120.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(comms, *arguments)`` on every rank of a fresh job.

    Args:
        function: of a module, so that the other processes can import it.
        world_size: the number of processes.
        arguments: passed on; like the results they are pickled.
        join: whether to call ``microddp.init()`` first; else ``function`` gets no ``comms``.
        dies: ranks that must die without a word; their result is their exit code.
        timeout: seconds for the whole job.
        environment: more variables for every rank.

    Returns:
        The results in rank order.

    Raises:
        JobError: with the story of the rank that failed first.
    """
    _start_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        stacks = [Path(folder, f"rank{rank}") for rank in range(world_size)]
        try:
            for rank, stack in enumerate(stacks):
                variables = _torchrun_variables(rank, world_size, store.port) | (environment or {})
                ours, theirs = SERVER.Pipe(duplex=False)
                pipes.append(ours)
                process = SERVER.Process(
                    target=_be_a_rank,
                    args=(theirs, str(stack), timeout, variables, join, function, arguments),
                    daemon=True,
                )
                processes.append(process)
                process.start()
                theirs.close()
            reports = _collect(pipes, dies, deadline + GRACE)
            for process in processes:
                process.join(GRACE)
            codes = [process.exitcode for process in processes]
            stories = _stories(reports, codes, dies, stacks, deadline)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                if process.pid is not None:
                    process.kill()
                    process.join()
                process.close()
                pipe.close()
    if stories:
        first, *others = stories
        raise JobError(
            f"{function.__name__} on {world_size} ranks: {first}\nThen:\n" + "\n".join(others)
        )
    return [report.result if report else code for report, code in zip(reports, codes, strict=True)]


@functools.cache
def _start_server() -> None:
    """Start what ranks are forked from, with this folder to import from, as it is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
        forkserver.ensure_running()


def free_address() -> str:
    """An address of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def gpus(count: int) -> dict[str, str]:
    """The ``environment`` of a job that sees so many of the GPUs that conftest.py hides."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(os.environ["GPUS_FOR_TESTS"].split(",")[:count])}


@functools.cache
def gpu_count(most: int) -> int:
    """How many GPUs a rank finds that may see so many."""
    return run(torch.cuda.device_count, 1, join=False, environment=gpus(most))[0]


def _torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_PORT": port,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MICRODDP_TIMEOUT": "30",
    }


def _be_a_rank(
    pipe: Connection,
    stack: str,
    timeout: float,
    variables: dict[str, str],
    join: bool,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    os.environ |= variables
    warnings.simplefilter("error")
    with open(stack, "w") as file:
        # Ends this process, whatever becomes of the one that waits for it.
        faulthandler.dump_traceback_later(timeout, exit=True, file=file)
        comms = None
        try:
            if join:
                _wait_until_all_started()
                comms = microddp.init()
                arguments = (comms, *arguments)
            body = getattr(function, "body", function)
            report = Report(time.monotonic(), body(*arguments))
        except BaseException as error:
            # With the values of variables, since pytest rewrites no assertions over here.
            trace = error.__traceback__.tb_next or error.__traceback__
            story = traceback.TracebackException(type(error), error, trace, capture_locals=True)
            report = Report(time.monotonic(), error="".join(story.format()))
        # Before the group is left: the others fail after that, and theirs is not the cause.
        pipe.send(report)
        if comms is not None:
            comms.close()
        faulthandler.cancel_dump_traceback_later()


def _wait_until_all_started() -> None:
    """A test with a short time-out measures that, not how long a busy machine takes to start."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if store.add("started", 1) == int(os.environ["WORLD_SIZE"]):
        store.set("all started", "")
    store.wait(["all started"])


def _collect(pipes: Sequence[Connection], dies: Sequence[int], end: float) -> list[Report | None]:
    """Every rank's report; ``None`` for those that ended without, or too late."""
    reports: list[Report | None] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                report = reports[rank] = pipe.recv()
            except EOFError:
                report = None
            failed = rank not in dies and (report is None or report.error)
            if failed:
                end = min(end, time.monotonic() + GRACE)
    return reports


def _stories(
    reports: Sequence[Report | None],
    codes: Sequence[int | None],
    dies: Sequence[int],
    stacks: Sequence[Path],
    deadline: float,
) -> list[str]:
    """What went wrong, the first cause first; a silent death comes before its consequences."""
    stories = []
    for rank, (report, code) in enumerate(zip(reports, codes, strict=True)):
        stack = stacks[rank].read_text()
        if rank in dies:
            if report or code is None or stack:
                stories.append((0, 0.0, f"rank {rank} should have died"))
        elif report and report.error:
            stories.append((1, report.moment, f"rank {rank} raised\n{report.error}"))
        elif stack or code is None:
            stories.append((1, deadline, f"rank {rank} did not end in time\n{stack}"))
        elif report is None or code:
            stories.append((0, 0.0, f"rank {rank} ended with status {code}\n"))
    return [story for *_, story in sorted(stories)]
