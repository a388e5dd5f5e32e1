"""PowerSGD: send two thin factors of a matrix, found by one step of a power iteration each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from microddp.allreduce import ring_all_reduce, ring_cost
from microddp.comms import Comms
from microddp.compression.compressor import Compressor


class PowerSGD(Compressor):
    """Sends a gradient of ``rows x columns`` as two factors of at most ``rank`` columns each.

    The mean M is approximated by P Q': P is M Q, with the Q of the step before, made orthonormal,
    and the new Q is M' P. Both are linear in M, so they can be summed on the way. A tensor that
    would not become smaller is sent as it is, along with the first factors. A rank's residual is
    its own gradient minus the approximation of the mean.

    Args:
        rank: largest rank of an approximation.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for
    distributed optimization", NeurIPS 2019, algorithms 1 and 2.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self.factors: dict[torch.Tensor, torch.Tensor] = {}  # Q, by parameter

    def average(
        self,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        comms: Comms,
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        parts = list(
            zip(parameters, torch.split(gradient, sizes), torch.split(mean, sizes), strict=True)
        )
        low = [part for part in parts if self._columns(part[0].shape)]
        whole = [part for part in parts if not self._columns(part[0].shape)]
        matrices = [mine.view(len(parameter), -1) for parameter, mine, _ in low]

        firsts = [m @ self._factor(p, m) for (p, *_), m in zip(low, matrices, strict=True)]
        together = _concatenated([*firsts, *(mine for _, mine, _ in whole)])
        ring_all_reduce(together, comms, "mean")
        *firsts, rest = _split(together, [first.shape for first in firsts])
        for (_, mine, averaged), part in zip(
            whole, torch.split(rest, [mine.numel() for _, mine, _ in whole]), strict=True
        ):
            averaged.copy_(part)
            mine.zero_()
        if not low:
            return

        bases = [_orthonormal(first) for first in firsts]
        seconds = [m.T @ basis for m, basis in zip(matrices, bases, strict=True)]
        together = _concatenated(seconds)
        ring_all_reduce(together, comms, "mean")
        *seconds, _ = _split(together, [second.shape for second in seconds])
        for (p, _, averaged), m, basis, second in zip(low, matrices, bases, seconds, strict=True):
            torch.mm(basis, second.T, out=averaged.view(m.shape))
            m.sub_(averaged.view(m.shape))
            self.factors[p] = second
        if not together.isfinite().all():  # on all ranks
            for p, *_ in low:
                del self.factors[p]

    def _columns(self, shape: torch.Size) -> int:
        """Count the columns of a tensor's factors; 0 if factors would be no smaller."""
        if len(shape) < 2 or not shape.numel():
            return 0
        rows, columns = shape[0], shape.numel() // shape[0]
        rank = min(rows, columns, self.rank)
        return rank if rank * (rows + columns) < rows * columns else 0

    def _factor(self, parameter: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return a parameter's second factor Q, made orthonormal; draw it if there is none yet."""
        if parameter not in self.factors:
            shape = (matrix.shape[1], self._columns(parameter.shape))
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            self.factors[parameter] = drawn.to(matrix)
        return _orthonormal(self.factors[parameter])

    def sent_bytes(self, shapes: Sequence[torch.Size], itemsize: int, world_size: int) -> float:
        values = 0
        for shape in shapes:
            columns = self._columns(shape)
            values += columns * (shape[0] + shape[1:].numel()) if columns else shape.numel()
        return ring_cost(world_size, values * itemsize).most_sent

    def state_dict(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        """Return the factors by parameter name, and the state of the generator."""
        factors = {names[parameter]: factor.clone() for parameter, factor in self.factors.items()}
        return {"factors": factors, "generator": self.generator.get_state()}

    def load_state_dict(
        self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Load the factors and the generator of another compressor."""
        self.generator.set_state(state["generator"])
        self.factors = {
            parameters[name]: factor.to(parameters[name].device, copy=True)
            for name, factor in state["factors"].items()
        }


def _concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Split a flat tensor into views of these shapes, and a flat view of the rest."""
    sizes = [shape.numel() for shape in shapes]
    *parts, rest = torch.split(flat, [*sizes, len(flat) - sum(sizes)])
    return [*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)), rest]


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a basis of a matrix's columns. There is no QR decomposition in 16 bits."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    basis: torch.Tensor = torch.linalg.qr(wide).Q
    return basis.to(matrix.dtype)
