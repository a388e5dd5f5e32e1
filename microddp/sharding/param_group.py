"""A flat parameter group: parameters in one flat tensor, of which each rank keeps an equal shard.

The flat tensor is padded with zeros until the number of ranks divides it. A reduce-scatter takes
the gradients to their shards and an all-gather takes the parameters back: the two halves of an
all-reduce, with the optimizer's step in between.

The counterpart in PyTorch is ``FSDPParamGroup``, and the methods have its names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import cast

import torch
from torch import nn
from torch.nn.functional import pad

from microddp.comms import Comms
from microddp.parts import ParamShard
from microddp.shared import CollectiveName, Future, ScatterGather
from microddp.timing import NOT_RECORDED, Recorder


@dataclass(eq=False)
class ShardedParam(ParamShard):
    """A parameter of a flat group, in its two forms: unsharded, and this rank's shard.

    Attributes:
        parameter: the module's parameter, which has one of the two forms as its data.
        flat_range: slice of the group's flat tensor that the whole parameter takes.
        shard_range: slice of this rank's shard of the flat tensor that the values here take.
        unsharded_data: view of the flat tensor, of the parameter's shape.
        stashed_grad: gradient of the form that the parameter does not have now.
    """

    parameter: nn.Parameter
    flat_range: slice
    shard_range: slice
    unsharded_data: torch.Tensor
    stashed_grad: torch.Tensor | None = None

    def set_data(self, data: torch.Tensor) -> None:
        """Give the parameter the data of its other form, and exchange the gradients."""
        gradient, self.parameter.grad = self.parameter.grad, None
        self.parameter.data = data
        self.parameter.grad, self.stashed_grad = self.stashed_grad, gradient


class FlatParamGroup:
    """Parameters that are sharded, unsharded and reduced together.

    Args:
        parameters: the parameters by name; dense, of one dtype and device, equal on all ranks.
        comms: the ranks among which the parameters are divided.
        collectives: the reduce-scatter and the all-gather to use.
        replicas: the ranks that keep the same shard as this one, to average with (HSDP);
            default: none.
        keep_gradients: whether the flat tensor of gradients lives as long as this rank's shard of
            the mean (ZeRO 1), or the shard has memory of its own (ZeRO 2 and 3).
        shard_params: whether parameters are whole only from :meth:`unshard` to :meth:`reshard`
            (ZeRO 3). The shard then has memory of its own, and ``unsharded`` may have another dtype
            than the shard.
        param_dtype: dtype of ``unsharded``; default: the parameters' own.
        reduce_dtype: dtype in which gradients are reduced; default: the parameters' own.

    Attributes:
        unsharded: flat tensor of ``world_size * shard_numel`` values, of which the whole parameters
            are views; without memory while the group is sharded.
        shard: this rank's ``shard_numel`` values of it.
        numel: number of values without the padding.
        params: all parameters of the group.
        local_params: the ones of which this rank's shard has at least one value, or no rank's has.
        is_sharded: whether the parameters are shards now. Always ``False`` without
            ``shard_params``.
        is_kept: whether the flat tensor is whole meanwhile.
        first_use: number of the event of a forward at which the group was first needed.
        timeline: records collectives, and the wait for them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comms: Comms,
        collectives: ScatterGather,
        *,
        replicas: Comms | None = None,
        keep_gradients: bool = False,
        shard_params: bool = False,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.comms, self.collectives = comms, collectives
        self.replicas = replicas if replicas and replicas.world_size > 1 else None
        self.keep_gradients, self.shard_params = keep_gradients, shard_params
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.numel, self.shard_numel = len(flat), -(-len(flat) // comms.world_size)
        flat = pad(flat, (0, comms.world_size * self.shard_numel - self.numel))
        if not flat.is_floating_point():
            param_dtype = reduce_dtype = None
        self.unsharded = flat.to(param_dtype or flat.dtype)
        self.reduce_dtype = reduce_dtype or flat.dtype
        self.shard = self.shard_of(flat).clone() if shard_params else self.shard_of(flat)
        self.params: list[ShardedParam] = []
        first, begin = comms.rank * self.shard_numel, 0
        for name, p in parameters.items():
            end, start = begin + p.numel(), max(first, begin)
            stop = max(start, min(first + self.shard_numel, end))
            shard_range = slice(start - first, stop - first)
            flat_range, own = slice(begin, end), self.shard[shard_range]
            self.params.append(
                ShardedParam(
                    name,
                    p.shape,
                    param_range=slice(start - begin, stop - begin),
                    sharded_data=own,
                    sharded_param=p if shard_params else nn.Parameter(own, p.requires_grad),
                    parameter=p,
                    flat_range=flat_range,
                    shard_range=shard_range,
                    unsharded_data=self.unsharded[flat_range].view(p.shape),
                )
            )
            if shard_params:
                p.grad = None  # of another shape, and maybe dtype, than it will have
                p.__dict__["_microddp_group"] = self
            p.data, begin = self.params[-1].unsharded_data, end
        self.local_params = [p for p in self.params if len(p.sharded_data) or not p.shape.numel()]
        self.is_sharded = self.is_kept = False
        self.first_use = inf
        self._all_gather: Future | None = None
        self._reduce_scatter: Future | None = None
        self._all_reduce: Future | None = None
        # What was reduced among ``comms`` and not among ``replicas`` yet.
        self._partial_mean: torch.Tensor | None = None
        self.timeline: Recorder = NOT_RECORDED
        self.reshard()

    @property
    def requires_grad(self) -> bool:
        """True if any parameter is trained."""
        return any(param.parameter.requires_grad for param in self.params)

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this rank's shard of a padded flat tensor."""
        return flat[self.comms.rank * self.shard_numel :][: self.shard_numel]

    # ---- parameters: unsharded for a while, then sharded again

    @torch.no_grad()
    def unshard(self) -> None:
        """Start the all-gather of the parameters, unless they are whole or it has started already.

        A collective. :meth:`wait_for_unshard` completes it.
        """
        started = self._all_gather is not None
        if started or self.is_kept or (self.shard_params and not self.is_sharded):
            return
        if self.shard_params:
            self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
            self.shard_of(self.unsharded).copy_(self.shard)
        self._all_gather = self._start("all-gather", self.unsharded)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather that :meth:`unshard` started, and make the parameters whole."""
        if self._all_gather is None and not self.is_kept:
            return
        if self._all_gather is not None:
            self._wait(self._all_gather)
        self._all_gather, self.is_kept = None, False
        if self.is_sharded:
            self.is_sharded = False
            for param in self.params:
                param.set_data(param.unsharded_data)

    def reshard(self, free: bool = True) -> None:
        """Make the parameters this rank's shards. Does nothing without ``shard_params``.

        Args:
            free: whether to free the memory of the flat tensor, too. What autograd saved of the
                whole parameters is valid again, in the same storage, after the next
                :meth:`unshard`. If not, that sends nothing.
        """
        self.wait_for_unshard()  # of a prefetch that nobody used, or of what was kept
        if self.shard_params and not self.is_sharded:
            self.is_sharded, self.is_kept = True, not free
            for param in self.params:
                param.set_data(param.sharded_data)
            if free:
                self.unsharded.untyped_storage().resize_(0)

    def _start(self, collective: CollectiveName, flat: torch.Tensor) -> Future:
        name = f"{collective} {self.params[0].name} ..."
        self.comms.agree(f"{name} of {len(self.params)} parameters")
        return self.collectives.start(collective, flat, self.comms, name, self.timeline)

    def _wait(self, future: Future, what: str = "") -> torch.Tensor:
        with self.timeline.span(f"wait for {what}{self.params[0].name} ...", lane="wait"):
            return future.wait()

    # ---- gradients: flattened, and this rank's shard of their mean

    @torch.no_grad()
    def post_backward(self, all_reduce: bool = True) -> None:
        """Reshard, and start the reduce-scatter of the gradients; a missing one counts as zero.

        A collective, in the same order of groups on every rank. :meth:`wait_for_mean` completes it.

        Args:
            all_reduce: whether the replicas average what the reduce-scatter gives, with all that
                was left out before. If not, it is kept until they do.
        """
        self.wait_for_mean()  # of an earlier portion, if gradients come in several
        gradients = deque(param.parameter.grad for param in self.params)
        for param in self.params:
            param.parameter.grad = None
        self.reshard()
        flat = torch.empty_like(self.unsharded, dtype=self.reduce_dtype)
        flat[self.numel :] = 0  # the padding
        share = 1 / (self.comms.world_size * (self.replicas.world_size if self.replicas else 1))
        for param in self.params:
            gradient = gradients.popleft()  # freed when the next one takes its name
            if gradient is None:
                flat[param.flat_range] = 0
            else:  # divided in the precision of the sum
                gradient = gradient.flatten().to(flat.dtype)
                torch.mul(gradient, share, out=flat[param.flat_range])
        self._reduce_scatter = self._start("reduce-scatter", flat)
        if self.replicas and all_reduce:
            self._start_all_reduce(self._reduce_scatter, self.replicas)

    def _start_all_reduce(self, reduce_scatter: Future, replicas: Comms) -> None:
        mean = self.shard.new_empty(self.shard_numel, dtype=self.reduce_dtype)
        partial = self._partial_mean  # a GPU adds it later: kept until wait_for_mean

        def copy(scattered: Future) -> torch.Tensor:  # so that the flat tensor can go
            mean.copy_(self.shard_of(scattered.value()))
            if partial is not None:
                mean.add_(partial)
            return mean

        name = f"all-reduce {self.params[0].name} ..."
        self._all_reduce = self.collectives.all_reduce_after(
            reduce_scatter.then(copy), mean, replicas, name, self.timeline
        )

    def wait_for_reduce_scatter(self) -> None:
        """Wait for the reduce-scatter, if one is pending, after which its flat tensor is free."""
        if self._reduce_scatter is None:
            return
        mean = self.shard_of(self._wait(self._reduce_scatter, "gradients of "))
        self._reduce_scatter = None
        if self.replicas is None:
            self._add_to_gradients(mean)
        elif self._all_reduce is None:
            before = self._partial_mean
            self._partial_mean = mean.clone() if before is None else before.add_(mean)

    def wait_for_mean(self) -> None:
        """Wait for all that is pending, and add the mean to the shards' gradients."""
        self.wait_for_reduce_scatter()
        if self._all_reduce is not None:
            mean = self._wait(self._all_reduce, "gradients of ")
            self._all_reduce = self._partial_mean = None
            self._add_to_gradients(mean)

    def forget_mean(self) -> None:
        """Wait for all that is pending, of a backward that raised, and add nothing."""
        for pending in filter(None, (self._reduce_scatter, self._all_reduce)):
            self._wait(pending, "gradients of ")
        self._reduce_scatter = self._all_reduce = self._partial_mean = None

    def _add_to_gradients(self, mean: torch.Tensor) -> None:
        mean = mean.to(self.shard.dtype, copy=not self.keep_gradients)
        # One of which this rank has no value gets an empty gradient: a loss scaler wants some on
        # every rank. One that was frozen meanwhile gets none.
        for param in self.params:
            if param.parameter.requires_grad:
                param.add_gradient(mean[param.shard_range])


def group_of(parameter: torch.Tensor) -> FlatParamGroup | None:
    """Find the group that shards a parameter; ``None`` if none does."""
    return cast(FlatParamGroup | None, parameter.__dict__.get("_microddp_group"))
