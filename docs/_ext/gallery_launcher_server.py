"""What a build imports once: a process that has PyTorch, and that every job is forked from.

`Server` is that process, as the build sees it. In the place of a program that would import all of
it again, a job starts a stand-in for it: the server forks the program, with the streams of the
stand-in, which passes SIGTERM on and ends with the program's status.

    gallery_launcher_server.py serve MODULES SYS_PATH    two lists, in JSON
    gallery_launcher_server.py ask SOCKET FOLDER NUMBER
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

import gallery_launcher_agent
from gallery_launcher_agent import status_of


class Server:
    """The process, which starts with the first job."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self.modules, self.environment = modules, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.requests = -1  # the socket to send them by

    def stand_in(self, folder: Path, number: int) -> tuple[list[str], tuple[int]]:
        """The command of a stand-in for agent program `number`, and the file it has to inherit."""
        if self.process is None:
            ours, theirs = socket.socketpair()
            order = json.dumps(self.modules), json.dumps([*map(os.path.abspath, sys.path)])
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-u", __file__, "serve", *order],
                    env={**os.environ, **self.environment},
                    stdin=theirs,
                    start_new_session=True,
                )
            self.requests = ours.detach()
        ask = [sys.executable, __file__, "ask", str(self.requests), str(folder), str(number)]
        return ask, (self.requests,)

    def close(self) -> None:
        """End the process. It also ends with the build, and with the last stand-in."""
        if self.process:
            os.close(self.requests)
            self.process.wait()
            self.process = None


def _serve(modules: Sequence[str], sys_path: list[str]) -> int:
    requests = socket.socket(fileno=os.dup(0))
    sys.path[:] = sys_path
    with suppress(Exception):  # the program will import them again, and tell what is wrong
        for module in (gallery_launcher_agent.MODULE, *modules):
            import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for their status here
    while True:
        request, files, *_ = socket.recv_fds(requests, 1 << 16, 4)
        if not request:
            return 0
        if os.fork() == 0:
            requests.close()
            os._exit(status_of(partial(_be_the_program, files, *json.loads(request))))
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
    status = status_of(partial(gallery_launcher_agent.main, Path(folder), number))
    os.write(answers, b"%d" % status)
    return status


def _ask(requests: int, folder: str, number: int) -> int:
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(fileno=requests) as server:
        files = [0, 1, 2, theirs.fileno()]
        socket.send_fds(server, [json.dumps((folder, number)).encode()], files)
    with ours.makefile() as answers:
        program = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda signal_, _: os.kill(program, signal_))
        return int(answers.read() or 1)  # nothing, if it was killed


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "serve":
        os._exit(_serve(*map(json.loads, arguments)))
    sys.exit(_ask(int(arguments[0]), arguments[1], int(arguments[2])))
