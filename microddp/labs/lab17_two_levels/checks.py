"""Lab 17: gradients reduced inside nodes, then between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import Lab
from microddp.message_counter import MessageCounter
from microddp.sharding import nodes_of

LAB = Lab(
    "lab17_two_levels",
    "HSDP's two reductions",
    "17_sharded_in_practice",
    ["reduce_gradients"],
    [
        "Which ranks keep this rank's part, and which ranks' gradients are in its mean? The first "
        "are a column of the grid, the second all. Where should a gradient become small: before it "
        "leaves the node, or after?",
        "In the node each rank needs its part of the sum, and no more: a reduce-scatter. Then its "
        "replicas, one in each node, have other sums of the same part.",
        "`part = ring_reduce_scatter(flat, grid.inside, 'mean')`, then `ring_all_reduce(part, "
        "grid.across, 'mean')`: nodes are equally large, so the mean of their means is the mean.",
    ],
    ranks=(1, 4, 6),
)
LEVELS = "Two levels"
SUM = "A sum was taken for a mean."
SIZE = 36  # values, which 1, 2, 3, 4 and 6 divide


def grids(bench: Bench) -> Iterator[tuple[int, Any]]:
    """Yield the ranks of a node, and the reader's grid, for all grids; those of one level last."""
    nodes = [node for node in range(1, bench.n + 1) if bench.n % node == 0]
    for node in sorted(nodes, key=lambda node: node in (1, bench.n)):
        bench.doing = f"with {bench.n} ranks in nodes of {node}"
        yield node, bench.work.Grid(bench.comms, *nodes_of(bench.comms, node))


def part_of(flat: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    return flat.tensor_split(parts)[index]


@LAB.check("this rank's part of the mean over all ranks", read=LEVELS)
def values(bench: Bench) -> None:
    for node, grid in grids(bench):
        nodes, everyone = bench.n // node, bench.everyones(SIZE)
        mine, place = divmod(bench.rank, node)
        got = bench.work.reduce_gradients(bench.values(SIZE), grid)
        size = SIZE // node
        bench.expect(
            isinstance(got, torch.Tensor) and got.numel() == size,
            f"a part of {size} of {SIZE} values, in nodes of {node}",
            f"{got.numel()} values" if isinstance(got, torch.Tensor) else type(got).__name__,
            _size_mistake(got, node, nodes),
        )
        column = everyone[place::node].mean(0)
        row = everyone[mine * node : (mine + 1) * node].mean(0)
        mean = everyone.mean(0)
        mistakes = {
            f"{SUM} Divide by the number of all ranks.": everyone.sum(0),
            f"{SUM} The nodes' means are added up: take the mean of the nodes.": mean * nodes,
            f"{SUM} The ranks of a node are added up, and not divided by their number.": mean
            * node,
            "This is the mean of this node's ranks only: the replicas have others.": row,
            "This is the mean of this rank and its replicas: the others of the node are left "
            "out.": column,
        }
        wrong = {text: part_of(each, node, place) for text, each in mistakes.items()}
        if node == nodes:
            swapped = "The dimensions of the grid are swapped: parts are divided inside a node."
            wrong[swapped] = part_of(mean, node, mine)
        bench.near(got.flatten(), part_of(mean, node, place), "this rank's part", wrong, 1e-4, 1e-4)


def _size_mistake(got: object, node: int, nodes: int) -> str:
    if not isinstance(got, torch.Tensor):
        return ""
    mistakes = {
        SIZE // nodes: "The dimensions of the grid are swapped: parts are divided inside a node.",
        SIZE // (node * nodes): "There is a part for each of all ranks: so stage 3 divides. Here "
        "the ranks of a node divide, and every node has all.",
        SIZE: "That is the whole gradient.",
    }
    return mistakes.get(got.numel(), "")


@LAB.check("no more is sent than the two reductions need", read=LEVELS)
def sent(bench: Bench) -> None:
    for node, grid in grids(bench):
        nodes, flat = bench.n // node, bench.values(SIZE)
        bench.comms.barrier()
        with (
            bench.seen() as seen,
            MessageCounter(grid.inside) as inside,
            MessageCounter(grid.across) as across,
        ):
            bench.work.reduce_gradients(flat, grid)
        mistake = "Take microddp's rings: what PyTorch itself sends cannot be told apart."
        bench.only_messages(seen, "the rings inside nodes and between them", mistake)
        bench.expect(
            not seen.messages,
            "messages inside the node and between replicas only",
            f"{seen.sent_bytes} bytes sent over all ranks",
            "A ring of all ranks takes every gradient out of the node.",
        )
        most = 4 * SIZE * 2 * (nodes - 1) // nodes // node
        between = sum(message.nbytes for message in across.messages)
        bench.expect(
            between <= most,
            f"at most {most} bytes between nodes from each rank, in nodes of {node}",
            between,
            "Reduce in the node first: then only a part has to leave it.",
        )
        most = 4 * SIZE * (node - 1) // node
        near = sum(message.nbytes for message in inside.messages)
        bench.expect(
            near <= most,
            f"at most {most} bytes inside the node from each rank, in nodes of {node}",
            near,
            "A reduce-scatter brings a rank its part of the sum, with half of an all-reduce's "
            "bytes.",
        )


@LAB.check("the same bits on all replicas", read=LEVELS)
def bits(bench: Bench) -> None:
    for node, grid in grids(bench):
        part = bench.work.reduce_gradients(bench.rounded(SIZE), grid)
        place = bench.rank % node
        everyone = bench.comms.all_gather(part.contiguous())[place::node]
        bench.expect(
            all(torch.equal(each, everyone[0]) for each in everyone),
            "the same bits on all ranks that keep a part",
            "different ones",
            "Add up in one order for all of them.",
        )
