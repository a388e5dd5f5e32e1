"""What a check relies on, watched: so that a script that replaces it is told so."""

from __future__ import annotations

import time
from types import ModuleType

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from microddp import comms
from microddp.comms import Comms, MessageCounter, Pending
from microddp.labs.engine import bench

WATCHED: tuple[type | ModuleType, ...] = (
    *(kind for kind in Comms.__mro__ if kind is not object),
    *(MessageCounter, Pending, bench.Bench, bench.Seen),
    *(bench, comms, dist, c10d, time),
)


class Seal:
    """What counts and compares, as it was before the reader's script was loaded."""

    def __init__(self) -> None:
        self._before = {owner: dict(vars(owner)) for owner in WATCHED}

    def broken(self) -> list[str]:
        """The names of what was replaced or taken away since."""
        names = set()
        for owner, before in self._before.items():
            now = vars(owner)
            # A parent's method is replaced by another one in the class itself. A module changes
            # names of its own, and gets new ones when it is used.
            known = [*before, *now] if isinstance(owner, type) else before
            private = "__" if isinstance(owner, type) else "_"
            names |= {
                f"{owner.__name__}.{name}"
                for name in known
                if now.get(name) is not before.get(name) and not name.startswith(private)
            }
        return sorted(names)
