"""What the simulator is fed where it can be checked: the network and the work of these ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch

from microddp.allreduce import fit_alpha_beta
from microddp.allreduce.ring import ring_all_reduce
from microddp.comms import Comms
from microddp.performance.network import Port, Processor
from microddp.program import Layer, Work
from microddp.timing import ComputeTimes, measure

SIZES = (1 << 10, 1 << 12, 1 << 20, 1 << 22)  # bytes


def measure_network(comms: Comms, repeat: int = 11) -> tuple[Port, Processor | None]:
    """Fit a rank's port to ring all-reduces among some ranks, and what their processor does.

    On hosts in a box a port has the bandwidth of its link, and only the latency is fitted.

    Args:
        comms: the ranks, two or more, better two than many.
        repeat: measurements of each size.

    Returns:
        The port; and the processor that the ranks share, ``None`` if they have each their own
        machine, or do not send by processors.

    Raises:
        ValueError: there is one rank only.
    """
    if comms.world_size < 2:
        raise ValueError(f"rank {comms.rank}: expected two ranks or more to measure, got one")
    busy: dict[int, list[float]] = {size: [] for size in SIZES}

    def reduce(tensor: torch.Tensor) -> None:
        before = time.process_time()
        ring_all_reduce(tensor, comms)
        busy[tensor.nbytes].append(time.process_time() - before)

    tensors = [torch.zeros(size // 4, device=comms.device) for size in SIZES]
    calls = {str(tensor.nbytes): partial(reduce, tensor) for tensor in tensors}
    times = measure(calls, comms, repeat=repeat)
    seconds = [times[str(size)].median for size in SIZES]
    spent = [statistics.median(busy[size]) for size in SIZES]
    known = 1 / comms.box.seconds_per_byte if comms.box else None
    port, processor = fit_network(comms.world_size, SIZES, seconds, spent, comms.cores, known)
    one_machine = comms.box is not None or comms.world_size <= comms.local_world_size
    return port, processor if comms.backend == "gloo" and one_machine else None


def fit_network(
    ranks: int,
    sizes: Sequence[int],
    seconds: Sequence[float],
    spent: Sequence[float],
    cores: int,
    bandwidth: float | None = None,
) -> tuple[Port, Processor]:
    """The port and the processor that explain ring all-reduces.

    Args:
        ranks: that took part.
        sizes: bytes of the tensors.
        seconds: that each took.
        spent: seconds of processor time that each took of each rank.
        cores: that the ranks share.
        bandwidth: bytes a second, if that is known.

    Raises:
        ValueError: as :func:`~microddp.allreduce.cost.fit_alpha_beta`.
    """
    rounds = 2 * (ranks - 1)
    share = rounds / ranks  # of the tensor, that a rank sends
    alpha, beta = fit_alpha_beta(sizes, seconds, share / bandwidth if bandwidth else None)
    start, each = fit_alpha_beta(sizes, spent)
    return (
        Port(bandwidth or share / max(beta, 1e-15), alpha / rounds),
        Processor(start / rounds / cores, each / share / cores),
    )


def measured_work(compute: ComputeTimes, counts: Mapping[str, int], crowd: float = 1.0) -> Work:
    """The work of a model whose step was measured, a layer for each of its parameters.

    Args:
        compute: of the model, without communication.
        counts: values of each parameter by its name.
        crowd: ranks that share a core, in what is not the layers' own computing: the optimizer,
            and copying.
    """
    moments = [0.0, *compute.ready.values()]
    layers = [
        Layer(
            compute.forward * (end - start) / moments[-1],
            end - start,
            (counts[name],),
        )
        for name, (start, end) in zip(compute.ready, pairwise(moments), strict=True)
    ]
    return Work(
        tuple(reversed(layers)),
        optimizer=compute.optimizer * crowd,
        copy=compute.copy * crowd,
    )
