"""The shortest step whose messages hide behind its computing, and the share that a step hid.

Computing takes C, a third of it in forward, and the all-reduces of all layers' gradients, one after
another, take M. Layers are equal. Chapter 16 derives the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sends:
    """The time that the messages of a strategy's step take by themselves, in units of M.

    Attributes:
        forward: those of forward.
        first: the first of forward, for which it waits.
        backward: those of backward.
        last: the last of backward, for which nothing is left to compute.
        waits: whether backward computes a layer before it has anything to send.
    """

    forward: float
    first: float
    backward: float
    last: float
    waits: bool = True

    def least(self, compute: float, messages: float, layers: float) -> float:
        """Return T_0: the seconds of a step that hides all that can be hidden.

        Args:
            compute: C, seconds.
            messages: M, seconds.
            layers: number of layers; of a model with other parts too, all by one of them.
        """
        layer = compute / layers
        first, last = self.first * messages, self.last * messages
        after_last_gather = self.forward * messages - first + layer / 3
        until_last = self.backward * messages - last + (2 / 3 * layer if self.waits else 0)
        return first + max(compute / 3, after_last_gather) + max(2 / 3 * compute, until_last) + last

    def one_ahead(self, compute: float, messages: float, layers: float) -> float:
        """Return T_1: the seconds of a step of stage 3 that gathers one block ahead.

        The link waits twice in backward: for the last layer, and for the first. ``compute``,
        ``messages`` and ``layers`` as for :meth:`least`.
        """
        waits = 2 * max(0.0, 2 / 3 * compute - messages / 2) / layers
        later = replace(self, backward=self.backward + waits / messages)
        return later.least(compute, messages, layers)

    def most(self, compute: float, messages: float) -> float:
        """Return the seconds of a step that hides nothing."""
        return compute + (self.forward + self.backward) * messages

    def hidden(self, step: float, compute: float, messages: float, layers: float) -> float:
        """Return the share hidden of what can be hidden in a step of so many seconds.

        Below 0, the step took more than with nothing hidden; above 1, less than C and M allow.

        Raises:
            ZeroDivisionError: nothing can be hidden, as of one rank alone.
        """
        if not messages:
            raise ZeroDivisionError("expected messages that can be hidden, got none")
        most = self.most(compute, messages)
        return (most - step) / (most - self.least(compute, messages, layers))
