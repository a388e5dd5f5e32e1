"""Data sets: digits, MNIST, a text, and a linear map that is known."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset


class SyntheticDataset(TensorDataset):
    """Samples of a known linear map: Y = X w* + noise.

    Made on the device, so that timing it times no disk and no copy; the same on every rank that
    passes the same seed and device type.

    Args:
        samples: number of rows.
        inputs: columns of X.
        outputs: columns of Y.
        noise: standard deviation of the noise.
        seed: of the generator that makes all of it.
        device: where the tensors live.

    Attributes:
        true_weight: w*, of shape ``(inputs, outputs)``.
    """

    def __init__(
        self,
        samples: int,
        inputs: int,
        outputs: int,
        *,
        noise: float = 0.1,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x = normal(samples, inputs)
        self.true_weight = normal(inputs, outputs) / inputs**0.5
        super().__init__(x, x @ self.true_weight + noise * normal(samples, outputs))


@dataclass(frozen=True)
class Split:
    """A data set, split for training and testing.

    Attributes:
        train: pairs of an input and its target.
        test: more pairs.
    """

    train: TensorDataset
    test: TensorDataset


def load_digits(device: torch.device | str = "cpu") -> Split:
    """Load handwritten digits that come with microddp: real images, no download.

    1437 images to train on and 360 to test, each of 8 x 8 pixels in one row of floats in [0, 1],
    with a class from 0 to 9.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI machine
    learning repository, 1998, https://doi.org/10.24432/C50P49: its test set, 1797 images, here as
    ``digits.csv.gz``. Licence: CC BY 4.0, https://creativecommons.org/licenses/by/4.0/.
    """
    file = Path(__file__).with_name("digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    # Every fifth of each digit is kept for testing.
    tested = torch.zeros(len(table), dtype=torch.bool)
    tested[table[:, -1].argsort(stable=True)[::5]] = True
    parts = []
    for rows in (table[~tested], table[tested]):
        images = rows[:, :-1] / 16  # intensities are integers up to 16
        parts.append(TensorDataset(images.to(device), rows[:, -1].long().to(device)))
    return Split(*parts)


def load_mnist(device: torch.device | str = "cpu") -> Split:
    """MNIST, through torchvision, which downloads it once, to ``microddp`` in torch.hub's folder.

    60000 images and 10000, each of 28 x 28 pixels, as those of :func:`load_digits`.

    Raises:
        RuntimeError: torchvision is not installed, or cannot reach the data.

    Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    instead = "; handwritten digits need no download: --data digits"
    try:
        mnist = importlib.import_module("torchvision.datasets").MNIST  # no dependency of ours
    except ImportError as error:
        raise RuntimeError(f"MNIST needs torchvision (pip install torchvision){instead}") from error
    folder = Path(torch.hub.get_dir(), "microddp")
    parts = []
    for train in (True, False):
        try:
            images = mnist(folder, train=train, download=True)
        except (OSError, RuntimeError) as error:  # no network, no room, or a damaged file
            raise RuntimeError(f"cannot fetch MNIST into {folder} ({error}){instead}") from error
        pixels = images.data.to(device).flatten(1) / 255
        parts.append(TensorDataset(pixels, images.targets.to(device)))
    return Split(*parts)


CHARACTERS = 128  # ASCII's


def load_text(length: int, device: torch.device | str = "cpu") -> Split:
    """The help that comes with Python, about half a million characters: real text, no download.

    An input is a sequence of characters, below ``CHARACTERS``; its target is the same, one
    character later. What ASCII lacks becomes a question mark. The last tenth is to test. Each
    version of Python has its own text.

    Args:
        length: characters of a sequence.
        device: where the tensors live.

    Source: "The Python Language Reference", as ``pydoc_data.topics``.
    """
    text = "\n\n".join(importlib.import_module("pydoc_data.topics").topics.values())
    tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
    count = (len(tokens) - 1) // length
    windows = (tokens[i:][: count * length].view(count, length).long() for i in (0, 1))
    parts = [count - count // 10, count // 10]
    inputs, targets = (torch.split(each.to(device), parts) for each in windows)
    return Split(*map(TensorDataset, inputs, targets))
