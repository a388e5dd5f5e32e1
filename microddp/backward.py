"""Small things for whatever takes part in a backward pass by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class Switchable:
    """Hooks that can be told to leave gradients alone.

    Attributes:
        armed: whether a backward averages.
    """

    armed = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each backward of the block add to this rank's own gradients, and send nothing.

        The first backward after the block averages what has accumulated.
        """
        before, self.armed = self.armed, False
        try:
            yield
        finally:
            self.armed = before


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a forward pass returned, also in fields of dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))


def bytes_held(gradient: torch.Tensor) -> int:
    """Bytes of a gradient's values; where it holds but a few rows, of those and their numbers."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes
