"""How long a data-parallel step should take, from parts that are measured one by one.

The parts are the forward and backward pass of one rank without communication, the moment at which
each gradient is ready, the bucket plan, and what an all-reduce costs on these ranks. What is
predicted is how they overlap.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from microddp.allreduce import AllReduceCost, fit_alpha_beta
from microddp.bucketing import BUCKET_CAP_MB, FIRST_BUCKET_MB, plan_buckets
from microddp.comms import Comms, cpu_cores
from microddp.hooks import HookTracker
from microddp.report import MIB
from microddp.timing import measure, seconds_now

SWEEP = tuple(MIB >> 4 << shift for shift in range(0, 11, 2))  # 64 KiB to 64 MiB


def measure_all_reduce(
    comms: Comms, sizes: Sequence[int] = SWEEP, repeat: int = 10
) -> AllReduceCost:
    """Fit the cost of the backend's all-reduce to measurements. A collective.

    Args:
        comms: the ranks.
        sizes: bytes; at least two different ones.
        repeat: measurements of each.
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
    alpha, beta = fit_alpha_beta(sizes, [times[str(size)].median for size in sizes])
    cores = torch.tensor([busy / wall if comms.backend == "gloo" else 0.0], device=comms.device)
    comms.all_reduce_mean(cores)
    return AllReduceCost(alpha, beta, float(cores))


@dataclass(frozen=True)
class ComputeTimes:
    """A step without communication: medians, each of the slowest rank, in seconds.

    Attributes:
        forward: the loss from the batch.
        backward: all gradients from the loss.
        ready: by parameter, when its gradient is ready, since backward began; in that order.
        optimizer: the update, and forgetting the gradients.
        copy: to bring one byte of gradient into a bucket.
    """

    forward: float
    backward: float
    ready: Mapping[str, float]
    optimizer: float
    copy: float


def measure_compute(
    model: nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batch: tuple[torch.Tensor, torch.Tensor],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    comms: Comms,
    repeat: int = 10,
) -> ComputeTimes:
    """Time the parts of a step that need no other rank, on all ranks at once. A collective.

    At once, because ranks share the memory's bandwidth and maybe more.

    Args:
        model: is copied, and left as it is.
        loss_fn: from outputs and targets to a scalar.
        batch: inputs and targets of this rank's shard.
        make_optimizer: of a model's parameters.
        comms: the ranks.
        repeat: measurements, after a few that are not counted.
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    inputs, targets = batch
    parts: list[list[float]] = []
    names: list[str] = []
    with HookTracker(model) as tracker:
        for i in range(-3, repeat):
            comms.barrier()
            start = seconds_now(comms.device)
            optimizer.zero_grad()
            zeroed = seconds_now(comms.device)
            loss = tracker.start(loss_fn(model(inputs), targets))
            forwarded = seconds_now(comms.device)
            loss.backward()  # type: ignore[no-untyped-call]
            backwarded = seconds_now(comms.device)
            optimizer.step()
            stepped = seconds_now(comms.device)
            rows = [row for row in tracker.rows if row.seconds is not None]
            names = [row.name for row in rows]
            if i >= 0:
                update = zeroed - start + stepped - backwarded
                phases = [forwarded - zeroed, backwarded - forwarded, update]
                parts.append(phases + [row.seconds for row in rows if row.seconds is not None])
    slowest = torch.tensor(parts, dtype=torch.float64, device=comms.device)
    comms.all_reduce(slowest, "max")
    forward, backward, update, *ready = (statistics.median(c) for c in slowest.T.tolist())
    return ComputeTimes(
        forward, backward, dict(zip(names, ready, strict=True)), update, _copy(comms)
    )


def _copy(comms: Comms) -> float:
    """Seconds to scale a byte of gradient into a bucket, out of the cache, on all ranks at once."""
    gradients, buckets = torch.zeros(2, 16, MIB // 4, device=comms.device)

    def bring_in() -> None:
        for gradient, view in zip(gradients, buckets, strict=True):
            torch.mul(gradient, 0.5, out=view)

    return measure({"": bring_in}, comms, repeat=7)[""].median / float(gradients.nbytes)


@dataclass(frozen=True)
class Bucket:
    """What travels together: the parameters' names and the bytes of their gradients."""

    names: tuple[str, ...]
    nbytes: int


def plan_by_name(
    model: nn.Module,
    order: Sequence[str],
    bucket_cap_mb: float = BUCKET_CAP_MB,
    first_bucket_mb: float = FIRST_BUCKET_MB,
) -> list[Bucket]:
    """The buckets that hooks make of a model's gradients.

    Args:
        model: names and sizes.
        order: the parameters' names in the order in which gradients come.
        bucket_cap_mb: cap in MiB; 0: a bucket for each parameter.
        first_bucket_mb: cap of the first, if that is less.
    """
    parameters = dict(model.named_parameters())
    caps = [int(min(first_bucket_mb, bucket_cap_mb) * MIB), int(bucket_cap_mb * MIB)]
    plan = plan_buckets([parameters[name] for name in order], caps)
    named = [tuple(order[i] for i in bucket) for bucket in plan]
    return [Bucket(names, sum(parameters[name].nbytes for name in names)) for names in named]


@dataclass(frozen=True)
class Prediction:
    """A step, predicted; in seconds.

    Attributes:
        step: all of it.
        exposed: in which nothing but communication went on.
        hidden: of communication behind backward.
    """

    step: float
    exposed: float
    hidden: float


def predict_step(
    compute: ComputeTimes,
    buckets: Sequence[Bucket],
    cost: AllReduceCost,
    cores: float | None = None,
    *,
    overlap: bool = True,
) -> Prediction:
    """The time of a data-parallel step, from its parts.

    Buckets travel one after the other, each from when its last gradient is ready and copied. While
    one travels, backward goes on with the cores that are left over.

    Args:
        compute: from :func:`measure_compute`.
        buckets: in the order of sending, from :func:`plan_by_name`.
        cost: from :func:`measure_all_reduce`.
        cores: processor cores for each rank, from :func:`cores_for_each_rank`; ``None``: moving
            bytes takes nothing from computing.
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
    clock, done, waited, sent = 0.0, 0.0, 0.0, 0.0  # time; work done; idle; time spent sending
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
        # What is left of backward may end while this bucket travels.
        computing = min(travel, possible)
        done = min(total, done + computing * speed)
        waited += travel - computing
        clock += travel
    clock += total - done
    step = compute.forward + clock + compute.optimizer
    return Prediction(step, waited, sent - waited)


def cores_for_each_rank(comms: Comms) -> float | None:
    """Processor cores for each rank where ranks compute on them; else ``None``."""
    if comms.device.type != "cpu":
        return None
    return cpu_cores() / comms.local_world_size
