"""A timeline of what every rank did: phases, gradients, collectives, and waiting for them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from microddp.comms import Comms
from microddp.timing.clock import Instant


@dataclass(frozen=True)
class Span:
    """Something that happened on one rank.

    Attributes:
        rank: where.
        lane: the kind of thing, one row of the picture: ``"compute"``, ``"gradients"``,
            ``"communication"``, or ``"wait"``, in which the rank waits for communication and
            computes nothing.
        name: what it was.
        start: seconds since the timeline began on that rank.
        end: likewise; equal to ``start`` for a mark.
        nbytes: of communication, the bytes of what is added up over the ranks, where that is known;
            a communication hook may have sent fewer.
    """

    rank: int
    lane: str
    name: str
    start: float
    end: float
    nbytes: int | None = None


# What says when it is complete: of a collective, or of a communication hook.
Launched = dist.Work | torch.futures.Future[Any]


class Recorder:
    """Takes events of a step as they happen; this one forgets them at once.

    It stands in for a :class:`Timeline` where nobody will look, so that no step need ask whether
    it is recorded.
    """

    def span(
        self, name: str, lane: str = "compute", nbytes: int | None = None
    ) -> AbstractContextManager[None]:
        """Run the block."""
        del name, lane, nbytes
        return _NOTHING

    def mark(self, name: str) -> None:
        """Do nothing, as the other methods."""

    def launched(self, name: str, work: Launched, nbytes: int | None = None) -> None:
        """Do nothing."""

    def between(self, name: str, lane: str, start: Instant, end: Instant) -> None:
        """Do nothing."""


_NOTHING = nullcontext()
NOT_RECORDED = Recorder()


class Timeline(Recorder):
    """A record of what began and ended when, on every rank.

    On CUDA a span is what the GPU did, by events on the current stream; on CPU it is what the
    process did. Any thread may record. Ranks on rank 0's machine share its clock, so their times
    can be compared. A rank on another machine starts its own clock when all have met in a barrier;
    its times may be off by as much as ranks differ in when they leave it.

    Example:
        >>> timeline = Timeline(comms)
        >>> with timeline.span("forward"):
        ...     loss = model(x).sum()
        >>> spans = timeline.gather()
    """

    def __init__(self, comms: Comms) -> None:
        self.comms = comms
        self._spans: list[tuple[str, str, Instant, Instant, int | None]] = []
        self._under_way: list[torch.futures.Future[None]] = []
        comms.barrier()
        if comms.device.type == "cuda":  # with no work queued, events and host clock begin as one
            torch.cuda.synchronize(comms.device)
        self._origin = Instant(comms.device)

    @contextmanager
    def span(self, name: str, lane: str = "compute", nbytes: int | None = None) -> Iterator[None]:
        """Record the block as one span, also if it raises."""
        start = Instant(self.comms.device)
        try:
            yield
        finally:
            self._spans.append((lane, name, start, Instant(self.comms.device), nbytes))

    def mark(self, name: str) -> None:
        """Record that a gradient is ready now."""
        now = Instant(self.comms.device)
        self.between(name, "gradients", now, now)

    def launched(self, name: str, work: Launched, nbytes: int | None = None) -> None:
        """Record from now until an asynchronous collective is complete, without waiting for it.

        Most of the span may be spent in a queue, behind collectives that were launched earlier.

        Args:
            name: what is on its way.
            work: what the call with ``async_op=True`` returned, or a communication hook's future.
            nbytes: as :attr:`Span.nbytes`.
        """
        start = Instant(self.comms.device)
        # NCCL calls back at once, on a stream that waits for the collective; gloo when it is done.
        clock = self.comms.device if self.comms.backend == "nccl" else torch.device("cpu")

        def complete(_: torch.futures.Future[Any]) -> None:
            self._spans.append(("communication", name, start, Instant(clock), nbytes))

        future = work.get_future() if isinstance(work, dist.Work) else work
        self._under_way.append(future.then(complete))

    def between(self, name: str, lane: str, start: Instant, end: Instant) -> None:
        """Record what went on between two instants that were taken before."""
        self._spans.append((lane, name, start, end, None))

    def take(self) -> list[Span]:
        """This rank's spans in the order they were recorded; the timeline forgets them.

        Waits for the collectives that were :meth:`launched`.
        """
        spans = [Span(self.comms.rank, *span) for span in self._recorded()]
        self._spans.clear()
        self._under_way.clear()
        return spans

    def gather(self) -> list[Span]:
        """Every rank's spans, rank by rank in the order they were recorded. A collective.

        Waits for the collectives that were :meth:`launched`.
        """
        mine = self._recorded()
        everyone = self.comms.all_gather_data((platform.node(), self._origin.seconds, mine))
        machine, zero, _ = everyone[0]
        gathered = []
        for rank, (node, origin, spans) in enumerate(everyone):
            shift = origin - zero if node == machine else 0.0
            for lane, name, start, end, nbytes in spans:
                gathered.append(Span(rank, lane, name, start + shift, end + shift, nbytes))
        return gathered

    def _recorded(self) -> list[tuple[str, str, float, float, int | None]]:
        for future in self._under_way:
            future.wait()
        recorded = []
        for lane, name, start, end, nbytes in self._spans:
            began, ended = self._origin.until(start), self._origin.until(end)
            # On CUDA a collective may be complete before the stream that launched it has come to
            # where its span starts: then it took no time.
            recorded.append((lane, name, began, max(began, ended), nbytes))
        return recorded
