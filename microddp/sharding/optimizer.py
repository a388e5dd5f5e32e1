"""ZeRO 1 as an optimizer: it updates this rank's shard, and the ranks exchange the results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from microddp.comms import Comms
from microddp.sharding.param_group import FlatParamGroup, flat_param_groups
from microddp.shared import AUTO, scatter_gather


class ShardedOptimizer:
    """Any elementwise optimizer, on this rank's shard of the parameters: ZeRO 1.

    It takes the place of an ordinary optimizer. Gradients must be averaged before :meth:`step`, by
    :class:`~microddp.ddp.wrapper.DistributedDataParallel` for example. Each rank then updates an
    n-th of all values, and an all-gather brings the results to all ranks. The optimizer's state,
    with Adam two moments a value, exists for that n-th only.

    A parameter without a gradient is left alone. The counterpart in PyTorch is
    ``ZeroRedundancyOptimizer``.

    Args:
        optimizer_class: an optimizer that treats each value by itself, as SGD, Adam and AdamW do.
        parameters: parameters or groups of them, as for any optimizer; equal on all ranks. The
            parameters of a group become views of one flat tensor for each dtype.
        comms: the ranks.
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.
        options: keyword arguments of the optimizer.

    Attributes:
        optimizer: the optimizer of this rank's shards.

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.1.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        comms: Comms,
        collectives: str = AUTO,
        **options: Any,
    ) -> None:
        by = scatter_gather(collectives, comms)
        self.flat_groups: list[FlatParamGroup] = []
        self.optimizer = optimizer_class(parameters, **options)
        for group in self.optimizer.param_groups:
            named = {str(i): p for i, p in enumerate(group["params"])}
            flat = flat_param_groups(named, comms, by)
            group["params"] = [param.sharded_param for each in flat for param in each.params]
            self.flat_groups += flat

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, for schedules of the learning rate."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Set all gradients to ``None``."""
        for group in self.flat_groups:
            for param in group.params:
                param.parameter.grad = param.sharded_param.grad = None

    def step(self) -> None:
        """Update all parameters by their averaged gradients. A collective."""
        for group in self.flat_groups:
            for param in group.local_params:
                param.sharded_param.grad = None
                if param.parameter.grad is not None:
                    param.add_gradient(param.parameter.grad.flatten()[param.param_range])
        self.optimizer.step()
        for group in self.flat_groups:
            group.unshard()
            group.wait_for_unshard()
