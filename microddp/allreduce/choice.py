"""Which all-reduce carries the gradients of a job: by name, or the fastest here, as measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from microddp.allreduce.comm_hook import AtWait, on_thread
from microddp.allreduce.hierarchical import hierarchical_all_reduce
from microddp.allreduce.ring import ring_all_reduce
from microddp.allreduce.shared_memory import shared_all_reduce, shared_broadcast
from microddp.allreduce.whole_tensor import (
    direct_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
)
from microddp.comms import Comms, Pending
from microddp.shared import by_comms, machines_of, room_of
from microddp.timing import measure

AllReduce = Callable[[torch.Tensor, Comms, str], None]

ALGORITHMS: dict[str, AllReduce] = {
    "naive": naive_all_reduce,
    "direct": direct_all_reduce,
    "ring": ring_all_reduce,
    "doubling": recursive_doubling_all_reduce,
    "shared": shared_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}
BACKEND, AUTO = "backend", "auto"
IN_MEMORY = ("shared", "hierarchical")  # through memory that ranks share
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # bytes that are measured
ROUNDS = 5
PATIENCE = 0.5  # seconds that a round of the next larger size may take


def refused(name: str, comms: Comms) -> str:
    """Why the ranks of a job cannot use an all-reduce; empty if they can. A collective."""
    if name in IN_MEMORY and comms.device.type != "cpu":
        return f"{name} adds up in main memory, and gradients are on a GPU"
    if name == "shared" and len(machines := machines_of(comms)) > 1:
        return f"shared needs ranks of one machine, and these share memory as {machines}"
    return ""


@by_comms
def fastest(comms: Comms) -> dict[int, str]:
    """The fastest of those that make sense here, by bytes. Measured once; a collective.

    They are the backend's and, of ranks that share memory, the one through it: ``shared`` if it is
    that of all, ``hierarchical`` of several machines.

    Returns:
        The name for tensors of up to so many bytes; the last holds for all that are larger.
    """
    names = [BACKEND]
    machines = machines_of(comms) if comms.device.type == "cpu" else []
    if comms.world_size > 1 and any(len(ranks) > 1 for ranks in machines):
        names.append("shared" if len(machines) == 1 else "hierarchical")
    chosen: dict[int, str] = {}
    for nbytes in SIZES if len(names) > 1 else SIZES[:1]:
        tensor = torch.zeros(nbytes // 4, device=comms.device)
        calls = {name: partial(reduce_by(name), tensor, comms, "sum") for name in names}
        timings = measure(calls, comms, warmup=1, repeat=ROUNDS)
        chosen[nbytes] = min(names, key=lambda name: timings[name].median)
        if max(timing.median for timing in timings.values()) * SIZES[1] / SIZES[0] > PATIENCE:
            break
    return chosen


def reduce_by(name: str) -> AllReduce:
    """An all-reduce by its name, the backend's own among them."""
    return _backend_all_reduce if name == BACKEND else ALGORITHMS[name]


def _backend_all_reduce(tensor: torch.Tensor, comms: Comms, op: str) -> None:
    if op == "mean":
        comms.all_reduce_mean(tensor)
    else:
        comms.all_reduce(tensor, op)


class Carrier:
    """Adds gradients up over the ranks while backward goes on, by the all-reduce of its name.

    Made on all ranks together. On a GPU it stays with the backend, NCCL where there is a GPU for
    each rank, which moves tensors from GPU to GPU; it warns then.

    Args:
        comms: the ranks.
        name: one of ``ALGORITHMS``, ``"backend"``, or ``"auto"``: the fastest for each size, as
            measured here.

    Attributes:
        by_size: its names, for tensors of up to so many bytes.

    Raises:
        ValueError: there is no such name.
        RuntimeError: on every rank: the ranks of this job cannot use it.
    """

    def __init__(self, comms: Comms, name: str = BACKEND) -> None:
        if name not in (AUTO, BACKEND, *ALGORITHMS):
            known = ", ".join((AUTO, BACKEND, *ALGORITHMS))
            raise ValueError(f"rank {comms.rank}: expected all_reduce of {known}, got {name!r}")
        self.comms = comms
        if name in (AUTO, *IN_MEMORY) and comms.device.type != "cpu":
            if comms.rank == 0:
                warnings.warn(
                    f"all_reduce={name!r}: gradients are on a GPU, where {comms.backend} carries "
                    "them; memory that ranks share is main memory",
                    stacklevel=3,
                )
            name = BACKEND
        if why := refused(name, comms):
            raise RuntimeError(f"rank {comms.rank}: expected another all_reduce: {why}")
        self._free_cores = comms.cores > comms.ranks_on_cores * torch.get_num_threads()
        self.by_size: Mapping[int, str] = fastest(comms) if name == AUTO else {1: name}

    def name_for(self, nbytes: int) -> str:
        """The name of what carries a tensor of so many bytes."""
        larger = [size for size in self.by_size if size >= nbytes]
        return self.by_size[min(larger, default=max(self.by_size))]

    def zeros(self, parameter: torch.Tensor, numel: int) -> torch.Tensor:
        """A flat buffer of zeros for gradients of a parameter's kind, where it is added up best."""
        nbytes = numel * parameter.element_size()
        if self.comms.world_size > 1 and nbytes and self.name_for(nbytes) == "shared":
            return room_of(self.comms).zeros(numel, parameter.dtype)
        return parameter.detach().new_zeros(numel)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Pending:
        """Begin to overwrite a tensor by that of rank ``src``, in memory where sums go through it.

        Args:
            tensor: contiguous.
            src: a rank.
        """
        if self.comms.world_size > 1 and self.name_for(tensor.nbytes) == "shared":
            shared_broadcast(tensor, self.comms, src)
            return Pending()
        return self.comms.broadcast(tensor, src, async_op=True)

    def start(
        self, buffer: torch.Tensor, is_last: bool
    ) -> dist.Work | torch.futures.Future[torch.Tensor]:
        """Begin to add a buffer up over the ranks, in place.

        Args:
            buffer: of gradients.
            is_last: whether no other is to follow in this backward. It is added up when it is
                waited for, after all others.

        Returns:
            What to wait for.
        """
        name = self.name_for(buffer.nbytes) if not buffer.is_sparse else BACKEND
        if name == BACKEND:
            return self.comms.group.allreduce([buffer])
        algorithm = ALGORITHMS[name]
        # What goes through memory is work for a core, and not for a link: where no core is free
        # beside those that compute, a thread would only take turns with backward.
        working = name == "shared" and not self._free_cores
        start = AtWait if is_last or working else on_thread
        return start(lambda tensor: algorithm(tensor, self.comms, "sum"), buffer)
