"""Strong and weak scaling within one job: the throughput of several ranks beside that of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microddp.comms import Comms
from microddp.report import table
from microddp.timing import Timing, measure

Step = Callable[[], object]


@dataclass(frozen=True)
class ScalingPoint:
    """The throughput of so many ranks.

    Attributes:
        ranks: number of ranks that train together.
        samples: number of samples of all their batches together.
        step: time of a step on the slowest rank.
        compute: time of a step without communication, on as many ranks at once.
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
    """Throughput by number of ranks, all of one run. Prints as a table.

    Attributes:
        points: a point for each number of ranks, the smallest first.
    """

    points: tuple[ScalingPoint, ...]

    def speedup(self, point: ScalingPoint) -> float:
        """Divide a point's throughput by the first one's."""
        return point.throughput / self.points[0].throughput

    def efficiency(self, point: ScalingPoint) -> float:
        """Divide a point's speed-up by the ideal one, the ratio of the numbers of ranks."""
        return self.speedup(point) * self.points[0].ranks / point.ranks

    def allowed(self, point: ScalingPoint) -> float:
        """Compute the speed-up that a point would have if communication took no time."""
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
    repeat: int = 10,
) -> Scaling:
    """Time a step on sub-groups of 1, 2, 4, ... ranks, taking turns. A collective.

    Args:
        make_steps: function from a group and this rank's number of samples to two calls: a
            training step of that group, and a step without communication.
        comms: all ranks; the ranks outside a group wait while it is timed.
        samples: number of samples of the whole batch (strong scaling), or of each rank's batch
            (weak scaling).
        weak: whether the batch grows with the ranks.
        repeat: number of measurements of each step.

    Returns:
        The same scaling on every rank, of the powers of two, and of all ranks.

    Raises:
        ValueError: on every rank, if a batch does not divide by a number of ranks.
    """
    n = comms.world_size
    counts = sorted({1 << k for k in range(n.bit_length())} | {n})
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
    times = measure(calls, comms, repeat=repeat)
    points = [
        ScalingPoint(
            ranks=count,
            samples=samples * count if weak else samples,
            step=times[f"step of {count}"],
            compute=times[f"computing of {count}"],
            crowded=min(count, comms.ranks_here) > comms.devices,
        )
        for count in counts
    ]
    comms.barrier()
    for group in groups.values():
        if group is not None:
            group.close()
    return Scaling(tuple(points))
