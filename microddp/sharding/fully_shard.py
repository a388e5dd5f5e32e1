"""A module's parameters brought into parts, block by block, also where they never were whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from microddp.allreduce import AUTO, halves_of
from microddp.comms import Comms, describe
from microddp.replicas import broadcast_tensors, check_structure
from microddp.sharding.blocks import Block, block_of
from microddp.sharding.unit import Unit, check_dense, elements, unit_of

# Smaller ones cost more to send one by one than it saves to free them.
LEAST_BYTES = 1 << 18


def fully_shard(
    module: nn.Module,
    comms: Comms,
    reshard_after_forward: bool = True,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    initialise: Callable[[nn.Module], object] | None = None,
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
    _materialise(mine, comms, initialise)
    names = {id(t): name for name, t in (*module.named_buffers(), *module.named_parameters())}
    parameters = list(dict.fromkeys(p for m in mine for p in m.parameters(recurse=False)))
    shared = dict.fromkeys(unit for p in parameters if (unit := unit_of(p)))
    own = [p for p in parameters if unit_of(p) is None]
    tensors = [*own, *(b for m in mine for b in m.buffers(recurse=False))]
    check_structure(nn.Module(), comms, {names[id(t)]: describe(t) for t in tensors})
    broadcast_tensors(tensors, comms)
    kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for p in own:
        kinds.setdefault((p.dtype, p.requires_grad), {})[names[id(p)]] = p
    halves = halves_of(carrier, comms)
    units = [
        Unit(
            members,
            comms,
            halves,
            parted=True,
            dtype=param_dtype if dtype.is_floating_point else None,
            reduce_dtype=reduce_dtype if dtype.is_floating_point else None,
        )
        for (dtype, _), members in kinds.items()
    ]
    for unit in units:
        unit.release()
    block = Block(
        module,
        [*units, *shared],
        reshard_after_forward=reshard_after_forward,
        dtype=param_dtype,
    )
    for unit in block.course.units:  # by their names in this module now
        unit.names = [names.get(id(p), n) for p, n in zip(unit.parameters, unit.names, strict=True)]
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


def _materialise(
    modules: list[nn.Module], comms: Comms, initialise: Callable[[nn.Module], object] | None
) -> None:
    """Give what is on the ``meta`` device memory and values; what modules share stays shared."""
    empty = [m for m in modules if any(t.is_meta for t in _own_tensors(m))]
    hows = [initialise or getattr(type(m), "reset_parameters", None) for m in empty]
    for m, how in zip(empty, hows, strict=True):
        if how is None:
            raise ValueError(
                f"rank {comms.rank}: expected initialise, since a {type(m).__name__} on the meta "
                "device has no reset_parameters(), got None"
            )
    for m in empty:
        for places in (m._parameters, m._buffers):
            for name, tensor in places.items():
                if tensor is not None and tensor.is_meta:
                    # By what was made for it, maybe with another block.
                    places[name] = tensor.__dict__.setdefault(
                        "_microddp_made", _like(tensor, comms.device)
                    )
    for m, how in zip(empty, hows, strict=True):
        assert how is not None
        borrowed = [unit for p in m.parameters(recurse=False) if (unit := unit_of(p))]
        for unit in borrowed:  # what is written to it there, its block does not keep
            unit.gather()
        with torch.no_grad():
            how(m)
        for unit in borrowed:
            unit.release()


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(tensor, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
