"""Error feedback: a rank adds what it did not send of a gradient to the next one."""

# No `from __future__ import annotations`: PyTorch's DDP reads a hook's annotations, not strings.
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from microddp.comms import Comms
from microddp.compression.compressor import Compressor
from microddp.shared import on_thread


class Compression:
    """Averages buckets of gradients by a compressor, with error feedback; the state of the hook.

    Residuals are kept for each parameter, so that they survive a new plan of buckets. Of one that
    no rank used in a step (``find_unused_parameters``), what is sent of its residual is lost, since
    a wrapper leaves its gradient alone.

    Args:
        compressor: decides what is sent.
        comms: the ranks, as a group that nothing else uses at the same time.

    Attributes:
        residuals: by parameter, the part of its gradients that was not sent yet: flat.
    """

    def __init__(self, compressor: Compressor, comms: Comms) -> None:
        self.compressor = compressor
        self.comms = comms
        self.residuals: dict[torch.Tensor, torch.Tensor] = {}
        # By the parameters of a bucket: these, and their residuals concatenated.
        self._together: dict[tuple[int, ...], tuple[Sequence[torch.Tensor], torch.Tensor]] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def average(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Replace a bucket's gradients by the mean over the ranks of what they send. A collective.

        If a gradient on any rank is not finite, some values of every rank's mean are not, and the
        bucket's residuals are set to zero.

        Args:
            parameters: the parameters of the bucket.
            flat: their gradients, concatenated; becomes the mean.

        Raises:
            RuntimeError: the gradients are sparse or complex; or another rank failed.
        """
        if flat.layout is not torch.strided or not flat.is_floating_point():
            raise RuntimeError(
                f"rank {self.comms.rank}: compression expected dense gradients of real numbers, "
                f"got {flat.layout} of {flat.dtype}"
            )
        if not flat.numel():
            return
        gradient = self._residual(parameters, flat)
        gradient.add_(flat)
        if not _finite(gradient):
            gradient.fill_(torch.nan)  # so that any value that is sent tells the others
        self.compressor.average(gradient, flat, parameters, self.comms)
        if not _finite(flat):
            gradient.zero_()

    def _residual(self, parameters: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the residuals of a bucket's parameters, concatenated."""
        bucket = tuple(map(id, parameters))
        if bucket not in self._together:
            flat = torch.zeros_like(like)
            parts = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter in self.residuals:
                    part.copy_(self.residuals[parameter])
                self.residuals[parameter] = part
            moved = set(bucket)
            self._together = {
                other: kept for other, kept in self._together.items() if moved.isdisjoint(other)
            } | {bucket: (parameters, flat)}
        return self._together[bucket][1]

    def sent_bytes(self) -> float:
        """Compute the bytes that a rank sends in a step, on average over the ranks, by formula."""
        return sum(
            self.compressor.sent_bytes(
                [parameter.shape for parameter in parameters],
                flat.element_size(),
                self.comms.world_size,
            )
            for parameters, flat in self._together.values()
        )

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return all ranks' residuals of a module's gradients, and the compressor's state.

        A collective. The same on every rank: each residual has shape ``(world_size, values)``.
        """
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        return {
            "residuals": {names[p]: self.comms.all_gather(r) for p, r in self.residuals.items()},
            "compressor": self.compressor.state_dict(names),
        }

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Load the state of a module with the same parameter names.

        If it is of another number of ranks, each rank takes the mean of the residuals: the mean
        over the ranks of what is still to be sent stays the same.
        """
        parameters = dict(module.named_parameters())
        self._together.clear()
        self.residuals = {}
        for name, kept in state["residuals"].items():
            same = len(kept) == self.comms.world_size
            mine = kept[self.comms.rank] if same else kept.mean(dim=0)
            self.residuals[parameters[name]] = mine.to(parameters[name].device, copy=True)
        self.compressor.load_state_dict(state["compressor"], parameters)


def compress_hook(
    state: Compression,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Compress and average a bucket: a communication hook, for microddp's DDP and for PyTorch's.

    It runs on a thread beside backward, one bucket after the other.

    Args:
        state: see :func:`~microddp.compression.spec.hook`.
        bucket: a bucket of gradients, which become means in place.

    Returns:
        A future of the bucket's flat tensor.
    """
    return on_thread(partial(state.average, bucket.parameters()), bucket.buffer())


def _finite(values: torch.Tensor) -> bool:
    # One pass in nearly all cases: the sum of finite values is not finite only if it overflows.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
