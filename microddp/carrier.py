"""The carrier adds gradients up while backward goes on: here, the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microddp.comms import Comms, Pending
from microddp.timing import Launched

BACKEND = "backend"


class Carrier:
    """Adds gradients up over the ranks, by the backend's all-reduce.

    :func:`microddp.shared.carriers.carrier` makes others. Made on all ranks together.

    Attributes:
        comms: the ranks.
        name: of what it adds up by.
    """

    name = BACKEND

    def __init__(self, comms: Comms) -> None:
        self.comms = comms
        self._transport: Any = None  # known while the buckets of one backward are sent

    @property
    def maker(self) -> Callable[[Comms], Carrier]:
        """A function that makes another one like it; can be pickled."""
        return type(self)

    def zeros(self, parameter: torch.Tensor, numel: int) -> torch.Tensor:
        """A flat buffer of zeros for gradients of a parameter's kind, where it is added up best."""
        return parameter.detach().new_zeros(numel)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Begin to overwrite a contiguous tensor by that of rank ``src``."""
        return self.comms.broadcast(tensor, src, async_op=True)

    def start(self, buffer: torch.Tensor, is_last: bool) -> Launched:
        """Begin to add a buffer up over the ranks, in place.

        Args:
            buffer: of gradients.
            is_last: whether no other is to follow in this backward.

        Returns:
            What to wait for.
        """
        transport = self._transport or self.comms.transport
        self._transport = None if is_last else transport
        # For sparse gradients on GPUs the group calls another method of the backend.
        work: Launched = (self.comms.group if buffer.is_sparse else transport).allreduce([buffer])
        return work
