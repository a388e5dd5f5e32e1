"""The two halves of an all-reduce, with room for something in between: by name, or what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from microddp.allreduce import ring_all_gather, ring_reduce_scatter
from microddp.carrier import BACKEND
from microddp.comms import Comms
from microddp.shared.carriers import AUTO
from microddp.shared.collectives import shared_all_gather, shared_reduce_scatter
from microddp.shared.comm_hook import on_thread
from microddp.shared.room import machines_of
from microddp.timing import Recorder

Future = torch.futures.Future[torch.Tensor]
Half = Literal["reduce-scatter", "all-gather"]


@dataclass(frozen=True)
class Halves:
    """A reduce-scatter and an all-gather of flat tensors that the ranks divide evenly.

    Attributes:
        name: ``"ring"``, ``"shared"`` or ``"backend"``.
        reduce_scatter: adds up, so that each rank has its part of the sum where it lies.
        all_gather: brings each rank's part to all.
        at_once: whether a call returns when all is done. What goes through memory is work for a
            core, which backward has: a thread would only take turns with it.
    """

    name: str
    reduce_scatter: Callable[[torch.Tensor, Comms], object]
    all_gather: Callable[[torch.Tensor, Comms], object]
    at_once: bool = False

    def start(
        self, half: Half, flat: torch.Tensor, comms: Comms, name: str, timeline: Recorder
    ) -> Future:
        """Begin one of the two; calls are carried out in their order.

        Args:
            half: which.
            flat: a tensor that the ranks divide evenly.
            comms: the ranks.
            name: for the timeline.
            timeline: records it, and a wait for it if that is here.
        """
        call = self.all_gather if half == "all-gather" else self.reduce_scatter
        if not self.at_once:
            future = on_thread(lambda tensor: call(tensor, comms), flat)
            timeline.launched(name, future, nbytes=flat.nbytes)
            return future
        waiting = timeline.span(f"wait for {name}", "wait")
        with waiting, timeline.span(name, "communication", flat.nbytes):
            call(flat, comms)
        done: Future = torch.futures.Future()
        done.set_result(flat)
        return done


def _reduce_scatter(flat: torch.Tensor, comms: Comms) -> None:
    out = flat.tensor_split(comms.world_size)[comms.rank]
    call: Any = dist.reduce_scatter_tensor
    call(out, flat, group=comms.group)


def _all_gather(flat: torch.Tensor, comms: Comms) -> None:
    call: Any = dist.all_gather_into_tensor
    call(flat, flat.tensor_split(comms.world_size)[comms.rank], group=comms.group)


HALVES = {
    halves.name: halves
    for halves in (
        Halves("ring", ring_reduce_scatter, ring_all_gather),
        Halves("shared", shared_reduce_scatter, shared_all_gather, at_once=True),
        Halves(BACKEND, _reduce_scatter, _all_gather),
    )
}


def halves_of(name: str, comms: Comms) -> Halves:
    """The halves of a name. A collective.

    Args:
        name: a key of ``HALVES``, or ``"auto"``: the backend's with NCCL; ``"shared"`` where the
            ranks of a CPU job are of one machine; else ``"ring"``, since gloo's reduce-scatter is
            an all-reduce for each rank.
        comms: the ranks.

    Raises:
        ValueError: there is no such name.
    """
    if name not in (AUTO, *HALVES):
        known = ", ".join((AUTO, *HALVES))
        raise ValueError(f"rank {comms.rank}: expected one of {known}, got {name!r}")
    if name != AUTO:
        return HALVES[name]
    if comms.backend == "nccl":
        return HALVES[BACKEND]
    alone = comms.device.type == "cpu" and len(machines_of(comms)) == 1 < comms.world_size
    return HALVES["shared" if alone else "ring"]
