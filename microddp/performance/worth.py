"""When several devices are worth it: their step beside that of one, from a handful of numbers.

Nothing here is measured. It is the arithmetic of chapter 08 for a planned training: what a step
computes, what it sends, and how much of the sending the last backward pass can hide.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_PER_PARAMETER = 16  # bytes: weight, gradient and Adam's two moments, of 4 bytes each


@dataclass(frozen=True)
class Outcome:
    """What comes of a step, once it is settled how much communication is hidden.

    Attributes:
        exposed: seconds of communication that nothing hides.
        step: seconds of a step: computing, then what is exposed.
        speedup: how many times as long one device takes for the same global batch.
        efficiency: that, divided by the number of devices.
        break_even: bytes a second of a link from which on the speed-up is above 1; infinite where
            no link is fast enough.
    """

    exposed: float
    step: float
    speedup: float
    efficiency: float
    break_even: float

    @property
    def worth_it(self) -> bool:
        """Whether all devices are faster than one of them by itself."""
        return self.speedup > 1


@dataclass(frozen=True)
class StepBudget:
    """A planned step.

    Attributes:
        compute: seconds that each device computes in a step.
        communication: seconds that the all-reduce takes, hidden or not.
        memory: bytes on each device for weights, gradients and Adam's two moments, in 32 bits.
            Activations come on top.
        overlapped: the step if the last backward hides as much as it lasts, which is the best case.
        unhidden: the step if nothing is hidden.
    """

    compute: float
    communication: float
    memory: float
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
    accumulation: int = 1,
    gradient_bytes: float = 4,
) -> StepBudget:
    """Plan a data-parallel step, and compare it with one device that trains on the same batch.

    A device computes 6 operations for each parameter and token, 2 in forward and 4 in backward. The
    gradients are averaged once a step by a ring: 2(n-1) rounds, and 2(n-1)/n of the bytes over each
    link. Only the backward of the last micro-batch can hide that. One device alone computes the
    micro-batches of all n one after the other, at the same rate. Left out: the optimizer, loading,
    and ranks that are late.

    Args:
        parameters: P, of the model.
        tokens: b, in a micro-batch of one device; samples, where each is used once by a parameter.
        devices: n, at least 1.
        peak: operations a second of one device.
        utilisation: the share of the peak that training reaches, above 0 and at most 1.
        bandwidth: bytes a second of each device's link, in each direction.
        latency: seconds to start each round of the all-reduce.
        accumulation: K, the micro-batches of a step.
        gradient_bytes: that are sent for each parameter; 2 with bf16 messages.

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
    _expect_above_zero(
        parameters=parameters,
        tokens=tokens,
        peak=peak,
        bandwidth=bandwidth,
        gradient_bytes=gradient_bytes,
    )
    if not 0 < utilisation <= 1:
        raise ValueError(f"expected a utilisation above 0 and at most 1, got {utilisation}")
    if not 0 <= latency < float("inf"):
        raise ValueError(f"expected a latency of 0 seconds or more, got {latency}")
    for name, count in {"devices": devices, "accumulation": accumulation}.items():
        if count != int(count) or count < 1:
            raise ValueError(f"expected {name} to be a whole number from 1 on, got {count}")
    rate = peak * utilisation
    compute = accumulation * (6 * parameters * tokens / rate)
    last_backward = 4 * parameters * tokens / rate
    start_up = 2 * (devices - 1) * latency
    sent = 2 * (devices - 1) / devices * parameters * gradient_bytes
    communication = start_up + sent / bandwidth

    def outcome(hidden: float) -> Outcome:
        exposed = max(0.0, communication - hidden)
        step = compute + exposed
        room = (devices - 1) * compute + hidden - start_up  # for the bytes, in seconds
        possible = devices > 1 and room > 0
        return Outcome(
            exposed,
            step,
            speedup=devices * compute / step,
            efficiency=compute / step,
            break_even=sent / room if possible else float("inf"),
        )

    return StepBudget(
        compute,
        communication,
        MEMORY_PER_PARAMETER * parameters,
        overlapped=outcome(last_backward),
        unhidden=outcome(0.0),
    )


def _expect_above_zero(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ValueError(f"expected {name} above 0, got {number}")
