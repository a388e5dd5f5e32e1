"""Checks of arguments, on this rank, before anything is sent.

All raise ``ValueError`` with the rank, what was expected and what came.
"""

from __future__ import annotations

import torch

from microddp.comms.identity import Identity


def check_rank(who: Identity, name: str, rank: int) -> None:
    """Expect a rank of the group."""
    if not 0 <= rank < who.world_size:
        raise ValueError(f"rank {who.rank}: expected {name} in 0..{who.world_size - 1}, got {rank}")


def check_peer(who: Identity, name: str, rank: int) -> None:
    """Expect another rank of the group."""
    check_rank(who, name, rank)
    if rank == who.rank:
        raise ValueError(f"rank {who.rank}: expected another rank as {name}, got itself")


def check_contiguous(who: Identity, call: str, tensor: torch.Tensor) -> None:
    """Expect a contiguous tensor."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"rank {who.rank}: {call} expected a contiguous tensor, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def check_tensor(who: Identity, call: str, tensor: torch.Tensor) -> None:
    """Expect a contiguous tensor on the rank's kind of device."""
    check_contiguous(who, call, tensor)
    if tensor.device.type != who.device.type:
        raise ValueError(
            f"rank {who.rank}: {call} expected a tensor on {who.device}, got {tensor.device}"
        )


def check_divides(who: Identity, call: str, tensor: torch.Tensor) -> None:
    """Expect a tensor that splits into equal parts along its first dimension, one a rank."""
    check_tensor(who, call, tensor)
    if tensor.dim() == 0 or tensor.shape[0] % who.world_size:
        raise ValueError(
            f"rank {who.rank}: {call} expected a first dimension that is a multiple of "
            f"{who.world_size}, got shape {tuple(tensor.shape)}"
        )
