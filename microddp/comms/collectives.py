"""The collectives every later module is built from, as methods of :class:`Comms`.

They are thin: each one checks its arguments on this rank, then calls ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from microddp.comms.checks import check_divides, check_rank, check_tensor
from microddp.comms.dealing import collected, dealt
from microddp.comms.groups import make_group
from microddp.comms.headers import describe, name_ranks
from microddp.comms.pending import Pending, started
from microddp.comms.point_to_point import PointToPoint

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

    Where a rank fails, or the others have waited for it for ``timeout`` seconds, gloo's operations
    raise ``RuntimeError`` on them. NCCL's raise nothing: about a minute after the time-out, its
    watchdog ends the process.
    """

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, device: torch.device) -> Comms:
        """The ``Comms`` of a process group that ``torch.distributed`` made; ``None``: of all ranks.

        Args:
            group: this process is a member.
            device: where this rank computes.

        Raises:
            ValueError: this process is not a member, no group was made yet, or the group has no
                backend for the device.
        """
        if not dist.is_initialized():
            raise ValueError("expected microddp.init() or torch's init_process_group() first")
        rank, group = dist.get_rank(), group or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):  # new_group's word for "not yours"
            raise ValueError(f"rank {rank}: expected a group that this rank belongs to")
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        comms = cls(group, device, local_rank, local_world_size, DEFAULT_TIMEOUT)
        comms.joined = True
        with suppress(AttributeError, RuntimeError):  # not every backend has options
            comms.timeout = comms.transport.options._timeout.total_seconds()
        return comms

    def subgroup(self, ranks: Sequence[int], timeout: float | None = None) -> Comms | None:
        """A group of some ranks of this one. Every rank of this group must call it.

        With NCCL a new group is split off that of all ranks, in which all of them take part. So
        this one must have all ranks of the job.

        Args:
            ranks: the members, as ranks of this group, without repeats. They are numbered in
                ascending order, whatever the order here.
            timeout: seconds, if its members should wait for a shorter or longer time.

        Returns:
            Their ``Comms`` on the members, ``None`` on the others.

        Raises:
            ValueError: a rank is out of range or named twice, or there is none.
            RuntimeError: with NCCL, this is not the group of all ranks.
        """
        seconds = self.timeout if timeout is None else timeout
        group = make_group(self, ranks, seconds)
        if self.rank not in ranks:
            return None
        part = Comms(group, self.device, self.local_rank, self.local_world_size, seconds)
        self._parts = [each for each in (*self._parts, part) if each._group]  # not the closed
        return part

    def timed(self, *, computing: bool = True) -> Comms:
        """The ranks that are worth timing: each has a core or a GPU of its own. A collective.

        Where a machine has more ranks than that, their times would tell how they take turns. Those
        beyond have nothing left to do: they leave the job, and their process ends here. At least
        two stay on each machine, since one alone sends nothing. With NCCL all stay.

        Args:
            computing: whether the ranks are to compute. If they only send, those on hosts in a box
                all stay: the links are what takes the time.

        Returns:
            The group of those that stay, which is this one if all do.

        Raises:
            SystemExit: on the ranks that leave, with status 0.
        """
        if self.backend == "nccl" or (self.box and not computing):
            return self
        first = 0 if self.box else dist.get_rank() - self.local_rank  # rank of this machine
        place = self.all_gather_data(first)[: self.rank].count(first)
        mine = place < max(2, self.devices)  # each for itself: another machine may have more cores
        staying = [rank for rank, stays in enumerate(self.all_gather_data(mine)) if stays]
        if len(staying) == self.world_size:
            return self
        group = self.subgroup(staying)
        if group is None:
            self.close()
            sys.exit()
        return group

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        with self.agree("barrier()"):
            nccl = self.backend == "nccl"
            dist.barrier(self.group, device_ids=[self.device.index] if nccl else None)
            if nccl:
                torch.cuda.synchronize(self.device)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with that of rank ``src``, in place."""
        check_rank(self, "src", src)
        check_tensor(self, "broadcast", tensor)
        call = self.agree(f"broadcast({describe(tensor)}, src={src})")
        work: Any = dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)
        return started(Pending(work.wait, call=call), async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False
    ) -> Pending:
        """Replace ``tensor`` by its reduction over all ranks, in place.

        Args:
            tensor: contiguous, the same shape and dtype on every rank.
            op: ``"sum"``, ``"max"``, ``"min"`` or ``"product"``.
        """
        check_tensor(self, "all_reduce", tensor)
        reduce_op = self._reduce_op(op)
        call = self.agree(f"all_reduce({describe(tensor)}, op={op})")
        work = dist.all_reduce(tensor, reduce_op, group=self.group, async_op=True)
        return started(Pending(work.wait, call=call), async_op)

    def all_reduce_mean(self, tensor: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Replace ``tensor`` (floating point or complex) by its mean over all ranks, in place.

        Divides before it adds, as PyTorch's own DDP does: the sum of n gradients may overflow
        fp16 where their mean does not.
        """
        check_tensor(self, "all_reduce_mean", tensor)
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
        check_tensor(self, "all_gather", tensor)
        with self.agree(f"all_gather({describe(tensor)})"):
            wire = self.to_wire(tensor)
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

    def fail_together(
        self, problem: str, expected: str, error: type[Exception] = RuntimeError
    ) -> None:
        """Raise on every rank if one has a problem, with those of all. A collective.

        Args:
            problem: this rank's, in words; empty if it has none.
            expected: what there should be instead.
            error: what to raise.

        Example:
            >>> comms.fail_together("no space" if comms.rank else "", "a trace of each rank")
            RuntimeError: rank 0: expected a trace of each rank, got ranks 1, 2: no space
        """
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(self.all_gather_data(problem)):
            if text:
                ranks.setdefault(text, []).append(rank)
        if ranks:
            got = "; ".join(f"{name_ranks(who)}: {text}" for text, who in ranks.items())
            raise error(f"rank {self.rank}: expected {expected}, got {got}")

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over all ranks, and keep this rank's part.

        Args:
            tensor: contiguous; its first dimension is a multiple of the world size.

        Returns:
            Part ``rank`` of the reduced tensor, split along the first dimension.

        Raises:
            ValueError: the first dimension does not divide.
        """
        reduce_op = self._reduce_op(op)
        check_divides(self, "reduce_scatter", tensor)
        with self.agree(f"reduce_scatter({describe(tensor)}, op={op})"):
            wire = self.to_wire(tensor)
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
        check_divides(self, "all_to_all", tensor)
        with self.agree(f"all_to_all({describe(tensor)})"):
            wire = self.to_wire(tensor)
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
        check_rank(self, "src", src)
        with self.agree(f"scatter(src={src})"):
            return dealt(self, tensor, src)

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
        check_rank(self, "dst", dst)
        check_tensor(self, "gather", tensor)
        with self.agree(f"gather(dst={dst})"):
            return collected(self, tensor, dst)

    def _reduce_op(self, op: str) -> Any:  # torch's ReduceOp has no usable static type
        if op not in REDUCE_OPS:
            raise ValueError(f"rank {self.rank}: expected op in {list(REDUCE_OPS)}, got {op!r}")
        return REDUCE_OPS[op]
