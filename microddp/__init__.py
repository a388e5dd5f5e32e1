"""Data-parallel training from scratch: the core that the book's chapters import."""

from microddp.comms import Comms
from microddp.ddp import DDP, DistributedDataParallel
from microddp.job import init
from microddp.mesh import get, register_mesh

__all__ = ["DDP", "Comms", "DistributedDataParallel", "get", "init", "register_mesh"]
