"""Division of data between ranks: a batch into shards, an epoch into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import TensorDataset


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
        batch_size: samples of a *global* batch, a multiple of ``world_size`` without ``sizes``.
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
