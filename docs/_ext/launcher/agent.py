"""The program that runs agents: `agent FOLDER NUMBER`.

The build starts it, behind the prefix of a host, or once for all hosts in this machine.
`programNUMBER.json` in the folder lists the agents to fork; each is torchrun with arguments of its
own. The program adds to torchrun:

- It stops its agents when its standard input closes, a pipe that only the build holds open (through
  the prefix, as `ssh` does), so that no rank outlives the build.
- It writes the status of agent N to `endedN`. If a rank failed, the agent writes `exitsN.json`:
  `[rank, status]` of each rank that failed, in the order in which torchrun noticed. A negative
  status is a signal.
- With `imports`, it imports these modules once, or was forked with them by `server.py`, and forks
  the ranks. Without, torchrun starts the ranks, and each imports PyTorch for itself.
"""

import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import IO, Any

from . import rank as rank_program
from .rank import import_object

MODULE = "torch.distributed.run"  # imports most of PyTorch


def _fork(run: Callable[[], int]) -> int:
    """Call `run` in a child process, whose status is the result; return the child's id."""
    if child := os.fork():
        return child
    os._exit(status_of(run))  # Python's own end would keep a core busy for half a second


def status_of(run: Callable[[], int]) -> int:
    """Call `run` and return its result; print an exception, and return 1."""
    try:
        status = run()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class _Rank:
    """A rank that was forked early and waits until torchrun starts it.

    torchrun takes it for the `Popen` of a program.
    """

    def __init__(self, folder: Path, others: "list[_Rank]") -> None:
        orders, self._tell = os.pipe()
        self.returncode: int | None = None
        self.pid = _fork(partial(self._be, folder, orders, others))
        os.setpgid(self.pid, self.pid)  # torchrun sends its signals to the group
        os.close(orders)

    def _be(self, folder: Path, orders: int, others: "list[_Rank]") -> int:
        for rank in (*others, self):
            os.close(rank._tell)  # otherwise no rank would notice that the agent is gone
        with open(orders) as message:
            if not (order := message.read()):
                return 1
        environment, *files = json.loads(order)
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        os.environ.clear()
        os.environ.update(environment)
        if threads := environment.get("OMP_NUM_THREADS"):
            import torch

            torch.set_num_threads(int(threads))  # OpenMP read it when torch was imported, too early
        rank_program.main(folder)
        return 0

    def begin(self, environment: dict[str, str], stdout: IO[str], stderr: IO[str]) -> "_Rank":
        """Start the rank, with its output appended to these files."""
        with open(self._tell, "w") as message:
            json.dump((environment, stdout.name, stderr.name), message)
        return self

    def poll(self) -> int | None:
        """Return the status, negative for a signal; `None` while the rank runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the rank to end and return its status; raises `subprocess.TimeoutExpired`."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
        return status


def _be_an_agent(folder: Path, order: dict[str, Any], forks: bool, seconds_for_ranks: int) -> int:
    """Run torchrun in this process; return 0 if every rank ended well.

    At their end, too, agents meet in a store of the first one's process, which therefore stays
    until the others have ended.
    """
    from torch.distributed import TCPStore, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    os.environ.update(order["environment"])
    waiting: list[_Rank] = []
    if forks:
        # Now, as a fork would break torchrun's threads and share its connections.
        for _ in range(order["ranks"]):
            waiting.append(_Rank(folder, waiting))

        def begin(handler: Any, _arguments: object, environment: dict[str, str]) -> _Rank:
            return waiting.pop(0).begin(environment, handler._stdout, handler._stderr)

        SubprocessHandler._popen = begin  # type: ignore[method-assign, assignment]
    # torchrun would give its advice on OMP_NUM_THREADS with every chapter. The failure that it logs
    # as the first is so by whole seconds only.
    logging.disable(logging.ERROR)
    arguments = order["arguments"]
    # Not every PyTorch has this option. Without it, torchrun gives ranks 30 seconds.
    if "--shutdown-timeout" in run.get_args_parser().format_help():
        arguments = [f"--shutdown-timeout={seconds_for_ranks}", *arguments]
    _store, others = None, {f"ended{number}" for number in order["others"]}
    try:
        if others:
            where = order["address"], order["port"]
            _store = TCPStore(*where, None, True, multi_tenant=True, wait_for_workers=False)
        run.main(arguments)
        patience = time.monotonic() + 5  # they only have to read that all have ended
        while not others.issubset(os.listdir(folder)) and time.monotonic() < patience:
            time.sleep(0.02)
    except ChildFailedError as error:
        exits = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        (folder / f"exits{order['number']}.json").write_text(json.dumps(exits))
        return 1
    except SignalException:
        return 1
    finally:
        for rank in waiting:  # torchrun failed before it started them
            os.kill(rank.pid, signal.SIGKILL)
    return 0


def _start(folder: Path, order: dict[str, Any], *options: Any) -> int:
    """Fork an agent, on its host; return the process's id."""
    be_an_agent = partial(_be_an_agent, folder, order, *options)
    if order["within"]:
        enter, *place = order["within"]
        be_an_agent = partial(import_object(enter), *place, partial(status_of, be_an_agent))
    return _fork(be_an_agent)


def _take_the_pipe_from_the_build() -> int:
    build = os.dup(0)
    # The ranks inherit standard input, which is to be empty.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return build


def run_agents(folder: Path, number: int) -> int:
    """Fork the agents and wait for them; return the first status that is not 0, or 0."""
    build = _take_the_pipe_from_the_build()
    program = json.loads((folder / f"program{number}.json").read_text())
    os.chdir(program["cwd"])
    os.environ.update(program["environment"])
    sys.path[:] = program["sys_path"]
    # The build does not need PyTorch: only this program imports it, for all its agents.
    for module in (MODULE, *(program["imports"] or ())):
        import_module(module)
    gc.freeze()  # otherwise each process would collect all of it again, and copy what it touches
    options = program["imports"] is not None, program["seconds_for_ranks"]
    agents = {_start(folder, order, *options): order["number"] for order in program["agents"]}

    def stop(number: int, _frame: FrameType | None) -> None:
        for agent in agents:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(agent, number)

    def watch() -> None:
        os.read(build, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)  # on which torchrun stops its ranks
    threading.Thread(target=watch, daemon=True).start()
    failed = 0
    while agents:
        agent, ended = os.wait()
        status = os.waitstatus_to_exitcode(ended)
        (folder / f"ended{agents.pop(agent)}").write_text(str(status))
        failed = failed or status
    return failed


def main(folder: str, number: str) -> None:
    """Run the agents of program `number`, and end with their status."""
    os._exit(status_of(partial(run_agents, Path(folder), int(number))))
