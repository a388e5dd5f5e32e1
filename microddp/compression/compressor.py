"""What a compressor does, and the one message that most of them send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from microddp.allreduce import ring_all_gather
from microddp.comms import Comms

WORD = 8  # bytes: where a value of any dtype may begin
# Values that are worked on at a time: 1 MiB, so that what is computed on the way stays in the cache
# and in memory that was used before. To make 16 MiB of fresh memory took longer than all the rest.
PIECE = 1 << 18


class Compressor(ABC):
    """A way to send less than a gradient."""

    @abstractmethod
    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        comms: Comms,
    ) -> None:
        """Average what the ranks send of their gradients. A collective.

        A value that is not finite makes at least one value of ``mean`` so.

        Args:
            gradient: flat, floating point; becomes what of it was not sent.
            mean: of its size and dtype; becomes the mean over the ranks of what they sent, bitwise
                the same on all.
            parameters: whose gradients lie side by side.
            comms: the ranks.
        """

    @abstractmethod
    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        """Bytes that a rank sends for one bucket, as the mean over the ranks.

        Args:
            shapes: of the parameters in the bucket.
            itemsize: bytes of a value of the gradients.
            world_size: the number of ranks.
        """

    def state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:  # noqa: ARG002
        """What it keeps from one step to the next, the same on every rank.

        Args:
            names: of the parameters.
        """
        return {}

    def load_state_dict(
        self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Go on from what another one kept.

        Args:
            state: its ``state_dict()``.
            parameters: by name.
        """
        del state, parameters


def count(shapes: Sequence[torch.Size]) -> int:
    """The number of values in a bucket."""
    return sum(shape.numel() for shape in shapes)


def gathered_bytes(sizes: Sequence[int], world_size: int) -> float:
    """What a rank sends in :func:`gather_parts`.

    Args:
        sizes: bytes of each part.
        world_size: the number of ranks.
    """
    return float(sum(map(_whole_words, sizes)) * (world_size - 1))


def gather_parts(parts: Sequence[torch.Tensor], comms: Comms) -> list[list[torch.Tensor]]:
    """Every rank's flat tensors, in rank order, which travel together as bytes.

    Args:
        parts: of the same sizes and dtypes on every rank.
        comms: the ranks.
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
