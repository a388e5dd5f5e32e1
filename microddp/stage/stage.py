"""The stage of a chapter: ranks that are devices of known speed, or the GPUs that there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from microddp.comms import Comms
from microddp.findings import Comparison, compare
from microddp.model import parameter_count
from microddp.report import table
from microddp.sharding import elements
from microddp.stage.devices import PausingOptimizer, pausing_batch, pausing_loss, pausing_model
from microddp.stage.scale import Side, stage_of, work_of
from microddp.step import Loss, Strategy, take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timing, measure
from microddp.workloads.transformer import Transformer, token_loss

LARGEST_LAYER = 1 << 25  # bytes
# What GPUs train, in the order of the arguments: 92 million parameters, on four sequences each, so
# that the seven replicas of a chapter fit one of 24 GB.
ON_GPUS = {"vocabulary": 8192, "dim": 768, "depth": 12, "heads": 12, "context": 1024}
SEQUENCES = 4


@dataclass(frozen=True)
class Stage:
    """A model to train, the same on every rank, and what its steps need.

    Attributes:
        comms: the ranks.
        model: the model; strategies get copies of it.
        loss_fn: from outputs and targets to a scalar.
        batch: inputs and targets of this rank's shard.
        make_optimizer: from parameters to an optimizer.
        sides: the cluster and the stage; empty where the devices are the machine's own.
    """

    comms: Comms
    model: nn.Module
    loss_fn: Loss
    batch: tuple[torch.Tensor, torch.Tensor]
    make_optimizer: Callable[..., torch.optim.Optimizer]
    sides: tuple[Side, ...] = ()

    def strategy(self, kind: str, bucket_cap_mb: float | None = None) -> Strategy:
        """Make a strategy of ``STRATEGIES``, with a copy of the model. A collective."""
        return STRATEGIES[kind](copy.deepcopy(self.model), self.comms, bucket_cap_mb)

    def step(
        self, kind: str | Strategy, bucket_cap_mb: float | None = None
    ) -> Callable[[], object]:
        """Make a step to be timed: of a strategy, or of one by its name. A collective.

        ``"none"`` is a device alone. The size of a bucket, in MiB, is for a name.
        """
        strategy = self.strategy(kind, bucket_cap_mb) if isinstance(kind, str) else kind
        optimizer = self.make_optimizer(strategy.parameters())
        return partial(take_step, strategy, self.loss_fn, optimizer, self.batch)

    def all_reduces(self) -> Callable[[], object]:
        """Make what takes M: the all-reduces of all layers' gradients, one after another."""
        sizes = map(parameter_count, elements(self.model))
        layers = [torch.zeros(size, device=self.comms.device) for size in sizes]
        return lambda: [*map(self.comms.all_reduce, layers)]

    def speed_up(self, step: Timing, alone: Timing) -> Comparison:
        """Compare a step of all devices with one device that does all of their work.

        That is as many steps ``alone``, with one shard, as there are devices.
        """
        n = self.comms.world_size
        return compare(step, Timing(tuple(n * seconds for seconds in alone.seconds)))

    def __str__(self) -> str:
        n = self.comms.world_size
        if not self.sides:
            return f"{n} of {n} ranks are timed, on {self.comms.device.type}: not to scale"
        columns = [side.in_words() for side in self.sides]
        headers, *rows = ([name, *(words[name] for words in columns)] for name in columns[0])
        return f"{n} of {n} ranks are timed: devices of known speed\n{table(rows, headers)}"


def set_stage(comms: Comms, there: Side, layer_bytes: int = 1 << 19) -> Stage:
    """Set a stage to the scale of a cluster. A collective.

    With a GPU for each rank the devices are what they are: the model is then a transformer. Ranks
    that share a GPU are devices of known speed, with parameters and gradients on it. A rank alone
    sends nothing, and is a device that computes for a tenth of a second.

    Args:
        comms: the ranks, as many as the cluster ``there`` has devices.
        layer_bytes: bytes of a layer's gradient; more where messages would be so quick that layers
            would have to be too short.

    Raises:
        ValueError: another number of ranks, or no size of a layer that fits.
    """
    if there.devices != comms.world_size:
        raise ValueError(
            f"rank {comms.rank}: expected {there.devices} ranks, one for each device of "
            f"{there.words}, got {comms.world_size}"
        )
    if comms.device.type == "cuda" and not comms.crowded:
        return _on_gpus(comms)
    here, messages, starts = None, 0.0, Timing((0.0,))
    while here is None:
        if comms.world_size > 1:
            messages, starts = _measure(comms, there.layers, layer_bytes)
        start = max(0.0, starts.median)
        try:
            here = stage_of(there, "this stage", layer_bytes, messages, start)
        except ValueError:
            if layer_bytes >= LARGEST_LAYER:
                raise
            layer_bytes *= 2
    here = replace(here, start_spread=starts.spread if comms.world_size > 1 else None)
    model, batch = pausing_model(work_of(here), comms.device), pausing_batch(comms.device)
    return Stage(comms, model, pausing_loss, batch, PausingOptimizer, (there, here))


def _measure(comms: Comms, layers: int, layer_bytes: int) -> tuple[float, Timing]:
    """Seconds of one all-reduce of all gradients, and of a layer's beyond its share of that.

    The second is a difference, which may come out below 0: taken round by round, so that it has a
    spread. Layers follow one another as a step sends them.
    """
    whole = torch.zeros(layers * layer_bytes // 4, device=comms.device)
    parts = torch.split(whole, layer_bytes // 4)
    calls: dict[str, Callable[[], object]] = {
        "whole": partial(comms.all_reduce, whole),
        "parts": lambda: [*map(comms.all_reduce, parts)],
    }
    times = measure(calls, comms, warmup=1, repeat=5)
    pairs = zip(times["parts"].seconds, times["whole"].seconds, strict=True)
    return times["whole"].median, Timing(tuple((sent - once) / layers for sent, once in pairs))


def _on_gpus(comms: Comms) -> Stage:
    torch.manual_seed(0)
    model = Transformer(*ON_GPUS.values()).to(comms.device)
    torch.manual_seed(comms.rank)  # its own shard
    context, vocabulary = ON_GPUS["context"], ON_GPUS["vocabulary"]
    tokens = torch.randint(vocabulary, (SEQUENCES, context + 1), device=comms.device)
    batch = tokens[:, :-1], tokens[:, 1:]
    return Stage(comms, model, token_loss, batch, partial(torch.optim.AdamW, lr=1e-4))
