"""Where in the user's program a call was made."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FrameType

import torch

MICRODDP = os.path.dirname(os.path.dirname(__file__)) + os.sep
BELOW = (os.path.dirname(__file__) + os.sep, os.path.join(MICRODDP, "comms", ""))
TORCH = os.path.dirname(torch.__file__) + os.sep
PYTHON = sysconfig.get_path("stdlib") + os.sep

_located: dict[str, tuple[int, str]] = {}  # what locate() said, by file


def place(frames: Iterable[tuple[str, int]]) -> str:
    """The place in the user's program, as ``"train.py:88"``.

    It is the innermost line outside of microddp, PyTorch and Python's own modules. Where there is
    none, as in a thread of autograd's or in ``microddp.train``, it is the innermost one of microddp
    outside of ``microddp.comms``, and without that one, empty.

    Args:
        frames: file and line of each, the innermost first.
    """
    fallback = ""
    for file, line in frames:
        near, shown = _located.get(file) or locate(file)
        if near == 2:
            return f"{shown}:{line}"
        if near == 1 and not fallback:
            fallback = f"{shown}:{line}"
    return fallback


def locate(file: str) -> tuple[int, str]:
    """How near a file is to the user's program, and its name from the current directory.

    Near is 2: the program's or a package of others, 1: microddp's, 0: what these stand on.
    """
    near = 1 if file.startswith(MICRODDP) else 2
    ours = file.startswith(PYTHON) and "-packages" not in file  # site-packages may be inside
    if ours or file.startswith((*BELOW, TORCH, "<frozen ")):
        near = 0
    here = file
    if os.path.isabs(file):
        with contextlib.suppress(OSError):  # there may be no current directory any more
            here = os.path.relpath(file)
    _located[file] = near, file if here.startswith("..") else here
    return _located[file]


def frames_here() -> Iterator[tuple[str, int]]:
    """File and line of the frames that this is called from, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
