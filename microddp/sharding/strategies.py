"""Sharding as strategies of a step: ZeRO's stages 1 to 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from microddp.comms import Comms
from microddp.parts import from_torch, load_parts, whole_state
from microddp.program import Program
from microddp.sharding.fully_shard import Block, shard_blocks
from microddp.sharding.replicated import ShardedGradients
from microddp.sharding.unit import Averages
from microddp.shared import AUTO
from microddp.step import Strategy
from microddp.strategies import register
from microddp.timing import Recorder


class Sharded(Strategy):
    """Each rank has a part: of the optimizer's state, of gradients and parameters.

    Args:
        model: this rank's replica.
        comms: the ranks.
        bucket_cap_mb: as for all strategies.
        carrier: of the halves of an all-reduce, a key of ``microddp.shared.HALVES``, or
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


@register("zero1")
class Zero1(Sharded):
    """ZeRO's stage 1: the optimizer's state in parts, an n-th on each rank."""

    stage = 1
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
            model, comms, bucket_cap_mb, keep_gradients=self.stage < 2, carrier=carrier
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

    @classmethod
    def program(cls, program: Program) -> None:
        """Parameters are gathered in forward, gradients reduced in backward."""
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
            buckets, "reduce_scatter", lambda bucket: program.padded(bucket, work.gradient_size)
        )
        program.compute(work.optimizer / program.devices)


@register("zero2")
class Zero2(Zero1):
    """ZeRO's stage 2: gradients in parts, too."""

    stage = 2


@register("zero3")
class Zero3(Sharded):
    """ZeRO's stage 3: parameters in parts, too, which are whole while they are used.

    The blocks are the large elements of the model's lists. The cap of a bucket means nothing here.
    """

    stage = 3
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

    @classmethod
    def program(cls, program: Program) -> None:
        """A layer is gathered before its forward and its backward, the next one meanwhile."""
        work = program.work
        layers = [
            (layer, [(i, count) for count in layer.tensors]) for i, layer in enumerate(work.layers)
        ]
        reduced: list[int] = []
        for _ in range(program.accumulation):
            for order, phase in ((layers, "forward"), (layers[::-1], "backward")):
                gathers = (
                    program.start("all_gather", program.padded(bucket, work.parameter_size))
                    for _, bucket in order
                )
                coming = next(gathers)
                for layer, bucket in order:
                    here, coming = coming, next(gathers, coming)
                    program.wait(here)
                    program.compute(getattr(layer, phase))
                    if phase == "backward":
                        program.copy(bucket)
                        size = program.padded(bucket, work.gradient_size)
                        reduced.append(program.start("reduce_scatter", size))
                        if len(reduced) > 1:  # the memory of one is needed for the next
                            program.wait(reduced[-2])
        program.wait(reduced[-1])
        program.compute(work.optimizer / program.devices)
