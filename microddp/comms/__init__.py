"""Ranks that talk: joining a job, messages, collectives, and what ranks agree on."""

from microddp.comms.collectives import Comms
from microddp.comms.headers import describe, name_members, name_ranks, name_usual, odd_ranks
from microddp.comms.job import init
from microddp.comms.machine import cpu_cores, cpu_name, peak_memory
from microddp.comms.mesh import get, register_mesh
from microddp.comms.pending import Exchange, Pending
