"""The still table of the buckets that readers refill, and what the script is given."""

import re

import pytest

from microddp import figures
from microddp.fitted import FittedCost
from microddp.performance import predict_plan
from microddp.report import human_seconds
from microddp.step_times import Bucket, ComputeTimes
from microddp.timing import Timing

SIZES = {"c": 4096, "b": 1024, "a": 8192}
COMPUTE = ComputeTimes(0.1, 0.3, {"c": 0.1, "b": 0.15, "a": 0.3}, 0.0, 1e-9)
COST = FittedCost(0.02, 1e-5)
STEPS = {1: Timing((0.6, 0.5, 0.7)), 5000: Timing((0.4,)), 1 << 20: Timing((0.55,))}


def test_the_table_has_each_measured_cap():
    picture = figures.explore_buckets(SIZES, COMPUTE, COST, STEPS, predict=predict_plan, title="T")
    plans = {
        "each gradient alone": [("c",), ("b",), ("a",)],
        "4.88 KiB": [("c", "b"), ("a",)],
        "1 MiB": [("c", "b", "a")],
    }
    rows = re.findall(r'<th scope="row">(.+?)</th><td>(.+?)</tr>', picture.still)
    assert [name for name, _ in rows] == list(plans)
    for (name, cells), timing in zip(rows, STEPS.values(), strict=True):
        buckets = [Bucket(names, sum(SIZES[n] for n in names)) for names in plans[name]]
        expected = predict_plan(COMPUTE, buckets, COST)
        assert cells.removesuffix("</td>").split("</td><td>") == [
            str(len(buckets)),
            human_seconds(expected.step),
            human_seconds(expected.exposed),
            str(timing),
        ]


def test_the_script_is_given_bytes_and_moments_in_the_planners_order():
    data = figures.explore_buckets(
        SIZES, COMPUTE, COST, STEPS, predict=predict_plan, title="T"
    ).data
    assert data["gradients"] == [["c", 4096, 0.1], ["b", 1024, 0.15], ["a", 8192, 0.3]]
    assert data["measured"][0] == pytest.approx([1, 0.55, 0.6, 0.65])


def test_a_gradient_that_was_not_recorded_is_not_guessed():
    with pytest.raises(KeyError, match="d"):
        figures.explore_buckets({"d": 4}, COMPUTE, COST, STEPS, predict=predict_plan, title="T")
