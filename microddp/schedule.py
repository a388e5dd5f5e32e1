"""The steps that the book's chapters build, by the names of what they do."""

from __future__ import annotations

import torch
from torch import nn

from microddp.bucketing import BucketedDDPHooks
from microddp.comms import Comms
from microddp.hooks import AllReduceHooks
from microddp.step import Loss, take_step
from microddp.strategies import Hooked, Hooks, Naive
from microddp.timing import NOT_RECORDED, Recorder


def naive_data_parallel_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    comms: Comms,
    timeline: Recorder = NOT_RECORDED,
) -> torch.Tensor:
    """Train one step: forward and backward on this rank's shard, then average every gradient.

    Communication begins when backward has ended: one all-reduce for each parameter. With equal
    shards, a ``loss_fn`` that takes the mean and equal parameters at the start, the step is the
    one that a single process would take on the whole batch.

    Arguments, result and errors are those of :func:`~microddp.step.take_step`, with the ranks that
    share the step, and a timeline that records its spans.
    """
    strategy = Naive(model, comms)
    strategy.record(timeline)
    return take_step(strategy, loss_fn, optimizer, batch)


def register_ddp_hooks(
    model: nn.Module,
    comms: Comms,
    bucket_cap_mb: float | None = None,
    timeline: Recorder = NOT_RECORDED,
) -> Hooks:
    """Have every backward of ``model`` average its gradients over all ranks while it runs.

    Args:
        model: this rank's replica.
        comms: the ranks that share the step.
        bucket_cap_mb: MiB of gradients that travel together; ``None``: each travels alone.
        timeline: records gradients, collectives and the wait for them.

    Returns:
        The hooks, for :func:`ddp_step`; their ``remove()`` takes them off again.
    """
    if bucket_cap_mb is None:
        return AllReduceHooks(model, comms, timeline=timeline)
    return BucketedDDPHooks(model, comms, bucket_cap_mb, timeline=timeline)


def ddp_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    hooks: Hooks,
    timeline: Recorder = NOT_RECORDED,
) -> torch.Tensor:
    """Train one step with gradients that are averaged during backward.

    Arguments, result and errors are those of :func:`~microddp.step.take_step`, with the ``hooks``
    that :func:`register_ddp_hooks` returned.
    """
    strategy = Hooked(model, hooks.comms, hooks=hooks)
    strategy.timeline = timeline  # of the phases; the hooks have been told of theirs
    return take_step(strategy, loss_fn, optimizer, batch)
