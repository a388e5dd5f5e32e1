"""Plans of trainings on devices that nobody has at hand: simulated, with the simulator's error."""

from microddp.plan.config import count_parameters
from microddp.plan.library import Device, Link, devices, links, named, network_of
from microddp.plan.planning import Plan, Training, cheapest, plan, sweep
from microddp.plan.published import Compared, compare_published
