"""An optimizer of this rank's part of the parameters, and the norm of gradients in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from microddp.allreduce import AUTO, Halves, halves_of
from microddp.comms import Comms
from microddp.sharding.unit import Unit


class ShardedOptimizer:
    """Any optimizer of single values, on this rank's part of the parameters: ZeRO's stage 1.

    It stands where the optimizer stood. Gradients are averages before its step, by
    :class:`~microddp.ddp.wrapper.DistributedDataParallel` say; each rank updates an n-th of all
    values, and the ranks exchange what they updated. What the optimizer keeps, two moments of each
    value with Adam, is kept of that part only.

    A parameter without a gradient is left alone if its whole group has none; otherwise its gradient
    is taken for zero.

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
        parameters: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]],
        comms: Comms,
        carrier: str = AUTO,
        **options: Any,
    ) -> None:
        self.units: list[Unit] = []
        halves = halves_of(carrier, comms)
        given: list[Any] = list(parameters)
        groups = given if isinstance(given[0], Mapping) else [{"params": given}]
        sharded: list[dict[str, Any]] = []
        for group in groups:
            units = _units(group["params"], comms, halves)
            self.units += units
            sharded.append({**group, "params": [unit.shard for unit in units]})
        self.optimizer = optimizer_class(sharded, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, for schedules of the learning rate."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for unit in self.units:
            unit.shard.grad = None
            for parameter in unit.parameters:
                parameter.grad = None

    def step(self) -> None:
        """Update all parameters by gradients that are averages. A collective."""
        for unit in self.units:
            _take_averages(unit)
        self.optimizer.step()
        for unit in self.units:
            unit.gather()


def _units(parameters: Iterable[nn.Parameter], comms: Comms, halves: Halves) -> list[Unit]:
    """A unit for each kind of parameter, in the order in which the kinds come."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    for i, parameter in enumerate(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), {})[str(i)] = parameter
    return [Unit(members, comms, halves) for members in kinds.values()]


def _take_averages(unit: Unit) -> None:
    """Take this rank's part of gradients that are averages already."""
    if all(parameter.grad is None for parameter in unit.parameters):
        unit.shard.grad = None
        return
    if unit.shard.grad is None:
        unit.shard.grad = torch.zeros_like(unit.shard)
    for i, there, here in unit.pieces():
        grad = unit.parameters[i].grad
        unit.shard.grad[here] = 0 if grad is None else grad.view(-1)[there]


@torch.no_grad()
def clip_grad_norm(shards: Iterable[nn.Parameter], max_norm: float, comms: Comms) -> torch.Tensor:
    """Scale gradients that are in parts so that the norm of all together is at most ``max_norm``.

    A rank's own norm is of its part only, so the squares are added up over the ranks. A collective.

    Returns:
        The norm before, a scalar, the same on every rank.
    """
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    squares = torch.zeros((), device=comms.device)
    for gradient in gradients:
        squares += gradient.float().square().sum()
    comms.all_reduce(squares)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
