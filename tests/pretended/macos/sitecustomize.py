"""Pretend that this process, and what it starts, runs on macOS: a folder for ``PYTHONPATH``.

The project, and nothing else, is told that this is macOS, and finds nothing below ``/proc``,
``/sys`` and ``/dev/shm``. All miss what only Linux has: functions of ``os``, ``resource`` and
``socket``, and of the C library, and the package pyroute2. Else Python's own modules, PyTorch and
psutil run as they are.

What is not pretended: how macOS starts, schedules and signals processes, its files and sockets.
"""

import atexit
import builtins
import ctypes
import gc
import importlib
import io
import os
import resource
import socket
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

ROOT = f"{Path(__file__).resolve().parents[3]}{os.sep}"
TESTS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
PYTHON = sysconfig.get_path("stdlib") + os.sep
HIDDEN = ("/proc", "/sys", "/dev/shm")
MISSING = {
    os: ("memfd_create", "pidfd_open", "setns", "unshare", "eventfd", "posix_fadvise"),
    resource: ("prlimit",),
    socket: ("TCP_INFO",),
}
C_MISSING = ("prctl", "sem_timedwait", "unshare", "setns", "fallocate", "mount")


def of_the_project(file: str) -> bool:
    """Whether a file is the project's, or a copy of a chapter; no test's, and no package's."""
    if file.startswith(("<frozen", TESTS)) or "site-packages" in file:
        return False
    return file.startswith((ROOT, "<string>")) or Path(file).parent.name == "chapters"


def asked_by_the_project(depth: int) -> bool:
    """Whether the innermost frame that is none of Python's own is the project's."""
    frame = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith((PYTHON, "<frozen", __file__)) and "-packages" not in file
        if not own:
            return of_the_project(file)
        frame = frame.f_back
    return False


class PretendedSys(ModuleType):
    """``sys``, which says to the project that this is macOS."""

    # Not a property: Python 3.14 remembers a module's own value where it has asked for it once.
    def __getattribute__(self, name: str) -> object:
        if name == "platform" and of_the_project(sys._getframe(1).f_code.co_filename):
            return "darwin"
        return super().__getattribute__(name)


def is_hidden(path: object) -> bool:
    return isinstance(path, (str, os.PathLike)) and (
        f"{os.path.abspath(os.fspath(path))}/".startswith(tuple(f"{each}/" for each in HIDDEN))
    )


def hide_files(module: ModuleType, name: str) -> None:
    """Have a function that takes a path find nothing that is hidden."""
    real = getattr(module, name)

    def pretended(path: object = ".", *arguments: object, **options: object) -> object:
        if is_hidden(path) and asked_by_the_project(2):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *arguments, **options)

    setattr(module, name, pretended)


class PretendedLibrary(ctypes.CDLL):
    """A C library without the functions that are Linux's."""

    def __getattr__(self, name: str) -> object:
        if name in C_MISSING and asked_by_the_project(2):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


class NotInstalled:
    """Finds no module: those that are installed on Linux only."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "pyroute2":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def install() -> None:
    """Begin to pretend, for good."""
    sys.__class__ = PretendedSys
    importlib._bootstrap._new_module = ModuleType  # else every module is made of sys's type
    for name in [name for name in vars(os) if name.startswith(("sched_", "SCHED_"))]:
        delattr(os, name)
    for module, names in MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for module, name in (
        *((builtins, "open"), (io, "open")),
        *((os, each) for each in ("open", "listdir", "scandir", "stat", "lstat", "readlink")),
        *((os, each) for each in ("access", "statvfs")),
    ):
        hide_files(module, name)
    ctypes.CDLL = PretendedLibrary
    sys.meta_path.insert(0, NotInstalled())


install()
gc.set_threshold(100_000)  # as all Pythons of tests; see rare_collections
atexit.register(gc.freeze)
