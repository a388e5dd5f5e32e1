"""Lab 12: steps of DDP in which every rank's backward takes equally long."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.labs.engine.answers import answers, expect_all, longer
from microddp.labs.engine.bench import Bench
from microddp.labs.engine.lab import SEVERAL, Lab

LAB = Lab(
    "lab12_hidden_straggler",
    "a function that names the rank that DDP hides",
    "12_uneven",
    ["slow_rank"],
    [
        "Take ten steps, leave the first out, work out one number of seconds from each of the "
        "others, and take the median. Gather the medians of all ranks, and let every rank decide "
        "by the same numbers.",
        "From a step's begin to the last launch nobody waits for anybody. From there to the end of "
        "backward a rank waits. Then the optimizer follows, in which again nobody waits.",
        "So the work of a step is launched[-1] - begin + end - backward. Compare each rank's "
        "median with the median of the others'.",
    ],
    ranks=SEVERAL,
    patience=15.0,
)
HIDES = "The straggler that DDP hides"
SECONDS = {"load": 1e-3, "forward": 6e-3, "early": 4e-3, "middle": 4e-3, "late": 4e-3}
SECONDS["update"] = 1e-3
TROUBLE = 25e-3  # seconds in each step
TRANSFER = 2e-3  # of each bucket
DISTURBANCE = 2.0  # in one step
EQUAL = (
    "All ranks' steps take equally long, and so do their backwards: the others wait in theirs. "
    "Compare only what a rank does while it does not wait."
)
WAITS = (
    "That rank waits, for the slow one. And clocks of two ranks differ, so that only what passes "
    "on one of them can be compared."
)


@dataclass(frozen=True)
class Stamps:
    """The moments at which the parts of a step ended, in seconds of this rank's clock.

    Attributes:
        begin: the step's begin; the batch is loaded next.
        loaded: the batch is there, and forward begins.
        forward: the end of forward, and the begin of backward.
        launched: by bucket, when its all-reduce was launched.
        backward: the end of backward, when all buckets are averaged.
        end: the end of the optimizer's step.
    """

    begin: float
    loaded: float
    forward: float
    launched: tuple[float, ...]
    backward: float
    end: float


class Job:
    """A training with DDP, whose steps are simulated.

    Args:
        comms: the ranks.
        seconds: duration of each part of a step on this rank.
        transfer: seconds of each bucket's all-reduce, once all ranks have launched it.
        disturbed: a step in which this rank loses two seconds.
        seed: seed of the noise.
    """

    def __init__(
        self,
        comms: Comms,
        seconds: Mapping[str, float],
        transfer: float = TRANSFER,
        disturbed: int | None = None,
        seed: int = 0,
    ) -> None:
        self.steps = 0
        self._comms, self._seconds, self._transfer = comms, seconds, transfer
        self._disturbed = disturbed
        self._chance = random.Random(1000 * seed + comms.rank)
        self._now, self._zero = 0.0, self._chance.uniform(0, 1000)

    def step(self) -> Stamps:
        """Take a step together with all other ranks."""
        begin = self._now
        loaded, forward = self._work("load"), self._work("forward")
        if self.steps == self._disturbed:
            self._now += DISTURBANCE
        launched = [self._work(part) for part in ("early", "middle", "late")]
        over = 0.0
        arrivals = self._comms.all_gather(torch.tensor(launched, dtype=torch.float64))
        for arrival in arrivals.max(dim=0).values.tolist():
            over = max(over, arrival) + self._transfer
        backward = self._now = over
        end = self._work("update")
        self.steps += 1
        begin, loaded, forward, backward, end = (
            self._zero + moment for moment in (begin, loaded, forward, backward, end)
        )
        return Stamps(
            begin, loaded, forward, tuple(self._zero + t for t in launched), backward, end
        )

    def _work(self, part: str) -> float:
        self._now += self._seconds[part] * self._chance.uniform(0.95, 1.05)
        return self._now


class RealJob(Job):
    """A job in which microddp's DDP averages, and layers sleep."""

    def __init__(self, comms: Comms, seconds: Mapping[str, float]) -> None:
        super().__init__(comms, seconds)
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        self._ddp = DDP(layers, comms, bucket_cap_mb=0.001)
        self._launched: list[float] = []
        self._ddp.register_comm_hook(comms.group, self._note)

    def _note(self, group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self._launched.append(time.perf_counter())
        return allreduce_hook(group, bucket)

    def step(self) -> Stamps:
        """Take a step together with all other ranks."""
        self._launched.clear()
        pause = {part: partial(time.sleep, self._seconds[part]) for part in self._seconds}
        begin = time.perf_counter()
        pause["load"]()
        loaded = time.perf_counter()
        pause["forward"]()
        output = self._ddp(torch.ones(1, 64))
        output.register_hook(lambda _: pause["early"]())
        forward = time.perf_counter()
        torch.autograd.backward(output.sum())
        backward = time.perf_counter()
        pause["update"]()
        self.steps += 1
        launched = tuple(self._launched)
        return Stamps(begin, loaded, forward, launched, backward, time.perf_counter())


def plant(comms: Comms, part: str, seed: int, disturbed: int | None = None) -> tuple[int, Job]:
    """Make a simulated job in which one rank is slow.

    Args:
        comms: the ranks.
        part: the part of the step in which it is slow: a key of ``SECONDS``.
        seed: decides which rank it is.
        disturbed: a step in which another rank loses two seconds.

    Returns:
        The slow rank, and the job.
    """
    n = comms.world_size
    slow, seconds = random.Random(seed).randrange(n), dict(SECONDS)
    seconds[part] += TROUBLE if comms.rank == slow else 0.0
    other = comms.rank == (slow + 1) % n
    return slow, Job(comms, seconds, disturbed=disturbed if other else None, seed=seed)


def expect_named(bench: Bench, jobs: Iterable[tuple[int | None, Job]], why: str) -> None:
    """Expect that each job's slow rank is named on every rank; ``why`` is the likely mistake."""
    for slow, job in jobs:
        given = answers(bench, bench.work.slow_rank, job)
        for answer in given:
            bench.expect(
                answer is None or (isinstance(answer, int) and answer in range(bench.n)),
                "a rank's number, or None",
                f"{answer!r}, a {type(answer).__name__}",
            )
        mistake = "No step of the job was taken: measure."
        bench.expect(job.steps > 0, "steps of the job", "none", mistake)
        expect_all(bench, given, slow, why if slow is None or given[0] is None else WAITS)


@LAB.check("a rank that is slow before its first launch", read=HIDES)
def before(bench: Bench) -> None:
    kinds = [(part, seed) for seed in range(3) for part in ("early", "forward", "load")]
    expect_named(bench, (plant(bench.comms, *kind) for kind in kinds), EQUAL)
    why = "The last rank works 1.6 times as long as the others. Name it from 1.5 times on."
    expect_named(bench, [(bench.n - 1, Job(bench.comms, longer(bench, SECONDS, 1.6)))], why)


@LAB.check("a rank that is slow between launches", read=HIDES)
def between(bench: Bench) -> None:
    kinds = [(part, seed) for seed in range(3) for part in ("late", "middle")]
    why = "The slow rank is slow after its first launch. The last one comes after all of backward."
    expect_named(bench, (plant(bench.comms, *kind) for kind in kinds), why)


@LAB.check("a rank whose optimizer is slow", read=HIDES)
def optimizer(bench: Bench) -> None:
    why = "The slow rank is slow after backward, in its optimizer. Nobody waits in that, either."
    expect_named(bench, (plant(bench.comms, "update", seed) for seed in range(3)), why)


@LAB.check("nobody is slow", read="How often is it wrong?")
def nobody(bench: Bench) -> None:
    jobs = [(None, Job(bench.comms, SECONDS, seed=seed)) for seed in range(3)]
    why = "Nothing was planted. One rank always works longest: name it from 1.5 times on."
    expect_named(bench, jobs, why)
    expect_named(
        bench, [(None, Job(bench.comms, SECONDS, transfer=0.1))], f"{why} (Links are slow.)"
    )
    why = "The last rank works 1.4 times as long as the others. Name it from 1.5 times on."
    expect_named(bench, [(None, Job(bench.comms, longer(bench, SECONDS, 1.4)))], why)
    if bench.n > 2:
        why = "Only the last rank is quicker. Compare with the median of the others."
        expect_named(bench, [(None, Job(bench.comms, longer(bench, SECONDS, 0.6)))], why)
    if bench.n > 3:
        times = {0: 1.25, bench.n - 1: 0.05}.get(bench.rank, 1.0)
        work = {part: SECONDS[part] * times for part in SECONDS}
        why = "The last rank has next to nothing to do. Compare with the median of the others, not "
        expect_named(bench, [(None, Job(bench.comms, work))], f"{why}with their mean.")


@LAB.check("one step that is disturbed does not count", read="How often is it wrong?")
def disturbed(bench: Bench) -> None:
    why = "In one step another rank lost two seconds. Take several steps, and the median."
    kinds = [("early", seed, step) for seed in range(2) for step in (0, 1, 4)]
    jobs = [plant(bench.comms, *kind) for kind in kinds]
    for step in (0, 1, 4):
        calm = step if bench.rank == 0 else None
        expect_named(bench, [(None, Job(bench.comms, SECONDS, disturbed=calm))], why)
    expect_named(bench, jobs, why)


@LAB.check("real time in microddp's DDP", read=HIDES, ranks=(2, 3))
def real(bench: Bench) -> None:
    usual = {"load": 0.0, "forward": 0.03, "early": 0.0, "update": 0.0}
    slow = bench.n - 1
    for part in ("early", "update"):
        seconds = {**usual, part: 0.1 if bench.rank == slow else 0.0}
        expect_named(bench, [(slow, RealJob(bench.comms, seconds))], EQUAL)
