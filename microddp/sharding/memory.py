"""Bytes that a rank keeps of a model while it trains: predicted, and those of tensors alive."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from microddp.allreduce import on_thread


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


def bytes_alive() -> int:
    """Bytes of all tensors that this process can reach and that no graph made.

    Parameters, gradients, what an optimizer keeps, and flat tensors of all those; activations are
    left out. A tensor that was freed and still has a shape counts nothing.
    """
    # Only now: it takes half a second to load, and training does without.
    from torch.distributed.tensor import DTensor

    # While the thread that carries tensors has nothing to do: Python's own objects must not be
    # looked at while it makes them.
    on_thread(lambda _: None, torch.empty(0)).wait()
    storages: dict[Any, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), DTensor):
            tensors = [thing] if thing.grad_fn is None else []
            tensors += [thing.grad] if thing.is_leaf and thing.grad is not None else []
            for tensor in tensors:
                if issubclass(type(tensor), DTensor):
                    tensor = tensor.to_local()
                if tensor.device.type != "meta":
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
