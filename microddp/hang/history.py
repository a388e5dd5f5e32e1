"""The record of a rank, read from its file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from microddp.hang.record import SLOT_BYTES, SLOTS, Entry, rank_file

HEADER = {
    **dict.fromkeys(("rank", "world_size", "pid"), int),
    **dict.fromkeys(("host", "job", "script"), str),
    "started": float,
    "answers": bool,
}


@dataclass(frozen=True)
class History:
    """A record as it was read from its file.

    Attributes:
        rank: of the process in its job, of ``world_size`` ranks; ``pid`` on ``host``.
        answers: whether the process answers SIGUSR1.
        started: when, seconds since 1970.
        job: the same text for all ranks of a job.
        calls: the latest last.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    started: float
    job: str
    script: str
    answers: bool
    calls: Sequence[Entry]
    folder: Path

    def file(self, what: str) -> Path:
        """One of the rank's files: see :func:`~microddp.hang.record.rank_file`."""
        return rank_file(self.folder, self.rank, what)


def read_record(path: Path) -> History:
    """Read a record, also while its process writes to it.

    Raises:
        ValueError: it is none.
    """
    text = path.read_bytes().ljust(SLOT_BYTES * (1 + SLOTS), b"\0")
    head, *slots = (text[i : i + SLOT_BYTES] for i in range(0, len(text), SLOT_BYTES))
    calls = []
    for slot in slots:
        with contextlib.suppress(ValueError):  # a slot that is not used yet
            calls.append(Entry.read(slot.partition(b"\n")[0].decode(errors="replace")))
    try:
        header = json.loads(head.partition(b"\n")[0])
        # Others may be able to write to the folder, and a process is to be signalled by its number.
        if {name: type(value) for name, value in header.items()} != HEADER:
            raise ValueError(
                f"its first line has other fields, or of other types, than {[*HEADER]}"
            )
        calls.sort(key=lambda call: call.serial)
        return History(**header, calls=calls, folder=path.parent)
    except (AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"expected the record of a rank, got {path}: {error}") from None
