"""How much more several ranks get done than one: strong and weak scaling, within one job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from microddp.comms import Comms, cpu_cores
from microddp.report import table
from microddp.timing import Timing, measure

Step = Callable[[], object]


@dataclass(frozen=True)
class ScalingPoint:
    """A number of ranks that train together.

    Attributes:
        ranks: how many.
        samples: of all their batches together.
        step: the time of a step, of the slowest rank.
        compute: of a step without communication on as many ranks at once: what the machine allows.
        crowded: whether ranks share a core or a GPU.
    """

    ranks: int
    samples: int
    step: Timing
    compute: Timing
    crowded: bool

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.samples / self.step.median

    @property
    def ceiling(self) -> float:
        """Samples a second if communication took no time."""
        return self.samples / self.compute.median


@dataclass(frozen=True)
class Scaling:
    """Throughput by number of ranks, the smallest first; all of one run. Prints as a table.

    Attributes:
        points: one for each number of ranks.
    """

    points: tuple[ScalingPoint, ...]

    def speedup(self, point: ScalingPoint) -> float:
        """Its throughput by that of the first point; with equal samples, the ratio of times."""
        return point.throughput / self.points[0].throughput

    def efficiency(self, point: ScalingPoint) -> float:
        """Its speed-up by the ideal, which is the ratio of the numbers of ranks."""
        return self.speedup(point) * self.points[0].ranks / point.ranks

    def allowed(self, point: ScalingPoint) -> float:
        """The speed-up of computing alone: what is left if communication takes no time."""
        return point.ceiling / self.points[0].ceiling

    def __str__(self) -> str:
        rows = [
            (
                f"{point.ranks}{' (sharing)' if point.crowded else ''}",
                point.samples,
                f"{point.throughput:,.0f}",
                f"{self.speedup(point):.2f}",
                f"{self.efficiency(point):.0%}",
                f"{self.allowed(point):.2f}",
            )
            for point in self.points
        ]
        headers = ["ranks", "batch", "samples/s", "speed-up", "efficiency", "computing alone"]
        return table(rows, headers)


def measure_scaling(
    make_steps: Callable[[Comms, int], tuple[Step, Step]],
    comms: Comms,
    samples: int,
    *,
    weak: bool = False,
    counts: Sequence[int] | None = None,
    warmup: int = 2,
    repeat: int = 10,
) -> Scaling:
    """Time a step on sub-groups of 1, 2, 4, ... ranks, taking turns. A collective.

    Args:
        make_steps: from a group and this rank's number of samples to a training step of that
            group, and to one without communication.
        comms: all ranks; those outside a group wait while it is timed.
        samples: of the whole batch (strong scaling), or of each rank's (weak scaling).
        weak: whether the batch grows with the ranks.
        counts: numbers of ranks; default: the powers of two, and all.
        warmup: rounds that are not counted.
        repeat: rounds that are.

    Raises:
        ValueError: on every rank, if a batch does not divide by a number of ranks.
    """
    n = comms.world_size
    counts = counts or sorted({1 << k for k in range(n.bit_length())} | {n})
    for count in counts:
        if not weak and samples % count:
            raise ValueError(
                f"rank {comms.rank}: expected a batch that divides by {count} ranks, got {samples}"
            )
    groups = {count: comms.subgroup(range(count)) for count in counts}
    steps = {
        count: make_steps(group, samples if weak else samples // count)
        for count, group in groups.items()
        if group is not None
    }
    calls: dict[str, Step] = {}
    for count in counts:
        # A rank outside the group waits for the others to have been timed.
        step, alone = steps.get(count, (lambda: None, lambda: None))
        calls |= {f"step of {count}": step, f"computing of {count}": alone}
    times = measure(calls, comms, warmup=warmup, repeat=repeat)
    devices = torch.cuda.device_count() if comms.device.type == "cuda" else cpu_cores()
    here = comms.local_world_size
    points = [
        ScalingPoint(
            ranks=count,
            samples=samples * count if weak else samples,
            step=times[f"step of {count}"],
            compute=times[f"computing of {count}"],
            crowded=min(count, here) > devices,
        )
        for count in counts
    ]
    comms.barrier()
    for group in groups.values():
        if group is not None:
            group.close()
    return Scaling(tuple(points))
