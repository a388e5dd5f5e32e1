"""What a call must be given, checked on this rank before anything is sent.

All raise ``ValueError`` with the rank, what was expected and what came.
"""

from __future__ import annotations

import torch

from microddp.comms.place import Place


def check_rank(place: Place, name: str, rank: int) -> None:
    """Expect a rank of the group."""
    if not 0 <= rank < place.world_size:
        raise ValueError(
            f"rank {place.rank}: expected {name} in 0..{place.world_size - 1}, got {rank}"
        )


def check_peer(place: Place, name: str, rank: int) -> None:
    """Expect another rank of the group."""
    check_rank(place, name, rank)
    if rank == place.rank:
        raise ValueError(f"rank {place.rank}: expected another rank as {name}, got itself")


def check_tensor(place: Place, call: str, tensor: torch.Tensor) -> None:
    """Expect a contiguous tensor on the rank's kind of device."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"rank {place.rank}: {call} expected a contiguous tensor, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    if tensor.device.type != place.device.type:
        raise ValueError(
            f"rank {place.rank}: {call} expected a tensor on {place.device}, got {tensor.device}"
        )


def check_divides(place: Place, call: str, tensor: torch.Tensor) -> None:
    """Expect a tensor that splits into equal parts along its first dimension, one a rank."""
    check_tensor(place, call, tensor)
    if tensor.dim() == 0 or tensor.shape[0] % place.world_size:
        raise ValueError(
            f"rank {place.rank}: {call} expected a first dimension that is a multiple of "
            f"{place.world_size}, got shape {tuple(tensor.shape)}"
        )
