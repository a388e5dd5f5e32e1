"""Data sets, and how the ranks divide them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
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


def load_mnist(device: torch.device | str = "cpu", folder: Path | None = None) -> Split:
    """MNIST, through torchvision, which downloads it once.

    60000 images and 10000, each of 28 x 28 pixels, as those of :func:`load_digits`.

    Args:
        device: where the tensors live.
        folder: where torchvision keeps it; by default ``microddp`` in torch.hub's folder.

    Raises:
        RuntimeError: torchvision is not installed, or cannot reach the data.

    Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    instead = "; handwritten digits need no download: --data digits"
    try:
        mnist = importlib.import_module("torchvision.datasets").MNIST  # no dependency of ours
    except ImportError as error:
        raise RuntimeError(f"MNIST needs torchvision (pip install torchvision){instead}") from error
    folder = folder or Path(torch.hub.get_dir(), "microddp")
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
    inputs, targets = (tokens[i:][: count * length].view(count, length).long() for i in (0, 1))
    tested = count // 10
    return Split(
        *(
            TensorDataset(inputs[part].to(device), targets[part].to(device))
            for part in (slice(count - tested), slice(count - tested, None))
        )
    )


def shard(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Rank ``rank``'s rows of a batch: a view; the first ranks get one more if it is uneven.

    Raises:
        ValueError: ``rank`` is not below ``world_size``, or the tensor has no rows to split.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"expected 0 <= rank < {world_size}, got {rank}")
    if tensor.dim() == 0:
        raise ValueError(f"rank {rank}: expected a tensor with rows, got one without dimensions")
    return tensor.tensor_split(world_size)[rank]


def shard_sizes(rows: int, world_size: int) -> list[int]:
    """Number of rows that :func:`shard` gives each rank."""
    return [rows // world_size + (rank < rows % world_size) for rank in range(world_size)]


def epoch_order(samples: int, epoch: int, seed: int = 0) -> torch.Tensor:
    """A permutation of ``range(samples)`` that every rank can compute for itself.

    It depends on nothing but its arguments, not on how often a generator was used before: the
    ranks must agree on it, and no two epochs should share it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(samples, generator=generator)


class ShardedBatches:
    """This rank's share of each global batch.

    All ranks together see the batches that one rank alone would see, in the same order, so the
    number of ranks does not change what is learned. The last samples of an epoch that do not fill
    a batch are left out; the next epoch has another order.

    Args:
        dataset: tensors with one row for each sample.
        batch_size: samples of a *global* batch, a multiple of ``world_size``.
        rank: this rank.
        world_size: the number of ranks.
        seed: of the order, the same on every rank.
        sizes: samples of a batch for each rank, in rank order, where shares are not to be equal.

    Attributes:
        share: samples that a rank would have if shares were equal, what
            :func:`microddp.step.take_step` needs to know where they are not.

    Raises:
        ValueError: the batch does not divide, or is larger than the data set; or the sizes are not
            one from 1 on for each rank that together are the batch.

    Example:
        >>> batches = ShardedBatches(load_digits().train, 96, comms.rank, comms.world_size)
        >>> for epoch in range(3):
        ...     for x, y in batches.epoch(epoch):
        ...         ...
    """

    def __init__(
        self,
        dataset: TensorDataset,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        *,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if sizes is None and batch_size % world_size:
            raise ValueError(
                f"rank {rank}: expected a global batch size that is a multiple of {world_size} "
                f"ranks, got {batch_size}"
            )
        if not 0 < batch_size <= len(dataset):
            raise ValueError(
                f"rank {rank}: expected a batch size in 1..{len(dataset)}, got {batch_size}"
            )
        self.sizes = [batch_size // world_size] * world_size if sizes is None else list(sizes)
        if len(self.sizes) != world_size or min(self.sizes) < 1 or sum(self.sizes) != batch_size:
            raise ValueError(
                f"rank {rank}: expected {world_size} sizes from 1 on that sum up to {batch_size}, "
                f"got {self.sizes}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.share = batch_size / world_size

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self.dataset) // self.batch_size

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
        """The shards of one epoch's batches. Forgetting to say which epoch is not possible.

        Args:
            epoch: its number, from 0.
            start: how many batches to leave out, since they were trained on before.
        """
        order = epoch_order(len(self.dataset), epoch, self.seed)
        first = sum(self.sizes[: self.rank])
        for i in range(start, len(self)):
            rows = order[i * self.batch_size : (i + 1) * self.batch_size]
            mine = rows[first : first + self.sizes[self.rank]]
            yield tuple(tensor[mine.to(tensor.device)] for tensor in self.dataset.tensors)
