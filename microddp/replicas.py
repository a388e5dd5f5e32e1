"""Copies of one model on many ranks: made equal, and shown to be equal."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import nn

from microddp.comms import Comms
from microddp.headers import describe


def broadcast_parameters(module: nn.Module, comms: Comms, src: int = 0) -> None:
    """Overwrite every parameter and buffer with rank ``src``'s.

    The ranks' models must have the same parameters and buffers: see :func:`check_replicas`.
    """
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.contiguous()
            comms.broadcast(whole, src)
            tensor.copy_(whole)


def check_replicas(module: nn.Module, comms: Comms) -> None:
    """Raise, on every rank, unless all ranks hold bitwise the same parameters.

    Sends a hash of 8 bytes for each parameter, not the parameters.

    Raises:
        RuntimeError: names the first parameter that differs in name, shape, dtype or value, and
            the ranks that differ from the most frequent version.
    """
    named = list(module.named_parameters())
    # The structure first: ranks with other parameters would send other numbers of hashes.
    names = [f"{name}: {describe(p)}" for name, p in named]
    digests = [_digest("\n".join(names).encode())]
    everyone = comms.all_gather(torch.tensor(digests, device=comms.device))
    if odd := _odd_ranks(everyone[:, 0].tolist()):
        raise RuntimeError(
            f"rank {comms.rank}: expected the same parameters on every rank, but those of "
            f"{odd} have other names, shapes or dtypes; here: {', '.join(names)}"
        )
    digests = [_digest(_raw(p)) for _, p in named]
    everyone = comms.all_gather(torch.tensor(digests, dtype=torch.int64, device=comms.device))
    for (name, parameter), column in zip(named, everyone.T.tolist(), strict=True):
        if odd := _odd_ranks(column):
            raise RuntimeError(
                f"rank {comms.rank}: parameter {name} ({describe(parameter)}) on {odd} differs "
                f"from the other ranks': expected equal values on all {comms.world_size} ranks; "
                "start from one seed or call broadcast_parameters"
            )


def _odd_ranks(values: list[int]) -> str:
    usual, _ = Counter(values).most_common(1)[0]
    odd = [str(rank) for rank, value in enumerate(values) if value != usual]
    return f"rank{'s' if len(odd) > 1 else ''} {', '.join(odd)}" if odd else ""


def _raw(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().contiguous().cpu().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
