"""Gradients that are reduce-scattered in buckets during backward: stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from microddp.bucketing import bucket_caps, plan_in_order
from microddp.comms import Comms
from microddp.hooks import Switchable
from microddp.replicas import broadcast_parameters
from microddp.sharding.unit import Unit


class ShardedGradients(Switchable):
    """Averages a module's gradients so that each rank has its part of the mean only.

    A backward brings each gradient into the flat tensor of its
    :class:`~microddp.sharding.unit.Unit`, and a unit whose gradients are all there is
    reduce-scattered while backward goes on. Build an optimizer of ``shards``, call :meth:`finish`
    after backward, and :meth:`gather` after the optimizer's step.
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

    Attributes:
        units: in the order in which they are averaged, that of backward.

    Raises:
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
    ) -> None:
        broadcast_parameters(module, comms)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        plan = plan_in_order(module, range(len(named))[::-1], bucket_caps(bucket_cap_mb))
        self.comms = comms
        self.units = [
            Unit(dict(named[i] for i in members), comms, keep_gradients=keep_gradients)
            for members in plan
        ]
        self._next = 0  # of the units to be averaged: in the same order on every rank
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(unit, i))  # type: ignore[no-untyped-call]
            for unit in self.units
            for i, parameter in enumerate(unit.parameters)
        ]

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's part of each unit, for an optimizer."""
        return [unit.shard for unit in self.units]

    def _hook_of(self, unit: Unit, i: int) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            if self.armed:
                unit.come(i)
                self._send_full()

        return ready

    def _send_full(self) -> None:
        while self._next < len(self.units) and not self.units[self._next].missing:
            self.units[self._next].reduce()
            self._next += 1

    def finish(self) -> None:
        """Return when this rank has its part of all means. A collective."""
        for unit in self.units[self._next :]:
            for i in sorted(unit.missing):
                unit.come(i)
            unit.reduce()
        self._next = 0
        for unit in self.units:
            unit.finish()

    def gather(self) -> None:
        """Bring the parameters that other ranks have updated here. A collective."""
        for unit in self.units:
            unit.gather()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()
