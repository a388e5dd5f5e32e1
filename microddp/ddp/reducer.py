"""Bucketed hooks for every kind of backward: incomplete, nested, failed, or of another rank.

:class:`~microddp.bucketing.BucketedDDPHooks` need a ``finish()`` after each backward, and a
gradient for each parameter. The reducer is told where forward passes begin and end, and finds out
by itself when a backward is over and what it left out.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from microddp.bucketing import BucketedDDPHooks, GradientBucket, plan_buckets
from microddp.comms import Comms

Hook = Callable[[Any, GradientBucket], "torch.futures.Future[torch.Tensor]"]


class Reducer(BucketedDDPHooks):
    """Bucketed hooks that know when a backward begins and ends, and what to expect of it."""

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        *,
        bucket_cap_mb: float,
        first_bucket_mb: float,
        find_unused: bool,
        as_view: bool,
        static_graph: bool,
    ) -> None:
        self.find_unused = find_unused and not static_graph
        self.static_graph = static_graph
        super().__init__(
            module,
            comms,
            bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            gradient_as_bucket_view=as_view,
        )
        self.hook: tuple[Hook, Any] | None = None
        self.armed = False
        # How often each parameter's hook is called in a backward: in a static graph, counted.
        self._calls = [1] * len(self.parameters)
        self._counting = static_graph
        self._left = list(self._calls)
        self._arrived: list[int] = []
        self._order: list[int] | None = None  # of arrival, once it is known
        self.rebuilt = self.find_unused
        self._used: set[int] = set()  # since the last averages, without synchronisation too
        self._used_nowhere: set[int] | None = None if static_graph else set()
        self._unused: list[int] = []
        self._left_out: list[int] = []  # the unused that are not in their buckets yet
        self._callback_due = False
        self._incomplete: list[str] = []

    def first_plan(self) -> list[list[int]]:
        """One bucket until the order of backward is known, since it is right in any order.

        Where parameters may be left out, they come in no order: then the plan is made from the
        order of definition, and stays.
        """
        caps = self.caps if self.find_unused else [2**62]
        # Reversed: what is defined first is needed first in forward, and comes last in backward.
        return sorted(plan_buckets(self.parameters, caps, self.sparse), reverse=True)

    def begin_forward(self) -> None:
        """Check that the last backward completed, and plan the buckets anew when it is time.

        Raises:
            RuntimeError: it did not: parameters got no gradient.
        """
        if self._incomplete:
            names, self._incomplete = self._incomplete, []
            raise RuntimeError(
                f"rank {self.comms.rank}: expected a gradient for every parameter, but the last "
                f"backward brought none for {', '.join(names)} ({len(names)} of "
                f"{len(self.names)}); if the forward pass may leave parameters out, pass "
                "find_unused_parameters=True"
            )
        if self._sent or self._arrived or self._callback_due:  # a backward that raised half-way
            self.abandon()
        if not self.rebuilt and self._order is not None:
            self.rebuild()

    def rebuild(self) -> None:
        """Plan the buckets in the order in which rank 0's gradients came. A collective."""
        order = torch.tensor(self._order, device=self.comms.device)
        self.comms.broadcast(order)
        self.set_buckets(self.plan_in(order.tolist()))
        self.rebuilt = True

    def watch(self, output: Any) -> Any:
        """Reduce in the next backward, through what a forward pass returned.

        With ``find_unused``, what it needs is seen from its graph. Where parameters may be left
        out, the output is copied, so that the end of a backward that reaches none is seen too.
        """
        self.armed = True
        if self.find_unused:
            needed = _parameters_behind(_tensors_in(output))
            self._unused = [i for i, p in enumerate(self.parameters) if id(p) not in needed]
        self._left_out = list(self._unused)
        if not (self.find_unused or self._counting):
            return output
        leaves, structure = tree_flatten(output)
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.grad_fn]
        watched = _Watch.apply(self, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, watched, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, structure)

    def reset(self) -> None:
        super().reset()
        self._arrived = []
        self._left = list(self._calls)
        self._callback_due = False

    def _ready(self, i: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._used.add(i)
        if not self.armed:
            return
        if not self._callback_due:
            self.call_at_end()
        while self._left_out:
            unused = self._left_out.pop()
            self._left[unused] = 0
            self.bring(unused)
        if parameter.grad is None:  # an output that the loss does not use leads here
            return
        self._left[i] -= 1
        if self._counting:
            self._arrived.append(i)
        if self._counting or self._left[i] > 0:
            return
        if self._left[i] < 0:
            raise RuntimeError(
                f"rank {self.comms.rank}: the gradient of {self.names[i]} came twice in one "
                "backward, as it does where reentrant checkpoints share a parameter; if every "
                "step does the same, pass static_graph=True"
            )
        self._arrived.append(i)
        self.bring(i)

    def call_at_end(self) -> None:
        """Be told when this backward, or a nested one, has ended."""
        if not self._callback_due:
            self._callback_due = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._callback_due = False
        if not self.armed:
            return
        if self._counting:
            self._end_of_counting()
        elif self.find_unused:
            for i, (bucket, slot) in enumerate(self._places):
                if not bucket.has(slot):
                    self.bring(i)
        if self._sent < len(self.buckets):
            # Of a nested backward, or of one that left parameters out: the next forward tells.
            self._incomplete = self.missing()
            return
        self._incomplete = []
        self.finish()

    def _end_of_counting(self) -> None:
        """A static graph's first backward: all that came is reduced now, as it came."""
        self._calls = [-left + 1 for left in self._left]
        self._counting = False
        self._unused = [i for i, calls in enumerate(self._calls) if not calls]
        for i in range(len(self.parameters)):
            self.bring(i)

    def finish(self) -> None:
        """Wait for the buckets, and hand the averages to the parameters."""
        in_order = self._used_nowhere is not None  # not in the first backward of a static graph
        with torch.no_grad():
            nowhere = self._find_used_nowhere()
            for bucket, plan in zip(self.buckets, self.plan, strict=True):
                self.wait(bucket)
                unused = [slot for slot, i in enumerate(plan) if i in nowhere] if nowhere else ()
                bucket.give_back(self.as_view, unused)
        if self._order is None and in_order:
            self._order = self._arrived + self._unused
        self.reset()
        self.armed = False

    def _find_used_nowhere(self) -> set[int]:
        """The parameters that no rank used. A collective, unless that is known."""
        if self._used_nowhere is not None and not self.find_unused:
            return self._used_nowhere
        used = torch.zeros(len(self.parameters), dtype=torch.int32, device=self.comms.device)
        used[list(self._used)] = 1
        self._used.clear()
        self.comms.all_reduce(used)
        self._used_nowhere = {i for i, count in enumerate(used.tolist()) if not count}
        return self._used_nowhere

    def start(self, bucket: GradientBucket) -> Any:
        if self.hook is None:
            return super().start(bucket)
        hook, state = self.hook
        return hook(state, bucket)

    def wait(self, bucket: GradientBucket) -> Any:
        result = super().wait(bucket)
        if self.hook is not None:
            bucket.accept(result[0] if isinstance(result, list) else result)
        return result

    def shadow(self) -> None:
        """Take part in a backward of the other ranks, with gradients of zero and none kept."""
        homes = [bucket.buffer() for bucket in self.buckets]
        for bucket, home in zip(self.buckets, homes, strict=True):
            bucket.set_buffer(torch.zeros_like(home))
            bucket.work = self.start(bucket)
        in_order = self._used_nowhere is not None
        self._find_used_nowhere()
        for bucket, home in zip(self.buckets, homes, strict=True):
            bucket.work.wait()
            bucket.set_buffer(home)
        if self._order is None and in_order:
            self._order = list(range(len(self.parameters)))
        self.reset()


class _Watch(torch.autograd.Function):
    """The identity; tells the reducer when a backward through it begins."""

    @staticmethod
    def forward(ctx: Any, reducer: Reducer, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.reducer = weakref.ref(reducer)
        # Copies: the caller may change an output in place, which autograd forbids for inputs.
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if (reducer := ctx.reducer()) is not None and reducer.armed:
            reducer.call_at_end()
        return (None, *grads)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from _tensors_in(getattr(leaf, field.name))


def _parameters_behind(outputs: Iterator[torch.Tensor]) -> set[int]:
    """The ids of the parameters that a backward from ``outputs`` reaches."""
    found, nodes = set(), []
    for tensor in outputs:
        if tensor.grad_fn is None:
            found.add(id(tensor))  # maybe a parameter itself
        else:
            nodes.append(tensor.grad_fn)
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):  # where gradients are accumulated
            found.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
