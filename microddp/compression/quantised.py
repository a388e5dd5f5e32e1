"""Quantised gradients: all values are sent, each with fewer bits."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar

import torch

from microddp.allreduce import ring_all_reduce, ring_cost
from microddp.comms import Comms
from microddp.compression.compressor import (
    PIECE,
    Compressor,
    count,
    exchange_parts,
    gather_parts,
    gathered_bytes,
)

BLOCK = 1024  # values that share a scale, whose 4 bytes add a 32nd of a bit to each value
LARGEST = 127  # code in eight bits with a sign


class Blockwise(Compressor):
    """Sends a scale for each block of values, and each value as a multiple of it in a few bits.

    The ranks' scales differ, so messages cannot be added up on the way. They travel in two phases:
    each rank is sent its part of all gradients, adds it up, rounds the mean once more, and sends it
    to all. A rank sends twice (n-1)/n of the compressed bytes, however many ranks there are.

    What the second rounding leaves out goes into the residual of the part's owner, n times, since
    a rank is one n-th of the mean: so the mean of the ranks' residuals is still all that is left.

    Attributes:
        code: dtype of the codes that are sent beside the scales.
        values_a_code: how many values one code has.
    """

    code: ClassVar[torch.dtype]
    values_a_code: ClassVar[int] = 1

    @abstractmethod
    def encode(self, values: torch.Tensor, scale: torch.Tensor, code: torch.Tensor) -> None:
        """Compute scales and codes.

        Args:
            values: shape ``(blocks, values of a block)``.
            scale: shape ``(blocks, 1)``; is overwritten.
            code: of the shape of ``values``, or flat if a code has several values; is overwritten.
        """

    @abstractmethod
    def decode(self, code: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Turn codes into multiples of the scale, in the shape and dtype of ``like``."""

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        n, rank = comms.world_size, comms.rank
        length = _part(len(gradient), n)
        codes = torch.zeros(n, length // self.values_a_code, dtype=self.code, device=mean.device)
        scales = gradient.new_zeros(n, _blocks(length))
        for part, scale, code in zip(torch.split(gradient, length), scales, codes, strict=False):
            self._round(part, scale, code)

        own = slice(rank * length, (rank + 1) * length)
        mine = mean[own].zero_()
        for scale, code in exchange_parts([scales, codes], comms):
            self._add(mine, scale.div_(n), code)
        self._round(mine, scales[rank], codes[rank])
        gradient[own].add_(mine, alpha=n)

        gathered = gather_parts([scales[rank], codes[rank]], comms)
        for part, (scale, code) in zip(torch.split(mean.zero_(), length), gathered, strict=False):
            self._add(part, scale, code)

    def _round(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """Compute flat scales and codes of flat values, which become what these leave out."""
        for block, scale, code in _by_block(values, scales, codes, self.values_a_code):
            self.encode(block, scale, code)
            # Not in one fused call, which may round once where the receiver rounds twice.
            block.sub_(self.decode(code, block) * scale)

    def _add(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        for block, scale, code in _by_block(values, scales, codes, self.values_a_code):
            block.addcmul_(self.decode(code, block), scale)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        length = _part(count(shapes), world_size)
        codes = length // self.values_a_code * self.code.itemsize
        return 2 * gathered_bytes([_blocks(length) * itemsize, codes], world_size)


class Int8(Blockwise):
    """Sends eight bits a value: a whole number from -127 to 127, times its block's scale.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016.
    """

    code = torch.int8

    def encode(self, values: torch.Tensor, scale: torch.Tensor, code: torch.Tensor) -> None:
        torch.amax(values.abs(), dim=1, keepdim=True, out=scale).div_(LARGEST)
        codes = torch.div(values, scale).round_().nan_to_num_(0)
        code.copy_(codes.clamp_(-LARGEST, LARGEST))  # the scale may have been rounded down

    def decode(self, code: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return code.to(like.dtype)


class Sign(Blockwise):
    """Sends one bit a value, its sign, and the mean magnitude of each block.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
    schemes", ICML 2019.
    """

    code = torch.uint8
    values_a_code = 8

    def encode(self, values: torch.Tensor, scale: torch.Tensor, code: torch.Tensor) -> None:
        torch.mean(values.abs(), dim=1, keepdim=True, out=scale)
        code.copy_(pack(values.view(-1)))

    def decode(self, code: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return unpack(code, like)


class Half(Compressor):
    """Sends 16 bits a value, which are summed on the way.

    Values are divided by the number of ranks first, so that the sum of representable values is
    representable. Larger values are clamped, and the rest stays in the residual.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
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
        limits = torch.finfo(self.dtype)
        most = limits.max * (1 - limits.eps)  # one step less: the quotients may be rounded up
        most = min(most, torch.finfo(gradient.dtype).max)
        wire = torch.empty_like(gradient, dtype=self.dtype)
        for values, part in zip(
            torch.split(gradient, PIECE), torch.split(wire, PIECE), strict=True
        ):
            part.copy_(values.clamp(-most, most).div_(comms.world_size))
            values.sub_(part.to(values.dtype), alpha=comms.world_size)
        ring_all_reduce(wire, comms)
        mean.copy_(wire)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:  # noqa: ARG002
        return ring_cost(world_size, count(shapes) * self.dtype.itemsize).most_sent


def _part(values: int, world_size: int) -> int:
    """Count the values of each rank's part: whole bytes, also of signs."""
    return max(1, -(-values // (8 * world_size))) * 8


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


def _by_block(
    values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, values_a_code: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield views of values, scales and codes, a piece of ``PIECE`` values at a time.

    Values have one block in each row, and scales shape ``(blocks, 1)``. An incomplete last block is
    a piece of its own. Codes have the shape of the values, or are flat if one has several values.
    """
    whole = len(values) // BLOCK * BLOCK
    bounds = [*range(0, whole, PIECE), whole, len(values)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            rows = -1 if begin < whole else 1
            piece = values[begin:end].view(rows, min(BLOCK, end - begin))
            scale = scales[begin // BLOCK : _blocks(end), None]
            code = codes[begin // values_a_code : -(-end // values_a_code)]
            yield piece, scale, code.view_as(piece) if values_a_code == 1 else code


# Eight bytes of 0 or 1, as one word times this, have their bits in the highest byte.
GATHER_BITS = 0x0102040810204080


def pack(values: torch.Tensor) -> torch.Tensor:
    """Pack the signs of flat values, eight in a byte, the first one lowest; 1 is negative."""
    bits = values.new_zeros(-(-len(values) // 8) * 8, dtype=torch.bool)
    torch.signbit(values, out=bits[: len(values)])
    words = bits.view(torch.int64) * GATHER_BITS
    return words.view(torch.uint8)[7::8].contiguous()


def unpack(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Unpack signs as 1 and -1, in the shape and dtype of ``like``."""
    table = _signs(like.dtype, like.device)
    return table.index_select(0, packed.int()).view(-1)[: like.numel()].view(like.shape)


@cache
def _signs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Tabulate the eight signs of each byte: shape ``(256, 8)``."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (1 - 2 * bits).to(dtype)
