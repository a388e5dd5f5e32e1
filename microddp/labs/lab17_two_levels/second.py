"""Another right one: divided once, and reduced into a copy."""

from typing import NamedTuple

from microddp.allreduce import ring_all_gather, ring_reduce_scatter
from microddp.comms import Comms


class Grid(NamedTuple):
    everyone: Comms
    inside: Comms
    across: Comms


def reduce_gradients(flat, grid):
    flat = flat / grid.everyone.world_size
    part = ring_reduce_scatter(flat, grid.inside).clone()
    ring_reduce_scatter(part, grid.across)
    ring_all_gather(part, grid.across)
    return part
