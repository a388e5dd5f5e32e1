"""Lab 08: jobs with planted trouble."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from microddp.comms import Comms
from microddp.labs.engine.answers import answers, expect_all, longer
from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import Lab

LAB = Lab(
    "lab08_slow_job",
    "a function that names why a job is slow",
    "08_performance",
    ["name_cause"],
    [
        "Take ten steps, with the clock read before and after each part. Leave the first step out, "
        "take the median of each part, and gather these medians of all ranks. From there on every "
        "rank decides by the same numbers.",
        "First compare the ranks' work, all parts but the averaging. If one works twice as long, "
        "that is the cause: the others wait for it, and their averaging looks long.",
        "The rank that comes last waits for nobody, so the shortest averaging of all ranks is what "
        "the network takes. Of that, start-ups are len(job.sizes) times what a message of 4 bytes "
        "takes. Send one before it, so that all begin together.",
    ],
    ranks=(2, 3),
    patience=15.0,
)
SLOW = "Where it breaks: one slow rank looks like a slow network"
CAUSES = ("nothing", "loading", "slow rank", "slow network", "many messages")
SECONDS = {"load": 2e-3, "forward": 5e-3, "backward": 10e-3, "update": 1e-3}
TROUBLE = 60e-3  # seconds in each step
DISTURBANCE = 2.0  # seconds in one step
WAITS = (
    "Who averages longest came first, and waits for the others. Compare what the ranks work, not "
    "how long they wait."
)
FEW, MANY = (1_000_000,) * 4, (20_000,) * 200  # bytes of messages
START, A_BYTE = 10e-6, 0.5e-9  # seconds


class Job:
    """A training whose steps are simulated, on a clock of its own.

    Args:
        comms: the ranks.
        seconds: duration of each part of a step on this rank, but for averaging.
        sizes: bytes of each message.
        start: seconds to start a message.
        a_byte: seconds for each of its bytes.
        disturbed: additional seconds, by part and number of the step.
        seed: seed of the noise.
    """

    def __init__(
        self,
        comms: Comms,
        seconds: Mapping[str, float],
        sizes: Sequence[int],
        start: float = START,
        a_byte: float = A_BYTE,
        disturbed: Mapping[tuple[str, int], float] | None = None,
        seed: int = 0,
    ) -> None:
        self.sizes = sizes
        self._comms, self._seconds, self._start, self._a_byte = comms, seconds, start, a_byte
        self._disturbed, self._calls = disturbed or {}, Counter[str]()
        self._chance = random.Random(1000 * seed + comms.rank)
        self._now, self._zero = 0.0, self._chance.uniform(0, 1000)
        self.asked = False  # whether the clock was read

    def clock(self) -> float:
        """Return the time on this rank, seconds."""
        self.asked = True
        return self._zero + self._now

    def load(self) -> None:
        """Load the next batch."""
        self._work("load")

    def forward(self) -> None:
        """Compute the loss."""
        self._work("forward")

    def backward(self) -> None:
        """Compute the gradients."""
        self._work("backward")

    def average(self) -> None:
        """Average the gradients over all ranks."""
        self._send(self.sizes)
        self._pass(self._disturbance("average"))

    def update(self) -> None:
        """Change the weights."""
        self._work("update")

    def all_reduce(self, nbytes: int) -> None:
        """Send one more message over the network."""
        self._send([nbytes])

    def _work(self, part: str) -> None:
        self._pass(self._seconds[part] * self._chance.uniform(0.97, 1.03) + self._disturbance(part))

    def _disturbance(self, part: str) -> float:
        self._calls[part] += 1
        return self._disturbed.get((part, self._calls[part] - 1), 0.0)

    def _pass(self, seconds: float) -> None:
        self._now += seconds

    def _send(self, sizes: Sequence[int]) -> None:
        arrivals = self._comms.all_gather(torch.tensor([self._now], dtype=torch.float64))
        self._now = arrivals.max().item()
        self._pass(sum(self._start + self._a_byte * size for size in sizes))


class RealJob(Job):
    """A job with a real clock, on real links, whose work is to sleep."""

    def clock(self) -> float:
        """Return the time on this rank, seconds."""
        self.asked = True
        return time.perf_counter()

    def _pass(self, seconds: float) -> None:
        time.sleep(seconds)

    def _send(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._comms.all_reduce(torch.zeros(max(1, size // 4)))


def plant(comms: Comms, cause: str, seed: int, disturbed: str = "") -> tuple[str, Job]:
    """Make a simulated job that is slow for a reason.

    Args:
        comms: the ranks.
        cause: one of ``CAUSES``.
        seed: decides what the cause leaves open, such as the slow rank.
        disturbed: ``"first"`` or ``"other"``: a step that takes longer for another reason.

    Returns:
        The cause as it is to be named, and the job.
    """
    chance = random.Random(seed)
    sizes, start, a_byte, seconds = chance.choice((FEW, MANY)), START, A_BYTE, dict(SECONDS)
    slow, part = chance.randrange(comms.world_size), chance.choice(list(SECONDS))
    extra = {}
    if disturbed:
        step = 1 + seed if disturbed == "other" else 0
        if comms.rank == (slow + 1) % comms.world_size:
            extra["forward", step] = DISTURBANCE
        extra["average", step] = DISTURBANCE / 2
    if cause == "loading":
        seconds["load"] += TROUBLE
    elif cause == "slow rank":
        cause = f"slow rank {slow}"
        seconds[part] += TROUBLE if comms.rank == slow else 0.0
    elif cause == "slow network":
        a_byte += TROUBLE / sum(sizes)
    elif cause == "many messages":
        sizes, start = MANY, start + TROUBLE / len(MANY)
    return cause, Job(comms, seconds, sizes, start, a_byte, extra, seed)


def expect_named(bench: Bench, jobs: Iterable[tuple[str, Job]], why: str = "") -> None:
    """Expect that each job's cause is named on every rank; ``why`` is the mistake, if known."""
    for cause, job in jobs:
        given = answers(bench, bench.work.name_cause, job)
        for answer in given:
            bench.expect(
                answer in ("nothing", "loading", "slow network", "many messages")
                or answer in [f"slow rank {rank}" for rank in range(bench.n)],
                "one of the causes, as a text: 'slow rank 0', say",
                answer,
            )
        mistake = "No step of the job was taken: measure."
        bench.expect(bool(job._calls), "steps of the job", "none", mistake)
        mistake = "job.clock() was never read, and time passes on no other clock here."
        bench.expect(job.asked, "times that job.clock() tells", "none", mistake)
        expect_all(bench, given, cause, why or _mistake(cause, given[0]))


def _mistake(cause: str, got: str) -> str:
    if cause.startswith("slow rank"):
        if got.startswith("slow rank"):
            return f"That is a rank that waits. {WAITS}"
        if got == "loading":
            return "One rank alone loads slowly. It is loading if it is so on every rank."
        if got in ("slow network", "many messages"):
            return (
                "The averaging is long because ranks wait in it for another one, not for the "
                "network. Look at all ranks: the one that came last does not wait."
            )
    if got.startswith("slow rank"):
        return f"No rank works much longer than the others. {WAITS}"
    if cause == "slow network" and got == "many messages":
        return (
            "There are many messages, but to start them takes less than half of the time. Time a "
            "message of 4 bytes by job.all_reduce, and multiply."
        )
    if cause == "many messages" and got == "slow network":
        return "Few bytes take as long as many here. Time a message of 4 bytes by job.all_reduce."
    if cause == "nothing":
        return "Nothing was planted. Name a cause only if it takes more than half of the step."
    if got == "nothing" and not cause.startswith("slow rank"):
        return "What takes more than half of the step is a cause: name it."
    return ""


@LAB.check("nothing, or slow loading", read="Taking a step apart")
def loading(bench: Bench) -> None:
    kinds = [(cause, seed) for seed in range(3) for cause in ("loading", "nothing")]
    expect_named(bench, (plant(bench.comms, *kind) for kind in kinds))
    for cause, load in (("nothing", 13e-3), ("loading", 20e-3)):  # 45 and 55 % of the step
        expect_named(bench, [(cause, Job(bench.comms, {**SECONDS, "load": load}, (1000,)))])
    # In these jobs the last rank works longer than the others, but less than twice as long.
    last = bench.rank == bench.n - 1
    expect_named(
        bench,
        [("nothing", Job(bench.comms, longer(bench, SECONDS, 1.9), (1000,), start=6e-3))],
        "The last rank works 1.9 times as long as the others, not twice. They average for more "
        "than half of their step, but only because they wait. What the network takes is what the "
        "rank takes that waits for nobody.",
    )
    loads = {"load": 12e-3, "forward": 4e-3, "backward": 4e-3, "update": 1e-3}
    expect_named(
        bench,
        [("nothing", Job(bench.comms, loads if last else SECONDS, (1000,)))],
        "One rank alone loads for more than half of its step, and works no longer than the others.",
    )


@LAB.check("a slow rank", read=SLOW)
def slow_rank(bench: Bench) -> None:
    seeds = (0, 1, 3, 5, 7)  # which leave no part of the step out
    expect_named(bench, (plant(bench.comms, "slow rank", seed) for seed in seeds))
    why = "The last rank works 2.1 times as long as the others. Name it from twice as long on."
    slow = Job(bench.comms, longer(bench, SECONDS, 2.1), (1000,))
    expect_named(bench, [(f"slow rank {bench.n - 1}", slow)], why)


@LAB.check("a slow network, or many messages", read="What to change first")
def network(bench: Bench) -> None:
    kinds = [(cause, seed) for seed in range(4) for cause in ("slow network", "many messages")]
    expect_named(bench, (plant(bench.comms, *kind) for kind in kinds))
    count, size = 100, 1000
    for cause, seconds, starts in (  # 45 and 55 % of the step, and which part of that is start-ups
        ("nothing", 15e-3, 0.6),
        ("slow network", 22e-3, 0.4),
        ("many messages", 22e-3, 0.6),
    ):
        start, a_byte = starts * seconds / count, (1 - starts) * seconds / count / size
        expect_named(bench, [(cause, Job(bench.comms, SECONDS, (size,) * count, start, a_byte))])


@LAB.check("the first step does not count", read="What to take along")
def first_step(bench: Bench) -> None:
    expect_named(
        bench,
        (plant(bench.comms, cause, seed, "first") for seed in range(2) for cause in CAUSES),
        "In the first step caches are filled and connections made. Leave it out.",
    )


@LAB.check("one step that is disturbed does not count", read="What to take along")
def other_step(bench: Bench) -> None:
    expect_named(
        bench,
        (plant(bench.comms, cause, seed, "other") for seed in range(2) for cause in CAUSES),
        "One step took longer than all others together. Take several, and the median of each part.",
    )


@LAB.check("real time on real links", read=SLOW, ranks=(2,), link="100mbit")
def real(bench: Bench) -> None:
    # A busy machine lets a rank sleep longer; with such times it makes none twice as slow.
    usual = {"load": 0.0, "forward": 0.03, "backward": 0.0, "update": 0.0}
    slow = {**usual, "backward": 0.1 * bench.rank}
    jobs = [
        ("slow network", RealJob(bench.comms, usual, (1_500_000,))),  # 0.12 s
        ("slow rank 1", RealJob(bench.comms, slow, (1000,))),
    ]
    expect_named(bench, jobs)
