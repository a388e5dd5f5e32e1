"""The agents of a job, of one host or of all hosts in this machine: `... FOLDER NUMBER`.

A program of its own, which the build starts, behind the prefix of the host. `programNUMBER.json` in
the folder names the agents to fork, each of them torchrun with arguments of its own. It does what
torchrun alone would not:

- It stops its agents when its standard input closes, a pipe that only the build holds open (through
  the prefix, as `ssh` does), so that no rank outlives the build.
- It leaves the status of agent N in `endedN`, and the agent, if a rank failed, `exitsN.json`:
  `[rank, status]` for each rank that did not end well, the first one noticed first. A negative
  status is a signal.
- Where it has `imports`, it imports those modules once, or has been forked with them
  (`gallery_launcher_server.py`), and the ranks are forked from it. Without, torchrun starts them,
  and each imports PyTorch for itself.
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

import gallery_launcher_rank
from gallery_launcher_rank import import_object

MODULE = "torch.distributed.run"  # which has most of PyTorch


def _fork(run: Callable[[], int]) -> int:
    """Call `run` in a child of this process, which ends with its status; returns the child."""
    if child := os.fork():
        return child
    os._exit(status_of(run))  # to take torch apart would keep a core busy for half a second


def status_of(run: Callable[[], int]) -> int:
    """Call `run` and return what it returns; what it raises is printed, and is 1."""
    try:
        status = run()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class _Rank:
    """A rank that is forked already, and waits for what torchrun has to say to it.

    To torchrun it is the `Popen` of the program that the rank would be.
    """

    def __init__(self, folder: Path, others: "list[_Rank]") -> None:
        told, self._tell = os.pipe()
        self.returncode: int | None = None
        self.pid = _fork(partial(self._be, folder, told, others))
        os.setpgid(self.pid, self.pid)  # torchrun sends its signals to the group
        os.close(told)

    def _be(self, folder: Path, told: int, others: "list[_Rank]") -> int:
        for rank in (*others, self):
            os.close(rank._tell)  # else nobody would notice that the agent is gone
        with open(told) as message:
            if not (order := message.read()):
                return 1
        environment, *files = json.loads(order)
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        os.environ.clear()
        os.environ.update(environment)
        if threads := environment.get("OMP_NUM_THREADS"):
            import torch

            torch.set_num_threads(int(threads))  # what OpenMP read when torch was imported is old
        gallery_launcher_rank.main(folder)
        return 0

    def begin(self, environment: dict[str, str], stdout: IO[str], stderr: IO[str]) -> "_Rank":
        """Let the rank run, with its output appended to these files."""
        with open(self._tell, "w") as message:
            json.dump((environment, stdout.name, stderr.name), message)
        return self

    def poll(self) -> int | None:
        """The status, negative for a signal; `None` while the rank runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the rank to end; raises `subprocess.TimeoutExpired`."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
        return status


def _be_an_agent(folder: Path, order: dict[str, Any], forks: bool) -> int:
    """Be torchrun; returns 0 if every rank ended well."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    os.environ.update(order["environment"])
    waiting: list[_Rank] = []
    if forks:
        # Now, before torchrun has threads and connections, which a fork would break or share.
        for _ in range(order["ranks"]):
            waiting.append(_Rank(folder, waiting))

        def begin(handler: Any, _arguments: object, environment: dict[str, str]) -> _Rank:
            return waiting.pop(0).begin(environment, handler._stdout, handler._stderr)

        SubprocessHandler._popen = begin  # type: ignore[method-assign, assignment]
    # Its advice on OMP_NUM_THREADS would come with every chapter, and the failure that it logs
    # as the first is the first by whole seconds only.
    logging.disable(logging.ERROR)
    try:
        run.main(order["arguments"])
    except ChildFailedError as error:
        exits = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        (folder / f"exits{order['number']}.json").write_text(json.dumps(exits))
        return 1
    except SignalException:
        return 1
    finally:
        for rank in waiting:  # torchrun failed before it came to them
            os.kill(rank.pid, signal.SIGKILL)
    return 0


def _start(folder: Path, order: dict[str, Any], forks: bool) -> int:
    """Fork an agent, onto its host; returns the process."""
    be_an_agent = partial(_be_an_agent, folder, order, forks)
    if order["within"]:
        enter, *place = order["within"]
        be_an_agent = partial(import_object(enter), *place, partial(status_of, be_an_agent))
    return _fork(be_an_agent)


def _take_the_pipe_from_the_build() -> int:
    build = os.dup(0)
    # The ranks inherit standard input; theirs is to be empty.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return build


def main(folder: Path, number: int) -> int:
    """Fork the agents and wait for them; returns the first status that is not 0, or 0."""
    build = _take_the_pipe_from_the_build()
    program = json.loads((folder / f"program{number}.json").read_text())
    os.chdir(program["cwd"])
    os.environ.update(program["environment"])
    sys.path[:] = program["sys_path"]
    # The build has no use for torch: only this program imports it, for all its agents.
    for module in (MODULE, *(program["imports"] or ())):
        import_module(module)
    gc.freeze()  # else each process would go through all of it again, and copy what it touches
    forks = program["imports"] is not None
    agents = {_start(folder, order, forks): order["number"] for order in program["agents"]}

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


if __name__ == "__main__":
    os._exit(status_of(partial(main, Path(sys.argv[1]), int(sys.argv[2]))))
