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
from torch import nn

from microddp.allreduce import Carrier
from microddp.comms import Comms
from microddp.hooks import Switchable, bytes_held
from microddp.report import MIB
from microddp.timing import NOT_RECORDED, Launched, Recorder

BUCKET_CAP_MB = 25.0
# A small first bucket, so that communication begins early in backward. PyTorch's own default; its
# developers disagree on what it gains (PyTorch issue 118421), and chapter 05 measures it.
FIRST_BUCKET_CAP_MB = 1.0
# Gradients that are all below this size are brought into their bucket in one call. Above, a call
# costs less than the bytes, and those are still in the cache when the gradient comes.
LARGE_BYTES = 1 << 20


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


def flat_zeros(parameter: torch.Tensor, numel: int) -> torch.Tensor:
    """A flat buffer of a parameter's kind."""
    return parameter.detach().new_zeros(numel)


class GradientBucket:
    """Gradients that travel together, side by side in one flat buffer.

    It has the methods of ``torch.distributed.GradBucket``, so that a communication hook may be
    given either.

    Attributes:
        views: of the buffer, one for each parameter in its shape; none if the gradient is sparse.
        sparse: whether its only gradient holds but a few rows.
        at_once: whether a gradient is brought in as soon as it comes, and not with all others.
        grads: by slot, what has come and is not brought in; ``None`` for zero.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        index: int = 0,
        is_last: bool = True,
        sparse: bool = False,
        zeros: Callable[[torch.Tensor, int], torch.Tensor] = flat_zeros,
    ) -> None:
        self._parameters = list(parameters)
        self._index, self._is_last = index, is_last
        self.sparse = sparse
        dense = [] if sparse else self._parameters
        sizes = [p.numel() for p in dense]
        self._flat = self._home = zeros(parameters[0], sum(sizes))
        self.views = [
            # A gradient is laid out like its parameter: channels last, say.
            part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
            for p, part in zip(dense, torch.split(self._flat, sizes), strict=True)
        ]
        self.at_once = max(p.nbytes for p in parameters) >= LARGE_BYTES
        self.grads: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._absent: list[int] = []  # the slots of those that have not come, and count as zero

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

    def bring_in(self, slots: Sequence[int], divisor: int, as_view: bool) -> None:
        """Copy what has come into the buffer, divided by ``divisor``.

        With ``as_view`` the buffer becomes its home: ``.grad`` is a view of it.

        Args:
            slots: of the gradients.
            divisor: the number of ranks that average.
            as_view: see above.
        """
        if torch.is_grad_enabled():
            if any(grad is not None and grad.requires_grad for grad in self.grads):
                warnings.warn("gradients are averaged, not gradients of gradients", stacklevel=2)
            with torch.no_grad():
                self.bring_in(slots, divisor, as_view)
            return
        if self.sparse:
            self._flat = self._sparse_gradient() / divisor
            return
        at_home: list[torch.Tensor] = []
        grads, views = [], []
        for slot in slots:
            grad, view = self.grads[slot], self.views[slot]
            self.grads[slot] = None
            if grad is view:
                at_home.append(view)
            elif grad is None:
                view.zero_()
                self._absent.append(slot)
            else:
                grads.append(grad)
                views.append(view)
                if as_view:
                    self._parameters[slot].grad = view
        # Multiplied here, divided below: as PyTorch does, so that not a bit differs from its DDP.
        # For many one call: each alone costs more than its bytes.
        if len(grads) == len(self.views) > 1:
            torch._foreach_copy_(views, grads)
            self._home.mul_(1 / divisor)
        else:
            for view, grad in zip(views, grads, strict=True):
                torch.mul(grad, 1 / divisor, out=view)
        for part in [self._home] if len(at_home) == len(self.views) else at_home:
            part.div_(divisor)

    def _sparse_gradient(self) -> torch.Tensor:
        (grad,), (parameter,) = self.grads, self._parameters
        if grad is not None:
            return grad.detach()
        nowhere = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(nowhere, parameter.detach()[:0], parameter.shape)

    def accept(self, reduced: torch.Tensor) -> None:
        """Take a communication hook's result as what the buffer is to hold."""
        if not self.sparse and reduced.data_ptr() != self._home.data_ptr():
            self._home.copy_(reduced.view_as(self._home))
        self._flat = reduced if self.sparse else self._home

    def give_back(self, as_view: bool, unused: Sequence[int] = ()) -> None:
        """Hand the reduced gradients to their parameters, but not to the slots ``unused``."""
        kept = as_view and not self.sparse  # then all but the absent are where they belong
        averages, mine, theirs = self.gradients(), [], []
        for slot in self._absent if kept else range(len(averages)):
            parameter, average = self._parameters[slot], averages[slot]
            if slot in unused:
                continue
            if kept or self.sparse:
                parameter.grad = average
            elif parameter.grad is None:
                parameter.grad = average.clone()
            else:
                mine.append(parameter.grad)
                theirs.append(average)
        self._absent = []
        if mine:
            torch._foreach_copy_(mine, theirs)  # one call: each would cost more than a small copy


class Buckets:
    """The buckets of a model's gradients, which travel in one order, the same on every rank.

    Args:
        model: its parameters that require gradients are meant by number, in their order.
        comms: the ranks that average.
        as_view: keep gradients in the buckets, instead of copying them back.
        carrier: adds the buckets up; default: the backend.

    Attributes:
        parameters: all that require gradients.
        names: of those.
        all: the buckets.
        plan: the numbers of the parameters of each.
        places: for each parameter its bucket's index, and its slot there.
        divisor: of the gradients; at first the number of ranks.
        send: begins what becomes of a full bucket; at first its all-reduce.
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
        buckets = self.buckets
        self.arrived[i] = None
        index, slot = buckets.places[i]
        bucket = buckets.all[index]
        bucket.grads[slot] = grad
        if bucket.at_once:
            bucket.bring_in([slot], buckets.divisor, buckets.as_view)
        self.missing[index] -= 1
        if not self.missing[index]:
            if not bucket.at_once:
                bucket.bring_in(range(len(bucket.grads)), buckets.divisor, buckets.as_view)
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
        self.backward.come(i, parameter.grad)

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
        for bucket, _ in self.backward.waited():
            bucket.give_back(self.buckets.as_view)  # while the buckets after it still travel
        self.backward = Backward(self.buckets)

    def abandon(self) -> None:
        """Give a backward up that did not complete, once what was sent has come to rest."""
        list(self.backward.waited())
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


def check_dense(model: nn.Module, comms: Comms) -> None:
    """Expect no sparse gradients, which have no fixed place in a flat tensor."""
    sparse = sparse_gradients(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if found := [name for name, is_sparse in zip(names, sparse, strict=True) if is_sparse]:
        raise ValueError(
            f"rank {comms.rank}: expected dense gradients, got sparse ones of {', '.join(found)}"
        )
