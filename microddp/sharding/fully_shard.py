"""ZeRO 3: parameters that are whole only while they are used.

A sharded module is unsharded before its forward and resharded after it, and unsharded again before
its backward. When backward comes to a module that forward needed earlier, the backward of this one
is over: it is resharded, and its gradients are reduce-scattered.

:mod:`~microddp.sharding.sharded_module` has the hooks that do so,
:mod:`~microddp.sharding.context` the order of a model's modules, and
:mod:`~microddp.sharding.param_group` the flat tensors and their collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from microddp.comms import Comms
from microddp.deferred import materialise, own_tensors
from microddp.replicas import broadcast_tensors, check_structure, in_words
from microddp.sharding.blocks import check_dense, elements
from microddp.sharding.param_group import FlatParamGroup, group_of
from microddp.sharding.sharded_module import ShardedModule, is_inside, sharded_module_of
from microddp.shared import AUTO, scatter_gather


def fully_shard(
    module: nn.Module,
    comms: Comms,
    reshard_after_forward: bool = True,
    *,
    replicas: Comms | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    collectives: str = AUTO,
) -> ShardedModule:
    """Leave each rank a shard of a module's parameters, except while they are used. A collective.

    Shard the blocks of a model first, then the model: the outer call shards the parameters that are
    in no block. Use the model as before. Its parameters are this rank's shards, 1-D, and so are
    their gradients after ``backward()``, which are means over the ranks. So an optimizer of
    ``model.parameters()`` updates the shards, and its state is of the shards only. It may be any
    optimizer that treats each value by itself. Forward and backward are collectives, in evaluation
    too: every rank must run the same blocks in the same order, and if one rank's output of a block
    needs a gradient, so must the others'.

    While a block computes, the next one is unsharded already: in forward by the order of the step
    before, in backward by forward's. Bytes that a rank sends in a step: (n-1)/n S of gradients,
    and as many of parameters, or twice as many with ``reshard_after_forward``.

    With ``replicas`` the ranks are a grid (HSDP): those of ``comms``, of one node, say, divide the
    parameters, and those of ``replicas``, one in each node, keep the same shard. Gradients are
    reduce-scattered among the first, and each shard is averaged among the second: between nodes go
    2 (m-1)/m S/n bytes a rank, with m replicas, while the gathers stay inside.

    ``module.state_dict()`` has this rank's shards under the names of the whole parameters, and no
    unsharded model can load it. ``whole_state_dict()`` of what this function returns has whole
    tensors, and :func:`~microddp.parts.own_parts` says which values a rank's shards are.

    Buffers stay whole, and each rank has its own. A parameter of a block that was run, and that got
    no gradient on any rank, has a mean of zero. A parameter of several modules belongs to the block
    that was sharded first. Activation checkpoints may be around blocks, or inside. Several forwards
    may come before their backwards, but none between two of these.

    Args:
        module: its parameters and buffers become those of rank 0, and its gradients are forgotten.
            What is on the ``meta`` device is allocated on this rank's device, and initialised by
            ``reset_parameters()`` of the module that it belongs to.
        comms: the ranks among which the parameters are divided.
        reshard_after_forward: whether the parameters are freed between forward and backward. Those
            that backward needs first may as well stay: PyTorch keeps the outermost module's.
        replicas: the ranks that keep the same shard as this one; default: none. The norm of
            gradients and whole states are taken over ``comms`` alone.
        param_dtype: dtype in which parameters are all-gathered and used, and to which
            floating-point inputs are cast; the shards keep their own. Default: no other dtype.
        reduce_dtype: dtype in which gradients are reduced; default: that of the shards.
        collectives: a key of ``microddp.shared.SCATTER_GATHERS``, or ``"auto"``.

    Returns:
        A handle with ``no_sync()``, ``no_all_reduce()``, ``zero_grad()``, ``whole_state_dict()``
        and ``remove()``; that of the outermost module is for the whole model.

    Raises:
        ValueError: the module is sharded already, itself or as a part of another one. On every
            rank: a gradient would be sparse, or a module on the ``meta`` device cannot initialise
            itself; in other nodes this is a RuntimeError.
        RuntimeError: on every rank, of all nodes: the ranks' parameters differ in number, shape,
            dtype or whether they are trained, or their options differ.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, comms)
        >>> sharded = fully_shard(model, comms, reshard_after_forward=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())

    Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.3; Zhao et al., "PyTorch FSDP", VLDB
    2023, section 3.
    """
    if is_inside(module):
        got = "one twice" if sharded_module_of(module) else "a part of one: shard blocks first"
        raise ValueError(f"rank {comms.rank}: expected a module that is not sharded, got {got}")
    blocks = {m for m in module.modules() if sharded_module_of(m)}
    mine = [m for _, m in module.named_modules(memo=blocks)]  # no block, and nothing inside one
    with _in_all_nodes(replicas):
        check_dense(module, comms)
        calls = materialise(mine, comms)
    # Groups of blocks that have a parameter in common with this module. An initialisation here
    # does not change their shards.
    shared = {group: None for m in mine for p in m.parameters(False) if (group := group_of(p))}
    for group in shared:  # on every rank, though some may have nothing to initialise
        group.unshard()
        group.wait_for_unshard()
    for call in calls:
        call()
    for group in shared:
        group.reshard()
    tensors = dict.fromkeys(t for m in mine for t in own_tensors(m) if group_of(t) is None)
    names = {t: name for name, t in (*module.named_buffers(), *module.named_parameters())}
    options = {
        "reshard_after_forward": reshard_after_forward,
        "dtypes": [param_dtype, reduce_dtype],
        "collectives": collectives,
        **{names[t]: in_words(t) for t in tensors},
    }
    with _in_all_nodes(replicas):
        check_structure(nn.Module(), comms, options)
    if replicas:
        check_structure(nn.Module(), replicas, options)
    for ranks in filter(None, (comms, replicas)):
        broadcast_tensors(tensors, ranks)
    by = scatter_gather(collectives, comms)
    kinds: dict[tuple[object, ...], dict[str, nn.Parameter]] = {}
    for p in tensors:
        if isinstance(p, nn.Parameter):
            kinds.setdefault((p.dtype, p.device, p.requires_grad), {})[names[p]] = p
    groups = [
        FlatParamGroup(
            alike,
            comms,
            by,
            replicas=replicas,
            shard_params=True,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
        )
        for alike in kinds.values()
    ]
    sharded = ShardedModule(module, comms, [*groups, *shared], reshard_after_forward, param_dtype)
    for param in sharded.context.params:
        param.name = names.get(param.parameter, param.name)
    return sharded


@contextmanager
def _in_all_nodes(replicas: Comms | None) -> Iterator[None]:
    """Let what raises on the ranks of one node raise on those of the others, too. A collective."""
    raised: Exception | None = None
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raised = error
    said = replicas.all_gather_data(str(raised or "")) if replicas else []
    if raised:
        raise raised
    if replicas and (problem := next(filter(None, said), "")):
        raise RuntimeError(
            f"rank {replicas.rank} of the replicas: expected no error in other nodes, got {problem}"
        )


def shard_blocks(
    module: nn.Module, comms: Comms, least_bytes: int = 1 << 18, **options: Any
) -> ShardedModule:
    """Shard each large element of a module's lists, then the module, which has the rest.

    Parameters outside of blocks stay whole from forward to backward, as with PyTorch, and so does
    the last block: backward begins with it.

    Args:
        module: a model whose blocks are elements of an ``nn.ModuleList`` or ``nn.Sequential``. A
            list inside a block is part of the block.
        comms: the ranks.
        least_bytes: smallest size of a block's parameters, in bytes. Sending smaller ones one by
            one costs more than freeing them saves.
        options: keyword arguments of :func:`fully_shard`.

    Returns:
        The handle of the module, for all blocks.
    """
    inside: set[nn.Module] = set()
    blocks: list[nn.Module] = []
    for block in elements(module):
        if block not in inside and sum(p.nbytes for p in block.parameters()) >= least_bytes:
            inside.update(block.modules())
            blocks.append(block)
    for block in blocks:
        fully_shard(block, comms, reshard_after_forward=block is not blocks[-1], **options)
    return fully_shard(module, comms, reshard_after_forward=False, **options)
