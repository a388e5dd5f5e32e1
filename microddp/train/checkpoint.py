"""Checkpoints: what training needs to go on as if it had never stopped, in one file.

Rank 0 alone writes and reads it; the others get its bytes as a message, so that all ranks go on
from the same state, also where they share no disk.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from microddp.comms import Comms
from microddp.report import whole_file

NAME = "checkpoint.pt"


def save_checkpoint(state: Mapping[str, Any], folder: Path, comms: Comms) -> None:
    """Replace the checkpoint in a folder, which is made if need be. A collective.

    Whenever the process is killed, the old one or the new one is there as a whole.

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
            with whole_file(folder / NAME) as unfinished:
                torch.save(dict(state), unfinished)
        except (OSError, RuntimeError) as error:  # torch's, if the disk is full
            problem = str(error)
    comms.fail_together(problem, f"a checkpoint in {folder / NAME}")


def load_checkpoint(folder: Path, comms: Comms) -> dict[str, Any] | None:
    """The state in a folder's checkpoint, on every rank, in main memory. A collective.

    Returns:
        What was saved; ``None`` if there is no checkpoint.

    Raises:
        ValueError: on every rank, if rank 0 cannot read the file, or it is not whole.
    """
    path = folder / NAME
    expected = f"a whole checkpoint in {path}"
    data: bytes | None = None
    problem = ""
    if comms.rank == 0:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = str(error)
    comms.fail_together(problem, expected, ValueError)
    size = comms.all_gather_data(None if data is None else len(data))[0]
    if size is None:
        return None
    wire = torch.frombuffer(bytearray(data or bytes(size + 1)), dtype=torch.uint8)[:size]
    wire = wire.to(comms.device)
    comms.broadcast(wire)
    state: dict[str, Any] = {}
    try:
        state = _read(wire.cpu().numpy().tobytes())
    except Exception as error:  # of many types, by where the damage is
        problem = f"{size} bytes that cannot be read: {str(error).splitlines()[0]}"
    comms.fail_together(problem, expected, ValueError)
    return state


def gather_states(state: Mapping[str, Any], comms: Comms) -> list[torch.Tensor] | None:
    """The states of all ranks, which differ, for rank 0 to save. A collective.

    Returns:
        On rank 0 their bytes, in rank order; elsewhere ``None``.
    """
    file = io.BytesIO()
    torch.save(dict(state), file)
    mine = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(comms.device)
    sizes = comms.all_gather_data(len(mine))
    everyone = comms.gather(mine)
    return (
        None if everyone is None else [part.clone() for part in torch.split(everyone.cpu(), sizes)]
    )


def own_state(states: Sequence[torch.Tensor], comms: Comms) -> dict[str, Any]:
    """This rank's of the states that :func:`gather_states` brought together.

    Raises:
        ValueError: they are of another number of ranks.
    """
    if len(states) != comms.world_size:
        raise ValueError(
            f"rank {comms.rank}: expected a checkpoint of {comms.world_size} ranks, since each "
            f"has an optimizer of its own, got one of {len(states)}"
        )
    return _load(states[comms.rank].numpy().tobytes())


def _read(data: bytes) -> dict[str, Any]:
    # torch.load does not compare checksums.
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} is damaged")
    return _load(data)


def _load(data: bytes) -> dict[str, Any]:
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"expected a dictionary, got a {type(state).__name__}")
    return state
