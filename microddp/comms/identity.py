"""A rank's identity: its number in a group, its device and machine, and the calls it agrees on."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Self

import torch
import torch.distributed as dist

from microddp.comms import calls
from microddp.comms.calls import Calls
from microddp.comms.headers import Headers, name_members, name_usual, odd_ranks
from microddp.comms.machine import cpu_cores, cpu_name, known_links


def most_rounds() -> int | None:
    """The value of ``MICRODDP_ROUNDS``, if it is set.

    Raises:
        ValueError: that is no number from 1 on.
    """
    text = os.environ.get("MICRODDP_ROUNDS")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected MICRODDP_ROUNDS to be a number from 1 on, got {text!r}")
    return int(text)


class Identity:
    """A process's place in a group of ranks.

    Attributes:
        rank: this process's number in the group, from 0.
        world_size: the number of ranks in the group.
        local_rank: this process's number on its own machine.
        local_world_size: the number of ranks on its own machine.
        device: where this rank computes.
        backend: ``"gloo"`` or ``"nccl"``: what carries tensors of this device.
        timeout: seconds after which a rank stops waiting for the others.
        box: hosts in a box and their links, where the ranks run on such.
        most_rounds: of one measurement; ``None``: as many as are asked for.
        debug: whether the ranks compare what they are about to do.
        joined: whether somebody else has made the group, who will also end it.
        through_host: whether tensors travel by way of main memory. gloo takes CUDA tensors in
            all-reduce and broadcast only; to send one ends the process.

    Raises:
        ValueError: the group has no backend for the device.
    """

    joined = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        local_rank: int,
        local_world_size: int,
        timeout: float,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._parts: list[Identity] = []  # in sub-groups
        self._coming: dict[int, list[torch.Tensor]] = defaultdict(list)  # by rank, to be received
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        job = dist.get_rank(), dist.get_world_size()
        self._calls = calls.current() or calls.start(*job, answers=False)
        self._name, members = group.group_name, dist.get_process_group_ranks(group)
        self._members = "" if group is dist.group.WORLD else name_members(members)
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.device = device
        # torch's get_backend() does not tell it for a group with a backend for each kind of device,
        # nor for one that was made without naming a backend.
        backends = dist.get_backend_config(group)
        by_device = dict(entry.split(":") for entry in backends.split(","))
        if device.type not in by_device:
            raise ValueError(
                f"rank {self.rank}: expected a group with a backend for {device}, got {backends}"
            )
        self.backend = by_device[device.type]
        self.timeout = timeout
        self.box = known_links()
        self.most_rounds = most_rounds()
        self.debug = os.environ.get("MICRODDP_DEBUG", "0") == "1"
        self.through_host = self.backend == "gloo" and device.type == "cuda"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for calls of ``torch.distributed`` itself.

        Raises:
            RuntimeError: after ``close()``.
        """
        if self._group is None:
            raise self._closed()
        return self._group

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"rank {self.rank}: these Comms are closed")

    @property
    def wire_device(self) -> torch.device:
        """The device on which the backend takes tensors, which may be main memory."""
        return torch.device("cpu") if self.through_host else self.device

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this rank's device where the backend takes it, copied if need be."""
        return tensor.cpu() if self.through_host else tensor

    @property
    def cores(self) -> int:
        """The cores that the ranks of this machine share; hosts in a box are one machine."""
        return self.box.cores if self.box else cpu_cores()

    @property
    def ranks_on_cores(self) -> int:
        """Number of ranks of the job that share these cores, of this group or not."""
        return dist.get_world_size() if self.box else self.local_world_size

    @property
    def ranks_here(self) -> int:
        """The most ranks of this group that this machine can have; hosts in a box are one."""
        return self.world_size if self.box else min(self.world_size, self.local_world_size)

    @property
    def devices(self) -> int:
        """The cores that the ranks of this machine share, or the GPUs that they use."""
        if self.device.type != "cuda":
            return self.cores
        # Under NCCL each has its own, and a launcher may let it see no other.
        visible = self.ranks_here if self.backend == "nccl" else torch.cuda.device_count()
        return min(self.ranks_here, visible)

    @property
    def crowded(self) -> bool:
        """True if ranks of this group take turns on a core or a GPU."""
        return self.ranks_here > self.devices

    @property
    def headers(self) -> Headers:
        """Short texts between the ranks."""
        return Headers(self.group, self.wire_device)

    def agree(self, call: str, place: str | None = None) -> Calls:
        """Record that a collective is called. With ``MICRODDP_DEBUG=1`` compare it, too.

        Then this is a collective itself, and raises on every rank unless all make the same call.

        Args:
            call: in words.
            place: what :meth:`place` returned for it; default: the line that this is called from.

        Returns:
            The context in which to wait for it.
        """
        recorded = self._begin(call, collective=True, place=place)
        if self.debug:
            with recorded:
                self._compare(call)
            recorded.begin()
        return recorded

    def _compare(self, call: str) -> None:
        """Raise on every rank unless all are about to make the same call. A collective.

        The error names the ranks that differ from the most frequent call; on a tie, from that of
        the lowest rank.
        """
        said = self.headers.exchange(call)
        usual, odd = odd_ranks(said)
        if odd:
            calls = "; ".join(f"rank {rank} calls {said[rank]}" for rank in odd)
            raise RuntimeError(
                f"rank {self.rank}: the ranks disagree: {calls}; expected {usual}, "
                f"{name_usual(said)}"
            )

    def place(self) -> str:
        """The line of the program that this is called from, for several calls of one place."""
        return self._calls.place()

    def _begin(self, call: str, collective: bool = False, place: str | None = None) -> Calls:
        """Record that a call is made, here a message; for what is returned see :meth:`agree`."""
        if self._group is None:  # nothing is recorded after the end
            raise self._closed()
        return self._calls.begin(call, self._name, self._members, collective, place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # To destroy a group, NCCL waits for what is under way in it: for ever, if that is what
        # failed. An error must show before that.
        if kind is not None and self.backend == "nccl":
            self._leave(dist.distributed_c10d._abort_process_group)
        else:
            self.close()

    def close(self) -> None:
        """Leave the group, and the sub-groups that were made of it.

        Keeps no reference to the group: its threads end when the last one goes, and a thread that
        is still letting go of a tensor when Python exits would abort the process.
        """
        atexit.unregister(self.end)
        self._leave(dist.destroy_process_group)

    def end(self) -> None:
        """Close, and let gloo's threads come to rest before Python: else they would abort it.

        They end with the last reference to the group. Where PyTorch's DDP still has one, a thread
        may be letting go of its last tensor, for which it needs Python.
        """
        self.close()
        time.sleep(0.05)

    def _leave(self, end: Callable[[dist.ProcessGroup | None], None]) -> None:
        while self._parts:
            self._parts.pop()._leave(end)
        group, self._group = self._group, None
        if group is None:
            return
        if group is dist.group.WORLD:
            self._calls.left()
        else:
            self._calls.left(group.group_name, self._members)
        if dist.is_initialized() and not self.joined:
            end(None if group is dist.group.WORLD else group)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, "
            f"backend={self.backend!r}, device={str(self.device)!r})"
        )

    def print(self, *values: object) -> None:
        """Print on rank 0 of this group, at once; silent on the others."""
        if self.rank == 0:
            print(*values, flush=True)

    @property
    def where(self) -> str:
        """The devices or hosts of this run, as in ``"8 x NVIDIA A100"``.

        What it says of a machine is of this rank's own; the others are taken to be like it.
        """
        if self.device.type == "cuda":
            where = f"{self.devices} x {torch.cuda.get_device_name(self.device)}"
        else:
            where = f"{self.cores} core{'s' if self.cores > 1 else ''} ({cpu_name()})"
        if self.box:
            return f"{self.box}, on {where}"
        machines = -(-self.world_size // self.ranks_here)
        return f"{machines} machines of {where}" if machines > 1 else where

    def describe(self) -> str:
        """One line on what this run is: backend, ranks, devices, cores, versions and date."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        kind = "GPUs" if self.device.type == "cuda" else "cores"
        sharing = f", more ranks than {kind}" if self.crowded else ""
        if self.most_rounds:
            sharing += f", at most {self.most_rounds} rounds a measurement"
        versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
        date = time.strftime("%Y-%m-%d")
        return f"{self.backend}, {ranks} on {self.where}{sharing}, {versions}, {date}"
