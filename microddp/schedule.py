"""One training step, from the least that is right to the fastest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from microddp.bucketing import BucketedDDPHooks
from microddp.comms import Comms
from microddp.hooks import AllReduceHooks
from microddp.timing import Timeline


def naive_data_parallel_step(
    model: nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    comms: Comms,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Train one step: forward and backward on this rank's shard, then average every gradient.

    Communication begins when backward has ended: one all-reduce for each parameter. With equal
    shards, a ``loss_fn`` that takes the mean and equal parameters at the start, the step is the
    one that a single process would take on the whole batch.

    Args:
        model: this rank's replica.
        loss_fn: from outputs and targets to a scalar, the mean over the samples.
        optimizer: of the replica's parameters.
        batch: inputs and targets of this rank's shard, on its device.
        comms: the ranks that share the step.
        timeline: records the phases as spans.

    Returns:
        The loss on this rank's shard, a detached scalar, taken before the step.

    Raises:
        RuntimeError: another rank failed, or the time-out passed.
    """
    span = timeline.span if timeline else _unrecorded
    inputs, targets = batch
    optimizer.zero_grad()
    with span("forward"):
        loss = loss_fn(model(inputs), targets)
    with span("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    average_gradients(model, comms, timeline)
    with span("optimizer"):
        optimizer.step()
    return loss.detach()


def average_gradients(model: nn.Module, comms: Comms, timeline: Timeline | None = None) -> None:
    """Average every gradient of ``model`` over all ranks, one by one.

    The rank computes nothing meanwhile: the timeline shows each all-reduce, and all of them
    together as a wait. Parameters without a gradient are left out; they must be the same ones on
    every rank.

    Args:
        model: this rank's replica, after its backward.
        comms: the ranks that share the gradients.
        timeline: records the all-reduces and the wait for them.

    Raises:
        RuntimeError: another rank failed, or the time-out passed.
    """
    span = timeline.span if timeline else _unrecorded
    with span("wait for gradients", lane="wait"):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                with span(f"all-reduce {name}", lane="communication"):
                    comms.all_reduce_mean(parameter.grad)


def register_ddp_hooks(
    model: nn.Module,
    comms: Comms,
    bucket_size_mb: float | None = None,
    timeline: Timeline | None = None,
) -> AllReduceHooks | BucketedDDPHooks:
    """Have every backward of ``model`` average its gradients over all ranks while it runs.

    Args:
        model: this rank's replica.
        comms: the ranks that share the step.
        bucket_size_mb: MiB of gradients that travel together; ``None``: each travels alone.
        timeline: records gradients, collectives and the wait for them.

    Returns:
        The hooks, for :func:`ddp_step`; their ``remove()`` takes them off again.
    """
    if bucket_size_mb is None:
        return AllReduceHooks(model, comms, timeline=timeline)
    return BucketedDDPHooks(model, comms, bucket_size_mb, timeline=timeline)


def ddp_step(
    model: nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    hooks: AllReduceHooks | BucketedDDPHooks,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Train one step with gradients that are averaged during backward.

    Args and result are those of :func:`naive_data_parallel_step`, with the ``hooks`` that
    :func:`register_ddp_hooks` returned in the place of ``comms``.

    Raises:
        RuntimeError: a parameter got no gradient, another rank failed, or the time-out passed.
    """
    span = timeline.span if timeline else _unrecorded
    inputs, targets = batch
    optimizer.zero_grad()
    with span("forward"):
        loss = loss_fn(model(inputs), targets)
    with span("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    hooks.finish()
    with span("optimizer"):
        optimizer.step()
    return loss.detach()


def _unrecorded(name: str, lane: str = "compute") -> AbstractContextManager[None]:
    del name, lane
    return nullcontext()
