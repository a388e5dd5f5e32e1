"""Where the time of a step goes, how long it should take, and what limits it."""

from microddp.performance.analyzer import (
    DDPPerformanceAnalyzer,
    Overhead,
    StepSummary,
    StepTimes,
    break_down,
    compare_strategies,
    median_step,
)
from microddp.performance.prediction import (
    Bucket,
    ComputeTimes,
    Prediction,
    cores_for_each_rank,
    measure_all_reduce,
    measure_compute,
    plan_by_name,
    predict_plan,
    predict_step,
)
from microddp.performance.profiler import ProfileSummary, profile_steps
from microddp.performance.roofline import Rates, WorkCounter, find_bottleneck, measure_rates
from microddp.performance.scaling import Scaling, ScalingPoint, measure_scaling

__all__ = [
    "Bucket",
    "ComputeTimes",
    "DDPPerformanceAnalyzer",
    "Overhead",
    "Prediction",
    "ProfileSummary",
    "Rates",
    "Scaling",
    "ScalingPoint",
    "StepSummary",
    "StepTimes",
    "WorkCounter",
    "break_down",
    "compare_strategies",
    "cores_for_each_rank",
    "find_bottleneck",
    "measure_all_reduce",
    "measure_compute",
    "measure_rates",
    "measure_scaling",
    "median_step",
    "plan_by_name",
    "predict_plan",
    "predict_step",
    "profile_steps",
]
