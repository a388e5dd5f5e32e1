"""What the hosts' links are: asked for, and told to the ranks of a job."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass

from microddp.hosts import namespaces

VARIABLE = "MICRODDP_BOX"  # set for all that runs on a host in a box
FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Link:
    """A host's connection to the switch, as fast in both directions.

    Attributes:
        bits_per_second: frames and their headers included.
        delay: seconds by which the host sends later.
    """

    bits_per_second: float
    delay: float = 0.0

    @classmethod
    def parse(cls, rate: str, delay: float = 0.0) -> Link:
        """From ``"1gbit"``, ``"2.5gbit"`` or ``"100mbit"``, in units of 1000 as networks count.

        Raises:
            ValueError: it is written otherwise, or outside of what a token bucket can do.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate.strip().lower())
        if not match or not 1e5 <= float(match[1]) * FACTORS[match[2]] <= 34e9:
            raise ValueError(
                f"expected a link's speed from 100kbit to 34gbit, as 1gbit or 100mbit, got {rate!r}"
            )
        if not 0 <= delay < 10:
            raise ValueError(f"expected a delay from 0 to 10 seconds, got {delay:g}")
        return cls(float(match[1]) * FACTORS[match[2]], delay)

    @property
    def option(self) -> str:
        """Its speed as :meth:`parse` reads it."""
        letter = next(k for k in "gmk" if self.bits_per_second >= FACTORS[k])
        return f"{self.bits_per_second / FACTORS[letter]:.12g}{letter}bit"

    @property
    def bytes_per_second(self) -> float:
        """The speed in bytes, as tensors are counted."""
        return self.bits_per_second / 8

    def __str__(self) -> str:
        delay = f" and {self.delay * 1e3:g} ms of delay" if self.delay else ""
        return f"{human_bits(self.bits_per_second)}{delay}"


def human_bits(per_second: float) -> str:
    """A link's speed in words: ``"1 Gbit/s"``."""
    units = {"Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3}
    unit = next((unit for unit, factor in units.items() if per_second >= 0.9995 * factor), "kbit/s")
    return f"{per_second / units[unit]:.3g} {unit}"


@dataclass(frozen=True)
class Box:
    """What a program on a host knows of the machine that all hosts are in.

    Attributes:
        links: one for each host.
        cores: of all hosts together; a host has its own only while there are enough.
    """

    links: tuple[Link, ...]
    cores: int

    @classmethod
    def of_this_job(cls) -> Box | None:
        """Where this process runs, if that is a host in a box."""
        if VARIABLE not in os.environ:
            return None
        told = json.loads(os.environ[VARIABLE])
        return cls(tuple(Link(**link) for link in told["links"]), told["cores"])

    @property
    def seconds_per_byte(self) -> float:
        """Of the slowest link, which a ring waits for."""
        return 1 / min(link.bytes_per_second for link in self.links)

    def relink(self, speed: str) -> Box:
        """Give the host that this process runs on another link; what the box is if all hosts do.

        Args:
            speed: as :meth:`Link.parse` reads it; the delay stays.

        Raises:
            ValueError: the speed cannot be read.
            OSError: the host is gone.
            RuntimeError: the kernel refused; the message says what.
        """
        links = tuple(Link.parse(speed, link.delay) for link in self.links)
        namespaces.change_link(links[0].bits_per_second)
        box = Box(links, self.cores)
        os.environ |= box.as_environment()
        return box

    def as_environment(self) -> dict[str, str]:
        """What :meth:`of_this_job` reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    def __str__(self) -> str:
        speeds = " or ".join(dict.fromkeys(map(str, self.links)))
        return f"{len(self.links)} hosts in a box with links of {speeds}"
