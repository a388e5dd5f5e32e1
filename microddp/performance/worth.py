"""A planned step of several devices beside that of one, from a handful of numbers.

It is the arithmetic of chapter 08, without a measurement: how long a step computes, what it sends,
and how much of the sending the last backward pass can hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from microddp.allreduce import ring_cost
from microddp.performance.network import check_whole


@dataclass(frozen=True)
class Outcome:
    """A planned step with some of its communication hidden.

    Attributes:
        exposed: seconds of communication that nothing hides.
        step: seconds of the step: computing, then exposed communication.
        speedup: time of one device for the same global batch, divided by ``step``.
    """

    exposed: float
    step: float
    speedup: float


@dataclass(frozen=True)
class StepBudget:
    """A planned step.

    Attributes:
        compute: seconds that each device computes in a step.
        communication: seconds of all messages, hidden or not.
        overlapped: outcome if backward hides communication all the while: the best case.
        unhidden: outcome if nothing is hidden.
    """

    compute: float
    communication: float
    overlapped: Outcome
    unhidden: Outcome


def step_budget(
    parameters: float,
    tokens: float,
    devices: int,
    *,
    peak: float,
    utilisation: float,
    bandwidth: float,
    latency: float = 0.0,
    gradient_bytes: float = 4,
) -> StepBudget:
    """Plan a data-parallel step, and compare it with one device that trains on the same batch.

    A device computes 6 operations for each parameter and token, 2 in forward and 4 in backward. The
    gradients are averaged by a ring: 2(n-1) rounds, and 2(n-1)/n of the bytes over each link. One
    device alone computes the batches of all n one after the other, at the same rate. Left out: the
    optimizer, loading, and ranks that are late. The form in chapter 08 has micro-batches and stages
    of sharding, too.

    Args:
        parameters: number of parameters P of the model.
        tokens: tokens b in a batch of one device; or samples, where a parameter is used once for
            each.
        devices: number of devices n, at least 1.
        peak: operations a second of one device.
        utilisation: share of the peak that training reaches, above 0 and at most 1.
        bandwidth: bytes a second of each device's link, in each direction.
        latency: seconds to start each round of the all-reduce.
        gradient_bytes: bytes sent for each parameter; 2 with bf16 messages.

    Raises:
        ValueError: a number out of its range.

    Sources: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1 (the
    operations); Thakur, Rabenseifner and Gropp, 2005, section 4 (the ring).

    Example:
        >>> budget = step_budget(
        ...     1e9, 1000, 4, peak=1e13, utilisation=0.6, bandwidth=3e9, latency=1 / 6
        ... )
        >>> budget.compute, budget.communication
        (1.0, 3.0)
        >>> budget.unhidden.speedup
        1.0
    """
    for name, number in {
        "parameters": parameters,
        "tokens": tokens,
        "peak": peak,
        "bandwidth": bandwidth,
        "gradient_bytes": gradient_bytes,
    }.items():
        if not 0 < number < math.inf:
            raise ValueError(f"expected {name} above 0, got {number}")
    if not 0 < utilisation <= 1:
        raise ValueError(f"expected a utilisation above 0 and at most 1, got {utilisation}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"expected a latency of 0 seconds or more, got {latency}")
    check_whole(devices=devices)
    compute = 6 * parameters * tokens / (peak * utilisation)
    messages = ring_cost(devices, parameters * gradient_bytes).seconds(latency, 1 / bandwidth)

    def outcome(hidden: float) -> Outcome:
        exposed = max(0.0, messages - hidden)
        step = compute + exposed
        return Outcome(exposed, step, devices * compute / step)

    return StepBudget(compute, messages, outcome(2 / 3 * compute), outcome(0.0))
