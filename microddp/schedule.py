"""One training step, and the ways in which its gradients are averaged: the table ``STRATEGIES``.

A step is the same whatever averages: forget the gradients, forward, backward, have the averages,
update. What differs is behind :class:`Strategy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.allreduce import AUTO
from microddp.bucketing import BucketedDDPHooks, bucket_caps, plan_in_order
from microddp.comms import Comms
from microddp.compression import Compression, hook, reduced_bytes
from microddp.ddp import DDP
from microddp.hooks import AllReduceHooks, bytes_held
from microddp.local_sgd import LocalSteps
from microddp.model import gradient_bytes
from microddp.parts import from_torch, load_parts, whole_state
from microddp.sharding import Averages, Block, ShardedGradients, shard_blocks
from microddp.timing import NOT_RECORDED, Recorder, TorchDDPWatch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Hooks = AllReduceHooks | BucketedDDPHooks
FULL_PRECISION = nullcontext()


def take_step(
    strategy: Strategy,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[torch.Tensor],
    *,
    parts: int = 1,
    share: float | None = None,
    autocast: AbstractContextManager[object] = FULL_PRECISION,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """Train one step.

    Args:
        strategy: holds this rank's replica, averages its gradients, and knows who records.
        loss_fn: from outputs and targets to a scalar, the mean over the samples.
        optimizer: of the replica's parameters.
        batch: inputs and targets of this rank's shard, on its device.
        parts: parts in which the shard is computed, one by one, with one average.
        share: samples that a rank would have if shards were equal. Where they are not, each sample
            then counts as much as any other; by default this shard has as many.
        autocast: the precision of forward.
        scaler: of the loss, where the precision needs it.

    Returns:
        The loss on this rank's shard, a detached scalar, taken before the step; its mean over the
        ranks is that over the batch.

    Raises:
        RuntimeError: a parameter got no gradient, another rank failed, or the time-out passed.
    """
    optimizer.zero_grad()
    loss = compute_gradients(
        strategy, loss_fn, batch, parts=parts, share=share, autocast=autocast, scaler=scaler
    )
    apply_gradients(strategy, optimizer, scaler)
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
    """Forward and backward, until the gradients are averages; they add to those there are.

    Arguments, result and errors are those of :func:`take_step`. The gradients are those of the
    loss as the scaler scales it.
    """
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
    """How the gradients of one model become averages over the ranks: here, not at all.

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
        averages: whether anything is sent at all.
        overlaps: whether gradients are sent while backward goes on.
        buckets: whether they travel together.
        replicas: whether each rank keeps everything; else a part of something.
        compression: what is kept back of them, where less than the gradients is sent.
        timeline: records phases, collectives, and the wait for them.
    """

    averages: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False
    buckets: ClassVar[bool] = False
    replicas: ClassVar[bool] = True

    def __init__(self, model: nn.Module, comms: Comms, bucket_cap_mb: float | None = None) -> None:
        del bucket_cap_mb
        self.module = model
        self.comms = comms
        self.compression: Compression | None = None
        self.timeline: Recorder = NOT_RECORDED

    def compress(self, name: str) -> None:
        """Send less than the gradients from now on. A collective.

        Args:
            name: as for :func:`microddp.compression.compressor`.

        Raises:
            ValueError: there is none of that name, or no wrapper that would take its hook.
        """
        if not isinstance(self.module, (DDP, TorchDDP)):
            raise ValueError(
                f"rank {self.comms.rank}: expected a wrapper to compress what it sends, got "
                f"{type(self).__name__}"
            )
        self.compression, function = hook(name, self.comms)
        self.module.register_comm_hook(self.compression, function)

    def record(self, timeline: Recorder) -> None:
        """Record phases, collectives, and the wait for them, from now on."""
        self.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the forward and backward passes of the block add to this rank's own gradients."""
        return nullcontext()

    def finish(self) -> None:
        """Return when all gradients are averaged."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Expect an optimizer that updates what it should."""

    def share_overflow(self) -> None:
        """Let all ranks see a gradient that is not finite. Averages are the same on all."""

    def after_step(self) -> None:
        """Return when the weights may be used for the next step."""

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer is to update."""
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
        return reduced_bytes(size, self.comms.world_size)

    def remove(self) -> None:
        """Leave the model as it was."""

    @classmethod
    def plan(
        cls, model: nn.Module, arrival: Sequence[int], bucket_cap_mb: float | None
    ) -> list[list[int]]:
        """Which gradients travel together, in the order of sending.

        Args:
            model: its parameters that require gradients, in their order, are meant by number.
            arrival: the order in which their gradients come.
            bucket_cap_mb: as above.
        """
        if not cls.averages:
            return []
        order = arrival if cls.overlaps else sorted(arrival)
        if cls.buckets:
            return plan_in_order(model, order, bucket_caps(bucket_cap_mb))
        return [[i] for i in order]


class Naive(Strategy):
    """One by one, after backward."""

    averages = True

    def finish(self) -> None:
        average_gradients(self.module, self.comms, self.timeline)


class Hooked(Strategy):
    """One by one during backward, each as soon as it is ready."""

    averages = overlaps = True

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        super().__init__(model, comms)
        self.hooks = hooks or self._hooks(bucket_cap_mb)

    def _hooks(self, bucket_cap_mb: float | None) -> Hooks:
        del bucket_cap_mb
        return AllReduceHooks(self.module, self.comms)

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        self.hooks.record(timeline)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.hooks.no_sync()

    def finish(self) -> None:
        self.hooks.finish()

    def remove(self) -> None:
        self.hooks.remove()


class Bucketed(Hooked):
    """In buckets during backward, from the last parameter to the first."""

    buckets = True

    def _hooks(self, bucket_cap_mb: float | None) -> Hooks:
        return BucketedDDPHooks(self.module, self.comms, bucket_cap_mb)

    @classmethod
    def plan(
        cls, model: nn.Module, arrival: Sequence[int], bucket_cap_mb: float | None
    ) -> list[list[int]]:
        return super().plan(model, sorted(arrival, reverse=True), bucket_cap_mb)


class Wrapped(Strategy):
    """In buckets during backward, by the book's own wrapper.

    The end of backward waits. The model may be wrapped already.
    """

    averages = overlaps = buckets = True

    def __init__(self, model: nn.Module, comms: Comms, bucket_cap_mb: float | None = None) -> None:
        super().__init__(model, comms)
        ddp = model if isinstance(model, DDP) else DDP(model, comms, bucket_cap_mb=bucket_cap_mb)
        self.ddp = self.module = ddp
        self.timeline = ddp.reducer.buckets.timeline

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        self.ddp.reducer.buckets.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def remove(self) -> None:
        self.ddp.reducer.remove()


class WrappedByTorch(Strategy):
    """In buckets during backward, by PyTorch's DDP, with gradients that are views of its buckets.

    The end of backward waits. The model may be wrapped already.
    """

    averages = overlaps = buckets = True

    def __init__(self, model: nn.Module, comms: Comms, bucket_cap_mb: float | None = None) -> None:
        super().__init__(model, comms)
        if not isinstance(model, TorchDDP):
            model = TorchDDP(
                model,
                process_group=comms.group,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,
            )
        self.ddp = self.module = model
        self._watch: TorchDDPWatch | None = None

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        if self._watch:
            self._watch.remove()
        # A watch takes time of its own: only while somebody looks.
        self._watch = None if timeline is NOT_RECORDED else TorchDDPWatch(self.ddp, timeline)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def finish(self) -> None:
        if self._watch:
            self._watch.finish()


class Local(Strategy):
    """Not at all: each rank trains by itself, and at times the weights are averaged.

    Args:
        model: this rank's replica.
        comms: the ranks that share the weights.
        local: brings them together; in its warm-up gradients are averaged, one by one.
    """

    averages = True

    def __init__(self, model: nn.Module, comms: Comms, local: LocalSteps) -> None:
        super().__init__(model, comms)
        self.local = local

    def finish(self) -> None:
        if self.local.warming_up:
            average_gradients(self.module, self.comms, self.timeline)

    def after_step(self) -> None:
        with self.timeline.span("wait for weights", lane="wait"):
            self.local.after_step()

    def meet(self) -> None:
        self.local.meet()

    def sent_bytes(self) -> float:
        return super().sent_bytes() / self.local.every


class Sharded(Strategy):
    """Each rank has a part: of the optimizer's state, of gradients and parameters.

    Args:
        model: this rank's replica.
        comms: the ranks.
        bucket_cap_mb: as for all strategies.
        carrier: of the halves of an all-reduce, a key of ``microddp.allreduce.HALVES``, or
            ``"auto"``.

    Attributes:
        sharded: what cuts it into parts.
        parted: what is cut.
    """

    averages = overlaps = buckets = True
    replicas = False
    parted: Averages
    sharded: ShardedGradients | Block

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        for unit in self.parted.units:
            unit.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sharded.no_sync()

    def remove(self) -> None:
        self.sharded.remove()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for p in self.parameters()}
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in mine for p in given):
            raise ValueError(
                f"rank {self.comms.rank}: expected an optimizer of the strategy's parameters(), "
                "which are this rank's parts, got one of other tensors"
            )

    def share_overflow(self) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None and p.numel()]
        worst = torch.zeros((), device=self.comms.device)
        for gradient in gradients:
            worst += (~gradient.isfinite()).any()
        self.comms.all_reduce(worst)
        if worst:
            for gradient in gradients:
                gradient.fill_(torch.inf)

    def state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return whole_state(self.parted.pieces, self.comms, model, optimizer)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        parts = from_torch(model, state["model"], state["optimizer"])
        load_parts(self.parted.pieces, self.comms, [parts], optimizer)


class Zero2(Sharded):
    """ZeRO's stage 2: gradients and the optimizer's state in parts, an n-th on each rank."""

    keep_gradients: ClassVar[bool] = False
    sharded: ShardedGradients

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        carrier: str = AUTO,
    ) -> None:
        super().__init__(model, comms)
        self.sharded = self.parted = ShardedGradients(
            model, comms, bucket_cap_mb, keep_gradients=self.keep_gradients, carrier=carrier
        )

    def finish(self) -> None:
        self.sharded.finish()

    def after_step(self) -> None:
        self.sharded.gather_in_forward()

    def meet(self) -> None:
        self.sharded.gather()

    def parameters(self) -> list[nn.Parameter]:
        return self.sharded.shards

    @classmethod
    def plan(
        cls, model: nn.Module, arrival: Sequence[int], bucket_cap_mb: float | None
    ) -> list[list[int]]:
        return super().plan(model, sorted(arrival, reverse=True), bucket_cap_mb)


class Zero1(Zero2):
    """ZeRO's stage 1: the optimizer's state in parts. Gradients keep their memory."""

    keep_gradients = True


class Zero3(Sharded):
    """ZeRO's stage 3: parameters in parts, too, which are whole while they are used.

    The blocks are the large elements of the model's lists. The cap of a bucket means nothing here.
    """

    sharded: Block

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        carrier: str = AUTO,
    ) -> None:
        del bucket_cap_mb
        super().__init__(model, comms)
        self.sharded = shard_blocks(model, comms, carrier=carrier)
        self.parted = self.sharded.course

    def sent_bytes(self) -> float:
        stay = {  # from forward to backward
            unit for block in self.sharded.course.blocks for unit in block.units if block.stays
        }
        others = self.comms.world_size - 1
        return float(
            sum(
                others * unit.part * unit.whole.itemsize * (2 + (unit not in stay))
                for unit in self.parted.units
            )
        )


STRATEGIES: dict[str, type[Strategy]] = {
    "none": Strategy,
    "naive": Naive,
    "hooks": Hooked,
    "bucketed": Bucketed,
    "ddp": Wrapped,
    "torch": WrappedByTorch,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
}


def strategy_of(model: nn.Module | Strategy, comms: Comms) -> Strategy:
    """The strategy that a model has: a wrapper's own, or none."""
    if isinstance(model, Strategy):
        return model
    kind = Wrapped if isinstance(model, DDP) else Strategy
    return (WrappedByTorch if isinstance(model, TorchDDP) else kind)(model, comms)


# ---- the steps of the book's chapters, by the names of what they do


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

    Arguments, result and errors are those of :func:`take_step`, with the ranks that share the
    step, and a timeline that records its spans.
    """
    strategy = Naive(model, comms)
    strategy.record(timeline)
    return take_step(strategy, loss_fn, optimizer, batch)


def average_gradients(model: nn.Module, comms: Comms, timeline: Recorder = NOT_RECORDED) -> None:
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
    with timeline.span("wait for gradients", lane="wait"):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                nbytes = bytes_held(parameter.grad)
                with timeline.span(f"all-reduce {name}", "communication", nbytes):
                    comms.all_reduce_mean(parameter.grad)


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

    Arguments, result and errors are those of :func:`take_step`, with the ``hooks`` that
    :func:`register_ddp_hooks` returned.
    """
    strategy = Hooked(model, hooks.comms, hooks=hooks)
    strategy.timeline = timeline  # of the phases; the hooks have been told of theirs
    return take_step(strategy, loss_fn, optimizer, batch)
