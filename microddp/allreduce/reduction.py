"""The reduction itself: two ranks' values become one, where the operation has a meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from microddp.comms import Comms

# How the values of two ranks become one: COMBINE[op](first, second, out=result).
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@contextmanager
def flattened(
    tensor: torch.Tensor, comms: Comms, op: str
) -> Iterator[tuple[torch.Tensor, Callable[..., torch.Tensor]]]:
    """The tensor as one contiguous dimension, and how to combine; a copy only if it must be."""
    if error := cannot_combine(op, tensor.dtype):
        raise ValueError(f"rank {comms.rank}: {error}")
    with torch.no_grad():
        flat = tensor.contiguous().resolve_conj().resolve_neg().view(-1)
        if op == "mean":
            # Before adding: the sum of n gradients may overflow where their mean does not.
            flat.div_(comms.world_size)
        yield flat, COMBINE[op]
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


@cache
def cannot_combine(op: str, dtype: torch.dtype) -> str | None:
    """Why the values of two ranks cannot become one, said before anything is sent."""
    if op not in COMBINE:
        return f"expected op in {list(COMBINE)}, got {op!r}"
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the mean needs a floating point tensor, got {dtype}"
    try:  # no order for complex numbers, no sum of float8
        one = torch.empty(1, dtype=dtype)
        COMBINE[op](one, one, out=one)
    except (RuntimeError, TypeError) as error:  # the latter since torch 2.15
        return f"no {op} of {dtype}: {error}"
    return None
