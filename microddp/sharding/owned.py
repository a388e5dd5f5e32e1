"""Whole matrices, each updated by the one rank that owns it: for optimizers such as Muon.

Muon orthogonalises the gradient of a whole matrix, so a slice of one is of no use to it. Ownership
of whole matrices takes the place of slices, and no wrapper is needed: the optimizer's step
reduces the gradients, updates what this rank owns, and gathers the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from microddp.buckets import bucket_caps, plan_buckets
from microddp.comms import Comms
from microddp.replicas import broadcast_tensors
from microddp.shared import AUTO, Future, ScatterGather, scatter_gather
from microddp.timing import NOT_RECORDED


def update_work(parameter: torch.Tensor) -> float:
    """Compare the work of updates: for a matrix that of the products in Muon's iteration.

    Each is of a matrix and its transpose, or of the square that comes of that: rows x columns x the
    smaller of the two. For other shapes it is the number of values.
    """
    return parameter.numel() * (min(parameter.shape) if parameter.dim() == 2 else 1)


def owners(parameters: Sequence[torch.Tensor], work: list[float]) -> list[int]:
    """Give each parameter to a rank, the one with the least work so far; the largest go first.

    Args:
        parameters: in any order.
        work: of each rank, before; what it is given is added.

    Returns:
        The owner of each parameter.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969: the most that a rank has to
    do is at most 4/3 - 1/(3n) of the least possible.
    """
    owner = [0] * len(parameters)
    for i in sorted(range(len(parameters)), key=lambda i: -update_work(parameters[i])):
        owner[i] = work.index(min(work))
        work[owner[i]] += update_work(parameters[i])
    return owner


class OwnedOptimizer:
    """Any optimizer, on whole parameters, of which each rank owns some.

    It takes the place of an ordinary optimizer, on a model without a wrapper, whose gradients are
    each rank's own. :meth:`step` has three phases: start to reduce-scatter the gradients of all
    groups, so that each rank has the mean of what it owns; as each arrives, update that, and start
    to all-gather the parameters; wait for these. Bytes that a rank sends: 2 (n-1)/n S, as in DDP,
    and the padding of ranks that own less. The optimizer's state exists for what a rank owns only.

    A parameter without a gradient counts as one of zeros.

    Args:
        optimizer_class: any optimizer, as ``torch.optim.Muon``.
        parameters: of one dtype and device; they become those of rank 0, and views of flat tensors.
        comms: the ranks.
        bucket_cap_mb: size of a group in MiB; ``None``: 25, after a first one of 1.
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.
        options: keyword arguments of the optimizer.

    Attributes:
        groups: what is reduced and gathered together.
        work: of each rank, in units of :func:`update_work`.

    Example:
        >>> muon = OwnedOptimizer(torch.optim.Muon, matrices, comms, lr=0.02)
        >>> loss.backward()
        >>> muon.step()

    Source: the optimizers of nanochat (``nanochat/optim.py``, 2026), which have these three phases.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        parameters: Iterable[nn.Parameter],
        comms: Comms,
        bucket_cap_mb: float | None = None,
        collectives: str = AUTO,
        **options: Any,
    ) -> None:
        parameters = list(parameters)
        optimizer_class(parameters, **options)  # what it refuses, it refuses on every rank
        broadcast_tensors([p.data for p in parameters], comms)
        by = scatter_gather(collectives, comms)
        self.work = [0.0] * comms.world_size
        self.groups: list[OwnedGroup] = []
        # As backward has them: those of the last layers first.
        backward = parameters[::-1]
        for members in plan_buckets(backward, bucket_caps(bucket_cap_mb)):
            group = [backward[i] for i in members]
            self.groups.append(OwnedGroup(group, owners(group, self.work), comms, by))
        self.optimizers = [
            optimizer_class(group.mine, **options) if group.mine else None for group in self.groups
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' groups, for schedules of the learning rate."""
        return [group for each in self.optimizers if each for group in each.param_groups]

    def zero_grad(self) -> None:
        """Set all gradients to ``None``."""
        for group in self.groups:
            for p in group.parameters:
                p.grad = None

    def step(self) -> None:
        """Update all parameters by the mean of the ranks' gradients. A collective."""
        reduced = [group.reduce() for group in self.groups]
        gathered = []
        for group, optimizer, mean in zip(self.groups, self.optimizers, reduced, strict=True):
            group.take(mean.wait())
            if optimizer:
                optimizer.step()
            gathered.append(group.gather())
        for future in gathered:
            future.wait()


class OwnedGroup:
    """Parameters that lie in one flat tensor, those of each owner side by side.

    Args:
        parameters: of one dtype and device.
        owner: of each of them.
        comms: the ranks.
        by: the reduce-scatter and the all-gather to use.

    Attributes:
        parameters: all of them, views of the flat tensor.
        mine: those that this rank owns.
        flat: n chunks of the size of the largest, of which the parameters are views.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owner: Sequence[int],
        comms: Comms,
        by: ScatterGather,
    ) -> None:
        self.parameters, self.comms, self.by = list(parameters), comms, by
        self.mine = [p for p, rank in zip(parameters, owner, strict=True) if rank == comms.rank]
        filled = [0] * comms.world_size
        places: list[tuple[int, int]] = []
        for p, rank in zip(parameters, owner, strict=True):
            places.append((rank, filled[rank]))
            filled[rank] += p.numel()
        chunk = max(filled)
        self.flat = parameters[0].new_zeros(comms.world_size * chunk)
        self._starts = [rank * chunk + start for rank, start in places]
        for p, values in zip(parameters, self._views(self.flat), strict=True):
            values.copy_(p.detach())
            p.data = values

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View the parameters in a flat tensor."""
        return [
            flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(self._starts, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def reduce(self) -> Future:
        """Start the reduce-scatter of the gradients, and forget these. A collective."""
        flat = torch.zeros_like(self.flat)
        for p, values in zip(self.parameters, self._views(flat), strict=True):
            if p.grad is not None:
                torch.mul(p.grad, 1 / self.comms.world_size, out=values)
            p.grad = None
        return self.by.start("reduce-scatter", flat, self.comms, "reduce-scatter", NOT_RECORDED)

    def take(self, reduced: torch.Tensor) -> None:
        """Let the means of what this rank owns be the gradients."""
        means = dict(zip(self.parameters, self._views(reduced), strict=True))
        for p in self.mine:
            p.grad = means[p]

    def gather(self) -> Future:
        """Start to all-gather the parameters from their owners. A collective."""
        return self.by.start("all-gather", self.flat, self.comms, "all-gather", NOT_RECORDED)
