"""Gradient buckets: a few large messages instead of one for every parameter, during backward.

Every message costs the same start-up time, however small it is. So gradients that are ready at
about the same time travel together, in one flat buffer, as soon as the last of them has come.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from microddp.comms import Comms
from microddp.hooks import Switchable
from microddp.report import MIB
from microddp.timing import NOT_RECORDED, Launched, Recorder

BUCKET_CAP_MB = 25.0
# A small first bucket, so that communication begins early in backward. PyTorch's own default; its
# developers disagree on what it gains (PyTorch issue 118421), and chapter 05 measures it.
FIRST_BUCKET_CAP_MB = 1.0
# A gradient below this size is brought into its bucket with the others, in one call for all. Above,
# a call costs less than the bytes, and those are still in the cache when the gradient comes.
LARGE_BYTES = 1 << 18


def bucket_caps(bucket_cap_mb: float | None) -> list[int]:
    """The caps of the first bucket and of all others, in bytes, from a cap in MiB.

    Who sets a cap sets that of the first bucket, too, as with PyTorch's DDP; ``None`` stands for
    25 MiB after a first bucket of 1.
    """
    if bucket_cap_mb is None:
        return [int(FIRST_BUCKET_CAP_MB * MIB), int(BUCKET_CAP_MB * MIB)]
    return [int(bucket_cap_mb * MIB)]


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
    held: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes of those
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for i, tensor in enumerate(tensors):
        if sparse and sparse[i]:
            plan.append([i])
            continue
        kind = (tensor.dtype, tensor.device)
        filling.setdefault(kind, []).append(i)
        held[kind] = held.get(kind, 0) + tensor.nbytes
        if held[kind] >= caps[min(filled.get(kind, 0), len(caps) - 1)]:
            plan.append(filling.pop(kind))
            held[kind] = 0
            filled[kind] = filled.get(kind, 0) + 1
    return plan + sorted(filling.values(), key=lambda bucket: bucket[-1])


class GradientBucket:
    """Gradients that travel together, side by side in one flat buffer.

    It has the methods of ``torch.distributed.GradBucket``, so that a communication hook may be
    given either.

    Attributes:
        views: of the buffer, one for each parameter in its shape; none if the gradient is sparse.
        large: the slots of gradients that are brought in as soon as they come.
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
        sizes = enumerate(p.nbytes for p in self._parameters)
        self.large = {slot for slot, nbytes in sizes if nbytes >= LARGE_BYTES}
        self._small = [slot for slot in range(len(self._parameters)) if slot not in self.large]
        self._grads: list[torch.Tensor | None] = [None] * len(self._parameters)  # that have come
        self._absent: list[int] = []  # the slots of those that have not, and count as zero

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

    def gradients(self) -> list[torch.Tensor]:
        """Views into the buffer, one for each parameter, in its shape."""
        return self.views or [self._flat]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients it holds."""
        return self._parameters

    def take(self, slot: int, grad: torch.Tensor | None) -> None:
        """Hold a parameter's gradient, ``None`` for zero, until it is brought in."""
        self._grads[slot] = grad

    def bring_in(self, divisor: int, as_view: bool, slot: int | None = None) -> None:
        """Copy gradients that were taken into the buffer, divided by ``divisor``.

        With ``as_view`` the buffer becomes their home: ``.grad`` is a view of it.

        Args:
            divisor: the number of ranks that average.
            as_view: see above.
            slot: of a large gradient; ``None`` for all others.
        """
        if torch.is_grad_enabled():
            if any(grad is not None and grad.requires_grad for grad in self._grads):
                warnings.warn("gradients are averaged, not gradients of gradients", stacklevel=2)
            with torch.no_grad():
                self.bring_in(divisor, as_view, slot)
            return
        if self.sparse:
            self._flat = self._sparse_gradient() / divisor
            return
        at_home, grads, views = [], [], []
        for i in self._small if slot is None else (slot,):
            grad, view = self._grads[i], self.views[i]
            self._grads[i] = None
            if grad is view:
                at_home.append(view)
            elif grad is None:
                view.zero_()
                self._absent.append(i)
            else:
                grads.append(grad)
                views.append(view)
                if as_view:
                    self._parameters[i].grad = view
        # Multiplied here, divided below: as PyTorch does, so that not a bit differs from its DDP.
        # For many one call: each alone costs more than its bytes.
        if len(grads) == 1:
            torch.mul(grads[0], 1 / divisor, out=views[0])
        elif grads:
            torch._foreach_copy_(views, grads)
            if len(grads) == len(self.views):
                self._home.mul_(1 / divisor)
            else:  # not by a number, which would be rounded to bf16 before it is multiplied by
                torch._foreach_mul_(views, torch.tensor(1 / divisor, dtype=torch.float64))
        if len(at_home) == len(self.views):
            self._home.div_(divisor)
        elif at_home:
            torch._foreach_div_(at_home, divisor)

    def _sparse_gradient(self) -> torch.Tensor:
        (grad,), (parameter,) = self._grads, self._parameters
        if grad is not None:
            return grad.detach()
        nothing = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(nothing, parameter.detach()[:0], parameter.shape)

    def accept(self, reduced: torch.Tensor) -> None:
        """Take a communication hook's result as what the buffer is to hold."""
        if self.sparse:
            self._flat = reduced
            return
        if reduced.data_ptr() != self._home.data_ptr():
            self._home.copy_(reduced.view_as(self._home))
        self._flat = self._home

    def give_back(self, as_view: bool, unused: Sequence[int] = ()) -> None:
        """Hand the reduced gradients to their parameters, but not to the slots ``unused``."""
        grads, views = [], []
        averages = self.gradients()
        # As views, all others are where they belong.
        everywhere = self.sparse or not as_view
        for slot in range(len(averages)) if everywhere else self._absent:
            parameter, average = self._parameters[slot], averages[slot]
            if slot in unused:
                continue
            if self.sparse or as_view:
                parameter.grad = average
            elif parameter.grad is None:
                parameter.grad = average.clone()
            else:
                grads.append(parameter.grad)
                views.append(average)
        self._absent = []
        if grads:
            torch._foreach_copy_(grads, views)  # one call: each would cost more than a small copy


class Buckets:
    """The buckets of a model's gradients, which travel in one order, the same on every rank.

    Args:
        model: its parameters that require gradients are meant by number, in their order.
        comms: the ranks that average.
        as_view: keep gradients in the buckets, instead of copying them back.

    Attributes:
        all: the buckets.
        plan: the numbers of the parameters of each.
        places: for each parameter its bucket's index, its slot there, and whether it is large.
        divisor: of the gradients; at first the number of ranks.
        send: begins what becomes of a full bucket; at first its all-reduce.
        timeline: records gradients, collectives and the wait for them.
    """

    def __init__(self, model: nn.Module, comms: Comms, *, as_view: bool) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sparse = sparse_gradients(model)
        self.comms = comms
        self.as_view = as_view
        self.divisor = comms.world_size
        self.send: Callable[[GradientBucket], Launched] = self.all_reduce
        self.timeline: Recorder = NOT_RECORDED
        self.places: list[tuple[int, int, bool]] = []

    def follow(self, plan: Sequence[Sequence[int]]) -> None:
        """Make the buckets of a plan, in the order of sending, in the place of those before."""
        self.plan = [list(members) for members in plan]
        self.all = [
            GradientBucket(
                [self.parameters[i] for i in members],
                index,
                is_last=index == len(plan) - 1,
                sparse=self.sparse[members[0]],
            )
            for index, members in enumerate(plan)
        ]
        self.places = [(0, 0, False)] * len(self.parameters)
        for bucket, members in zip(self.all, plan, strict=True):
            for slot, i in enumerate(members):
                self.places[i] = (bucket.index(), slot, slot in bucket.large)
                p = self.parameters[i]
                if self.as_view and p.grad is not None and not bucket.sparse:
                    p.grad = bucket.views[slot].copy_(p.grad)

    def __iter__(self) -> Iterator[GradientBucket]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def all_reduce(self, bucket: GradientBucket) -> dist.Work:
        """Begin to add a bucket up over the ranks."""
        self.comms.agree(f"all-reduce of gradient bucket {bucket.index()}: {len(bucket.views)}")
        return self.comms.group.allreduce([bucket.buffer()])


class Backward:
    """The gradients of one backward on their way: come, sent, waited for. Made new for each.

    Attributes:
        arrived: the parameters whose gradients have come, in that order.
        missing: by bucket, how many gradients have not come.
        works: what is under way, of the buckets that were sent, in order.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.arrived: dict[int, None] = {}
        self.missing = [len(members) for members in buckets.plan]
        self.works: list[Any] = []

    def come(self, i: int, grad: torch.Tensor | None) -> None:
        """The gradient of parameter ``i`` has come, or none will: send what is full now."""
        self.arrived[i] = None
        buckets = self.buckets
        index, slot, large = buckets.places[i]
        bucket = buckets.all[index]
        bucket.take(slot, grad)
        if large:
            bucket.bring_in(buckets.divisor, buckets.as_view, slot)
        self.missing[index] -= 1
        if not self.missing[index]:
            bucket.bring_in(buckets.divisor, buckets.as_view)
            self.send_full()

    def send_full(self) -> None:
        """Send the next buckets that are full: in order, or ranks would pair different ones."""
        for bucket in self.buckets.all[len(self.works) :]:
            if self.missing[bucket.index()]:
                return
            work = self.buckets.send(bucket)
            self.buckets.timeline.launched(f"bucket {bucket.index()}", work)
            self.works.append(work)

    @property
    def complete(self) -> bool:
        """Whether every bucket was sent."""
        return len(self.works) == len(self.missing)

    def waited(self) -> Iterator[tuple[GradientBucket, Any]]:
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
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named or (bucket_cap_mb is not None and bucket_cap_mb <= 0):
            raise ValueError(
                f"rank {comms.rank}: expected parameters that require gradients and a bucket cap "
                f"above 0 MiB, got {len(named)} parameters and {bucket_cap_mb} MiB"
            )
        self.names = [name for name, _ in named]
        self.comms = comms
        self.buckets = Buckets(model, comms, as_view=gradient_as_bucket_view)
        # Last parameters first, as backward comes to them.
        order = range(len(named))[::-1]
        self.buckets.follow(plan_in_order(model, order, bucket_caps(bucket_cap_mb)))
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
        if i in self.backward.arrived:
            raise RuntimeError(
                f"rank {self.comms.rank}: the gradient of {self.names[i]} came again "
                "before finish() was called for the last backward"
            )
        self.buckets.timeline.mark(self.names[i])
        self.backward.come(i, parameter.grad)

    def finish(self) -> None:
        """Wait until every gradient is averaged.

        Raises:
            RuntimeError: parameters got no gradient in this backward; they are named.
        """
        if not self.backward.complete:
            missing = self.missing()
            self.abandon()
            raise RuntimeError(f"rank {self.comms.rank}: no gradient for {', '.join(missing)}")
        for bucket, _ in self.backward.waited():
            bucket.give_back(self.buckets.as_view)  # while the buckets after it still travel
        self.forget()

    def missing(self) -> list[str]:
        """The names of the parameters whose gradients have not come since the last step."""
        arrived = self.backward.arrived
        return [name for i, name in enumerate(self.names) if i not in arrived]

    def abandon(self) -> None:
        """Give a backward up that did not complete, once what was sent has come to rest."""
        list(self.backward.waited())
        self.forget()

    def forget(self) -> None:
        """Be ready for the next backward, whose first gradient would else count as a second."""
        self.backward = Backward(self.buckets)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


def plan_in_order(model: nn.Module, order: Sequence[int], caps: Sequence[int]) -> list[list[int]]:
    """The bucket plan of a model whose gradients come in a given order.

    Args:
        model: its parameters that require gradients, in their order, are meant by number.
        order: of their gradients.
        caps: as for :func:`plan_buckets`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    sparse = sparse_gradients(model)
    plan = plan_buckets([parameters[i] for i in order], caps, [sparse[i] for i in order])
    return [[order[j] for j in members] for members in plan]


def sparse_gradients(model: nn.Module) -> list[bool]:
    """For each parameter that requires a gradient whether that holds but a few rows."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return [id(p) in sparse for p in model.parameters() if p.requires_grad]
