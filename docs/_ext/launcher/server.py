"""A process that imports PyTorch once, and that all jobs of a build are forked from.

`Server` is this process, as the build sees it. A job does not start an agent program, which would
have to import everything again, but a stand-in: it asks the server to fork the agent program, with
the stand-in's streams. The stand-in passes SIGTERM on and ends with the program's status.

    server serve MODULES SYS_PATH    two lists, in JSON
    server ask SOCKET FOLDER NUMBER
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from . import agent

PROGRAMS = str(Path(__file__).parent)  # `__main__.py` starts them


class Server:
    """The process; it starts with the first job."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self.modules, self.environment = modules, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.requests = -1  # a socket

    def stand_in(self, folder: Path, number: int) -> tuple[list[str], tuple[int]]:
        """Return the command of a stand-in for agent program `number`, and the file it inherits."""
        if self.process and self.process.poll() is not None:
            self.close()  # it died: the next one begins anew
        if self.process is None:
            ours, theirs = socket.socketpair()
            order = json.dumps(self.modules), json.dumps([*map(os.path.abspath, sys.path)])
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-u", PROGRAMS, "server", "serve", *order],
                    env={**os.environ, **self.environment},
                    stdin=theirs,
                    start_new_session=True,
                )
            self.requests = ours.detach()
        ask = ("ask", str(self.requests), str(folder), str(number))
        return [sys.executable, PROGRAMS, "server", *ask], (self.requests,)

    def close(self) -> None:
        """End the process. It would also end with the build, after the last stand-in."""
        if self.process:
            os.close(self.requests)
            self.process.wait()
            self.process = None


def _serve(modules: Sequence[str], sys_path: list[str]) -> int:
    requests = socket.socket(fileno=os.dup(0))
    sys.path[:] = sys_path
    with suppress(BaseException):  # the agent program imports them again, and reports the error
        for module in (agent.MODULE, *modules):
            import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children here
    while True:
        request, files, *_ = socket.recv_fds(requests, 1 << 16, 4)
        if not request:
            return 0
        if os.fork() == 0:
            requests.close()
            os._exit(agent.status_of(partial(_be_the_program, files, *json.loads(request))))
        for file in files:
            os.close(file)


def _be_the_program(files: list[int], folder: str, number: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    *streams, answers = files
    for number_of_stream, stream in enumerate(streams):
        os.dup2(stream, number_of_stream)
        os.close(stream)
    os.write(answers, b"%d\n" % os.getpid())
    status = agent.status_of(partial(agent.run_agents, Path(folder), number))
    os.write(answers, b"%d" % status)
    return status


def _ask(requests: int, folder: str, number: int) -> int:
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(fileno=requests) as server:
        files = [0, 1, 2, theirs.fileno()]
        socket.send_fds(server, [json.dumps((folder, number)).encode()], files)
    with ours.makefile() as answers:
        program = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda *_: _end(program))
        return int(answers.read() or 1)  # nothing comes if it was killed


def _end(program: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(program, signal.SIGTERM)


def main(what: str, *arguments: str) -> None:
    """Serve a build, or be a stand-in that asks the server."""
    if what == "serve":
        os._exit(_serve(*map(json.loads, arguments)))
    sys.exit(_ask(int(arguments[0]), arguments[1], int(arguments[2])))
