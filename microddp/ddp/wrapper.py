"""A wrapper that makes any module data-parallel, with the meaning of PyTorch's own.

The steps of one iteration, in the order of the calls:

1. ``forward`` begins: rank 0's buffers go to all ranks, and once, after the first backward, the
   buckets are planned anew in the order in which gradients came.
2. ``forward`` ends: the reducer expects a backward, unless ``no_sync()`` is on.
3. ``backward`` brings gradients into buckets, and sends each bucket that is full.
4. ``backward`` ends: the reducer waits for the buckets and hands the averages to the parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms.join import Join

from microddp.buckets import check_cap
from microddp.carrier import Carrier
from microddp.comms import Comms
from microddp.ddp.arguments import check_devices, check_refused, which_buffers
from microddp.ddp.reducer import Hook, Reducer
from microddp.ddp.uneven import UnevenInputs
from microddp.replicas import Packed, broadcast_tensors, check_replicas, check_structure, pack
from microddp.timing import Recorder


class DistributedDataParallel(nn.Module, UnevenInputs):
    """Trains a module on many ranks: each on its shard of the batch, with averaged gradients.

    Put it around the module, and leave the rest of the program as it is: after ``backward()``
    every ``.grad`` is the mean over the ranks. Arguments mean what they mean to
    ``torch.nn.parallel.DistributedDataParallel``; only ``gradient_as_bucket_view`` is on unless
    switched off. Those that PyTorch's has and that are not listed are refused, with what to use
    instead.

    Args:
        module: the same architecture on every rank, on this rank's device. At construction its
            parameters and buffers become those of rank 0.
        comms: the ranks that train together; default: all.
        process_group: the same as a group of ``torch.distributed``.
        bucket_cap_mb: size of a bucket in MiB; default 25, after a first one of 1.
        forward_sync_buffers: copy rank 0's buffers to all ranks before a forward pass; default: do.
        broadcast_buffers: its name before PyTorch 2.13, deprecated there. ``False`` leaves each
            rank its own buffers at construction, too.
        find_unused_parameters: let a forward pass leave parameters out. Those that no rank used
            keep their gradient (as a view, the average of the ranks'); those that this rank did
            not use get the average.
        gradient_as_bucket_view: keep gradients in the buckets, which saves the time and the memory
            of copying them back. PyTorch's default is a copy: with a view, a gradient that was
            kept aside changes in the next backward. Pass ``False`` if gradients are kept aside.
        static_graph: every iteration uses the same parameters equally often. Allows parameters
            that are used by several reentrant checkpoints.
        verify_replicas: instead of broadcasting, insist that the ranks' parameters are equal.
        all_reduce: what adds gradients up between the same ranks; default: the backend.
            :func:`microddp.shared.carriers.carrier` makes others.
        device_ids: of one device at most, and only if the module is on a GPU. It changes nothing:
            the module computes where it is, and inputs have to be there.
        output_device: likewise.
        dim: changes nothing, as with PyTorch in one process for each device.
        check_reduction: likewise, and warns.

    Raises:
        TypeError: the second argument is no ``Comms``, ``all_reduce`` is no carrier, or an argument
            that this DDP does not take; for PyTorch's it says what to use instead.
        ValueError: both ``comms`` and ``process_group``; on every rank: parameters on several kinds
            of devices, ``device_ids`` that cannot be, a carrier of another group, or a bucket cap
            that is not positive, or not finite.
        RuntimeError: on every rank: no parameter requires a gradient, or one is not initialised;
            the ranks' parameters or buffers differ in number, name, shape or dtype, or, where
            that is asked for, parameters in value; or their options differ.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    VLDB 2020, section 3 and 4.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        forward_sync_buffers: bool | None = None,
        broadcast_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        verify_replicas: bool = False,
        all_reduce: Carrier | None = None,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,  # noqa: ARG002 - PyTorch's
        check_reduction: bool = False,
        **refused: Any,
    ) -> None:
        super().__init__()
        UnevenInputs.__init__(self)
        if not isinstance(comms, Comms | None):
            raise TypeError(
                f"expected a Comms as the second argument of DDP, got {comms!r}; PyTorch's "
                "device_ids has to be named"
            )
        if not isinstance(all_reduce, Carrier | None):
            raise TypeError(
                f"expected a carrier as all_reduce of DDP, got {all_reduce!r}: see "
                "microddp.shared.carrier"
            )
        if comms is not None and process_group is not None:
            raise ValueError(f"rank {comms.rank}: expected comms or process_group, got both")
        parameters = list(module.parameters())
        device = parameters[0].device if parameters else torch.get_default_device()
        self.comms = comms = comms or Comms.of_group(process_group, device)
        self.all_reduce = all_reduce or Carrier(comms)
        ignored = "_ddp_params_and_buffers_to_ignore"  # of the module, where somebody has set it
        refused |= {ignored: getattr(module, ignored)} if hasattr(module, ignored) else {}
        between = dist.get_process_group_ranks(self.all_reduce.comms.group)
        kinds = sorted({p.device.type for p in parameters})
        at_first, before_forward = which_buffers(broadcast_buffers, forward_sync_buffers)
        options = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "buffers": [at_first, before_forward],
            "all_reduce": self.all_reduce.name,
            "devices": kinds,
            "device_ids": len(device_ids or ()),
            "output_device": output_device is not None,
            "all_reduce between": between,
            "verify_replicas": verify_replicas,
            "refused": sorted((name, bool(value)) for name, value in refused.items()),
        }
        check_structure(module, comms, options)
        # After that, what is wrong is wrong on every rank, and every rank says so.
        who = f"rank {comms.rank}: expected"
        check_refused(refused, who)
        check_devices(device_ids, output_device, parameters, who)
        if between != (mine := dist.get_process_group_ranks(comms.group)):
            raise ValueError(f"{who} a carrier between ranks {mine}, got one between {between}")
        if check_reduction:
            warnings.warn("check_reduction is deprecated, and does nothing", FutureWarning, 2)
        if not any(p.requires_grad for p in parameters):
            raise RuntimeError(f"{who} a module with parameters that require gradients, got none")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise RuntimeError(f"{who} initialised parameters: run a lazy module's forward first")
        if len(kinds) > 1:
            raise ValueError(f"{who} parameters on one kind of device, got {kinds}")
        check_cap(bucket_cap_mb, comms.rank)
        self.module = module
        self.bucket_cap_mb = bucket_cap_mb
        self.forward_sync_buffers = before_forward
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self._has_buffers = any(True for _ in module.buffers())
        self._sync_buffers_next = True
        if verify_replicas:
            check_replicas(module, comms)
        copied = () if verify_replicas else parameters
        broadcast_tensors([*copied, *(module.buffers() if at_first else ())], comms)
        self._make_reducer()

    def _make_reducer(self) -> None:
        self._layout: list[Any] = []  # of the buffers that are packed
        self._packed: list[Packed] = []
        self.reducer = Reducer(
            self.module,
            self.comms,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused=self.find_unused_parameters,
            as_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            carrier=self.all_reduce,
        )
        # The module may outlive the wrapper, and must not keep its hooks.
        weakref.finalize(self, self.reducer.remove)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; what it takes and returns is passed on.

        Raises:
            RuntimeError: the last backward brought no gradient for some parameters.
        """
        grad_enabled = torch.is_grad_enabled()
        syncing = grad_enabled and self.require_backward_grad_sync
        joined = Join.notify_join_context(self)
        if not self.reducer.hooked:
            self.reducer.buckets.divisor = self._divisor(joined)
        if grad_enabled or self._join_config.enable:  # a rank that shadows cannot tell the mode
            with torch.inference_mode(False):  # what is planned now is kept for training
                self.reducer.begin_forward()
        self._sync_buffers(candidate=True)
        if self._join_config.enable:
            self._highest(int(syncing))
        output = self.module(*inputs, **kwargs)
        self._sync_buffers_next = syncing
        return self.reducer.expect(output) if syncing else output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, for the forward passes of the block.

        What counts is where ``forward`` runs, not ``backward``. The first synchronised backward
        after the block averages what has accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def record(self, timeline: Recorder) -> None:
        """Record gradients, collectives and the wait for them from now on."""
        self.reducer.buckets.timeline = timeline

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket, instead of an all-reduce mean.

        Args:
            state: handed to the hook.
            hook: gets the :class:`~microddp.buckets.GradientBucket`, with this rank's gradients
                not divided yet, and returns a future of the tensor that it becomes. PyTorch's own
                hooks work as they are.

        Raises:
            RuntimeError: there is one already.
        """
        if self.reducer.hooked:
            raise RuntimeError(f"rank {self.comms.rank}: expected one hook, got a second")
        self.reducer.reduce_by(hook, state)

    def _sync_buffers(self, candidate: bool) -> None:
        if not (self._sync_buffers_next and self._has_buffers and self.forward_sync_buffers):
            return
        buffers = list(self.module.buffers())  # anew: a module may replace them
        mine = self.comms.rank if candidate else -1
        src = self._highest(mine) if self._join_config.enable else 0
        layout = [(id(b), b.dtype, b.shape) for b in buffers]
        if layout != self._layout:
            with torch.inference_mode(False):  # kept for training, too
                self._layout, self._packed = layout, list(pack(buffers))
        # A graph that an earlier forward built may hold them: as far as it goes, nothing changed.
        with _unsafe_preserve_version_counter(tuple(buffers)):
            for packed in self._packed:
                packed.broadcast(self.comms, src, self.all_reduce.broadcast).wait()

    def shadow(self) -> None:
        """Make the collectives of an iteration of ranks that still have a batch."""
        self.reducer.begin_forward()
        self._sync_buffers(candidate=False)
        self._sync_buffers_next = bool(self._highest(0))
        if self._sync_buffers_next:
            self.reducer.shadow()

    # ---- copies: as PyTorch's, only of a wrapper over all ranks

    def __getstate__(self) -> dict[str, Any]:
        if self.comms.group is not dist.group.WORLD:
            raise RuntimeError(
                f"rank {self.comms.rank}: only a wrapper over all ranks can be copied or pickled"
            )
        made = ("comms", "reducer", "_layout", "_packed")  # anew, by __setstate__
        kept = {k: v for k, v in self.__dict__.items() if k not in made}
        return kept | {"all_reduce": self.all_reduce.maker}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.comms = Comms.of_group(None, next(self.module.parameters()).device)
        self.all_reduce = state["all_reduce"](self.comms)
        self._make_reducer()


DDP = DistributedDataParallel
