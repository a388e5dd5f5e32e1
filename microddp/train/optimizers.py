"""The optimizers of ``python -m microddp.train``, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for matrices, Adam for what has another number of dimensions; no decay of weights.

    Args:
        parameters: whole ones; Muon has no use for a slice of a matrix.
        lr: learning rate of Adam; Muon has that of an update whose values are as large as Adam's.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024;
    Liu et al., "Muon is scalable for LLM training", 2025, for the rate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        every = self.param_groups[0]["params"]
        matrices, others = [[p for p in every if (p.dim() == 2) is two] for two in (True, False)]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            # As Adam here has none: PyTorch's Muon alone decays weights by default, by 0.1.
            muon = torch.optim.Muon(matrices, lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.Adam(others, lr))
        self._share()

    def _share(self) -> None:
        """Let the two keep what they keep in one place."""
        for part in self._parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what both kept."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self) -> None:  # type: ignore[override]  # a closure is of no use to either
        """Update all parameters that have a gradient."""
        for part in self._parts:
            for group in part.param_groups:  # a schedule changes this optimizer's
                group["lr"] = self.param_groups[0]["lr"]
            part.step()


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr),
    "muon": MuonWithAdam,
}
