"""Gradient buckets: which gradients travel together, and the flat buffer in which they do.

Every message costs the same start-up time, however small it is. So gradients that are ready at
about the same time travel together, in one flat buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import inf

import torch
from torch import nn

BUCKET_CAP_MB = 25.0
# A small first bucket, so that communication begins early in backward. PyTorch's own default; its
# developers disagree on what it gains (PyTorch issue 118421).
FIRST_BUCKET_CAP_MB = 1.0
# Smaller gradients are copied into their bucket in one call, when the last is ready. A larger one
# has left the caches by then: a call of its own, at once, costs less.
LARGE_BYTES = 1 << 20


def bucket_caps(bucket_cap_mb: float | None) -> list[int]:
    """The caps of the first bucket and of all others, in bytes, from a cap in MiB.

    Who sets a cap sets that of the first bucket, too, as with PyTorch's DDP; ``None`` stands for
    25 MiB after a first bucket of 1.
    """
    caps = (FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB) if bucket_cap_mb is None else (bucket_cap_mb,)
    return [int(cap * 2**20) for cap in caps]


def check_cap(bucket_cap_mb: float | None, rank: int) -> None:
    """Refuse a cap that is not positive, or not finite, by a ``ValueError``."""
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < inf:
        raise ValueError(
            f"rank {rank}: expected a finite bucket_cap_mb above 0, got {bucket_cap_mb}"
        )


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
        views: views of the buffer, one for each parameter in its shape; none if it is sparse.
        sparse: True if it holds a single gradient, which is sparse.
        large: for each slot, True if its gradient is copied as soon as it is ready.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        index: int = 0,
        is_last: bool = True,
        sparse: bool = False,
        zeros: Callable[[torch.Tensor, int], torch.Tensor] = lambda p, n: p.detach().new_zeros(n),
    ) -> None:
        self._parameters = list(parameters)
        self._index, self._is_last, self.sparse = index, is_last, sparse
        dense = [] if sparse else self._parameters
        sizes = [p.numel() for p in dense]
        self._flat = self._home = zeros(parameters[0], sum(sizes))
        self.views = [
            # A gradient is laid out like its parameter: channels last, say.
            part.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
            for p, part in zip(dense, torch.split(self._flat, sizes), strict=True)
        ]
        self.large = [p.nbytes >= LARGE_BYTES and not sparse for p in parameters]
        self._absent: list[int] = []  # the slots without a gradient, which count as zero

    def index(self) -> int:
        """Its place in the order in which buckets are sent."""
        return self._index

    def is_last(self) -> bool:
        """True if no bucket is sent after this one."""
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

    def copy_in_large(
        self, slot: int, grad: torch.Tensor | None, divisor: int, as_view: bool
    ) -> bool:
        """Do as :meth:`copy_in` with a large gradient, at once; return if that could be."""
        if grad is None or torch.is_grad_enabled():
            return False
        view = self.views[slot]
        if grad is view:
            view.div_(divisor)
        else:
            torch.mul(grad, 1 / divisor, out=view)
            if as_view:
                self._parameters[slot].grad = view
        return True

    def copy_in(
        self, ready: Mapping[int, torch.Tensor | None], divisor: int, as_view: bool
    ) -> None:
        """Copy the gradients that are not in the buffer yet, when all are ready, divided.

        Args:
            ready: the gradients by slot; ``None`` for zero.
            divisor: the number of ranks that average.
            as_view: let ``.grad`` become a view of the buffer.
        """
        if torch.is_grad_enabled():
            if any(grad is not None and grad.requires_grad for grad in ready.values()):
                warnings.warn("gradients are averaged, not gradients of gradients", stacklevel=2)
            with torch.no_grad():
                self.copy_in(ready, divisor, as_view)
            return
        if self.sparse:
            self._flat = self._sparse_gradient(*ready.values()) / divisor
            return
        self._flat = self._home  # a hook may have set another, in a backward that raised
        at_home: list[torch.Tensor] = []
        grads, views = [], []
        for slot, grad in ready.items():
            view = self.views[slot]
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
        if views:
            torch._foreach_copy_(views, grads)
            if len(views) == len(self.views):
                self._home.mul_(1 / divisor)
            else:  # by a tensor: a number would be rounded to the gradients' dtype first
                torch._foreach_mul_(views, torch.tensor(1 / divisor, dtype=torch.float64))
        for part in [self._home] if len(at_home) == len(self.views) else at_home:
            part.div_(divisor)

    def _sparse_gradient(self, grad: torch.Tensor | None) -> torch.Tensor:
        (parameter,) = self._parameters
        if grad is not None:
            return grad.detach()
        nowhere = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(nowhere, parameter.detach()[:0], parameter.shape)

    @torch.no_grad()
    def accept(self, reduced: torch.Tensor) -> None:
        """Take a communication hook's result as what the buffer is to hold."""
        if not self.sparse and reduced.data_ptr() != self._home.data_ptr():
            self._home.copy_(reduced.view_as(self._home))
        self._flat = reduced if self.sparse else self._home

    def copy_out(self, as_view: bool, unused: Sequence[int] = ()) -> None:
        """Give the reduced gradients to their parameters, but not to the slots ``unused``."""
        kept = as_view and not self.sparse  # then all but the absent are where they belong
        if kept and not self._absent:
            return
        averages, mine, theirs = self.gradients(), [], []
        with torch.no_grad():
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
            if mine:  # one call: each would cost more than a small copy
                torch._foreach_copy_(mine, theirs)
        self._absent = []


def gradients_are_sparse(model: nn.Module) -> list[bool]:
    """For each parameter that requires a gradient, whether that gradient is sparse."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return [id(p) in sparse for p in model.parameters() if p.requires_grad]
