"""Bytes of the tensors that a process has."""

from __future__ import annotations

import gc
from typing import Any

import torch

from microddp.shared import on_thread


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
