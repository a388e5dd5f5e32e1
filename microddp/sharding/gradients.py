"""Gradients that are reduce-scattered in buckets during backward: stages 1 and 2."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from microddp.allreduce import AUTO, halves_of
from microddp.bucketing import bucket_caps, check_dense, plan_in_order
from microddp.comms import Comms
from microddp.model import elements
from microddp.replicas import broadcast_parameters, check_structure
from microddp.sharding.unit import Averages, Unit


class ShardedGradients(Averages):
    """Averages a module's gradients so that each rank has its part of the mean only.

    A backward brings each gradient into the flat tensor of its
    :class:`~microddp.sharding.unit.Unit`, and a unit whose gradients are all there is
    reduce-scattered while backward goes on. Build an optimizer of ``shards``, call :meth:`finish`
    after backward, and after the optimizer's step :meth:`gather` or :meth:`gather_in_forward`.
    Bytes that a rank sends in a step: (n-1)/n S of gradients, and as many of parameters.

    An optimizer may be any that treats each value by itself (SGD, Adam, AdamW). A parameter that
    got no gradient on any rank has a mean of zero.

    Args:
        module: at construction its parameters become those of rank 0, and views of flat tensors.
            Those that require no gradient are left as they are.
        comms: the ranks.
        bucket_cap_mb: size of a unit in MiB, as of a bucket; ``None``: 25, after a first one of 1.
        keep_gradients: whether the flat tensors of gradients stay until the means are forgotten
            (stage 1) or go as soon as a rank has its part of them (stage 2).
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
        super().__init__()
        check_dense(module, comms)
        check_structure(module, comms)
        broadcast_parameters(module, comms)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        plan = plan_in_order(module, range(len(named))[::-1], bucket_caps(bucket_cap_mb))
        halves = halves_of(carrier, comms)
        self.units = [
            Unit(dict(named[i] for i in members), comms, halves, keep_gradients=keep_gradients)
            for members in plan
        ]
        self._expected = deque(self.units)  # not sent yet, in one order on every rank
        self._came: dict[Unit, set[int]] = {unit: set() for unit in self.units}
        self._stale = False  # whether parameters are to be gathered yet
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(self._ready, unit, i))  # type: ignore[no-untyped-call]
            for unit in self.units
            for i, p in enumerate(unit.parameters)
        ]
        # Each element of a list waits for what it has, and the module for all else.
        blocks = elements(module)
        inside = {m for block in blocks for m in block.modules()}
        outside = [m for m in module.modules() if m not in inside]
        for block in blocks:
            self._wait_in(block, list(block.parameters()))
        self._wait_in(module, [p for m in outside for p in m.parameters(recurse=False)])

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's part of each parameter, for an optimizer; empty where it has none."""
        return [part for unit in self.units for part in unit.parts]

    def _ready(self, unit: Unit, i: int, parameter: torch.Tensor) -> None:
        if not self.armed or parameter.grad is None:
            return
        unit.timeline.mark(unit.names[i])
        self._came[unit].add(i)
        if unit not in self._expected:  # it comes in several portions
            self._expected.append(unit)
        while self._expected and len(self._came[self._expected[0]]) == len(self._expected[0].names):
            self._send_next()

    def _send_next(self) -> None:
        unit = self._expected.popleft()
        self._came[unit].clear()
        self.send(unit)

    def finish(self) -> None:
        """Return when this rank has its part of all means. A collective."""
        while self._expected:
            self._send_next()
        self.settle()
        self._expected.extend(self.units)

    def gather(self) -> None:
        """Bring the parameters that other ranks have updated here. A collective."""
        self._stale = True
        self._arrive(self.units)

    def gather_in_forward(self) -> None:
        """Let the next forward bring them: the first layers' first, the others' meanwhile.

        Until then parameters are a mixture of old and new ones.
        """
        self._stale = True

    def _arrive(self, units: Sequence[Unit], *_: object) -> None:
        for unit in reversed(self.units) if self._stale else ():  # in the order of forward
            unit.begin_gather()
        self._stale = False
        for unit in units:
            unit.arrive()

    def _wait_in(self, part: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        its = set(parameters)
        units = [unit for unit in self.units if not its.isdisjoint(unit.parameters)]
        self._handles.append(part.register_forward_pre_hook(partial(self._arrive, units)))

    def remove(self) -> None:
        """Bring all parameters here, and take the hooks off the module. A collective."""
        self._arrive(self.units)
        for handle in self._handles:
            handle.remove()
