"""Reading the record of a rank from its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from microddp.hang.entry import SLOT_BYTES, Entry
from microddp.hang.record import RING_BYTES, rank_file, read_ring

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
        rank: number of the process in its job.
        world_size: number of ranks in the job.
        pid: number of the process on its host.
        host: name of the machine.
        started: start of the record, seconds since 1970.
        job: text that is the same for all ranks of a job; one command's next job may have it, too.
        script: file that the process runs.
        answers: True if the process answers SIGUSR1.
        calls: calls of the process, the latest last.
        folder: folder that the file is in.
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

    def file(self, kind: str) -> Path:
        """Return the path of one of the rank's files; see ``hang.record.rank_file``."""
        return rank_file(self.folder, self.rank, kind)


def read_record(path: Path) -> History:
    """Read a record, also while its process writes to it.

    Raises:
        ValueError: the file is no record.
    """
    memory = path.read_bytes().ljust(RING_BYTES, b"\0")
    try:
        header = json.loads(memory[:SLOT_BYTES].partition(b"\n")[0])
        # Others may be able to write to the folder, and a process is to be signalled by its number.
        if {name: type(value) for name, value in header.items()} != HEADER:
            raise ValueError(
                f"its first line has other fields, or of other types, than {[*HEADER]}"
            )
        return History(**header, calls=read_ring(memory), folder=path.parent)
    except (AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"expected the record of a rank, got {path}: {error}") from None
