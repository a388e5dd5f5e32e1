"""A rank's place in a group, and messages from one rank to another.

With ``MICRODDP_DEBUG=1`` in the environment, the ranks also compare what they are about to do, at
the price of one small message a call, and the error names the rank that differs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from microddp.comms.agreement import Headers, describe
from microddp.comms.machine import cpu_cores, cpu_name


class Pending:
    """A transfer under way. Its tensors may be read or written again once ``wait()`` returns."""

    __slots__ = ("_steps",)

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

    def wait(self) -> None:
        """Block until the transfer is complete (on CUDA: until the stream may use the result).

        Raises:
            RuntimeError: the other side failed, or the time-out passed.
        """
        while self._steps:
            self._steps.pop(0)()


class Exchange(Pending):
    """A message each way under way: first to receive, then to send. ``wait()`` waits for both."""

    __slots__ = ()

    def received(self) -> None:
        """Block until the incoming message is there; the outgoing one may be under way still.

        Raises:
            RuntimeError: the other side failed, or the time-out passed.
        """
        if len(self._steps) == 2:
            self._steps.pop(0)()


AnyPending = TypeVar("AnyPending", bound=Pending)


class PointToPoint:
    """A process's place in a group of ranks, and messages to its other members.

    Attributes:
        rank: this process's number in the group, from 0.
        world_size: the number of ranks in the group.
        local_rank: this process's number on its own machine.
        local_world_size: the number of ranks on its own machine.
        device: where this rank computes.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: seconds after which a rank stops waiting for the others.
        on_send: called as ``on_send(tensor, dst)`` for every message this rank sends, when set.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        local_rank: int,
        local_world_size: int,
        timeout: float,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.device = device
        self.backend = str(dist.get_backend(group))
        self.timeout = timeout
        self._debug = os.environ.get("MICRODDP_DEBUG", "0") == "1"
        self.on_send: Callable[[torch.Tensor, int], None] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # gloo moves CUDA tensors only in all-reduce and broadcast: the rest goes through the host.
        self._through_host = self.backend == "gloo" and device.type == "cuda"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for calls of ``torch.distributed`` itself.

        Raises:
            RuntimeError: after ``close()``.
        """
        if self._group is None:
            raise RuntimeError(f"rank {self.rank}: these Comms are closed")
        return self._group

    @property
    def _wire_device(self) -> torch.device:
        return torch.device("cpu") if self._through_host else self.device

    @property
    def _headers(self) -> Headers:
        return Headers(self.group, self._wire_device)

    @property
    def _transport(self) -> Any:
        # The backend itself. The group's own send and recv go through torch's dispatcher, and what
        # that touches has left the caches after every message of a megabyte: a ring took 1 to 4 %
        # longer over it. Not kept, because its threads end when the last reference to it goes.
        return self.group._get_backend(self._wire_device)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, "
            f"backend={self.backend!r}, device={str(self.device)!r})"
        )

    def print(self, *values: object) -> None:
        """Print on rank 0 of this group, at once; silent on the others."""
        if self.rank == 0:
            print(*values, flush=True)

    def scratch(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Room for ``count`` values of another tensor's dtype, to receive into.

        In main memory it is kept, at the largest size asked for, and handed out again by the next
        call: fresh memory costs a page fault for every 4 KiB, which made a ring of 16 MiB spend
        twice the backend's time in the kernel. A GPU's allocator keeps memory by itself.
        """
        if like.device.type != "cpu":
            return like.new_empty(count)
        nbytes = count * like.element_size()
        if self._scratch.nbytes < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(like.dtype)

    def describe(self) -> str:
        """One line on what this run is: backend, ranks, devices, cores, versions and date."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self.device.type == "cuda":
            gpus = min(self.local_world_size, torch.cuda.device_count())
            where = f"{gpus} x {torch.cuda.get_device_name(self.device)}"
            kind, crowded = "GPUs", self.local_world_size > gpus
        else:
            where = f"{cpu_cores()} cores ({cpu_name()})"
            kind, crowded = "cores", self.local_world_size > cpu_cores()
        sharing = f", more ranks than {kind}" if crowded else ""
        versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
        return (
            f"{self.backend}, {ranks} on {where}{sharing}, {versions}, {time.strftime('%Y-%m-%d')}"
        )

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Pending:
        """Send a contiguous tensor to rank ``dst``.

        Args:
            tensor: any shape and dtype; must stay as it is until the transfer is complete.
            dst: the receiving rank of this group.
            async_op: return at once; the caller waits on the result.

        Raises:
            ValueError: ``dst`` out of range or this rank itself, or a tensor not contiguous.
            RuntimeError: the other rank failed, or the time-out passed.
        """
        self._check_peer("dst", dst)
        self._check_tensor("send", tensor)
        return self._started(Pending(self._send(tensor, dst)), async_op)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Pending:
        """Receive from rank ``src`` into a contiguous tensor of the same shape and dtype.

        Arguments and errors are those of :meth:`send`.
        """
        self._check_peer("src", src)
        self._check_tensor("recv", tensor)
        return self._started(Pending(self._recv(tensor, src)), async_op)

    def sendrecv(
        self,
        outgoing: torch.Tensor,
        dst: int,
        incoming: torch.Tensor,
        src: int,
        *,
        async_op: bool = False,
    ) -> Exchange:
        """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``.

        The two travel together: a ring in which every rank called ``send`` and then ``recv``
        would wait for ever. NCCL needs them as one batch, for the same reason.
        Arguments and errors are those of :meth:`send`.
        """
        self._check_tensor("sendrecv", outgoing)
        return self._started(self.exchanger(incoming, dst, src)(outgoing, incoming), async_op)

    def exchanger(
        self, tensor: torch.Tensor, dst: int, src: int
    ) -> Callable[[torch.Tensor, torch.Tensor], Exchange]:
        """What exchanges parts of one tensor with the same two ranks, at the least cost.

        It takes what goes out and what comes in, and starts to exchange them. What Python does
        between two messages of a megabyte it does with cold caches: a ring that had every piece
        checked took 3 % longer. So the checks of :meth:`sendrecv` are made here, once.

        Args:
            tensor: what will be exchanged is contiguous parts of it, or lies where it does.
            dst: the rank to send to.
            src: the rank to receive from.

        Raises:
            ValueError: as for :meth:`sendrecv`.
        """
        self._check_peer("dst", dst)
        self._check_peer("src", src)
        self._check_tensor("sendrecv", tensor)
        if self.backend == "nccl":
            return partial(self._exchange_batched, dst, src)
        if self._debug or self._through_host or self.on_send:
            return lambda outgoing, incoming: Exchange(
                self._recv(incoming, src), self._send(outgoing, dst)
            )
        send, recv = self._transport.send, self._transport.recv
        return lambda outgoing, incoming: Exchange(
            recv([incoming], src, 0).wait, send([outgoing], dst, 0).wait
        )

    def agree(self, call: str) -> None:
        """With ``MICRODDP_DEBUG=1``: raise on every rank unless all are about to make this call.

        Without it, do nothing. A collective when it does something.
        """
        if self._debug:
            self._headers.agree(call)

    def _send(self, tensor: torch.Tensor, dst: int) -> Callable[[], object]:
        """Start to send; what is returned waits for the end."""
        if self.on_send:
            self.on_send(tensor, dst)
        header = self._headers.send(describe(tensor), dst) if self._debug else None
        message: Callable[[], object] = self._transport.send([self._to_wire(tensor)], dst, 0).wait
        return message if header is None else Pending(header.wait, message).wait

    def _recv(self, tensor: torch.Tensor, src: int) -> Callable[[], object]:
        """Start to receive; what is returned waits for the end."""
        wire = torch.empty_like(tensor, device="cpu") if self._through_host else tensor
        # With the debug switch, the header must be read before the message can be.
        message: Callable[[], object] = (
            partial(self._checked_recv, wire, src)
            if self._debug
            else self._transport.recv([wire], src, 0).wait
        )
        return message if wire is tensor else Pending(message, partial(tensor.copy_, wire)).wait

    def _exchange_batched(
        self, dst: int, src: int, outgoing: torch.Tensor, incoming: torch.Tensor
    ) -> Exchange:
        if self.on_send:
            self.on_send(outgoing, dst)
        batch = [
            dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=src),
            dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=dst),
        ]
        # NCCL completes the two as one.
        both = Pending(*(work.wait for work in dist.batch_isend_irecv(batch)))
        return Exchange(both.wait, both.wait)

    def _checked_recv(self, tensor: torch.Tensor, src: int) -> None:
        if (coming := self._headers.recv(src)) != describe(tensor):
            raise RuntimeError(
                f"rank {self.rank}: recv expected {describe(tensor)} from rank {src}, got {coming}"
            )
        dist.recv(tensor, group=self.group, group_src=src)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {self.rank}: expected {name} in 0..{self.world_size - 1}, got {rank}"
            )

    def _check_tensor(self, call: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"rank {self.rank}: {call} expected a contiguous tensor, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.device.type != self.device.type:
            raise ValueError(
                f"rank {self.rank}: {call} expected a tensor on {self.device}, got {tensor.device}"
            )

    def _check_peer(self, name: str, rank: int) -> None:
        self._check_rank(name, rank)
        if rank == self.rank:
            raise ValueError(f"rank {self.rank}: expected another rank as {name}, got itself")

    def _to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._through_host else tensor

    @staticmethod
    def _started(pending: AnyPending, async_op: bool) -> AnyPending:
        if not async_op:
            pending.wait()
        return pending
