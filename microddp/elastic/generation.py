"""The ranks that train together from one change to the next, and what it took to come to be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from microddp.comms import Comms


@dataclass(frozen=True)
class Generation:
    """The ranks that train together until one is lost or joins.

    Attributes:
        number: number of the generation, from 1.
        comms: group of its ranks.
        steps: number of steps that each rank has behind it; -1: it is new.
        seconds: time that this process took to come here, by part: to let go of the group before,
            to find the meeting (or to start it), to wait for the others, and to form the group.
        started_server: True if this process started the meeting for it.
    """

    number: int
    comms: Comms
    steps: tuple[int, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    started_server: bool = False

    @property
    def source(self) -> int:
        """The first rank with the most steps, from whose state all go on."""
        return self.steps.index(max(self.steps))


class Parts:
    """Seconds by part: each lasts from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def ended(self, part: str) -> None:
        """Add the time since the last part ended to this one."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
