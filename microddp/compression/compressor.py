"""The interface of compressors, and how tensors of bytes travel: to all, or a part to each rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from microddp.allreduce import ring_all_gather
from microddp.comms import Comms

WORD = 8  # bytes; a value of any dtype may begin at a multiple
# Values that are processed at a time: 1 MiB, so that temporary tensors stay in the cache and reuse
# memory. Allocating 16 MiB of fresh memory took longer than all the rest.
PIECE = 1 << 18


class Compressor(ABC):
    """A way to average gradients approximately and send fewer bytes."""

    @abstractmethod
    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        comms: Comms,
    ) -> None:
        """Compress, send, and average over the ranks. A collective.

        If a value of any rank's gradient is not finite, so is at least one value of ``mean``.

        Args:
            gradient: flat, floating point; is overwritten by the part of it that was not sent.
            mean: same size and dtype; is overwritten by the mean over the ranks of what they sent,
                bitwise the same on all ranks.
            parameters: the parameters whose gradients are concatenated in ``gradient``.
            comms: the ranks.
        """

    @abstractmethod
    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        """Compute the bytes that a rank sends for one bucket, on average over the ranks.

        Args:
            shapes: shapes of the parameters in the bucket.
            itemsize: bytes of one value of the gradients.
            world_size: the number of ranks.
        """

    def state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:  # noqa: ARG002
        """Return the state that the compressor keeps between steps, the same on every rank.

        Args:
            names: the parameters' names.
        """
        return {}

    def load_state_dict(
        self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Load the state of another compressor of this kind.

        Args:
            state: its ``state_dict()``.
            parameters: parameters by name.
        """
        del state, parameters


def count(shapes: Sequence[torch.Size]) -> int:
    """Count the values in a bucket."""
    return sum(shape.numel() for shape in shapes)


def gathered_bytes(sizes: Sequence[int], world_size: int) -> float:
    """Compute the bytes that a rank sends in :func:`gather_parts`, from those of each part."""
    return float(sum(map(_whole_words, sizes)) * (world_size - 1))


def gather_parts(parts: Sequence[torch.Tensor], comms: Comms) -> list[list[torch.Tensor]]:
    """All-gather several flat tensors in one message, as bytes.

    Their sizes and dtypes are the same on every rank. Returns each rank's, in rank order.
    """
    everyone = _room(parts, comms.world_size)
    _fill(everyone[comms.rank], parts)
    ring_all_gather(everyone, comms)
    return [_views(row, parts) for row in everyone]


def exchange_parts(parts: Sequence[torch.Tensor], comms: Comms) -> list[list[torch.Tensor]]:
    """Send row i of several tensors to rank i, in one message, as bytes: an all-to-all.

    Not the backend's: a ``MessageCounter`` counts messages between two ranks. Shapes and dtypes are
    the same on every rank. Returns the rows that each rank sent here, in rank order.
    """
    n, mine = comms.world_size, comms.rank
    rows = [[part[rank] for part in parts] for rank in range(n)]
    leaving, come = _room(rows[mine], n), _room(rows[mine], n)
    for rank in range(n):
        _fill((come if rank == mine else leaving)[rank], rows[rank])
    for i in range(1, n):
        to, source = (mine + i) % n, (mine - i) % n
        comms.sendrecv(leaving[to], to, come[source], source)
    return [_views(row, rows[mine]) for row in come]


def _room(parts: Sequence[torch.Tensor], world_size: int) -> torch.Tensor:
    """Make room for parts of each rank: shape ``(world_size, bytes)``."""
    nbytes = sum(_whole_words(part.nbytes) for part in parts)
    return torch.empty(world_size, nbytes, dtype=torch.uint8, device=parts[0].device)


def _views(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View bytes as tensors of these sizes and dtypes, each from a whole word on."""
    rooms = torch.split(row, [_whole_words(part.nbytes) for part in like])
    return [room[: part.nbytes].view(part.dtype) for room, part in zip(rooms, like, strict=True)]


def _fill(row: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for room, part in zip(_views(row, parts), parts, strict=True):
        room.copy_(part)


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD
