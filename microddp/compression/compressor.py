"""The interface of compressors, and the all-gather that most of them use."""

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
    """Compute the bytes that a rank sends in :func:`gather_parts`.

    Args:
        sizes: size of each part in bytes.
        world_size: the number of ranks.
    """
    return float(sum(map(_whole_words, sizes)) * (world_size - 1))


def gather_parts(parts: Sequence[torch.Tensor], comms: Comms) -> list[list[torch.Tensor]]:
    """All-gather several flat tensors in one message, as bytes.

    Args:
        parts: flat tensors, of the same sizes and dtypes on every rank.
        comms: the ranks.

    Returns:
        For each rank, in rank order, its tensors.
    """
    rooms = [_whole_words(part.nbytes) for part in parts]
    everyone = torch.empty(comms.world_size, sum(rooms), dtype=torch.uint8, device=parts[0].device)

    def split(row: torch.Tensor) -> list[torch.Tensor]:
        return [
            room[: part.nbytes].view(part.dtype)
            for room, part in zip(torch.split(row, rooms), parts, strict=True)
        ]

    for room, part in zip(split(everyone[comms.rank]), parts, strict=True):
        room.copy_(part)
    ring_all_gather(everyone, comms)
    return [split(row) for row in everyone]


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD
