"""Bytes that a rank keeps of a model while it trains, by formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """Bytes of a rank: of parameters, gradients, and what an optimizer keeps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
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
    """What a rank keeps when backward has ended, between the largest moments of a step.

    Args:
        stage: of ZeRO; 0: everything on every rank, as DDP does.
        count: of parameters that train.
        world_size: the number of ranks.
        parameter: bytes of each; 2 in half precision.
        gradient: bytes of each.
        optimizer: bytes of what it keeps of each: 8 with Adam in fp32, 12 with the fp32 copy that
            training in half precision needs.

    Example:
        >>> bytes_kept(3, 7.5e9, 64, parameter=2, gradient=2, optimizer=12).total / 1e9
        1.875

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 3.1 and figure 1.
    """
    parts = [1 / world_size if stage >= least else 1.0 for least in (3, 2, 1)]
    sizes = (parameter, gradient, optimizer)
    return Kept(*(count * size * part for size, part in zip(sizes, parts, strict=True)))
