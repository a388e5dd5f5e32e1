"""What a training run is told: the options of ``python -m microddp.train``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from microddp import sharding  # noqa: F401 - registers strategies that are choices
from microddp.carrier import BACKEND
from microddp.compression import compressor
from microddp.local_sgd import Outer
from microddp.shared import ALL_REDUCES, AUTO
from microddp.strategies import STRATEGIES

CHOICES = {
    "schedule": tuple(name for name, strategy in STRATEGIES.items() if strategy.averages),
    "model": ("mlp", "cnn", "transformer"),
    "data": ("synthetic", "digits", "mnist", "text"),
    "precision": ("fp32", "bf16", "fp16"),
    "all_reduce": (AUTO, BACKEND, *ALL_REDUCES),
}
RESULT_OPTIONS = (
    *("model", "data", "channels", "hidden", "depth", "width"),
    *("batch_size", "precision", "compress", "lr", "seed"),
    *("average_every", "outer", "fragments", "warm_up"),
)


@dataclass(frozen=True)
class TrainingConfig:
    """What to train, on what, and how.

    Attributes:
        schedule: how gradients are averaged: ``"naive"``, one by one after backward; ``"hooks"``,
            one by one during backward; ``"bucketed"``, in buckets; ``"ddp"``, by
            :class:`~microddp.ddp.wrapper.DistributedDataParallel`; ``"torch"``, by PyTorch's DDP;
            ``"zero1"`` to ``"zero3"``, with an n-th of the optimizer's state, of gradients, and of
            parameters on each rank (:mod:`microddp.sharding`).
        all_reduce: what adds gradients up, by ``"ddp"``: see
            :class:`~microddp.ddp.wrapper.DistributedDataParallel`. ``"auto"`` measures, and may
            choose otherwise in another run, which then adds in another order.
        compress: what is sent instead of the gradients, with error feedback, by ``"ddp"`` and
            ``"torch"``: a name of :func:`microddp.compression.compressor`, or ``"none"``.
        average_every: steps between averages of the weights, instead of averaging gradients; 0:
            gradients, as ``schedule`` says.
        outer: how the shared weights move then: see :meth:`microddp.local_sgd.Outer.parse`.
        fragments: parts of the weights that are averaged in turns.
        warm_up: steps before that, in which gradients are averaged.
        model: ``"mlp"``, ``"cnn"`` or ``"transformer"``. The cnn normalises over groups of
            channels, not over the batch, of which each rank sees only its shard.
        data: ``"synthetic"``, ``"digits"``, ``"mnist"`` or, for the transformer, ``"text"``. It
            reads an image as the sequence of its pixels, synthetic data as a chain of tokens, and
            text by characters, and predicts the next.
        channels: of each convolution of the cnn.
        hidden: width of the cnn's linear layer.
        depth: linear layers of the mlp, or blocks of the transformer.
        width: of the mlp's layers, or of the transformer's tokens.
        epochs: passes through the data.
        batch_size: samples of a step, over all ranks.
        accumulate: equal parts in which each rank computes its share of a batch, one by one.
        precision: of the model's operations: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` by
            ``torch.autocast``, the latter with a loss scaled so that small gradients survive.
            Weights and gradients stay fp32.
        bucket_cap_mb: size of a bucket in MiB, for the schedules that have some.
        lr: learning rate of Adam.
        seed: of the first weights, of the order of the data, and of synthetic data.
        profile: a file for the first steps of the last epoch on all ranks, as a Chrome trace.
        report: who holds the others up in those steps: a slow rank, a slow link, or neither.
        checkpoint: a folder for what is needed to go on, written after each epoch.
        checkpoint_every: steps between more such checkpoints; 0: none but those.
        keep: how many of them stay, the last ones.
        resume: go on from the newest checkpoint that is whole, or from the beginning if there is
            none yet. On any number of ranks; on as many it is bitwise the same run.
        elastic: ``"HOST:PORT"``, where ranks meet that may be lost and may join while training goes
            on, instead of those that torchrun starts.
        least: of those, with how many to train at least.
        json: a file for options, results and times.

    Raises:
        ValueError: names the option, what was expected and what came.
    """

    schedule: str = "ddp"
    all_reduce: str = BACKEND
    compress: str = "none"
    average_every: int = 0
    outer: str = "mean"
    fragments: int = 1
    warm_up: int = 0
    model: str = "cnn"
    data: str = "digits"
    channels: tuple[int, ...] = (32, 64, 128)
    hidden: int = 512
    depth: int = 4
    width: int = 128
    epochs: int = 10
    batch_size: int = 96
    accumulate: int = 1
    precision: str = "fp32"
    bucket_cap_mb: float = 25.0
    lr: float = 1e-3
    seed: int = 0
    profile: Path | None = None
    report: bool = False
    checkpoint: Path | None = None
    checkpoint_every: int = 0
    keep: int = 2
    resume: bool = False
    elastic: str = ""
    least: int = 1
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{_flag(name)}: expected one of {', '.join(choices)}, got {value}"
                )
        if self.data == "text" and self.model != "transformer":
            raise ValueError(f"--data: expected --model transformer with text, got {self.model}")
        if self.all_reduce != BACKEND and (
            self.schedule != "ddp" or self.compress != "none" or self.average_every
        ):
            raise ValueError(
                "--all-reduce: expected --schedule ddp, no --compress and no --average-every with "
                f"it, got {self.schedule}, {self.compress} and {self.average_every}"
            )
        if self.compress != "none":
            self._check_compression()
        self._check_local_steps()
        for name in (
            "hidden",
            "depth",
            "width",
            "epochs",
            "batch_size",
            "accumulate",
            "keep",
            "least",
        ):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{_flag(name)}: expected at least 1, got {value}")
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"--channels: expected numbers of at least 1, got {self.channels}")
        for name in ("bucket_cap_mb", "lr"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{_flag(name)}: expected a positive number, got {value}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed: expected a number in 0..{2**31 - 1}, got {self.seed}")
        for name in ("profile", "json"):  # said now, and not when all is trained
            path = getattr(self, name)
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise ValueError(f"{_flag(name)}: expected a file in a folder that exists: {path}")
        if self.checkpoint is not None and self.checkpoint.is_file():
            raise ValueError(f"--checkpoint: expected a folder, got the file {self.checkpoint}")
        if self.elastic and (self.compress != "none" or self.average_every):
            # What a lost rank had kept back, or learned by itself, would be lost with it.
            raise ValueError("--elastic: expected no --compress and no --average-every with it")
        if self.elastic and not STRATEGIES[self.schedule].replicas:
            raise ValueError(  # nor is there a copy of its part
                "--elastic: expected a --schedule that keeps everything on each rank, got "
                f"{self.schedule}"
            )
        for name in ("checkpoint_every", "resume"):
            if getattr(self, name) and self.checkpoint is None:
                raise ValueError(f"{_flag(name)}: expected --checkpoint DIR with it")
        if self.checkpoint_every < 0:
            raise ValueError(
                f"--checkpoint-every: expected 0 or more steps, got {self.checkpoint_every}"
            )

    def _check_compression(self) -> None:
        try:
            compressor(self.compress)
        except ValueError as error:
            raise ValueError(f"--compress: {error}") from error
        if self.schedule not in ("ddp", "torch"):
            raise ValueError(
                f"--compress: expected --schedule ddp or torch with it, got {self.schedule}"
            )
        if self.precision == "fp16":  # what was kept back is in units of the last step's loss scale
            raise ValueError("--compress: expected --precision fp32 or bf16 with it, got fp16")

    def _check_local_steps(self) -> None:
        try:
            Outer.parse(self.outer)
        except ValueError as error:
            raise ValueError(f"--outer: {error}") from error
        if self.average_every < 0 or self.warm_up < 0:
            raise ValueError(
                "--average-every, --warm-up: expected 0 or more steps, got "
                f"{self.average_every} and {self.warm_up}"
            )
        changed = [
            name
            for name in ("outer", "fragments", "warm_up")
            if getattr(self, name) != getattr(TrainingConfig, name)
        ]
        if changed and not self.average_every:
            raise ValueError(f"{_flag(changed[0])}: expected --average-every with it")
        if self.average_every and self.report:  # which looks at collectives in steps
            raise ValueError("--report: expected no --average-every with it")
        meetings = (self.checkpoint_every, self.warm_up)
        if (
            self.average_every
            and self.checkpoint_every
            and (self.fragments > 1 or any(steps % self.average_every for steps in meetings))
        ):
            raise ValueError(
                "--checkpoint-every: expected steps after which all ranks meet, multiples of "
                f"{self.average_every} (--warm-up, too) and 1 fragment, got "
                f"{self.checkpoint_every}, {self.warm_up} and {self.fragments}"
            )
        if self.average_every and (self.compress != "none" or self.precision == "fp16"):
            # With a loss scale, a rank alone would skip a step that overflows.
            raise ValueError(
                "--average-every: expected no --compress and --precision fp32 or bf16 with it, "
                f"got {self.compress} and {self.precision}"
            )

    def result_options(self) -> dict[str, Any]:
        """The options that decide what is learned; the others change no more than rounding."""
        return {name: getattr(self, name) for name in RESULT_OPTIONS}


def parse(arguments: Sequence[str] | None) -> TrainingConfig:
    """Read a command line, by default this process's.

    Raises:
        ValueError: in a line, what is wrong with it.
    """
    parser = _Parser(
        prog="python -m microddp.train",
        description="Data-parallel training with any schedule, precision and accumulation.",
    )

    def add(name: str, text: str, **more: Any) -> None:
        default = getattr(TrainingConfig, name)
        if isinstance(default, (int, float)) and default is not False:
            more.setdefault("type", type(default))
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        said = "" if default is None or default is False else f" (default {shown})"
        if name in CHOICES:
            more["choices"] = CHOICES[name]
        parser.add_argument(_flag(name), default=default, help=text + said, **more)

    add("schedule", "how gradients are averaged")
    add("all_reduce", "what adds gradients up, with --schedule ddp; auto: the fastest here")
    add("compress", "what is sent instead of gradients, as top-k:0.01", metavar="NAME")
    add("average_every", "steps between averages of weights; 0: of gradients", metavar="H")
    add("outer", "mean, or as nesterov:0.7,0.9: how averaged weights move", metavar="NAME")
    add("fragments", "parts of the weights, averaged in turns", metavar="N")
    add("warm_up", "steps before that, in which gradients are averaged", metavar="N")
    add("model", "the cnn has group norm: batch norm would see each rank's shard only")
    add("data", "for the transformer, a sequence of pixels, or of synthetic tokens")
    add("channels", "of the cnn's convolutions", type=int, nargs="+", metavar="N")
    add("hidden", "width of the cnn's linear layer", metavar="N")
    add("depth", "layers of the mlp, blocks of the transformer", metavar="N")
    add("width", "of the mlp and the transformer", metavar="N")
    add("epochs", "passes through the data", metavar="N")
    add("batch_size", "samples of a step, over all ranks", metavar="N")
    add("accumulate", "parts in which each rank computes its share of a batch", metavar="K")
    add("precision", "of operations; weights stay fp32")
    add("bucket_cap_mb", "size of a bucket in MiB", metavar="MB")
    add("lr", "learning rate of Adam", metavar="LR")
    add("seed", "of weights and data", metavar="N")
    add(
        "profile", "write a Chrome trace of the last epoch's first steps", type=Path, metavar="FILE"
    )
    add("report", "say which rank or link holds the others up, if one does", action="store_true")
    add("checkpoint", "write what is needed to go on after each epoch", type=Path, metavar="DIR")
    add("checkpoint_every", "steps between more checkpoints; 0: none but those", metavar="N")
    add("keep", "how many checkpoints stay", metavar="K")
    add("resume", "go on from the checkpoint, if there is one", action="store_true")
    add("elastic", "where ranks meet that come and go, without torchrun", metavar="HOST:PORT")
    add("least", "with how many of those to train at least", metavar="N")
    add("json", "write options, results and times", type=Path, metavar="FILE")
    options = vars(parser.parse_args(arguments))
    return TrainingConfig(**options | {"channels": tuple(options["channels"])})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # for the caller, who knows which rank is to speak


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
