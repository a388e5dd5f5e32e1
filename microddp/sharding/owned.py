"""Whole parameters, each updated by the one rank that owns it: for optimizers such as Muon.

Muon orthogonalises the gradient of a whole matrix, so a slice of one is of no use to it. Ownership
of whole matrices takes the place of slices. No wrapper is needed: before its step the optimizer's
gradients are reduced to the owners, and after it the parameters are gathered from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from microddp.buckets import bucket_caps
from microddp.comms import Comms
from microddp.parts import ParamShard
from microddp.replicas import broadcast_tensors, in_words
from microddp.sharding.blocks import check_alike
from microddp.shared import AUTO, Future, ScatterGather, scatter_gather
from microddp.timing import NOT_RECORDED, Recorder


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Give each parameter to a rank, the one that owns least so far; the largest go first.

    Args:
        sizes: of each parameter, in any unit. Here numbers of values: the groups' chunks are equal
            then. Muon's products take rows x columns x the smaller of the two; of the matrices of a
            transformer most have its width for that, so it balances most of this work, too.
        ranks: how many there are.

    Returns:
        The owner of each parameter.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969: the most that a rank has is
    at most 4/3 - 1/(3n) of the least possible.
    """
    owner, owned = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[i] = owned.index(min(owned))
        owned[owner[i]] += sizes[i]
    return owner


def together(nbytes: Sequence[float], ranks: int, cap: float) -> list[list[int]]:
    """Group parameters so that each rank may own one of each group, whose chunks are equal.

    Args:
        nbytes: bytes of each parameter, in the order in which they are to be grouped.
        ranks: how many there are.
        cap: bytes that a group has at least, if it does not hold all.

    Returns:
        The numbers of each group's parameters.
    """
    groups: list[list[int]] = [[]]
    held = 0.0  # by the last group
    for i, size in enumerate(nbytes):
        full = len(groups[-1]) >= ranks and held >= cap
        if full and len(nbytes) - i >= ranks:  # fewer are too few for a group of their own
            groups.append([])
            held = 0.0
        groups[-1].append(i)
        held += size
    return groups


class OwnedGroup:
    """Parameters that lie in one flat tensor, those of each owner side by side.

    Args:
        named: parameters of one dtype and device, by name.
        comms: the ranks.
        by: the reduce-scatter and the all-gather to use.

    Attributes:
        parameters: all of them, views of the flat tensor.
        owned: those of this rank by number, with the tensors for its optimizer.
        flat: n chunks of the size of the largest, of which the parameters are views.
        timeline: records collectives, and the wait for them.
    """

    def __init__(self, named: dict[str, nn.Parameter], comms: Comms, by: ScatterGather) -> None:
        self.parameters, self.comms, self.by = list(named.values()), comms, by
        self.timeline: Recorder = NOT_RECORDED
        owner = owners([p.numel() for p in self.parameters], comms.world_size)
        filled = [0] * comms.world_size
        places: list[tuple[int, int]] = []
        for p, rank in zip(self.parameters, owner, strict=True):
            places.append((rank, filled[rank]))
            filled[rank] += p.numel()
        chunk = max(filled)
        self.flat = self.parameters[0].detach().new_zeros(comms.world_size * chunk)
        self._starts = [rank * chunk + start for rank, start in places]
        self.owned: dict[int, ParamShard] = {}
        for i, (name, p) in enumerate(named.items()):
            values = self._view(self.flat, i)
            values.copy_(p.detach())
            p.data = values
            if owner[i] == comms.rank:
                # A single number in one dimension, as its moments then have: they are no counts.
                mine = nn.Parameter(values if p.dim() else values.view(1), p.requires_grad)
                all_of_it = slice(0, p.numel())
                self.owned[i] = ParamShard(name, p.shape, all_of_it, values.view(-1), mine)

    def _view(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """View parameter i in a flat tensor."""
        p = self.parameters[i]
        return flat[self._starts[i] :][: p.numel()].view(p.shape)

    @torch.no_grad()
    def reduce(self) -> Future:
        """Start the reduce-scatter of the gradients, and forget these. A collective."""
        flat = torch.zeros_like(self.flat)
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                torch.mul(p.grad, 1 / self.comms.world_size, out=self._view(flat, i))
            p.grad = None
        return self.by.start("reduce-scatter", flat, self.comms, "reduce-scatter", self.timeline)

    def take(self, reduced: Future) -> None:
        """Wait for the means, and add what this rank owns to its optimizer's gradients."""
        with self.timeline.span("wait for gradients", lane="wait"):
            flat = reduced.wait()
        for i, param in self.owned.items():
            if self.parameters[i].requires_grad:  # it may have been frozen meanwhile
                param.add_gradient(self._view(flat, i).view_as(param.sharded_param))

    def gather(self) -> Future:
        """Start to all-gather the parameters from their owners. A collective."""
        return self.by.start("all-gather", self.flat, self.comms, "all-gather", self.timeline)


def owned_groups(
    named: dict[str, nn.Parameter],
    comms: Comms,
    bucket_cap_mb: float | None = None,
    collectives: str = AUTO,
) -> list[OwnedGroup]:
    """Give each parameter an owner, and group those that travel together.

    Args:
        named: the parameters by name, equal on all ranks; they become views of flat tensors.
        comms: the ranks.
        bucket_cap_mb: least size of a group in MiB; ``None``: 25.
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.

    Returns:
        The groups, those of the last parameters first, as backward has them.
    """
    by, cap = scatter_gather(collectives, comms), bucket_caps(bucket_cap_mb)[-1]
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for name, p in reversed(named.items()):
        kinds.setdefault((p.dtype, p.device), []).append((name, p))
    return [
        OwnedGroup(dict(alike[i] for i in members), comms, by)
        for alike in kinds.values()
        for members in together([p.nbytes for _, p in alike], comms.world_size, cap)
    ]


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
        parameters: the same on every rank; they become those of rank 0, and views of flat tensors.
        comms: the ranks.
        bucket_cap_mb: least size of a group in MiB; ``None``: 25.
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.
        options: keyword arguments of the optimizer.

    Attributes:
        groups: what is reduced and gathered together.

    Raises:
        ValueError: on every rank: the cap is not positive or not finite, or ``collectives`` is
            unknown; or as the optimizer.
        RuntimeError: on every rank: the ranks' parameters or these options differ.

    Example:
        >>> muon = OwnedOptimizer(torch.optim.Muon, matrices, comms, lr=0.02)
        >>> loss.backward()
        >>> muon.step()

    Source: the optimizers of nanochat (``nanochat/optim.py``), which have these three phases.
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
        named = {str(i): p for i, p in enumerate(dict.fromkeys(parameters))}  # each once
        optimizer_class(named.values(), **options)  # what it refuses, it refuses on every rank
        alike = {name: in_words(p) for name, p in named.items()}
        check_alike(nn.Module(), comms, bucket_cap_mb, collectives=collectives, **alike)
        broadcast_tensors([p.data for p in named.values()], comms)
        self.groups = owned_groups(named, comms, bucket_cap_mb, collectives)
        mine = [[param.sharded_param for param in group.owned.values()] for group in self.groups]
        self._optimizers = [optimizer_class(each, **options) if each else None for each in mine]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' groups, for schedules of the learning rate; a rank may have none."""
        return [group for each in self._optimizers if each for group in each.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """State of the optimizers, by the tensors that this rank owns."""
        return {p: kept for each in self._optimizers if each for p, kept in each.state.items()}

    def zero_grad(self) -> None:
        """Set all gradients to ``None``."""
        for group in self.groups:
            for p in group.parameters:
                p.grad = None
            for param in group.owned.values():
                param.sharded_param.grad = None

    def step(self) -> None:
        """Update all parameters by the mean of the ranks' gradients. A collective."""
        reduced = [group.reduce() for group in self.groups]
        gathered = []
        for group, optimizer, mean in zip(self.groups, self._optimizers, reduced, strict=True):
            group.take(mean)
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
            gathered.append(group.gather())
        for future in gathered:
            future.wait()
