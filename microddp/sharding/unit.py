"""Parameters that are sharded together: one flat tensor, of which each rank keeps a part.

The flat tensor is cut into as many equal parts as there are ranks, filled up with zeros where that
does not divide. A gradient is brought to it by a reduce-scatter, a parameter from it by an
all-gather: the two halves of an all-reduce, with room for an optimizer in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from microddp.allreduce import Half, Halves
from microddp.comms import Comms
from microddp.hooks import Switchable
from microddp.timing import NOT_RECORDED, Recorder


class Unit:
    """Parameters in one flat tensor, this rank's part of it, and the gradients on their way there.

    At first the parameters are whole, and :meth:`release` leaves this rank's part of each.

    Args:
        parameters: by name; dense, of one dtype and device, equal on all ranks.
        comms: the ranks.
        halves: reduce-scatter and all-gather.
        keep_gradients: whether the flat tensor of gradients lives as long as this rank's part of
            the mean (stage 1), or that has memory of its own (stages 2 and 3).
        parted: whether the parameters are to be released (stage 3). The part has memory of its own
            then, and ``whole`` may have another dtype.
        dtypes: of ``whole``, and in which gradients are added up; default: the parameters'.

    Attributes:
        whole: all parameters, which are views of it; without memory while they are released.
        shard: this rank's part.
        pieces: of the parameters that this rank has something of: its number; which of its values,
            flattened; and where they are in the part.
        parts: of each parameter its values in the part, for an optimizer; empty if there are none.
        trains: whether there are to be gradients.
        first: of blocks, the number of the event at which forward needed it first.
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
        dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.comms, self.halves = comms, halves
        self.keep_gradients, self.parted = keep_gradients, parted
        self.trains = self.parameters[0].requires_grad
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        self.part = -(-sum(self.sizes) // comms.world_size)
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        flat = pad(flat, (0, comms.world_size * self.part - len(flat)))
        whole, reduced = dtypes if flat.is_floating_point() else (None, None)
        self.whole, self.reduce_dtype = flat.to(whole or flat.dtype), reduced or flat.dtype
        self.shard = self.mine(flat).clone() if parted else self.mine(flat)
        self.pieces: list[tuple[int, slice, slice]] = []
        self._parts = [self.shard[:0]] * len(self.names)
        first, begin = comms.rank * self.part, 0
        for i, size in enumerate(self.sizes):
            start, stop = max(first, begin), min(first + self.part, begin + size)
            if start < stop:
                here = slice(start - first, stop - first)
                self.pieces.append((i, slice(start - begin, stop - begin), here))
                self._parts[i] = self.shard[here]
            begin += size
        self.parts = self.parameters
        if not parted:
            self.parts = [nn.Parameter(part, self.trains) for part in self._parts]
        self._views = list(map(torch.Tensor.view, self.values(self.whole), self.shapes))
        self._hidden: list[torch.Tensor | None] = [None] * len(self.names)
        self._show(self._views)
        self.released = False
        self.first = inf
        for parameter in self.parameters:
            parameter.__dict__["_microddp_unit"] = self
        self._coming: torch.futures.Future[torch.Tensor] | None = None
        self._reducing: torch.futures.Future[torch.Tensor] | None = None
        self.timeline: Recorder = NOT_RECORDED

    # ---- the flat tensor, its parts, and the parameters in it

    def values(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each parameter's values in a flat tensor, flat themselves."""
        return torch.split(flat[: sum(self.sizes)], self.sizes)

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        return flat[self.comms.rank * self.part :][: self.part]

    def _show(self, data: Sequence[torch.Tensor]) -> None:
        """Let the parameters be these; gradients of the others are hidden until those are back."""
        for i, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = data[i]
            parameter.grad, self._hidden[i] = self._hidden[i], gradient

    # ---- parameters: whole for a while, then in parts again

    def gather(self) -> None:
        """Bring every rank's part to all. A collective."""
        self.begin_gather()
        self.arrive()

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Begin to, unless the parameters are whole, or on their way."""
        if self._coming is not None or (self.parted and not self.released):
            return
        self.hand_out()  # while the parameters are the parts, whose gradients these are
        if self.parted:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            self.mine(self.whole).copy_(self.shard)
        self._coming = self._start("all-gather", self.whole)

    def arrive(self) -> None:
        """Wait for what is on its way."""
        if self._coming is None:
            return
        with self.timeline.span(f"wait for {self.names[0]} ...", lane="wait"):
            self._coming.wait()
        self._coming = None
        if self.released:
            self.released = False
            self._show(self._views)

    def release(self) -> None:
        """Leave this rank's part of each parameter, flat, and give the memory of the whole back.

        What backward kept of the whole is there again, in the same place, when it is gathered.
        """
        self.arrive()  # though nobody wants it
        if self.parted and not self.released:
            self.released = True
            self._show(self._parts)
            self.whole.untyped_storage().resize_(0)

    def _start(self, half: Half, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        name = f"{half} {self.names[0]} ..."
        self.comms.agree(f"{name} of {len(self.names)} parameters")
        return self.halves.start(half, flat, self.comms, name, self.timeline)

    # ---- gradients: together, and this rank's part of their mean

    @torch.no_grad()
    def reduce(self) -> None:
        """Release, and begin to average the gradients that have come; what has not is zero.

        A collective, in the same order on every rank.
        """
        self.hand_out()  # what came before, of gradients that come in several portions
        gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        self.release()
        flat = torch.empty_like(self.whole, dtype=self.reduce_dtype)
        flat[sum(self.sizes) :] = 0  # what fills it up
        for values in self.values(flat):
            gradient = gradients.pop(0)  # and with the next one its memory goes
            if gradient is None:
                values.zero_()
            else:  # in the precision of the sum
                gradient = gradient.flatten().to(flat.dtype)
                torch.mul(gradient, 1 / self.comms.world_size, out=values)
        self._reducing = self._start("reduce-scatter", flat)

    def hand_out(self) -> None:
        """Add this rank's part of the mean, if that is on its way, to the parts' gradients."""
        if self._reducing is None:
            return
        with self.timeline.span(f"wait for gradients of {self.names[0]} ...", lane="wait"):
            mean = self.mine(self._reducing.wait())
        self._reducing = None
        if not self.keep_gradients:
            mean = mean.to(self.shard.dtype, copy=True)
        for i, _, here in self.pieces:
            before = self.parts[i].grad
            self.parts[i].grad = mean[here] if before is None else before + mean[here]

    def abandon(self) -> None:
        """Forget gradients that are whole, of a backward that raised, and what is on its way."""
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = None
        self.release()
        self._hidden = [None] * len(self.names)


class Averages(Switchable):
    """Sends the gradients of units while others are computed, and takes their means in turn."""

    def __init__(self) -> None:
        self._on_the_way: deque[Unit] = deque()

    def send(self, unit: Unit) -> None:
        """Begin to average a unit's gradients. A collective, in the same order on every rank."""
        unit.reduce()
        self._on_the_way.append(unit)
        # One may be on its way while the next is filled. Each has memory for all of its gradients.
        if unit.halves.at_once or len(self._on_the_way) > 1:
            self._on_the_way.popleft().hand_out()

    def settle(self) -> None:
        """Wait for all that was sent."""
        while self._on_the_way:
            self._on_the_way.popleft().hand_out()


def units_of(
    named: Mapping[str, nn.Parameter], comms: Comms, halves: Halves, **options: Any
) -> list[Unit]:
    """A unit for each kind of parameter, in the order in which the kinds come.

    Args:
        named: the parameters, by name.
        comms: as for :class:`Unit`, as are ``halves`` and ``options``.
    """
    kinds: dict[tuple[object, ...], dict[str, nn.Parameter]] = {}
    for name, p in named.items():
        kinds.setdefault((p.dtype, p.device, p.requires_grad), {})[name] = p
    return [Unit(members, comms, halves, **options) for members in kinds.values()]


def unit_of(parameter: torch.Tensor) -> Unit | None:
    """The unit that a parameter is in."""
    unit: Unit | None = parameter.__dict__.get("_microddp_unit")
    return unit
