"""Failures and checkpoints: formulas against played ones, the best interval, refusals."""

import math

import pytest

from microddp.performance.failures import Failures

HOUR = 3600.0


@pytest.mark.parametrize("interval", [300.0, 1800.0, 4 * HOUR])
def test_the_formula_is_what_playing_gives(interval):
    failures = Failures(3 * HOUR, 60.0, 600.0)
    played = failures.play(interval, 40_000, seed=2)
    assert played == pytest.approx(failures.useful(interval), rel=0.03)


def test_without_failures_only_checkpoints_cost():
    assert Failures(math.inf, 60.0, 600.0).useful(540.0) == 0.9
    assert Failures(1e12, 0.0, 600.0).useful(600.0) == pytest.approx(1, abs=1e-6)


def test_youngs_interval_is_near_the_best():
    failures = Failures(5e7, 60.0, 300.0).of(1024)
    assert failures.between == 5e7 / 1024
    assert failures.best_interval == pytest.approx(math.sqrt(2 * 60 * 5e7 / 1024))
    best = max(failures.useful(60.0 * 1.02**k) for k in range(400))
    assert failures.useful(failures.best_interval) > best - 0.001
    assert failures.useful() == failures.useful(failures.best_interval)
    for other in (0.2, 5):
        assert failures.useful(other * failures.best_interval) < best - 0.01


def test_a_checkpoint_that_takes_no_time_leaves_the_restarts():
    nothing = Failures(125 * HOUR, 0, 60).useful()
    assert nothing == pytest.approx(math.exp(-60 / (125 * HOUR)))
    assert Failures(125 * HOUR, 1e-6, 60).useful() == pytest.approx(nothing, abs=1e-5)
    assert Failures(math.inf, 60, 60).useful() == 1


def test_what_fails_faster_than_it_saves_is_never_through():
    assert Failures(10.0, 60.0, 60.0).useful(20_000.0) == 0
    assert Failures(10.0, 1.0, 60.0).useful(5.0) < 0.01
    assert Failures(1.0, 1.0, 1.0).play(1000.0, 1) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Failures(0, 1, 1), "expected a time between failures above 0, got 0"),
        (lambda: Failures(1, -1, 1), "expected checkpoint to take 0 seconds or more, got -1"),
        (lambda: Failures(1, 1, 1).of(0), "expected at least one device, got 0"),
        (lambda: Failures(1, 1, 1).useful(0), "expected an interval above 0 seconds, got 0"),
        (lambda: Failures(1, 1, 1).play(0, 1), "expected an interval above 0 seconds, got 0"),
        (lambda: Failures(1, 1, 1).play(1, 0), "expected at least one interval, got 0"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
