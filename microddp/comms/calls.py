"""The call log of this process, so that a hang can be read.

This folder only says what is called. :mod:`microddp.hang` keeps it.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

# A module with a function start(rank, world_size, answers) that returns Calls; None: nobody.
taken_by: str | None = None
_current: Calls | None = None


class Calls(AbstractContextManager[None]):
    """Takes note of what a process calls: this one of nothing.

    What :meth:`begin` returns is the call that was made; as a context, the time for which this rank
    waits in it. To begin that again notes that it is made now.
    """

    def begin(
        self,
        call: str = "",
        group: str = "",
        ranks: str = "",
        collective: bool = False,
        place: str | None = None,
    ) -> Calls:
        """Note that a call is made.

        Args:
            call: in words.
            group: the name of the group of ranks.
            ranks: its members; empty for all.
            collective: whether to number it.
            place: the line that makes it; default: :meth:`place`.
        """
        del call, group, ranks, collective, place
        return self

    def place(self) -> str:
        """The line of the program that this is called from, if calls are noted."""
        return ""

    def left(self, group: str = "", ranks: str = "") -> None:
        """Note that this rank leaves a group, or, if none is named, the job."""

    def __exit__(self, *_: object) -> None:
        pass


def start(rank: int, world_size: int, answers: bool) -> Calls:
    """Start a log of this process's calls, in place of an earlier one.

    Args:
        rank: of this process in its job.
        world_size: the number of ranks.
        answers: whether the process is to tell of itself when it is asked, and when it ends.

    Raises:
        ValueError: ``MICRODDP_RECORD`` names no folder that can be written to.
    """
    global _current
    job = rank, world_size, answers
    _current = importlib.import_module(taken_by).start(*job) if taken_by else Calls()
    return _current


def current() -> Calls | None:
    """The log of this process, if one was started."""
    return _current
