"""The time of a step: its parts, how long it should take, and what limits it."""

from microddp.performance.alive import bytes_alive
from microddp.performance.analyzer import DDPPerformanceAnalyzer, StepSummary, median_step
from microddp.performance.calibration import measure_network, measured_work
from microddp.performance.failures import Failures
from microddp.performance.hiding import Sends
from microddp.performance.link_speed import LinkSpeed, probe_links
from microddp.performance.memory import Kept, bytes_kept
from microddp.performance.network import Network, Port, Processor
from microddp.performance.prediction import measure_compute, predict_plan
from microddp.performance.profiler import ProfileSummary, profile_steps, quiet_profile
from microddp.performance.rank_times import CollectiveTimes, RankTimes
from microddp.performance.scaling import measure_scaling
from microddp.performance.simulator import Simulated, Way, simulate
from microddp.performance.stragglers import StragglerReport, find_stragglers, straggler_report
from microddp.performance.worth import Outcome, StepBudget, step_budget
from microddp.program import Layer, Work
