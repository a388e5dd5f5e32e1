"""Devices of known speed: layers that pause as long as such a device computes.

An accelerator computes for a while, and its host's cores are free meanwhile. So does a layer that
sleeps: its parameters and gradients are real, and so is all that sends them, while no core is
taken. Then many ranks can be timed on few cores, and how long computing takes is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from microddp.program import Layer, Work

_owed = 0.0  # seconds by which this process's last pause was too long


def pause(seconds: float) -> None:
    """Sleep, and make up for it in the next call if the kernel woke this process up late.

    A device is not late because its host is: what it computes ends when it ends.
    """
    global _owed
    begun = time.perf_counter()
    if seconds > _owed:
        time.sleep(seconds - _owed)
    _owed = max(0.0, _owed + time.perf_counter() - begun - seconds)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: PausingLayer, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.parameters = layer, parameters
        pause(layer.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        pause(ctx.layer.backward_seconds)
        return gradient, None, *(torch.ones_like(p) for p in ctx.parameters)


class PausingLayer(nn.Module):
    """A layer of a device of known speed: it pauses, and passes on what it is given.

    Its gradients, which are ones, are all ready after the pause in backward.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = layer.forward, layer.backward
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(values)) for values in layer.tensors
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pause; gradients flow through ``x``, which has to require one."""
        result: torch.Tensor = _Pause.apply(x, self, *self.weights)  # type: ignore[no-untyped-call]
        return result


class PausingOptimizer(torch.optim.Optimizer):
    """An optimizer whose step pauses for some seconds, and leaves the parameters as they are."""

    def __init__(self, parameters: Any, seconds: float = 0.0) -> None:
        super().__init__(parameters, {"seconds": seconds})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Pause."""
        del closure
        pause(self.defaults["seconds"])


def pausing_model(work: Work, device: torch.device | str = "cpu") -> nn.Sequential:
    """Make a model whose layers pause as long as the work says.

    Example:
        >>> model = pausing_model(Work((Layer(0.004, 0.008, (1 << 17,)),) * 16))
        >>> pausing_loss(model(pausing_batch()[0])).backward()  # takes 0.192 s, and no core
    """
    return nn.Sequential(*map(PausingLayer, work.layers)).to(device)


def pausing_batch(device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for such a model: one number, and a target that is not looked at."""
    return torch.zeros(1, 1, requires_grad=True, device=device), torch.zeros(1, 1, device=device)


def pausing_loss(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    """Return a scalar from which backward runs through all layers."""
    return output.sum()
