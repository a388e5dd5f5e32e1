"""Messages from one rank to another.

With ``MICRODDP_DEBUG=1`` in the environment, the ranks also compare what they are about to do, at
the price of one small message a call, and the error names the rank that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from microddp.comms.checks import check_peer, check_tensor
from microddp.comms.headers import describe
from microddp.comms.identity import Identity
from microddp.comms.pending import Exchange, Pending, started


class Scratch:
    """Memory that is handed out again and again."""

    _memory = torch.empty(0, dtype=torch.uint8)

    def scratch(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Room for ``count`` values of another tensor's dtype, to receive into.

        In main memory it is kept, at the largest size asked for, and handed out again by the next
        call: fresh memory costs a page fault for every 4 KiB, which made a ring of 16 MiB spend
        twice the backend's time in the kernel. A GPU's allocator keeps memory by itself.
        """
        if like.device.type != "cpu":
            return like.new_empty(count)
        nbytes = count * like.element_size()
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(like.dtype)


class PointToPoint(Identity, Scratch):
    """A process's place in a group of ranks, and messages to its other members.

    Attributes:
        on_send: called as ``on_send(tensor, dst)`` for every message this rank sends, when set.
    """

    on_send: Callable[[torch.Tensor, int], None] | None = None

    @property
    def transport(self) -> Any:
        """The backend itself, whose threads end with the last reference to it."""
        # The group's own methods go through torch's dispatcher, and what that touches has left the
        # caches after every message of a megabyte: a ring took 1 to 4 % longer over it.
        return self.group._get_backend(self.wire_device)

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Pending:
        """Send a contiguous tensor to rank ``dst``.

        Args:
            tensor: any shape and dtype; must stay as it is until the transfer is complete.
            dst: the receiving rank of this group.
            async_op: return at once; the caller waits on the result.

        Raises:
            ValueError: ``dst`` out of range or this rank itself, or a tensor not contiguous.
            RuntimeError: the other rank failed, or the time-out passed; see the class for NCCL.
        """
        check_peer(self, "dst", dst)
        check_tensor(self, "send", tensor)
        call = self._begin(f"send({describe(tensor)}, dst={dst})")
        return started(Pending(self._send(tensor, dst), call=call), async_op)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Pending:
        """Receive from rank ``src`` into a contiguous tensor of the same shape and dtype.

        Arguments and errors are those of :meth:`send`.
        """
        check_peer(self, "src", src)
        check_tensor(self, "recv", tensor)
        call = self._begin(f"recv({describe(tensor)}, src={src})")
        return started(Pending(self._recv(tensor, src), call=call), async_op)

    def sendrecv(self, outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> None:
        """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``.

        The two travel together: a ring in which every rank called ``send`` and then ``recv``
        would wait for ever. NCCL needs them as one batch, for the same reason.
        Arguments and errors are those of :meth:`send`.
        """
        check_tensor(self, "sendrecv", outgoing)
        self._check_exchange(incoming, dst, src)
        with self._begin(f"sendrecv({describe(incoming)}, dst={dst}, src={src})"):
            self._exchanger(dst, src, Exchange)(outgoing, incoming).wait()

    def exchanger(
        self, tensor: torch.Tensor, dst: int, src: int
    ) -> Callable[[torch.Tensor, torch.Tensor], Exchange]:
        """Make a cheap function that exchanges parts of one tensor with the same two ranks.

        Called with the outgoing and the incoming part, it starts to exchange them. Between two
        messages of a megabyte Python runs with cold caches: a ring that had every piece checked
        took 3 % longer. So the checks of :meth:`sendrecv` are made here, once, and all exchanges
        are recorded as one call, whose end is not.

        Args:
            tensor: what will be exchanged is contiguous parts of it, or lies where it does.
            dst: the rank to send to.
            src: the rank to receive from.

        Raises:
            ValueError: as for :meth:`sendrecv`.
        """
        self._check_exchange(tensor, dst, src)
        call = self._begin(f"exchanger({describe(tensor)}, dst={dst}, src={src})")
        return self._exchanger(dst, src, partial(Exchange, call=call))

    def _check_exchange(self, tensor: torch.Tensor, dst: int, src: int) -> None:
        check_peer(self, "dst", dst)
        check_peer(self, "src", src)
        check_tensor(self, "sendrecv", tensor)

    def _exchanger(
        self, dst: int, src: int, exchange: Callable[..., Exchange]
    ) -> Callable[[torch.Tensor, torch.Tensor], Exchange]:
        if self.backend == "nccl":
            return partial(self._exchange_batched, dst, src, exchange)
        if self.debug or self.through_host or self.on_send:
            return lambda outgoing, incoming: exchange(
                self._recv(incoming, src), self._send(outgoing, dst)
            )
        send, recv = self.transport.send, self.transport.recv
        return lambda outgoing, incoming: exchange(
            recv([incoming], src, 0).wait, send([outgoing], dst, 0).wait
        )

    def _send(self, tensor: torch.Tensor, dst: int) -> Callable[[], object]:
        """Start to send; what is returned waits for the end."""
        if self.on_send:
            self.on_send(tensor, dst)
        header = self.headers.send(describe(tensor), dst) if self.debug else None
        message: Callable[[], object] = self.transport.send([self.to_wire(tensor)], dst, 0).wait
        return message if header is None else Pending(header.wait, message).wait

    def _recv(self, tensor: torch.Tensor, src: int) -> Callable[[], object]:
        """Start to receive; what is returned waits for the end."""
        wire = torch.empty_like(tensor, device="cpu") if self.through_host else tensor
        message: Callable[[], object] = partial(self._checked_recv, wire, src)
        if self.debug:  # the header must be read before the message can be
            self._coming[src].append(wire)
        else:
            message = self.transport.recv([wire], src, 0).wait
        return message if wire is tensor else Pending(message, partial(tensor.copy_, wire)).wait

    def _exchange_batched(
        self,
        dst: int,
        src: int,
        exchange: Callable[..., Exchange],
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
    ) -> Exchange:
        if self.on_send:
            self.on_send(outgoing, dst)
        batch = [
            dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=src),
            dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=dst),
        ]
        # NCCL completes the two as one.
        both = Pending(*(work.wait for work in dist.batch_isend_irecv(batch)))
        return exchange(both.wait, both.wait)

    def _checked_recv(self, tensor: torch.Tensor, src: int) -> None:
        while any(tensor is each for each in self._coming[src]):
            first = self._coming[src].pop(0)  # messages come in the order of the calls
            if (coming := self.headers.recv(src)) != (mine := describe(first)):
                raise RuntimeError(
                    f"rank {self.rank}: recv expected {mine} from rank {src}, got {coming}"
                )
            dist.recv(first, group=self.group, group_src=src)
