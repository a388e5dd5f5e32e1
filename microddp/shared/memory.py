"""Memory of one process that others of the same machine can map, and a proof that it is the same.

It is a file without a name (``memfd_create``): nothing is in ``/dev/shm``, so nothing is left there
whatever is killed, and the size of that folder, 64 MB in a container, is no limit. Others open it
through ``/proc``, and only if it has the random name that its owner has told them. So a process of
another machine or container is never taken for one of this.
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
    """The memory of a rank, mapped into this process: its own memory, or another rank's.

    The first part is mapped at once. All other parts come after it; each is mapped when it is
    needed, and takes memory page by page as it is written to.

    Attributes:
        first: the first part.
        handle: what other processes need to open the memory.
        offsets: of this process's own memory, the offset of each part in use, by its address.
    """

    def __init__(self, file: int, living: int, handle: list[Any], first: int) -> None:
        self._file, self._living, self.handle = file, living, handle
        self.first = mmap.mmap(file, first)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.first))
        self.offsets: dict[int, int] = {}
        self._end = first
        weakref.finalize(self, _close, file, living)

    @classmethod
    def create(cls, first: int) -> Self:
        """Make memory of this process.

        Args:
            first: bytes of the first part, whole pages.

        Raises:
            OSError: the machine has no such memory, or does not allow it.
        """
        if sys.platform != "linux":
            raise OSError(f"memory without a name is Linux's, this is {sys.platform}")
        name = f"microddp-{secrets.token_hex(16)}"
        with contextlib.ExitStack() as opened:  # closed again if anything raises
            file, living = (_until(opened, os.memfd_create(name)) for _ in range(2))
            os.ftruncate(file, first)
            # This lock is held while the process lives, whatever ends it, and not by its children.
            # Closing any other descriptor of the same file would release it, as unmapping does:
            # hence a second file.
            fcntl.lockf(living, fcntl.LOCK_EX, 1)
            memory = cls(file, living, [os.getpid(), file, living, name], first)
            opened.pop_all()
        return memory

    @classmethod
    def alone(cls, first: int) -> Self:
        """Make memory that nobody else can map, for a machine without ``memfd_create``."""
        with tempfile.TemporaryFile() as file:
            file.truncate(first)
            return cls(os.dup(file.fileno()), os.dup(file.fileno()), [os.getpid()], first)

    @classmethod
    def open(cls, handle: list[Any], first: int) -> Self | None:
        """Map another process's memory; ``None`` if that is on another machine, or has ended."""
        process, *numbers, name = handle
        paths = [f"/proc/{process}/fd/{number}" for number in numbers]
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            # The name first: in another namespace the numbers may be of something else.
            if all(os.readlink(path) == f"/memfd:{name} (deleted)" for path in paths):
                flags = os.O_RDWR | os.O_CLOEXEC
                file, living = (_until(opened, os.open(path, flags)) for path in paths)
                memory = cls(file, living, handle, first)
                opened.pop_all()
                return memory
        return None

    def owner_lives(self) -> bool:
        """Check whether the process that made this memory lives. Only for another process's."""
        try:
            fcntl.lockf(self._living, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
        except OSError:
            return True
        fcntl.lockf(self._living, fcntl.LOCK_UN, 1)
        return False

    def disown(self) -> None:
        """Let others see this process, which made the memory, as one that has ended."""
        fcntl.lockf(self._living, fcntl.LOCK_UN, 1)

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """Map a part, as bytes; ``offset`` is a multiple of the page size."""
        return torch.frombuffer(mmap.mmap(self._file, nbytes, offset=offset), dtype=torch.uint8)

    def grow(self, nbytes: int) -> torch.Tensor:
        """Add a part to this process's own memory: bytes, all zero.

        When the last tensor in it is freed, the memory goes back to the machine.
        """
        offset, self._end = self._end, self._end + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, self._end)
        mapped = mmap.mmap(self._file, nbytes, offset=offset)
        part = torch.frombuffer(mapped, dtype=torch.uint8)
        self.offsets[part.data_ptr()] = offset
        weakref.finalize(mapped, self._shrink, part.data_ptr(), nbytes)
        return part

    def _shrink(self, address: int, nbytes: int) -> None:
        """Free the memory of a part, in every process that has it mapped."""
        offset = self.offsets.pop(address)
        if os.getpid() != self.handle[0]:
            return  # a child of the owner frees its copy of the map
        if sys.platform != "linux":
            return  # only Linux can free memory before the end of a file
        keep_size, punch_hole = 1, 2
        libc = ctypes.CDLL(None)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        libc.fallocate(self._file, keep_size | punch_hole, offset, nbytes)


def memory_refused() -> str:
    """Say why processes of this machine cannot share memory; empty if they can."""
    try:
        Memory.create(mmap.PAGESIZE)
    except OSError as error:
        return f"processes cannot share memory here: {error}"
    return ""


def _until(end: contextlib.ExitStack, file: int) -> int:
    """Have a file closed at the end of a block."""
    end.callback(os.close, file)
    return file


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
