"""Reduce-scatters of flat groups during backward, with a limit on how many are pending."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from microddp.hooks import Switchable
from microddp.sharding.param_group import FlatParamGroup


class ShardedReducer(Switchable):
    """Reduce-scatters the gradients of one group while those of the next are computed.

    Attributes:
        groups: the flat parameter groups.
        params: the parameters of all groups.
        local_params: the ones of which this rank's shards have at least one value, or no rank's.
        all_reduces: switches the averages among replicas, where there are any.
    """

    def __init__(self, groups: Iterable[FlatParamGroup]) -> None:
        self.groups = list(groups)
        self.params = [param for group in self.groups for param in group.params]
        self.local_params = [param for group in self.groups for param in group.local_params]
        self.all_reduces = Switchable()
        self._pending: deque[FlatParamGroup] = deque()

    def reduce(self, group: FlatParamGroup) -> None:
        """Start a group's reduce-scatter. A collective, in the same order on every rank."""
        group.post_backward(self.all_reduces.armed)
        self._pending.append(group)
        # One may be pending while the next is filled: each has memory for all of its gradients.
        if group.collectives.blocking or len(self._pending) > 1:
            self._pending.popleft().wait_for_reduce_scatter()

    def wait(self) -> None:
        """Wait for all that is pending."""
        self._pending.clear()
        for group in self.groups:
            group.wait_for_mean()

    def forget(self) -> None:
        """Wait for all that is pending, of a backward that raised, and add nothing."""
        self._pending.clear()
        for group in self.groups:
            group.forget_mean()
