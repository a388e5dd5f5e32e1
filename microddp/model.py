"""The models the book trains."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import max_pool2d

GROUPS = 8  # of channels, where their number divides


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
        layers = [nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape ``(batch, inputs)`` to ``(batch, outputs)``."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        result: torch.Tensor = self.layers[-1](x)
        return result


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a :class:`SimpleCNN`. As it stands it fits the 8 x 8 grey digits.

    Attributes:
        channels: of each convolution's output, one block for each.
        hidden: width of the linear layer before the output.
        inputs: channels of an image: 1 grey, 3 colour.
        size: height and width of an image, pixels.
        classes: values predicted for an image.
        norm: ``"batch"`` normalises over the images of this rank's batch, and keeps running means
            as buffers. ``"group"`` normalises each image by itself, over groups of channels: then
            n ranks with a shard each compute what one rank computes on the whole batch.

    Raises:
        ValueError: no block, a number below one, or another norm.
    """

    channels: tuple[int, ...] = (32, 64, 128)
    hidden: int = 512
    inputs: int = 1
    size: int = 8
    classes: int = 10
    norm: str = "batch"

    def __post_init__(self) -> None:
        sizes = (*self.channels, self.hidden, self.inputs, self.size, self.classes)
        if not self.channels or min(sizes) < 1:
            raise ValueError(f"expected at least one channel and sizes of at least 1, got {self}")
        if self.norm not in ("batch", "group"):
            raise ValueError(f"expected norm 'batch' or 'group', got {self.norm!r}")


class SimpleCNN(nn.Module):
    """A small image classifier: convolutions, then a hidden linear layer, then the output.

    A block is a 3 x 3 convolution, normalisation, ReLU, and pooling, which halves the image until a
    single pixel is left; further blocks keep it. Batch normalisation gives the model buffers, which
    data-parallel training has to decide about, and makes a sample's output depend on its
    neighbours in the batch; group normalisation (Wu and He, 2018) does neither.

    Args:
        config: the shape.
    """

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        widths = [config.inputs, *config.channels]
        self.convolutions = nn.ModuleList(
            # The normalisation that follows would take a bias away again.
            nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
            for before, after in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(channels)
            if config.norm == "batch"
            else nn.GroupNorm(math.gcd(channels, GROUPS), channels)
            for channels in config.channels
        )
        pixels = max(1, config.size >> len(config.channels)) ** 2
        self.hidden = nn.Linear(config.channels[-1] * pixels, config.hidden)
        self.output = nn.Linear(config.hidden, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images to logits.

        Args:
            images: shape ``(batch, inputs, size, size)``, or with all pixels of an image in one
                row, ``(batch, inputs * size * size)``, as the digits come.

        Returns:
            Shape ``(batch, classes)``.
        """
        size = self.config.size
        x = images.reshape(len(images), self.config.inputs, size, size)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
            if x.shape[-1] > 1:
                x = max_pool2d(x, kernel_size=2)
        result: torch.Tensor = self.output(torch.relu(self.hidden(x.flatten(1))))
        return result


def parameter_count(module: nn.Module) -> int:
    """The number of trainable values in a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def gradient_bytes(module: nn.Module) -> int:
    """The bytes an all-reduce of all gradients has to average: the S of the cost models."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)
