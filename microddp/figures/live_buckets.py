"""Live buckets: a cap to choose, its plan, and the step predicted with it as in chapter 08."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch

from microddp.buckets import plan_buckets
from microddp.figures.live import Live, html_table
from microddp.fitted import FittedCost
from microddp.report import human_bytes, human_seconds
from microddp.step_times import Bucket, ComputeTimes, PredictedStep
from microddp.timing import Timing

Predict = Callable[[ComputeTimes, Sequence[Bucket], FittedCost], PredictedStep]


def explore_buckets(
    gradients: Mapping[str, int],
    compute: ComputeTimes,
    cost: FittedCost,
    measured: Mapping[int, Timing],
    *,
    predict: Predict,
    title: str,
) -> Live:
    """A cap to choose for all buckets, the plan it makes, and the step that is predicted with it.

    Buckets are sent as soon as they are full. The still table has the caps that were measured.

    Args:
        gradients: bytes of each gradient by the parameter's name, in the order in which buckets
            take them; all of one dtype and device.
        compute: times of a step without communication; ``optimizer`` is 0 where steps have none.
        cost: cost of an all-reduce between the ranks.
        measured: time of a step by the cap of its buckets, in bytes; at least one.
        predict: :func:`~microddp.performance.prediction.predict_plan`, whose model the script has.
        title: subject of the picture, in words.

    Raises:
        KeyError: ``compute.ready`` lacks a gradient.
    """
    rows = []
    for cap, timing in measured.items():
        buckets = _plan(gradients, cap)
        predicted = predict(compute, buckets, cost)
        name = human_bytes(cap) if cap > min(gradients.values()) else "each gradient alone"
        times = (human_seconds(predicted.step), human_seconds(predicted.exposed))
        rows.append((name, len(buckets), *times, timing))
    headers = ["cap", "all-reduces", "predicted step", "of it exposed", "measured (quartiles)"]
    data = {
        "gradients": [[name, size, compute.ready[name]] for name, size in gradients.items()],
        "compute": {
            part: getattr(compute, part) for part in ("forward", "backward", "optimizer", "copy")
        },
        "cost": asdict(cost),
        "measured": [[cap, t.spread[0], t.median, t.spread[1]] for cap, t in measured.items()],
    }
    return Live("buckets", title, data, html_table(rows, headers))


def _plan(gradients: Mapping[str, int], cap: int) -> list[Bucket]:
    """Plan the buckets of a cap with microddp's own planner, which asks tensors for sizes only."""
    names, sizes = list(gradients), list(gradients.values())
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    return [
        Bucket(tuple(names[i] for i in members), sum(sizes[i] for i in members))
        for members in plan_buckets(tensors, [cap])
    ]
