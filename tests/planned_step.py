"""What the form that plans a step (`plan.js`) computes, in Python: sharded and accumulated, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from microddp.allreduce import ring_cost
from microddp.performance import worth
from microddp.performance.memory import bytes_kept


@dataclass(frozen=True)
class Outcome(worth.Outcome):
    """A planned step with some of its communication hidden, as the form shows it.

    Attributes:
        gathering: seconds of ``exposed`` in which parameters are gathered for forward.
        efficiency: speed-up divided by the number of devices.
        break_even: bandwidth of a link, bytes a second, above which the speed-up is above 1;
            infinite where no link is fast enough.
    """

    gathering: float
    efficiency: float
    break_even: float


@dataclass(frozen=True)
class StepBudget(worth.StepBudget):
    """A planned step, as the form shows it.

    Attributes:
        gathering: seconds of ``communication`` in which parameters are gathered for forward.
        memory: bytes on each device for weights, gradients and Adam's two moments, in 32 bits,
            divided as the stage says. Activations come on top.
    """

    overlapped: Outcome
    unhidden: Outcome
    gathering: float
    memory: float


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
    stage: int = 0,
) -> StepBudget:
    """Plan a step as :func:`microddp.performance.step_budget`, with all that the form has.

    Only the backward of the last of K micro-batches (``accumulation``) can hide the all-reduce. One
    device alone computes the micro-batches of all n one after the other. Sharded, half of the
    all-reduce gathers parameters, which the first forward can hide. In stage 3 they are gathered
    for each forward and each backward, and gradients are reduced in each backward, of every
    micro-batch.
    """
    rate = peak * utilisation
    forward = 2 * parameters * tokens / rate
    compute = accumulation * 3 * forward
    # Passes around the ring in forward and in backward, and how often a step has them.
    passes, times = {0: ((0, 2), 1), 3: ((1, 2), accumulation)}.get(stage, ((1, 1), 1))
    costs = [ring_cost(devices, parameters * gradient_bytes, count) for count in passes]
    messages = [times * cost.seconds(latency, 1 / bandwidth) for cost in costs]

    def outcome(*hidden: float) -> Outcome:
        exposed = [max(0.0, takes - hides) for takes, hides in zip(messages, hidden, strict=True)]
        step = compute + sum(exposed)
        phases = [
            (hides - times * cost.rounds * latency, times * cost.most_sent)
            for cost, hides in zip(costs, hidden, strict=True)
        ]
        return Outcome(
            sum(exposed),
            step,
            devices * compute / step,
            gathering=exposed[0],
            efficiency=compute / step,
            break_even=_break_even((devices - 1) * compute, phases) if devices > 1 else math.inf,
        )

    return StepBudget(
        compute,
        sum(messages),
        overlapped=outcome(times * forward, times * 2 * forward),
        unhidden=outcome(0.0, 0.0),
        gathering=messages[0],
        memory=bytes_kept(stage, parameters, devices).total,
    )


def _break_even(room: float, phases: Sequence[tuple[float, float]]) -> float:
    """Find the bandwidth with which phases are exposed for ``room`` seconds together.

    Of each phase come the seconds that may be hidden, less its start-ups; and its bytes.
    """
    # The exposed time is the largest sum over any of the phases. So the seconds of a byte that fill
    # the room are the least of those that fill it with any of the phases.
    some = [chosen for r in range(len(phases)) for chosen in combinations(phases, r + 1)]
    least = min(
        (room + sum(hides for hides, _ in chosen)) / nbytes
        if (nbytes := sum(size for _, size in chosen))
        else (math.inf if room + sum(hides for hides, _ in chosen) > 0 else 0.0)
        for chosen in some
    )
    return 1 / least if least > 0 else math.inf
