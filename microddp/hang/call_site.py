"""The line of the user's program that made a call."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterable
from enum import Enum
from types import CodeType, FrameType

import torch

MICRODDP = os.path.dirname(os.path.dirname(__file__)) + os.sep
BELOW = (os.path.dirname(__file__) + os.sep, os.path.join(MICRODDP, "comms", ""))
TORCH = os.path.dirname(torch.__file__) + os.sep
PYTHON = sysconfig.get_path("stdlib") + os.sep


class Origin(Enum):
    """The program that a source file belongs to."""

    USER = "the user's program, or a package that it uses"
    MICRODDP = "microddp, but for microddp.comms and microddp.hang"
    LIBRARY = "Python, PyTorch, microddp.comms or microddp.hang"


_located: dict[str, tuple[Origin, str]] = {}  # results of locate(), by file
_not_users: set[str] = set()  # the files among them that are not the user's
_lines: dict[int, str] = {}  # "train.py:88", by the address of the instruction in memory
_codes: list[CodeType] = []  # keeps the code of these addresses alive


def call_site(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost of these lines that is the user's, as ``"train.py:88"``.

    They are files and numbers, the innermost first. Without one, as in ``microddp.train`` or in a
    thread of autograd's, return the innermost line of microddp outside of ``microddp.comms``;
    without that, an empty text.
    """
    fallback = ""
    for file, line in frames:
        origin, shown = locate(file)
        if origin is Origin.USER:
            return f"{shown}:{line}"
        if origin is Origin.MICRODDP and not fallback:
            fallback = f"{shown}:{line}"
    return fallback


def locate(file: str) -> tuple[Origin, str]:
    """Return the program that a file belongs to, and the file's path from the current directory."""
    if file in _located:
        return _located[file]
    origin = Origin.MICRODDP if file.startswith(MICRODDP) else Origin.USER
    in_python = file.startswith(PYTHON) and "-packages" not in file  # site-packages may be inside
    if in_python or file.startswith((*BELOW, TORCH, "<frozen ")):
        origin = Origin.LIBRARY
    shown = file
    if os.path.isabs(file):
        with contextlib.suppress(OSError):  # the current directory may be gone
            shown = os.path.relpath(file)
    if origin is not Origin.USER:
        _not_users.add(file)
    _located[file] = origin, file if shown.startswith("..") else shown
    return _located[file]


def current_call_site() -> str:
    """Return the :func:`call_site` of the frames that this is called from.

    Every recorded call pays for this: a line is put into words once, and found by the address of
    its instruction after that.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in _not_users:
            line = _lines.get(id(code) + frame.f_lasti)
            if line is not None:
                return line
            if locate(code.co_filename)[0] is Origin.USER:
                return _put_into_words(frame)
        frame = frame.f_back
    frame = sys._getframe(2)
    while frame is not None:
        if _located[frame.f_code.co_filename][0] is Origin.MICRODDP:
            return _lines.get(id(frame.f_code) + frame.f_lasti) or _put_into_words(frame)
        frame = frame.f_back
    return ""


def _put_into_words(frame: FrameType) -> str:
    _codes.append(frame.f_code)
    line = f"{locate(frame.f_code.co_filename)[1]}:{frame.f_lineno}"
    _lines[id(frame.f_code) + frame.f_lasti] = line
    return line
