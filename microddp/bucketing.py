"""Gradients averaged in buckets during backward: each is sent as soon as it is full."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from microddp.backward import Backward, Buckets
from microddp.buckets import bucket_caps, check_cap
from microddp.comms import Comms
from microddp.hooks import Switchable
from microddp.timing import NOT_RECORDED, Recorder


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
        ValueError: no parameter requires a gradient, or the cap is not positive, or not finite.
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
        if not count:
            raise ValueError(f"rank {comms.rank}: expected parameters to train, got none")
        check_cap(bucket_cap_mb, comms.rank)
        # Last parameters first, as backward comes to them.
        plan = self.buckets.plan_in_order(range(count)[::-1], bucket_caps(bucket_cap_mb))
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
        if self.backward.arrived:  # else it is as new, as at the begin of most steps
            list(self.backward.wait_for_buckets())
            self.backward = Backward(self.buckets)
