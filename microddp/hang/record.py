"""The last calls of a rank, recorded so that others can read them while it hangs, or later.

The calls are the collectives of :class:`~microddp.Comms`, and messages between two ranks. They lie
in a ring of slots. With ``MICRODDP_RECORD=DIR`` in the environment the ring is a file,
``DIR/rank3.record``, mapped into memory. The kernel has at once what is written there: it stays
readable when the process waits for ever, and when it is killed. ``python -m microddp.doctor DIR``
compares the ranks' files.

To record a call takes 0.94 us, in a file as in memory, 0.50 us if its place is known, and 0.07 us
where nothing is recorded; with the wait for it 1.23 and 0.17 us (least of 2000 times 300). In a
training, whose layers clear the processor's caches, it takes 10 to 30 us: means over a
transformer's buckets, on one and two ranks. (A core of an AMD EPYC, Python 3.11, November 2026.)
All messages of one :meth:`~microddp.Comms.exchanger` are one call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import mmap
import os
import socket
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from types import TracebackType

from microddp.comms.headers import HEADER_BYTES
from microddp.comms.machine import LINKS_VARIABLE
from microddp.hang.call_site import call_site, current_call_site
from microddp.hang.entry import (
    CLOSED,
    ENDED_BY,
    LEFT,
    SLOT,
    SLOT_BYTES,
    SLOT_END,
    STATES,
    Entry,
)

SLOTS = 64  # calls that are kept
RING_BYTES = (1 + SLOTS) * SLOT_BYTES  # a header, too
write_slot, write_end = SLOT.pack_into, SLOT_END.pack_into
BEGUN, WAITING, DONE, FAILED = range(1, len(STATES))
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class _Lane(threading.local):
    name = ""  # of a thread that is a lane, " " and its name


_lane = _Lane()


def begin_lane(name: str) -> None:
    """Number the calls of this thread by themselves.

    It makes them while the program makes others, in an order that is another one on each rank.
    """
    _lane.name = f" {name}"


@dataclass(slots=True, init=False, eq=False)
class Call:
    """A call of this process; as a context, the time for which this rank waits in it.

    Every collective makes one. :class:`Record` fills it in, as an ``__init__`` would cost 0.06 us.

    Attributes:
        record: record that the call is in.
        slot: index of its slot.
        at: position of the slot in the record's memory, bytes.
        serial, number: as in :class:`~microddp.hang.entry.Entry`.
        begun: time of the call, nanoseconds since 1970.
        text: group, place, call and ranks, with tabs between.
    """

    record: Record
    slot: int
    at: int
    serial: int
    number: int
    begun: int
    text: bytes

    def begin(self) -> None:
        """Record that the call is made, now."""
        self.begun = time_ns()
        if self.record.calls[self.slot] is self:
            numbers = self.begun, self.serial, self.number
            write_slot(self.record.memory, self.at, BEGUN, 0, *numbers, self.text)

    def __enter__(self) -> None:
        record = self.record
        if record.calls[self.slot] is self:  # and no later call has the slot
            record.memory[self.at] = WAITING

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        record = self.record
        if record.calls[self.slot] is self:
            write_end(record.memory, self.at, DONE if error is None else FAILED, time_ns())
        if error is None:
            return
        # gloo's errors name neither the rank nor the call, and ours do.
        if isinstance(error, RuntimeError) and not str(error).startswith("rank "):
            seconds = (time_ns() - self.begun) / 1e9
            entry = Entry.read(SLOT.pack(FAILED, 0, 0, self.serial, self.number, self.text))
            error.add_note(f"rank {record.rank} was in {entry}; begun {seconds:.1f} s before")


class Record:
    """The last calls of this process.

    Args:
        rank: number of this process in the job.
        world_size: number of ranks in the job.
        folder: where to keep the ring; ``None``: in memory only.
        answers: True if the process answers SIGUSR1.

    Attributes:
        memory: the ring: a slot with the header, then ``SLOTS`` slots of ``SLOT_BYTES``.
        calls: the call in each slot.

    Raises:
        OSError: the folder or the file cannot be made.
    """

    def __init__(
        self, rank: int, world_size: int, folder: Path | None = None, answers: bool = False
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.calls: list[Call | None] = [None] * SLOTS
        self._serials = itertools.count()
        self._numbers: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        if folder is None:
            self.memory = mmap.mmap(-1, RING_BYTES)
            return
        folder.mkdir(parents=True, exist_ok=True)
        # Not over an earlier job's file, which one of its processes may still have mapped.
        for old in ("record", "stack", "torch.json"):
            self.file(old).unlink(missing_ok=True)
        with self.file("record").open("x+b") as file:
            file.write(bytes(RING_BYTES))  # not truncate(): where no room is left, fail here
            file.flush()
            self.memory = mmap.mmap(file.fileno(), RING_BYTES)
        header = {
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "host": machine(),
            "started": time.time(),
            "job": " ".join(os.environ.get(name, "") for name in JOB_VARIABLES),
            "script": sys.argv[0][-100:],
            "answers": answers,
        }
        line = json.dumps(header).encode() + b"\n"
        self.memory[: len(line)] = line

    def file(self, kind: str) -> Path:
        """Return the path of one of this rank's files; see :func:`rank_file`."""
        assert self.folder is not None
        return rank_file(self.folder, self.rank, kind)

    def begin(
        self,
        call: str,
        group: str = "",
        ranks: str = "",
        collective: bool = False,
        place: str | None = None,
    ) -> Call:
        """Record that a call is made, at a place; default: the line that this is called from.

        The other arguments are those of ``comms.calls.Calls.begin``.
        """
        if place is None:
            place = current_call_site()
        group += _lane.name
        made = Call()
        made.record = self
        made.number = number = next(self._numbers[group]) if collective else 0
        made.serial = serial = next(self._serials)
        made.slot = slot = serial % SLOTS
        made.at = at = (1 + slot) * SLOT_BYTES
        made.text = text = _in_bytes(group, place, call, ranks)
        self.calls[slot] = made
        made.begun = begun = time_ns()
        write_slot(self.memory, at, BEGUN, 0, begun, serial, number, text)
        return made

    def place(self) -> str:
        """The line of the program that this is called from; to find it is a third of a call."""
        return current_call_site()

    def ended_by(self, error: BaseException, frames: Iterable[tuple[str, int]]) -> None:
        """Record an exception that ends the process.

        Args:
            error: the exception.
            frames: where it was raised, as for :func:`~microddp.hang.call_site.call_site`.
        """
        text = textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" ...")
        call = self.begin(f"{ENDED_BY}{text}", place=call_site(frames))
        write_end(self.memory, call.at, FAILED, time_ns())

    def left(self, group: str = "", ranks: str = "") -> None:
        """Record that this rank leaves a group, or, if none is named, the job."""
        with self.begin(CLOSED if group else LEFT, group, ranks):
            pass

    def last(self, count: int) -> list[Entry]:
        """Return the last entries, the latest last."""
        return read_ring(self.memory[:])[-count:]


@functools.lru_cache(maxsize=256)  # a training makes the same calls in each step
def _in_bytes(group: str, place: str, call: str, ranks: str) -> bytes:
    words = f"{group}\t{place}\t{call[:HEADER_BYTES]}\t{ranks}"
    return words.encode(errors="backslashreplace")  # a path may be no UTF-8


def read_ring(memory: bytes) -> list[Entry]:
    """Return the entries of a record's memory, the latest last."""
    entries = []
    for at in range(SLOT_BYTES, RING_BYTES, SLOT_BYTES):
        with contextlib.suppress(ValueError):  # a slot that is not used yet
            entries.append(Entry.read(memory[at : at + SLOT_BYTES]))
    return sorted(entries, key=lambda entry: entry.serial)


def machine() -> str:
    """Name this machine; hosts in a box share its name, but number their processes anew."""
    name = socket.gethostname()
    return f"{name} {os.readlink('/proc/self/ns/pid')}" if LINKS_VARIABLE in os.environ else name


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """Return the path of a rank's ``"record"``, ``"stack"`` or ``"torch.json"`` in the folder."""
    return folder / f"rank{rank}.{kind}"


_current: Record | None = None


def start_record(rank: int, world_size: int, answers: bool = False) -> Record:
    """Begin a record of this process, in place of the last one.

    Raises:
        ValueError: ``MICRODDP_RECORD`` names no folder that can be written to.
    """
    global _current
    folder = os.environ.get("MICRODDP_RECORD")
    try:
        # Absolute: the program may change its folder.
        _current = Record(rank, world_size, Path(folder).absolute() if folder else None, answers)
    except OSError as error:
        raise ValueError(
            f"rank {rank}: expected MICRODDP_RECORD to name a folder to write to, got "
            f"{folder!r}: {error}"
        ) from error
    return _current


def current_record() -> Record | None:
    """Return the record of this process, if it has one."""
    return _current
