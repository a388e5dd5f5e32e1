"""ZeRO 1 and 2: parameters are whole on every rank, gradients and optimizer state are sharded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from microddp.buckets import bucket_caps, plan_buckets
from microddp.comms import Comms
from microddp.replicas import broadcast_parameters
from microddp.sharding.blocks import check_alike, check_dense, elements
from microddp.sharding.param_group import FlatParamGroup, ShardedParam
from microddp.sharding.reducer import ShardedReducer
from microddp.shared import AUTO, scatter_gather


class ShardedGradients(ShardedReducer):
    """Averages a module's gradients so that each rank gets its shard of the mean only.

    Backward fills flat parameter groups with gradients, and a group whose gradients are all there
    is reduce-scattered while backward goes on. Build an optimizer of ``shards``, call
    :meth:`finish` after backward, and after the optimizer's step :meth:`all_gather` or
    :meth:`all_gather_in_forward`. Bytes that a rank sends in a step: (n-1)/n S of gradients, and as
    many of parameters. Several backwards may come before :meth:`finish` if each reaches the same
    groups on every rank.

    The optimizer may be any that treats each value by itself (SGD, Adam, AdamW). A parameter that
    got no gradient on any rank has a mean of zero.

    Args:
        module: at construction its parameters become those of rank 0, and those that require
            gradients become views of flat tensors.
        comms: the ranks.
        bucket_cap_mb: size of a group in MiB, as for a bucket; ``None``: 25, after a first one of
            1.
        keep_gradients: whether the flat tensors of gradients stay until the means are set to
            ``None`` (ZeRO 1), or are freed as soon as a rank has its shard (ZeRO 2).
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.

    Attributes:
        groups: in the order in which they are reduced, that of backward.

    Raises:
        ValueError: on every rank: a gradient would be sparse, the cap is not positive or not
            finite, or ``collectives`` is unknown.
        RuntimeError: on every rank: the ranks' parameters differ in number, shape or dtype, or
            their options differ.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        *,
        keep_gradients: bool = False,
        collectives: str = AUTO,
    ) -> None:
        check_dense(module, comms)
        options = {"keep_gradients": keep_gradients, "collectives": collectives}
        check_alike(module, comms, bucket_cap_mb, **options)
        broadcast_parameters(module, comms)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
        plan = plan_buckets([p for _, p in named], bucket_caps(bucket_cap_mb))
        by = scatter_gather(collectives, comms)
        super().__init__(
            FlatParamGroup(dict(named[i] for i in bucket), comms, by, keep_gradients=keep_gradients)
            for bucket in plan
        )
        self.forget()
        self._stale = False  # whether the next forward must all-gather the parameters
        self._handles: list[Any] = [
            p.parameter.register_post_accumulate_grad_hook(partial(self._ready, group, p))  # type: ignore[no-untyped-call]
            for group in self.groups
            for p in group.params
        ]
        # Each element of a list waits for the groups of its parameters, the module for all others.
        group_of = {param.parameter: group for group in self.groups for param in group.params}
        blocks = elements(module)
        outside = [p for _, m in module.named_modules({*blocks}) for p in m.parameters(False)]
        for waits, its in [(module, outside), *((block, block.parameters()) for block in blocks)]:
            groups = list(filter(None, dict.fromkeys(map(group_of.get, its))))
            self._handles.append(waits.register_forward_pre_hook(partial(self._unshard, groups)))

    def forget(self) -> None:
        """Forget gradients that were not reduced, and the means of a backward that raised."""
        super().forget()
        for param in self.params:
            param.parameter.grad = None
        self._expected = deque(self.groups)  # not reduced yet, in one order on every rank
        self._missing = {group: set(group.params) for group in self.groups}

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's shard of each parameter, for an optimizer; empty where it has no value."""
        return [param.sharded_param for param in self.params]

    def _ready(self, group: FlatParamGroup, param: ShardedParam, parameter: torch.Tensor) -> None:
        if not self.armed or parameter.grad is None:
            return
        group.timeline.mark(param.name)
        self._missing[group].discard(param)
        if group not in self._expected:  # its gradients come in several portions
            self._expected.append(group)
        while self._expected and not self._missing[self._expected[0]]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        group = self._expected.popleft()
        self._missing[group].update(group.params)
        self.reduce(group)

    def finish(self) -> None:
        """Reduce the groups that are left, and wait for all means. A collective."""
        while self._expected:
            self._reduce_next()
        self.wait()
        self._expected.extend(self.groups)

    def all_gather(self) -> None:
        """Bring the parameters that other ranks have updated to this one. A collective."""
        self._stale = True
        self._unshard(self.groups)

    def all_gather_in_forward(self) -> None:
        """Let the next forward all-gather the parameters, the first layers' first.

        Each element of a list waits for its own only, when it is called, so the others' travel
        while it computes. Until then its parameters are a mixture of old and new values: a model
        that reads them without calling the element needs :meth:`all_gather`.
        """
        self._stale = True

    def _unshard(self, groups: Sequence[FlatParamGroup], *_: object) -> None:
        for group in reversed(self.groups) if self._stale else ():  # in the order of forward
            group.unshard()
        self._stale = False
        for group in groups:
            group.wait_for_unshard()

    def remove(self) -> None:
        """Bring all parameters up to date, and take the hooks off the module. A collective."""
        self._unshard(self.groups)
        super().remove()
