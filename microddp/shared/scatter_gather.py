"""Reduce-scatter and all-gather, the two halves of an all-reduce: by name, or what fits the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from microddp.allreduce import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from microddp.carrier import BACKEND
from microddp.comms import Comms
from microddp.shared.carriers import AUTO
from microddp.shared.collectives import shared_all_gather, shared_reduce_scatter
from microddp.shared.comm_hook import on_thread
from microddp.shared.region import machines_of
from microddp.timing import Recorder

Future = torch.futures.Future[torch.Tensor]
CollectiveName = Literal["reduce-scatter", "all-gather"]


@dataclass(frozen=True)
class ScatterGather:
    """A reduce-scatter and an all-gather of flat tensors whose length the ranks divide.

    Attributes:
        name: ``"ring"``, ``"shared"`` or ``"backend"``.
        reduce_scatter: sums over the ranks, so that each rank has its chunk of the sum, in place.
        all_gather: fills the tensor with every rank's chunk, in place.
        all_reduce: sums over ranks that hold the same chunk, in place; on a thread of its own.
        launched: whether the first two return the backend's work to wait for.
        blocking: whether :meth:`start` returns only when all is done. Copies through shared memory
            need a core, which backward has: a thread would only take turns with it.
    """

    name: str
    reduce_scatter: Callable[[torch.Tensor, Comms], Any]
    all_gather: Callable[[torch.Tensor, Comms], Any]
    all_reduce: Callable[[torch.Tensor, Comms], object]
    launched: bool = False
    blocking: bool = False

    def start(
        self,
        collective: CollectiveName,
        flat: torch.Tensor,
        comms: Comms,
        name: str,
        timeline: Recorder,
    ) -> Future:
        """Start one of the two. They run in the order in which they were started.

        Args:
            collective: which of the two.
            flat: a flat tensor whose length the number of ranks divides.
            comms: the ranks.
            name: name of the call in the timeline.
            timeline: records the call, and the wait for it if it is blocking.

        Returns:
            A future whose value is ``flat``.
        """
        call = self.all_gather if collective == "all-gather" else self.reduce_scatter
        if not self.blocking:
            if self.launched:  # here: in one order with this thread's collectives
                work = call(flat, comms)
                future = on_thread(lambda _: work.wait(), flat)
            else:
                future = on_thread(lambda tensor: call(tensor, comms), flat)
            timeline.launched(name, future, nbytes=flat.nbytes)
            return future
        waiting = timeline.span(f"wait for {name}", "wait")
        with waiting, timeline.span(name, "communication", flat.nbytes):
            call(flat, comms)
        done: Future = torch.futures.Future()
        done.set_result(flat)
        return done

    def all_reduce_after(
        self, chunk: Future, out: torch.Tensor, replicas: Comms, name: str, timeline: Recorder
    ) -> Future:
        """Start an all-reduce of a chunk among the ranks that hold the same one.

        It has a lane of its own: what goes on between nodes does not hold up what goes on inside
        them.

        Args:
            chunk: a future, after which ``out`` has this rank's values.
            out: summed in place.
            replicas: the ranks.
            name: name of the call in the timeline.
            timeline: records the call.

        Returns:
            A future whose value is ``out``.
        """

        def reduce(tensor: torch.Tensor) -> None:
            chunk.wait()
            self.all_reduce(tensor, replicas)

        future = on_thread(reduce, out, lane="between replicas")
        timeline.launched(name, future, nbytes=out.nbytes)
        return future


# PyTorch 2.13 renamed both, and warns of the names that 2.11 and 2.12 have.


def _reduce_scatter(flat: torch.Tensor, comms: Comms) -> Any:
    out = flat.tensor_split(comms.world_size)[comms.rank]
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, flat, group=comms.group, async_op=True)


def _all_gather(flat: torch.Tensor, comms: Comms) -> Any:
    own = flat.tensor_split(comms.world_size)[comms.rank]
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(flat, own, group=comms.group, async_op=True)


SCATTER_GATHERS = {
    each.name: each
    for each in (
        ScatterGather("ring", ring_reduce_scatter, ring_all_gather, ring_all_reduce),
        ScatterGather(
            "shared", shared_reduce_scatter, shared_all_gather, ring_all_reduce, blocking=True
        ),
        ScatterGather(
            BACKEND,
            _reduce_scatter,
            _all_gather,
            lambda flat, comms: comms.all_reduce(flat),
            launched=True,
        ),
    )
}


def scatter_gather(name: str, comms: Comms) -> ScatterGather:
    """Look up a reduce-scatter and an all-gather by name. A collective.

    Args:
        name: a key of ``SCATTER_GATHERS``, or ``"auto"``: the backend's with NCCL; ``"shared"``
            where the ranks of a CPU job are on one machine; else ``"ring"``, since gloo's
            reduce-scatter is an all-reduce for each rank.
        comms: the ranks.

    Raises:
        ValueError: there is no such name.
    """
    if name not in (AUTO, *SCATTER_GATHERS):
        known = ", ".join((AUTO, *SCATTER_GATHERS))
        raise ValueError(f"rank {comms.rank}: expected one of {known}, got {name!r}")
    if name != AUTO:
        return SCATTER_GATHERS[name]
    if comms.backend == "nccl":
        return SCATTER_GATHERS[BACKEND]
    one_machine = comms.device.type == "cpu" and len(machines_of(comms)) == 1 < comms.world_size
    return SCATTER_GATHERS["shared" if one_machine else "ring"]
