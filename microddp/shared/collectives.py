"""Collectives of the ranks of one machine, through memory that they share: without a message.

A large tensor is cut into a chunk for each rank, which that rank adds up, as in a ring. It goes
through buffers that all ranks have mapped, a piece of each chunk at a time: what one rank has just
written, the others read from the cache. While one piece is added up, the next is copied in and the
last one out, and after each such step the ranks meet once. Each element is added up in rank order,
by one rank: the bits are the same on all ranks, and in every run.

A tensor of :meth:`~microddp.shared.room.Room.zeros` is in shared memory already. It is added up
where it is, and nothing is copied in or out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from microddp.allreduce import flattened
from microddp.comms import Comms
from microddp.comms.agreement import describe
from microddp.shared.room import BUFFER_BYTES, NOWHERE, Room, room_of

# Up to here, of all ranks together, each adds everything up itself, after one meeting. Measured on
# two cores (AMD EPYC, November 2026): 256 KiB take 2 ranks 45 us so and 57 in two halves, 4 ranks
# 330 and 650.
ONE_SHOT_BYTES = 1 << 20
PIECE_BYTES = 1 << 18  # is added up at a time where nothing is copied: then it is in the cache

Combine = Callable[..., torch.Tensor]
Column = Sequence[torch.Tensor]  # a piece of each rank's chunk, in rank order
Stage = Callable[[Column], None]


def shared_all_reduce(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> None:
    """All-reduce in place through shared memory.

    Of a large tensor of S bytes a rank copies (n-1)/n S in and as much out, adds up n pieces of S/n
    and copies the sum, S/n, home. A small one it copies in, and adds up n S. Of one that is in
    shared memory it adds up n pieces of S/n, and writes the sum to n-1 others. Scratch: 5 MiB a
    rank, whatever the size.

    Args:
        tensor: in main memory; any shape, the same on every rank.
        comms: of one machine. The first call of a group maps its memory.
        op: ``"sum"``, ``"mean"`` (floating point or complex), ``"max"``, ``"min"``, ``"product"``.

    Raises:
        ValueError: an unknown ``op``, or one that the dtype does not have; a tensor on a GPU.
        RuntimeError: on every rank: the ranks are not of one machine or may not share memory, they
            made different calls, a rank ended, or the time-out passed.
    """
    room = _room(tensor, comms)
    call = f"shared_all_reduce({describe(tensor)}, op={op})"
    with comms.agree(call), flattened(tensor, comms, op) as (flat, combine):
        if flat.nbytes * room.size <= min(ONE_SHOT_BYTES, BUFFER_BYTES * room.size):
            _one_shot(room, call, flat, combine)
        elif (place := room.place(flat)) != NOWHERE:
            _in_place(room, f"{call} in shared memory", flat, combine, place)
        else:
            steps = _Steps(room, flat.dtype, combine)
            columns = _columns(flat.tensor_split(room.size), BUFFER_BYTES // room.size)
            _run(room, call, columns, [steps.give, steps.add_up, steps.fetch])


def shared_reduce_scatter(
    tensor: torch.Tensor,
    comms: Comms,
    op: str = "sum",
    chunks: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Reduce over all ranks so that each rank holds its chunk of the result; the rest stays.

    Args:
        tensor: contiguous.
        chunks: of the flattened tensor, one for each rank; default: by ``torch.tensor_split``.

    Returns:
        This rank's chunk, a flat view into ``tensor``.

    The others, and errors, are those of :func:`shared_all_reduce`.
    """
    room = _room(tensor, comms)
    _check_contiguous(tensor, comms)
    call = f"shared_reduce_scatter({describe(tensor)}, op={op})"
    with comms.agree(call), flattened(tensor, comms, op) as (flat, combine):
        chunks = chunks or flat.tensor_split(room.size)
        steps = _Steps(room, flat.dtype, combine)
        _run(room, call, _columns(chunks, BUFFER_BYTES // room.size), [steps.give, steps.keep])
    return chunks[room.rank]


def shared_all_gather(
    tensor: torch.Tensor, comms: Comms, chunks: Sequence[torch.Tensor] | None = None
) -> None:
    """Fill ``tensor`` with every rank's chunk of it, in place: the other half of an all-reduce.

    Arguments and errors are those of :func:`shared_reduce_scatter`.
    """
    room = _room(tensor, comms)
    _check_contiguous(tensor, comms)
    call = f"shared_all_gather({describe(tensor)})"
    with comms.agree(call), torch.no_grad():
        steps = _Steps(room, tensor.dtype)
        columns = _columns(chunks or tensor.view(-1).tensor_split(room.size), BUFFER_BYTES)
        _run(room, call, columns, [steps.show, steps.fetch])


def shared_broadcast(tensor: torch.Tensor, comms: Comms, src: int = 0) -> None:
    """Overwrite ``tensor`` on every rank with that of rank ``src``, in place.

    Args:
        tensor: contiguous.
        src: the rank whose tensor it is.

    Errors are those of :func:`shared_all_reduce`.
    """
    room = _room(tensor, comms)
    _check_contiguous(tensor, comms)
    call = f"shared_broadcast({describe(tensor)}, src={src})"
    with comms.agree(call), torch.no_grad():
        flat = tensor.view(-1)
        # One rank's chunk is everything.
        chunks = [flat if rank == src else flat[:0] for rank in range(room.size)]
        steps = _Steps(room, tensor.dtype)
        _run(room, call, _columns(chunks, BUFFER_BYTES), [steps.show, steps.fetch])


def _one_shot(room: Room, call: str, flat: torch.Tensor, combine: Combine) -> None:
    turn, numel = room.step % 2, flat.numel()
    given = room.given(flat.dtype)
    with room.call(call):
        given[room.rank][turn][:numel].copy_(flat)
        room.meet()
        room.check()
        _add_up([buffers[turn][:numel] for buffers in given], combine, flat)


def _in_place(room: Room, call: str, flat: torch.Tensor, combine: Combine, place: int) -> None:
    with room.call(call, place):
        room.meet()  # all ranks have written what is to be added up
        mine = [
            room.at(rank, where, flat.numel(), flat.dtype).tensor_split(room.size)[room.rank]
            for rank, where in enumerate(room.check())
        ]
        count = max(1, -(-mine[0].nbytes // PIECE_BYTES))
        for first, *others in zip(*(chunk.tensor_split(count) for chunk in mine), strict=True):
            _add_up([first, *others], combine, first)
            for other in others:
                other.copy_(first)
        room.meet()  # all ranks have written the sums


def _add_up(parts: Sequence[torch.Tensor], combine: Combine, out: torch.Tensor) -> None:
    """Combine in the order given, which is that of the ranks."""
    first, *others = parts
    if not others:
        out.copy_(first)
    for other in others:
        combine(first, other, out=out)
        first = out


def _columns(chunks: Sequence[torch.Tensor], piece_bytes: int) -> list[Column]:
    """Piece j of every chunk, for each j; none larger than it may be."""
    largest = max(chunk.numel() for chunk in chunks)
    count = -(-largest // (piece_bytes // chunks[0].element_size()))
    if count <= 1:
        return [chunks]
    return [*zip(*(chunk.tensor_split(count) for chunk in chunks), strict=True)]


def _run(room: Room, call: str, columns: Sequence[Column], stages: Sequence[Stage]) -> None:
    """Bring all columns through all stages, each of them a column behind the one before."""
    last = len(columns) + len(stages) - 2
    with room.call(call):
        for step in range(last + 1):
            for behind, stage in enumerate(stages):
                if 0 <= step - behind < len(columns):
                    stage(columns[step - behind])
            if step < last:
                room.meet()
            if step == 0:
                room.check()


class _Steps:
    """What a rank does with a column between two meetings.

    There are two buffers for what is given, and two for what is shown, in turns: while the others
    read what was written before the last meeting, the next may be written.
    """

    def __init__(self, room: Room, dtype: torch.dtype, combine: Combine = torch.add) -> None:
        self.room, self.rank, self.combine = room, room.rank, combine
        self.given, self.shown = room.given(dtype), room.shown(dtype)

    def give(self, column: Column) -> None:
        """Write what the other ranks are to add up, one after the other."""
        buffer, start = self.given[self.rank][self.room.step % 2], 0
        for rank, piece in enumerate(column):
            end = start + piece.numel()
            if rank != self.rank:
                buffer[start:end].copy_(piece)
            start = end

    def keep(self, column: Column) -> None:
        """Add up this rank's piece, of its own values and of what the others gave."""
        self._add_up(column, column[self.rank])

    def add_up(self, column: Column) -> None:
        """The same, and show it."""
        piece = column[self.rank]
        sums = self.shown[self.rank][self.room.step % 2][: piece.numel()]
        self._add_up(column, sums)
        piece.copy_(sums)

    def show(self, column: Column) -> None:
        """Write this rank's piece for the others to fetch."""
        piece = column[self.rank]
        if piece.numel():
            self.shown[self.rank][self.room.step % 2][: piece.numel()].copy_(piece)

    def fetch(self, column: Column) -> None:
        """Read the other ranks' pieces."""
        turn = (self.room.step - 1) % 2
        for rank, piece in enumerate(column):
            if rank != self.rank and piece.numel():
                piece.copy_(self.shown[rank][turn][: piece.numel()])

    def _add_up(self, column: Column, out: torch.Tensor) -> None:
        turn, mine = (self.room.step - 1) % 2, column[self.rank]
        start = sum(piece.numel() for piece in column[: self.rank])
        parts = [buffers[turn][start : start + mine.numel()] for buffers in self.given]
        # Sums must not go where this rank's own values still wait for their turn.
        parts[self.rank] = mine.clone() if out is mine and self.rank > 1 else mine
        _add_up(parts, self.combine, out)


def _room(tensor: torch.Tensor, comms: Comms) -> Room:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"rank {comms.rank}: expected a tensor in main memory, which ranks can share, got one "
            f"on {tensor.device}"
        )
    return room_of(comms)


def _check_contiguous(tensor: torch.Tensor, comms: Comms) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"rank {comms.rank}: expected a contiguous tensor, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
