"""Scaling: hand-made times, and groups of real ranks."""

import time

import pytest
import torch
from ranks import on_ranks

from microddp.comms import cpu_cores
from microddp.performance import Scaling, ScalingPoint, measure_scaling
from microddp.timing import Timing


def point(ranks, samples, step, compute):
    return ScalingPoint(ranks, samples, Timing((step,)), Timing((compute,)), crowded=False)


def test_speed_up_and_efficiency_follow_from_throughput():
    strong = Scaling((point(1, 60, 6.0, 6.0), point(2, 60, 4.0, 3.0)))
    one, two = strong.points
    assert (one.throughput, two.throughput, two.ceiling) == (10, 15, 20)
    assert (strong.speedup(two), strong.efficiency(two)) == (1.5, 0.75)
    assert strong.allowed(two) == 2
    assert str(strong).splitlines()[-1].split() == ["2", "60", "15", "1.50", "75%", "2.00"]
    weak = Scaling((point(1, 60, 6.0, 6.0), point(2, 120, 8.0, 6.0)))
    assert weak.speedup(weak.points[1]) == 1.5
    assert weak.efficiency(weak.points[0]) == 1


@on_ranks(1, 2, 3, 4)
def test_each_group_shares_the_batch_and_no_other_rank_takes_part(comms):
    seen = []

    def make_steps(group, samples):
        value = torch.ones(1)

        def step():
            seen.append((group.world_size, samples))
            group.all_reduce(value.fill_(1))
            assert value.item() == group.world_size

        return step, lambda: time.sleep(0.001)

    n = comms.world_size
    counts = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4]}[n]
    for weak in (False, True):
        seen.clear()
        scaling = measure_scaling(make_steps, comms, 12, weak=weak, repeat=3)
        assert [p.ranks for p in scaling.points] == counts
        assert [p.samples for p in scaling.points] == [12 * c if weak else 12 for c in counts]
        mine = [c for c in counts if comms.rank < c]
        # Five rounds, two of which are not counted. The order of the calls is another in each.
        assert sorted(seen) == sorted([(c, 12 if weak else 12 // c) for c in mine] * 5)
        for p in scaling.points:
            assert len(p.step.seconds) == 3
            assert p.step.median > 0
            assert p.compute.median >= 0.001
            assert p.crowded == (p.ranks > cpu_cores())
        everyone = comms.all_gather_data([p.step.seconds for p in scaling.points])
        assert all(times == everyone[0] for times in everyone)


@on_ranks(2)
def test_a_batch_that_does_not_divide_is_refused_on_every_rank(comms):
    with pytest.raises(ValueError, match=rf"rank {comms.rank}: .* divides by 2 ranks, got 7"):
        measure_scaling(lambda *_: (print, print), comms, 7)
