"""The order of a model's sharded modules, the backward under way, and what runs at its end."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import torch

from microddp.sharding.param_group import FlatParamGroup
from microddp.sharding.reducer import ShardedReducer

if TYPE_CHECKING:
    from microddp.sharding.sharded_module import ShardedModule


class ShardingContext(ShardedReducer):
    """State that all sharded modules of a model share.

    Autograd runs backward in the opposite order of forward. So when it comes to a module, the
    groups that it has passed are the same on every rank, whichever parameters a rank has used, and
    reduce-scatters that start there are in one order. The counterpart in PyTorch is
    ``FSDPStateContext``.

    Attributes:
        modules: the outermost last.
        forward_order: sharded modules in the order in which this forward entered them.
        previous_order: the same of the forward before, by which the next module is prefetched.
        forward_stack: sharded modules whose forward is running, the innermost last.
        last_exited: the module whose forward ended last; the first one that backward needs.
        event_count: how often forwards have entered or left a sharded module so far.
        backward_pending: whether there was a forward whose backward may still come.
    """

    def __init__(self, modules: Sequence[ShardedModule]) -> None:
        super().__init__(dict.fromkeys(group for m in modules for group in m.groups))
        self.modules = modules
        self.forward_order: list[ShardedModule] = []
        self.previous_order: list[ShardedModule] = []
        self.forward_stack: list[ShardedModule] = []
        self.last_exited: ShardedModule | None = None
        self.event_count, self.backward_pending = 0, False
        self._callback_queued = False  # the one at the end of backward
        # Groups whose backward has begun and is not over, in that order.
        self._in_backward: dict[FlatParamGroup, None] = {}
        self._entered: set[int] = set()  # forwards, by the event of their end, in this backward

    def pre_forward(self, module: ShardedModule) -> ShardedModule | None:
        """Record that a module's forward begins.

        Returns:
            The module that followed it in the forward before, to prefetch, if that is known.
        """
        if module is self.modules[-1] or not self.forward_stack:
            self._root_pre_forward()
        self.forward_order.append(module)
        self.forward_stack.append(module)
        self.event_count += 1
        for group in module.groups:
            group.first_use = min(group.first_use, self.event_count)
        here = self.previous_order[len(self.forward_order) - 1 :][:2]
        return here[1] if len(here) == 2 and here[0] is module else None

    def _root_pre_forward(self) -> None:
        if self._callback_queued:  # but never called: the last backward raised half-way
            self.forget()
        for group in self.groups:
            group.reshard()
            group.first_use = group.first_use if self.backward_pending else inf
        self.previous_order, self.forward_order = self.forward_order, []
        self.forward_stack, self.last_exited = [], None

    def forget(self) -> None:
        """Forget gradients that were not reduced, and those of a backward that raised."""
        super().forget()
        self._in_backward.clear()
        if self._callback_queued:
            self._callback_queued = self.backward_pending = False
        for group in self.groups:
            group.reshard()
        for param in self.params:
            param.stashed_grad = None

    def post_forward(self, module: ShardedModule) -> ShardedModule | None:
        """Record that a module's forward ends.

        Returns:
            The module whose forward ended before, which backward needs next.
        """
        before, self.last_exited = self.last_exited, module
        self.forward_stack.remove(module)
        self.event_count += 1
        return before

    def pre_backward(self, groups: Sequence[FlatParamGroup], exited_at: int) -> bool:
        """Record that backward enters a module, and finish the groups that it has passed.

        Args:
            groups: groups of the module.
            exited_at: number of the event at which its forward ended. A group that forward first
                needed later has its backward behind it.

        Returns:
            Whether this backward has come to this forward for the first time.
        """
        if not self._callback_queued:  # of this backward, or of a nested one
            self._callback_queued = True
            self._entered.clear()
            torch.autograd.Variable._execution_engine.queue_callback(
                self._post_backward_final_callback
            )
        self._post_backward([g for g in self._in_backward if g.first_use > exited_at])
        self._in_backward |= dict.fromkeys(groups)
        first_time = exited_at not in self._entered
        self._entered.add(exited_at)
        return first_time

    def _post_backward(self, groups: Sequence[FlatParamGroup]) -> None:
        for group in groups:
            del self._in_backward[group]
            if group.requires_grad and self.armed:
                self.reduce(group)
            group.reshard()

    def _post_backward_final_callback(self) -> None:
        self._post_backward([*self._in_backward])
        self.wait()
        for group in self.groups:
            group.reshard()
        self._callback_queued = self.backward_pending = False
