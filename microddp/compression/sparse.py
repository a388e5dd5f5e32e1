"""A few of the values: the largest, or some that all ranks draw alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from microddp.allreduce import ring_all_reduce, ring_cost
from microddp.comms import Comms
from microddp.compression.compressor import PIECE, Compressor, count, gather_parts, gathered_bytes

SAMPLE = 1 << 15  # values from which the threshold of the largest is guessed


class Sparse(Compressor):
    """Sends ``k`` values of each bucket: a share, if ``k`` is a float, else a number of them."""

    def __init__(self, k: float) -> None:
        self.k = k

    def sent(self, values: int) -> int:
        """How many of a bucket's values are sent."""
        return min(values, max(1, math.ceil(self.k * values if type(self.k) is float else self.k)))


class TopK(Sparse):
    """Sends the values that are largest by magnitude, with their places.

    The ranks choose different places, so what they send has to be gathered: n times as much.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017.
    """

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        """See :meth:`~microddp.compression.compressor.Compressor.average`."""
        places = largest(gradient, self.sent(gradient.numel()))
        values = gradient[places]
        gradient.index_fill_(0, places, 0)
        mean.zero_()
        for theirs, there in gather_parts([values, places.int()], comms):
            mean.index_add_(0, there, theirs, alpha=1 / comms.world_size)

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        """See :meth:`~microddp.compression.compressor.Compressor.sent_bytes`."""
        values = self.sent(count(shapes))
        return gathered_bytes([values * itemsize, values * 4], world_size)


class RandomK(Sparse):
    """Sends values at places that all ranks draw alike: one of each stretch of equal length.

    The places need not be sent, and the values can be added up on the way.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
    """

    def __init__(self, k: float, seed: int = 0) -> None:
        super().__init__(k)
        # Of the CPU: those of two GPUs may draw different numbers.
        self.generator = torch.Generator().manual_seed(seed)

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        comms: Comms,
    ) -> None:
        """See :meth:`~microddp.compression.compressor.Compressor.average`."""
        places = self._draw(gradient.numel()).to(gradient.device)
        values = gradient[places]
        gradient.index_fill_(0, places, 0)
        ring_all_reduce(values, comms, "mean")
        mean.zero_().index_copy_(0, places, values)

    def _draw(self, values: int) -> torch.Tensor:
        ends = torch.linspace(0, values, self.sent(values) + 1, dtype=torch.float64).long()
        begins, lengths = ends[:-1], ends.diff()
        shares = torch.rand(len(lengths), dtype=torch.float64, generator=self.generator)
        return begins + (shares * lengths).long()

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        """See :meth:`~microddp.compression.compressor.Compressor.sent_bytes`."""
        return ring_cost(world_size, self.sent(count(shapes)) * itemsize).most_sent

    def state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:  # noqa: ARG002
        """The generator's state."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        parameters: Mapping[str, torch.Tensor],  # noqa: ARG002
    ) -> None:
        """Draw on from where another one was."""
        self.generator.set_state(state["generator"])


def largest(values: torch.Tensor, number: int) -> torch.Tensor:
    """The places of the values that are largest by magnitude, in any order.

    To sort out the few largest of many takes several times as long as to read them. So a guess is
    made, which a few more than wanted exceed, and the largest of those are the largest of all.

    Args:
        values: flat.
        number: how many.
    """
    guess = exceeded(values, number)
    if guess is not None:
        found = [(part.abs() >= guess).nonzero().view(-1) for part in torch.split(values, PIECE)]
        places = torch.cat([part + i * PIECE for i, part in enumerate(found)])
        if (
            len(places) >= number
        ):  # else the guess is wrong, or there are values that are not finite
            return places[values[places].abs().topk(number, sorted=False).indices]
    return values.abs().topk(number, sorted=False).indices


def exceeded(values: torch.Tensor, number: int) -> torch.Tensor | None:
    """A magnitude that a few more values than ``number`` reach, guessed from some of them.

    Nothing, if most would.
    """
    # Of an odd stride: the rows of matrices are even, and an even one would see few columns.
    sample = values[:: len(values) // SAMPLE | 1].abs()
    expected = number / len(values) * len(sample)
    rank = math.ceil(expected + 4 * math.sqrt(expected)) + 4  # too few by less than one in 10,000
    return sample.topk(rank, sorted=False).values.min() if 2 * rank < len(sample) else None
