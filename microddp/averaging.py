"""The five schedules behind one interface, so that one training loop serves them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.schedule import average_gradients, register_ddp_hooks
from microddp.timing import Timeline


class Averaging:
    """Averages the gradients of a model over all ranks: here naively, one by one after backward.

    A step runs its forward passes through ``module``, calls :meth:`backward` for each loss, all
    but the last within :meth:`no_sync`, and then :meth:`finish`.

    Args:
        model: this rank's replica.
        comms: the ranks that share the gradients.
        bucket_mb: size of a bucket in MiB, where there are any.

    Attributes:
        module: the model, or the wrapper around it.
    """

    def __init__(self, model: nn.Module, comms: Comms, bucket_mb: float) -> None:
        del bucket_mb
        self.module = model
        self.comms = comms
        self.timeline: Timeline | None = None

    def record(self, timeline: Timeline | None) -> None:
        """Record collectives, and the wait for them, from now on; ``None``: no longer."""
        self.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the forward and backward passes of the block add to this rank's own gradients."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, and average meanwhile where the schedule does."""
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Return when all gradients are averaged."""
        average_gradients(self.module, self.comms, self.timeline)

    def remove(self) -> None:
        """Leave the model as it was."""


class Hooked(Averaging):
    """During backward, by hooks: gradient by gradient, or in buckets."""

    def __init__(self, model: nn.Module, comms: Comms, bucket_mb: float, *, buckets: bool) -> None:
        super().__init__(model, comms, bucket_mb)
        self.hooks = register_ddp_hooks(model, comms, bucket_mb if buckets else None)

    def record(self, timeline: Timeline | None) -> None:
        self.hooks.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        return self.hooks.no_sync()

    def finish(self) -> None:
        self.hooks.finish()

    def remove(self) -> None:
        self.hooks.remove()


class Wrapped(Averaging):
    """During backward, by :class:`microddp.DDP <microddp.ddp.wrapper.DistributedDataParallel>`."""

    def __init__(self, model: nn.Module, comms: Comms, bucket_mb: float) -> None:
        super().__init__(model, comms, bucket_mb)
        self.ddp = self.module = DDP(model, comms, bucket_cap_mb=bucket_mb)

    def record(self, timeline: Timeline | None) -> None:
        self.ddp.reducer.timeline = timeline

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def finish(self) -> None:
        """Nothing is left to do: the end of backward waits."""

    def remove(self) -> None:
        self.ddp.reducer.remove()


class WrappedByTorch(Averaging):
    """During backward, by PyTorch's DDP, with a hook that sees its buckets.

    The hook does what PyTorch does without one. Once it has sent the last bucket, nothing is left
    to compute, and PyTorch waits until backward ends.
    """

    def __init__(self, model: nn.Module, comms: Comms, bucket_mb: float) -> None:
        super().__init__(model, comms, bucket_mb)
        self.ddp = self.module = TorchDDP(
            model, process_group=comms.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        self._wait = ExitStack()
        # Without annotations: PyTorch would compare them, and they are texts in this module.
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        with self._wait:
            super().backward(loss)

    def finish(self) -> None:
        """Nothing is left to do: the end of backward waits."""

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(self.comms.world_size)
        work = self.comms.group.allreduce([buffer])
        if self.timeline:
            self.timeline.launched(f"bucket {bucket.index()}", work)
            if bucket.is_last():
                self._wait.enter_context(self.timeline.span("wait for buckets", lane="wait"))
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda f: f.value()[0])
        return future


SCHEDULES: dict[str, Callable[[nn.Module, Comms, float], Averaging]] = {
    "naive": Averaging,
    "hooks": partial(Hooked, buckets=False),
    "bucketed": partial(Hooked, buckets=True),
    "ddp": Wrapped,
    "torch": WrappedByTorch,
}
