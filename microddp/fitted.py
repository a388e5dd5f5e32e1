"""Measured times in the words of the cost model: bus bandwidth, alpha and beta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from microddp.allreduce import ring_cost


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
