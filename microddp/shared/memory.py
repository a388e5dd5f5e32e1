"""Memory of one process that others of the same machine can map, and how they prove that they do.

It is a file without a name (``memfd_create``): nothing is in ``/dev/shm``, so nothing is left there
whatever is killed, and its size, 64 MB in a container, is no limit. Others open it by way of
``/proc``, and only if it has the random name that its owner has told them. So a process of another
machine or container is never taken for one of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import sys
import tempfile
import weakref
from typing import Any, Self

import torch


class Memory:
    """A rank's memory as this process has it mapped: its own, or another rank's.

    The first part is mapped at once. What else there is begins at ``first`` bytes; each part is
    mapped when it is wanted, and takes memory page by page as it is written to.

    Attributes:
        first: the first part.
        told: what others need to open it.
        places: of the parts of one's own memory that are in use, by their address.
    """

    def __init__(self, file: int, living: int, told: list[Any], first: int) -> None:
        self._file, self._living, self.told = file, living, told
        self.first = mmap.mmap(file, first)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.first))
        self.places: dict[int, int] = {}
        self._end = first
        weakref.finalize(self, _close, file, living)

    @classmethod
    def create(cls, first: int) -> Self:
        """Make memory of this process.

        Args:
            first: bytes of the first part, whole pages.

        Raises:
            OSError: the machine has or allows no such memory.
        """
        if sys.platform != "linux":
            raise OSError(f"memory without a name is Linux's, this is {sys.platform}")
        name = f"microddp-{secrets.token_hex(16)}"
        file, living = os.memfd_create(name), os.memfd_create(name)
        os.ftruncate(file, first)
        # Held while this process lives, whatever ends it, and not by its children. Closing any
        # other descriptor of the same file would end it, as letting go of a map does: so a file
        # of its own.
        fcntl.lockf(living, fcntl.LOCK_EX, 1)
        return cls(file, living, [os.getpid(), file, living, name], first)

    @classmethod
    def alone(cls, first: int) -> Self:
        """Make memory of a process that shares it with nobody, where the machine has no other."""
        with tempfile.TemporaryFile() as file:
            file.truncate(first)
            return cls(os.dup(file.fileno()), os.dup(file.fileno()), [os.getpid()], first)

    @classmethod
    def open(cls, told: list[Any], first: int) -> Self | None:
        """Map another process's memory; ``None`` if it is not of this machine, or not to be had."""
        process, *numbers, name = told
        paths = [f"/proc/{process}/fd/{number}" for number in numbers]
        with contextlib.suppress(OSError):
            # First its name: it may be a number of something else, in another namespace.
            if all(os.readlink(path) == f"/memfd:{name} (deleted)" for path in paths):
                file, living = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths)
                return cls(file, living, told, first)
        return None

    def owner_lives(self) -> bool:
        """Whether the process whose memory this is has not ended. Not to be asked of one's own."""
        try:
            fcntl.lockf(self._living, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
        except OSError:
            return True
        fcntl.lockf(self._living, fcntl.LOCK_UN, 1)
        return False

    def disown(self) -> None:
        """Let others take this process, whose memory it is, for one that has ended."""
        fcntl.lockf(self._living, fcntl.LOCK_UN, 1)

    def part(self, place: int, nbytes: int) -> torch.Tensor:
        """A part, as bytes, that begins at a whole page."""
        return torch.frombuffer(mmap.mmap(self._file, nbytes, offset=place), dtype=torch.uint8)

    def grow(self, nbytes: int) -> torch.Tensor:
        """A new part of one's own memory, as bytes, all zero.

        When the last tensor in it goes, its memory is given back to the machine.
        """
        place, self._end = self._end, self._end + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, self._end)
        mapped = mmap.mmap(self._file, nbytes, offset=place)
        part = torch.frombuffer(mapped, dtype=torch.uint8)
        self.places[part.data_ptr()] = place
        weakref.finalize(mapped, self._shrink, part.data_ptr(), nbytes)
        return part

    def _shrink(self, address: int, nbytes: int) -> None:
        """Give the memory of a part back, for all who have it mapped."""
        place = self.places.pop(address)
        if os.getpid() != self.told[0]:
            return  # a child of the owner's lets go of its copy
        if sys.platform != "linux":
            return  # which alone can do so before the end of the file
        keep_size, punch_hole = 1, 2
        libc = ctypes.CDLL(None)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        libc.fallocate(self._file, keep_size | punch_hole, place, nbytes)


def memory_refused() -> str:
    """Why processes of this machine cannot share such memory; empty if they can."""
    try:
        Memory.create(mmap.PAGESIZE)
    except OSError as error:
        return f"processes cannot share memory here: {error}"
    return ""


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
