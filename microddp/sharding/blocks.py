"""Parameters that are whole only while they are used: stage 3.

The phases of a step: a block is gathered before its forward, and released after it, and gathered
again before its backward. When backward comes to a block that forward needed earlier, this one's
is over: it is released, and its gradients are reduce-scattered. Each rank's part of them is handed
to the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from microddp.hooks import tensors_in
from microddp.sharding.unit import Averages, Unit


class Course(Averages):
    """How the blocks of a model follow each other in a step, and the backward under way.

    Autograd computes backward in the opposite order of forward. So what it has passed when it comes
    to a block is the same on every rank, whichever parameters a rank has used, and what is sent
    there is in one order.

    Attributes:
        blocks: the outermost last.
        entered: in the order of this forward.
        before: likewise, of the forward before: what is gathered next.
        inside: those in which forward is now.
        left: in the order in which this forward left them.
        events: forward came to a block or left it, so often until now.
        awaited: whether a forward has been whose backward may come.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = blocks
        self.entered: list[Block] = []
        self.before: list[Block] = []
        self.inside: list[Block] = []
        self.left: list[Block] = []
        self.events = 0
        self._begun: dict[Unit, None] = {}  # backward has come to these, and not passed them
        self.awaited = False
        self._end_is_told = False

    @property
    def units(self) -> list[Unit]:
        """Of all blocks."""
        return list(dict.fromkeys(unit for block in self.blocks for unit in block.units))

    def enter(self, block: Block) -> Block | None:
        """Forward comes to a block; the one that followed it last time."""
        if block is self.blocks[-1] or not self.inside:
            self._begin_forward()
        self.entered.append(block)
        self.inside.append(block)
        for unit in block.units:
            unit.first = min(unit.first, self.tick())
        place = len(self.entered)
        same = self.before[place - 1 : place] == [block]
        return self.before[place] if same and len(self.before) > place else None

    def tick(self) -> int:
        """The number of this event."""
        self.events += 1
        return self.events

    def _begin_forward(self) -> None:
        if self._end_is_told:  # the last backward raised half-way
            for unit in self.units:
                unit.abandon()
            self._on_the_way.clear()
            self._begun.clear()
            self._end_is_told = self.awaited = False
        for unit in self.units:
            unit.release()
            unit.first = unit.first if self.awaited else inf
        self.before, self.entered = self.entered, []
        self.inside, self.left = [], []

    def begin_backward(self, units: Sequence[Unit], left_at: int) -> None:
        """Backward comes to what forward left at an event, and passes what it needed only later."""
        if not self._end_is_told:  # of this backward, or of a nested one
            self._end_is_told = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._pass([unit for unit in self._begun if unit.first > left_at])
        self._begun |= dict.fromkeys(units)

    def _pass(self, units: Sequence[Unit]) -> None:
        for unit in units:
            del self._begun[unit]
            if unit.trains and self.armed:
                self.send(unit)
            unit.release()

    def _end_of_backward(self) -> None:
        self._pass([*self._begun])
        self.settle()
        for unit in self.units:
            unit.release()
        self._end_is_told = self.awaited = False


class Block:
    """A module whose parameters are in parts, but for the time of their use.

    :func:`~microddp.sharding.fully_shard.fully_shard` makes it.

    Args:
        module: whose forward and backward need the units.
        units: of its own parameters, and those of other blocks that it uses.
        reshard_after_forward: whether they are released in between.
        dtype: in which floating point inputs come; default: as they are.

    Attributes:
        course: what it has in common with the other blocks of the model.
        left_at: number of the event at which forward has left it.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        reshard_after_forward: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.module, self.units, self.dtype = module, units, dtype
        self.reshard_after_forward, self.left_at = reshard_after_forward, 0
        inner = [block for m in module.modules() if (block := block_of(m))]
        self.course = Course([*inner, self])
        for block in inner:
            block.course = self.course
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
        ]
        module.__dict__["_microddp_block"] = self

    def no_sync(self) -> AbstractContextManager[None]:
        """Let each backward of the block add to this rank's own gradients, and send none of them.

        They are whole, in the dtype of the gathered parameters, and each rank keeps them until a
        backward outside of the block.
        """
        return self.course.no_sync()

    def remove(self) -> None:
        """Make all parameters whole, for good. A collective."""
        for block in self.course.blocks:
            for handle in block._handles:
                handle.remove()
            del block.module.__dict__["_microddp_block"]
        for unit in self.course.units:
            unit.gather()

    # ---- forward: gathered, used, released

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # In backward a checkpoint computes again.
        self._gather(None if _in_backward() else self.course.enter(self))
        if self.dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, partial(_cast, self.dtype), (args, kwargs))
        return args, kwargs

    def _gather(self, following: Block | None) -> None:
        """Gather this block now; and let the next one come meanwhile."""
        for unit in self.units:
            unit.begin_gather()
        for unit in following.units if following else ():
            if not unit.halves.at_once:
                unit.begin_gather()
        for unit in self.units:
            unit.arrive()

    def _after_forward(self, _: nn.Module, args: object, output: Any) -> None:
        del args
        course, again, following = self.course, _in_backward(), None
        if not again:
            following = course.left[-1] if course.left else None
            course.left.append(self)
            course.inside.remove(self)
            self.left_at = course.tick()
        leaves = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for leaf in leaves:
            course.awaited = True
            leaf.register_hook(  # type: ignore[no-untyped-call]
                partial(self._before_backward, self.left_at, following)
            )
        if again or (leaves and not self.reshard_after_forward):
            return
        for unit in self.units:
            if not any(unit in block.units for block in course.inside):
                unit.release()

    # ---- backward: gathered, and released where it comes to what was needed earlier

    def _before_backward(self, left_at: int, following: Block | None, _: torch.Tensor) -> None:
        self.course.begin_backward(self.units, left_at)
        self._gather(following)


def block_of(module: nn.Module) -> Block | None:
    """What a module is sharded by, itself."""
    block: Block | None = module.__dict__.get("_microddp_block")
    return block


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
