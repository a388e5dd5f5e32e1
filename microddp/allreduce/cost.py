"""The cost of a collective: messages, bytes, and seconds by the alpha-beta model.

Whatever in the package predicts communication counts it here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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


def estimate_communication_time(
    nbytes: float, world_size: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Estimate the seconds of a ring all-reduce by the alpha-beta model.

    Args:
        nbytes: size of the tensor in bytes.
        world_size: number of ranks, each with one full-duplex link.
        bandwidth: bytes a second of a link, in each direction.
        latency: seconds to start a message.

    Raises:
        ValueError: a bandwidth that is not positive, or fewer than one rank.

    Example:
        >>> estimate_communication_time(4e9, world_size=4, bandwidth=1e9)
        6.0
    """
    if bandwidth <= 0:
        raise ValueError(f"expected a bandwidth above 0 bytes a second, got {bandwidth}")
    return ring_cost(world_size, nbytes).seconds(latency, 1 / bandwidth)


def bus_bandwidth(nbytes: float, seconds: float, world_size: int) -> float:
    """Compute an all-reduce's bus bandwidth in bytes a second: S/t x 2 (n-1)/n, as nccl-tests does.

    It is the bandwidth each link must have carried, so it can be compared with the hardware's and
    between numbers of ranks. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return ring_cost(world_size, nbytes).most_sent / seconds


SMALL = 1 << 14  # bytes; the time of a message of this size is nearly all alpha


def fit_alpha_beta(
    sizes: Sequence[float], seconds: Sequence[float], beta: float | None = None
) -> tuple[float, float]:
    """Fit the start-up time and the time per byte to measured message times.

    The fit minimises the *relative* error of ``alpha + beta * size``, so that the small messages,
    which say most about alpha, count as much as the large ones. Neither is let below zero.

    Args:
        sizes: bytes of each message, at least two different sizes.
        seconds: time of each message.
        beta: seconds a byte, if known. Then alpha is the median, over the messages of at most
            16 KiB, of the time that their bytes do not explain.

    Returns:
        ``(alpha, beta)`` in seconds and seconds per byte.

    Raises:
        ValueError: fewer than two different sizes, or another number of times than of sizes.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"expected as many times as sizes, and two different sizes; got {len(sizes)} sizes "
            f"({len(set(sizes))} different) and {len(seconds)} times"
        )
    size: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(sizes, float)
    time = np.asarray(seconds, float)
    if beta is not None:
        left = (time - beta * size)[size <= max(SMALL, size.min())]
        return max(0.0, float(np.median(left))), beta
    columns = np.stack([np.ones_like(size), size], axis=1) / time[:, None]
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(size), rcond=None)[0]
    if alpha < 0:  # then a line through the origin fits best
        alpha, beta = 0.0, float(np.mean(size / time) / np.mean((size / time) ** 2))
    elif beta < 0:
        alpha, beta = float(np.mean(1 / time) / np.mean((1 / time) ** 2)), 0.0
    return float(alpha), float(beta)


@dataclass(frozen=True)
class FittedCost:
    """The time of an all-reduce on a group of ranks, fitted to a sweep over sizes.

    Attributes:
        alpha: seconds of an all-reduce of no bytes.
        beta: seconds for each byte of the tensor.
    """

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        """Predict the time of one all-reduce of ``nbytes``."""
        return self.alpha + self.beta * nbytes
