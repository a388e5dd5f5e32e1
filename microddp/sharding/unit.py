"""Parameters that are sharded together: one flat tensor, of which each rank keeps a part.

The flat tensor is cut into as many equal parts as there are ranks, filled up with zeros where that
does not divide. A gradient is brought to it by a reduce-scatter, a parameter from it by an
all-gather: the two halves of an all-reduce, with room for an optimizer in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from microddp.allreduce import Halves
from microddp.bucketing import sparse_gradients
from microddp.comms import Comms
from microddp.timing import NOT_RECORDED, Recorder


class Unit:
    """Parameters in one flat tensor, this rank's part of it, and the gradients on their way there.

    At first the parameters are whole, and :meth:`release` leaves this rank's part of each.

    Args:
        parameters: by name; dense, of one dtype and device, equal on all ranks.
        comms: the ranks.
        halves: reduce-scatter and all-gather.
        keep_gradients: whether the flat tensor of gradients stays from step to step (stage 1), or
            goes when this rank has its part of the mean (stages 2 and 3).
        parted: whether the parameters are to be released (stage 3). The part has memory of its own
            then, and ``whole`` may have another dtype.
        dtype: of ``whole``; default: the parameters'.
        reduce_dtype: in which gradients are added up; default: the parameters'.

    Attributes:
        whole: all parameters, which are views of it; without memory while they are released.
        shard: this rank's part: what an optimizer updates.
        gradients: those that have come, divided by the number of ranks.
        missing: the numbers of the parameters whose gradients have not come in this backward.
        trains: whether there are to be gradients.
        sharers, users: of blocks, those that have it, and those in whose forward it is now.
        under_way: of units whose gradients are reduced, how many may be on their way while another
            is filled: each takes as much memory as its parameters.
        timeline: records collectives, and the wait for them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comms: Comms,
        halves: Halves,
        *,
        keep_gradients: bool = False,
        parted: bool = False,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.comms, self.halves = comms, halves
        self.keep_gradients, self.parted = keep_gradients, parted
        self.under_way = 0 if halves.at_once else 1
        self.shapes = [p.shape for p in self.parameters]
        self.ends = torch.tensor([s.numel() for s in self.shapes]).cumsum(0).tolist()
        self.part = -(-self.ends[-1] // comms.world_size)
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        flat = pad(flat, (0, comms.world_size * self.part - flat.numel()))
        self.reduce_dtype = reduce_dtype or flat.dtype
        self.whole = flat.to(dtype) if dtype else flat
        self.shard = nn.Parameter(
            self.mine(flat).clone() if parted else self.mine(flat),
            requires_grad=self.parameters[0].requires_grad,
        )
        self._views = [
            view.view(shape)
            for view, shape in zip(self.values(self.whole), self.shapes, strict=True)
        ]
        self.trains = self.shard.requires_grad
        self.sharers = self.users = 0
        self.released = False
        self._point_to(self._views)
        for parameter in self.parameters:
            parameter.__dict__["_microddp_unit"] = self
        self.gradients: torch.Tensor | None = None
        self.missing = set(range(len(self.parameters)))
        self._held: set[int] = set()  # of the gradients those that have come, now or before
        self._averages: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._coming: torch.futures.Future[torch.Tensor] | None = None
        self._reducing: torch.futures.Future[torch.Tensor] | None = None
        self.timeline: Recorder = NOT_RECORDED

    # ---- the flat tensor, its parts, and the parameters in it

    def values(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's values in a flat tensor, flat themselves."""
        return [
            flat[end - shape.numel() : end]
            for shape, end in zip(self.shapes, self.ends, strict=True)
        ]

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        return flat[self.comms.rank * self.part :][: self.part]

    def pieces(self) -> Iterator[tuple[int, slice, slice]]:
        """The parameters that this rank has something of.

        Yields:
            A parameter's number; which of its values, flattened; and where they are in the part.
        """
        first, last = self.comms.rank * self.part, (self.comms.rank + 1) * self.part
        for i, (shape, end) in enumerate(zip(self.shapes, self.ends, strict=True)):
            begin = end - shape.numel()
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                yield i, slice(start - begin, stop - begin), slice(start - first, stop - first)

    def _point_to(self, data: list[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, data, strict=True):
            parameter.data = tensor

    # ---- parameters: whole for a while, then in parts again

    @torch.no_grad()
    def gather(self) -> None:
        """Bring every rank's part to all. A collective."""
        self.begin_gather()
        self.arrive()

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for what is on its way."""
        if self._coming is None:
            return
        with self.timeline.span(f"wait for {self.names[0]} ...", lane="wait"):
            self._coming.wait()
        self._coming = None
        if self.released:
            self.released = False
            # Whole gradients must not be added to averages of a part, which wait for their end.
            self._averages = [p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            self._point_to(self._views)

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Begin to, unless the parameters are whole, or on their way."""
        if self._coming is not None or (self.parted and not self.released):
            return
        if self.parted:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            self.mine(self.whole).copy_(self.shard.detach())
        self._coming = self._start(self.halves.all_gather, self.whole, "all-gather")

    @torch.no_grad()
    def release(self) -> None:
        """Leave this rank's part of each parameter, flat, and give the memory of the whole back.

        What backward kept of the whole is there again, in the same place, when it is gathered.
        """
        self.arrive()  # though nobody wants it
        if self.released or not self.parted:
            return
        self.released = True
        pieces = [self.shard.detach()[:0]] * len(self.parameters)
        for i, _, here in self.pieces():
            pieces[i] = self.shard.detach()[here]
        self._point_to(pieces)
        for parameter, average in zip(self.parameters, self._averages, strict=True):
            parameter.grad = average
        self.whole.untyped_storage().resize_(0)

    def _start(
        self, half: Any, flat: torch.Tensor, name: str
    ) -> torch.futures.Future[torch.Tensor]:
        name = f"{name} {self.names[0]} ..."
        self.comms.agree(f"{name} of {len(self.names)} parameters")
        timeline = self.timeline
        if self.halves.at_once:
            waiting = timeline.span(f"wait for {name}", "wait")
            with waiting, timeline.span(name, "communication", flat.nbytes):
                return self.halves.start(half, flat, self.comms)
        future = self.halves.start(half, flat, self.comms)
        timeline.launched(name, future, nbytes=flat.nbytes)
        return future

    # ---- gradients: as they come, together, and this rank's part of their mean

    @torch.no_grad()
    def come(self, i: int) -> None:
        """Take the gradient of parameter ``i``, or zeros if it has none."""
        if self.gradients is None:
            self.gradients = torch.empty_like(self.whole, dtype=self.reduce_dtype)
            self.gradients[self.ends[-1] :] = 0
        parameter, divisor = self.parameters[i], self.comms.world_size
        target = self.gradients[self.ends[i] - self.shapes[i].numel() : self.ends[i]]
        self.missing.discard(i)
        if parameter.grad is None:
            if i not in self._held:
                target.zero_()
        elif i in self._held:
            target.add_(parameter.grad.flatten(), alpha=1 / divisor)
        else:  # in the precision of the sum
            torch.mul(parameter.grad.flatten().to(target.dtype), 1 / divisor, out=target)
        self._held.add(i)
        parameter.grad = None

    def forget(self) -> None:
        """Forget what has come."""
        self._held.clear()
        self.again()

    def again(self) -> None:
        """Keep what has come, for the next backward to add to it."""
        self.missing = set(range(len(self.parameters)))

    def reduce(self) -> None:
        """Begin to average what has come. A collective, in the same order on every rank."""
        for i in sorted(self.missing):
            self.come(i)
        assert self.gradients is not None
        self._reducing = self._start(self.halves.reduce_scatter, self.gradients, "reduce-scatter")
        self.forget()

    def finish(self) -> torch.Tensor | None:
        """Wait until this rank has its part of the mean, and return it; ``None`` if none is due."""
        if self._reducing is None or self.gradients is None:
            return None
        with self.timeline.span(f"wait for gradients of {self.names[0]} ...", lane="wait"):
            self._reducing.wait()
        self._reducing = None
        mean = self.mine(self.gradients)
        if not self.keep_gradients:
            mean, self.gradients = mean.to(self.shard.dtype, copy=True), None
        return mean

    def hand_out(self) -> None:
        """Wait for the mean, and let each parameter have this rank's part of it."""
        mean = self.finish()
        assert mean is not None
        for i, _, here in self.pieces():
            parameter = self.parameters[i]
            before = parameter.grad if self.released else self._averages[i]
            average = mean[here] if before is None else before + mean[here]
            if self.released:
                parameter.grad = average
            else:
                self._averages[i] = average


def unit_of(parameter: nn.Parameter) -> Unit | None:
    """The unit that a parameter is in."""
    unit: Unit | None = parameter.__dict__.get("_microddp_unit")
    return unit


def elements(module: nn.Module) -> list[nn.Module]:
    """The elements of a module's lists, which compute one after the other."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return list(dict.fromkeys(child for m in lists for child in m))


def check_dense(module: nn.Module, comms: Comms) -> None:
    """Expect no sparse gradients, which have no fixed place in a flat tensor."""
    sparse = sparse_gradients(module)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    if found := [name for name, is_sparse in zip(names, sparse, strict=True) if is_sparse]:
        raise ValueError(
            f"rank {comms.rank}: expected dense gradients, got sparse ones of {', '.join(found)}"
        )
