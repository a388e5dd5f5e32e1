"""Lab 15: a sum through shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from microddp.labs.engine.bench import Bench, Wrong, digits
from microddp.labs.engine.lab import SEVERAL, Lab
from microddp.shared import memory_refused, region_of

LAB = Lab(
    "lab15_shared_sum",
    "a sum through shared memory",
    "15_one_machine",
    ["shared_sum"],
    [
        "Three things happen: the rank writes its tensor, adds up its part of all tensors, and "
        "copies the whole. Between them it needs something of the others. What?",
        "`inputs[rank][:size] = tensor`, then a barrier: now all have written. "
        "`block[:size].tensor_split(n)[rank]` is this rank's part of a block. Copy the first into "
        "this rank's part of `total`, and add the others to it.",
        "Then a second barrier: now all of `total` is there, and `tensor.copy_(total[:size])` "
        "copies it. No third barrier is needed: the next call writes `total` only after its own "
        "first barrier, when all have copied this sum.",
    ],
    hindrance=lambda stage: memory_refused() if stage.ranks > 1 else "",
)
BARRIERS, LEFT_OUT = "Two barriers and a sum", "Where it breaks: a barrier left out"
MOST = 1000  # values
NAP = 0.02  # seconds that a late rank is late
PATIENCE = 2.0  # seconds for the others to do their part meanwhile
CALLS = (1, 3, 9)  # each rank's values in one call after another: a digit tells which call
BASE = 100.0  # as digits() reads them


class Memory:
    """Blocks of all ranks, and barriers that are counted; a rank may be late after one of them."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.region, self.barriers = bench, region_of(bench.comms), 0
        self.inputs = self.blocks()
        self.total = self.blocks()[0]
        self.after: dict[int, Callable[[], object]] = {}

    def blocks(self) -> list[torch.Tensor]:
        mine = self.region.zeros(MOST, torch.float64)
        offsets = self.bench.comms.all_gather_data(self.region.offset_of(mine))
        seen = [self.region.at(r, offset, MOST, torch.float64) for r, offset in enumerate(offsets)]
        return [mine if rank == self.bench.rank else block for rank, block in enumerate(seen)]

    def barrier(self) -> None:
        self.region.barrier()
        self.barriers += 1
        self.after.get(self.barriers, lambda: None)()

    def sum(self, tensor: torch.Tensor, after: dict[int, Callable[[], object]]) -> None:
        """Call the reader's function; what is to be done after which barrier is done."""
        self.barriers, self.after = 0, after
        work = self.bench.work
        work.shared_sum(tensor, self.bench.rank, self.inputs, self.total, self.barrier)


def three_calls(bench: Bench, size: int, late: int, place: int) -> None:
    """Expect right sums of one call after another, while a rank is late.

    Args:
        bench: of the check.
        size: of the tensor.
        late: the rank.
        place: 0: before it writes; else the number of the barrier after which it is late.
    """
    memory = Memory(bench)

    def nap() -> None:
        time.sleep(NAP if bench.rank == late else 0)

    results = []
    for value in CALLS:
        tensor = torch.full((size,), value * BASE**bench.rank, dtype=torch.float64)
        if place == 0:
            nap()
        memory.sum(tensor, {place: nap})
        results.append(tensor)
    bench.comms.barrier()
    where = {0: "before it writes", 1: "after its first barrier"}.get(place, "after its second one")
    for call, tensor in enumerate(results):
        expect_sums(bench, tensor, call, f"{size} values, and rank {late} is late {where}")


def expect_sums(bench: Bench, tensor: torch.Tensor, call: int, when: str) -> None:
    """Expect each rank's value of this call, once, in every sum."""
    right, ones = CALLS[call], sum(BASE**rank for rank in range(bench.n))
    expected = f"{right} from each rank in call {call + 1}"
    own = "Only this rank's own: the sum was not written into the tensor."
    untouched = bench.n > 1 and bool(tensor.eq(right * BASE**bench.rank).all())
    for i, value in enumerate(tensor.tolist()):
        if value == right * ones:
            continue
        got = digits(value, bench.n, expected)
        parts = ", ".join(f"{digit} from rank {rank}" for rank, digit in enumerate(got))
        raise Wrong(
            expected,
            f"{parts}, in value {i}, with {when}",
            own if untouched else mistake_of(bench, got, call, value),
        )


ZEROED = (
    "somebody set `total` to zero for the next call while others still copied: write to `total` "
    "after a call's first barrier only."
)


def mistake_of(bench: Bench, got: list[int], call: int, value: float) -> str:
    """Return the sentence for the likely reason of a sum with such digits."""
    right, before = CALLS[call], CALLS[call - 1] if call else 0
    after = CALLS[call + 1] if call + 1 < len(CALLS) else right
    if value == right * sum(BASE**rank for rank in range(bench.n)) / bench.n:
        return "That is the mean: a sum is not divided."
    if any(digit == right + before for digit in got) and call:
        return "The sum of the call before is still in `total`: copy the first, then add."
    if all(digit == before for digit in got):
        return (
            "That is what was in `total` before this call: the rank whose part it is had not added "
            "it up yet, or nobody does this part. A barrier is missing between adding up and "
            f"copying. If it is zero, it may be that {ZEROED}"
        )
    if not any(got):
        return f"It may be that {ZEROED}"
    if any(digit == before for digit in got):
        return (
            "One rank's tensor is missing: it was not written yet when this part was added up, or "
            "the sum was copied while it was being added up. A barrier is missing between writing "
            "and adding up, or before the sum is copied."
        )
    if any(digit == after for digit in got):
        return "A rank wrote its next tensor before all had read this one. A barrier is missing."
    return ""


SIZES = (12, 7, 3, 1, 0, MOST)


@LAB.check("the sum, if a rank is late to write", read=BARRIERS)
def late_to_write(bench: Bench) -> None:
    for late in range(bench.n):
        three_calls(bench, 12, late, place=0)


@LAB.check("the sum, if a rank is late to add up", read=LEFT_OUT)
def late_to_add(bench: Bench) -> None:
    for late in range(bench.n):
        three_calls(bench, 12, late, place=1)


@LAB.check("the sum, if a rank is late to copy it", read=LEFT_OUT)
def late_to_copy(bench: Bench) -> None:
    for late in range(bench.n):
        three_calls(bench, 12, late, place=2)


@LAB.check("any number of values", read=BARRIERS)
def sizes(bench: Bench) -> None:
    for size in SIZES:
        bench.doing = f"with {size} values"
        three_calls(bench, size, late=bench.n - 1, place=1)


@LAB.check("each rank adds up its own part", read=BARRIERS, ranks=SEVERAL)
def parts(bench: Bench) -> None:
    size = 12  # which 2, 3 and 4 divide
    for late in range(bench.n):
        memory = Memory(bench)
        memory.total.fill_(torch.nan)
        bench.comms.barrier()
        missing: list[int] = []

        def look(memory: Memory = memory, missing: list[int] = missing) -> None:
            begun, count = time.monotonic(), size
            while count > size // bench.n and time.monotonic() < begun + PATIENCE:
                time.sleep(0.001)
                count = int(memory.total[:size].isnan().sum())
            missing.append(count)

        tensor = bench.values(size).double()
        memory.sum(tensor, {1: look} if bench.rank == late else {})
        bench.comms.barrier()
        if bench.rank != late:
            continue
        bench.expect(
            bool(missing) and missing[0] == size // bench.n,
            f"{size // bench.n} of {size} values of `total` to be left to rank {late}, when all "
            "others have added up their parts",
            f"{missing[0]} of them" if missing else "no barrier",
            "Each rank adds up one n-th: who adds up more does others' work again."
            if missing and missing[0] < size // bench.n
            else "Each rank writes its part of the sum into `total`, after the first barrier.",
        )


@LAB.check("two barriers, and no message", read=LEFT_OUT)
def barriers(bench: Bench) -> None:
    memory = Memory(bench)
    with bench.seen() as seen:
        memory.sum(bench.values(12).double(), {})
    bench.comms.barrier()  # a rank's memory goes with it, also for the others
    mistake = "All that the ranks need of each other is in `inputs` and `total`."
    bench.only_messages(seen, "nothing to be sent", mistake)
    sent = len(seen.messages)
    bench.expect(not sent, "nothing to be sent", f"{sent} messages", mistake)
    bench.expect(
        memory.barriers == 2 or bench.n == 1,
        "two barriers",
        memory.barriers,
        "After the second nothing can go wrong: the next call writes `total` after its own first "
        "barrier, and by then all have copied this sum.",
    )


@LAB.check("the same bits on every rank", read=BARRIERS, ranks=SEVERAL)
def bits(bench: Bench) -> None:
    tensor, memory = bench.rounded(MOST, torch.float64), Memory(bench)
    memory.sum(tensor, {})
    bench.comms.barrier()
    mistake = "Each part must be added up once, and copied by all."
    bench.same("a sum of numbers that are rounded", tensor, mistake)
