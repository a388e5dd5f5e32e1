"""A Python that begins at once: forked from a process that has PyTorch and Sphinx imported.

``python()`` is an executable that takes Python's arguments. It hands them, its environment, its
folder and its files to a server, which forks; it passes signals on, and ends as the fork does. If
it is killed, so is the fork. What that starts is a real Python, unless it is a torchrun's rank and
PYTHON_EXEC says otherwise, or WARM_OFFSPRING is set. Differences from a real one: PyTorch and other
libraries are imported already, microddp is not; the parent process is the server; and ``/proc``
shows the server's environment.
"""

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from importlib import import_module
from pathlib import Path

from huge_pages import collapse

MOST_FILES = 250  # that Linux hands over in one message
FOLDER = "WARM_PYTHON"  # the variable that says where the executable is
OFFSPRING = "WARM_OFFSPRING"  # the variable by which a fork's sys.executable makes forks, too
# A folder for PYTHONPATH: every Python that finds it there looks for garbage rarely.
RARE_COLLECTIONS = str(Path(__file__).parent / "rare_collections")
_servers: "list[subprocess.Popen[bytes]]" = []  # of this process: to let one go would be warned of
LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.launcher.api", "torch.distributed.checkpoint"),
    *("matplotlib.pyplot", "psutil", "sphinx.cmd.build", "myst_parser.sphinx_"),
    *("sphinx_gallery.gen_gallery", "jupytext", "pandas"),
)

# What stands between who starts a process and its fork. It imports next to nothing. With options
# that it does not know it becomes a real Python.
CLIENT = """#!/bin/sh
'''exec' '{executable}' -ISE "$0" "$@"
' '''
import array, json, os, signal, socket, sys
if sys.argv[1].startswith("-") and sys.argv[1] not in ("-W", "-u", "-m", "-c"):
    os.execv({executable!r}, [{executable!r}, *sys.argv[1:]])
def is_open(file):  # the one that lists the folder is not, any more
    try:
        return os.get_inheritable(file)
    except OSError:
        return False
files = [file for file in map(int, os.listdir("/dev/fd")) if is_open(file)]
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
umask = os.umask(0o22)
os.umask(umask)
deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # started in the background
order = sys.argv[1:], dict(os.environ), os.getcwd(), umask, files, deaf
line.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
with line.makefile("rw") as both:
    both.write(json.dumps(order) + "\\n")
    both.flush()
    fork = int(both.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(fork, number))
    status = int(both.readline())
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def share() -> Path:
    """The folder where the executable is or will be, for this process and those that it starts.

    The server ends with this process, which keeps its end of ``alive`` open. All Pythons from here
    on look for garbage rarely.
    """
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="warm-")
        os.environ[FOLDER] = folder.name
        places = RARE_COLLECTIONS, *filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
        os.mkfifo(alive := f"{folder.name}/alive")
        ends = os.open(alive, os.O_RDWR)

        def end() -> None:
            os.close(ends)
            folder.cleanup()

        atexit.register(end)
    return Path(os.environ[FOLDER])


@functools.cache
def python() -> str:
    """The path of the executable. Its server is started by who asks first."""
    folder = share()
    client, address = folder / "python", f"{folder}/line"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not client.exists():
            _start_server(folder / "alive", address)
            client.write_text(CLIENT.format(executable=sys.executable, address=address))
            client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return str(client)


def _start_server(alive: Path, address: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = RARE_COLLECTIONS
    with socket.socket(socket.AF_UNIX) as listening, open(alive, "rb") as ending:
        listening.bind(address)
        listening.listen(64)
        numbers = listening.fileno(), ending.fileno()
        _servers.append(
            subprocess.Popen(
                [sys.executable, __file__, *map(str, numbers)],
                pass_fds=numbers,
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it before its forks
            )
        )


def serve(listening: socket.socket, alive: int) -> None:
    """Fork for each who asks, until the other end of ``alive`` is closed."""
    for name in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)
    gc.collect()
    gc.freeze()
    collapse()
    forks: dict[int, socket.socket] = {}
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([listening, alive, wake], [], [])
        if alive in ready:
            for fork in forks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fork, signal.SIGKILL)
            return
        if wake in ready:
            os.read(wake, 4096)
            while forks:
                fork, status = os.waitpid(-1, os.WNOHANG)
                if not fork:
                    break
                with contextlib.suppress(OSError):
                    forks[fork].send(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                forks.pop(fork).close()
        if listening in ready:
            line, _ = listening.accept()
            _, ancillary, _, _ = line.recvmsg(1, socket.CMSG_SPACE(MOST_FILES * 4))
            if not ancillary:  # the client has gone
                line.close()
                continue
            files = array.array("i", ancillary[0][2])
            fork = os.fork()
            if not fork:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listening.fileno(), alive, wake, wakes):
                    os.close(other)
                for other in forks.values():
                    other.close()
                be(line, files)
            for file in files:
                os.close(file)
            forks[fork] = line


def be(line: socket.socket, files: "array.array[int]") -> None:
    """Be the Python that was asked for; never returns."""
    status = 1
    try:
        os.setsid()
        with line.makefile("r") as words:
            arguments, environment, folder, umask, numbers, deaf = json.loads(words.readline())
        above = max(numbers) + 1
        line = socket.socket(fileno=fcntl.fcntl(line.detach(), fcntl.F_DUPFD_CLOEXEC, above))
        aside = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(aside, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
        line.send(f"{os.getpid()}\n".encode())
        os.umask(umask)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        threading.Thread(target=_end_with, args=(line,), daemon=True).start()
        status = _run(arguments)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status)


def _end_with(line: socket.socket) -> None:
    poll = select.poll()
    poll.register(line, 0)
    poll.poll()  # until the client has gone
    os.kill(os.getpid(), signal.SIGKILL)


def _run(arguments: list[str]) -> int:
    import torch

    sys.orig_argv = [sys.executable, *arguments]
    if os.environ.get(OFFSPRING):
        sys.executable = python()
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        number = getattr(sys, f"__{name}__").fileno()
        setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    given = iter(arguments)
    for argument in given:
        if argument == "-W":
            sys.warnoptions.append(option := next(given))
            warnings._processoptions([option])
        elif argument == "-u":
            sys.stdout.reconfigure(write_through=True, line_buffering=True)
        else:
            break
    else:
        raise ValueError(f"expected a script, -m or -c, got {arguments}")
    places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*places, *sys.path[1:]]  # without the folder of this file
    try:
        if argument == "-m":
            sys.argv = [name := next(given), *given]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif argument == "-c":
            code, sys.argv = next(given), ["-c", *given]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [argument, *given]
            sys.path.insert(0, os.path.dirname(os.path.realpath(argument)))
            runpy.run_path(argument, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
