"""POSIX semaphores in shared memory: how ranks of one machine wait for each other.

They are called in the C library, since Python's own can be shared with children only. What a rank
has written before ``post`` is there for a rank that reads after ``wait``, on machines with weak
memory order as well: POSIX lists ``sem_post``, ``sem_wait``, ``sem_trywait`` and ``sem_timedwait``
among the functions that synchronize memory (Base Definitions, 4.15), and the C library makes them
of atomic operations with release and acquire order. No other memory of ours is read by one rank
while another may write to it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from collections.abc import Callable

SEMAPHORE_BYTES = 64  # a cache line; a sem_t has 32 with glibc and musl on 64-bit machines


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _function(name: str, *types: type) -> Callable[..., int]:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = types
    return function  # type: ignore[no-any-return]


if sys.platform == "linux":
    # By address. A call lets other threads of Python run.
    _init = _function("sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    post = _function("sem_post", ctypes.c_void_p)
    _try = _function("sem_trywait", ctypes.c_void_p)
    _timed = _function("sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))


def make(address: int) -> None:
    """Make a semaphore of value 0 at an address that processes share."""
    if _init(address, 1, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "sem_init")


def wait(address: int, tries: int, seconds: float) -> bool:
    """Take one from a semaphore, as soon as there is one.

    Args:
        address: of the semaphore.
        tries: how often to look before the thread sleeps. Who is woken up runs again after some
            10 us, and a core that looks has nothing else to do.
        seconds: to sleep at most.

    Returns:
        Whether there was one in time.
    """
    for _ in range(tries):
        if not _try(address):
            return True
    now = time.time() + seconds
    until = _Timespec(int(now), int(now % 1 * 1e9))
    while _timed(address, until):
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True
