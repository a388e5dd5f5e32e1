"""Forks that cost less: memory in pages of 2 MiB, of which a fork copies one entry each.

A process that has PyTorch imported has some 80,000 pages of 4 KiB of its own. To copy the entries
of all of them, and to give them back, was two thirds of forking and ending a process that does
nothing.
"""

import ctypes
import sys
from pathlib import Path

SIZE = 2 << 20
HUGE, COLLAPSE = 14, 25  # madvise's numbers, of which mmap does not have the second


def collapse() -> None:
    """Have this process's own memory in huge pages, as far as the kernel can: Linux from 6.1."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, _, _, file, *name = line.split()
        begin, end = (int(address, 16) for address in where.split("-"))
        if rights == "rw-p" and file == "0" and name in ([], ["[heap]"]) and end - begin >= SIZE:
            for advice in (HUGE, COLLAPSE):
                madvise(begin, end - begin, advice)
