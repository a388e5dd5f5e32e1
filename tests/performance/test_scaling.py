"""Scaling: hand-made times, and groups of real ranks."""

import pytest
import torch
from ranks import on_ranks

from microddp.performance import measure_scaling, scaling
from microddp.timing import Timing


@on_ranks(2)
def test_the_speed_up_is_of_samples_a_second(comms):
    scaling.measure = lambda *_, **__: {"1": Timing((6.0,)), "2": Timing((4.0,))}
    assert measure_scaling(lambda *_: print, comms, 60) == {1: 1, 2: 1.5}
    scaling.measure = lambda *_, **__: {"1": Timing((6.0,)), "2": Timing((8.0,))}
    assert measure_scaling(lambda *_: print, comms, 60, weak=True) == {1: 1, 2: 1.5}


@on_ranks(1, 2, 3, 4)
def test_each_group_shares_the_batch_and_no_other_rank_takes_part(comms):
    seen = []

    def make_step(group, samples):
        value = torch.ones(1)

        def step():
            seen.append((group.world_size, samples))
            group.all_reduce(value.fill_(1))
            assert value.item() == group.world_size

        return step

    n = comms.world_size
    counts = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4]}[n]
    for weak in (False, True):
        seen.clear()
        speedups = measure_scaling(make_step, comms, 12, weak=weak, repeat=3)
        assert list(speedups) == counts
        mine = [c for c in counts if comms.rank < c]
        # Five rounds, two of which are not counted. The order of the calls is another in each.
        assert sorted(seen) == sorted([(c, 12 if weak else 12 // c) for c in mine] * 5)
        assert min(speedups.values()) > 0
        everyone = comms.all_gather_data(list(speedups.items()))
        assert all(theirs == everyone[0] for theirs in everyone)


@on_ranks(2)
def test_a_batch_that_does_not_divide_is_refused_on_every_rank(comms):
    with pytest.raises(ValueError, match=rf"rank {comms.rank}: .* divides by 2 ranks, got 7"):
        measure_scaling(lambda *_: print, comms, 7)
