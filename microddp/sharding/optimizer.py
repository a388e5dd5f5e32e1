"""An optimizer of this rank's part of the parameters, and the norm of gradients in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from microddp.allreduce import AUTO, halves_of
from microddp.comms import Comms
from microddp.sharding.unit import Unit, units_of


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
        carrier: a key of ``microddp.allreduce.HALVES``, or ``"auto"``.
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
            group["params"] = [part for unit in units for part in unit.parts]
            self.units += units

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, for schedules of the learning rate."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for unit in self.units:
            for parameter in (*unit.parameters, *unit.parts):
                parameter.grad = None

    def step(self) -> None:
        """Update all parameters by gradients that are averages. A collective."""
        for unit in self.units:
            for i, there, _ in unit.pieces:
                gradient = unit.parameters[i].grad
                unit.parts[i].grad = None if gradient is None else gradient.flatten()[there]
        self.optimizer.step()
        for unit in self.units:
            unit.gather()


def clip_grad_norm(shards: Iterable[nn.Parameter], max_norm: float, comms: Comms) -> torch.Tensor:
    """Scale gradients that are in parts so that the norm of all together is at most ``max_norm``.

    A rank's own norm is of its part only, so the squares are added up over the ranks. A collective.

    Returns:
        The norm before, a scalar, the same on every rank.
    """
    shards = list(shards)
    mine = get_total_norm([p.grad.float() for p in shards if p.grad is not None]).to(comms.device)
    squares = mine.square()
    comms.all_reduce(squares)
    norm = squares.sqrt()
    clip_grads_with_norm_(shards, max_norm, norm)
    return norm
