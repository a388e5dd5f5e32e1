"""Sharding as strategies of a step: ZeRO's stages 1 to 3, and stage 3 by nodes (HSDP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from microddp.allreduce import ring_cost
from microddp.buckets import bucket_caps
from microddp.comms import Comms
from microddp.parts import ParamShard, from_torch, load_parts, whole_state
from microddp.program import Program
from microddp.replicas import broadcast_parameters
from microddp.sharding.blocks import check_alike, check_dense
from microddp.sharding.fully_shard import shard_blocks
from microddp.sharding.gradients import ShardedGradients
from microddp.sharding.nodes import nodes_of
from microddp.sharding.owned import owned_groups, owners, together
from microddp.sharding.reducer import ShardedReducer
from microddp.sharding.sharded_module import ShardedModule
from microddp.shared import AUTO
from microddp.step import Strategy
from microddp.strategies import register
from microddp.timing import Recorder


class Sharded(Strategy):
    """Base of ZeRO's stages: each rank has a shard of optimizer state, gradients or parameters.

    Args:
        model: this rank's replica.
        comms: the ranks.
        bucket_cap_mb: size of a bucket in MiB, as for all strategies.
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.

    Attributes:
        inside: the ranks among which state is divided.
        sharded: the handle of what shards the model.
        reducer: its flat parameter groups, with the reduce-scatters of their gradients.
    """

    averages = overlaps = buckets = slices = True
    replicas = False
    inside: Comms
    reducer: ShardedReducer
    sharded: ShardedGradients | ShardedModule

    def __init__(self, model: nn.Module, comms: Comms) -> None:
        super().__init__(model, comms)
        self.inside = comms
        # For a rank without values: an optimizer wants a parameter, a loss scaler a gradient.
        self._none = nn.Parameter(torch.zeros(1, 1, device=comms.device))

    @property
    def local_params(self) -> Sequence[ParamShard]:
        """The parameters of which this rank keeps values, and those that have none at all."""
        return self.reducer.local_params

    def record(self, timeline: Recorder) -> None:
        super().record(timeline)
        for group in self.reducer.groups:
            group.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sharded.no_sync()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.reducer.forget()
        super().zero_grad(optimizer)

    def remove(self) -> None:
        self.sharded.remove()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for p in self.parameters()}
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in mine for p in given):
            raise ValueError(
                f"rank {self.comms.rank}: expected an optimizer of the strategy's parameters(), "
                "which are this rank's shards, got one of other tensors"
            )

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        if (count := len(optimizer.param_groups)) != 1:
            raise ValueError(
                f"rank {self.comms.rank}: expected an optimizer with one group of parameters, to "
                f"save or load its whole state, got {count}"
            )

    def parameters(self) -> list[nn.Parameter]:
        own = self.shards()
        return own if any(p.numel() for p in own if p.requires_grad) else [*own, self._none]

    def shards(self) -> list[nn.Parameter]:
        """This rank's shards; some may have no values."""
        return super().parameters()

    def finish(self) -> None:
        self._none.grad = torch.zeros_like(self._none)

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
        self._check_groups(optimizer)
        return whole_state(self.local_params, self.inside, model, optimizer)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        self._check_groups(optimizer)
        (group,), (saved,) = optimizer.param_groups, state["optimizer"]["param_groups"]
        group.update({key: value for key, value in saved.items() if key != "params"})
        parts = from_torch(model, state["model"], state["optimizer"])
        load_parts(self.local_params, self.inside, [parts], optimizer)


@register("zero1")
class Zero1(Sharded):
    """ZeRO 1: the optimizer's state is sharded, an n-th on each rank.

    A model may use an element of its lists only by calling it: see
    :meth:`~microddp.sharding.gradients.ShardedGradients.all_gather_in_forward`.
    """

    stage = 1
    sharded: ShardedGradients

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        collectives: str = AUTO,
    ) -> None:
        super().__init__(model, comms)
        self.sharded = self.reducer = ShardedGradients(
            model, comms, bucket_cap_mb, keep_gradients=self.stage < 2, collectives=collectives
        )

    def finish(self) -> None:
        self.sharded.finish()
        super().finish()

    def after_step(self) -> None:
        self.sharded.all_gather_in_forward()

    def meet(self) -> None:
        self.sharded.all_gather()

    def shards(self) -> list[nn.Parameter]:
        return self.sharded.shards

    @classmethod
    def program(cls, program: Program) -> None:
        """All-gather parameters in forward, reduce-scatter gradients in backward."""
        work, buckets = program.work, program.buckets(cls.overlaps, cls.buckets)
        needed: dict[int, list[int]] = {}
        for bucket in reversed(buckets):
            call = program.start("all_gather", program.padded(bucket, work.parameter_size))
            for place in {place for place, _ in bucket}:
                needed.setdefault(place, []).append(call)
        for i, layer in enumerate(work.layers):
            for call in needed.get(i, ()):
                program.wait(call)
            program.compute(layer.forward)
        for _ in range(program.accumulation - 1):
            program.backward_alone()
            program.forward()
        program.backward(
            buckets,
            "reduce_scatter",
            lambda bucket: program.padded(bucket, work.gradient_size),
            most=1,  # as ShardedReducer
        )
        program.compute(work.optimizer / program.devices)


@register("zero2")
class Zero2(Zero1):
    """ZeRO 2: gradients are sharded, too."""

    stage = 2


@register("zero3")
class Zero3(Sharded):
    """ZeRO 3: parameters are sharded, too, and whole only while they are used.

    The blocks are the large elements of the model's lists. ``bucket_cap_mb`` is not used.
    """

    stage = 3
    sharded: ShardedModule

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        collectives: str = AUTO,
    ) -> None:
        del bucket_cap_mb
        super().__init__(model, comms)
        self._shard(model, collectives)

    def _shard(self, model: nn.Module, collectives: str, replicas: Comms | None = None) -> None:
        self.sharded = shard_blocks(model, self.inside, replicas=replicas, collectives=collectives)
        self.reducer = self.sharded.context

    def sent_bytes(self) -> float:
        kept = {  # from forward to backward
            group
            for module in self.sharded.context.modules
            for group in module.groups
            if not module.reshard_after_forward
        }
        others = self.inside.world_size - 1
        return float(
            sum(
                others
                * (group.shard_numel * group.unsharded.itemsize)
                * (1 + group.requires_grad + (group not in kept))
                for group in self.reducer.groups
            )
        )

    @classmethod
    def program(cls, program: Program) -> None:
        """All-gather each layer while the one before it computes, in forward and in backward."""
        _three_stages(program, program.devices, "all")


@register("hsdp")
class Hsdp(Zero3):
    """ZeRO 3 among the ranks of each node, and averages between the nodes.

    PyTorch calls it HSDP, *hybrid* sharding. Parameters are gathered inside a node only.

    Args:
        model: this rank's replica.
        comms: the ranks.
        bucket_cap_mb: not used.
        collectives: those inside a node, as for all stages.
        node: how many ranks in a row are a node; default: those of each machine.

    Attributes:
        across: the ranks that keep the same shard.

    Raises:
        ValueError: the nodes would have different numbers of ranks.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2.
    """

    in_nodes = True

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        collectives: str = AUTO,
        node: int | None = None,
    ) -> None:
        del bucket_cap_mb
        Sharded.__init__(self, model, comms)
        self.inside, self.across = nodes_of(comms, node)
        self._shard(model, collectives, self.across)

    def sent_bytes(self) -> float:
        shards = sum(group.shard.nbytes for group in self.reducer.groups if group.requires_grad)
        return super().sent_bytes() + ring_cost(self.across.world_size, shards).most_sent

    @classmethod
    def program(cls, program: Program) -> None:
        """As stage 3 inside a node, and each shard is averaged when it was reduced."""
        _three_stages(program, program.node, "node")


@register("owned")
class Owned(Sharded):
    """Each parameter is updated by one rank: for optimizers that need whole matrices, as Muon.

    Gradients are reduced to their owners after backward, and parameters gathered after the
    optimizer's step (:mod:`microddp.sharding.owned`). Its state is kept by the owners.
    """

    stage = 1
    overlaps = slices = False

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        collectives: str = AUTO,
    ) -> None:
        super().__init__(model, comms)
        check_dense(model, comms)
        check_alike(model, comms, bucket_cap_mb, collectives=collectives)
        broadcast_parameters(model, comms)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.groups = owned_groups(trained, comms, bucket_cap_mb, collectives)

    def record(self, timeline: Recorder) -> None:
        Strategy.record(self, timeline)
        for group in self.groups:
            group.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is sent before finish()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        Strategy.zero_grad(self, optimizer)
        self.module.zero_grad()  # the owners' optimizers know the averages only

    def finish(self) -> None:
        reduced = [group.reduce() for group in self.groups]
        for group, mean in zip(self.groups, reduced, strict=True):
            group.take(mean)
        super().finish()

    def after_step(self) -> None:
        for future in [group.gather() for group in self.groups]:
            future.wait()

    @property
    def local_params(self) -> list[ParamShard]:
        return [param for group in self.groups for param in group.owned.values()]

    def shards(self) -> list[nn.Parameter]:
        return [param.sharded_param for param in self.local_params]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.local_params:
            super().check_optimizer(optimizer)

    def remove(self) -> None:
        return  # the model is as it was, but for the place of its parameters in memory

    def sent_bytes(self) -> float:
        padded = sum(group.flat.nbytes for group in self.groups)
        return ring_cost(self.comms.world_size, padded).most_sent

    @classmethod
    def program(cls, program: Program) -> None:
        """Reduce-scatter gradients after backward, and all-gather parameters after the update."""
        program.micro_batches(program.accumulation)
        every = [bucket[0] for bucket in program.buckets(overlaps=True, together=False)]
        nbytes = [count * program.work.gradient_size for _, count in every]
        sizes = []
        for members in together(nbytes, program.devices, bucket_caps(program.bucket_cap_mb)[-1]):
            counts, owned = [every[i][1] for i in members], [0] * program.devices
            for count, rank in zip(counts, owners(counts, program.devices), strict=True):
                owned[rank] += count
            program.copy([every[i] for i in members])
            sizes.append(program.devices * max(owned))
        for half, size in (
            ("reduce_scatter", program.work.gradient_size),
            ("all_gather", program.work.parameter_size),
        ):
            for call in [program.start(half, values * size) for values in sizes]:
                program.wait(call)
            if half == "reduce_scatter":
                program.compute(program.work.optimizer / program.devices)


def _three_stages(program: Program, divided: int, among: str) -> None:
    """Write stage 3 down: each layer is gathered while the one before it computes.

    Args:
        program: to write to.
        divided: among how many devices parameters are divided.
        among: these devices, as in :class:`~microddp.program.Call`. If they are not all, each
            reduced shard is averaged among the replicas.
    """
    work = program.work
    layers = [
        (layer, [(i, count) for count in layer.tensors]) for i, layer in enumerate(work.layers)
    ]
    reduced: list[int] = []
    means: list[int] = []
    for _ in range(program.accumulation):
        for order, phase in ((layers, "forward"), (layers[::-1], "backward")):
            whole = 1 if phase == "backward" else 0  # the last layer stays so since its forward
            gathers = (
                program.start(
                    "all_gather", program.padded(bucket, work.parameter_size, divided), among
                )
                for _, bucket in order[whole:]
            )
            prefetched = next(gathers, None)
            for i, (layer, bucket) in enumerate(order):
                if i >= whole and prefetched is not None:
                    needed, prefetched = prefetched, next(gathers, None)
                    program.wait(needed)
                program.compute(getattr(layer, phase))
                if phase == "backward":
                    program.copy(bucket)
                    size = program.padded(bucket, work.gradient_size, divided)
                    reduced.append(program.start("reduce_scatter", size, among))
                    if among != "all":
                        means.append(
                            program.start("all_reduce", size / divided, "replicas", reduced[-1])
                        )
                    if len(reduced) > 1:  # the next one needs the memory of one before
                        program.wait(reduced[-2])
    for call in means or reduced[-1:]:
        program.wait(call)
    program.compute(work.optimizer / divided)
