"""Checkpoints: files from which training goes on as if it had never stopped.

Only rank 0 writes and reads them. It sends the bytes to the others, so that all ranks go on from
the same state, also where they share no disk. A file is written while training goes on, from a
copy of the state, and gets its name when it is whole. What is in it, and what ``--resume`` takes of
it, is in :mod:`microddp.train.loop`.
"""

from __future__ import annotations

import io
import math
import os
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from microddp.comms import Comms
from microddp.results import whole_file

NAME = re.compile(r"checkpoint-(\d+)\.pt")


# Of the process, as those who train one after the other write into the same folder. Its thread
# finishes what is under way before Python exits.
_writer = ThreadPoolExecutor(1, "checkpoint")


class Checkpoints:
    """The newest checkpoints of a run, in a folder that is made if it does not exist. A collective.

    Args:
        folder: folder on rank 0's machine.
        comms: ranks that train together.
        keep: number of checkpoints that stay; older ones are removed after a newer one is written.
            Those of later steps, which :meth:`load` could not read, are left as they are.

    Attributes:
        stopped: for each checkpoint, seconds for which rank 0 stopped training.
        writing: for each checkpoint, seconds until its file was complete.

    Raises:
        ValueError: on every rank, if rank 0 cannot write to the folder.
    """

    def __init__(self, folder: Path, comms: Comms, keep: int) -> None:
        self.folder, self.comms, self.keep = folder, comms, keep
        self.stopped: list[float] = []
        self.writing: list[float] = []
        problem = ""
        if comms.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                problem = "" if os.access(folder, os.W_OK) else "it may not be written to"
            except OSError as error:
                problem = str(error)
        comms.fail_together(problem, f"a folder for checkpoints: {folder}", ValueError)
        self._under_way: Future[str] | None = None

    def save(self, step: int, state: Mapping[str, Any], began: float | None = None) -> None:
        """Begin to write a checkpoint on rank 0; the other ranks return at once.

        If the last checkpoint is still being written, this waits for it. If that one could not be
        written, this prints why, and training goes on: the checkpoint before it is still there.

        Args:
            step: number of steps before the checkpoint.
            state: tensors, numbers and texts in dictionaries and lists; it is copied.
            began: when training stopped for it, by ``time.perf_counter()``; default: now.
        """
        if self.comms.rank:
            return
        start = time.perf_counter() if began is None else began
        if problem := self._problem():
            self.comms.print(f"No checkpoint: {problem}")
        snapshot = tree_map_only(
            torch.Tensor, lambda t: t.detach().to("cpu", copy=True), dict(state)
        )
        self._under_way = _writer.submit(self._write, step, snapshot)
        self.stopped.append(time.perf_counter() - start)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. A collective.

        Raises:
            RuntimeError: on every rank, if it could not be written.
        """
        problem = self._problem()
        self.comms.fail_together(problem, f"a checkpoint in {self.folder}")

    def load(self) -> dict[str, Any] | None:
        """Read the newest checkpoint that is whole. A collective.

        It prints the names of damaged files, and leaves them as they are.

        Returns:
            The saved state, on every rank, in main memory; ``None`` if there is no checkpoint.

        Raises:
            ValueError: on every rank, if there are checkpoints and none can be read.
        """
        data: bytes | None = None
        problems: list[str] = []
        if self.comms.rank == 0:
            try:
                paths = _checkpoints(self.folder)
            except OSError as error:
                paths, problems = [], [str(error)]
            for path in reversed(paths):
                try:
                    data = path.read_bytes()
                    _read(data)
                    break
                except Exception as error:  # of many types, by where the damage is
                    data = None
                    problems.append(f"{path.name}: {(str(error) or repr(error)).splitlines()[0]}")
                    if path != paths[0]:
                        self.comms.print(f"{problems[-1]}; going back to the one before")
        problem = "; ".join(problems) if data is None else ""
        self.comms.fail_together(problem, f"a whole checkpoint in {self.folder}", ValueError)
        self._clean_up()
        return share_state(data, self.comms)

    def expect_none(self) -> None:
        """Refuse a folder with another run's checkpoints, among which these would be lost.

        A collective.

        Raises:
            ValueError: on every rank, if there are some, or rank 0 cannot list them.
        """
        problem = ""
        if self.comms.rank == 0:
            try:
                there = _checkpoints(self.folder)
                problem = f"{there[-1].name} of another run" if there else ""
            except OSError as error:
                problem = str(error)
        what = f"--resume, or a folder without checkpoints as {self.folder}"
        self.comms.fail_together(problem, what, ValueError)
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove what a killed run had not finished; what cannot be removed does no harm."""
        if self.comms.rank == 0:
            with suppress(OSError):
                for leftover in self.folder.glob("checkpoint-*.pt.part"):
                    leftover.unlink()

    def _problem(self) -> str:
        """Wait for the last checkpoint; return why it was not written, or an empty text."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way else ""

    def _write(self, step: int, state: Mapping[str, Any]) -> str:
        """Write a file; return why it could not be written, or an empty text."""
        start = time.perf_counter()
        try:
            with whole_file(self.folder / f"checkpoint-{step}.pt") as unfinished:
                torch.save(state, unfinished)
        except (OSError, RuntimeError) as error:  # torch's, if the disk is full
            return str(error)
        self.writing.append(time.perf_counter() - start)
        try:
            # Those of later steps are damaged, or this run would have gone on from one of them.
            for old in _checkpoints(self.folder, step)[: -self.keep]:
                old.unlink()
        except OSError as error:
            self.comms.print(f"An old checkpoint stays: {error}")
        return ""


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Turn tensors, numbers and texts in dictionaries and lists into a checkpoint's bytes."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def share_state(data: bytes | None, comms: Comms, src: int = 0) -> dict[str, Any] | None:
    """Send what rank ``src`` has encoded, or ``None``, to all, and decode it. A collective."""
    size = comms.all_gather_data(None if data is None else len(data))[src]
    if size is None:
        return None
    mine = data if comms.rank == src and data is not None else bytes(size)
    wire = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(comms.device)
    comms.broadcast(wire, src)
    return _load(wire.cpu().numpy().tobytes())


def gather_states(state: Mapping[str, Any], comms: Comms) -> list[torch.Tensor] | None:
    """Gather states that differ by rank, for rank 0 to save. A collective.

    Returns:
        On rank 0 the bytes of each state, in rank order; on other ranks ``None``.
    """
    mine = torch.frombuffer(bytearray(encode_state(state)), dtype=torch.uint8).to(comms.device)
    sizes = comms.all_gather_data(len(mine))
    everyone = comms.gather(mine)
    return None if everyone is None else list(torch.split(everyone.cpu(), sizes))


def own_state(states: Sequence[torch.Tensor], comms: Comms) -> dict[str, Any]:
    """Return this rank's state out of those of :func:`gather_states`.

    Raises:
        ValueError: the states come from another number of ranks.
    """
    if len(states) != comms.world_size:
        raise ValueError(
            f"rank {comms.rank}: expected a checkpoint of {comms.world_size} ranks, since each "
            f"has an optimizer of its own, got one of {len(states)}"
        )
    return _load(states[comms.rank].numpy().tobytes())


def _checkpoints(folder: Path, last: float = math.inf) -> list[Path]:
    """List a folder's checkpoints up to a step, in order."""
    steps = {int(m[1]): path for path in folder.iterdir() if (m := NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps) if step <= last]


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
