"""Files of results, which are there as a whole or not at all, and options that name them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PICTURES = (".jpg", ".pdf", ".png", ".svg")  # of those that matplotlib can write


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A place to write a file that appears at ``path`` whole or not at all, whoever dies when.

    Its folder is made if need be. What the block writes to the place that it is given takes the
    name ``path`` when the block is over and the bytes are on the disk. If the block raises, nothing
    is left of it; if it is killed, the next one writes over what is left.
    """
    path = Path(path).resolve()  # what a link points to, not the link
    if path.exists() and not path.is_file():
        raise OSError(f"expected a file to write, got {path}")  # a device would be replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")  # beside it: only there can it be renamed
    try:
        yield unfinished
        _to_disk(unfinished)
        os.replace(unfinished, path)
        _to_disk(path.parent)  # the new name, too
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_result(path: Path, run: str, **content: object) -> None:
    """Write what came of a command as JSON, with null for numbers that are not finite.

    Args:
        path: the file.
        run: what the run was, as ``Comms.describe()`` says it.
        content: what else there is to say, by name.
    """
    result = {"run": run, "command": sys.argv[1:], **content}
    with whole_file(path) as unfinished:
        # Python's JSON has Infinity and NaN, which other readers refuse.
        values = json.loads(json.dumps(result, default=str), parse_constant=lambda _: None)
        unfinished.write_text(json.dumps(values, indent=2) + "\n")


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def output_file(text: str) -> Path:
    """An option that names a file to write: refused now, and not when all is measured."""
    path = Path(text)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text}")
    if not os.access(path.resolve().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a folder to write to, got that of {text}")
    return path


def picture_file(text: str) -> Path:
    """An option that names a picture to draw: refused now, as by :func:`output_file`."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected one of *{', *'.join(PICTURES)}, got {text}")
    return output_file(text)


def positive(kind: type[Any]) -> Callable[[str], Any]:
    """An option that is a number above 0, of the given type."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
        return value

    parse.__name__ = "positive number"  # argparse names it in its messages
    return parse
