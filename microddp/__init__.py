"""Data-parallel training from scratch: what the book's chapters import."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from microddp.comms import Comms, calls, get, init, register_mesh

if TYPE_CHECKING:
    from microddp.ddp import DDP, DistributedDataParallel

__all__ = ["DDP", "Comms", "DistributedDataParallel", "get", "init", "register_mesh"]

calls.taken_by = "microddp.hang"  # loaded when the first group is made


def __getattr__(name: str) -> Any:
    """The wrapper, and each part by its name, loaded when they are asked for."""
    if name in ("DDP", "DistributedDataParallel"):
        return import_module("microddp.ddp").DDP
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
