"""Parameters that are sharded together: one flat tensor, of which each rank keeps a part.

The flat tensor is cut into as many equal parts as there are ranks, filled up with zeros where that
does not divide. A gradient is brought to it by a reduce-scatter, a parameter from it by an
all-gather: the two halves of an all-reduce, with room for an optimizer in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import pad

from microddp.backward import Switchable
from microddp.buckets import sparse_gradients
from microddp.comms import Comms
from microddp.parts import Piece
from microddp.shared import Future, Half, Halves
from microddp.timing import NOT_RECORDED, Recorder


@dataclass(eq=False)
class Member(Piece):
    """A parameter of a unit, and the piece of it that this rank keeps, which may be empty.

    Attributes:
        parameter: it.
        place: of its values in the flat tensor.
        here: of the piece's in this rank's part.
        whole: a view of the flat tensor.
        hidden: a gradient of the whole while the parameter is the piece, and the reverse.
    """

    parameter: nn.Parameter
    place: slice
    here: slice
    whole: torch.Tensor
    hidden: torch.Tensor | None = None

    def show(self, data: torch.Tensor) -> None:
        """Let the parameter be the whole or the piece, with the gradient of that."""
        gradient, self.parameter.grad = self.parameter.grad, None
        self.parameter.data = data
        self.parameter.grad, self.hidden = self.hidden, gradient


class Unit:
    """Parameters in one flat tensor, this rank's part of it, and the gradients on their way there.

    Args:
        parameters: by name; dense, of one dtype and device, equal on all ranks.
        comms: the ranks.
        halves: reduce-scatter and all-gather.
        keep_gradients: whether the flat tensor of gradients lives as long as this rank's part of
            the mean (stage 1), or that has memory of its own (stages 2 and 3).
        parted: whether the parameters are whole only from :meth:`gather` to :meth:`release` (stage
            3). The part has memory of its own then, and ``whole`` may have another dtype.
        dtypes: of ``whole``, and in which gradients are added up; default: the parameters'.

    Attributes:
        whole: all parameters, which are views of it; without memory while they are released.
        shard: this rank's part.
        members: the parameters.
        pieces: those that this rank has something of.
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
        self.comms, self.halves = comms, halves
        self.keep_gradients, self.parted = keep_gradients, parted
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.size, self.part = len(flat), -(-len(flat) // comms.world_size)
        flat = pad(flat, (0, comms.world_size * self.part - self.size))
        used, reduced = dtypes if flat.is_floating_point() else (None, None)
        self.whole, self.reduce_dtype = flat.to(used or flat.dtype), reduced or flat.dtype
        self.shard = self.mine(flat).clone() if parted else self.mine(flat)
        self.trains = any(p.requires_grad for p in parameters.values())
        self.members: list[Member] = []
        first, begin = comms.rank * self.part, 0
        for name, p in parameters.items():
            end, start = begin + p.numel(), max(first, begin)
            stop = max(start, min(first + self.part, end))
            there, here = slice(start - begin, stop - begin), slice(start - first, stop - first)
            place, own = slice(begin, end), self.shard[here]
            whole = self.whole[place].view(p.shape)
            updated = p if parted else nn.Parameter(own, self.trains)
            self.members.append(Member(name, p.shape, there, own, updated, p, place, here, whole))
            p.data, begin = whole, end
            if parted:
                p.__dict__["_microddp_unit"] = self
        self.pieces = [member for member in self.members if len(member.values)]
        self.released, self.first = False, inf
        self._coming: Future | None = None
        self._reducing: Future | None = None
        self.timeline: Recorder = NOT_RECORDED
        self.release()

    # ---- the flat tensor, its parts, and the parameters in it

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        return flat[self.comms.rank * self.part :][: self.part]

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
        with self.timeline.span(f"wait for {self.members[0].name} ...", lane="wait"):
            self._coming.wait()
        self._coming = None
        if self.released:
            self.released = False
            for member in self.members:
                member.show(member.whole)

    def release(self) -> None:
        """Leave this rank's part of each parameter, flat, and give the memory of the whole back.

        What backward kept of the whole is there again, in the same place, when it is gathered.
        """
        self.arrive()  # though nobody wants it
        if self.parted and not self.released:
            self.released = True
            for member in self.members:
                member.show(member.values)
            self.whole.untyped_storage().resize_(0)

    def _start(self, half: Half, flat: torch.Tensor) -> Future:
        name = f"{half} {self.members[0].name} ..."
        self.comms.agree(f"{name} of {len(self.members)} parameters")
        return self.halves.start(half, flat, self.comms, name, self.timeline)

    # ---- gradients: together, and this rank's part of their mean

    @torch.no_grad()
    def reduce(self) -> None:
        """Release, and begin to average the gradients that have come; what has not is zero.

        A collective, in the same order on every rank.
        """
        self.hand_out()  # what came before, of gradients that come in several portions
        gradients = deque(member.parameter.grad for member in self.members)
        for member in self.members:
            member.parameter.grad = None
        self.release()
        flat = torch.empty_like(self.whole, dtype=self.reduce_dtype)
        flat[self.size :] = 0  # what fills it up
        for member in self.members:
            gradient = gradients.popleft()  # and with the next one its memory goes
            if gradient is None:
                flat[member.place] = 0
            else:  # in the precision of the sum
                gradient = gradient.flatten().to(flat.dtype)
                torch.mul(gradient, 1 / self.comms.world_size, out=flat[member.place])
        self._reducing = self._start("reduce-scatter", flat)

    def hand_out(self) -> None:
        """Add this rank's part of the mean, if that is on its way, to the parts' gradients."""
        if self._reducing is None:
            return
        with self.timeline.span(f"wait for gradients of {self.members[0].name} ...", lane="wait"):
            mean = self.mine(self._reducing.wait())
        self._reducing = None
        mean = mean.to(self.shard.dtype, copy=not self.keep_gradients)
        # In parts, a parameter that this rank has nothing of gets a gradient of no values: a loop
        # over all gradients finds one.
        for member in self.members if self.parted else self.pieces:
            part, values = member.updated, mean[member.here]
            part.grad = values if part.grad is None else part.grad + values


class Averages(Switchable):
    """Sends the gradients of units while others are computed, and takes their means in turn.

    Attributes:
        units: whose gradients.
        members: theirs.
        pieces: likewise.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = list(units)
        self.members = [member for unit in self.units for member in unit.members]
        self.pieces = [member for unit in self.units for member in unit.pieces]
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
    return [Unit(alike, comms, halves, **options) for alike in kinds.values()]


def unit_of(parameter: torch.Tensor) -> Unit | None:
    """The unit that a parameter is in parts by."""
    return cast(Unit | None, parameter.__dict__.get("_microddp_unit"))


def check_dense(model: nn.Module, comms: Comms) -> None:
    """Expect no sparse gradients, which have no fixed place in a flat tensor."""
    sparse = sparse_gradients(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if found := [name for name, is_sparse in zip(names, sparse, strict=True) if is_sparse]:
        raise ValueError(
            f"rank {comms.rank}: expected dense gradients, got sparse ones of {', '.join(found)}"
        )
