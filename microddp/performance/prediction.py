"""The time of a data-parallel step, predicted from parts that are measured one by one.

The parts are the forward and backward pass of one rank without communication, the moment at which
each gradient is ready, the bucket plan, and the cost of an all-reduce on these ranks. The
prediction is how they overlap.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from microddp.comms import Comms
from microddp.fitted import FittedCost
from microddp.hooks import HookTracker
from microddp.report import MIB
from microddp.step import Loss, Strategy, take_step
from microddp.step_times import Bucket, ComputeTimes, PredictedStep, break_down
from microddp.timing import Timeline, measure, slowest_rank, timed_together


def measure_compute(
    model: nn.Module,
    loss_fn: Loss,
    batch: tuple[torch.Tensor, torch.Tensor],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    comms: Comms,
    repeat: int = 10,
) -> ComputeTimes:
    """Time the parts of a step that need no other rank, on all ranks at once. A collective.

    At once, because ranks share the memory's bandwidth and maybe more.

    Args:
        model: model to train; it is copied, and left as it is.
        loss_fn: function from outputs and targets to a scalar.
        batch: inputs and targets of this rank's shard.
        make_optimizer: function from a model to an optimizer of its parameters.
        comms: ranks that compute.
        repeat: number of measurements, after a few that are not counted.
    """
    strategy = Strategy(copy.deepcopy(model), comms)
    optimizer = make_optimizer(strategy.module)
    timeline = Timeline(comms)
    strategy.record(timeline)
    parts: list[list[float]] = []
    ready: dict[str, float] = {}
    with HookTracker(strategy.module) as tracker:

        def watched(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return tracker.start(loss_fn(outputs, targets))

        step = partial(take_step, strategy, watched, optimizer, batch)
        for i in range(-3, min(repeat, comms.most_rounds or repeat)):
            elapsed = timed_together(step, comms)
            times = break_down(timeline.take())
            update = elapsed - times.forward - times.backward
            ready = {row.name: row.seconds for row in tracker.rows if row.seconds is not None}
            if i >= 0:
                parts.append([times.forward, times.backward, update, *ready.values()])
    columns = slowest_rank(torch.tensor(parts, dtype=torch.float64), comms).T.tolist()
    forward, backward, update, *moments = map(statistics.median, columns)
    return ComputeTimes(
        forward, backward, dict(zip(ready, moments, strict=True)), update, _copy(comms)
    )


def _copy(comms: Comms) -> float:
    """Measure the seconds to scale a byte of gradient into a bucket that no cache holds."""
    gradients, buckets = torch.zeros(2, 16, MIB // 4, device=comms.device)

    def bring_in() -> None:
        for gradient, view in zip(gradients, buckets, strict=True):
            torch.mul(gradient, 0.5, out=view)

    return measure({"": bring_in}, comms, repeat=7)[""].median / float(gradients.nbytes)


def predict_plan(
    compute: ComputeTimes, buckets: Sequence[Bucket], cost: FittedCost
) -> PredictedStep:
    """Predict the time of a data-parallel step that sends given buckets.

    Buckets travel one after the other, each from when its last gradient is ready and copied, while
    backward goes on.

    Args:
        compute: times of the model, from :func:`measure_compute`.
        buckets: buckets in the order of sending.
        cost: cost of an all-reduce.
    """
    full = [(max(compute.ready[name] for name in each.names), each.nbytes) for each in buckets]
    # Copies are work of the processor or the GPU, done in backward when a gradient comes.
    copied, end, sent = 0.0, 0.0, 0.0  # seconds: copying, of the last message, sending
    for ready, nbytes in full:
        copied += compute.copy * nbytes
        travel = cost.seconds(nbytes)
        end = max(end, ready + copied) + travel
        sent += travel
    backward = compute.backward + copied
    exposed = max(0.0, end - backward)
    return PredictedStep(
        compute.forward + backward + exposed + compute.optimizer, exposed, sent - exposed
    )
