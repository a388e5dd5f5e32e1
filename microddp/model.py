"""The models the book trains."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class FullMLP(nn.Module):
    """A deep, narrow network: ``depth`` linear layers with ReLU between them.

    Plain on purpose. Every layer's gradient is ready at its own time, which is what the later
    chapters are about.

    Args:
        dim: width of the hidden layers; also of the input and the output unless given.
        depth: number of ``Linear`` layers, at least 2.
        inputs: features of a sample.
        outputs: values predicted for a sample.

    Raises:
        ValueError: fewer than two layers, or a width below one.

    The weights start as He et al. propose for ReLU ("Delving Deep into Rectifiers", 2015), without
    which the signal of 16 layers would vanish.
    """

    def __init__(
        self, dim: int, depth: int = 16, *, inputs: int | None = None, outputs: int | None = None
    ) -> None:
        super().__init__()
        widths = [
            dim if inputs is None else inputs,
            *[dim] * (depth - 1),
            dim if outputs is None else outputs,
        ]
        if depth < 2 or min(widths) < 1:
            raise ValueError(f"expected at least 2 layers of width 1, got widths {widths}")
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(widths)
        )
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape ``(batch, inputs)`` to ``(batch, outputs)``."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        result: torch.Tensor = self.layers[-1](x)
        return result


def parameter_count(module: nn.Module) -> int:
    """The number of trainable values in a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def gradient_bytes(module: nn.Module) -> int:
    """The bytes an all-reduce of all gradients has to average: the S of the cost models."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)
