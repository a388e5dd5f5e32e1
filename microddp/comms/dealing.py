"""Scatter and gather by messages, of parts whose shapes only their sender knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from microddp.comms.headers import describe
from microddp.comms.pending import Pending

if TYPE_CHECKING:
    from microddp.comms.collectives import Comms


def _header(tensor: torch.Tensor) -> str:
    """Dtype and sizes, from which a receiver makes a tensor."""
    return " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)])


def dealt(
    comms: Comms, tensor: torch.Tensor | Sequence[torch.Tensor] | None, src: int
) -> torch.Tensor:
    """Deal out what rank ``src`` has; returns this rank's part. See :meth:`Comms.scatter`."""
    parts: list[torch.Tensor] = []
    got = "a list of nothing" if tensor is None else type(tensor).__name__
    if isinstance(tensor, torch.Tensor):
        parts = list(tensor.tensor_split(comms.world_size)) if tensor.dim() else []
        got = describe(tensor)
    elif isinstance(tensor, Sequence):
        parts = list(tensor)
        got = f"a list of {', '.join(type(part).__name__ for part in parts) or 'nothing'}"
    whole = len(parts) == comms.world_size and all(isinstance(p, torch.Tensor) for p in parts)
    comms.fail_together(
        "" if whole or comms.rank != src else got,
        f"a tensor to scatter or a list of {comms.world_size} tensors",
        ValueError,
    )
    if comms.rank != src:
        dtype, *shape = comms.headers.recv(src).split()
        part = torch.empty(
            [int(size) for size in shape], dtype=getattr(torch, dtype), device=comms.device
        )
        comms.recv(part, src)
        return part
    sending: list[Pending] = []
    for peer, part in enumerate(parts):
        if peer != src:
            sending.append(Pending(comms.headers.send(_header(part), peer).wait))
            sending.append(comms.send(part.to(comms.device).contiguous(), peer, async_op=True))
    for pending in sending:
        pending.wait()
    return parts[src].to(comms.device).contiguous()


def collected(comms: Comms, tensor: torch.Tensor, dst: int) -> torch.Tensor | None:
    """Join all ranks' tensors on rank ``dst``. See :meth:`Comms.gather`."""
    # Everybody hears from everybody, so that all can refuse together.
    said = [text.split() for text in comms.headers.exchange(_header(tensor))]
    if tensor.dim() == 0 or len({(len(t), t[0], *t[2:]) for t in said}) > 1:
        raise ValueError(
            f"rank {comms.rank}: gather expected tensors alike but for their first dimension, "
            f"got {'; '.join(f'rank {rank}: {t}' for rank, t in enumerate(said))}"
        )
    if comms.rank != dst:
        comms.send(tensor, dst)
        return None
    parts = [
        tensor if peer == dst else tensor.new_empty((int(what[1]), *tensor.shape[1:]))
        for peer, what in enumerate(said)
    ]
    receiving = [
        comms.recv(part, peer, async_op=True) for peer, part in enumerate(parts) if peer != dst
    ]
    for pending in receiving:
        pending.wait()
    return torch.cat(parts)
