"""Gradients that are reduce-scattered in buckets during backward: stages 1 and 2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from microddp.allreduce import AUTO, halves_of
from microddp.bucketing import bucket_caps, plan_in_order
from microddp.comms import Comms
from microddp.hooks import Switchable
from microddp.replicas import broadcast_parameters, check_structure
from microddp.sharding.unit import Unit, check_dense, elements
from microddp.timing import Recorder


class ShardedGradients(Switchable):
    """Averages a module's gradients so that each rank has its part of the mean only.

    A backward brings each gradient into the flat tensor of its
    :class:`~microddp.sharding.unit.Unit`, and a unit whose gradients are all there is
    reduce-scattered while backward goes on. Build an optimizer of ``shards``, call :meth:`finish`
    after backward, and after the optimizer's step :meth:`gather` or :meth:`gather_in_forward`.
    Bytes that a rank sends in a step: (n-1)/n S of gradients, and as many of parameters.

    An optimizer may be any that treats each value by itself (SGD, Adam, AdamW), since a shard has
    values of several parameters. A parameter that got no gradient on any rank has a mean of zero.

    Args:
        module: at construction its parameters become those of rank 0, and views of flat tensors.
            Those that require no gradient are left as they are.
        comms: the ranks.
        bucket_cap_mb: size of a unit in MiB, as of a bucket; ``None``: 25, after a first one of 1.
        keep_gradients: whether the flat tensors of gradients stay (stage 1) or go as soon as a
            rank has its part (stage 2).
        carrier: a key of ``microddp.allreduce.HALVES``, or ``"auto"``.

    Attributes:
        units: in the order in which they are averaged, that of backward.

    Raises:
        ValueError: a gradient would be sparse.
        RuntimeError: on every rank: the ranks' parameters differ in number, shape or dtype.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        *,
        keep_gradients: bool = False,
        carrier: str = AUTO,
    ) -> None:
        check_dense(module, comms)
        check_structure(module, comms)
        broadcast_parameters(module, comms)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        plan = plan_in_order(module, range(len(named))[::-1], bucket_caps(bucket_cap_mb))
        self.comms, halves = comms, halves_of(carrier, comms)
        self.units = [
            Unit(dict(named[i] for i in members), comms, halves, keep_gradients=keep_gradients)
            for members in plan
        ]
        self._sent = 0  # of the units: in the same order on every rank
        self._before: dict[Unit, torch.Tensor] = {}  # means that are to be added to
        self._stale = False  # whether parameters are to be gathered yet
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(self._ready, unit, i))  # type: ignore[no-untyped-call]
            for unit in self.units
            for i, p in enumerate(unit.parameters)
        ]
        self._wait_in_forward(module)

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's part of each unit, for an optimizer."""
        return [unit.shard for unit in self.units]

    def record(self, timeline: Recorder) -> None:
        """Record gradients, collectives and the wait for them from now on."""
        for unit in self.units:
            unit.timeline = timeline

    def _ready(self, unit: Unit, i: int, parameter: torch.Tensor) -> None:
        if not self.armed or parameter.grad is None:
            return
        unit.timeline.mark(unit.names[i])
        self._come(unit, i)
        while self._sent < len(self.units) and not self.units[self._sent].missing:
            self._send()

    def _send(self) -> None:
        """Average the next unit, and take the mean of one that was sent before it."""
        unit = self.units[self._sent]
        unit.reduce()
        self._sent += 1
        done = self._sent - 1 - unit.under_way
        if done >= 0 and not unit.keep_gradients:  # its memory is needed for the next
            self._take_mean(self.units[done])

    def _take_mean(self, unit: Unit) -> None:
        mean = unit.finish()
        if mean is not None:
            if unit in self._before:
                mean += self._before.pop(unit)
            unit.shard.grad = mean

    def _come(self, unit: Unit, i: int) -> None:
        if unit.shard.grad is not None:
            # In stage 1 it lies where gradients come to now.
            self._before[unit], unit.shard.grad = unit.shard.grad.clone(), None
        unit.come(i)

    def finish(self) -> None:
        """Return when this rank has its part of all means. A collective."""
        for unit in self.units[self._sent :]:
            for i in sorted(unit.missing):
                self._come(unit, i)
            self._send()
        self._sent = 0
        for unit in self.units:
            self._take_mean(unit)

    def gather(self) -> None:
        """Bring the parameters that other ranks have updated here. A collective."""
        self._begin_gather()
        for unit in self.units:
            unit.arrive()

    def gather_in_forward(self) -> None:
        """Let the next forward bring them: the first layers' first, the others' meanwhile.

        Until then parameters are a mixture of old and new ones.
        """
        self._stale = True

    def _begin_gather(self) -> None:
        self._stale = False
        for unit in reversed(self.units):  # they are in the order of backward
            unit.begin_gather()

    def _wait_in_forward(self, module: nn.Module) -> None:
        """Have each element of a list wait for what it has, and the module for all else."""
        blocks = elements(module)
        inside = {m for block in blocks for m in block.modules()}
        outside = [m for m in module.modules() if m not in inside]
        used = [(block, list(block.parameters())) for block in blocks]
        used.append((module, [p for m in outside for p in m.parameters(recurse=False)]))
        for part, parameters in used:
            its = set(parameters)
            units = [unit for unit in self.units if not its.isdisjoint(unit.parameters)]
            before = partial(self._before_forward, units)
            self._handles.append(part.register_forward_pre_hook(before))

    def _before_forward(self, units: list[Unit], module: nn.Module, args: Any) -> None:
        del module, args
        if self._stale:
            self._begin_gather()
        for unit in units:
            unit.arrive()

    def remove(self) -> None:
        """Bring all parameters here, and take the hooks off the module. A collective."""
        if self._stale:
            self.gather()
        for handle in self._handles:
            handle.remove()
