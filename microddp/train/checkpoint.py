"""Checkpoints: what training needs to go on as if it had never stopped, in one file.

Rank 0 alone writes and reads it; the others get its bytes as a message, so that all ranks go on
from the same state, also where they share no disk.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from microddp.comms import Comms

NAME = "checkpoint.pt"


def save_checkpoint(state: Mapping[str, Any], folder: Path, comms: Comms) -> None:
    """Replace the checkpoint in a folder, which is made if need be. A collective.

    The new one is written beside the old one and takes its place when it is on the disk: whenever
    the process is killed, one of the two is there as a whole.

    Args:
        state: on rank 0, tensors, numbers and texts in dictionaries and lists.
        folder: on rank 0's machine.
        comms: the ranks; they return when the file is there.

    Raises:
        RuntimeError: on every rank, if rank 0 cannot write.
    """
    problem = ""
    if comms.rank == 0:
        try:
            _write(dict(state), folder)
        except (OSError, RuntimeError) as error:  # torch's, if the disk is full
            problem = str(error)
    problem, *_ = comms.all_gather_data(problem)
    if problem:
        raise RuntimeError(
            f"rank {comms.rank}: expected rank 0 to write {folder / NAME}, got: {problem}"
        )


def _write(state: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{NAME}.part"
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / NAME)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too
    finally:
        os.close(directory)


def load_checkpoint(folder: Path, comms: Comms) -> dict[str, Any] | None:
    """The state in a folder's checkpoint, on every rank, in main memory. A collective.

    Returns:
        What was saved; ``None`` if there is no checkpoint.

    Raises:
        ValueError: on every rank, if rank 0 cannot read the file, or it is not whole.
    """
    path = folder / NAME
    data, problem = b"", ""
    if comms.rank == 0:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            problem = "none"
        except OSError as error:
            problem = str(error)
    (size, problem), *_ = comms.all_gather_data((len(data), problem))
    if problem == "none":
        return None
    if not problem:
        wire = torch.frombuffer(bytearray(data or bytes(size + 1)), dtype=torch.uint8)[:size]
        wire = wire.to(comms.device)
        comms.broadcast(wire)
        try:
            return _read(wire.cpu().numpy().tobytes())
        except Exception as error:  # of many types, by where the damage is
            problem = f"{size} bytes that cannot be read: {str(error).splitlines()[0]}"
    raise ValueError(f"rank {comms.rank}: expected a whole checkpoint in {path}, got: {problem}")


def _read(data: bytes) -> dict[str, Any]:
    # torch.load does not compare checksums.
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} is damaged")
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"expected a dictionary, got a {type(state).__name__}")
    return state
