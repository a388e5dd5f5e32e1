"""Devices that fail, and checkpoints: the share of the time that is training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Failures:
    """Failures of a job, or of one device, with the costs of a checkpoint and of a restart.

    Attributes:
        between: mean seconds between two failures.
        checkpoint: seconds in which a checkpoint is written and nothing else goes on.
        restart: seconds from a failure until training goes on from the last checkpoint.

    Raises:
        ValueError: a time is not above 0, or a cost is below 0.
    """

    between: float
    checkpoint: float
    restart: float

    def __post_init__(self) -> None:
        if not self.between > 0:
            raise ValueError(f"expected a time between failures above 0, got {self.between}")
        for name in ("checkpoint", "restart"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ValueError(f"expected {name} to take 0 seconds or more, got {seconds}")

    def of(self, devices: int) -> Failures:
        """Return those of n independent devices, of which any interrupts the job.

        Raises:
            ValueError: fewer than one device.
        """
        if devices < 1:
            raise ValueError(f"expected at least one device, got {devices}")
        return replace(self, between=self.between / devices)

    @property
    def best_interval(self) -> float:
        """Seconds of training from one checkpoint to the next that lose nearly the least time.

        It is the root of 2 x checkpoint x time between failures. Source: Young, "A first order
        approximation to the optimum checkpoint interval", CACM 1974.
        """
        return math.sqrt(2 * self.checkpoint * self.between)

    def useful(self, interval: float | None = None) -> float:
        """Compute the share of the time, in the long run, that is training which is kept.

        Failures come at random, at any time, also during checkpoints and restarts.

        Args:
            interval: seconds of training from one checkpoint to the next; default: the best.

        Raises:
            ValueError: the interval is not above 0.

        Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", FGCS 2006, equation 20: the expected time of an interval is
        M exp(R/M) (exp((interval + checkpoint)/M) - 1).
        """
        m = self.between
        if interval is None:
            interval = self.best_interval
            if not 0 < interval < math.inf:
                return math.exp(-self.restart / m)  # the limit, for checkpoints all the time
        if not 0 < interval < math.inf:
            raise ValueError(f"expected an interval above 0 seconds, got {interval}")
        if m == math.inf:
            return interval / (interval + self.checkpoint)
        exponent = (interval + self.checkpoint) / m
        if exponent + self.restart / m > 700:  # it is never through
            return 0.0
        return interval / (m * math.exp(self.restart / m) * math.expm1(exponent))

    def play(self, interval: float, intervals: int, seed: int = 0) -> float:
        """Estimate the share of :meth:`useful` by drawing failures one after the other.

        Args:
            interval: seconds of training from one checkpoint to the next.
            intervals: number of intervals to complete, at least 1.
            seed: seed of the draws.

        Raises:
            ValueError: the interval is not above 0, or there is none.
        """
        if intervals < 1:
            raise ValueError(f"expected at least one interval, got {intervals}")
        if not self.useful(interval):  # it would be played for ever
            return 0.0
        drawn = np.random.default_rng(seed)
        clock, until = 0.0, float(drawn.exponential(self.between))
        for _ in range(intervals):
            needed = interval + self.checkpoint
            while clock + needed > until:  # it fails before this is saved
                clock, until = until, until + float(drawn.exponential(self.between))
                needed = self.restart + interval + self.checkpoint
            clock += needed
        return intervals * interval / clock
