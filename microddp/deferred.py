"""Deferred initialisation: allocate modules that were made on PyTorch's ``meta`` device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from microddp.comms import Comms


def materialise(modules: Sequence[nn.Module], comms: Comms) -> list[Callable[[], object]]:
    """Allocate parameters and buffers that are on the ``meta`` device, on this rank's device.

    A tensor that several modules share stays shared. A collective.

    Args:
        modules: modules whose own parameters and buffers are allocated, not their children's.
        comms: the ranks.

    Returns:
        The ``reset_parameters()`` of each module that had something on ``meta``.

    Raises:
        ValueError: on every rank: a module has no ``reset_parameters()``.
    """
    waiting: list[Any] = [m for m in modules if any(t.is_meta for t in own_tensors(m))]
    lacking = [type(m).__name__ for m in waiting if not hasattr(m, "reset_parameters")]
    comms.fail_together(
        f"a {lacking[0]} on the meta device" if lacking else "",
        "modules with reset_parameters()",
        ValueError,
    )
    for m in waiting:
        for places in (m._parameters, m._buffers):
            for name, tensor in places.items():
                if tensor is not None and tensor.is_meta:
                    if "_microddp_made" not in tensor.__dict__:  # else by another call
                        tensor.__dict__["_microddp_made"] = _like(tensor, comms.device)
                    places[name] = tensor.__dict__["_microddp_made"]
    return [torch.no_grad()(m.reset_parameters) for m in waiting]


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's own parameters and buffers, not its children's."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(tensor, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
