"""The ways in which a step's gradients are averaged: the table ``STRATEGIES``.

A strategy is a class and a name in one place. Training, benchmarks, plans and the simulator read
the table. Those that stand here are the book's first; :mod:`microddp.torch_ddp`,
:mod:`microddp.sharding` and :mod:`microddp.local_sgd` register theirs when they are imported, as a
new module has to be in :mod:`microddp.train.options` and :mod:`microddp.performance.simulator`. A
strategy that sends anything but each gradient once says so by its own ``sent_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import nn

from microddp.backward import bytes_held
from microddp.bucketing import BucketedDDPHooks
from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.hooks import AllReduceHooks
from microddp.step import Strategy
from microddp.timing import NOT_RECORDED, Recorder

Hooks = AllReduceHooks | BucketedDDPHooks
Kind = TypeVar("Kind", bound=type[Strategy])
STRATEGIES: dict[str, type[Strategy]] = {"none": Strategy}


def register(name: str) -> Callable[[Kind], Kind]:
    """Put a class of strategies into the table."""

    def enter(kind: Kind) -> Kind:
        STRATEGIES[name] = kind
        return kind

    return enter


@register("naive")
class Naive(Strategy):
    """One by one, after backward."""

    averages = True

    def finish(self) -> None:
        average_gradients(self.module, self.comms, self.timeline)


def average_gradients(model: nn.Module, comms: Comms, timeline: Recorder = NOT_RECORDED) -> None:
    """Average every gradient of ``model`` over all ranks, one by one.

    The rank computes nothing meanwhile: the timeline shows each all-reduce, and all of them
    together as a wait. Parameters without a gradient are left out; they must be the same ones on
    every rank.

    Args:
        model: this rank's replica, after its backward.
        comms: the ranks that share the gradients.
        timeline: records the all-reduces and the wait for them.

    Raises:
        RuntimeError: another rank failed, or the time-out passed.
    """
    with timeline.span("wait for gradients", lane="wait"):
        for name, parameter in model.named_parameters():
            if (gradient := parameter.grad) is not None:
                nbytes = bytes_held(gradient)
                with timeline.span(f"all-reduce {name}", "communication", nbytes):
                    if gradient.is_sparse:
                        with comms.agree(f"all-reduce of the gradient of {name}"):
                            comms.group.allreduce([gradient.div_(comms.world_size)]).wait()
                    else:  # it is laid out like its parameter: channels last, say
                        flat = gradient.contiguous().resolve_conj().resolve_neg()
                        comms.all_reduce_mean(flat)
                        gradient.copy_(flat)


@register("hooks")
class Hooked(Strategy):
    """One by one during backward, each as soon as it is ready."""

    averages = overlaps = True

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        super().__init__(model, comms)
        self.hooks = hooks or self._hooks(bucket_cap_mb)

    def _hooks(self, bucket_cap_mb: float | None) -> Hooks:
        del bucket_cap_mb
        return AllReduceHooks(self.module, self.comms)

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        self.hooks.record(timeline)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.hooks.no_sync()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.hooks.abandon()
        super().zero_grad(optimizer)

    def finish(self) -> None:
        self.hooks.finish()

    def remove(self) -> None:
        self.hooks.remove()


@register("bucketed")
class Bucketed(Hooked):
    """In buckets during backward, from the last parameter to the first."""

    buckets = True

    def _hooks(self, bucket_cap_mb: float | None) -> Hooks:
        return BucketedDDPHooks(self.module, self.comms, bucket_cap_mb)


@register("ddp")
class Wrapped(Strategy):
    """In buckets during backward, by the book's own wrapper.

    The end of backward waits. The model may be wrapped already.
    """

    averages = overlaps = buckets = True

    def __init__(self, model: nn.Module, comms: Comms, bucket_cap_mb: float | None = None) -> None:
        super().__init__(model, comms)
        self._made = not isinstance(model, DDP)
        ddp = model if isinstance(model, DDP) else DDP(model, comms, bucket_cap_mb=bucket_cap_mb)
        self.ddp = self.module = ddp
        self.timeline = ddp.reducer.buckets.timeline

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        self.ddp.record(timeline)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def remove(self) -> None:
        if self._made:  # else it is its owner's
            self.ddp.reducer.remove()
