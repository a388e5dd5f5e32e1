"""The reducer: one backward pass, from a gradient that is ready to the average handed back.

The file follows a gradient's way: what a forward pass expects, the hook that is called when the
gradient is ready, its bucket (:class:`~microddp.backward.Backward` fills and sends it), the end of
backward (``_end_of_backward``), the wait, the average in ``.grad``; then what few models need.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from microddp.backward import Backward, Buckets, parameters_behind, tensors_in
from microddp.buckets import GradientBucket, bucket_caps
from microddp.carrier import Carrier
from microddp.comms import Comms
from microddp.hooks import Removable
from microddp.timing import NOT_RECORDED

Hook = Callable[[Any, GradientBucket], "torch.futures.Future[torch.Tensor]"]


class ExpectedBackward(Backward):
    """The state of one backward pass: gradients on their way, and those still to come.

    Attributes:
        left: for each parameter, how often its hook is still to be called.
        begun: True once this backward has started.
        end_is_told: True once autograd has been asked to call back at its end.
    """

    def __init__(self, buckets: Buckets, calls: list[int]) -> None:
        super().__init__(buckets)
        self.left = list(calls)
        self.begun = self.end_is_told = False


class Reducer(Removable):
    """Averages a module's gradients during each backward that a forward pass has announced.

    Attributes:
        backward: the backward that is expected or under way; ``None`` if nothing is averaged.
        buckets: the buckets that gradients travel in.
        order: the parameters in the order in which their gradients came, once that is known.
        planned: True once the buckets follow that order.
        hooked: True if a communication hook reduces the buckets.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        *,
        bucket_cap_mb: float | None,
        find_unused: bool,
        as_view: bool,
        static_graph: bool,
        carrier: Carrier,
    ) -> None:
        self.comms, self.caps = comms, bucket_caps(bucket_cap_mb)
        self.find_unused = find_unused and not static_graph
        self.buckets = Buckets(module, comms, as_view=as_view, carrier=carrier)
        self.names, self.parameters = self.buckets.names, self.buckets.parameters
        # One bucket until the order of backward is known: that is right in any order. Where
        # parameters may be left out, they come in no order, and the plan stays that of the
        # definition. Reversed: what is defined first is needed first, and comes last in backward.
        caps = self.caps if self.find_unused else [sys.maxsize]
        plan = self.buckets.plan_in_order(range(len(self.names)), caps)
        self.buckets.follow(sorted(plan, reverse=True))
        self.planned = self.find_unused
        self.order: list[int] | None = None
        self.backward: ExpectedBackward | None = None
        self.hooked = False
        # How often each parameter's hook is called in a backward: in a static graph, counted.
        self._calls = [0 if static_graph else 1] * len(self.names)
        self._counting = static_graph
        self._unused: list[int] = []
        self._used: set[int] = set()  # by backwards without synchronisation since the last averages
        self._used_nowhere: set[int] | None = None if static_graph else set()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook_of(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.parameters)
        ]

    def reduce_by(self, hook: Hook, state: Any) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket, instead of an all-reduce mean."""
        self.hooked = True
        self.buckets.send = partial(hook, state)
        self.buckets.divisor = 1

    # ---- a forward pass: what is left of the last backward, and what to expect of the next

    def begin_forward(self) -> None:
        """Check that the last backward completed, and plan the buckets anew when it is time.

        Raises:
            RuntimeError: it did not: parameters got no gradient.
        """
        last = self.backward
        if last is not None and last.begun:
            self.backward = None
            back = [bucket for bucket, _ in last.wait_for_buckets()]  # what was sent comes to rest
            if last.end_is_told:  # it raised half-way: what came back is no average
                for parameter in (p for bucket in back for p in bucket.parameters()):
                    parameter.grad = None
            else:
                names = [name for i, name in enumerate(self.names) if i not in last.arrived]
                raise RuntimeError(
                    f"rank {self.comms.rank}: expected a gradient for every parameter, but the "
                    f"last backward brought none for {', '.join(names)} ({len(names)} of "
                    f"{len(self.names)}); if the forward pass may leave parameters out, pass "
                    "find_unused_parameters=True"
                )
        if not self.planned and self.order is not None:
            wire = torch.tensor(self.order, device=self.comms.device)
            self.comms.broadcast(wire)  # rank 0's, should the ranks differ
            self.buckets.follow(self.buckets.plan_in_order(wire.tolist(), self.caps))
            self.planned = True

    def expect(self, output: Any) -> Any:
        """Reduce in the next backward, through what a forward pass returned.

        With ``find_unused``, what it needs is seen from its graph. Where parameters may be left
        out, the output is copied, so that the end of a backward that reaches none is seen too.
        """
        if self.find_unused:
            needed = parameters_behind(tensors_in(output))
            self._unused = [i for i, p in enumerate(self.parameters) if id(p) not in needed]
        self.backward = ExpectedBackward(self.buckets, self._calls)
        return tree_map(self._watched, output) if self.find_unused or self._counting else output

    def _watched(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
            return leaf
        # It rings where autograd accumulates gradients, not where it only computes some.
        bell = torch.zeros((), device=leaf.device, requires_grad=True)
        reducer = weakref.ref(self)

        def ring(_bell: torch.Tensor) -> None:
            mine = reducer()
            if mine is not None and (now := mine.backward) is not None and not now.end_is_told:
                mine.begin(now)

        bell.register_post_accumulate_grad_hook(ring)  # type: ignore[no-untyped-call]
        return _Watch.apply(bell, leaf)  # type: ignore[no-untyped-call,unused-ignore]

    # ---- backward: a gradient is ready, its bucket full, and sent

    def _hook_of(self, i: int) -> Callable[[torch.Tensor], None]:
        """Make the hook that autograd calls when parameter ``i`` has its gradient in ``.grad``."""
        name, used, buckets = self.names[i], self._used, self.buckets

        def ready(parameter: torch.Tensor) -> None:
            now, grad = self.backward, parameter.grad
            if now is None:
                if grad is not None:
                    used.add(i)
                return
            if not now.end_is_told:
                self.begin(now)
            if grad is None:  # an output that the loss does not use leads here
                return
            now.left[i] -= 1
            if now.left[i] < 0 and not self._counting:
                raise RuntimeError(
                    f"rank {self.comms.rank}: the gradient of {name} came twice in one backward, "
                    "as it does where reentrant checkpoints share a parameter; if every step does "
                    "the same, pass static_graph=True"
                )
            if now.left[i]:
                return
            buckets.timeline.mark(name)
            now.mark_ready(i, grad)

        return ready

    def begin(self, now: ExpectedBackward) -> None:
        """Queue a callback for the end of this backward, and mark unused parameters ready."""
        now.end_is_told = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if not now.begun:
            now.begun = True
            for i in self._unused:
                now.left[i] = 0
                now.mark_ready(i, self.parameters[i].grad)

    # ---- the end of backward: what was sent is waited for, and handed back

    def _end_of_backward(self) -> None:
        now = self.backward
        if now is None:
            return
        now.end_is_told = False
        if self._counting:  # a static graph's first backward
            self._calls = [-left for left in now.left]
            self._unused = [i for i, calls in enumerate(self._calls) if not calls]
            self._used |= set(range(len(self._calls))).difference(self._unused)
        elif self.find_unused:
            self._used |= set(now.arrived).difference(self._unused)
        if self._counting or self.find_unused:
            for i, parameter in enumerate(self.parameters):
                if i not in now.arrived:
                    now.mark_ready(i, parameter.grad)
        self._counting = False
        # If not, it was a nested backward, or left parameters out: the next forward tells.
        if now.complete:
            self._finish(now)

    def _finish(self, now: ExpectedBackward) -> None:
        """Wait for the buckets, and hand the averages to the parameters."""
        in_order = self._used_nowhere is not None  # not in the first backward of a static graph
        # All of them first: a hook may use the ranks' connections itself, one by one.
        back = list(now.wait_for_buckets()) if self.hooked else now.wait_for_buckets()
        nowhere = self._find_used_nowhere()
        for bucket, result in back:
            if self.hooked:
                bucket.accept(result[0] if isinstance(result, list) else result)
            members = self.buckets.plan[bucket.index()] if nowhere else ()
            unused = [slot for slot, i in enumerate(members) if i in nowhere]
            bucket.copy_out(self.buckets.as_view, unused)
        if self.order is None and in_order:
            self.order = [i for i in now.arrived if i not in self._unused] + self._unused
        self.backward = None

    # ---- parameters that are not used everywhere, or several times

    def _find_used_nowhere(self) -> set[int]:
        """The parameters that no rank used. A collective, unless that is known."""
        if self._used_nowhere is not None and not self.find_unused:
            return self._used_nowhere
        mine = [int(i in self._used) for i in range(len(self.parameters))]
        used = torch.tensor(mine, dtype=torch.int32, device=self.comms.device)
        self._used.clear()
        self.comms.all_reduce(used)
        self._used_nowhere = {i for i, count in enumerate(used.tolist()) if not count}
        return self._used_nowhere

    # ---- a rank that has run out of batches

    def shadow(self) -> None:
        """Take part in a backward of the other ranks, with gradients of zero and none kept."""
        in_order = self._used_nowhere is not None
        buckets = copy.copy(self.buckets)
        buckets.as_view, buckets.timeline = False, NOT_RECORDED
        buckets.follow(self.buckets.plan)
        now = Backward(buckets)
        for i in range(len(self.parameters)):
            now.mark_ready(i, None)
        back = list(now.wait_for_buckets()) if self.hooked else now.wait_for_buckets()
        self._find_used_nowhere()  # before the others are waited for, as in _finish
        list(back)
        if self.order is None and in_order:
            self.order = list(range(len(self.parameters)))


class _Watch(torch.autograd.Function):
    """The identity; a backward through it comes to the bell, too."""

    @staticmethod
    def forward(ctx: Any, bell: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        del bell
        ctx.set_materialize_grads(False)  # where no gradient comes, none goes on, not even zeros
        # A copy: the caller may change an output in place, which autograd forbids for an input.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        del ctx
        return None, grad
