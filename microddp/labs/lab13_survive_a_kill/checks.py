"""Lab 13: training that survives a kill."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from microddp.labs.engine.bench import Bench, Wrong
from microddp.labs.engine.lab import Lab
from microddp.labs.engine.training import drawn, flat

LAB = Lab(
    "lab13_survive_a_kill",
    "training that survives a kill",
    "13_faults",
    ["save", "load", "train"],
    [
        "What does the next step depend on? On the weights, what the optimizer keeps of each, the "
        "place in the data, each rank's random numbers, and how many steps there were. All of it "
        "belongs in the state, and all is restored before the next step.",
        "In `save`, write a file with another ending beside the one there is to be, close it, and "
        "rename it with `os.replace`. In `load`, look on rank 0 for names that match "
        "checkpoint-NUMBER.pt, and try them from the largest number down.",
        "The ranks' random numbers differ, and rank 0 writes: `comms.all_gather` them before. "
        "Afterwards rank r takes a clone of row r. `broadcast_object_list` brings what rank 0 has "
        "read to the others, so all of them go on from the same step, or all begin.",
    ],
    ranks=(1, 2, 3),
    patience=15.0,
)
NEWEST = "Where it breaks: the newest checkpoint"
STEPS, EVERY = 8, 2
SAMPLES, SIZE, WIDTH = 24, 12, 8
MOST = 0.9  # of a checkpoint, after which its writer is killed
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda _: b"",
}
AS_TEXTS = "As texts, 10 is before 9: compare numbers."
TWO = "Keep at least the newest two checkpoints, so that there is one if the other is broken."


class Data:
    """Random batches without end; ``asked`` is called whenever one is asked for."""

    def __init__(self, bench: Bench) -> None:
        self.mine = slice(bench.rank, None, bench.n)
        self.inputs = drawn(SAMPLES, WIDTH, seed=2)
        self.generator = torch.Generator().manual_seed(3)
        self.asked: Callable[[], object] = lambda: None

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked()
        batch = torch.randint(SAMPLES, (SIZE,), generator=self.generator)[self.mine]
        return self.inputs[batch], batch % 4

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


class Run:
    """A training, as a process begins it."""

    def __init__(self, bench: Bench, folder: str = "disk") -> None:
        self.bench, self.folder = bench, bench.folder / f"{folder}-of-rank{bench.rank}"
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)]
        self.model, self.data = torch.nn.Sequential(*layers), Data(bench)
        self.optimizer = self.new_optimizer()
        self.steps = 0
        self.model.register_forward_hook(self._count)
        torch.manual_seed(1 + bench.rank)

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def _count(self, *_: object) -> None:
        self.steps += 1

    def train(self) -> torch.Tensor:
        arguments = self.model, self.optimizer, self.data, STEPS, EVERY, self.folder
        self.bench.work.train(*arguments, self.bench.comms)
        return self.weights

    @property
    def weights(self) -> torch.Tensor:
        return flat(self.model.parameters())

    def step(self) -> None:
        """Take a step as it should be."""
        self.optimizer.zero_grad()
        inputs, targets = next(self.data)
        torch.autograd.backward(cross_entropy(self.model(inputs), targets))
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.bench.comms.all_reduce_mean(parameter.grad)
        self.optimizer.step()

    @property
    def files(self) -> list[str]:
        """Names of the files in this rank's folder."""
        return sorted(path.name for path in self.folder.glob("**/*"))

    @property
    def checkpoints(self) -> list[Path]:
        """Files in this rank's folder that have a checkpoint's name."""
        return [p for p in self.folder.glob("*") if re.fullmatch(r"checkpoint-\d+\.pt", p.name)]

    def forget_weights(self) -> None:
        with torch.random.fork_rng(devices=[]):
            self.model.load_state_dict(Run(self.bench).model.state_dict())

    def forget_optimizer(self) -> None:
        self.optimizer = self.new_optimizer()

    def forget_data(self) -> None:
        self.data = Data(self.bench)

    def forget_random(self) -> None:
        torch.manual_seed(1 + self.bench.rank)

    def take_random_of_rank_0(self) -> None:
        torch.set_rng_state(self.bench.comms.all_gather(torch.get_rng_state())[0])


EARLY = "It is saved before the step is taken, and counted as if it were: that step is lost."
MISTAKES: dict[str, Callable[[Run], None] | None] = {
    "The weights are not restored.": Run.forget_weights,
    "What the optimizer keeps is not restored: for Adam, two means of each gradient.": (
        Run.forget_optimizer
    ),
    "The place in the data is not restored: the first batches come again.": Run.forget_data,
    "The random numbers are not restored: they begin again from the seed.": Run.forget_random,
    "Every rank goes on with the random numbers of rank 0. Save the state of each.": (
        Run.take_random_of_rank_0
    ),
    EARLY: None,
}


def with_mistake(
    bench: Bench, mistake: Callable[[Run], None] | None, at: Sequence[int]
) -> torch.Tensor:
    """Return the weights after a mistake in these steps; the mistake ``None`` loses the steps."""
    run = Run(bench)
    for step in range(STEPS):
        if mistake and step in at:
            mistake(run)
        if mistake is None and step + 1 in at:
            next(run.data)
        else:
            run.step()
    return run.weights


def expect_rest(run: Run, resumed: int) -> None:
    """Expect that only the steps after the checkpoint were taken."""
    rest = STEPS - resumed
    mistake = EARLY if run.steps < rest else "Steps that are in the checkpoint are taken again."
    if run.steps == rest + 1:
        mistake = "The last step before the checkpoint is taken twice. Steps are numbered from 0, "
        mistake += "so after step i there are i + 1."
    if run.steps == STEPS:
        mistake = "It began anew, or counted anew: go on from the checkpoint's number of steps."
    run.bench.expect(
        run.steps == rest,
        f"{rest} steps after the restart, of {STEPS}, as there is checkpoint-{resumed}.pt",
        run.steps,
        mistake,
    )


def expect_same_end(run: Run, at: Sequence[int]) -> None:
    """Expect the weights of a training without a kill."""
    bench, got = run.bench, run.weights
    expected = Run(bench, "other-disk").train()

    def everywhere(holds: bool) -> bool:
        return all(bench.comms.all_gather_data(holds))

    if not everywhere(torch.equal(got, expected)):
        mistake = "Save and restore all that the next step depends on: weights, optimizer, place "
        mistake += "in the data, random numbers of each rank, number of steps."
        for words, what in MISTAKES.items():
            if everywhere(torch.allclose(got, with_mistake(bench, what, at), atol=1e-6)):
                mistake = words
                break
        off = (got - expected).abs().max().item()
        raise Wrong("bitwise the weights without a kill", f"weights {off:.1e} away", mistake)
    bench.same("the weights in the end", got)


@LAB.check("without a fault: every step, and checkpoints", NEWEST)
def without_fault(bench: Bench) -> None:
    plain = Run(bench)
    for _ in range(STEPS):
        plain.step()
    run = Run(bench)
    got = run.train()
    bench.expect(run.steps == STEPS, f"{STEPS} steps", run.steps)
    bench.near(got, plain.weights, f"the weights after {STEPS} steps")
    if bench.rank:
        bench.expect(
            not run.files,
            "nothing on the disk of any rank but rank 0",
            ", ".join(run.files),
            "Every rank writes. The replicas are the same, so rank 0 alone saves.",
        )
    else:
        wanted = [f"checkpoint-{step}.pt" for step in (STEPS - EVERY, STEPS)]
        right, got_files = f"{' and '.join(wanted)}, every={EVERY}", ", ".join(run.files) or "none"
        other = "Their names are others than load() looks for." if len(run.files) > 1 else TWO
        bench.expect(set(wanted) <= set(run.files), right, got_files, other)


@LAB.check("the newest one, on every rank", NEWEST)
def newest(bench: Bench) -> None:
    folder = Run(bench).folder
    got = bench.work.load(folder, bench.comms)
    bench.expect(got is None, "None where nothing was saved", got)
    if bench.rank == 0:
        for step in (8, 9, 10):
            save_one(bench, folder, step)
    expect_loaded(bench, folder, 10, {9: AS_TEXTS})


@LAB.check("the one before, if it is broken", NEWEST)
def broken(bench: Bench) -> None:
    for kind, damaged in DAMAGES.items():
        bench.doing = f"where the newest file is {kind}"
        folder = Run(bench, kind.replace(" ", "-")).folder
        if bench.rank == 0:
            for step in (2, 4):
                path = save_one(bench, folder, step)
            path.write_bytes(damaged(path.read_bytes()))
        expect_loaded(bench, folder, 2, {})


def save_one(bench: Bench, folder: Path, step: int) -> Path:
    """Let the script save a state, and return its file."""
    bench.work.save(folder, step, {"step": step, "weights": torch.full((1000,), float(step))})
    path = folder / f"checkpoint-{step}.pt"
    names = ", ".join(sorted(each.name for each in folder.glob("*"))) or "nothing"
    mistake = AS_TEXTS if step == 10 else ""  # it removed the one before, it seems
    bench.expect(path.exists(), f"{path.name} when save returns", names, mistake)
    return path


def expect_loaded(bench: Bench, folder: Path, step: int, mistakes: dict[int, str]) -> None:
    """Expect that ``load`` finds the state after ``step`` steps, on every rank."""
    with bench.noting("Where the newest file cannot be read, go back to the one before."):
        got = bench.work.load(folder, bench.comms)
    found = got.get("step") if isinstance(got, dict) else got
    mistake = mistakes.get(found, "") if isinstance(found, int) else ""
    if got is None and bench.rank:
        mistake = "This rank looked on its own disk, and would begin anew while rank 0 goes on. "
        mistake += "Let rank 0 decide, and send what it has read."
    bench.expect(found == step, f"the state after {step} steps", found, mistake)
    bench.near(got["weights"], torch.full((1000,), float(step)), "the saved weights")


@LAB.check("killed between two steps, twice", NEWEST)
def between(bench: Bench) -> None:
    run = Run(bench)

    def kill() -> None:
        if bench.life < 2 and run.steps == 3:
            bench.comms.barrier()
            if bench.rank == bench.n - 1:
                bench.die()

    run.data.asked = kill
    run.train()
    bench.expect(
        bench.life == 2,
        "a batch to be asked for before each step, with next(batches)",
        f"none after 3 steps, in {run.steps}",
    )
    expect_rest(run, resumed=4)
    expect_same_end(run, at=(2, 4))


@LAB.check("killed while it writes", NEWEST)
def midst(bench: Bench) -> None:
    run = Run(bench)
    if bench.life == 0:
        run.data.asked = lambda: die_at_byte(most_bytes(run), bench) if run.steps == 5 else None
        run.train()
        most = most_bytes(run)
        bench.expect(False, "a checkpoint after 6 steps", f"none of more than {most} bytes")
    unwritten = run.folder / "checkpoint-6.pt"
    bench.expect(
        not unwritten.exists(),
        f"no {unwritten.name} until it is whole, as rank 0 was killed while it wrote it",
        f"a part of it, {unwritten.stat().st_size if unwritten.exists() else 0} bytes",
        "It had its own name before all was written. Write beside it, then rename.",
    )
    newest = [f"checkpoint-{step}.pt" for step in (2, 4)]
    bench.expect(
        bench.rank > 0 or set(newest) <= set(run.files),
        f"{' and '.join(newest)}, as rank 0 was killed while it wrote the next",
        ", ".join(run.files),
        f"{TWO} Remove an older one when the next is there, not before.",
    )
    left = f"On this rank's disk is what the kill left: {', '.join(run.files) or 'nothing'}."
    with bench.noting(left, "Take only what is named checkpoint-NUMBER.pt for a checkpoint."):
        run.train()
    expect_rest(run, resumed=4)
    expect_same_end(run, at=(4,))


def die_at_byte(size: int, bench: Bench) -> None:
    """Have rank 0 killed when a file that it writes gets larger than ``size`` bytes."""
    if bench.rank == 0:
        signal.signal(signal.SIGXFSZ, lambda *_: bench.die())
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


def most_bytes(run: Run) -> int:
    """Bytes that a killed writer gets to write: most of those of the checkpoint before."""
    return int(MOST * max((path.stat().st_size for path in run.checkpoints), default=0))
