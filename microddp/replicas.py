"""Copies of one model on many ranks: made equal, and shown to be equal."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from microddp.comms import Comms, Pending, describe, name_ranks, name_usual, odd_ranks

BROADCAST_BYTES = 64 << 20  # bounds the copy that a broadcast of many tensors needs
_copy: Callable[..., object] = torch.no_grad()(torch._foreach_copy_)


def broadcast_parameters(module: nn.Module, comms: Comms, src: int = 0) -> None:
    """Overwrite every parameter and buffer with rank ``src``'s.

    The ranks' models must have the same parameters and buffers: see :func:`check_replicas`.
    """
    broadcast_tensors([*module.parameters(), *module.buffers()], comms, src)


def broadcast_tensors(tensors: Iterable[torch.Tensor], comms: Comms, src: int = 0) -> None:
    """Overwrite tensors with rank ``src``'s, many in a message: as bytes, whatever their dtype.

    Args:
        tensors: of any shapes, the same on every rank.
        comms: the ranks.
        src: the rank that has the values.
    """
    under_way: deque[Pending] = deque()
    for packed in pack(tensors):
        under_way.append(packed.broadcast(comms, src, partial(comms.broadcast, async_op=True)))
        if len(under_way) > 1:  # two at a time
            under_way.popleft().wait()
    for pending in under_way:
        pending.wait()


def pack(tensors: Iterable[torch.Tensor]) -> Iterator[Packed]:
    """Flat buffers for tensors: each of one device, with several tensors only up to 64 MiB."""
    # The widest dtype first, so that each tensor begins where its dtype may.
    ordered = sorted(tensors, key=lambda t: (str(t.device), -t.itemsize))
    while ordered:
        here = [t for t in ordered if t.device == ordered[0].device]
        held = itertools.accumulate(tensor.nbytes for tensor in here)
        count = max(1, sum(nbytes <= BROADCAST_BYTES for nbytes in held))
        yield Packed(here[:count])
        ordered = ordered[count:]


class Packed:
    """Tensors of one device, and a flat buffer of bytes in which they travel together."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        sizes = [tensor.nbytes for tensor in tensors]
        self.wire = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        self.parts = [
            part.view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, torch.split(self.wire, sizes), strict=True)
        ]

    def broadcast(
        self, comms: Comms, src: int, send: Callable[[torch.Tensor, int], Pending]
    ) -> Pending:
        """Begin to overwrite the tensors with rank ``src``'s, which ``send`` broadcasts flat."""
        if comms.rank == src:
            _copy(self.parts, self.tensors)
            return send(self.wire, src)
        return Pending(send(self.wire, src).wait, partial(_copy, self.tensors, self.parts))


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
        f"{name}: {in_words(tensor)}"
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


def in_words(tensor: torch.Tensor) -> str:
    """Describe a tensor, as far as :func:`check_structure` compares it."""
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return "not initialised"
    return describe(tensor) + ("" if tensor.requires_grad else ", no gradient")


def tensor_digest(tensor: torch.Tensor) -> int:
    """A hash of 8 bytes of a tensor's bits."""
    flat = tensor.detach().contiguous().cpu().flatten()
    return _digest(flat.view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
