"""A module's parameters brought into parts, block by block, also where they never were whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from microddp.allreduce import AUTO, halves_of
from microddp.bucketing import check_dense
from microddp.comms import Comms, describe
from microddp.deferred import Initialise, materialise, own_tensors
from microddp.model import elements
from microddp.replicas import broadcast_tensors, check_structure
from microddp.sharding.blocks import Block, block_of
from microddp.sharding.unit import unit_of, units_of

# Smaller ones cost more to send one by one than it saves to free them.
LEAST_BYTES = 1 << 18


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
        carrier: a key of ``microddp.allreduce.HALVES``, or ``"auto"``.

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
    if calls:
        for unit in shared:  # what is written to it here, its block does not keep
            unit.gather()
        with torch.no_grad():
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
    for unit in units:
        unit.release()
    block = Block(module, [*units, *shared], reshard_after_forward, param_dtype)
    for unit in block.course.units:  # by their names in this module now
        unit.names = [names.get(p, n) for p, n in zip(unit.parameters, unit.names, strict=True)]
    return block


def shard_blocks(
    module: nn.Module, comms: Comms, least_bytes: int = LEAST_BYTES, **options: Any
) -> Block:
    """Shard each large element of a module's lists, then the module, which keeps the rest.

    What is in no block stays whole from forward to backward, as with PyTorch.

    Args:
        module: with an ``nn.ModuleList`` or ``nn.Sequential`` of what is to be a block.
        comms: the ranks.
        least_bytes: of the parameters of a block.
        options: of :func:`fully_shard`.
    """
    for block in elements(module):
        inside = any(block_of(m) for m in block.modules())
        if not inside and sum(p.nbytes for p in block.parameters()) >= least_bytes:
            fully_shard(block, comms, **options)
    return fully_shard(module, comms, reshard_after_forward=False, **options)


def _down_to_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it that are in no block."""
    yield module
    for child in module.children():
        if block_of(child) is None:
            yield from _down_to_blocks(child)
