"""All values, each with fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from microddp.allreduce import ring_all_reduce
from microddp.comms import Comms
from microddp.compression.compressor import (
    Compressor,
    count,
    gather_parts,
    gathered_bytes,
    reduced_bytes,
)

BLOCK = 1024  # values that share a scale: 4 bytes for them cost a 32nd of a bit a value
LARGEST = 127  # of eight bits with a sign


class Int8(Compressor):
    """Sends eight bits a value: a whole number from -127 to 127 of its block's scale.

    The scales of the ranks differ, so what they send has to be gathered.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016.
    """

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        """See :meth:`~microddp.compression.compressor.Compressor.average`."""
        numbers = torch.empty(gradient.shape, dtype=torch.int8, device=gradient.device)
        scales = gradient.new_empty(_blocks(len(gradient)))
        for values, scale, number in _by_block(gradient, scales, numbers):
            torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True, out=scale)
            scale.div_(LARGEST)
            number.copy_(torch.div(values, scale).round_().nan_to_num_(0))
            # Not in one call, which may round once where the receiver rounds twice.
            values.sub_(number.to(values.dtype).mul_(scale))
        mean.zero_()
        for theirs, scaled in gather_parts([scales, numbers], comms):
            for values, scale, number in _by_block(mean, theirs.div_(comms.world_size), scaled):
                values.addcmul_(number.to(values.dtype), scale)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        """See :meth:`~microddp.compression.compressor.Compressor.sent_bytes`."""
        values = count(shapes)
        return gathered_bytes([_blocks(values) * itemsize, values], world_size)


class Sign(Compressor):
    """Sends one bit a value, its sign, and the mean magnitude of each block.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
    schemes", ICML 2019.
    """

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        """See :meth:`~microddp.compression.compressor.Compressor.average`."""
        signs = pack(gradient)
        scales = gradient.new_empty(_blocks(len(gradient)))
        sent = unpack(signs, gradient)
        for values, scale, sign in _by_block(gradient, scales, sent):
            torch.mean(values.abs(), dim=1, keepdim=True, out=scale)
            values.sub_(sign * scale)
        mean.zero_()
        for theirs, packed in gather_parts([scales, signs], comms):
            sent = unpack(packed, mean)
            for values, scale, sign in _by_block(mean, theirs.div_(comms.world_size), sent):
                values.addcmul_(sign, scale)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        """See :meth:`~microddp.compression.compressor.Compressor.sent_bytes`."""
        values = count(shapes)
        return gathered_bytes([_blocks(values) * itemsize, -(-values // 8)], world_size)


class Half(Compressor):
    """Sends 16 bits a value, which are added up on the way.

    Divided by the number of ranks before that, so that the sum of values that fit does fit. Larger
    ones are sent as the largest that fits; the rest of them stays behind.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        """See :meth:`~microddp.compression.compressor.Compressor.average`."""
        limits = torch.finfo(self.dtype)
        most = limits.max * (1 - limits.eps)  # less one step: shares may be rounded up
        wire = gradient.clamp(-most, most).div_(comms.world_size).to(self.dtype)
        gradient.add_(wire, alpha=-comms.world_size)
        ring_all_reduce(wire, comms)
        mean.copy_(wire)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:  # noqa: ARG002
        """See :meth:`~microddp.compression.compressor.Compressor.sent_bytes`."""
        return reduced_bytes(count(shapes) * self.dtype.itemsize, world_size)


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


def _by_block(
    values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views with a block in each row: of all that are whole, then of what is left."""
    whole = len(values) // BLOCK
    end = whole * BLOCK
    if whole:
        rows = (whole, BLOCK)
        yield values[:end].view(rows), scales[:whole].view(-1, 1), codes[:end].view(rows)
    if end < len(values):
        yield values[None, end:], scales[whole:].view(-1, 1), codes[None, end:]


# Eight bytes of 0 or 1, times this, have their bits side by side in the highest byte.
SIDE_BY_SIDE = 0x0102040810204080


def pack(values: torch.Tensor) -> torch.Tensor:
    """The signs of flat values, eight in a byte, the first one lowest; 1 is negative."""
    bits = values.new_zeros(-(-len(values) // 8) * 8, dtype=torch.bool)
    torch.signbit(values, out=bits[: len(values)])
    words = bits.view(torch.int64) * SIDE_BY_SIDE
    return words.view(torch.uint8)[7::8].contiguous()


def unpack(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The signs as 1 and -1, in the number and dtype of other values."""
    table = _signs(like.dtype, like.device)
    return table.index_select(0, packed.int()).view(-1)[: len(like)]


@cache
def _signs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The eight signs of each byte."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (1 - 2 * bits).to(dtype)
