"""An entry of the record: one call, and its form in the file.

The form is a slot of ``SLOT_BYTES``: numbers, then texts. ``ended`` and ``state`` lie next to each
other, as they change while the call is under way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

SLOT_BYTES = 1024  # the longest call is 256 (headers.HEADER_BYTES), a path may be as long
STATES = ("unused", "begun", "waiting", "done", "failed")  # as the file's numbers
# State and end; then begin, serial, collective's number, and the texts with tabs between.
SLOT = struct.Struct(f"<Bqqqq{SLOT_BYTES - 33}s")
SLOT_END = struct.Struct("<Bq")
LEFT = "left"
CLOSED = "closed"  # a group, after which nobody will come to its collectives
ENDED_BY = "ended by "  # and an exception that nothing caught


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded call.

    Attributes:
        serial: number of the entry in its process, from 0.
        group: name of the group of ranks, the same on all of them; then, after a space, the lane
            that the call was made on, if it was on one.
        ranks: members of the group, as ranks of the job: ``"0, 2-3"``; empty for all of them. Of
            hundreds the last may be missing.
        number: number of the collective in its group, from 1, by which ranks are compared; 0 for
            what is no collective.
        call: the call in words, as ``Comms.agree`` compares it:
            ``"all_reduce(float32 (3, 5), op=sum)"``.
        place: line of the user's program, ``"train.py:88"``; empty if it is not known.
        begun: time of the call, nanoseconds since 1970.
        state: ``"begun"``, ``"waiting"``, ``"done"``, or ``"failed"`` with an error. A call that
            something else than ``Comms`` waits for stays ``"begun"``.
        ended: time at which the call was over, nanoseconds since 1970; 0 before.
    """

    serial: int
    group: str
    ranks: str
    number: int
    call: str
    place: str
    begun: int = 0
    state: str = "begun"
    ended: int = 0

    def __str__(self) -> str:
        """Say it in words: ``"all_reduce 17 (float32 (3, 5), op=sum) at train.py:88"``."""
        name, bracket, rest = self.call.partition("(")
        text = self.call
        if self.number and bracket and name.isidentifier():
            text = f"{name} {self.number}" + (f" ({rest}" if rest != ")" else "")
        elif self.number:
            text = f"collective {self.number}, {self.call},"
        among = f" among ranks {self.ranks}" if self.ranks else ""
        return f"{text}{among}{self.at_place}"

    @property
    def at_place(self) -> str:
        """Words that follow the call, as ``" at train.py:88"``; empty if the place is not known."""
        return f" at {self.place}" if self.place else ""

    @property
    def is_end(self) -> bool:
        """True for the entry that says how this rank left the job, well or with an error."""
        return self.call == LEFT or self.call.startswith(ENDED_BY)

    @property
    def is_close(self) -> bool:
        """True for the entry that says that this rank left the group."""
        return self.call == CLOSED

    def members(self, world_size: int) -> list[int]:
        """Return the ranks of its group."""
        if not self.ranks:
            return list(range(world_size))
        spans = [[int(end) for end in span.split("-")] for span in self.ranks.split(", ")]
        return [rank for span in spans for rank in range(span[0], span[-1] + 1)]

    @classmethod
    def read(cls, slot: bytes) -> Entry:
        """Read a slot of the file.

        Raises:
            ValueError: nothing was written there yet.
        """
        state, ended, begun, serial, number, text = SLOT.unpack(slot)
        if not 0 < state < len(STATES):
            raise ValueError(f"expected a slot in use, got state {state}")
        words = text.rstrip(b"\0").decode(errors="replace")
        group, place, call, ranks = (words.split("\t", 3) + [""] * 3)[:4]
        if text[-1]:  # full: of hundreds of members the last may be cut, within a number
            ranks = ranks.rpartition(", ")[0]
        return cls(serial, group, ranks, number, call, place, begun, STATES[state], ended)
