"""Copies of one model on many ranks: made equal, and shown to be equal."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from microddp.comms import Comms, Pending, describe, name_ranks, name_usual, odd_ranks

BROADCAST_BYTES = 64 << 20  # bounds the copy that a broadcast of many tensors needs


def broadcast_parameters(module: nn.Module, comms: Comms, src: int = 0) -> None:
    """Overwrite every parameter and buffer with rank ``src``'s.

    The ranks' models must have the same parameters and buffers: see :func:`check_replicas`.
    """
    broadcast_tensors([*module.parameters(), *module.buffers()], comms, src)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor],
    comms: Comms,
    src: int = 0,
    broadcast: Callable[[torch.Tensor, int], Pending] | None = None,
) -> None:
    """Overwrite tensors with rank ``src``'s, many in a message: as bytes, whatever their dtype.

    Args:
        tensors: of any shapes, the same on every rank.
        comms: the ranks.
        src: whose they are.
        broadcast: begins to send a tensor from a rank; default: the backend.
    """
    broadcast = broadcast or partial(comms.broadcast, async_op=True)
    # Those of one device together, its widest dtype first: each part begins where its dtype may.
    coming = sorted(tensors, key=lambda t: (str(t.device), -t.itemsize, str(t.dtype)))
    under_way: deque[tuple[list[list[torch.Tensor]], torch.Tensor, Pending]] = deque()

    def complete_oldest() -> None:
        kinds, wire, pending = under_way.popleft()
        pending.wait()
        if comms.rank != src:
            parts = torch.split(wire, [sum(tensor.nbytes for tensor in alike) for alike in kinds])
            for alike, part in zip(kinds, parts, strict=True):
                new = _unflatten_dense_tensors(part.view(alike[0].dtype), alike)  # type: ignore[no-untyped-call]
                torch._foreach_copy_(alike, list(new))

    with torch.no_grad():
        while coming:
            here = [t for t in coming if t.device == coming[0].device]
            held = itertools.accumulate(tensor.nbytes for tensor in here)
            count = max(1, sum(nbytes <= BROADCAST_BYTES for nbytes in held))
            batch, coming = coming[:count], coming[count:]
            kinds = [list(alike) for _, alike in itertools.groupby(batch, lambda t: t.dtype)]
            wire = torch.cat([t.reshape(-1).contiguous().view(torch.uint8) for t in batch])
            under_way.append((kinds, wire, broadcast(wire, src)))
            if len(under_way) > 1:  # two at a time
                complete_oldest()
        while under_way:
            complete_oldest()


def check_structure(
    module: nn.Module, comms: Comms, options: Mapping[str, object] | None = None
) -> None:
    """Raise, on every rank, unless all ranks have the same parameters, buffers and options.

    Sends a hash of 8 bytes, and the names only where the hashes differ.

    Args:
        module: whose parameters and buffers are compared.
        comms: the ranks.
        options: what else must be the same, by name.

    Raises:
        RuntimeError: names the first that differs in name, shape, dtype or whether it requires a
            gradient, on the first rank that is not like rank 0, with what both have; the options
            come first.
    """
    tensors = [
        f"{name}: {_in_words(tensor)}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    mine = [[f"{name}={value}" for name, value in (options or {}).items()], tensors]
    digest = torch.tensor([_digest(json.dumps(mine).encode())], device=comms.device)
    if len(set(comms.all_gather(digest).flatten().tolist())) == 1:
        return
    for part in zip(*comms.all_gather_data(mine), strict=True):  # options, then tensors
        odd = next((rank for rank, theirs in enumerate(part) if theirs != part[0]), 0)
        for here, there in itertools.zip_longest(part[0], part[odd], fillvalue="nothing"):
            if here != there:
                raise RuntimeError(
                    f"rank {comms.rank}: expected the same parameters, buffers and options on "
                    f"every rank, got {here} on rank 0 ({len(part[0])} in all) and {there} on "
                    f"rank {odd} ({len(part[odd])})"
                )


def check_replicas(module: nn.Module, comms: Comms) -> None:
    """Raise, on every rank, unless all ranks hold bitwise the same parameters.

    Sends a hash of 8 bytes for each parameter, not the parameters.

    Raises:
        RuntimeError: names the first parameter that differs, and the ranks that differ from the
            most frequent version, or from one of several; or as :func:`check_structure`.
    """
    # First, since ranks with other parameters would send other numbers of hashes.
    check_structure(module, comms)
    named = list(module.named_parameters())
    digests = [tensor_digest(p) for _, p in named]
    everyone = comms.all_gather(torch.tensor(digests, dtype=torch.int64, device=comms.device))
    for (name, parameter), column in zip(named, everyone.T.tolist(), strict=True):
        _, odd = odd_ranks(column)
        if odd:
            raise RuntimeError(
                f"rank {comms.rank}: parameter {name} ({describe(parameter)}) on {name_ranks(odd)} "
                f"differs from {name_usual(column)}: expected equal values on all "
                f"{comms.world_size} ranks; start from one seed or call broadcast_parameters"
            )


def _in_words(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return "not initialised"
    return describe(tensor) + ("" if tensor.requires_grad else ", no gradient")


def tensor_digest(tensor: torch.Tensor) -> int:
    """A hash of 8 bytes of a tensor's bits."""
    flat = tensor.detach().contiguous().cpu().flatten()
    return _digest(flat.view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
