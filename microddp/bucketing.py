"""Gradients averaged in buckets during backward: each is sent as soon as it is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from microddp.backward import Switchable, bytes_held
from microddp.buckets import (
    GradientBucket,
    bucket_caps,
    plan_in_order,
    sparse_gradients,
)
from microddp.carrier import Carrier
from microddp.comms import Comms
from microddp.timing import NOT_RECORDED, Launched, Recorder


class Buckets:
    """The buckets of a model's gradients, which travel in one order, the same on every rank.

    Args:
        model: its parameters that require gradients are meant by number, in their order.
        comms: the ranks that average.
        as_view: keep gradients in the buckets, instead of copying them back.
        carrier: adds the buckets up; default: the backend.

    Attributes:
        parameters: all parameters that require gradients.
        names: their names.
        all: the buckets, in the order of sending.
        plan: for each bucket the numbers of its parameters.
        places: for each parameter its bucket's index, and its slot there.
        divisor: divides each gradient; at first the number of ranks.
        send: starts the reduction of a full bucket; at first its all-reduce.
        timeline: records gradients, collectives and the wait for them.
    """

    def __init__(
        self, model: nn.Module, comms: Comms, *, as_view: bool, carrier: Carrier | None = None
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.sparse = sparse_gradients(model)
        self.comms = comms
        self.as_view = as_view
        self.carrier = carrier or Carrier(comms)
        self.divisor = comms.world_size
        self.send: Callable[[GradientBucket], Launched] = self.all_reduce
        self.timeline: Recorder = NOT_RECORDED
        self.places: dict[int, tuple[int, int]] = {}

    def follow(self, plan: Sequence[Sequence[int]]) -> None:
        """Make the buckets of a plan, in the order of sending, in the place of those before."""
        self.plan = [list(members) for members in plan]
        self.all = [
            GradientBucket(
                [self.parameters[i] for i in members],
                index,
                is_last=index == len(plan) - 1,
                sparse=self.sparse[members[0]],
                zeros=self.carrier.zeros,
            )
            for index, members in enumerate(plan)
        ]
        self.places = {}
        for bucket, members in zip(self.all, plan, strict=True):
            for slot, i in enumerate(members):
                self.places[i] = (bucket.index(), slot)
                p = self.parameters[i]
                if self.as_view and p.grad is not None and not bucket.sparse:
                    p.grad = bucket.views[slot].copy_(p.grad)

    def __iter__(self) -> Iterator[GradientBucket]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def all_reduce(self, bucket: GradientBucket) -> Launched:
        """Begin to add a bucket up over the ranks."""
        self.comms.agree(f"all-reduce of gradient bucket {bucket.index()}: {len(bucket.views)}")
        return self.carrier.start(bucket.buffer(), bucket.is_last())


class Backward:
    """The state of one backward pass: gradients that are ready, sent, waited for.

    Attributes:
        arrived: the parameters whose gradients are ready, in that order.
        missing: by bucket, the number of gradients that are not ready.
        works: the collectives of the buckets that were sent, in order.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.arrived: dict[int, None] = {}
        self.missing = [len(members) for members in buckets.plan]
        self.works: list[Any] = []

    def mark_ready(self, i: int, grad: torch.Tensor | None) -> None:
        """Take the gradient of parameter ``i``, or none, and send the buckets that are full now."""
        buckets = self.buckets
        self.arrived[i] = None
        index, slot = buckets.places[i]
        bucket = buckets.all[index]
        bucket.grads[slot] = grad
        if bucket.copies_eagerly:
            bucket.copy_in([slot], buckets.divisor, buckets.as_view)
        self.missing[index] -= 1
        if not self.missing[index]:
            if not bucket.copies_eagerly:
                bucket.copy_in(range(len(bucket.grads)), buckets.divisor, buckets.as_view)
            self.send_full()

    def send_full(self) -> None:
        """Send the next buckets that are full: in order, or ranks would pair different ones."""
        for bucket in self.buckets.all[len(self.works) :]:
            if self.missing[bucket.index()]:
                return
            nbytes = bytes_held(bucket.buffer())  # before a hook may put something else in
            work = self.buckets.send(bucket)
            self.buckets.timeline.launched(f"bucket {bucket.index()}", work, nbytes=nbytes)
            self.works.append(work)

    @property
    def complete(self) -> bool:
        """True if every bucket was sent."""
        return len(self.works) == len(self.missing)

    def wait_for_buckets(self) -> Iterator[tuple[GradientBucket, Any]]:
        """Each bucket that was sent, once it is back, with what its ``wait()`` returned.

        Raises:
            RuntimeError: another rank failed, or the time-out passed.
        """
        for bucket, work in zip(self.buckets, self.works, strict=False):
            try:
                with self.buckets.timeline.span(f"wait for bucket {bucket.index()}", lane="wait"):
                    result = work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self.buckets.comms.rank}: the all-reduce of gradient bucket "
                    f"{bucket.index()} of {len(self.missing)} failed; another rank has left, or "
                    f"lacks a gradient: {error}"
                ) from error
            yield bucket, result


class BucketedDDPHooks(Switchable):
    """Averages the gradients of a model over all ranks, bucket by bucket, during backward.

    A hook on each parameter brings its gradient into a bucket. When a bucket is full, and all
    before it have been sent, its all-reduce begins and backward goes on. Call :meth:`finish` after
    backward and before the optimizer: then every gradient is the mean over the ranks.

    Args:
        model: the same on every rank; its parameters at this moment that require gradients.
        comms: the ranks that share the gradients.
        bucket_cap_mb: size of a bucket in MiB; ``None``: 25, after a first one of 1.
        gradient_as_bucket_view: keep gradients in the buckets, instead of copying them back.
        timeline: records gradients, collectives and the wait for them.

    Raises:
        ValueError: no parameter requires a gradient, or the cap is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        *,
        gradient_as_bucket_view: bool = True,
        timeline: Recorder = NOT_RECORDED,
    ) -> None:
        self.comms = comms
        self.buckets = Buckets(model, comms, as_view=gradient_as_bucket_view)
        count = len(self.buckets.parameters)
        if not count or (bucket_cap_mb is not None and bucket_cap_mb <= 0):
            raise ValueError(
                f"rank {comms.rank}: expected parameters that require gradients and a bucket cap "
                f"above 0 MiB, got {count} parameters and {bucket_cap_mb} MiB"
            )
        # Last parameters first, as backward comes to them.
        plan = plan_in_order(model, range(count)[::-1], bucket_caps(bucket_cap_mb))
        self.buckets.follow(plan)
        self.record(timeline)
        self.backward = Backward(self.buckets)
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._ready, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.buckets.parameters)
        ]

    def record(self, timeline: Recorder) -> None:
        """Record gradients, collectives and the wait for them from now on."""
        self.buckets.timeline = timeline

    def _ready(self, i: int, parameter: torch.Tensor) -> None:
        if not self.armed:
            return
        name = self.buckets.names[i]
        if i in self.backward.arrived:
            raise RuntimeError(
                f"rank {self.comms.rank}: the gradient of {name} came again "
                "before finish() was called for the last backward"
            )
        self.buckets.timeline.mark(name)
        self.backward.mark_ready(i, parameter.grad)

    def finish(self) -> None:
        """Wait until every gradient is averaged.

        Raises:
            RuntimeError: parameters got no gradient in this backward; they are named.
        """
        if not self.backward.complete:
            arrived, names = self.backward.arrived, self.buckets.names
            missing = [name for i, name in enumerate(names) if i not in arrived]
            self.abandon()
            raise RuntimeError(f"rank {self.comms.rank}: no gradient for {', '.join(missing)}")
        for bucket, _ in self.backward.wait_for_buckets():
            bucket.copy_out(self.buckets.as_view)  # while the buckets after it still travel
        self.backward = Backward(self.buckets)

    def abandon(self) -> None:
        """Give a backward up that did not complete, once what was sent has come to rest."""
        list(self.backward.wait_for_buckets())
        self.backward = Backward(self.buckets)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
