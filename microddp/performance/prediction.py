"""The time of a data-parallel step, predicted from parts that are measured one by one.

The parts are the forward and backward pass of one rank without communication, the moment at which
each gradient is ready, the bucket plan, and the cost of an all-reduce on these ranks. The
prediction is how they overlap.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from microddp.allreduce import FittedCost, fit_alpha_beta, ring_cost
from microddp.comms import Comms
from microddp.hooks import HookTracker
from microddp.report import MIB
from microddp.step import Loss, Strategy, take_step
from microddp.step_times import Bucket, ComputeTimes, Prediction, break_down
from microddp.timing import Timeline, measure, slowest_rank, timed_together

SWEEP = tuple(1 << shift for shift in range(10, 25, 2))  # 1 KiB to 16 MiB


def measure_all_reduce(comms: Comms, sizes: Sequence[int] = SWEEP, repeat: int = 10) -> FittedCost:
    """Fit the cost of the backend's all-reduce to measurements. A collective.

    On links of known speed, beta is the time of the bytes that a ring sends over the slowest.

    Args:
        comms: ranks that take part.
        sizes: bytes of the tensors; at least two different sizes.
        repeat: number of measurements of each size.
    """
    tensors = {size: torch.zeros(size // 4, device=comms.device) for size in sizes}
    busy, wall = 0.0, 0.0

    def all_reduce(tensor: torch.Tensor) -> None:
        nonlocal busy, wall
        start, processor = time.perf_counter(), time.process_time()
        comms.all_reduce(tensor)
        wall += time.perf_counter() - start
        busy += time.process_time() - processor

    calls = {str(size): lambda t=tensor: all_reduce(t) for size, tensor in tensors.items()}
    times = measure(calls, comms, repeat=repeat)
    n = comms.world_size
    wire = ring_cost(n, 1).most_sent * comms.box.seconds_per_byte if comms.box and n > 1 else None
    alpha, beta = fit_alpha_beta(sizes, [times[str(size)].median for size in sizes], wire)
    cores = torch.tensor([busy / wall if comms.backend == "gloo" else 0.0], device=comms.device)
    comms.all_reduce_mean(cores)
    return FittedCost(alpha, beta, float(cores))


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
    names: list[str] = []
    with HookTracker(strategy.module) as tracker:

        def watched(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return tracker.start(loss_fn(outputs, targets))

        step = partial(take_step, strategy, watched, optimizer, batch)
        for i in range(-3, min(repeat, comms.most_rounds or repeat)):
            elapsed = timed_together(step, comms)
            times = break_down(timeline.take())
            update = elapsed - times.forward - times.backward
            ready = {row.name: row.seconds for row in tracker.rows if row.seconds is not None}
            names = list(ready)
            if i >= 0:
                parts.append([times.forward, times.backward, update, *ready.values()])
    columns = slowest_rank(torch.tensor(parts, dtype=torch.float64), comms).T.tolist()
    forward, backward, update, *moments = map(statistics.median, columns)
    return ComputeTimes(
        forward, backward, dict(zip(names, moments, strict=True)), update, _copy(comms)
    )


def _copy(comms: Comms) -> float:
    """Measure the seconds to scale a byte of gradient into a bucket that no cache holds."""
    gradients, buckets = torch.zeros(2, 16, MIB // 4, device=comms.device)

    def bring_in() -> None:
        for gradient, view in zip(gradients, buckets, strict=True):
            torch.mul(gradient, 0.5, out=view)

    return measure({"": bring_in}, comms, repeat=7)[""].median / float(gradients.nbytes)


def predict_plan(
    compute: ComputeTimes,
    buckets: Sequence[Bucket],
    cost: FittedCost,
    cores: float | None = None,
    *,
    overlap: bool = True,
) -> Prediction:
    """Predict the time of a data-parallel step that sends given buckets.

    Buckets travel one after the other, each from when its last gradient is ready and copied. While
    one travels, backward goes on with the cores that are left over.

    Args:
        compute: times of the model, from :func:`measure_compute`.
        buckets: buckets in the order of sending.
        cost: cost of an all-reduce.
        cores: processor cores for each rank; ``None`` if moving bytes takes nothing from computing.
        overlap: whether a bucket is sent as soon as it is full, or only after backward.
    """
    ready = [
        max(compute.ready[name] for name in bucket.names) if overlap else compute.backward
        for bucket in buckets
    ]
    # Copies are work of the processor or the GPU, done in backward when a gradient comes.
    copied, work = 0.0, []
    for moment, bucket in sorted(zip(ready, buckets, strict=True), key=lambda pair: pair[0]):
        copied += compute.copy * bucket.nbytes
        work.append((moment + copied, bucket))
    threads = torch.get_num_threads()
    left = max(0.0, (cores - cost.cores) / threads) if cores is not None else 1.0
    speed = min(1.0, left) if cost.cores else 1.0
    clock, done, waited, sent = 0.0, 0.0, 0.0, 0.0  # seconds: now, computed, idle, sending
    total = compute.backward + copied
    for moment, bucket in work:
        if done < moment:  # nothing to send: compute at full speed
            clock += moment - done
            done = moment
        travel = cost.seconds(bucket.nbytes)
        sent += travel
        possible = (total - done) / speed if speed else float("inf")
        if total - done <= 0:
            possible = 0.0
        # The rest of backward may end while this bucket travels.
        computing = min(travel, possible)
        done = min(total, done + computing * speed)
        waited += travel - computing
        clock += travel
    clock += total - done
    step = compute.forward + clock + compute.optimizer
    return Prediction(step, waited, sent - waited)
