"""A rank's process: what it sets up, what it tells, and when it ends."""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from microddp.launch.echo import is_echo

LENGTH_BYTES = 8  # before each word
_line: Connection  # to the process that started this rank


@dataclass(frozen=True)
class Report:
    """The end of a rank's function: with a result, or with an exception.

    Attributes:
        result: what it returned; ``None`` if it left by ``sys.exit()`` with status 0.
        error: the exception's traceback; empty if there was none.
        echo: whether the exception only says that another rank has gone.
        moment: seconds of the monotonic clock, which all processes of a machine share.
    """

    result: Any = None
    error: str = ""
    echo: bool = False
    moment: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Order:
    """Orders for a rank's process; for the last two see :func:`~microddp.launch.job.started`."""

    work: bytes  # function and arguments, pickled: what cannot be imported is a rank's failure
    variables: Mapping[str, str]  # the whole environment
    printed: Path  # for what the rank prints, and for where it is if it crashes or is asked
    within: Callable[[Callable[[], int]], object] | None
    values: bool


def tell(message: object) -> None:
    """Send something from a rank to the process that started it, where ``Job.hear`` returns it."""
    word = pickle.dumps(message)
    rest = memoryview(len(word).to_bytes(LENGTH_BYTES) + word)
    while rest:
        rest = rest[os.write(_line.fileno(), rest) :]


def take_words(came: bytearray) -> list[bytes]:
    """Take the whole words out of what has come of a rank.

    Nobody waits for the rest of a word: the rank may be stopped, or dead.
    """
    whole = []
    while len(came) >= (end := LENGTH_BYTES + int.from_bytes(came[:LENGTH_BYTES])):
        whole.append(bytes(came[LENGTH_BYTES:end]))
        del came[:end]
    return whole


def be_a_rank(line: Connection, order: Order) -> None:
    """Be a rank, in a process of its own."""
    # A group of processes of its own, so that what the rank starts can be ended with it.
    os.setsid()
    multiprocessing.current_process().daemon = False  # so that it may load data in processes
    gc.freeze()  # else every collection would look through all that the server has imported
    work = functools.partial(_work, line, order)
    order.within(work) if order.within else work()


def _work(line: Connection, order: Order) -> int:
    global _line
    _line = line
    threading.Thread(target=_end_with_starter, args=(line,), daemon=True).start()
    os.environ.clear()
    os.environ.update(order.variables)
    printed = os.open(order.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(printed, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    try:
        function, arguments = pickle.loads(order.work)
        try:
            result = function(*arguments)
        except SystemExit as end:  # with status 0 as Comms.timed() leaves, which is no failure
            if end.code not in (None, 0):
                raise
            result = None
        tell(Report(result))
        return 0
    except BaseException as error:
        story = traceback.TracebackException.from_exception(error, capture_locals=order.values)
        del story.stack[0]  # this function
        tell(Report(error="".join(story.format()), echo=is_echo(error)))
        sys.stdout.flush()
        os._exit(1)  # at once: to leave the group first would wait for the others


def _end_with_starter(line: Connection) -> None:
    # Of the process that started the rank: its parent is the server, which lives while a rank does.
    # A rank that is stopped (SIGSTOP) ends when it is continued.
    poll = select.poll()
    poll.register(line, select.POLLHUP)  # macOS asks for an event by name
    poll.poll()  # until nobody has the other end any more
    os.killpg(0, signal.SIGKILL)
