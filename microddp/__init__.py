"""Data-parallel training from scratch: the core that the book's chapters import."""

from typing import TYPE_CHECKING, Any

from microddp.comms import Comms, calls, get, init, register_mesh

if TYPE_CHECKING:
    from microddp.ddp import DDP, DistributedDataParallel

__all__ = ["DDP", "Comms", "DistributedDataParallel", "get", "init", "register_mesh"]

calls.taken_by = "microddp.hang"  # loaded when the first group is made


def __getattr__(name: str) -> Any:
    """The wrapper, loaded where it is used: who only talks needs none of it."""
    if name in ("DDP", "DistributedDataParallel"):
        from microddp.ddp import DDP

        return DDP
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
