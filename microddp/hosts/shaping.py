"""Shaping of a network device: a token bucket, through which it sends at a given speed."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyroute2 import IPRoute

MTU = 9000  # bytes; clusters use such frames, and their headers take 0.7 % of the link
# Bytes. All messages under way to one host must find room, or are sent twice.
QUEUE = 1 << 26
HANDLES = itertools.count(0x10000, 0x10000)  # names of queues: another one for each


class Refused(Exception):
    """The machine cannot do this; the message says why, and what helps."""


def shape(network: IPRoute, index: int, bits_per_second: float, delay: float = 0.0) -> None:
    """Set a device up to send so many bits a second, each delayed by so many seconds.

    A bucket takes the place of an older one. If that were only changed, a piece that waits in it
    and is larger than the new burst would wait for ever, and all behind it.
    """
    largest = _largest(bits_per_second)
    network.link("set", index=index, gso_max_size=largest)
    bucket = next(HANDLES)
    rate = {"rate": round(bits_per_second / 8), "burst": _burst(bits_per_second), "limit": QUEUE}
    with _known("tbf, the token bucket, so links have no speed"):
        network.tc("replace", "tbf", index, handle=bucket, **rate)
    if delay:
        later = {"delay": round(delay * 1e6), "limit": 10**6}  # us, packets
        with _known("netem, so links have no delay (`--delay`)"):
            network.tc("add", "netem", index, handle=next(HANDLES), parent=bucket, **later)


@contextlib.contextmanager
def _known(kind: str) -> Iterator[None]:
    """Raise :class:`Refused` if this kernel does not have this kind of queue."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise
        raise Refused(f"this kernel has no {kind}") from error


def _largest(bits_per_second: float) -> int:
    """Return the bytes that the kernel may hand to the device as one piece.

    Each piece costs the cores time. Measured at 1 Gbit/s, 4 hosts on 2 cores: with pieces of 16 KiB
    the cores are what limits.
    """
    return min(1 << 16, max(MTU, round(bits_per_second / 8 * 520e-6)))


def _burst(bits_per_second: float) -> int:
    """Return the bytes that a full token bucket lets through at once.

    As few as possible, since a message of that size is not held back at all; but a piece must fit
    in with its headers, and what the link carries in the time by which the kernel's timers may be
    late: with 130 us, 1 Gbit/s lost 10 %.
    """
    return max(2 * MTU, _largest(bits_per_second) + 4096, round(bits_per_second / 8 * 260e-6))
