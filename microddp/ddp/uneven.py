"""Ranks with different numbers of batches: who has run out shadows the others' collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from microddp.comms import Comms
from microddp.replicas import broadcast_tensors


class _Shadow(JoinHook):
    """Work of a rank that has run out of batches, in each iteration of the others and after."""

    def __init__(self, wrapper: Any) -> None:  # the DistributedDataParallel, which imports this
        self.wrapper = wrapper

    def main_hook(self) -> None:
        """Shadow one iteration."""
        self.wrapper.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make all replicas those of a rank that trained to the end."""
        wrapper = self.wrapper
        src = wrapper._highest(wrapper.comms.rank if is_last_joiner else -1)
        buffers = wrapper.module.buffers() if wrapper.forward_sync_buffers else ()
        broadcast_tensors([*wrapper.module.parameters(), *buffers], wrapper.comms, src)
        disabled = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        wrapper._join_config = disabled


class UnevenInputs(Joinable):
    """A wrapper whose ranks may run out of batches one after the other.

    Attributes:
        comms: the ranks that train together.
    """

    comms: Comms

    def __init__(self) -> None:
        super().__init__()
        self._divide_by_all = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of batches, all to train on.

        Args:
            divide_by_initial_world_size: a rank without a batch counts with gradients of zero;
                else the mean is over the ranks that still have one.
            enable: off if the inputs are known to be even.
            throw_on_early_termination: raise on every rank as soon as one has run out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Make the hook that :class:`torch.distributed.algorithms.Join` calls on such ranks."""
        self._divide_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the join context's own messages."""
        return self.comms.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Group that the join context's own messages go to."""
        return self.comms.group

    def _divisor(self, joined: dist.Work | None) -> int:
        """Number of ranks over which the next backward takes the mean."""
        if joined is None or self._divide_by_all:
            return self.comms.world_size
        return int(joined.get_future().wait()[0].item())

    def _highest(self, mine: int) -> int:
        """The highest number of all ranks, those that shadow included. A collective."""
        wire = torch.tensor([mine], device=self.comms.device)
        self.comms.all_reduce(wire, "max")
        return int(wire.item())
