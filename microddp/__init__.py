"""Data-parallel training from scratch: the core that the book's chapters import."""

from microddp.comms import Comms, calls, get, init, register_mesh
from microddp.ddp import DDP, DistributedDataParallel

__all__ = ["DDP", "Comms", "DistributedDataParallel", "get", "init", "register_mesh"]

calls.taken_by = "microddp.hang"  # loaded when the first group is made
