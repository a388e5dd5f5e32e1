"""The hooks of a sharded module: it is unsharded for forward and backward, resharded in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from microddp.backward import tensors_in
from microddp.comms import Comms
from microddp.parts import whole_state
from microddp.sharding.context import ShardingContext
from microddp.sharding.param_group import FlatParamGroup

_SHARDED: WeakSet[nn.Module] = WeakSet()


class ShardedModule:
    """A module whose parameters are whole only while they are used.

    Made by :func:`~microddp.sharding.fully_shard.fully_shard`. The counterpart in PyTorch is
    ``FSDPState``.

    Args:
        module: its forward and backward need the groups.
        comms: the ranks among which parameters are divided.
        groups: flat groups of its own parameters, and those of other sharded modules whose
            parameters it uses.
        reshard_after_forward: whether parameters are resharded between forward and backward.
        param_dtype: dtype to which floating-point inputs are cast; default: none, they stay.

    Attributes:
        context: state that it shares with the other sharded modules of the model.
        exited_at: number of the event at which its last forward ended.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        groups: Sequence[FlatParamGroup],
        reshard_after_forward: bool,
        param_dtype: torch.dtype | None,
    ) -> None:
        self.module, self.comms, self.groups = module, comms, groups
        self.reshard_after_forward, self.param_dtype = reshard_after_forward, param_dtype
        self.exited_at = 0
        inner = [sharded for m in module.modules() if (sharded := sharded_module_of(m))]
        self.context = ShardingContext([*inner, self])
        for sharded in inner:
            sharded.context = self.context
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._post_forward, always_call=True),  # if it raises, too
        ]
        module.__dict__["_microddp_sharded"] = self
        _SHARDED.add(module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let each backward inside add to this rank's own gradients, and reduce none of them.

        They are unsharded, in the dtype of the unsharded parameters, and each rank keeps those of a
        module until a backward outside comes to it, or :meth:`zero_grad` forgets them, which the
        module's own does not.
        """
        return self.context.no_sync()

    def no_all_reduce(self) -> AbstractContextManager[None]:
        """Let each backward inside reduce among the ranks that divide the parameters, and no more.

        The first backward outside averages among the replicas what has accumulated: gradients stay
        sharded, and the slow network between nodes carries them once. Without replicas
        nothing is left out.
        """
        return self.context.all_reduces.no_sync()

    def zero_grad(self) -> None:
        """Forget all gradients: the shards', and what the two contexts above have kept."""
        self.context.forget()
        for param in self.context.params:
            param.parameter.grad = None

    def whole_state_dict(self) -> dict[str, Any]:
        """Gather the state dictionary that the whole model would have without sharding.

        A collective.

        Returns:
            On rank 0 whole tensors in main memory, in the dtype of the shards. On other ranks an
            empty dictionary, so that only rank 0 needs memory for all of the model.
        """
        module = self.context.modules[-1].module
        state, _ = whole_state(self.context.local_params, self.comms, module)
        return state if self.comms.rank == 0 else {}

    def remove(self) -> None:
        """Make all parameters whole for good, in the dtype of the shards. A collective."""
        for sharded in self.context.modules:
            for handle in sharded._handles:
                handle.remove()
            del sharded.module.__dict__["_microddp_sharded"]
            _SHARDED.discard(sharded.module)
        for group in self.context.groups:
            group.reshard()
            flat = group.comms.all_gather(group.shard).flatten()  # may be of higher precision
            for param in group.params:
                if param.stashed_grad is not None:  # of no_sync()
                    param.stashed_grad = param.stashed_grad.to(flat.dtype)
                param.set_data(flat[param.flat_range].view(param.shape))
                del param.parameter.__dict__["_microddp_group"]

    # ---- forward: unshard, compute, reshard

    def _pre_forward(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # In backward, an activation checkpoint runs forward again.
        self._unshard(None if _in_backward() else self.context.pre_forward(self))
        if self.param_dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return args, kwargs

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    def _unshard(self, prefetch: ShardedModule | None) -> None:
        """Unshard this module, and start to unshard the one that is needed next."""
        for group in self.groups:
            group.unshard()
        for group in prefetch.groups if prefetch else ():
            if not group.collectives.blocking:
                group.unshard()
        for group in self.groups:
            group.wait_for_unshard()

    def _post_forward(self, _: nn.Module, __: object, output: Any) -> None:
        context, recomputed, prefetch = self.context, _in_backward(), None
        if not recomputed:
            prefetch = context.post_forward(self)
            self.exited_at = context.event_count
        # A leaf is no result of the module: its own parameter, say.
        trained = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        context.backward_pending |= bool(trained)
        for tensor in trained:
            enter = partial(self._pre_backward, self.exited_at, prefetch)
            # A tensor that modules pass on has one hook, by which backward enters the last of them
            # first, as it does where each has an output of its own.
            node: Any = tensor.grad_fn
            entries = node.metadata.setdefault(("microddp", tensor.output_nr), [])
            if not entries:
                tensor.register_hook(partial(_call_each, entries))  # type: ignore[no-untyped-call]
            entries.insert(0, enter)
        if recomputed:
            return
        keep = bool(trained) and not self.reshard_after_forward
        for group in self.groups:
            if not any(group in running.groups for running in context.forward_stack):
                group.reshard(free=not keep)

    # ---- backward: unshard; the context reshards and reduces what backward has passed

    def _pre_backward(self, exited_at: int, prefetch: ShardedModule | None) -> None:
        # By a second output backward may enter when it has passed what was prefetched at the first.
        first_time = self.context.pre_backward(self.groups, exited_at)
        self._unshard(prefetch if first_time else None)


def sharded_module_of(module: nn.Module) -> ShardedModule | None:
    """Find what shards this very module; ``None`` if it is not sharded itself."""
    return cast(ShardedModule | None, module.__dict__.get("_microddp_sharded"))


def is_inside(module: nn.Module) -> bool:
    """Tell if a module is sharded, itself or as a part of another one."""
    return any(module is part for sharded in _SHARDED for part in sharded.modules())


def _call_each(calls: Sequence[Callable[[], None]], _: torch.Tensor) -> None:
    for call in calls:
        call()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
