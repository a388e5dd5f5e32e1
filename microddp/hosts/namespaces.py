"""The way into hosts in a box, which ``keeper.py`` builds, and the way to ask it for changes.

A program of its own, run by its path, so that it starts without PyTorch::

    namespaces.py KEEPER HOST COMMAND ...   run a command on a host, and end as it does
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

NETWORK = "10.77.0"  # seen by nobody but the hosts
INTERFACE = "eth0"  # a host's end of its link
COUNTER = "\0microddp-links"  # where the switch takes wishes; on every host, and known there only
LONGEST = 1 << 16  # bytes of a wish
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def address(host: int) -> str:
    """Return the address of a host, counted from 0."""
    return f"{NETWORK}.{host + 1}"


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0, or raise ``OSError``."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def ask(*wish: object) -> None:
    """Have the switch do something, as ``"cut", host``, from a process on a host; see keeper.py.

    Raises ``OSError`` if this process is on no host in a box, else as :func:`granted`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind("")  # a name that nobody else has, for the answer to find
        line.connect(COUNTER)
        line.send(json.dumps(wish).encode())
        granted(line.recv(LONGEST).decode())


def granted(answer: str) -> None:
    """Raise ``RuntimeError`` if the switch's answer is that it did not do what was asked."""
    if answer != "done":
        raise RuntimeError(answer or "the hosts died")


def enter(keeper: int, host: int, run: Callable[[], int]) -> int:
    """Call ``run`` in a child of this process that is on a host, and stay outside.

    Signals are passed on. This process cannot leave again the namespaces that it has half entered.
    Takes the numbers of the first processes on all hosts and on this one; returns the exit status
    that ``run`` returned, or minus the signal that ended the child.
    """
    folder = os.getcwd()
    flags = CLONE_NEWPID | CLONE_NEWNS | (0 if os.getuid() == 0 else CLONE_NEWUSER)
    process = os.pidfd_open(keeper)
    call("setns", process, flags)
    with open(f"/proc/{host}/ns/net") as network:
        call("setns", network.fileno(), CLONE_NEWNET)
    os.chdir(folder)
    heard = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.sched_setaffinity(0, os.sched_getaffinity(host))
        os._exit(run())

    def pass_on(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in heard:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _execute(command: list[str]) -> int:
    """Become the command, or say why not."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


def end(status: int) -> NoReturn:
    """End this process with an exit status, or, if that is negative, by that signal."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):  # which nobody can handle
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    end(enter(int(sys.argv[1]), int(sys.argv[2]), lambda: _execute(sys.argv[3:])))
