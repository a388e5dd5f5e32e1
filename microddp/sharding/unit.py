"""Parameters that are sharded together: one flat tensor, of which each rank keeps a part.

The flat tensor is cut into as many equal parts as there are ranks, filled up with zeros where that
does not divide. A gradient is brought to it by a reduce-scatter, a parameter from it by an
all-gather: the two halves of an all-reduce, with room for an optimizer in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.functional import pad

from microddp.allreduce import on_thread, ring_all_gather, ring_reduce_scatter
from microddp.comms import Comms


class Unit:
    """Parameters in one flat tensor, this rank's part of it, and the gradients on their way there.

    Args:
        parameters: by name; dense, of one dtype and device, equal on all ranks.
        comms: the ranks.
        keep_gradients: whether the flat tensor of gradients stays from step to step (stage 1), or
            goes when this rank has its part of the mean (stage 2).

    Attributes:
        whole: all parameters, which are views of it.
        shard: this rank's part: what an optimizer updates. Its ``.grad`` is the mean over ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comms: Comms,
        *,
        keep_gradients: bool = False,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.comms, self.keep_gradients = comms, keep_gradients
        self.ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        n = comms.world_size
        self.part = -(-self.ends[-1] // n)
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.whole = pad(flat, (0, n * self.part - flat.numel()))
        for parameter, view in zip(self.parameters, self.views(self.whole), strict=True):
            parameter.data = view.view_as(parameter)
        self.shard = nn.Parameter(self.mine(self.whole))
        self.gradients: torch.Tensor | None = None
        self.missing = set(range(len(self.parameters)))
        self._before: torch.Tensor | None = None  # a mean that is to be added to
        self._reducing: torch.futures.Future[torch.Tensor] | None = None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's values in a flat tensor, flat themselves."""
        return [
            flat[end - p.numel() : end] for p, end in zip(self.parameters, self.ends, strict=True)
        ]

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        return flat[self.comms.rank * self.part :][: self.part]

    def gather(self) -> None:
        """Bring every rank's part to all. A collective."""
        ring_all_gather(self.whole, self.comms)

    # ---- gradients: as they come, together, and this rank's part of their mean

    def come(self, i: int) -> None:
        """Take the gradient of parameter ``i``, or zeros if it has none."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.whole)
        if len(self.missing) == len(self.parameters):
            # In stage 1 it lies where gradients come to now.
            self._before = None if self.shard.grad is None else self.shard.grad.clone()
        self.missing.discard(i)
        parameter = self.parameters[i]
        target = self.gradients[self.ends[i] - parameter.numel() : self.ends[i]]
        if parameter.grad is None:
            target.zero_()
        else:
            target.copy_(parameter.grad.flatten())
            parameter.grad = None

    def reduce(self) -> None:
        """Begin to average what has come. A collective, in the same order on every rank."""
        gradients = self.gradients
        assert gradients is not None
        self._reducing = on_thread(
            lambda flat: ring_reduce_scatter(flat, self.comms, "mean"), gradients
        )
        self.missing = set(range(len(self.parameters)))

    def finish(self) -> None:
        """Wait until this rank has its part of the mean."""
        if self._reducing is None or self.gradients is None:
            return
        self._reducing.wait()
        mean = self.mine(self.gradients)
        if not self.keep_gradients:
            mean, self.gradients = mean.clone(), None
        if self._before is not None:
            mean += self._before
        self.shard.grad, self._before, self._reducing = mean, None, None

    # ---- what of a parameter lies in this rank's part

    def pieces(self) -> Iterator[tuple[int, slice, slice]]:
        """The parameters that this rank has something of.

        Yields:
            A parameter's number; which of its values, flattened; and where they are in the part.
        """
        first, last = self.comms.rank * self.part, (self.comms.rank + 1) * self.part
        for i, (parameter, end) in enumerate(zip(self.parameters, self.ends, strict=True)):
            begin = end - parameter.numel()
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                yield i, slice(start - begin, stop - begin), slice(start - first, stop - first)

    def take_averages(self) -> None:
        """Take this rank's part of gradients that are averages already."""
        if all(parameter.grad is None for parameter in self.parameters):
            self.shard.grad = None
            return
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        for i, there, here in self.pieces():
            grad = self.parameters[i].grad
            self.shard.grad[here] = 0 if grad is None else grad.view(-1)[there]
