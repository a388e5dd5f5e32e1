"""Strong and weak scaling in one job: the speed of several ranks beside that of one."""

from __future__ import annotations

from collections.abc import Callable

from microddp.comms import Comms
from microddp.timing import measure

Step = Callable[[], object]


def measure_scaling(
    make_step: Callable[[Comms, int], Step],
    comms: Comms,
    samples: int,
    *,
    weak: bool = False,
    repeat: int = 10,
) -> dict[int, float]:
    """Time a step on sub-groups of 1, 2, 4, ... ranks, taking turns. A collective.

    Args:
        make_step: function from a group and this rank's number of samples to a training step.
        comms: all ranks; the ranks outside a group wait while it is timed.
        samples: number of samples of the whole batch (strong scaling), or of each rank's batch
            (weak scaling).
        weak: whether the batch grows with the ranks.
        repeat: number of measurements of each step.

    Returns:
        How many times as many samples a second as one rank, by the number of ranks, which are the
        powers of two, and all. The same on every rank.

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
    # A rank outside the group waits for the others to have been timed.
    steps = {
        str(count): make_step(group, samples if weak else samples // count)
        if group
        else lambda: None
        for count, group in groups.items()
    }
    times = measure(steps, comms, repeat=repeat)
    comms.barrier()
    for group in groups.values():
        if group is not None:
            group.close()
    one = times["1"].median
    return {k: (k if weak else 1) * one / times[str(k)].median for k in counts}
