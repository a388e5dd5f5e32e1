"""All-reduce around a ring, and its two halves: bandwidth that does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch

from microddp.allreduce.reduction import flattened
from microddp.comms import Comms, Exchange
from microddp.comms.checks import check_contiguous

# A chunk of the ring travels in pieces of this size, LANES of them at a time, so that the link is
# busy while a piece is added: as fast as the backend on links of 1 and 4 Gbit/s (gloo, two cores,
# AMD EPYC, November 2026). Larger ones leave the cache; smaller ones wake up threads more often.
PIECE_BYTES = 3 << 18
LANES = 2


def ring_reduce_scatter(tensor: torch.Tensor, comms: Comms, op: str = "sum") -> torch.Tensor:
    """Reduce over all ranks so that each rank holds its chunk of the result: half of the ring.

    The flattened tensor is cut into n chunks (``torch.tensor_split``). In round s a rank passes on
    the chunk it has just added to, so that after n-1 rounds chunk r arrives, complete, on rank r.
    A rank sends (n-1)/n S bytes. The other chunks are left holding partial sums.

    Args:
        tensor: contiguous; otherwise as for
            :func:`~microddp.allreduce.whole_tensor.naive_all_reduce`, with its errors.

    Returns:
        This rank's chunk, a flat view into ``tensor``.
    """
    check_contiguous(comms, "ring_reduce_scatter", tensor)
    with flattened(tensor, comms, op) as (flat, combine):
        _ring(flat, comms, combine, scatter=True, gather=False)
    return flat.tensor_split(comms.world_size)[comms.rank]


def ring_all_gather(tensor: torch.Tensor, comms: Comms) -> None:
    """Fill ``tensor`` with every rank's chunk of it: the other half of the ring, in place.

    Rank r starts with chunk r (of ``torch.tensor_split`` of the flattened tensor) and in each
    round passes on the chunk that came in the round before. A rank sends about (n-1)/n S bytes.

    Args:
        tensor: contiguous; the same shape and dtype on every rank.
    """
    check_contiguous(comms, "ring_all_gather", tensor)
    with torch.no_grad():
        _ring(tensor.view(-1), comms, torch.add, scatter=False, gather=True)


def ring_all_reduce(
    tensor: torch.Tensor, comms: Comms, op: str = "sum", order: Sequence[int] | None = None
) -> None:
    """All-reduce in place around a ring: reduce-scatter, then all-gather, without a pause between.

    A rank sends 2 (n-1)/n S bytes (and up to one element more per round where n does not divide
    the size), to its right-hand neighbour only. Scratch: two pieces, or a chunk if it is one piece.

    Args:
        order: the ranks as they follow each other around the ring, the same on every rank; from 0
            to n-1 by default. It decides how often the ring crosses a link that hosts share.

    The others, and errors, are those of :func:`~microddp.allreduce.whole_tensor.naive_all_reduce`.

    Raises:
        ValueError: also if ``order`` does not name every rank once.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009, section 3.
    """
    if order is not None and sorted(order) != [*range(comms.world_size)]:
        raise ValueError(
            f"rank {comms.rank}: expected an order of the ranks 0 to {comms.world_size - 1}, "
            f"got {list(order)}"
        )
    with flattened(tensor, comms, op) as (flat, combine):
        _ring(flat, comms, combine, scatter=True, gather=True, order=order)


def _ring(
    flat: torch.Tensor,
    comms: Comms,
    combine: Callable[..., torch.Tensor],
    *,
    scatter: bool,
    gather: bool,
    order: Sequence[int] | None = None,
) -> None:
    """Run one or both halves of the ring, a few pieces at a time.

    Piece j of every chunk makes column j, and each column goes all the way round before the next
    one of its lane begins: what was just received is still in the cache when it is added and sent
    on. The lanes take turns, and each has one piece under way while the other's is added.
    """
    n = comms.world_size
    if n == 1 or flat.numel() == 0:
        return
    order = order or range(n)
    place = order.index(comms.rank)
    largest = -(-flat.numel() // n)
    pieces = -(-largest * flat.element_size() // PIECE_BYTES)
    columns = [*zip(*(chunk.tensor_split(pieces) for chunk in flat.tensor_split(n)), strict=True)]
    # In each round: the chunk sent to the right, the chunk received from the left, whether to add.
    rounds = [((place - 1 - s) % n, (place - 2 - s) % n, True) for s in range(n - 1) if scatter]
    rounds += [((place - s) % n, (place - 1 - s) % n, False) for s in range(n - 1) if gather]
    lanes = min(LANES, pieces)
    scratch = comms.scratch(lanes * -(-largest // pieces) if scatter else 0, flat)
    exchange_with_neighbours = comms.exchanger(flat, order[(place + 1) % n], order[place - 1])
    sending: list[Exchange] = []

    def run(columns: Sequence[Sequence[torch.Tensor]], scratch: torch.Tensor) -> Iterator[None]:
        for column in columns:
            for sent, received, add in rounds:
                target = column[received]
                arrival = scratch[: target.numel()] if add else target
                exchange = exchange_with_neighbours(column[sent], arrival)
                yield  # to the other lanes
                exchange.received()
                # The sending may go on: what is sent is not written to before the neighbour has it.
                sending.append(exchange)
                if add:
                    combine(target, arrival, out=target)

    running = [run(columns[k::lanes], part) for k, part in enumerate(scratch.tensor_split(lanes))]
    for _ in zip_longest(*running):
        pass
    for exchange in sending:
        exchange.wait()
