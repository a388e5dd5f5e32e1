"""Sparse gradients: send the largest values, or random ones that all ranks draw alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from microddp.allreduce import ring_all_reduce, ring_cost
from microddp.comms import Comms
from microddp.compression.compressor import PIECE, Compressor, count, gather_parts, gathered_bytes

SAMPLE = 1 << 15  # values from which the threshold of the largest ones is estimated


class Sparse(Compressor):
    """Sends some values of each bucket.

    Args:
        k: a fraction of the values if it is a ``float``, else a number of values.
    """

    def __init__(self, k: float) -> None:
        self.k = k

    def sent(self, values: int) -> int:
        """Count how many of a bucket's values are sent."""
        share = isinstance(self.k, float)
        # A little less, as 0.07 * 100 is above 7 by rounding.
        kept = self.k * values * (1 - 1e-12) if share else self.k
        return min(values, max(1, math.ceil(kept)))


class TopK(Sparse):
    """Sends the values of largest magnitude, with their indices.

    The ranks choose different indices, so their messages have to be all-gathered: n times as much.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017.
    """

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        indices = largest(gradient, self.sent(gradient.numel()))
        values = gradient[indices]
        gradient.index_fill_(0, indices, 0)
        mean.zero_()
        for theirs, where in gather_parts([values, indices.int()], comms):
            mean.index_add_(0, where, theirs, alpha=1 / comms.world_size)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        values = self.sent(count(shapes))
        return gathered_bytes([values * itemsize, values * 4], world_size)


class RandomK(Sparse):
    """Sends values at random indices, the same on all ranks: one of each stretch of equal length.

    The indices need not be sent, and the values can be summed on the way.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
    """

    def __init__(self, k: float) -> None:
        super().__init__(k)
        # The same on all ranks, and on the CPU: two GPUs' may draw different numbers.
        self.generator = torch.Generator().manual_seed(0)

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        indices = self._draw(gradient.numel()).to(gradient.device)
        values = gradient[indices]
        gradient.index_fill_(0, indices, 0)
        ring_all_reduce(values, comms, "mean")
        mean.zero_().index_copy_(0, indices, values)

    def _draw(self, values: int) -> torch.Tensor:
        ends = torch.linspace(0, values, self.sent(values) + 1, dtype=torch.float64).long()
        begins, lengths = ends[:-1], ends.diff()
        shares = torch.rand(len(lengths), dtype=torch.float64, generator=self.generator)
        return begins + (shares * lengths).long()

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        return ring_cost(world_size, self.sent(count(shapes)) * itemsize).most_sent

    def state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:  # noqa: ARG002
        """Return the state of the generator."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        parameters: Mapping[str, torch.Tensor],  # noqa: ARG002
    ) -> None:
        """Load the generator of another compressor."""
        self.generator.set_state(state["generator"])


def largest(values: torch.Tensor, number: int) -> torch.Tensor:
    """Find the values of largest magnitude in a flat tensor: their indices, in any order.

    Selecting the few largest of many values takes several times as long as reading them. So a
    threshold is estimated that a few more values than wanted exceed, and only these are sorted.
    """
    threshold = threshold_of(values, number)
    if threshold is not None:
        found = [
            (part.abs() >= threshold).nonzero().view(-1) for part in torch.split(values, PIECE)
        ]
        indices = torch.cat([part + i * PIECE for i, part in enumerate(found)])
        # Else the estimate is wrong, or there are values that are not finite.
        if len(indices) >= number:
            return indices[values[indices].abs().topk(number, sorted=False).indices]
    return values.abs().topk(number, sorted=False).indices


def threshold_of(values: torch.Tensor, number: int) -> torch.Tensor | None:
    """Estimate a magnitude that a few more values than ``number`` reach; ``None``: most do."""
    # An odd stride: rows of matrices have even lengths, and an even stride would see few columns.
    sample = values[:: len(values) // SAMPLE | 1].abs()
    expected = number / len(values) * len(sample)
    rank = math.ceil(expected + 4 * math.sqrt(expected)) + 4  # too few in less than 1 of 10,000
    return sample.topk(rank, sorted=False).values.min() if 2 * rank < len(sample) else None
