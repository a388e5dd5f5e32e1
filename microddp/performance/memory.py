"""Bytes that a rank keeps of a model and of its activations while it trains, by formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """Bytes that a rank keeps of parameters, gradients, and the optimizer's state."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all three together."""
        return self.parameters + self.gradients + self.optimizer


def bytes_kept(
    stage: int,
    count: float,
    world_size: int,
    *,
    parameter: float = 4,
    gradient: float = 4,
    optimizer: float = 8,
) -> Kept:
    """Compute the bytes that a rank keeps when backward has ended.

    Args:
        stage: stage of ZeRO; 0 keeps everything on every rank, as DDP does.
        count: number of parameters that train.
        world_size: number of ranks.
        parameter: bytes of each parameter; 2 in half precision.
        gradient: bytes of each gradient.
        optimizer: bytes of the optimizer's state for each parameter: 8 with Adam in fp32, 12 with
            the fp32 copy that training in half precision needs.

    Example:
        >>> bytes_kept(3, 7.5e9, 64, parameter=2, gradient=2, optimizer=12).total / 1e9
        1.875

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 3.1 and figure 1.
    """
    parts = [1 / world_size if stage >= least else 1.0 for least in (3, 2, 1)]
    sizes = (parameter, gradient, optimizer)
    return Kept(*(count * size * part for size, part in zip(sizes, parts, strict=True)))


def activation_bytes(
    tokens: float, blocks: int, block: float, *, entry: float | None = None, value_size: float = 2
) -> float:
    """Compute the most bytes that backward of a stack of equal blocks has to keep of activations.

    Args:
        tokens: tokens of a device and micro-batch.
        blocks: number of blocks.
        block: values that autograd saves of each token in a block.
        entry: with recomputation (activation checkpointing), values of each token at the entry of
            a block. Those stay, and the rest of one block at a time. Default: all stay.
        value_size: bytes of a value; 2 in half precision.

    Example:
        >>> activation_bytes(16_384, 32, 8 * 4096 + 4 * 14_336) / 2**30
        88.0

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.
    """
    kept = blocks * block if entry is None else (blocks - 1) * entry + block
    return tokens * kept * value_size
