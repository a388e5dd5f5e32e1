"""Hooks on gradients: when each one is ready, and an all-reduce that starts at that moment.

PyTorch calls a *post-accumulate* hook when it has added a parameter's gradient to ``.grad``. The
hook is given the parameter, not the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from microddp.backward import bytes_held
from microddp.comms import Comms, name_ranks, odd_ranks
from microddp.report import table
from microddp.timing import NOT_RECORDED, Instant, Recorder


@dataclass(frozen=True)
class GradientReady:
    """The moment at which one parameter's gradient was ready in a backward pass.

    Attributes:
        order: its place among all gradients, from 0; ``None`` if it got none.
        name: of the parameter, its first one if it has several.
        shape: of the parameter.
        nbytes: of the gradient.
        seconds: since backward began; ``None`` if it got no gradient.
    """

    order: int | None
    name: str
    shape: tuple[int, ...]
    nbytes: int
    seconds: float | None


class Removable:
    """Hooks on a model's parameters."""

    _handles: Sequence[Any] = ()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


class Switchable(Removable):
    """Hooks that can be told to leave gradients alone.

    Attributes:
        armed: whether a backward averages.
    """

    armed = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each backward of the block add to this rank's own gradients, and send nothing.

        The first backward after the block averages what has accumulated.
        """
        before, self.armed = self.armed, False
        try:
            yield
        finally:
            self.armed = before


class HookTracker(Removable):
    """Records when each gradient of a model is ready in a backward pass.

    Backward begins when the gradient of the loss is known, before anything is computed from it.
    On CUDA the times are the GPU's. Only parameters that require a gradient when the tracker is
    made are watched. A parameter that is used several times, as a tied one is, has one gradient,
    which is ready after its last use. As a context manager it removes its hooks, and what it has
    recorded stays.

    Example:
        >>> with HookTracker(model) as tracker:
        ...     tracker.start(loss_fn(model(x), y)).backward()
        >>> print(tracker)
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._began: Instant | None = None
        self._ready: dict[str, Instant] = {}
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._record, name))  # type: ignore[no-untyped-call]
            for name, p in self._watched.items()
        ]

    def __enter__(self) -> HookTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def start(self, loss: torch.Tensor) -> torch.Tensor:
        """Record the backward pass of this loss, in place of what was recorded before.

        Call it before each ``backward()`` that is to be recorded.

        Returns:
            The loss, so that ``tracker.start(loss).backward()`` can be written.
        """
        self._began = None
        self._ready = {}
        loss.register_hook(self._begin)  # type: ignore[no-untyped-call]
        return loss

    @property
    def rows(self) -> list[GradientReady]:
        """The watched parameters, in the order of their gradients; then those that got none."""
        rows = []
        for order, (name, ready) in enumerate(self._ready.items()):
            assert self._began is not None
            rows.append(self._row(order, name, self._began.until(ready)))
        return rows + [self._row(None, n, None) for n in self._watched if n not in self._ready]

    def __str__(self) -> str:
        return self._table("simple")

    def _repr_html_(self) -> str:
        return self._table("html")

    def _table(self, form: str) -> str:
        rows = [
            (
                "none" if row.order is None else row.order,
                row.name,
                " x ".join(map(str, row.shape)) or "1",
                row.nbytes,
                None if row.seconds is None else row.seconds * 1e3,
            )
            for row in self.rows
        ]
        headers = ["order", "parameter", "shape", "bytes", "ready after (ms)"]
        return table(rows, headers, floats=".3f", form=form)

    def _row(self, order: int | None, name: str, seconds: float | None) -> GradientReady:
        p = self._watched[name]
        return GradientReady(order, name, tuple(p.shape), p.nbytes, seconds)

    def _begin(self, gradient: torch.Tensor) -> None:
        self._began = Instant(gradient.device)

    def _record(self, name: str, parameter: torch.Tensor) -> None:
        # Where the loss does not use what a parameter went into, the hook comes without gradient.
        if self._began is not None and parameter.grad is not None:
            self._ready.setdefault(name, Instant(parameter.device))


class AllReduceHooks(Switchable):
    """Averages every gradient over all ranks, each on its own, while backward goes on.

    A hook on each parameter starts an asynchronous all-reduce of its gradient as soon as that is
    ready. Call :meth:`finish` after backward and before anything reads the gradients: until then
    they may be this rank's own, or divided and not yet added up.

    Parameters that get no gradient are left out. They must be the same ones on every rank, because
    collectives are matched by their order; with ``MICRODDP_DEBUG=1`` a difference is an error on
    every rank, without it the ranks mix up gradients or wait until the time-out.

    Args:
        model: the same on every rank; its parameters at this moment that require gradients.
        comms: the ranks that share the gradients.
        timeline: records gradients, collectives and the wait for them.
    """

    def __init__(self, model: nn.Module, comms: Comms, timeline: Recorder = NOT_RECORDED) -> None:
        self.comms = comms
        self.timeline = timeline
        self._works: dict[str, dist.Work] = {}
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._ready, name))  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters()
            if p.requires_grad
        ]

    def record(self, timeline: Recorder) -> None:
        """Record gradients, collectives and the wait for them from now on."""
        self.timeline = timeline

    def finish(self) -> None:
        """Wait until every gradient is averaged, and be ready for the next backward."""
        works, self._works = self._works, {}
        self.comms.agree("finish()")
        for name, work in works.items():
            with self.timeline.span(f"wait for {name}", lane="wait"):
                work.wait()

    def abandon(self) -> None:
        """Give a backward up that raised, once what was sent has come to rest."""
        while self._works:
            self._works.popitem()[1].wait()

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self.armed:
            return
        if name in self._works:
            raise RuntimeError(
                f"rank {self.comms.rank}: {name} got another gradient while its last one is being "
                "averaged: expected finish() after each backward and before the next"
            )
        self.timeline.mark(name)
        self.comms.agree(f"all-reduce of the gradient of {name}")
        parameter.grad = gradient = gradient.resolve_conj().resolve_neg()  # not of a copy
        gradient.div_(self.comms.world_size)
        nbytes = bytes_held(gradient)  # now: a sparse one's values are replaced as they arrive
        if not gradient.is_sparse and not gradient.is_contiguous():  # NCCL: in memory's order only
            inner_last = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
            gradient = gradient.permute(inner_last)
        work = self.comms.group.allreduce([gradient])
        self.timeline.launched(f"all-reduce {name}", work, nbytes=nbytes)
        self._works[name] = work


def demonstrate_hook_order(
    model: nn.Module,
    comms: Comms,
    inputs: torch.Tensor | None = None,
    loss_fn: Callable[[torch.Tensor], torch.Tensor] = lambda outputs: outputs.square().mean(),
) -> list[GradientReady]:
    """Print, on rank 0, when each gradient is ready in one backward pass.

    It runs on a copy: the model, its gradients and its buffers stay as they are. A first pass warms
    up, and is not shown.

    Args:
        model: on this rank's device.
        comms: the ranks that should see the same order.
        inputs: what the model takes; by default 32 random samples for its first linear layer.
        loss_fn: from the model's outputs to a scalar.

    Returns:
        This rank's rows, as :attr:`HookTracker.rows`.

    Raises:
        ValueError: no inputs, and no linear layer that says what the model takes.
        RuntimeError: on every rank, if the order differs; names the ranks.
    """
    model = copy.deepcopy(model)
    if inputs is None:
        first = next((m for m in model.modules() if isinstance(m, nn.Linear)), None)
        if first is None:
            raise ValueError(
                f"rank {comms.rank}: expected inputs or a model with a linear layer, got "
                f"{type(model).__name__}"
            )
        inputs = torch.randn(32, first.in_features).to(first.weight)
    loss_fn(model(inputs)).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    with HookTracker(model) as tracker:
        tracker.start(loss_fn(model(inputs))).backward()  # type: ignore[no-untyped-call]
    rows = tracker.rows
    comms.print(tracker)
    mine = [row.name for row in rows if row.order is not None]
    orders = [", ".join(order) for order in comms.all_gather_data(mine)]
    usual, odd = odd_ranks(orders)
    if odd:
        raise RuntimeError(
            f"rank {comms.rank}: expected gradients in the same order on every rank, got another "
            f"one on {name_ranks(odd)}: {orders[odd[0]]}; on the others {usual}"
        )
    return rows
