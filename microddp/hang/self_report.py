"""A rank's report of itself: when it gets SIGUSR1, and when an exception ends it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
from types import TracebackType

from microddp.hang.flight_recorder import flight_record
from microddp.hang.record import Record, current_record
from microddp.results import whole_file

LAST = 3  # calls that are told
PIECES = 0.05  # seconds; faulthandler writes a stack line by line
_writing = threading.Lock()


def answer_signals() -> bool:
    """Answer SIGUSR1 from now on with this process's stacks and last calls.

    Where the user's program has a handler, return False instead. They are printed to stderr. With
    ``MICRODDP_RECORD=DIR`` they are also written to ``DIR/rank3.stack``, and the entries of
    PyTorch's own recorder to ``DIR/rank3.torch.json``.
    """
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        return False
    _answer_in(os.getpid())
    return True


@functools.cache
def _answer_in(_pid: int) -> None:
    # Python runs a handler of its own between two lines of the main thread, so not while that
    # waits in C++ for another rank. faulthandler's runs at once. It can do no more than write a
    # stack to a file, here to a pipe: a thread that reads it knows that it was asked, and tells
    # more. Only what keeps Python's lock while it waits would keep that thread from answering.
    asked, asking = os.pipe()
    os.set_blocking(asking, False)
    faulthandler.register(signal.SIGUSR1, file=asking, all_threads=False)
    threading.Thread(target=_answer, args=(asked,), name="microddp answers", daemon=True).start()


def _answer(asked: int) -> None:
    while True:
        select.select([asked], [], [])
        time.sleep(PIECES)
        os.read(asked, 1 << 16)  # all that a pipe holds
        record = current_record()
        if record is not None:
            lines = _stacks_and_calls(record)
            _write_flight_record(record)
            _write(record, "stack", "\n".join(lines) + "\n")  # last, to say that all is written
            prefixed = (f"[rank {record.rank}] {line}" for line in lines)
            with contextlib.suppress(OSError, ValueError):  # closed, say: it may ask again
                print("\n".join(prefixed), file=sys.stderr, flush=True)


def _stacks_and_calls(record: Record) -> list[str]:
    now = time.time_ns()
    lines = [f"process {os.getpid()} at {time.strftime('%H:%M:%S')}; its last calls:"]
    for entry in record.last(LAST):
        lines.append(f"  {entry.state}, called {(now - entry.begun) / 1e9:.1f} s ago: {entry}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me, main = threading.get_ident(), threading.main_thread().ident
    frames = sys._current_frames()
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != me:
            lines.append(f"thread {names.get(ident, ident)}, its innermost call last:")
            lines += "".join(traceback.format_stack(frames[ident])).splitlines()
    return lines


def tell_of_the_end() -> None:
    """Record the exception that will end this process, and at its end PyTorch's calls."""
    _tell_in(os.getpid())


@functools.cache
def _tell_in(_pid: int) -> None:
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record = current_record()
        try:
            if record is not None:
                stack = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
                record.ended_by(error, reversed(stack))
                # Not only at exit: before that, Python waits for threads.
                _write_flight_record(record)
        finally:
            before(kind, error, trace)

    sys.excepthook = tell
    atexit.register(_tell_at_exit)


def _tell_at_exit() -> None:
    record = current_record()
    if record is not None:
        _write_flight_record(record)


def _write_flight_record(record: Record) -> None:
    """Write the last collectives that PyTorch has recorded, if the record has a folder."""
    if record.folder:
        _write(record, "torch.json", flight_record())


def _write(record: Record, kind: str, text: str) -> None:
    # A folder that is gone, or full, is no reason to end in another way, nor to make it again.
    if record.folder and record.folder.is_dir():
        with _writing, contextlib.suppress(OSError), whole_file(record.file(kind)) as path:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
