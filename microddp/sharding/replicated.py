"""Stages 1 and 2: parameters are whole on every rank, what an optimizer keeps is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from microddp.buckets import bucket_caps, plan_in_order
from microddp.comms import Comms
from microddp.model import elements
from microddp.replicas import broadcast_parameters, check_structure
from microddp.sharding.unit import Averages, Member, Unit, check_dense, units_of
from microddp.shared import AUTO, halves_of


class ShardedOptimizer:
    """Any optimizer of single values, on this rank's part of the parameters: ZeRO's stage 1.

    It stands where the optimizer stood. Gradients are averages before its step, by
    :class:`~microddp.ddp.wrapper.DistributedDataParallel` say; each rank updates an n-th of all
    values, and the ranks exchange what they updated. What the optimizer keeps, two moments of each
    value with Adam, is kept of that part only.

    A parameter without a gradient is left alone.

    Args:
        optimizer_class: treats each value by itself, as SGD, Adam and AdamW do.
        parameters: or groups of them, as every optimizer takes; equal on all ranks. Those of a
            group become views of one flat tensor for each dtype.
        comms: the ranks.
        carrier: a key of ``microddp.shared.HALVES``, or ``"auto"``.
        options: of the optimizer.

    Attributes:
        optimizer: of this rank's part.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.1.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        comms: Comms,
        carrier: str = AUTO,
        **options: Any,
    ) -> None:
        halves = halves_of(carrier, comms)
        self.units: list[Unit] = []
        self.optimizer = optimizer_class(parameters, **options)
        for group in self.optimizer.param_groups:
            named = {str(i): p for i, p in enumerate(group["params"])}
            units = units_of(named, comms, halves)
            group["params"] = [m.updated for unit in units for m in unit.members]
            self.units += units

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, for schedules of the learning rate."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for unit in self.units:
            for member in unit.members:
                member.parameter.grad = member.updated.grad = None

    def step(self) -> None:
        """Update all parameters by gradients that are averages. A collective."""
        for unit in self.units:
            for member in unit.pieces:
                gradient = member.parameter.grad
                member.updated.grad = None if gradient is None else gradient.flatten()[member.there]
        self.optimizer.step()
        for unit in self.units:
            unit.gather()


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
        carrier: a key of ``microddp.shared.HALVES``, or ``"auto"``.

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
        alike = (comms, halves_of(carrier, comms))
        super().__init__(
            Unit(dict(named[i] for i in members), *alike, keep_gradients=keep_gradients)
            for members in plan
        )
        self._expected = deque(self.units)  # not sent yet, in one order on every rank
        self._missing = {unit: set(unit.members) for unit in self.units}
        self._stale = False  # whether parameters are to be gathered yet
        self._handles: list[Any] = [
            m.parameter.register_post_accumulate_grad_hook(partial(self._ready, unit, m))  # type: ignore[no-untyped-call]
            for unit in self.units
            for m in unit.members
        ]
        # Each element of a list waits for what it has, and the module for all else.
        unit_of = {m.parameter: unit for unit in self.units for m in unit.members}
        blocks = elements(module)
        inside = {m for block in blocks for m in block.modules()}
        outside = [p for m in module.modules() if m not in inside for p in m.parameters(False)]
        for waits, its in [(module, outside), *((block, block.parameters()) for block in blocks)]:
            units = list(filter(None, dict.fromkeys(map(unit_of.get, its))))
            self._handles.append(waits.register_forward_pre_hook(partial(self._arrive, units)))

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's part of each parameter, for an optimizer; empty where it has none."""
        return [member.updated for member in self.members]

    def _ready(self, unit: Unit, member: Member, parameter: torch.Tensor) -> None:
        if not self.armed or parameter.grad is None:
            return
        unit.timeline.mark(member.name)
        self._missing[unit].discard(member)
        if unit not in self._expected:  # it comes in several portions
            self._expected.append(unit)
        while self._expected and not self._missing[self._expected[0]]:
            self._send_next()

    def _send_next(self) -> None:
        unit = self._expected.popleft()
        self._missing[unit].update(unit.members)
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

    def remove(self) -> None:
        """Bring all parameters here, and take the hooks off the module. A collective."""
        self._arrive(self.units)
        for handle in self._handles:
            handle.remove()
