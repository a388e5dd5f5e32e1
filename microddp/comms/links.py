"""The links between the ranks, where something has set their speed."""

from __future__ import annotations

import importlib
import os
from typing import Protocol

VARIABLE = "MICRODDP_LINKS"  # a module, with a function links_of_this_job()


class Links(Protocol):
    """Links of known speed between hosts that are one machine; in words, by ``str``."""

    @property
    def cores(self) -> int:
        """Processor cores of all hosts together."""
        ...

    @property
    def seconds_per_byte(self) -> float:
        """Seconds a byte takes on the slowest link, which a ring waits for."""
        ...


def known_links() -> Links | None:
    """The links of this job, as told by the module that ``MICRODDP_LINKS`` names."""
    if VARIABLE not in os.environ:
        return None
    links: Links | None = importlib.import_module(os.environ[VARIABLE]).links_of_this_job()
    return links
