"""Links of hosts in a box: as they are asked for, and as the ranks of a job are told of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from microddp.comms import Comms
from microddp.comms.machine import LINKS_VARIABLE
from microddp.hosts import namespaces

VARIABLE = "MICRODDP_BOX"  # set for all that runs on a host in a box
FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Link:
    """A host's connection to the switch, equally fast in both directions.

    Attributes:
        bits_per_second: speed, with frames and their headers counted.
        delay: seconds by which the host sends later.
    """

    bits_per_second: float
    delay: float = 0.0

    @classmethod
    def parse(cls, rate: str, delay: float = 0.0) -> Link:
        """Read ``"1gbit"``, ``"100mbit"`` or ``"2.5gbit+5ms"``; a gbit is 1e9 bits a second.

        Args:
            rate: the speed, and after a plus the delay.
            delay: seconds of delay where ``rate`` has none.

        Raises:
            ValueError: the text has another form, or a token bucket cannot do it.
        """
        number = r"(\d+(?:\.\d+)?)"
        match = re.fullmatch(rf"{number}([kmg])bit(?:\+{number}ms)?", rate.strip().lower())
        if not match or not 1e5 <= float(match[1]) * FACTORS[match[2]] <= 34e9:
            raise ValueError(
                "expected a link's speed from 100kbit to 34gbit, as 100mbit or 1gbit+5ms, "
                f"got {rate!r}"
            )
        delay = float(match[3]) / 1e3 if match[3] else delay
        if not 0 <= delay < 10:
            raise ValueError(f"expected a delay from 0 to 10 seconds, got {delay:g}")
        return cls(float(match[1]) * FACTORS[match[2]], delay)

    @property
    def option(self) -> str:
        """The text that :meth:`parse` reads."""
        letter = next(k for k in "gmk" if self.bits_per_second >= FACTORS[k])
        delay = f"+{self.delay * 1e3:.12g}ms" if self.delay else ""
        return f"{self.bits_per_second / FACTORS[letter]:.12g}{letter}bit{delay}"

    @property
    def bytes_per_second(self) -> float:
        """The speed, in bytes a second."""
        return self.bits_per_second / 8

    def __str__(self) -> str:
        delay = f" and {self.delay * 1e3:g} ms of delay" if self.delay else ""
        return f"{human_bits(self.bits_per_second)}{delay}"


def human_bits(per_second: float) -> str:
    """Put bits a second into words: ``"1 Gbit/s"``."""
    units = {"Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3}
    unit = next((unit for unit, factor in units.items() if per_second >= 0.9995 * factor), "kbit/s")
    return f"{per_second / units[unit]:.3g} {unit}"


@dataclass(frozen=True)
class Uplink:
    """A link between two switches, which the hosts behind the second one share.

    Attributes:
        hosts: numbers of these hosts, from 0, in ascending order.
        link: speed in each direction; its delay is added to the hosts' own.
    """

    hosts: tuple[int, ...]
    link: Link

    @classmethod
    def parse(cls, text: str) -> Uplink:
        """Read ``"2,3=1gbit"``: the hosts, and what :meth:`Link.parse` reads.

        Raises:
            ValueError: the text is of another form.
        """
        hosts, _, link = text.partition("=")
        if not re.fullmatch(r"\d+(,\d+)*", hosts):
            raise ValueError(f"expected an uplink as 2,3=1gbit, got {text!r}")
        return cls(tuple(sorted(map(int, hosts.split(",")))), Link.parse(link))

    def __str__(self) -> str:
        name = "hosts" if len(self.hosts) > 1 else "host"
        return f"{name} {', '.join(map(str, self.hosts))} behind an uplink of {self.link}"


@dataclass(frozen=True)
class Box:
    """The hosts in a box and their links, as a program on a host knows them.

    Attributes:
        links: links to the switch, one for each host.
        cores: number of cores of all hosts together; while there are enough, each has its own.
        uplinks: uplinks of the hosts that are not at the first switch.

    Raises:
        ValueError: an uplink names a host that does not exist, or that has another uplink.
    """

    links: tuple[Link, ...]
    cores: int
    uplinks: tuple[Uplink, ...] = ()

    def __post_init__(self) -> None:
        hosts = [host for uplink in self.uplinks for host in uplink.hosts]
        self.check(*hosts)
        if len(set(hosts)) < len(hosts):
            raise ValueError(f"expected at most one uplink for each host, got them of {hosts}")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds for a byte on the slowest link or uplink, which a ring waits for."""
        uplinks = (uplink.link for uplink in self.uplinks)
        return 1 / min(link.bytes_per_second for link in (*self.links, *uplinks))

    def bits_per_second(self, source: int, target: int) -> float:
        """Return the speed from one host to another while nobody else sends: the slowest link's."""
        crossed = (
            uplink.link
            for uplink in self.uplinks
            if (source in uplink.hosts) != (target in uplink.hosts)
        )
        links = self.links[source], self.links[target], *crossed
        return min(link.bits_per_second for link in links)

    def relink(self, speed: str, host: int | None = None, uplink: Sequence[int] = ()) -> Box:
        """Return the box with other links. Nothing changes before :meth:`set_up`.

        Args:
            speed: new speed, as :meth:`Link.parse` reads it. Without a delay the old one stays.
            host: host whose link changes; ``None``: all links do, and uplinks go.
            uplink: hosts that get an uplink of this speed instead. Their own links stay.

        Raises:
            ValueError: the speed cannot be read, there is no such host, or both are given.
        """
        if uplink and host is not None:
            raise ValueError(f"expected a host or an uplink, got {host} and {list(uplink)}")
        if uplink:
            hosts = tuple(sorted(uplink))
            others = {each.hosts: each for each in self.uplinks}
            old = others.pop(hosts, None)
            new = Uplink(hosts, Link.parse(speed, old.link.delay if old else 0.0))
            return replace(self, uplinks=(*others.values(), new))
        if host is not None:
            self.check(host)
        links = tuple(
            Link.parse(speed, link.delay) if host in (None, number) else link
            for number, link in enumerate(self.links)
        )
        return replace(self, links=links, uplinks=() if host is None else self.uplinks)

    def set_up(self) -> None:
        """Give the hosts these links and uplinks, from a process on any of them.

        Messages in the queues of links that change are lost, and TCP sends them again.

        Raises:
            OSError: this process is on no such host.
            RuntimeError: the kernel refused; the message says what. Some may have changed.
        """
        told = asdict(self)
        namespaces.ask("set_links", told["links"], told["uplinks"])

    def cut(self, host: int) -> None:
        """Take a host's link down, from a process on any host, until :meth:`mend`.

        Messages to and from it are lost. TCP sends them again, after ever longer waits: after a cut
        of t seconds they arrive within about t seconds of the mending, or within one if t is less
        (Linux 6.18).

        Raises:
            ValueError: there is no such host.
            OSError: this process is on no host in a box.
        """
        self.check(host)
        namespaces.ask("cut", host)

    def mend(self, host: int) -> None:
        """Bring a host's link up again. Errors are those of :meth:`cut`."""
        self.check(host)
        namespaces.ask("mend", host)

    def as_environment(self) -> dict[str, str]:
        """Return the variables by which ``microddp.comms`` knows these links in a job's ranks."""
        return {VARIABLE: json.dumps(asdict(self)), LINKS_VARIABLE: __name__}

    def check(self, *hosts: int) -> None:
        """Raise ``ValueError`` if there is no such host."""
        if not set(hosts) <= set(range(len(self.links))):
            raise ValueError(f"expected hosts from 0 to {len(self.links) - 1}, got {list(hosts)}")

    def __str__(self) -> str:
        speeds = " or ".join(dict.fromkeys(map(str, self.links)))
        uplinks = "".join(f", {uplink}" for uplink in self.uplinks)
        return f"{len(self.links)} hosts in a box with links of {speeds}{uplinks}"


def links_of_this_job() -> Box | None:
    """Return the box that this process runs in; ``None`` if it is on no host in a box."""
    if VARIABLE not in os.environ:
        return None
    told = json.loads(os.environ[VARIABLE])
    uplinks = (Uplink(tuple(each["hosts"]), Link(**each["link"])) for each in told["uplinks"])
    return Box(tuple(Link(**link) for link in told["links"]), told["cores"], tuple(uplinks))


def relink(comms: Comms, speed: str, host: int | None = None, uplink: Sequence[int] = ()) -> None:
    """Give the hosts that these ranks run on other links. A collective.

    Messages of other groups that are under way are lost. TCP sends them again, after 0.2 s or more.
    Connections that were made on a slow link may stay below the speed of a fast one: begin on the
    fastest.

    Args:
        comms: the ranks; their ``box`` becomes the new one.
        speed, host, uplink: as for :meth:`Box.relink`.

    Raises:
        RuntimeError: on every rank, if one of them is on no host in a box, the kernel refuses, or
            the speed cannot be read.

    Example:
        >>> relink(comms, "100mbit", host=2)
        >>> relink(comms, "1gbit", uplink=[2, 3])
    """
    problem, box = "", comms.box
    comms.barrier()  # so that what was called before is through
    try:
        if not isinstance(box, Box):
            raise RuntimeError("the machine's own links")
        box = box.relink(speed, host, uplink)
        if comms.rank == 0:
            box.set_up()
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    comms.fail_together(problem, f"hosts in a box, and links of {speed}")
    assert isinstance(box, Box)
    comms.box = box
    os.environ.update(box.as_environment())
