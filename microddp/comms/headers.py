"""Headers: short texts in which ranks say what they are about to call or to send; ranks in words.

A header has a fixed size, so that a receiver needs to know nothing of what comes, and it is plain
text, so that no rank unpickles what another one sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

HEADER_BYTES = 256  # a call with its shape and dtype fits; longer texts are cut


def describe(tensor: torch.Tensor) -> str:
    """Put dtype and shape into words: ``"float32 (3, 5)"``."""
    return _describe(tensor.dtype, tensor.shape)


@lru_cache(1024)  # every collective asks, mostly for what it asked before
def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def odd_ranks(values: Sequence[Any]) -> tuple[Any, list[int]]:
    """The most frequent of the ranks' values, and the ranks that have another."""
    usual, _ = Counter(values).most_common(1)[0]
    return usual, [rank for rank, value in enumerate(values) if value != usual]


def name_usual(values: Sequence[Any]) -> str:
    """Words for the value that :func:`odd_ranks` calls usual: on a tie, whose value was taken."""
    (usual, most), *others = Counter(values).most_common(2)
    if others and others[0][1] == most:
        return f"rank {values.index(usual)}'s, as none is more frequent"
    return "the most frequent"


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: ``"rank 2"``, ``"ranks 1, 3"``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def name_members(ranks: Sequence[int]) -> str:
    """Ranks as an entry has them: ``"0, 2-3"``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


class Headers:
    """The header messages of a group of ranks, on the device where its backend wants tensors."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def send(self, text: str, dst: int) -> dist.Work:
        """Start to send a header to one rank; ``wait()`` on the result."""
        work = dist.isend(self._encode(text), group=self.group, group_dst=dst)
        assert work is not None  # None only on ranks outside the group
        return work

    def recv(self, src: int) -> str:
        """The next header from one rank."""
        wire = self._encode("")
        dist.recv(wire, group=self.group, group_src=src)
        return self._decode(wire)

    def exchange(self, text: str) -> list[str]:
        """On every rank the headers that all ranks passed, in rank order. A collective."""
        mine = self._encode(text)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, mine, group=self.group)
        return [self._decode(wire) for wire in everyone]

    def _encode(self, text: str) -> torch.Tensor:
        data = bytearray(text.encode()[:HEADER_BYTES].ljust(HEADER_BYTES))
        return torch.frombuffer(data, dtype=torch.uint8).to(self.device)

    def _decode(self, wire: torch.Tensor) -> str:
        return bytes(wire.tolist()).decode(errors="replace").rstrip()
