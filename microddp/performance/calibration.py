"""The network and the work of these ranks, measured: input of the simulator to check it by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch

from microddp.allreduce import AllReduce, ring_cost
from microddp.allreduce.ring import ring_all_reduce
from microddp.comms import Comms
from microddp.fitted import fit_alpha_beta
from microddp.performance.network import Port, Processor
from microddp.program import Layer, Work
from microddp.step_times import ComputeTimes
from microddp.timing import measure

SIZES = (1 << 10, 1 << 12, 1 << 18, 1 << 20)  # bytes


def measure_network(
    comms: Comms, repeat: int = 11, all_reduce: AllReduce = ring_all_reduce
) -> tuple[Port, Processor | None]:
    """Fit a port and a processor to all-reduces among these ranks. A collective.

    On hosts in a box a port has the bandwidth of its link, and only the latency is fitted.

    Args:
        comms: ranks that take part, two or more; better two than many.
        repeat: number of measurements of each size.
        all_reduce: sends as a ring does.

    Returns:
        The port, the same on every rank; and the processor that the ranks share, by this rank's
        own processor time, so that ranks get different ones. It is ``None`` if each rank has a
        machine of its own, or if no processor carries the messages.

    Raises:
        ValueError: there is one rank only.
    """
    if comms.world_size < 2:
        raise ValueError(f"rank {comms.rank}: expected two ranks or more to measure, got one")
    busy: dict[int, list[float]] = {size: [] for size in SIZES}

    def reduce(tensor: torch.Tensor) -> None:
        before = time.process_time()
        all_reduce(tensor, comms, "sum")
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
    """Find the port and the processor that explain ring all-reduces of so many bytes each.

    Each took some ``seconds``, and ``spent`` others of processor time on each rank. The ranks share
    the cores. The port's bandwidth, bytes a second, may be known.

    Raises:
        ValueError: as for :func:`~microddp.fitted.fit_alpha_beta`.
    """
    cost = ring_cost(ranks, 1)
    rounds, share = cost.rounds, cost.most_sent  # the share of the tensor that a rank sends
    alpha, beta = fit_alpha_beta(sizes, seconds, share / bandwidth if bandwidth else None)
    start, each = fit_alpha_beta(sizes, spent)
    return (
        Port(bandwidth or share / max(beta, 1e-15), alpha / rounds),
        Processor(start / rounds / cores, each / share / cores),
    )


def measured_work(compute: ComputeTimes, counts: Mapping[str, int], crowd: float = 1.0) -> Work:
    """Describe a measured step as work, with a layer for each parameter of the model.

    Args:
        compute: times of the model's step without communication.
        counts: number of values of each parameter, by its name.
        crowd: factor on the times of the optimizer and of copying: ranks that share a core.
    """
    moments = [0.0, *compute.ready.values()]
    moments[-1] = max(moments[-1], compute.backward)  # with what comes after the last gradient
    layers = [
        Layer(compute.forward * (end - start) / moments[-1], end - start, (counts[name],))
        for name, (start, end) in zip(compute.ready, pairwise(moments), strict=True)
    ]
    return Work(
        tuple(reversed(layers)), optimizer=compute.optimizer * crowd, copy=compute.copy * crowd
    )
