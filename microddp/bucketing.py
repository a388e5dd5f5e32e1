"""Gradient buckets: a few large messages instead of one for every parameter, during backward.

Every message costs the same start-up time, however small it is. So gradients that are ready at
about the same time travel together, in one flat buffer, as soon as the last of them has come.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from microddp.comms import Comms
from microddp.hooks import AllReduceHooks, Switchable
from microddp.report import MIB
from microddp.timing import Timeline, Timing, measure

BUCKET_CAP_MB = 25.0
# A small first bucket, so that communication begins early in backward. PyTorch's own default; its
# developers disagree on what it gains (PyTorch issue 118421), and chapter 05 measures it.
FIRST_BUCKET_MB = 1.0


def plan_buckets(
    tensors: Sequence[torch.Tensor], caps: Sequence[int], sparse: Sequence[bool] = ()
) -> list[list[int]]:
    """Deal tensors out to buckets in the order given, without splitting any.

    A bucket takes tensors until it has reached its cap, so it may exceed it by almost a tensor. It
    holds one dtype on one device, and each such kind fills buckets of its own.

    Args:
        tensors: what is to travel, in the order in which it becomes ready.
        caps: bytes of the first bucket, the second, ...; the last holds for all that follow.
        sparse: for each tensor whether its gradient is sparse; such a one travels alone.

    Returns:
        The indices of each bucket's tensors, in the order in which the buckets are full.

    Source: PyTorch, torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.
    """
    plan: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for i, tensor in enumerate(tensors):
        if sparse and sparse[i]:
            plan.append([i])
            continue
        kind = (tensor.dtype, tensor.device)
        bucket = filling.setdefault(kind, [])
        bucket.append(i)
        cap = caps[min(filled.get(kind, 0), len(caps) - 1)]
        if sum(tensors[j].nbytes for j in bucket) >= cap:
            plan.append(filling.pop(kind))
            filled[kind] = filled.get(kind, 0) + 1
    return plan + sorted(filling.values(), key=lambda bucket: bucket[-1])


class GradientBucket:
    """Gradients that travel together, side by side in one flat buffer.

    It has the methods of ``torch.distributed.GradBucket``, so that a communication hook may be
    given either.

    Attributes:
        missing: how many of its gradients have not come yet.
        work: the all-reduce under way, or a communication hook's future.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        index: int = 0,
        is_last: bool = True,
        sparse: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._index, self._is_last = index, is_last
        self.sparse = sparse
        self.missing = len(self._parameters)
        self._here = [False] * self.missing
        self.work: Any = None
        self.views: list[torch.Tensor] = []
        first = self._parameters[0]
        size = 0 if sparse else sum(p.numel() for p in self._parameters)
        self._flat = self._home = torch.zeros(size, dtype=first.dtype, device=first.device)
        start = 0
        for p in [] if sparse else self._parameters:
            part = self._flat[start : start + p.numel()]
            # A gradient is laid out like its parameter: channels last, say.
            self.views.append(part.as_strided(p.shape, torch.empty_like(p, device="meta").stride()))
            start += p.numel()

    def index(self) -> int:
        """Its place in the order in which buckets are sent."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket is sent after this one."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The gradients as one dimension."""
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Let ``tensor``, of as many values, travel instead of the buffer."""
        self._flat = tensor

    def accept(self, reduced: torch.Tensor) -> None:
        """Take a communication hook's result as what the buffer is to hold."""
        if self.sparse:
            self._flat = reduced
            return
        if reduced.data_ptr() != self._home.data_ptr():
            self._home.copy_(reduced.view_as(self._home))
        self._flat = self._home

    def gradients(self) -> list[torch.Tensor]:
        """Views into the buffer, one for each parameter, in its shape."""
        return self.views or [self._flat]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients it holds."""
        return self._parameters

    def has(self, slot: int) -> bool:
        """Whether one parameter's gradient has come."""
        return self._here[slot]

    def take(self, slot: int, divisor: int, as_view: bool) -> None:
        """Bring one parameter's gradient in, divided by ``divisor``; none counts as zero.

        With ``as_view`` the buffer becomes the gradient's home: ``.grad`` is a view of it.
        """
        self._here[slot] = True
        self.missing -= 1
        parameter = self._parameters[slot]
        grad = parameter.grad
        if self.sparse:
            if grad is None:
                nothing = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
                rows = parameter.detach()[:0]
                grad = torch.sparse_coo_tensor(nothing, rows, parameter.shape)
            self._flat = grad.detach() / divisor
            return
        view = self.views[slot]
        if grad is None:
            view.zero_()
            return
        if grad is view:
            view.div_(divisor)
            return
        if grad.requires_grad:  # create_graph=True
            warnings.warn("gradients are averaged, but not gradients of gradients", stacklevel=2)
            grad = grad.detach()
        # Multiplied here, divided above: as PyTorch does, so that not a bit differs from its DDP.
        torch.mul(grad, 1 / divisor, out=view)
        if as_view:
            parameter.grad = view

    def give_back(self, as_view: bool, unused: Sequence[int] = ()) -> None:
        """Hand the reduced gradients to their parameters, but not to the slots ``unused``."""
        grads, views = [], []
        for slot, (parameter, view) in enumerate(
            zip(self._parameters, self.gradients(), strict=True)
        ):
            if slot in unused:
                continue
            grad = parameter.grad
            if self.sparse or (as_view and grad is None):
                parameter.grad = view
            elif grad is None:
                parameter.grad = view.clone()
            elif not as_view:
                grads.append(grad)
                views.append(view)
        if grads:
            torch._foreach_copy_(grads, views)  # one call: each would cost more than a small copy

    def reset(self) -> None:
        """Be ready for the next step's gradients."""
        self.missing = len(self._parameters)
        self._here = [False] * self.missing
        self.work = None


class BucketedDDPHooks(Switchable):
    """Averages the gradients of a model over all ranks, bucket by bucket, during backward.

    A hook on each parameter brings its gradient into a bucket. When a bucket is full, and all
    before it have been sent, its all-reduce begins and backward goes on. Call :meth:`finish` after
    backward and before the optimizer: then every gradient is the mean over the ranks.

    Args:
        model: the same on every rank; its parameters at this moment that require gradients.
        comms: the ranks that share the gradients.
        bucket_size_mb: cap of a bucket in MiB.
        first_bucket_mb: cap of the first bucket, if that is less.
        gradient_as_bucket_view: keep gradients in the buckets, instead of copying them back.
        timeline: records gradients, collectives and the wait for them.

    Raises:
        ValueError: no parameter requires a gradient, or the cap is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_size_mb: float = BUCKET_CAP_MB,
        *,
        first_bucket_mb: float = FIRST_BUCKET_MB,
        gradient_as_bucket_view: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named or bucket_size_mb <= 0:
            raise ValueError(
                f"rank {comms.rank}: expected parameters that require gradients and a bucket size "
                f"above 0 MiB, got {len(named)} parameters and {bucket_size_mb} MiB"
            )
        self.comms = comms
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.as_view = gradient_as_bucket_view
        self.timeline = timeline
        self.divisor = comms.world_size
        self.caps = [int(min(first_bucket_mb, bucket_size_mb) * MIB), int(bucket_size_mb * MIB)]
        sparse = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        self.sparse = [id(p) in sparse for p in self.parameters]
        self.set_buckets(self.first_plan())
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._ready, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.parameters)
        ]

    def first_plan(self) -> list[list[int]]:
        """The buckets of the first step: last parameters first, as backward comes to them."""
        return self.plan_in(list(reversed(range(len(self.parameters)))))

    def plan_in(self, order: Sequence[int]) -> list[list[int]]:
        """The buckets for gradients that come in a given order of the parameters."""
        plan = plan_buckets(
            [self.parameters[i] for i in order], self.caps, [self.sparse[i] for i in order]
        )
        return [[order[j] for j in bucket] for bucket in plan]

    def set_buckets(self, plan: Sequence[Sequence[int]]) -> None:
        """Make the buckets of a plan: the indices of the parameters of each."""
        self.plan = [list(bucket) for bucket in plan]
        self.buckets = [
            GradientBucket(
                [self.parameters[i] for i in bucket],
                index,
                is_last=index == len(plan) - 1,
                sparse=self.sparse[bucket[0]],
            )
            for index, bucket in enumerate(plan)
        ]
        places = {i: (index, slot) for index, b in enumerate(plan) for slot, i in enumerate(b)}
        self._places = [
            (self.buckets[places[i][0]], places[i][1]) for i in range(len(self.parameters))
        ]
        self._sent = 0
        for p, (bucket, slot) in zip(self.parameters, self._places, strict=True):
            if self.as_view and bucket.views and p.grad is not None:
                p.grad = bucket.views[slot].copy_(p.grad)

    def finish(self) -> None:
        """Wait until every gradient is averaged.

        Raises:
            RuntimeError: parameters got no gradient in this backward; they are named.
        """
        if self._sent < len(self.buckets):
            missing = self.missing()
            self.abandon()
            raise RuntimeError(f"rank {self.comms.rank}: no gradient for {', '.join(missing)}")
        for bucket in self.buckets:
            self.wait(bucket)
            bucket.give_back(self.as_view)  # while the buckets after it still travel
        self.reset()

    def missing(self) -> list[str]:
        """The names of the parameters whose gradients have not come since the last step."""
        return [
            name
            for name, (bucket, slot) in zip(self.names, self._places, strict=True)
            if not bucket.has(slot)
        ]

    def abandon(self) -> None:
        """Forget a backward that did not complete, once what was sent has come to rest."""
        for bucket in self.buckets[: self._sent]:
            self.wait(bucket)
        self.reset()

    def reset(self) -> None:
        """Empty the buckets. Without it, they would grow, or be sent too early, the next time."""
        for bucket in self.buckets:
            bucket.reset()
        self._sent = 0

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _ready(self, i: int, _parameter: torch.Tensor) -> None:
        if not self.armed:
            return
        bucket, slot = self._places[i]
        if bucket.has(slot):
            raise RuntimeError(
                f"rank {self.comms.rank}: the gradient of {self.names[i]} came again before "
                "finish() was called for the last backward"
            )
        self.bring(i)

    def bring(self, i: int) -> None:
        """Bring the gradient of parameter ``i`` into its bucket, and send that if it is full."""
        if self.timeline:
            self.timeline.mark(self.names[i])
        bucket, slot = self._places[i]
        bucket.take(slot, self.divisor, self.as_view)
        if not bucket.missing:
            self.send_full_buckets()

    def send_full_buckets(self) -> None:
        """Send the next buckets that are full: in order, or ranks would pair different ones."""
        while self._sent < len(self.buckets) and not self.buckets[self._sent].missing:
            bucket = self.buckets[self._sent]
            bucket.work = self.start(bucket)
            if self.timeline:
                self.timeline.launched(f"bucket {bucket.index()}", bucket.work)
            self._sent += 1

    def start(self, bucket: GradientBucket) -> Any:
        """Begin the all-reduce of one bucket; what it returns has a ``wait()``."""
        self.comms.agree(f"all-reduce of gradient bucket {bucket.index()}: {len(bucket.views)}")
        return self.comms.group.allreduce([bucket.buffer()])

    def wait(self, bucket: GradientBucket) -> Any:
        """Wait for one bucket's all-reduce; return what its ``wait()`` returns."""
        try:
            if not self.timeline:
                return bucket.work.wait()
            with self.timeline.span(f"wait for bucket {bucket.index()}", lane="wait"):
                return bucket.work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.comms.rank}: the all-reduce of gradient bucket {bucket.index()} of "
                f"{len(self.buckets)} failed; another rank has left, or lacks a gradient: {error}"
            ) from error


def compare_bucketed_vs_unbucketed(
    model: nn.Module,
    comms: Comms,
    batch: tuple[torch.Tensor, torch.Tensor],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    bucket_size_mb: float = BUCKET_CAP_MB,
    repeat: int = 15,
) -> dict[str, Timing]:
    """Time backward with the gradients averaged one by one against bucket by bucket.

    Args:
        model: the same on every rank; it is copied, and left as it is.
        comms: the ranks that share the gradients.
        batch: inputs and targets of this rank's shard.
        loss_fn: from outputs and targets to a scalar.
        bucket_size_mb: cap of a bucket in MiB.
        repeat: measurements of each.

    Returns:
        The times of forward, backward and averaging, under ``"one by one"`` and ``"bucketed"``.
    """
    inputs, targets = batch

    def step(replica: nn.Module, hooks: AllReduceHooks | BucketedDDPHooks) -> None:
        replica.zero_grad()
        loss_fn(replica(inputs), targets).backward()  # type: ignore[no-untyped-call]
        hooks.finish()

    single, bucketed = copy.deepcopy(model), copy.deepcopy(model)
    calls = {
        "one by one": partial(step, single, AllReduceHooks(single, comms)),
        "bucketed": partial(step, bucketed, BucketedDDPHooks(bucketed, comms, bucket_size_mb)),
    }
    return measure(calls, comms, repeat=repeat)
