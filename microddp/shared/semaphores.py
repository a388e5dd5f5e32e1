"""POSIX semaphores in shared memory: how ranks of one machine wait for each other.

They are those of the C library, since Python's can be shared with children only. What a rank has
written before ``post`` is visible to a rank that reads after ``wait``, on machines with weak memory
order, too: POSIX lists ``sem_post``, ``sem_wait``, ``sem_trywait`` and ``sem_timedwait``
among the functions that synchronize memory (Base Definitions, 4.15), and the C library implements
them by atomic operations with release and acquire order. No rank reads any other shared memory
while another rank may write to it.
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
    # They take an address. ctypes releases the GIL during a call.
    _init = _function("sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    post = _function("sem_post", ctypes.c_void_p)
    _try = _function("sem_trywait", ctypes.c_void_p)
    _timed = _function("sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))


def make(address: int) -> None:
    """Make a semaphore of value 0 in memory that processes share.

    Args:
        address: where, in this process.
    """
    if _init(address, 1, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "sem_init")


def wait(address: int, tries: int, seconds: float) -> bool:
    """Wait until a semaphore is positive, and decrement it.

    Args:
        address: the semaphore's address.
        tries: how often to look before the thread sleeps. A thread that is woken up runs again only
            after some 10 us.
        seconds: how long to sleep at most.

    Returns:
        Whether it was decremented in time.
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
