"""PyTorch's DDP: a strategy of its own, and a step of it on a timeline, seen from outside."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.hooks import Removable
from microddp.step import Strategy
from microddp.strategies import Wrapped, register
from microddp.timing import NOT_RECORDED, Instant, Recorder


class TorchDDPWatch(Removable):
    """Tells a timeline when PyTorch's DDP communicates, and when it only waits.

    It changes nothing in the wrapper, which may have a communication hook. The group numbers its
    collectives. PyTorch's hooks run after these: a bucket is sent right after the gradient that
    fills it, and the next hook finds a higher number. So communication is taken to be under way
    from the first bucket to the end of backward; the gaps in it cannot be seen. From the last
    gradient on the rank waits.

    Args:
        model: whose hooks it adds to, until :meth:`remove`.
        timeline: what it tells.
    """

    def __init__(self, model: TorchDDP, timeline: Recorder) -> None:
        self._group: Any = model.process_group  # whose stub lacks the method that counts
        self._timeline = timeline
        self._before = 0
        self._first: Instant | None = None
        self._last: Instant | None = None
        self._device = next(model.parameters()).device
        self._handles = [model.register_forward_hook(self._forwarded)]
        self._handles += [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for p in model.parameters()
            if p.requires_grad
        ]

    def finish(self) -> None:
        """Record what went on in the backward that has just ended."""
        if self._last is None:
            return
        now, first = Instant(self._device), self._first or self._last
        self._timeline.between("all-reduce", "communication", first, now)
        self._timeline.between("wait for all-reduce", "wait", self._last, now)

    def _number(self) -> int:
        return int(self._group._get_sequence_number_for_group())

    def _forwarded(self, *_: object) -> None:
        self._before = self._number()  # with those that broadcast buffers
        self._first = self._last = None

    def _ready(self, _parameter: torch.Tensor) -> None:
        if self._last and not self._first and self._number() > self._before:
            self._first = self._last
        self._last = Instant(self._device)


@register("torch")
class WrappedByTorch(Strategy):
    """In buckets during backward, by PyTorch's DDP, with gradients that are views of its buckets.

    The end of backward waits. The model may be wrapped already. After a backward that raised, it
    cannot go on.
    """

    averages = overlaps = buckets = True

    def __init__(self, model: nn.Module, comms: Comms, bucket_cap_mb: float | None = None) -> None:
        super().__init__(model, comms)
        if not isinstance(model, TorchDDP):
            model = TorchDDP(
                model,
                process_group=comms.group,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,
            )
        self.ddp = self.module = model
        self._watch: TorchDDPWatch | None = None

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        if self._watch:
            self._watch.remove()
        # A watch takes time of its own: only while somebody looks.
        self._watch = None if timeline is NOT_RECORDED else TorchDDPWatch(self.ddp, timeline)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def finish(self) -> None:
        if self._watch:
            self._watch.finish()

    def remove(self) -> None:
        self.record(NOT_RECORDED)


def strategy_of(model: nn.Module | Strategy, comms: Comms) -> Strategy:
    """The strategy that a model has: a wrapper's own, or none."""
    if isinstance(model, Strategy):
        return model
    kind = Wrapped if isinstance(model, DDP) else Strategy
    return (WrappedByTorch if isinstance(model, TorchDDP) else kind)(model, comms)
