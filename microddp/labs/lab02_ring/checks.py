"""Lab 02: the ring all-reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch

from microddp.labs.engine.bench import Bench, digits
from microddp.labs.engine.lab import SEVERAL, Lab

LAB = Lab(
    "lab02_ring",
    "a ring all-reduce",
    "02_all_reduce",
    ["ring_all_reduce"],
    [
        "Cut the tensor with `tensor_split(n)`: that works for any number of values. In each "
        "round, every rank sends one chunk to its right neighbour and receives another from its "
        "left one.",
        "In round i of the first half, rank r sends chunk (r - i) % n and adds what comes to chunk "
        "(r - i - 1) % n. After n - 1 rounds rank r has the sum of chunk (r + 1) % n.",
        "In the second half the sums go round once: in round i, rank r sends chunk (r + 1 - i) % n "
        "and overwrites chunk (r - i) % n with what comes. `comms.sendrecv` sends and receives at "
        "once; with `send` first, every rank may wait for ever.",
    ],
)
SIZES = (12, 7, 3, 1, 0, 1000)
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "product": torch.prod,
}


@LAB.check("every rank ends with the sum", read="Ring: a chunk at a time")
def sums(bench: Bench) -> None:
    # Two digits for each rank tell how often its value is in a sum.
    own, right = 100.0**bench.rank, sum(100.0**rank for rank in range(bench.n))
    expected = "each rank's value once in each sum"
    for size in SIZES:
        tensor = torch.full((size,), own, dtype=torch.float64)
        bench.doing = f"with {size} values"
        with bench.seen() as seen:
            bench.work.ring_all_reduce(tensor, bench.comms)
        for i, value in enumerate(tensor.tolist()):
            if value == right:
                continue
            times = digits(value, bench.n, expected)
            mistake = missing(len(seen.messages), i, size, bench.n)
            if max(times) > 1:
                mistake = "What comes in the second half is a sum: overwrite with it, do not add."
            if tensor.eq(own).all():
                mistake = "Only this rank's own: the sum was not written back into the tensor."
            if value == right / bench.n:
                mistake = "That is the mean: an all-reduce does not divide."
            parts = ", ".join(f"{count} times rank {rank}'s" for rank, count in enumerate(times))
            got = f"{parts}, in value {i} of {size}"
            bench.expect(False, expected, got, mistake)


def missing(messages: int, place: int, size: int, n: int) -> str:
    """Return the likely reason why ranks' values are missing at a place, after so many messages."""
    if messages < 2 * (n - 1):
        few = f"{messages} messages from this rank"
        return f"Some values never came here: {few}, and it takes n - 1 rounds, twice."
    if place >= size // n * n:
        return "The chunks do not cover the tensor: the last values belong to one of them, too."
    return (
        "There were rounds enough. So a chunk has the wrong number in one of them, or what came "
        "was not written into the tensor itself (`out=`, `copy_`, `+=`)."
    )


@LAB.check("the largest, the least, the product", read="Ring: a chunk at a time")
def operations(bench: Bench) -> None:
    for op, reduce in OPS.items():
        each = bench.everyones(9, seed=1)
        tensor = each[bench.rank].clone()
        bench.doing = f"with op={op!r}"
        bench.work.ring_all_reduce(tensor, bench.comms, op)
        added = {f"That is the sum, where {op} was asked for.": each.sum(0)}
        bench.near(tensor, reduce(each, dim=0), f"op={op!r} of 9 values", added)


@LAB.check(
    "the same bits on every rank", "Where it breaks: each rank adds in its own order", SEVERAL
)
def bits(bench: Bench) -> None:
    tensor = bench.rounded(1000)
    bench.work.ring_all_reduce(tensor, bench.comms)
    bench.same(
        "a sum of numbers that are rounded",
        tensor,
        "Each chunk must be added on one way round the ring. If every rank adds in an order of its "
        "own, their sums differ in the last bits, and their models drift apart.",
    )


@LAB.check("only to the right neighbour", read="Ring: a chunk at a time", ranks=(3, 4))
def neighbour(bench: Bench) -> None:
    with bench.seen() as seen:
        bench.work.ring_all_reduce(bench.values(1000), bench.comms)
    right = (bench.rank + 1) % bench.n
    to = sorted({message.dst for message in seen.messages})
    bench.expect(
        to in ([right], []),
        f"messages only to rank {right}",
        " and ".join(f"rank {rank}" for rank in to),
        "In a ring each rank uses one link each way: to its right, from its left.",
    )


@LAB.check(
    "2(n-1)/n of the tensor in bytes", read="Where it breaks: a ring that sends whole tensors"
)
def sent(bench: Bench) -> None:
    n, size = bench.n, 1000
    with bench.seen() as seen:
        bench.work.ring_all_reduce(bench.values(size), bench.comms)
    mistake = "That is the backend's all-reduce. Build it from comms.sendrecv."
    bench.only_messages(seen, "messages between two ranks", mistake)
    whole = 4 * size
    exact, rounding = 2 * (n - 1) * whole / n, 2 * (n - 1) * 4
    bench.expect(
        abs(seen.sent_bytes - exact) <= rounding,
        f"{exact:.0f} bytes sent by each rank, of a tensor of {whole}",
        f"{seen.sent_bytes} bytes in {len(seen.messages)} messages",
        "Cut the tensor into n chunks: each message is one of them.",
    )
