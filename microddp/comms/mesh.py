"""One name for a rank's place in a device mesh: :func:`get`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_registered_mesh: DeviceMesh | None = None


def register_mesh(mesh: DeviceMesh | None) -> None:
    """Make ``mesh`` the one that :func:`get` answers for by default; ``None`` forgets it."""
    global _registered_mesh
    _registered_mesh = mesh


def get(what: str, mesh: DeviceMesh | None = None) -> Any:
    """One fact about this process's place in a mesh, or in the whole job without one.

    Args:
        what: ``"ws"`` world size, ``"rank"`` rank in the group, ``"grank"`` rank in the whole
            job, ``"lrank"`` rank on this machine, ``"pg"`` the process group.
        mesh: a one-dimensional mesh (``mesh["dp"]`` of a larger one). Default: the registered
            mesh, else all ranks.

    Raises:
        ValueError: an unknown ``what``, or a mesh of several dimensions.
        RuntimeError: before :func:`init`.
    """
    if not dist.is_initialized():
        raise RuntimeError("call microddp.init() before get()")
    mesh = mesh or _registered_mesh
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"rank {dist.get_rank()}: expected a one-dimensional mesh, got dimensions "
            f"{mesh.mesh_dim_names}; choose one, as in mesh['dp']"
        )
    group = mesh.get_group() if mesh is not None else dist.group.WORLD
    match what:
        case "ws":
            return dist.get_world_size(group)
        case "rank":
            return dist.get_rank(group)
        case "grank":
            return dist.get_rank()
        case "lrank":
            return int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        case "pg":
            return group
    raise ValueError(
        f"rank {dist.get_rank()}: expected 'ws', 'rank', 'grank', 'lrank' or 'pg', got {what!r}"
    )
