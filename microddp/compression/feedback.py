"""Error feedback: what a rank did not send of a gradient, it adds to the next one."""

# Without annotations from the future: PyTorch's DDP reads those of a hook, and wants no texts.
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
    """Averages buckets of gradients by what a compressor sends; the state of the hook.

    What is kept back is kept for each parameter, so that it outlives buckets that are dealt anew.

    Args:
        compressor: says what is sent.
        comms: the ranks, as a group that nobody else uses meanwhile.

    Attributes:
        residuals: what was not sent yet, by parameter: flat.
    """

    def __init__(self, compressor: Compressor, comms: Comms) -> None:
        self.compressor = compressor
        self.comms = comms
        self.residuals: dict[torch.Tensor, torch.Tensor] = {}
        # What a bucket's parameters kept back, side by side; by which parameters these are.
        self._together: dict[tuple[int, ...], tuple[Sequence[torch.Tensor], torch.Tensor]] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def average(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Replace a bucket's gradients by the mean over the ranks of what they send. A collective.

        If a gradient on any rank is not finite, then some of every rank's means are not, and
        what was kept back for this bucket is forgotten.

        Args:
            parameters: of the bucket.
            flat: their gradients side by side.

        Raises:
            RuntimeError: the gradients are sparse or complex; or another rank failed.
        """
        if flat.layout is not torch.strided or not flat.is_floating_point():
            raise RuntimeError(
                f"rank {self.comms.rank}: compression expected dense gradients of real numbers, "
                f"got {flat.layout} of {flat.dtype}"
            )
        gradient = self._residual(parameters, flat)
        gradient.add_(flat)
        if not _finite(gradient):
            gradient.fill_(torch.nan)  # so that whatever of it is sent tells the others
        self.compressor.average(gradient, flat, parameters, self.comms)
        if not _finite(flat):
            gradient.zero_()

    def _residual(self, parameters: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """What the bucket's parameters kept back, side by side."""
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
        """Bytes that a rank sends for the buckets of the last step, by formula; the ranks' mean."""
        return sum(
            self.compressor.sent_bytes(
                [parameter.shape for parameter in parameters],
                flat.element_size(),
                self.comms.world_size,
            )
            for parameters, flat in self._together.values()
        )

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """What all ranks keep back of a module's gradients, and the compressor's state.

        A collective. The same on every rank: each residual has shape ``(world_size, values)``.
        """
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        return {
            "residuals": {names[p]: self.comms.all_gather(r) for p, r in self.residuals.items()},
            "compressor": self.compressor.state_dict(names),
        }

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Go on from what was kept back for a module of the same names.

        If that were other ranks in number, each takes the mean: so much is still to be sent.
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
    """The communication hook, for microddp's DDP and for PyTorch's.

    Runs on a thread of its own, one bucket after the other, while backward goes on.

    Args:
        state: see :func:`~microddp.compression.spec.hook`.
        bucket: of gradients, which become means in place.
    """
    return on_thread(partial(state.average, bucket.parameters()), bucket.buffer())


def _finite(values: torch.Tensor) -> bool:
    # One pass in nearly all cases: finite values can only have a sum that is not if it overflows.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
