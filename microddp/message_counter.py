"""Counts the messages that a rank sends."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from microddp.comms import Comms


@dataclass(frozen=True)
class Message:
    """One message, as its sender saw it.

    Attributes:
        src: the sending rank.
        dst: the receiving rank.
        nbytes: payload, bytes.
        offset: where the payload starts in the sent tensor's storage, bytes. Tells which chunk of
            a tensor a message carried.
    """

    src: int
    dst: int
    nbytes: int
    offset: int


class MessageCounter:
    """Records every message this rank sends through ``comms`` while the block runs.

    Example:
        >>> with MessageCounter(comms) as counter:
        ...     ring_all_reduce(torch.ones(12), comms)
        >>> sum(m.nbytes for m in counter.messages)  # 4 ranks: 2 * 3/4 * 48
        72

    Raises:
        RuntimeError: on entry, if ``comms`` is being recorded already.
    """

    def __init__(self, comms: Comms) -> None:
        self.comms = comms
        self.messages: list[Message] = []

    def __enter__(self) -> MessageCounter:
        if self.comms.on_send is not None:
            raise RuntimeError(f"rank {self.comms.rank}: these messages are being counted already")
        self.comms.on_send = self._record
        return self

    def __exit__(self, *_: object) -> None:
        self.comms.on_send = None

    def _record(self, tensor: torch.Tensor, dst: int) -> None:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        self.messages.append(Message(self.comms.rank, dst, tensor.nbytes, offset))

    def gather(self) -> list[list[Message]]:
        """The messages of every rank, in the order each sent them. A collective."""
        everyone = self.comms.all_gather_data([astuple(message) for message in self.messages])
        return [[Message(*fields) for fields in sent] for sent in everyone]
