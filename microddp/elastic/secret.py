"""The secret by which the members of a job recognise each other."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

LEAST_CHARACTERS = 16  # if they are random, nobody tries all


def find_secret() -> bytes:
    """Return ``MICRODDP_SECRET``, or the secret in the file :func:`home`.

    Only this user can read the file. It is made if it is not there, so that members of one user on
    one machine need not agree on anything.

    Raises:
        ValueError: the secret is too short, the file cannot be made or read, or others can read it.
    """
    if (text := os.environ.get("MICRODDP_SECRET")) is not None:
        text = text.strip()
        if len(text) < LEAST_CHARACTERS:
            raise ValueError(
                f"expected MICRODDP_SECRET to have {LEAST_CHARACTERS} characters or more, got "
                f"{len(text)}: python -c 'import secrets; print(secrets.token_hex(32))' makes one"
            )
        return text.encode()
    try:
        path = home()
        with suppress(FileExistsError):
            _make(path)
        return _read(path)
    except (OSError, RuntimeError) as error:  # the latter: this user has no home
        raise ValueError(
            f"expected MICRODDP_SECRET, or a file for a secret in this user's home, got: {error}"
        ) from error


def home() -> Path:
    """Return the path of ``~/.config/microddp/secret``, or of that below ``XDG_CONFIG_HOME``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "microddp", "secret")


def _make(path: Path) -> None:
    """Write a new secret atomically, and never over one that is there."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)  # which only this user can read
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
        os.link(name, path)  # fails if another process was first
    finally:
        os.unlink(name)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.getuid() or mode & 0o077:
            raise PermissionError(
                f"{path} is to be readable by user {os.getuid()} only, it is user "
                f"{status.st_uid}'s with mode {mode:03o}: chmod 600 it if nobody has read it, else "
                "remove it"
            )
        secret = file.read().strip()
    if len(secret) < LEAST_CHARACTERS:
        raise OSError(f"{path} has {len(secret)} bytes, and is to have {LEAST_CHARACTERS}")
    return secret
