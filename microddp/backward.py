"""One backward pass: gradients that are ready, and their buckets on the way.

How it ends is not here: in DDP see :mod:`microddp.ddp.reducer`, of hooks their ``finish()``, in
``fully_shard`` :mod:`microddp.sharding.context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from microddp.buckets import GradientBucket, gradients_are_sparse, plan_buckets
from microddp.carrier import Carrier
from microddp.comms import Comms
from microddp.timing import NOT_RECORDED, Launched, Recorder


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a forward pass returned, also in fields of dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))


def parameters_behind(outputs: Iterator[torch.Tensor]) -> set[int]:
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


def bytes_held(gradient: torch.Tensor) -> int:
    """Bytes of a gradient's values; of a sparse one, of its values and their indices."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes


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
        self.sparse = gradients_are_sparse(model)
        self.comms = comms
        self.as_view = as_view
        self.carrier = carrier or Carrier(comms)
        self.divisor = comms.world_size
        self.send: Callable[[GradientBucket], Launched] = self.all_reduce
        self.timeline: Recorder = NOT_RECORDED
        self.places: dict[int, tuple[int, int]] = {}
        self._place = ""  # the line of the backward that goes on

    def plan_in_order(self, order: Sequence[int], caps: Sequence[int]) -> list[list[int]]:
        """The plan for gradients that come in this order; ``caps``: as for ``plan_buckets``."""
        sparse = [self.sparse[i] for i in order]
        plan = plan_buckets([self.parameters[i] for i in order], caps, sparse)
        return [[order[j] for j in members] for members in plan]

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
        self._calls = [
            f"all-reduce of gradient bucket {bucket.index()}: {len(bucket.views)}"
            for bucket in self
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

    def all_reduce(self, bucket: GradientBucket) -> Launched:
        """Begin to add a bucket up over the ranks."""
        if not bucket.index():  # looked up once a backward, as that takes long
            self._place = self.comms.place()
        self.comms.agree(self._calls[bucket.index()], self._place)
        return self.carrier.start(bucket.buffer(), bucket.is_last())


class Backward:
    """The state of one backward pass: gradients that are ready, sent, waited for.

    Attributes:
        arrived: the parameters whose gradients are ready, in that order.
        missing: by bucket, the number of gradients that are not ready.
        waiting: by bucket, the gradients that are ready and not copied into it yet, by slot.
        works: the collectives of the buckets that were sent, in order.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.arrived: dict[int, None] = {}
        self.missing = [len(members) for members in buckets.plan]
        self.waiting: list[dict[int, torch.Tensor | None]] = [{} for _ in buckets.plan]
        self.works: list[Any] = []

    def mark_ready(self, i: int, grad: torch.Tensor | None) -> None:
        """Take the gradient of parameter ``i``, or none, and send the buckets that are full now."""
        buckets = self.buckets
        self.arrived[i] = None
        index, slot = buckets.places[i]
        bucket, waiting = buckets.all[index], self.waiting[index]
        divisor, as_view = buckets.divisor, buckets.as_view
        if not (bucket.large[slot] and bucket.copy_in_large(slot, grad, divisor, as_view)):
            waiting[slot] = grad
        self.missing[index] -= 1
        if not self.missing[index]:
            bucket.copy_in(waiting, divisor, as_view)
            waiting.clear()
            self.send_full()

    def send_full(self) -> None:
        """Send the next buckets that are full: in order, or ranks would pair different ones."""
        while not (self.complete or self.missing[index := len(self.works)]):
            bucket = self.buckets.all[index]
            nbytes = bytes_held(bucket.buffer())  # before a hook may put something else in
            work = self.buckets.send(bucket)
            self.buckets.timeline.launched(f"bucket {index}", work, nbytes)
            self.works.append(work)

    @property
    def complete(self) -> bool:
        """True if every bucket was sent."""
        return len(self.works) == len(self.missing)

    def wait_for_buckets(self) -> Iterator[tuple[GradientBucket, Any]]:
        """Each bucket that was sent, once it is back, with what its ``wait()`` returned."""
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
