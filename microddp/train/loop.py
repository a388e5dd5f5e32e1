"""The training loop: epochs of steps, with any schedule, precision and accumulation."""

from __future__ import annotations

import math
import statistics
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from microddp.carrier import BACKEND
from microddp.comms import Comms
from microddp.compression import compress
from microddp.data import ShardedBatches
from microddp.ddp import DDP
from microddp.local_sgd import Local, LocalSteps, Outer
from microddp.performance import StragglerReport, straggler_report
from microddp.replicas import check_replicas
from microddp.report import human_seconds
from microddp.results import output_file
from microddp.shared import carrier
from microddp.step import StepOptions, Strategy, compute_gradients, take_step
from microddp.step_times import StepTimes, break_down
from microddp.strategies import STRATEGIES
from microddp.timing import NOT_RECORDED, Span, Timeline
from microddp.train.checkpoint import Checkpoints, gather_states, own_state
from microddp.train.optimizers import OPTIMIZERS
from microddp.train.options import TrainingConfig
from microddp.train.task import evaluate, make_task

TRACED_STEPS = 20  # at the start of each epoch: bounds what the timeline holds and gathers
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OnStep = Callable[[int, nn.Module], object]


@dataclass(frozen=True)
class EpochResult:
    """Losses and times of an epoch.

    Attributes:
        epoch: number of the epoch, from 0.
        loss: mean over the epoch's steps and all ranks.
        test_loss: loss on the whole test set after the epoch.
        test_accuracy: share of right answers, from 0 to 1; ``None`` where values are predicted.
        seconds: time of the epoch on rank 0, without the test.
        step: seconds of a step and its parts: the mean over ranks and over the traced steps, which
            are the first ones that this run took in the epoch; zeros if it took none.
    """

    epoch: int
    loss: float
    test_loss: float
    test_accuracy: float | None
    seconds: float
    step: StepTimes


@dataclass(frozen=True)
class TrainingResult:
    """A trained model, and how it was trained.

    Attributes:
        model: the trained model, the same on every rank.
        epochs: results of all epochs, also of those before a resumption.
        steps: number of optimizer steps since the beginning.
        seconds: time of this run on rank 0.
        checkpoints: checkpoints of this run and the time that they took; ``None`` without any.
        report: the rank or link that held the others up in the last epoch's first steps, if
            ``config.report`` asked for it.
    """

    model: nn.Module
    epochs: tuple[EpochResult, ...]
    steps: int
    seconds: float
    checkpoints: Checkpoints | None = None
    report: StragglerReport | None = None


def train(config: TrainingConfig, comms: Comms, on_step: OnStep | None = None) -> TrainingResult:
    """Train as :class:`~microddp.train.options.TrainingConfig` says. A collective.

    Sets the seed of torch's default generator.

    Args:
        config: the same on every rank.
        comms: ranks that train together.
        on_step: called after each optimizer step with the step's number, from 1, and the model.
            Where every rank holds all of it, it still has the step's gradients; with zero1 to
            zero3, hsdp and owned they are elsewhere or in parts, and so may the weights be.

    Raises:
        ValueError: on every rank, if the options do not fit the data, the ranks or the checkpoint.
        RuntimeError: another rank failed, or the last checkpoint cannot be written; with
            ``MICRODDP_DEBUG=1`` also if ranks have different weights: the message names the step,
            the ranks and the first parameter that differs.
    """
    return Trainer(config, comms, on_step).run()


class Trainer:
    """A training run. The constructor checks everything, and :meth:`run` trains.

    Arguments and errors are those of :func:`train`.

    Attributes:
        step: the number of optimizer steps so far.
    """

    def __init__(self, config: TrainingConfig, comms: Comms, on_step: OnStep | None = None) -> None:
        self.config, self.comms, self.on_step = config, comms, on_step
        torch.manual_seed(config.seed)
        self.task = make_task(config, comms)
        self.model = self.task.model
        self.batches = self._make_batches()
        self._check_files()
        half = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(comms.device.type, enabled=half)
        self.step = 0
        self.total = torch.zeros((), dtype=torch.float64, device=comms.device)  # of this epoch
        self.history: list[EpochResult] = []
        self.profiled: list[Span] = []
        self.traced = 0  # number of steps in self.profiled
        self.kept_back: dict[str, Any] | None = None  # residuals of the steps before this run
        self.checkpoints: Checkpoints | None = None
        if config.checkpoint:
            self.checkpoints = Checkpoints(config.checkpoint, comms, config.keep)
        state = self._begin_from()
        if state:
            self._go_on_from(state)
        self.strategy = self._make_strategy(state)
        self.optimizer = OPTIMIZERS[config.optimizer](self.strategy.parameters(), config.lr)
        if state:
            if config.average_every:
                state = {**state, "optimizer": own_state(state["optimizers"], comms)}
            self.strategy.load(self.model, self.optimizer, state)
        if config.compress != "none":
            compress(self.strategy, config.compress)
            self.kept_back = self.kept_back or self._kept_back()

    def _make_batches(self) -> ShardedBatches:
        config, comms = self.config, self.comms
        parts = comms.world_size * config.accumulate
        # A rank that takes steps by itself takes the mean over its own samples.
        even = bool(config.average_every)
        if config.batch_size < parts or (even and config.batch_size % parts):
            what = "a multiple of" if even else "at least"
            raise ValueError(
                f"rank {comms.rank}: --batch-size: expected {what} {comms.world_size} ranks x "
                f"{config.accumulate} accumulated parts, got {config.batch_size}"
            )
        if config.report and len(self.task.train) < 2 * config.batch_size:
            raise ValueError(
                f"rank {comms.rank}: --report: expected at least 2 steps in an epoch, got "
                f"{len(self.task.train)} samples in batches of {config.batch_size}"
            )
        shards = torch.empty(config.batch_size).tensor_split(comms.world_size)
        return ShardedBatches(
            *(self.task.train, config.batch_size, comms.rank, comms.world_size, config.seed),
            sizes=[len(rows) for rows in shards],
        )

    def _check_files(self) -> None:
        """Refuse files that rank 0 cannot write now, not when all is trained. A collective."""
        problem = ""
        if self.comms.rank == 0:
            try:
                for path in filter(None, (self.config.profile, self.config.json)):
                    output_file(str(path))
            except (ArgumentTypeError, OSError) as error:
                problem = str(error)
        self.comms.fail_together(problem, "--profile and --json that can be written", ValueError)

    def _begin_from(self) -> dict[str, Any] | None:
        """Return a state to go on from, the same on every rank, or ``None``. A collective."""
        if self.checkpoints is None:
            return None
        if not self.config.resume:
            self.checkpoints.expect_none()
            return None
        state = self.checkpoints.load()
        done = "nothing: starting anew" if state is None else f"after step {state.get('step')}"
        self.comms.print(f"Resuming {done}, from {self.config.checkpoint}")
        return state

    def _make_strategy(self, state: Mapping[str, Any] | None) -> Strategy:
        config = self.config
        if not config.average_every:
            model = self.model
            if config.all_reduce != BACKEND:
                model = DDP(
                    model,
                    self.comms,
                    bucket_cap_mb=config.bucket_cap_mb,
                    all_reduce=carrier(config.all_reduce, self.comms),
                )
            return STRATEGIES[config.schedule](model, self.comms, config.bucket_cap_mb)
        local = LocalSteps(
            self.model,
            self.comms,
            config.average_every,
            outer=Outer.parse(config.outer),
            fragments=config.fragments,
            warm_up=config.warm_up,
        )
        if state:
            local.load_state_dict(state["local_steps"])
        return Local(self.model, self.comms, local=local)

    def run(self) -> TrainingResult:
        """Train the remaining steps, and write the files that the options name."""
        began = time.perf_counter()
        with _deterministic_convolutions():
            if len(self.history) < self.config.epochs:
                self._rehearse()
            for epoch in range(len(self.history), self.config.epochs):
                self.history.append(self._epoch(epoch))
                self.total.zero_()
                self.comms.print(_in_words(self.history[-1], self.config.epochs))
                self._save()
        if self.checkpoints:
            self.checkpoints.finish()
        report = None
        if self.config.report and self.traced > 1:
            report = straggler_report(self.profiled, self.comms, self.strategy.sent_bytes())
        self.strategy.remove()
        if self.config.report and not report:  # a report compares steps
            self.comms.print(f"Nothing to report: expected 2 steps or more, got {self.traced}.")
        if self.config.profile and not self.profiled:
            self.comms.print("No step was left to take, and none is there to profile.")
        elif self.config.profile and self.comms.rank == 0:
            from microddp.figures import save_chrome_trace  # with matplotlib, for seconds

            save_chrome_trace(self.profiled, self.config.profile)
        return TrainingResult(
            self.model,
            tuple(self.history),
            self.step,
            time.perf_counter() - began,
            self.checkpoints,
            report,
        )

    def _rehearse(self) -> None:
        """Run a backward whose gradients nobody uses.

        Both DDPs plan their buckets anew after their first backward, and where a gradient lies in
        a bucket decides in which order three or more ranks add it up. So the first step after a
        resumption must not be the first backward, or it would round as no other step does. Nor
        may it draw the random numbers of the steps that follow, or change what is kept back.
        """
        gpus = [self.comms.device] if self.comms.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            batch = next(self.batches.epoch(0))
            compute_gradients(self.strategy, self.task.loss, batch, **self._options())
        self.strategy.zero_grad(self.optimizer)
        if self.strategy.compression and self.kept_back:
            self.strategy.compression.load_state_dict(self.kept_back, self.model)

    def _kept_back(self) -> dict[str, Any] | None:
        """Return the parts of gradients that were not sent yet. A collective."""
        compression = self.strategy.compression
        return compression.state_dict(self.model) if compression else None

    def _epoch(self, epoch: int) -> EpochResult:
        """Train the remaining steps of an epoch, and test."""
        began = time.perf_counter()
        timeline = Timeline(self.comms)
        end = (epoch + 1) * len(self.batches)
        traced = min(TRACED_STEPS, end - self.step)
        untraced_from = self.step + traced
        self.strategy.record(timeline)
        with tqdm(
            total=len(self.batches),
            initial=len(self.batches) - (end - self.step),
            desc=f"epoch {epoch + 1}/{self.config.epochs}",
            disable=None if self.comms.rank == 0 else True,
            unit="step",
            leave=False,
        ) as bar:
            for batch in self.batches.epoch(epoch, start=bar.n):
                if self.step == untraced_from:
                    self.strategy.record(NOT_RECORDED)
                self._step(batch)
                bar.update()
                every = self.config.checkpoint_every
                if every and self.step % every == 0 and self.step < end:
                    self._save()
        self.strategy.record(NOT_RECORDED)
        self.strategy.meet()
        total = self.total.clone()
        self.comms.all_reduce_mean(total)
        seconds = time.perf_counter() - began
        spans = timeline.gather()
        if epoch == self.config.epochs - 1:
            self.profiled, self.traced = spans, traced
        with self._autocast():
            most = self.batches.sizes[0] // self.config.accumulate  # a forward pass of training
            test_loss, test_accuracy = evaluate(self.task, self.comms, most)
        loss = total.item() / len(self.batches)
        times = mean_step(spans, traced, self.comms.world_size)
        return EpochResult(epoch, loss, test_loss, test_accuracy, seconds, times)

    def _step(self, batch: Sequence[torch.Tensor]) -> None:
        """Train one step."""
        loss = take_step(self.strategy, self.task.loss, self.optimizer, batch, **self._options())
        self._done(loss)

    def _done(self, loss: torch.Tensor) -> None:
        """Count a step, with this rank's loss."""
        self.step += 1
        self.total += loss
        if self.on_step:
            self.on_step(self.step, self.model)
        if self.comms.debug and not (self.config.average_every or self.strategy.stage == 3):
            self.strategy.meet()  # ZeRO 1 and 2 leave it to the next forward to gather the weights
            try:
                check_replicas(self.model, self.comms)
            except RuntimeError as error:
                raise RuntimeError(f"after step {self.step}: {error}") from error

    def _options(self) -> StepOptions:
        return {
            "parts": self.config.accumulate,
            "share": self.batches.share,
            "autocast": self._autocast(),
            "scaler": self.scaler,
        }

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = DTYPES[self.config.precision]
        return torch.autocast(self.comms.device.type, dtype, enabled=dtype is not torch.float32)

    def _save(self) -> None:
        """Begin to write a checkpoint, if the options ask for checkpoints. A collective."""
        if self.checkpoints is None:
            return
        began = time.perf_counter()
        losses = self.comms.all_gather(self.total).tolist()
        state = self.state() | {"losses": losses, "kept_back": self._kept_back()}
        if isinstance(self.strategy, Local):
            state["optimizers"] = gather_states(self.optimizer.state_dict(), self.comms)
            state["local_steps"] = self.strategy.local.state_dict()
        self.checkpoints.save(self.step, state, began)

    def state(self) -> dict[str, Any]:
        """Return the state that all ranks share after a step, without copying it.

        Where the strategy shards it, this is a collective, and rank 0 has the whole state.
        """
        model, optimizer = self.strategy.state(self.model, self.optimizer)
        return {
            "options": self.config.result_options(),
            "step": self.step,
            "losses": [self.total.item()],
            "model": model,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "history": [asdict(result) for result in self.history],
            **self._random_state(),
        }

    def _random_state(self) -> dict[str, Any]:
        cuda = self.comms.device.type == "cuda"
        return {
            "generator": torch.get_rng_state(),
            "cuda_generator": torch.cuda.get_rng_state(self.comms.device) if cuda else None,
        }

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        options = state.get("options", {})
        for name, value in self.config.result_options().items():
            if (there := options.get(name)) != value:
                raise ValueError(
                    f"rank {self.comms.rank}: --{name.replace('_', '-')}: the state to go on from "
                    f"was trained with {there}, expected the same, got {value}"
                )
        self.step = state["step"]
        if (begun := math.ceil(self.step / len(self.batches))) > self.config.epochs:
            raise ValueError(
                f"rank {self.comms.rank}: --epochs: expected at least the {begun} that the state "
                f"to go on from had begun, got {self.config.epochs}"
            )
        losses = state["losses"]
        one_each = len(losses) == self.comms.world_size
        self.total.fill_(losses[self.comms.rank] if one_each else statistics.mean(losses))
        self.model.load_state_dict(state["model"])
        self.scaler.load_state_dict(state["scaler"])
        self.kept_back = state.get("kept_back")
        self.history = [
            EpochResult(**result | {"step": StepTimes(**result["step"])})
            for result in state["history"]
        ]
        torch.set_rng_state(state["generator"])
        if self.comms.device.type == "cuda" and state["cuda_generator"] is not None:
            torch.cuda.set_rng_state(state["cuda_generator"], self.comms.device)


@contextmanager
def _deterministic_convolutions() -> Iterator[None]:
    """Make convolutions deterministic in a block, so that a resumed run has the same bits."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


def mean_step(spans: Sequence[Span], steps: int, world_size: int) -> StepTimes:
    """Return the mean time of each part of a step over all steps and ranks, from their spans."""
    if not steps:
        return StepTimes(*[0.0] * len(fields(StepTimes)))
    ranks = [break_down([s for s in spans if s.rank == rank]) for rank in range(world_size)]
    columns = zip(*map(astuple, ranks), strict=True)
    return StepTimes(*(sum(column) / (steps * world_size) for column in columns))


def _in_words(result: EpochResult, epochs: int) -> str:
    right = result.test_accuracy
    accuracy = "" if right is None else f", test accuracy {right:.2%}"
    return (
        f"epoch {result.epoch + 1}/{epochs}: loss {result.loss:.4f}, test loss "
        f"{result.test_loss:.4f}{accuracy}, {human_seconds(result.seconds)}"
    )
