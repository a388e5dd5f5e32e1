"""The algorithms in DDP: a communication hook that averages a bucket with one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from microddp.comms import Comms
from microddp.hang import begin_lane

LANE = "all-reduce"
_under_way: dict[str, Future[None]] = {}  # by lane, the last that was begun


def all_reduce_hook(
    state: tuple[Comms, Callable[[torch.Tensor, Comms, str], None]], bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that averages with one of :mod:`microddp.allreduce`'s algorithms.

    The algorithm runs on a thread of its own while backward goes on: see :func:`on_thread`.

    Args:
        state: the ranks, and for example :func:`~microddp.allreduce.ring.ring_all_reduce`. What
            makes groups or maps memory when it is first called, as those of :mod:`microddp.shared`,
            has to be called once before.
        bucket: whose buffer is averaged in place.

    Example:
        >>> model.register_comm_hook((comms, ring_all_reduce), all_reduce_hook)
    """
    comms, algorithm = state
    return on_thread(lambda buffer: algorithm(buffer, comms, "mean"), bucket.buffer())


def on_thread(
    reduce: Callable[[torch.Tensor], object], buffer: torch.Tensor, lane: str = LANE
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a buffer in place on a thread; return its future, as a communication hook does.

    One thread for all of a lane, so that buckets travel in the order in which they were sent. On a
    GPU it has a stream of its own, which waits for what was computed before this call.

    Args:
        reduce: called with the buffer. What it raises is raised again where the bucket is waited
            for, as a ``RuntimeError``.
        buffer: of the bucket.
        lane: name of the thread. Lanes do not wait for each other, so each needs ranks of its own.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    computed = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None

    def run() -> None:
        try:
            with _after(computed, buffer.device, lane):
                reduce(buffer)
                future.set_result(buffer)
        except BaseException as error:  # whatever it is: else it would be waited for, for ever
            # The loss of another rank stays one: is_echo looks at the kind.
            kind = dist.DistError if isinstance(error, dist.DistError) else RuntimeError
            future.set_exception(kind(f"{type(error).__name__}: {error}"))  # type: ignore[arg-type]

    _under_way[lane] = _transport(lane).submit(run)
    return future


class AtWait(torch.futures.Future[torch.Tensor]):
    """A future of a buffer that is reduced by its waiter, in ``wait()``.

    For the last bucket, after which backward has nothing left to go on with: to wake up a thread
    would cost more than it hides.
    """

    def __init__(self, reduce: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> None:
        super().__init__(devices=[buffer.device] if buffer.is_cuda else None)
        self._reduce, self._buffer = reduce, buffer

    def wait(self) -> torch.Tensor:
        """Reduce the buffer, and return it. What that raises is raised here."""
        if not self.done():
            if LANE in _under_way:  # another wrapper's buckets, which use the same connections
                _under_way[LANE].result()
            try:
                self._reduce(self._buffer)
            except BaseException as error:
                self.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # type: ignore[arg-type]
                raise
            self.set_result(self._buffer)
        return super().wait()


def _after(
    computed: torch.cuda.Event | None, device: torch.device, lane: str
) -> AbstractContextManager[object]:
    """Let the block's GPU work wait for an event, beside the work of other threads."""
    if computed is None:
        return nullcontext()
    torch.cuda.set_device(device)  # a thread begins on GPU 0, and would make a context there
    stream = _stream(device, lane)
    stream.wait_event(computed)
    return torch.cuda.stream(stream)


@functools.cache
def _stream(device: torch.device, lane: str) -> torch.cuda.Stream:
    del lane  # each has its own
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _transport(lane: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, lane, initializer=begin_lane, initargs=(lane,))
