"""Deferred initialisation: modules that were made without memory, on PyTorch's ``meta`` device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from microddp.comms import Comms

Initialise = Callable[[nn.Module], object]


def materialise(
    modules: Sequence[nn.Module], comms: Comms, initialise: Initialise | None = None
) -> list[Callable[[], object]]:
    """Give what is on the ``meta`` device memory. What modules share stays shared.

    Args:
        modules: whose own parameters and buffers are meant, not those of modules in them.
        comms: the ranks, for their device.
        initialise: called with each module that has something there; default: its own
            ``reset_parameters()``.

    Returns:
        What is to be called to give it values.

    Raises:
        ValueError: a module cannot initialise itself.
    """
    calls: list[Callable[[], object]] = []
    for m in modules:
        if not any(t.is_meta for t in own_tensors(m)):
            continue
        how = initialise or getattr(type(m), "reset_parameters", None)
        if how is None:
            raise ValueError(
                f"rank {comms.rank}: expected initialise, since a {type(m).__name__} on the meta "
                "device has no reset_parameters(), got None"
            )
        calls.append(torch.no_grad()(partial(how, m)))
        for places in (m._parameters, m._buffers):
            for name, tensor in places.items():
                if tensor is not None and tensor.is_meta:
                    if "_microddp_made" not in tensor.__dict__:  # by another call
                        tensor.__dict__["_microddp_made"] = _like(tensor, comms.device)
                    places[name] = tensor.__dict__["_microddp_made"]
    return calls


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """A module's own parameters and buffers."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(tensor, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
