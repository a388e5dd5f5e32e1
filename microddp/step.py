"""One training step: forget the gradients, forward, backward, have the averages, update.

The step is the same however gradients are averaged. What differs is behind :class:`Strategy`; the
strategies are in :mod:`microddp.strategies`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, TypedDict, Unpack

import torch
from torch import nn

from microddp.allreduce import ring_cost
from microddp.comms import Comms
from microddp.model import gradient_bytes
from microddp.timing import NOT_RECORDED, Recorder

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FULL_PRECISION = nullcontext()


class StepOptions(TypedDict, total=False):
    """Optional arguments of :func:`compute_gradients`, which :func:`take_step` passes on."""

    parts: int
    share: float | None
    autocast: AbstractContextManager[object]
    scaler: torch.amp.GradScaler | None


class Compressed(Protocol):
    """Compressed gradients: what is not sent in this step is kept for later ones."""

    def sent_bytes(self) -> float:
        """Bytes that a rank sent in the last step."""
        ...

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Gradients of a module that the ranks keep back, of all of them. A collective."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Go on from what was kept back."""
        ...


def take_step(
    strategy: Strategy,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[torch.Tensor],
    **options: Unpack[StepOptions],
) -> torch.Tensor:
    """Train one step.

    Args:
        strategy: holds this rank's replica, averages its gradients, and knows who records.
        loss_fn: from outputs and targets to a scalar, the mean over the samples.
        optimizer: of the replica's parameters.
        batch: inputs and targets of this rank's shard, on its device.
        options: ``parts``, ``share``, ``autocast`` and ``scaler`` of :func:`compute_gradients`.

    Returns:
        The detached loss on this rank's shard before the step; the ranks' mean is the batch's.

    Raises:
        ValueError: ``parts`` is below 1, or above the samples of this rank's shard.
        RuntimeError: a parameter got no gradient, another rank failed, or the time-out passed.
    """
    strategy.zero_grad(optimizer)
    loss = compute_gradients(strategy, loss_fn, batch, **options)
    apply_gradients(strategy, optimizer, options.get("scaler"))
    return loss


def compute_gradients(
    strategy: Strategy,
    loss_fn: Loss,
    batch: Sequence[torch.Tensor],
    *,
    parts: int = 1,
    share: float | None = None,
    autocast: AbstractContextManager[object] = FULL_PRECISION,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """Run forward and backward, and average the gradients, which add to those in ``.grad``.

    Other arguments, result and errors are those of :func:`take_step`.

    Args:
        parts: parts in which the shard is computed, one by one, with one average.
        share: samples that a rank would have if shards were equal; pass it where they are not, so
            that every sample counts the same. Default: the size of this shard.
        autocast: the precision of forward.
        scaler: scales the loss, and so the gradients, where the precision needs it.
    """
    if not 0 < parts <= len(batch[0]):
        raise ValueError(
            f"rank {strategy.comms.rank}: expected parts of at least a sample each, got {parts} of "
            f"{len(batch[0])} samples"
        )
    losses = []
    timeline = strategy.timeline
    micro_batches = list(zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True))
    whole = share or len(batch[0])
    for i, (inputs, targets) in enumerate(micro_batches, start=1):
        with nullcontext() if i == len(micro_batches) else strategy.no_sync():
            with timeline.span("forward"), autocast:
                loss = loss_fn(strategy.module(inputs), targets)
                if len(inputs) != whole:  # a mean of fewer or more samples than the others'
                    loss = loss / (whole / len(inputs))
            with timeline.span("backward"):
                (scaler.scale(loss) if scaler else loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    strategy.finish()
    return functools.reduce(torch.add, losses)


def apply_gradients(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Update the weights by gradients that are averages, and end the step.

    Arguments are those of :func:`take_step`.
    """
    strategy.check_optimizer(optimizer)
    with strategy.timeline.span("optimizer"):
        if scaler is None:
            optimizer.step()
        else:  # all ranks see the same overflow, and skip together
            if scaler.is_enabled():
                strategy.share_overflow()
            scaler.step(optimizer)
            scaler.update()
    strategy.after_step()


class Strategy:
    """A way in which one model's gradients are averaged over the ranks: here, not at all.

    A step runs each forward pass through ``module``, all but the last within :meth:`no_sync`, calls
    ``backward()`` on each loss, then :meth:`finish`, and after the optimizer's step
    :meth:`after_step`.

    Args:
        model: this rank's replica.
        comms: the ranks that share the gradients.
        bucket_cap_mb: size of a bucket in MiB, where there are any; equal caps make equal buckets
            whatever the strategy. ``None``: 25, after a first one of 1.

    Attributes:
        module: the model, or the wrapper around it.
        averages: True if gradients are averaged in each step.
        overlaps: True if gradients are sent while backward goes on.
        buckets: True if gradients travel together.
        replicas: True if every rank holds the whole model, with the same values after each step.
        stage: ZeRO's: from 1 on the optimizer's state is kept in parts, from 2 on gradients, and in
            3 parameters; 0: nothing is.
        slices: True if these parts are cut without regard to where a parameter begins.
        in_nodes: True if these parts are those of a node's ranks, and each node has all of them.
        copies: of the parameters that are kept besides, as of what is averaged later.
        compression: what keeps back the part of gradients that is not sent; ``None`` if all is.
        timeline: records phases, collectives, and the wait for them.
    """

    averages: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False
    buckets: ClassVar[bool] = False
    replicas: ClassVar[bool] = True
    stage: ClassVar[int] = 0
    slices: ClassVar[bool] = False
    in_nodes: ClassVar[bool] = False
    copies: ClassVar[int] = 0

    def __init__(self, model: nn.Module, comms: Comms, bucket_cap_mb: float | None = None) -> None:
        del bucket_cap_mb
        self.module = model
        self.comms = comms
        self.compression: Compressed | None = None
        self.timeline: Recorder = NOT_RECORDED

    def record(self, timeline: Recorder) -> None:
        """Record phases, collectives, and the wait for them, from now on."""
        self.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the forward and backward passes of the block add to this rank's own gradients."""
        return nullcontext()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget all gradients, those of a backward that raised included."""
        optimizer.zero_grad()

    def finish(self) -> None:
        """Return when all gradients are averaged."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Expect an optimizer that updates what it should."""

    def share_overflow(self) -> None:
        """Let all ranks see a gradient that is not finite. Averages are the same on all."""

    def after_step(self) -> None:
        """Return when the weights may be used for the next step."""

    def parameters(self) -> list[nn.Parameter]:
        """The parameters for an optimizer to update."""
        return list(self.module.parameters())

    def state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state dictionaries of the model and of an optimizer of all its parameters.

        Where the ranks have parts, a collective; on rank 0 they are whole.

        Args:
            model: that this is the strategy of.
            optimizer: of ``parameters()``.
        """
        return model.state_dict(), optimizer.state_dict()

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Let an optimizer go on from a state.

        Args:
            model: has the state's weights already.
            optimizer: of ``parameters()``.
            state: with ``"model"`` and ``"optimizer"`` of ``state()``, of any strategy.
        """
        del model
        optimizer.load_state_dict(state["optimizer"])

    def meet(self) -> None:
        """Return when all ranks have the same weights. A collective."""

    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step, by formula: the mean over ranks, and over steps.

        If gradients are compressed, those of the last step.
        """
        if self.compression is not None:
            return self.compression.sent_bytes()
        size = gradient_bytes(self.module) if self.averages else 0
        return ring_cost(self.comms.world_size, size).most_sent

    def remove(self) -> None:
        """Leave the model as it was."""
