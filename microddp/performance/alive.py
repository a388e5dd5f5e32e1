"""Memory of the tensors in a process."""

from __future__ import annotations

import gc
from typing import Any

import torch

from microddp.shared import on_thread


def bytes_alive() -> int:
    """Add up the bytes of all tensors in this process, except those that an autograd graph made.

    It counts parameters, gradients, an optimizer's state, and flat tensors with any of these, but
    no activations. A tensor without its storage counts as zero bytes.
    """
    # Imported here: it takes half a second to load, and training does not need it.
    from torch.distributed.tensor import DTensor

    # Wait until the thread of the lane "all-reduce" is idle: Python's list of objects must not be
    # read while it makes new ones. HSDP's other lane is not waited for.
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
