"""The cost of an all-reduce: bytes and messages, and time by the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class AllReduceCost:
    """Rounds, messages and bytes of an all-reduce algorithm.

    Attributes:
        rounds: messages that must follow one another.
        round_bytes: bytes of each of them.
        messages: number of messages of all ranks together.
        most_sent: bytes sent by the rank that sends most.
    """

    rounds: int
    round_bytes: float
    messages: int
    most_sent: float

    def seconds(self, alpha: float, beta: float) -> float:
        """Predicted time: each round costs ``alpha`` seconds and ``beta`` seconds a byte."""
        return self.rounds * (alpha + beta * self.round_bytes)


def all_reduce_cost(algorithm: str, world_size: int, nbytes: int) -> AllReduceCost:
    """The cost of reducing ``nbytes`` over ``world_size`` ranks, each with one full-duplex link.

    The ring is counted with one message for each chunk; large chunks travel as several pieces.

    Args:
        algorithm: ``"naive"``, ``"direct"``, ``"ring"`` or ``"doubling"``.
        world_size: n, at least 1.
        nbytes: S, the size of the tensor in bytes.

    Raises:
        ValueError: an unknown algorithm, or fewer than one rank.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005, section 3 (the model) and 4 (the algorithms).
    """
    n, size = world_size, float(nbytes)
    if n < 1:
        raise ValueError(f"expected at least one rank, got {n}")
    match algorithm:
        case "naive":
            return AllReduceCost(2 * (n - 1), size, 2 * (n - 1), size * max(n - 1, 0))
        case "direct":
            return AllReduceCost(n - 1, size, n * (n - 1), size * (n - 1))
        case "ring":
            return AllReduceCost(2 * (n - 1), size / n, 2 * n * (n - 1), 2 * size * (n - 1) / n)
        case "doubling":
            doublings = int(math.log2(n))
            power = 2**doublings
            extra = n - power
            rounds = doublings + (2 if extra else 0)
            # The busiest rank also returns the result to the rank that has no partner.
            sent = size * (doublings + (1 if extra else 0))
            return AllReduceCost(rounds, size, power * doublings + 2 * extra, sent)
    raise ValueError(f"expected 'naive', 'direct', 'ring' or 'doubling', got {algorithm!r}")


def reduced_bytes(nbytes: float, world_size: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of ``nbytes``."""
    return all_reduce_cost("ring", world_size, int(nbytes)).most_sent


def estimate_communication_time(
    nbytes: float, world_size: int, bandwidth: float, latency: float = 0.0, algorithm: str = "ring"
) -> float:
    """Seconds that an all-reduce takes by the alpha-beta model.

    Args:
        nbytes: size of the tensor.
        world_size: ranks, each with one full-duplex link.
        bandwidth: of a link, bytes a second in each direction.
        latency: of a message, seconds.
        algorithm: as for :func:`all_reduce_cost`.

    Raises:
        ValueError: a bandwidth that is not positive, or what ``all_reduce_cost`` refuses.

    Example:
        >>> estimate_communication_time(4e9, world_size=4, bandwidth=1e9)
        6.0
    """
    if bandwidth <= 0:
        raise ValueError(f"expected a bandwidth above 0 bytes a second, got {bandwidth}")
    return all_reduce_cost(algorithm, world_size, int(nbytes)).seconds(latency, 1 / bandwidth)


def bus_bandwidth(nbytes: int, seconds: float, world_size: int) -> float:
    """Bus bandwidth of an all-reduce in bytes a second: S/t x 2 (n-1)/n, as nccl-tests defines it.

    It is the bandwidth each link must have carried, so it can be compared with the hardware's and
    between numbers of ranks. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return nbytes / seconds * 2 * (world_size - 1) / world_size


SMALL = 1 << 14  # bytes: what such a message takes is nearly all alpha


def fit_alpha_beta(
    sizes: Sequence[float], seconds: Sequence[float], beta: float | None = None
) -> tuple[float, float]:
    """The start-up time and the time per byte that best explain measured message times.

    Least squares of the *relative* error of ``alpha + beta * size``, so that the small messages,
    which say most about alpha, count as much as the large ones. Neither is let below zero.

    Args:
        sizes: bytes of each message, at least two different sizes.
        seconds: the time each took.
        beta: seconds a byte, if that is known. Then only alpha is looked for, and only where it is
            seen: the median of what the messages of at most 16 KiB took beside their bytes.

    Returns:
        ``(alpha, beta)`` in seconds and seconds per byte.

    Raises:
        ValueError: fewer than two different sizes, or as many times as sizes are not given.
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
        alpha: seconds, whatever the size.
        beta: seconds a byte of the tensor.
        cores: processor cores that a rank keeps busy meanwhile: over gloo, the processor moves
            the bytes, and what computes at the same time has to do without. 0 where a GPU does.
    """

    alpha: float
    beta: float
    cores: float

    def seconds(self, nbytes: float) -> float:
        """The time of one all-reduce."""
        return self.alpha + self.beta * nbytes
