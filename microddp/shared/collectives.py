"""Collectives of the ranks of one machine through shared memory, without a message.

A large tensor is cut into a chunk for each rank, which that rank reduces, as in a ring. It passes
through buffers that all ranks have mapped, a piece of each chunk at a time: what one rank has just
written, the others read from the cache. While one piece is reduced, the next is copied in and the
last one out, with one barrier after each such step. One rank reduces each element, in rank order:
the bits are the same on all ranks, and in every run.

A tensor of :meth:`~microddp.shared.region.SharedRegion.zeros` is in shared memory already. It is
reduced where it is, and nothing is copied in or out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from microddp.allreduce import flattened
from microddp.comms import Comms
from microddp.comms.checks import check_contiguous, check_rank
from microddp.comms.headers import describe
from microddp.shared.region import BUFFER_BYTES, NOT_SHARED, SharedRegion, region_of

# Up to this size, of all ranks' tensors together, each rank reduces everything itself, after one
# barrier. Measured on two cores (AMD EPYC, November 2026): 256 KiB take 2 ranks 45 us so, and 57 by
# reduce-scatter and all-gather; 4 ranks 330 and 650.
ONE_SHOT_BYTES = 1 << 20
PIECE_BYTES = 1 << 18  # reduced at a time where nothing is copied, so that it stays in the cache

Combine = Callable[..., torch.Tensor]
Column = Sequence[torch.Tensor]  # one piece of each rank's chunk, in rank order
Stage = Callable[[Column], None]


def shared_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place through shared memory.

    With a large tensor of S bytes, a rank copies (n-1)/n S in and as much out, reduces n pieces of
    S/n and copies the result, S/n, home. A small tensor it copies in, and reduces n S. Of a tensor
    in shared memory it reduces n pieces of S/n, and writes the result to n-1 others. Scratch: 5 MiB
    a rank, whatever the size.

    Args:
        tensor: in main memory; any shape, the same on every rank.
        comms: ranks of one machine. The first call of a group maps its memory.
        op: ``"sum"``, ``"mean"`` (floating point or complex), ``"max"``, ``"min"``, ``"product"``.

    Raises:
        ValueError: an unknown ``op``, or one that the dtype does not have; a tensor on a GPU.
        RuntimeError: on every rank: the ranks are on several machines or may not share memory, they
            made different calls, a rank ended, or the time-out passed.
    """
    region = _region(tensor, comms)
    call = f"shared_all_reduce({describe(tensor)}, op={op})"
    with comms.agree(call), flattened(tensor, comms, op) as (flat, combine):
        if flat.nbytes * region.size <= ONE_SHOT_BYTES:
            _one_shot(region, call, flat, combine)
        elif (offset := region.offset_of(flat)) != NOT_SHARED:
            _in_place(region, f"{call} in shared memory", flat, combine, offset)
        else:
            steps = _Steps(region, flat.dtype, combine)
            columns = _columns(flat.tensor_split(region.size), BUFFER_BYTES // region.size)
            _run(region, call, columns, [steps.copy_in, steps.reduce, steps.copy_out])


def shared_reduce_scatter(
    tensor: torch.Tensor,
    comms: Comms,
    op: str = "sum",
    chunks: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Reduce over all ranks so that each rank has its chunk of the result, in place.

    The rest of ``tensor`` is left as it was; for a mean, divided. Other arguments and errors are
    those of :func:`shared_all_reduce`.

    Args:
        tensor: contiguous.
        chunks: views of the flattened tensor, one for each rank; default: ``torch.tensor_split``.

    Returns:
        This rank's chunk, a flat view into ``tensor``.
    """
    region = _region(tensor, comms)
    check_contiguous(comms, "shared_reduce_scatter", tensor)
    call = f"shared_reduce_scatter({describe(tensor)}, op={op})"
    with comms.agree(call), flattened(tensor, comms, op) as (flat, combine):
        chunks = chunks or flat.tensor_split(region.size)
        steps = _Steps(region, flat.dtype, combine)
        columns = _columns(chunks, BUFFER_BYTES // region.size)
        _run(region, call, columns, [steps.copy_in, steps.reduce_in_place])
    return chunks[region.rank]


def shared_all_gather(
    tensor: torch.Tensor, comms: Comms, chunks: Sequence[torch.Tensor] | None = None
) -> None:
    """Fill ``tensor`` with every rank's chunk of it, in place: the second half of an all-reduce.

    Arguments and errors are those of :func:`shared_reduce_scatter`.
    """
    region = _region(tensor, comms)
    check_contiguous(comms, "shared_all_gather", tensor)
    call = f"shared_all_gather({describe(tensor)})"
    with comms.agree(call), torch.no_grad():
        steps = _Steps(region, tensor.dtype)
        columns = _columns(chunks or tensor.view(-1).tensor_split(region.size), BUFFER_BYTES)
        _run(region, call, columns, [steps.publish, steps.copy_out])


def shared_broadcast(tensor: torch.Tensor, comms: Comms, src: int = 0) -> None:
    """Overwrite ``tensor`` on every rank with rank ``src``'s, in place.

    Errors are those of :func:`shared_all_reduce`.

    Args:
        tensor: contiguous.
        src: the rank that has the values.

    Raises:
        ValueError: also if there is no rank ``src``.
    """
    check_rank(comms, "src", src)
    region = _region(tensor, comms)
    check_contiguous(comms, "shared_broadcast", tensor)
    call = f"shared_broadcast({describe(tensor)}, src={src})"
    with comms.agree(call), torch.no_grad():
        flat = tensor.view(-1)
        # Rank src's chunk is everything, the others' are empty.
        chunks = [flat if rank == src else flat[:0] for rank in range(region.size)]
        steps = _Steps(region, tensor.dtype)
        _run(region, call, _columns(chunks, BUFFER_BYTES), [steps.publish, steps.copy_out])


def _one_shot(region: SharedRegion, call: str, flat: torch.Tensor, combine: Combine) -> None:
    turn, numel = region.barriers % 2, flat.numel()
    inputs = region.inputs(flat.dtype)
    with region.call(call):
        inputs[region.rank][turn][:numel].copy_(flat)
        region.barrier()
        region.check()
        _reduce([buffers[turn][:numel] for buffers in inputs], combine, flat)


def _in_place(
    region: SharedRegion, call: str, flat: torch.Tensor, combine: Combine, offset: int
) -> None:
    with region.call(call, offset):
        region.barrier()  # all ranks have written their tensors
        mine = [
            region.at(rank, its, flat.numel(), flat.dtype).tensor_split(region.size)[region.rank]
            for rank, its in enumerate(region.check())
        ]
        count = max(1, -(-mine[0].nbytes // PIECE_BYTES))
        for first, *others in zip(*(chunk.tensor_split(count) for chunk in mine), strict=True):
            _reduce([first, *others], combine, first)
            for other in others:
                other.copy_(first)
        region.barrier()  # all ranks have written their results


def _reduce(parts: Sequence[torch.Tensor], combine: Combine, out: torch.Tensor) -> None:
    """Combine the ranks' parts in rank order."""
    first, *others = parts
    if not others:
        out.copy_(first)
    for other in others:
        combine(first, other, out=out)
        first = out


def _columns(chunks: Sequence[torch.Tensor], piece_bytes: int) -> list[Column]:
    """Cut chunks into columns: column j has piece j of every chunk, of ``piece_bytes`` at most."""
    largest = max(chunk.numel() for chunk in chunks)
    count = -(-largest // (piece_bytes // chunks[0].element_size()))
    if count <= 1:
        return [chunks]
    return [*zip(*(chunk.tensor_split(count) for chunk in chunks), strict=True)]


def _run(
    region: SharedRegion, call: str, columns: Sequence[Column], stages: Sequence[Stage]
) -> None:
    """Pipeline all columns through all stages: each stage is one column behind the one before."""
    last = len(columns) + len(stages) - 2
    with region.call(call):
        for step in range(last + 1):
            for behind, stage in enumerate(stages):
                if 0 <= step - behind < len(columns):
                    stage(columns[step - behind])
            if step < last:
                region.barrier()
            if step == 0:
                region.check()


class _Steps:
    """Stages of a collective: what a rank does with a column between two barriers.

    Input buffers come in pairs, and so do output buffers: while the others read the buffer that was
    written before the last barrier, this rank writes the other one.
    """

    def __init__(
        self, region: SharedRegion, dtype: torch.dtype, combine: Combine = torch.add
    ) -> None:
        self.region, self.rank, self.combine = region, region.rank, combine
        self.inputs, self.outputs = region.inputs(dtype), region.outputs(dtype)

    def copy_in(self, column: Column) -> None:
        """Copy the pieces that other ranks reduce into this rank's input buffer, one by one."""
        buffer, start = self.inputs[self.rank][self.region.barriers % 2], 0
        for rank, piece in enumerate(column):
            end = start + piece.numel()
            if rank != self.rank:
                buffer[start:end].copy_(piece)
            start = end

    def reduce_in_place(self, column: Column) -> None:
        """Reduce this rank's piece, of its own values and the others' inputs."""
        self._reduce(column, column[self.rank])

    def reduce(self, column: Column) -> None:
        """Reduce this rank's piece into its output buffer, and copy the result home."""
        piece = column[self.rank]
        result = self.outputs[self.rank][self.region.barriers % 2][: piece.numel()]
        self._reduce(column, result)
        piece.copy_(result)

    def publish(self, column: Column) -> None:
        """Copy this rank's piece into its output buffer."""
        piece = column[self.rank]
        if piece.numel():
            self.outputs[self.rank][self.region.barriers % 2][: piece.numel()].copy_(piece)

    def copy_out(self, column: Column) -> None:
        """Copy the other ranks' pieces out of their output buffers."""
        turn = (self.region.barriers - 1) % 2
        for rank, piece in enumerate(column):
            if rank != self.rank and piece.numel():
                piece.copy_(self.outputs[rank][turn][: piece.numel()])

    def _reduce(self, column: Column, out: torch.Tensor) -> None:
        turn, mine = (self.region.barriers - 1) % 2, column[self.rank]
        start = sum(piece.numel() for piece in column[: self.rank])
        parts = [buffers[turn][start : start + mine.numel()] for buffers in self.inputs]
        # Partial results must not overwrite this rank's own values before their turn.
        parts[self.rank] = mine.clone() if out is mine and self.rank > 1 else mine
        _reduce(parts, self.combine, out)


def _region(tensor: torch.Tensor, comms: Comms) -> SharedRegion:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"rank {comms.rank}: expected a tensor in main memory, which ranks can share, got one "
            f"on {tensor.device}"
        )
    return region_of(comms)
