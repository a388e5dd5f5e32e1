"""Digests of what examples depend on: files, versions, the machine."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sphinx.errors import ConfigError
from sphinx_gallery.utils import get_md5sum


def digest_of_surroundings(confdir: Path, depends: Sequence[str], variables: Sequence[str]) -> str:
    """Digest what all examples depend on: files, variables, libraries, Python and the machine.

    Raises `ConfigError` if a glob matches no file.
    """
    machine = (version("torch"), _draws_with(), platform.python_version(), os.cpu_count(), _gpus())
    values = [os.environ.get(name) for name in variables]
    text = f"{digest_of(confdir, depends)} {machine!r} {values!r}"
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_looks(confdir: Path, looks: Sequence[str], gallery_conf: Mapping[str, Any]) -> str:
    """Digest what makes page and notebook of what an example gave: files, and the gallery.

    Raises `ConfigError` if a glob matches no file.
    """
    cells = [gallery_conf[f"{which}_notebook_cell"] for which in ("first", "last")]
    text = f"{digest_of(confdir, looks)} {version('sphinx-gallery')} {cells!r}"
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(folder: Path, patterns: Sequence[str]) -> str:
    """Digest the files below a folder that match globs, with their names.

    Raises `ConfigError` if a glob matches no file.
    """
    found: list[Path] = []
    for pattern in patterns:
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not files:
            raise ConfigError(f"{folder}: no file matches {pattern!r}")
        found += files
    return digest_of_files(found, folder)


def digest_of_files(files: Iterable[Path], folder: Path) -> str:
    """Digest files below a folder, with their names."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)} {_digest_of_file(path)}\n".encode())
    return digest.hexdigest()


@cache  # as at the first look: jobs may have imported it then, and run that
def _digest_of_file(path: Path) -> str:
    return str(get_md5sum(path))


def _draws_with() -> str:
    with suppress(PackageNotFoundError):
        return version("matplotlib")
    return ""


def _gpus() -> str:
    """Name the GPUs without PyTorch, which would take seconds and a context on a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout
