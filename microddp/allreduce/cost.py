"""The cost of a collective: messages, bytes, and seconds by the alpha-beta model.

Whatever in the package predicts communication counts it here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveCost:
    """Messages and bytes of a collective, counted, and its time by the alpha-beta model.

    Attributes:
        rounds: number of messages that must follow one another.
        round_bytes: bytes of each of those messages.
        messages: number of messages of all ranks together.
        most_sent: bytes sent by the rank that sends most.
    """

    rounds: int
    round_bytes: float
    messages: int
    most_sent: float

    def seconds(self, alpha: float, beta: float) -> float:
        """Predict the time: each round costs ``alpha`` seconds and ``beta`` seconds a byte."""
        return self.rounds * (alpha + beta * self.round_bytes)


def ring_cost(world_size: int, nbytes: float, passes: int = 2) -> CollectiveCost:
    """Count what passes around a ring cost, in each of which a rank sends all chunks but one.

    Each chunk counts as one message; large chunks travel as several pieces.

    Args:
        world_size: number of ranks n, at least 1, each with one full-duplex link.
        nbytes: size S of the whole tensor in bytes.
        passes: 1 for a reduce-scatter or an all-gather, 2 for an all-reduce, which is both.

    Raises:
        ValueError: fewer than one rank.

    Example:
        >>> ring_cost(4, 1200).most_sent
        1800.0

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005, section 4.
    """
    n = world_size
    if n < 1:
        raise ValueError(f"expected at least one rank, got {n}")
    rounds = passes * (n - 1)
    return CollectiveCost(rounds, nbytes / n, rounds * n, rounds * nbytes / n)


def all_reduce_cost(algorithm: str, world_size: int, nbytes: float) -> CollectiveCost:
    """Count what reducing ``nbytes`` over ``world_size`` ranks costs.

    Args:
        algorithm: ``"naive"``, ``"direct"``, ``"ring"`` or ``"doubling"``.
        world_size: number of ranks n, at least 1, each with one full-duplex link.
        nbytes: size S of the tensor in bytes.

    Raises:
        ValueError: an unknown algorithm, or fewer than one rank.

    Source: as for :func:`ring_cost`, section 3 (the model) and 4 (the algorithms).
    """
    n, size = world_size, float(nbytes)
    ring = ring_cost(n, size)
    match algorithm:
        case "naive":
            return CollectiveCost(2 * (n - 1), size, 2 * (n - 1), size * (n - 1))
        case "direct":
            return CollectiveCost(n - 1, size, n * (n - 1), size * (n - 1))
        case "ring":
            return ring
        case "doubling":
            doublings = int(math.log2(n))
            power = 2**doublings
            extra = n - power
            rounds = doublings + (2 if extra else 0)
            # The busiest rank also returns the result to the rank that has no partner.
            sent = size * (doublings + (1 if extra else 0))
            return CollectiveCost(rounds, size, power * doublings + 2 * extra, sent)
    raise ValueError(f"expected 'naive', 'direct', 'ring' or 'doubling', got {algorithm!r}")
