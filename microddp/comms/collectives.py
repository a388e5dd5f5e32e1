"""The collectives every later module is built from, as methods of :class:`Comms`.

They are thin: each one checks its arguments on this rank, then calls ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from microddp.comms.agreement import describe
from microddp.comms.machine import cpu_cores
from microddp.comms.point_to_point import Pending, PointToPoint

DEFAULT_TIMEOUT = 300.0  # seconds; a rank may compile or evaluate while the others wait
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Comms(PointToPoint):
    """A process's place in a group of ranks, its messages and its collectives.

    Made by :func:`microddp.init` for all ranks and by :meth:`subgroup` for some of them. As a
    context manager it closes itself. Every rank of the group must make the same collective calls
    in the same order.
    """

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, device: torch.device) -> Comms:
        """The ``Comms`` of a process group that ``torch.distributed`` made; ``None``: of all ranks.

        Args:
            group: this process is a member.
            device: where this rank computes.

        Raises:
            ValueError: this process is not a member, or no group was made yet.
        """
        if not dist.is_initialized():
            raise ValueError("expected microddp.init() or torch's init_process_group() first")
        rank = dist.get_rank()
        group = group or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):  # new_group's word for "not yours"
            raise ValueError(f"rank {rank}: expected a group that this rank belongs to")
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return cls(group, device, local_rank, local_world_size, DEFAULT_TIMEOUT)

    def __enter__(self) -> Comms:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group. The group of all ranks takes its sub-groups with it.

        Keeps no reference to the group: its threads end when the last one goes, and a thread that
        is still letting go of a tensor when Python exits would abort the process.
        """
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(None if group is dist.group.WORLD else group)

    def subgroup(self, ranks: Sequence[int], timeout: float | None = None) -> Comms | None:
        """A group of some ranks of this one. Every rank of this group must call it.

        Args:
            ranks: the members, as ranks of this group, without repeats.
            timeout: seconds, if its members should wait for a shorter or longer time.

        Returns:
            Their ``Comms`` on the members, ``None`` on the others.

        Raises:
            ValueError: a rank is out of range or named twice, or there is none.
        """
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"rank {self.rank}: expected distinct ranks for a group, got {ranks!r}"
            )
        for member in ranks:
            self._check_rank("ranks", member)
        self.agree(f"subgroup({list(ranks)})")
        members = [dist.get_global_rank(self.group, member) for member in ranks]
        seconds = self.timeout if timeout is None else timeout
        group = dist.new_group(members, timeout=timedelta(seconds=seconds))
        if self.rank not in ranks:
            return None
        return Comms(group, self.device, self.local_rank, self.local_world_size, seconds)

    def timed(self) -> Comms:
        """The ranks that are worth timing: each has a core or a GPU of its own. A collective.

        Where a machine has more ranks than that, their times would tell how they take turns. Those
        beyond have nothing left to do: they leave the job, and their process ends here. At least
        two stay on each machine, since one alone sends nothing. With NCCL all stay.

        Returns:
            The group of those that stay: this one, if all do.

        Raises:
            SystemExit: on the ranks that leave, with status 0.
        """
        devices = torch.cuda.device_count() if self.device.type == "cuda" else cpu_cores()
        place = torch.tensor([self.local_rank], device=self.device)
        places = self.all_gather(place).flatten().tolist()
        staying = [rank for rank, place in enumerate(places) if place < max(2, devices)]
        if len(staying) == self.world_size:
            return self
        group = self.subgroup(staying)
        if group is None:
            self.close()
            sys.exit()
        return group

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.agree("barrier()")
        if self.backend == "nccl":
            dist.barrier(self.group, device_ids=[self.device.index])
            torch.cuda.synchronize(self.device)
        else:
            dist.barrier(self.group)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with that of rank ``src``, in place."""
        self._check_rank("src", src)
        self._check_tensor("broadcast", tensor)
        self.agree(f"broadcast({describe(tensor)}, src={src})")
        work = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        return self._started(Pending(work.wait), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False
    ) -> Pending:
        """Replace ``tensor`` by its reduction over all ranks, in place.

        Args:
            tensor: contiguous, the same shape and dtype on every rank.
            op: ``"sum"``, ``"max"``, ``"min"`` or ``"product"``.
        """
        self._check_tensor("all_reduce", tensor)
        reduce_op = self._reduce_op(op)
        self.agree(f"all_reduce({describe(tensor)}, op={op})")
        work = dist.all_reduce(tensor, reduce_op, group=self.group, async_op=True)
        return self._started(Pending(work.wait), async_op)

    def all_reduce_mean(self, tensor: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Replace ``tensor`` (floating point or complex) by its mean over all ranks, in place.

        Divides before it adds, as PyTorch's own DDP does: the sum of n gradients may overflow
        fp16 where their mean does not.
        """
        self._check_tensor("all_reduce_mean", tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"rank {self.rank}: the mean needs a floating point tensor, got {tensor.dtype}"
            )
        return self.all_reduce(tensor.div_(self.world_size), async_op=async_op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's ``tensor``, in rank order.

        Args:
            tensor: contiguous, the same shape and dtype on every rank.

        Returns:
            A tensor of shape ``(world_size, *tensor.shape)``.
        """
        self._check_tensor("all_gather", tensor)
        self.agree(f"all_gather({describe(tensor)})")
        wire = self._to_wire(tensor)
        result = wire.new_empty((self.world_size, *wire.shape))
        dist.all_gather(list(result.unbind()), wire, group=self.group)
        return result.to(tensor.device)

    def all_gather_data(self, value: Any) -> list[Any]:
        """Every rank's plain data (numbers, texts, lists, dictionaries), in rank order.

        Travels as JSON, so that no rank unpickles what another one sent.
        """
        data = bytearray(json.dumps(value).encode())
        sizes = self.all_gather(torch.tensor([len(data)], device=self.device)).flatten().tolist()
        padded = torch.frombuffer(data.ljust(max(sizes)), dtype=torch.uint8).to(self.device)
        return [json.loads(bytes(row.tolist())) for row in self.all_gather(padded).cpu()]

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over all ranks, and keep this rank's part.

        Args:
            tensor: contiguous; its first dimension is a multiple of the world size.

        Returns:
            Part ``rank`` of the reduced tensor, split along the first dimension.

        Raises:
            ValueError: the first dimension does not divide.
        """
        self._check_tensor("reduce_scatter", tensor)
        reduce_op = self._reduce_op(op)
        self._check_divides("reduce_scatter", tensor)
        self.agree(f"reduce_scatter({describe(tensor)}, op={op})")
        wire = self._to_wire(tensor)
        parts = list(wire.chunk(self.world_size))
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, reduce_op, group=self.group)
        return result.to(tensor.device)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send part i of ``tensor`` to rank i; return what every rank sent here, in rank order.

        Args:
            tensor: contiguous; its first dimension is a multiple of the world size.

        Raises:
            ValueError: the first dimension does not divide.
        """
        self._check_tensor("all_to_all", tensor)
        self._check_divides("all_to_all", tensor)
        self.agree(f"all_to_all({describe(tensor)})")
        wire = self._to_wire(tensor)
        result = torch.empty_like(wire)
        dist.all_to_all_single(result, wire, group=self.group)
        return result.to(tensor.device)

    def scatter(
        self, tensor: torch.Tensor | Sequence[torch.Tensor] | None = None, src: int = 0
    ) -> torch.Tensor:
        """Deal a tensor on rank ``src`` out to all ranks.

        Args:
            tensor: on ``src``, a tensor to split along its first dimension (where that does not
                divide, the first ranks get one row more), or one tensor for each rank, of any
                shapes and dtypes. Ignored elsewhere.
            src: the rank that deals.

        Returns:
            This rank's part, on its device.

        Raises:
            ValueError: on every rank, if ``src`` passed no tensor with a dimension to split and
                not one tensor for each rank.
        """
        self._check_rank("src", src)
        self.agree(f"scatter(src={src})")
        parts: list[torch.Tensor] = []
        if isinstance(tensor, torch.Tensor):
            parts = list(tensor.tensor_split(self.world_size)) if tensor.dim() else []
            got = describe(tensor)
        else:
            parts = list(tensor or [])
            got = f"a list of {', '.join(type(part).__name__ for part in parts) or 'nothing'}"
        tensors = all(isinstance(part, torch.Tensor) for part in parts)
        problem = "" if tensors and len(parts) == self.world_size else got
        if problem := self._headers.share(problem, src):
            raise ValueError(
                f"rank {self.rank}: scatter expected, on rank {src}, a tensor to split or a list "
                f"of {self.world_size} tensors, got {problem}"
            )
        if self.rank != src:
            dtype, *shape = self._headers.recv(src).split()
            part = torch.empty(
                [int(size) for size in shape], dtype=getattr(torch, dtype), device=self.device
            )
            self.recv(part, src)
            return part
        sending: list[Pending] = []
        for peer, part in enumerate(parts):
            if peer != src:
                what = " ".join([str(part.dtype).removeprefix("torch."), *map(str, part.shape)])
                sending.append(Pending(self._headers.send(what, peer).wait))
                sending.append(self.send(part.to(self.device).contiguous(), peer, async_op=True))
        for pending in sending:
            pending.wait()
        return parts[src].to(self.device).contiguous()

    def gather(self, tensor: torch.Tensor, dst: int = 0) -> torch.Tensor | None:
        """Collect every rank's tensor on rank ``dst``: the inverse of :meth:`scatter`.

        Args:
            tensor: contiguous; alike on all ranks but for the size of its first dimension.
            dst: the rank that collects.

        Returns:
            On ``dst`` the tensors joined along the first dimension, in rank order; elsewhere None.

        Raises:
            ValueError: on every rank, if the tensors differ in more than their first dimension.
        """
        self._check_rank("dst", dst)
        self._check_tensor("gather", tensor)
        self.agree(f"gather(dst={dst})")
        # Everybody hears from everybody, so that all can refuse together.
        said = [
            text.split()
            for text in self._headers.exchange(
                " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)])
            )
        ]
        if tensor.dim() == 0 or len({(len(t), t[0], *t[2:]) for t in said}) > 1:
            raise ValueError(
                f"rank {self.rank}: gather expected tensors alike but for their first dimension, "
                f"got {'; '.join(f'rank {rank}: {t}' for rank, t in enumerate(said))}"
            )
        if self.rank != dst:
            self.send(tensor, dst)
            return None
        parts = [
            tensor if peer == dst else tensor.new_empty((int(what[1]), *tensor.shape[1:]))
            for peer, what in enumerate(said)
        ]
        receiving = [
            self.recv(part, peer, async_op=True) for peer, part in enumerate(parts) if peer != dst
        ]
        for pending in receiving:
            pending.wait()
        return torch.cat(parts)

    def _check_divides(self, call: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
            raise ValueError(
                f"rank {self.rank}: {call} expected a first dimension that is a multiple of "
                f"{self.world_size}, got shape {tuple(tensor.shape)}"
            )

    def _reduce_op(self, op: str) -> Any:  # torch's ReduceOp has no usable static type
        if op not in REDUCE_OPS:
            raise ValueError(f"rank {self.rank}: expected op in {list(REDUCE_OPS)}, got {op!r}")
        return REDUCE_OPS[op]
