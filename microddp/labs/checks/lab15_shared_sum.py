"""Lab 15: a sum through shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from microddp.labs.bench import Bench
from microddp.labs.lab import Lab
from microddp.shared import memory_refused, room_of

LAB = Lab(
    "lab15_shared_sum",
    "a sum through shared memory",
    "15_one_machine",
    ["shared_sum"],
    [
        "Three things happen: the rank gives its tensor, adds up its part of what all gave, and "
        "takes the whole. Between them it needs something of the others. What?",
        "`given[rank][:size] = tensor`, then meet: now all have given. "
        "`block[:size].tensor_split(n)[rank]` is this rank's part of a block. Copy the first into "
        "this rank's part of `total`, and add the others to it.",
        "Then meet again: now every part of `total` is there, and `tensor.copy_(total[:size])` "
        "takes it. No third meeting is needed: the next call writes `total` only after its own "
        "first meeting, when all have taken this sum.",
    ],
    hindrance=lambda stage: memory_refused() if stage.ranks > 1 else "",
)
MOST = 1000  # values
NAP = 0.02  # seconds that a late rank is late
PATIENCE = 2.0  # seconds for the others to do their part meanwhile
CALLS = (1, 3, 9)  # what each rank gives in one call after another: a digit tells of which it is
BASE = 100.0


class Memory:
    """Blocks of all ranks, and meetings that are counted; a rank may be late after one of them."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.room, self.meetings = bench, room_of(bench.comms), 0
        self.given = self.blocks()
        self.total = self.blocks()[0]
        self.after: dict[int, Callable[[], object]] = {}

    def blocks(self) -> list[torch.Tensor]:
        mine = self.room.zeros(MOST, torch.float64)
        places = self.bench.comms.all_gather_data(self.room.place(mine))
        seen = [self.room.at(r, place, MOST, torch.float64) for r, place in enumerate(places)]
        return [mine if rank == self.bench.rank else block for rank, block in enumerate(seen)]

    def meet(self) -> None:
        self.room.meet()
        self.meetings += 1
        self.after.get(self.meetings, lambda: None)()

    def sum(self, tensor: torch.Tensor, after: dict[int, Callable[[], object]]) -> None:
        """Call the reader's function; what is to be done after which meeting is done."""
        self.meetings, self.after = 0, after
        work = self.bench.work
        work.shared_sum(tensor, self.bench.rank, self.given, self.total, self.meet)


def three_calls(bench: Bench, size: int, late: int, place: int) -> None:
    """Expect right sums of one call after another, while a rank is late.

    Args:
        bench: of the check.
        size: of the tensor.
        late: the rank.
        place: where: 0 before it gives, else after that meeting.
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
    where = {0: "before it gives", 1: "after its first meeting"}.get(place, "after its second one")
    for call, tensor in enumerate(results):
        expect_sums(bench, tensor, call, f"{size} values, and rank {late} is late {where}")


def expect_sums(bench: Bench, tensor: torch.Tensor, call: int, when: str) -> None:
    """Expect what each rank gave in this call, once, in every value."""
    digits = [BASE**rank for rank in range(bench.n)]
    right = CALLS[call]
    own = "Only this rank's own: the sum was not written into the tensor."
    untouched = bench.n > 1 and bool(tensor.eq(right * digits[bench.rank]).all())
    for i, value in enumerate(tensor.tolist()):
        if value == right * sum(digits):
            continue
        got = [int(value // digit % BASE) for digit in digits]
        parts = ", ".join(f"{digit} from rank {rank}" for rank, digit in enumerate(got))
        bench.expect(
            False,
            f"{right} from each rank in call {call + 1}",
            f"{parts}, in value {i}, with {when}",
            own if untouched else mistake_of(bench, got, call, value),
        )


def mistake_of(bench: Bench, got: list[int], call: int, value: float) -> str:
    """Why a sum may have such digits."""
    right, before = CALLS[call], CALLS[call - 1] if call else 0
    after = CALLS[call + 1] if call + 1 < len(CALLS) else right
    if value == right * sum(BASE**rank for rank in range(bench.n)) / bench.n:
        return "That is the mean: a sum is not divided."
    if any(digit == right + before for digit in got) and call:
        return "The sum of the call before is still in `total`: copy the first, then add."
    if all(digit == before for digit in got):
        return (
            "That is what was in `total` before this call: the rank whose part it is had not added "
            "it up yet, or nobody does this part. All must meet between adding up and taking."
        )
    if any(digit == before for digit in got):
        return (
            "What one of the ranks gave is missing: it had not given it yet when this part was "
            "added up, or the sum was taken while it was being added up. All must meet between "
            "giving and adding up, and again before they take the sum."
        )
    if any(digit == after for digit in got):
        return "A rank gave its next tensor before all had read this one. All must meet in between."
    return ""


SIZES = (12, 7, 3, 1, 0, MOST)


@LAB.check("the sum, if a rank is late to give", read="Two meetings and a sum")
def late_to_give(bench: Bench) -> None:
    for late in range(bench.n):
        three_calls(bench, 12, late, place=0)


@LAB.check("the sum, if a rank is late to add up", read="Where it breaks: a meeting left out")
def late_to_add(bench: Bench) -> None:
    for late in range(bench.n):
        three_calls(bench, 12, late, place=1)


@LAB.check("the sum, if a rank is late to take it", read="Where it breaks: a meeting left out")
def late_to_take(bench: Bench) -> None:
    for late in range(bench.n):
        three_calls(bench, 12, late, place=2)


@LAB.check("any number of values", read="Two meetings and a sum")
def sizes(bench: Bench) -> None:
    for size in SIZES:
        bench.doing = f"with {size} values"
        three_calls(bench, size, late=bench.n - 1, place=1)


@LAB.check("each rank adds up its own part", read="Two meetings and a sum", ranks=(2, 3, 4))
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
            f"{missing[0]} of them" if missing else "no meeting",
            "Each rank adds up one n-th: who adds up more does others' work again."
            if missing and missing[0] < size // bench.n
            else "Each rank writes its part of the sum into `total`, after the first meeting.",
        )


@LAB.check("two meetings, and no message", read="Where it breaks: a meeting left out")
def meetings(bench: Bench) -> None:
    memory = Memory(bench)
    with bench.seen() as seen:
        memory.sum(bench.values(12).double(), {})
    bench.comms.barrier()  # a rank's memory goes with it, also for the others
    names = ", ".join(sorted({call.name for call in seen.collectives}))
    bench.expect(
        not seen.collectives and not seen.messages,
        "nothing to be sent",
        f"PyTorch's own {names}" if names else f"{len(seen.messages)} messages",
        "All that the ranks need of each other is in `given` and `total`.",
    )
    bench.expect(
        memory.meetings == 2 or bench.n == 1,
        "two meetings",
        memory.meetings,
        "After the second nothing can go wrong: the next call writes `total` after its own first "
        "meeting, and by then all have taken this sum.",
    )


@LAB.check("the same bits on every rank", read="Two meetings and a sum", ranks=(2, 3, 4))
def bits(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(bench.rank)
    tensor = torch.randn(MOST, generator=generator, dtype=torch.float64) * 10 ** (bench.rank % 3)
    memory = Memory(bench)
    memory.sum(tensor, {})
    bench.comms.barrier()
    bench.same(
        "a sum of numbers that are rounded",
        tensor,
        "Each part must be added up once, and taken by all.",
    )
