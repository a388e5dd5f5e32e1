"""The options of a training run, and the command line of ``python -m microddp.train``."""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from microddp import sharding, torch_ddp  # noqa: F401 - they register strategies, choices here
from microddp.carrier import BACKEND
from microddp.compression import compressor
from microddp.local_sgd import Outer
from microddp.shared import ALL_REDUCES, AUTO
from microddp.strategies import STRATEGIES
from microddp.train.optimizers import OPTIMIZERS

CHOICES = {
    "schedule": tuple(name for name, strategy in STRATEGIES.items() if strategy.averages),
    "model": ("mlp", "cnn", "transformer"),
    "data": ("synthetic", "digits", "mnist", "text"),
    "optimizer": tuple(OPTIMIZERS),
    "precision": ("fp32", "bf16", "fp16"),
    "all_reduce": (AUTO, BACKEND, *ALL_REDUCES),
}
HEADS = 4  # of the transformer
MAY_BE_0 = ("average_every", "warm_up", "checkpoint_every", "seed")  # other integers: at least 1
NEEDS = {  # options that do nothing without another one
    **dict.fromkeys(("outer", "fragments", "warm_up"), "average_every"),
    **dict.fromkeys(("checkpoint_every", "keep", "resume"), "checkpoint"),
    "least": "elastic",
}
METAVARS = {"checkpoint": "DIR", "elastic": "HOST:PORT"}  # the others have that of their type
TYPE_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}
RESULT_OPTIONS = (
    *("model", "data", "channels", "hidden", "depth", "width"),
    *("batch_size", "precision", "compress", "optimizer", "lr", "seed"),
    *("average_every", "outer", "fragments", "warm_up"),
)


@dataclass(frozen=True)
class TrainingConfig:
    """The options of a training run. The command line has a flag for each, with its text here.

    Attributes:
        schedule: how gradients are averaged: naive, one by one after backward; hooks, one by one
            during backward; bucketed, in buckets; ddp, by microddp's DDP; torch, by PyTorch's;
            zero1 leaves each rank an n-th of the optimizer's state, zero2 of gradients, too, and
            zero3 of parameters, too; hsdp is zero3 among the ranks of a machine, with averages
            between machines; with owned, one rank updates the whole of each parameter
        all_reduce: algorithm that adds gradients up, with schedule ddp; auto takes the fastest
            here, and may take another one in the next run, which then rounds differently
        compress: compressor of gradients, with error feedback, as top-k:0.01
        average_every: steps between averages of the weights, which are averaged after each epoch,
            too; 0: gradients are averaged
        outer: how averaged weights move: mean, or as nesterov:0.7,0.9
        fragments: parts of the weights, averaged in turns
        warm_up: first steps, in which gradients are averaged all the same
        model: the cnn normalises over groups of channels: of a batch, each rank sees only its shard
        data: the transformer reads an image as a sequence of pixels, synthetic data as a chain of
            tokens, and text by characters, and predicts the next one
        channels: output channels of each convolution of the cnn
        hidden: width of the cnn's linear layer
        depth: linear layers of the mlp, or blocks of the transformer
        width: width of the mlp's layers, or of the transformer's tokens
        epochs: passes through the data
        batch_size: samples of a step, over all ranks
        accumulate: parts in which each rank computes its share of a batch, one by one
        precision: dtype of the model's operations; weights and gradients stay fp32, and fp16 scales
            the loss so that small gradients survive
        bucket_cap_mb: size of a bucket in MiB, for schedules that have some
        optimizer: adam, or muon for matrices and adam for the rest, for schedules that keep
            parameters whole
        lr: learning rate of Adam, and of Muon's updates scaled to the size of Adam's
        seed: seed of the first weights, of the order of the data, and of synthetic data
        profile: file for a Chrome trace of the last epoch's first steps, of all ranks
        report: say which rank or link holds the others up in those steps, if one does
        checkpoint: folder for checkpoints, written after each epoch, and when elastic ranks have
            met again
        checkpoint_every: steps between more checkpoints; 0: none within an epoch
        keep: number of checkpoints that stay, the newest ones
        resume: go on from the newest checkpoint that is whole, if there is one, on any number of
            ranks (with average_every on as many as before); on as many as before, the result is
            bitwise that of one run
        elastic: address at which ranks meet that come and go, without torchrun; of more than
            batch_size / accumulate all end with an error
        least: smallest number of ranks that train, with elastic
        json: file for options, results and times

    Raises:
        ValueError: names the option, the expected value and the given one.
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
    optimizer: str = "adam"
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
        for option in fields(self):
            _check_value(option.name, getattr(self, option.name), type(option.default))
        if self.data == "text" and self.model != "transformer":
            raise ValueError(f"--data: expected --model transformer with text, got {self.model}")
        if self.all_reduce != BACKEND and (
            self.schedule != "ddp" or self.compress != "none" or self.average_every
        ):
            raise ValueError(
                "--all-reduce: expected --schedule ddp, no --compress and no --average-every with "
                f"it, got {self.schedule}, {self.compress} and {self.average_every}"
            )
        if self.optimizer == "muon" and STRATEGIES[self.schedule].slices:
            raise ValueError(
                "--optimizer: expected a --schedule that keeps matrices whole with muon, such as "
                f"ddp or owned, got {self.schedule}"
            )
        if self.compress != "none":
            self._check_compression()
        self._check_local_steps()
        if self.seed >= 2**31:
            raise ValueError(f"--seed: expected at most {2**31 - 1}, got {self.seed}")
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"--channels: expected numbers of at least 1, got {self.channels}")
        if self.model == "mlp" and self.depth < 2:
            raise ValueError(f"--depth: expected at least 2 for an mlp, got {self.depth}")
        if self.model == "transformer" and self.width % HEADS:
            raise ValueError(
                f"--width: expected a multiple of its {HEADS} heads for a transformer, got "
                f"{self.width}"
            )
        if self.elastic and (self.compress != "none" or self.average_every):
            # What a lost rank had kept back, or learned by itself, would be lost with it.
            raise ValueError("--elastic: expected no --compress and no --average-every with it")
        if self.elastic and not STRATEGIES[self.schedule].replicas:
            raise ValueError(  # nor is there a copy of its part
                "--elastic: expected a --schedule that keeps everything on each rank, got "
                f"{self.schedule}"
            )
        for name, other in NEEDS.items():
            if getattr(self, name) != getattr(TrainingConfig, name) and not getattr(self, other):
                raise ValueError(f"{_flag(name)}: expected {_flag(other)} with it")

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
        if not self.average_every:
            return
        if self.schedule != TrainingConfig.schedule:
            raise ValueError(
                f"--average-every: expected no --schedule with it, got {self.schedule}"
            )
        if self.report:  # which looks at collectives in steps
            raise ValueError("--report: expected no --average-every with it")
        meetings = (self.checkpoint_every, self.warm_up)
        if self.checkpoint_every and (
            self.fragments > 1 or any(steps % self.average_every for steps in meetings)
        ):
            raise ValueError(
                "--checkpoint-every: expected steps after which all ranks meet, multiples of "
                f"{self.average_every} (--warm-up, too) and 1 fragment, got "
                f"{self.checkpoint_every}, {self.warm_up} and {self.fragments}"
            )
        if self.compress != "none" or self.precision == "fp16":
            # With a loss scale, a rank alone would skip a step that overflows.
            raise ValueError(
                "--average-every: expected no --compress and --precision fp32 or bf16 with it, "
                f"got {self.compress} and {self.precision}"
            )

    def result_options(self) -> dict[str, Any]:
        """Return the options that decide what is learned; the others only change rounding."""
        # Compressors choose what they send bucket by bucket.
        more = ("bucket_cap_mb",) if self.compress != "none" else ()
        return {name: getattr(self, name) for name in (*RESULT_OPTIONS, *more)}


def _check_value(name: str, value: Any, kind: type) -> None:
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{_flag(name)}: expected one of {', '.join(CHOICES[name])}, got {value}")
    least = 0 if name in MAY_BE_0 else 1
    if kind is int and value < least:
        raise ValueError(f"{_flag(name)}: expected at least {least}, got {value}")
    if kind is float and not 0 < value < math.inf:
        raise ValueError(f"{_flag(name)}: expected a positive number, got {value}")


def parse(arguments: Sequence[str] | None) -> TrainingConfig:
    """Read a command line, by default this process's.

    Raises:
        ValueError: says in one line what is wrong.
    """
    parser = _Parser(
        prog="python -m microddp.train",
        description="Data-parallel training with any schedule, precision and accumulation.",
    )
    # In the docstring's list, "name: text", and lines of the text that are indented further.
    doc = inspect.getdoc(TrainingConfig) or ""
    texts = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", doc, re.MULTILINE))
    for option in fields(TrainingConfig):
        name, text = option.name, texts.get(option.name, "")
        default: Any = option.default
        if default is False:
            parser.add_argument(_flag(name), action="store_true", help=text)
            continue
        several = isinstance(default, tuple)
        kind = type(default[0]) if several else Path if default is None else type(default)
        shown = " ".join(map(str, default)) if several else default
        parser.add_argument(
            _flag(name),
            default=default,
            type=kind,
            nargs="+" if several else None,
            choices=CHOICES.get(name),
            metavar=None if name in CHOICES else METAVARS.get(name, TYPE_METAVARS[kind]),
            help=text if shown in (None, "") else f"{text} (default {shown})",
        )
    options = vars(parser.parse_args(arguments))
    return TrainingConfig(**options | {"channels": tuple(options["channels"])})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # for the caller, who knows which rank is to speak


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
