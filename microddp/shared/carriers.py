"""Carriers of gradients by name: any all-reduce, or the fastest here for each size, as measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch

from microddp.allreduce import ALGORITHMS, AllReduce
from microddp.carrier import BACKEND, Carrier
from microddp.comms import Comms, Pending
from microddp.shared.collectives import shared_all_reduce, shared_broadcast
from microddp.shared.comm_hook import AtWait, on_thread
from microddp.shared.hierarchical import hierarchical_all_reduce, hierarchy_of
from microddp.shared.region import cached_per_comms, machines_of, region_of
from microddp.timing import Launched, measure

# All-reduces through memory that ranks share.
IN_MEMORY: dict[str, AllReduce] = {
    "shared": shared_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}
ALL_REDUCES = ALGORITHMS | IN_MEMORY
AUTO = "auto"
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # bytes; each is measured
ROUNDS = 5
PATIENCE = 0.5  # seconds; a size whose round would take longer is not measured


def refused(name: str, comms: Comms) -> str:
    """Say why the ranks of a job cannot use an all-reduce; empty if they can. A collective."""
    if name in IN_MEMORY and comms.device.type != "cpu":
        return f"{name} adds up in main memory, and gradients are on a GPU"
    if name == "shared" and len(machines := machines_of(comms)) > 1:
        return f"shared needs ranks of one machine, and these share memory as {machines}"
    return ""


@cached_per_comms
def fastest(comms: Comms) -> dict[int, str]:
    """Measure which all-reduce is the fastest, by size. Measured once for a group; a collective.

    Candidates are the backend's and, where ranks share memory, the one through it: ``shared`` on
    one machine, ``hierarchical`` on several.

    Returns:
        Names, by the size in bytes up to which each is the fastest; the last is for all larger
        tensors, too.
    """
    names = [BACKEND]
    machines = machines_of(comms) if comms.device.type == "cpu" else []
    if comms.world_size > 1 and any(len(ranks) > 1 for ranks in machines):
        names.append("shared" if len(machines) == 1 else "hierarchical")
    chosen: dict[int, str] = {}
    for nbytes in SIZES if len(names) > 1 else SIZES[:1]:
        tensor = torch.zeros(nbytes // 4, device=comms.device)
        calls: dict[str, Callable[[], object]] = {BACKEND: partial(comms.all_reduce, tensor)}
        calls |= {name: partial(ALL_REDUCES[name], tensor, comms, "sum") for name in names[1:]}
        timings = measure(calls, comms, warmup=1, repeat=ROUNDS)
        chosen[nbytes] = min(names, key=lambda name: timings[name].median)
        if max(timing.median for timing in timings.values()) * SIZES[1] / SIZES[0] > PATIENCE:
            break
    return chosen


def carrier(name: str, comms: Comms) -> Carrier:
    """Make a carrier, which sums gradients over the ranks, by name. A collective, also if it fails.

    For gradients on a GPU, ``"auto"`` and names of shared memory are replaced by the backend, with
    a warning: NCCL moves tensors from GPU to GPU.

    Args:
        name: one of ``ALL_REDUCES``, ``"backend"``, or ``"auto"``: the fastest for each size, as
            measured here. All but the backend's run on a thread beside backward; the last bucket,
            and all through shared memory where no core is free, are reduced by who waits for them.
        comms: the ranks.

    Raises:
        ValueError: on every rank: there is no such name, or the ranks of this job cannot use it, as
            ranks of two machines cannot share memory.
        RuntimeError: on every rank: the names differ.

    Example:
        >>> DDP(model, comms, all_reduce=carrier("shared", comms))
    """
    names = comms.headers.exchange(name)
    if len(set(names)) > 1:
        raise RuntimeError(f"rank {comms.rank}: expected one all_reduce on all ranks, got {names}")
    if name not in (AUTO, BACKEND, *ALL_REDUCES):
        known = ", ".join((AUTO, BACKEND, *ALL_REDUCES))
        raise ValueError(f"rank {comms.rank}: expected all_reduce of {known}, got {name!r}")
    if name in (AUTO, *IN_MEMORY) and comms.device.type != "cpu":
        if comms.rank == 0:
            warnings.warn(
                f"all_reduce={name!r}: gradients are on a GPU, where {comms.backend} carries "
                "them; memory that ranks share is main memory",
                stacklevel=2,
            )
        name = BACKEND
    if why := refused(name, comms):
        raise ValueError(f"rank {comms.rank}: expected another all_reduce: {why}")
    return Carrier(comms) if name == BACKEND else AlgorithmCarrier(comms, name)


class AlgorithmCarrier(Carrier):
    """Sums gradients over the ranks by a named all-reduce, or the fastest for each size.

    Made by :func:`carrier`.

    Attributes:
        by_size: names of all-reduces, by the size in bytes up to which each is used.
    """

    def __init__(self, comms: Comms, name: str) -> None:
        super().__init__(comms)
        self.name = name
        self._free_cores = comms.cores > comms.ranks_on_cores * torch.get_num_threads()
        self.by_size: Mapping[int, str] = fastest(comms) if name == AUTO else {1: name}
        if name == "hierarchical":  # now: on a thread its groups would be made among other calls
            hierarchy_of(comms)

    @property
    def maker(self) -> Callable[[Comms], Carrier]:
        return partial(carrier, self.name)

    def name_for(self, nbytes: int) -> str:
        """Name the all-reduce for a tensor of so many bytes."""
        larger = [size for size in self.by_size if size >= nbytes]
        return self.by_size[min(larger, default=max(self.by_size))]

    def zeros(self, parameter: torch.Tensor, numel: int) -> torch.Tensor:
        nbytes = numel * parameter.element_size()
        if self.comms.world_size > 1 and nbytes and self.name_for(nbytes) == "shared":
            return region_of(self.comms).zeros(numel, parameter.dtype)
        return super().zeros(parameter, numel)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        if self.comms.world_size > 1 and self.name_for(tensor.nbytes) == "shared":
            shared_broadcast(tensor, self.comms, src)
            return Pending()
        return super().broadcast(tensor, src)

    def start(self, buffer: torch.Tensor, is_last: bool) -> Launched:
        name = self.name_for(buffer.nbytes) if not buffer.is_sparse else BACKEND
        if name == BACKEND:
            return super().start(buffer, is_last)
        algorithm = ALL_REDUCES[name]
        # An all-reduce through memory needs a core, not a link: where no core is free beside those
        # that compute, a thread would only take turns with backward.
        no_core = name == "shared" and not self._free_cores
        # To compare calls, a thread would send among this one's messages.
        start = AtWait if is_last or no_core or self.comms.debug else on_thread
        return start(lambda tensor: algorithm(tensor, self.comms, "sum"), buffer)
