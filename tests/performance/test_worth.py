"""Planned steps: cases worked out by hand, and the inequality of chapter 08."""

import itertools
import math

import pytest
from planned_step import step_budget

from microddp.allreduce import ring_cost
from microddp.performance import step_budget as of_the_package

# 6 x 1e9 x 1000 operations at 6e12 a second: 1 s of computing, 2/3 s of it in backward.
PLAN = {"parameters": 1e9, "tokens": 1000, "peak": 1e13, "utilisation": 0.6}


@pytest.mark.parametrize(
    ("more", "communication", "overlapped", "unhidden"),
    # Of the outcomes: exposed, step, speed-up, efficiency, break-even.
    [
        # 2 x 3/4 x 4e9 bytes at 3e9 a second. All that 4 devices save is 3 s, with hiding 11/3 s.
        (
            {"devices": 4, "bandwidth": 3e9},
            2,
            (4 / 3, 7 / 3, 12 / 7, 3 / 7, 6e9 / (11 / 3)),
            (2, 3, 4 / 3, 1 / 3, 2e9),
        ),
        # Half the bytes, as long as backward and a third.
        (
            {"devices": 4, "bandwidth": 3e9, "gradient_bytes": 2},
            1,
            (1 / 3, 4 / 3, 3, 3 / 4, 3e9 / (11 / 3)),
            (1, 2, 2, 1 / 2, 1e9),
        ),
        # 6 rounds of half a second: what 4 devices save, so that no link is fast enough without
        # hiding.
        (
            {"devices": 4, "bandwidth": 6e9, "latency": 0.5},
            4,
            (10 / 3, 13 / 3, 12 / 13, 3 / 13, 6e9 / (2 / 3)),
            (4, 5, 4 / 5, 1 / 5, math.inf),
        ),
        # Four micro-batches compute for 4 s, and the last backward hides 2/3 s as before.
        (
            {"devices": 2, "bandwidth": 4e9, "accumulation": 4},
            1,
            (1 / 3, 13 / 3, 24 / 13, 12 / 13, 4e9 / (14 / 3)),
            (1, 5, 8 / 5, 4 / 5, 1e9),
        ),
        # Nothing is sent, and nobody is faster than itself.
        (
            {"devices": 1, "bandwidth": 1, "latency": 1},
            0,
            (0, 1, 1, 1, math.inf),
            (0, 1, 1, 1, math.inf),
        ),
    ],
)
def test_a_step_is_planned(more, communication, overlapped, unhidden):
    budget = step_budget(**PLAN, **more)
    if "accumulation" not in more:
        plain = of_the_package(**PLAN, **more)
        for name in ("compute", "communication"):
            assert getattr(plain, name) == pytest.approx(getattr(budget, name))
        for ours, theirs in (
            (plain.overlapped, budget.overlapped),
            (plain.unhidden, budget.unhidden),
        ):
            found = theirs.exposed, theirs.step, theirs.speedup
            assert (ours.exposed, ours.step, ours.speedup) == pytest.approx(found)
    assert budget.compute == more.get("accumulation", 1)
    assert budget.communication == pytest.approx(communication)
    assert budget.memory == 16e9
    for outcome, expected in ((budget.overlapped, overlapped), (budget.unhidden, unhidden)):
        found = outcome.exposed, outcome.step, outcome.speedup, outcome.efficiency
        assert (*found, outcome.break_even) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("more", "memory", "overlapped", "unhidden"),
    # Half an all-reduce takes a second. Of the outcomes: exposed, of that in forward, break-even.
    [
        ({"stage": 1}, 10e9, (1, 2 / 3, 1.5e9), (2, 1, 2e9)),
        ({"stage": 2}, 7e9, (1, 2 / 3, 1.5e9), (2, 1, 2e9)),
        ({"stage": 3}, 4e9, (2, 2 / 3, 2.25e9), (3, 1, 3e9)),
        # Gathered and reduced in both micro-batches; four devices save 6 s.
        ({"stage": 3, "accumulation": 2}, 4e9, (4, 4 / 3, 2.25e9), (6, 2, 3e9)),
        ({"stage": 1, "accumulation": 2}, 10e9, (1, 2 / 3, 3e9 / 3.5), (2, 1, 1e9)),
    ],
)
def test_a_sharded_step_is_planned(more, memory, overlapped, unhidden):
    budget = step_budget(**PLAN, devices=4, bandwidth=3e9, **more)
    assert budget.memory == pytest.approx(memory)
    assert budget.communication == pytest.approx(unhidden[0])
    assert budget.gathering == pytest.approx(unhidden[1])
    for outcome, expected in ((budget.overlapped, overlapped), (budget.unhidden, unhidden)):
        found = outcome.exposed, outcome.gathering, outcome.break_even
        assert found == pytest.approx(expected)
        assert outcome.step == pytest.approx(budget.compute + expected[0])
        again = step_budget(**PLAN, devices=4, bandwidth=outcome.break_even, **more)
        worth = again.overlapped if outcome is budget.overlapped else again.unhidden
        assert worth.speedup == pytest.approx(1)


def test_communication_is_that_of_the_ring():
    for n in (1, 2, 3, 8, 100):
        budget = step_budget(**PLAN, devices=n, bandwidth=2e9, latency=1e-3)
        ring = ring_cost(n, 4e9).seconds(1e-3, 1 / 2e9)
        assert budget.communication == pytest.approx(ring)


def test_without_hiding_the_bandwidth_is_that_of_chapter_08():
    for parameters, n, start_up in itertools.product((1e6, 1e9), (2, 8, 64), (0, 1e-6, 1e-4, 1)):
        rate, samples = 6e12, 1024
        budget = step_budget(
            parameters,
            samples,
            n,
            peak=rate,
            utilisation=1,
            bandwidth=1e9,
            latency=start_up / (2 * (n - 1)),
        )
        saved = (n - 1) * 6 * parameters * samples / rate - start_up
        expected = 8 * parameters * (n - 1) / n / saved if saved > 0 else math.inf
        assert budget.unhidden.break_even == pytest.approx(expected)


@pytest.mark.parametrize("how", ["overlapped", "unhidden"])
def test_a_link_above_the_break_even_is_worth_it_and_one_below_is_not(how):
    worth = []
    for parameters, n, latency, micro_batches in itertools.product(
        (1e5, 1e9), (1, 2, 5, 1024), (0, 1e-4), (1, 8)
    ):
        plan = {**PLAN, "parameters": parameters, "latency": latency, "accumulation": micro_batches}
        limit = getattr(step_budget(**plan, devices=n, bandwidth=1e9), how).break_even
        links = (limit * 0.999, limit * 1.001) if limit < math.inf else (1e3, 1e15)
        found = [
            getattr(step_budget(**plan, devices=n, bandwidth=link), how).speedup > 1
            for link in links
        ]
        assert found == ([False, True] if limit < math.inf else [False, False])
        worth += found
    assert {True, False} == set(worth)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": 0}, "expected parameters above 0, got 0"),
        ({"tokens": -1}, "expected tokens above 0, got -1"),
        ({"bandwidth": math.inf}, "expected bandwidth above 0, got inf"),
        ({"utilisation": 40}, "utilisation above 0 and at most 1, got 40"),
        ({"latency": -1e-6}, "latency of 0 seconds or more, got -1e-06"),
        ({"devices": 0}, "expected devices to be a whole number from 1 on, got 0"),
        ({"devices": 1.5}, "expected devices to be a whole number from 1 on, got 1.5"),
    ],
)
def test_refuses_numbers_out_of_their_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        of_the_package(**{**PLAN, "devices": 2, "bandwidth": 1e9, **wrong})
