"""Parameters that are whole only while they are used: stage 3.

The phases of a step: a block is gathered before its forward, and released after it, and gathered
again before its backward. When backward comes to a block that forward needed earlier, this one's
is over: it is released, and its gradients are reduce-scattered. Each rank's part of them is handed
to the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from microddp.backward import tensors_in
from microddp.comms import Comms, describe
from microddp.deferred import Initialise, materialise, own_tensors
from microddp.model import elements
from microddp.parts import whole_state
from microddp.replicas import broadcast_tensors, check_structure
from microddp.sharding.unit import Averages, Unit, check_dense, unit_of, units_of
from microddp.shared import AUTO, halves_of


def fully_shard(
    module: nn.Module,
    comms: Comms,
    reshard_after_forward: bool = True,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    initialise: Initialise | None = None,
    carrier: str = AUTO,
) -> Block:
    """Leave each rank a part of a module's parameters, but for the time of their use. A collective.

    Shard the blocks of a model first, then the model: the outer one has what is in no block. Use
    the model as before. Its parameters are this rank's parts, flat, and so are their gradients
    after ``backward()``, which are means over the ranks. So an optimizer of ``model.parameters()``
    updates a part, and keeps its state of that only. It may be any that treats each value by
    itself. Forward and backward are collectives: every rank runs the same blocks in the same
    order, in evaluation, too.

    While a block computes, the next one is gathered, in the order of the step before.
    Bytes that a rank sends in a step: (n-1)/n S of parameters, twice if they are freed after
    forward, and as many of gradients.

    So ``module.state_dict()`` has this rank's parts, flat, under the names of the whole parameters:
    no unsharded model can load them. :meth:`Block.whole_state_dict` has whole tensors, and
    :func:`~microddp.parts.own_parts` says what each part is of.

    Buffers stay whole, and each rank's own. A parameter of a block that was run, and that got no
    gradient on any rank, has a mean of zero. Parameters that modules share belong to the block that
    was sharded first. Checkpoints of activations may be around blocks, or inside.

    Args:
        module: its parameters and buffers become those of rank 0. What is on the ``meta`` device
            is made on this rank's device, and initialised.
        comms: the ranks.
        reshard_after_forward: whether the parameters are freed between forward and backward. What
            backward needs first may as well stay: PyTorch leaves those of the outermost module.
        param_dtype: in which parameters are gathered and used, and floating point inputs come; a
            rank's part keeps its own. Default: as they are.
        reduce_dtype: in which gradients are added up; default: that of the parts.
        initialise: called with each module that has a parameter or buffer on the ``meta`` device
            itself; default: its own ``reset_parameters()``.
        carrier: a key of ``microddp.shared.HALVES``, or ``"auto"``.

    Returns:
        What brings the parts together; of the outermost module, for all.

    Raises:
        ValueError: it is sharded already, a gradient would be sparse, or a module on the ``meta``
            device cannot initialise itself.
        RuntimeError: on every rank: the ranks' parameters differ in number, shape or dtype.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, comms)
        >>> sharded = fully_shard(model, comms, reshard_after_forward=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.3; Zhao et al., "PyTorch FSDP", VLDB
    2023, section 3.
    """
    if block_of(module):
        raise ValueError(f"rank {comms.rank}: expected a module that is not sharded, got one twice")
    check_dense(module, comms)
    mine = list(dict.fromkeys(_down_to_blocks(module)))
    calls = materialise(mine, comms, initialise)
    shared = {unit: None for m in mine for p in m.parameters(False) if (unit := unit_of(p))}
    for unit in shared if calls else ():  # what is written to it here, its block does not keep
        unit.gather()
    for call in calls:
        call()
    for unit in shared:
        unit.release()
    tensors = dict.fromkeys(t for m in mine for t in own_tensors(m) if unit_of(t) is None)
    names = {t: name for name, t in (*module.named_buffers(), *module.named_parameters())}
    check_structure(nn.Module(), comms, {names[t]: describe(t) for t in tensors})
    broadcast_tensors([*tensors], comms)
    own = {names[t]: t for t in tensors if isinstance(t, nn.Parameter)}
    dtypes = (param_dtype, reduce_dtype)
    units = units_of(own, comms, halves_of(carrier, comms), parted=True, dtypes=dtypes)
    block = Block(module, [*units, *shared], not reshard_after_forward, param_dtype)
    for member in block.course.members:
        member.name = names.get(member.parameter, member.name)
    return block


def shard_blocks(
    module: nn.Module, comms: Comms, least_bytes: int = 1 << 18, **options: Any
) -> Block:
    """Shard each large element of a module's lists, then the module, which keeps the rest.

    What is in no block stays whole from forward to backward, as with PyTorch.

    Args:
        module: with an ``nn.ModuleList`` or ``nn.Sequential`` of what is to be a block. Of lists in
            a block the elements are none.
        comms: the ranks.
        least_bytes: of the parameters of a block. Smaller ones cost more to send one by one than it
            saves to free them.
        options: of :func:`fully_shard`.
    """
    inside: set[nn.Module] = set()
    for block in elements(module):
        if block not in inside and sum(p.nbytes for p in block.parameters()) >= least_bytes:
            fully_shard(block, comms, **options)
            inside.update(block.modules())
    return fully_shard(module, comms, reshard_after_forward=False, **options)


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
        left: the one that this forward left last.
        events: forward came to a block or left it, so often until now.
        awaited: whether a forward has been whose backward may come.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(dict.fromkeys(unit for block in blocks for unit in block.units))
        self.blocks = blocks
        self.entered: list[Block] = []
        self.before: list[Block] = []
        self.inside: list[Block] = []
        self.left: Block | None = None
        self.events, self.awaited, self._end_is_told = 0, False, False
        self._begun: dict[Unit, None] = {}  # backward has come to these, and not passed them

    def enter(self, block: Block) -> Block | None:
        """Forward comes to a block; the one that followed it last time."""
        if block is self.blocks[-1] or not self.inside:
            self._begin_forward()
        self.entered.append(block)
        self.inside.append(block)
        self.events += 1
        for unit in block.units:
            unit.first = min(unit.first, self.events)
        then = self.before[len(self.entered) - 1 :][:2]
        return then[1] if len(then) == 2 and then[0] is block else None

    def _begin_forward(self) -> None:
        if self._end_is_told:  # the last backward raised half-way
            self._begun.clear()
            self._end_of_backward()
            for member in self.members:
                member.hidden = None
        for unit in self.units:
            unit.release()
            unit.first = unit.first if self.awaited else inf
        self.before, self.entered = self.entered, []
        self.inside, self.left = [], None

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

    :func:`fully_shard` makes it.

    Args:
        module: whose forward and backward need the units.
        units: of its own parameters, and those of other blocks that it uses.
        stays: whether they are whole in between, too.
        dtype: in which floating point inputs come; default: as they are.

    Attributes:
        course: what it has in common with the other blocks of the model.
        left_at: number of the event at which forward has left it.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], stays: bool, dtype: torch.dtype | None
    ) -> None:
        self.module, self.units = module, units
        self.stays, self.dtype, self.left_at = stays, dtype, 0
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

    def whole_state_dict(self) -> dict[str, Any]:
        """Gather the state dictionary that the model would have without sharding. A collective.

        Returns:
            On rank 0 whole tensors, in main memory, in the dtype of the parts. Elsewhere it is
            empty: no other rank needs room for all of the model.
        """
        comms = self.course.units[0].comms
        state, _ = whole_state(self.course.pieces, comms, self.module)
        return state if comms.rank == 0 else {}

    def remove(self) -> None:
        """Make all parameters whole, for good, in their own dtype. A collective."""
        for block in self.course.blocks:
            for handle in block._handles:
                handle.remove()
            del block.module.__dict__["_microddp_block"]
        for unit in self.course.units:
            unit.release()
            flat = unit.comms.all_gather(unit.shard).flatten()  # which may be of higher precision
            for member in unit.members:
                member.show(flat[member.place].view(member.shape))
                del member.parameter.__dict__["_microddp_unit"]

    # ---- forward: gathered, used, released

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # In backward a checkpoint computes again.
        self._gather(None if _in_backward() else self.course.enter(self))
        if self.dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return args, kwargs

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _gather(self, following: Block | None) -> None:
        """Gather this block now; and let the next one come meanwhile."""
        for unit in self.units:
            unit.begin_gather()
        for unit in following.units if following else ():
            if not unit.halves.at_once:
                unit.begin_gather()
        for unit in self.units:
            unit.arrive()

    def _after_forward(self, _: nn.Module, __: object, output: Any) -> None:
        course, again, following = self.course, _in_backward(), None
        if not again:
            following, course.left = course.left, self
            course.inside.remove(self)
            course.events += 1
            self.left_at = course.events
        leaves = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        course.awaited |= bool(leaves)
        for leaf in leaves:
            leaf.register_hook(  # type: ignore[no-untyped-call]
                partial(self._before_backward, self.left_at, following)
            )
        if again or (leaves and self.stays):
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
    return cast(Block | None, module.__dict__.get("_microddp_block"))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _down_to_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it that are in no block."""
    yield module
    for child in module.children():
        if block_of(child) is None:
            yield from _down_to_blocks(child)
