"""Parameters that are whole only while they are used: stage 3.

The phases of a step: a block is gathered before its forward, and released after it; gathered again
before its backward; its gradients are brought together as they come, and with the last one it is
released and they are reduce-scattered; at the end of backward each rank's part of them is handed to
the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from microddp.hooks import Switchable
from microddp.sharding.unit import Unit
from microddp.timing import Recorder


class Course(Switchable):
    """How the blocks of a model follow each other in a step, and the backward under way.

    Attributes:
        blocks: the outermost last.
        entered: in the order of this forward.
        before: likewise, of the forward before: what is gathered next.
        left: in the order in which this forward left them; backward comes in the opposite one.
        depth: how many of them forward is inside of.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.entered: list[Block] = []
        self.before: list[Block] = []
        self.left: list[Block] = []
        self.depth = 0
        self._reducing: deque[Unit] = deque()
        # Of this backward, that are not reduced: it has come to their blocks, on every rank.
        self._expected: dict[Unit, None] = {}
        self._end_is_told = False

    @property
    def units(self) -> list[Unit]:
        """Of all blocks."""
        return list(dict.fromkeys(unit for block in self.blocks for unit in block.units))

    def begin_forward(self) -> None:
        """Begin a step, or another forward of it."""
        if self._end_is_told:  # the last backward raised half-way
            self._end_is_told = False
            for unit in self.units:
                unit.finish()
                unit.forget()
            self._reducing.clear()
            self._expected.clear()
        for unit in self.units:
            unit.users = 0
            unit.release()
        self.before, self.entered, self.left, self.depth = self.entered, [], [], 0

    def begin_backward(self, units: Sequence[Unit]) -> None:
        """Backward comes to these; be told when it, or a nested one, has ended."""
        if not self._end_is_told:
            self._end_is_told = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._expected.update(dict.fromkeys(unit for unit in units if unit.trains))

    def come(self, unit: Unit, i: int) -> None:
        """A gradient has come: with the last one of its unit, begin to average them."""
        self.begin_backward([unit])
        if unit in self._reducing:  # it comes in several portions
            self._reducing.remove(unit)
            unit.hand_out()
        unit.timeline.mark(unit.names[i])
        unit.come(i)
        if not unit.missing:
            unit.release()
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        del self._expected[unit]
        if not self.armed:  # others are to follow
            unit.again()
            return
        unit.reduce()
        self._reducing.append(unit)
        if len(self._reducing) > unit.under_way:
            self._reducing.popleft().hand_out()

    def _end_of_backward(self) -> None:
        for unit in list(self._expected):  # some of whose parameters have no gradient
            self._reduce(unit)
        for unit in self._reducing:
            unit.hand_out()
        self._reducing.clear()
        for unit in self.units:
            unit.release()
        self._end_is_told = False


class Block:
    """A module whose parameters are in parts, but for the time of their use.

    :func:`~microddp.sharding.fully_shard.fully_shard` makes it.

    Attributes:
        module: whose forward and backward need the units.
        units: of its own parameters, and those of other blocks that it uses.
        course: what it has in common with the other blocks of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[Unit],
        *,
        reshard_after_forward: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self.module, self.units, self.dtype = module, units, dtype
        self.reshard_after_forward = reshard_after_forward
        inner = [block for m in module.modules() if (block := block_of(m))]
        self.course = Course()
        self.course.blocks = [*inner, self]
        for block in inner:
            block.course = self.course
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
        ]
        for unit in units:
            unit.sharers += 1
            for i, p in enumerate(unit.parameters):
                if p.requires_grad and unit.sharers == 1:
                    ready = partial(self._ready, unit, i)
                    self._handles.append(p.register_post_accumulate_grad_hook(ready))  # type: ignore[no-untyped-call]
        module.__dict__["_microddp_block"] = self

    def no_sync(self) -> AbstractContextManager[None]:
        """Let each backward of the block add to this rank's own gradients, and send none of them.

        They are whole, and each rank keeps them until a backward outside of the block.
        """
        return self.course.no_sync()

    def record(self, timeline: Recorder) -> None:
        """Record gradients, collectives and the wait for them from now on."""
        for unit in self.course.units:
            unit.timeline = timeline

    def gathered_twice(self) -> dict[Unit, bool]:
        """The units of the model, and whether each is freed between forward and backward."""
        freed = dict.fromkeys(self.course.units, True)
        for block in self.course.blocks:
            for unit in block.units:
                freed[unit] &= block.reshard_after_forward
        return freed

    def remove(self) -> None:
        """Make all parameters whole, for good. A collective."""
        for block in self.course.blocks:
            for handle in block._handles:
                handle.remove()
            block.module.__dict__.pop("_microddp_block", None)
        for unit in self.course.units:
            unit.gather()

    # ---- forward: gathered, used, released

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        del module
        course = self.course
        if _in_backward():  # a checkpoint computes again
            self._gather()
        else:
            if self is course.blocks[-1] or not course.depth:
                course.begin_forward()
            place = len(course.entered)
            course.entered.append(self)
            course.depth += 1
            for unit in self.units:
                unit.users += 1
            following = course.before[place : place + 2]
            self._gather(following[1] if following[:1] == [self] and following[1:] else None)
        if torch.is_grad_enabled() and (frozen := [u for u in self.units if not u.trains]):
            coming = [t for t in tree_leaves((args, kwargs)) if _has_gradient(t)]
            if coming:  # with their gradients the backward of this block has ended
                register_multi_grad_hook(coming, partial(_release_unshared, frozen))
        if self.dtype is not None:
            args, kwargs = tree_map(self._cast, args), tree_map(self._cast, kwargs)
        return args, kwargs

    def _cast(self, leaf: Any) -> Any:
        floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(self.dtype) if floats else leaf

    def _gather(self, following: Block | None = None) -> None:
        """Gather this block now; and let the next one come meanwhile."""
        for unit in self.units:
            unit.begin_gather()
        for unit in following.units if following else ():
            if not unit.halves.at_once:
                unit.begin_gather()
        for unit in self.units:
            unit.gather()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if _in_backward():
            return
        course, place = self.course, len(self.course.left)
        course.left.append(self)
        course.depth -= 1
        leaves = [leaf for leaf in tree_leaves(output) if _has_gradient(leaf)]
        for leaf in leaves:
            leaf.register_hook(partial(self._before_backward, course.left, place))
        for unit in self.units:
            unit.users -= 1
            if not unit.users and (self.reshard_after_forward or not leaves):
                unit.release()

    # ---- backward: gathered, and released with the last gradient

    def _before_backward(self, left: list[Block], place: int, gradient: torch.Tensor) -> None:
        del gradient
        self.course.begin_backward(self.units)
        self._gather(left[place - 1] if place else None)

    def _ready(self, unit: Unit, i: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # it is, where a loss does not use an output
            self.course.come(unit, i)


def block_of(module: nn.Module) -> Block | None:
    """What a module is sharded by, itself."""
    block: Block | None = module.__dict__.get("_microddp_block")
    return block


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _release_unshared(units: list[Unit], gradients: Any) -> None:
    """Release what no other block can be using; the rest stays until the end of backward."""
    del gradients
    for unit in units:
        if unit.sharers == 1:
            unit.release()
