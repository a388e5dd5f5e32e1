"""Transfers under way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

NO_CALL: AbstractContextManager[None] = nullcontext()


class Pending:
    """A transfer under way. Its tensors may be read or written again once ``wait()`` returns.

    Args:
        steps: what is to be waited for, in this order.
        call: what the time of waiting is recorded as.
    """

    __slots__ = ("_call", "_steps")

    def __init__(
        self, *steps: Callable[[], object], call: AbstractContextManager[None] = NO_CALL
    ) -> None:
        self._steps = list(steps)
        self._call = call

    def wait(self) -> None:
        """Block until the transfer is complete (on CUDA: until the stream may use the result).

        Raises:
            RuntimeError: the other side failed, or the time-out passed; see
                :class:`~microddp.Comms` for what NCCL does instead.
        """
        if self._steps:
            with self._call:
                while self._steps:
                    self._steps.pop(0)()


class Exchange(Pending):
    """A message each way under way: first to receive, then to send. ``wait()`` waits for both.

    To wait is not recorded, since exchanges are many, and quick; an error is.
    """

    __slots__ = ()

    def wait(self) -> None:
        self._wait_until_left(0)

    def received(self) -> None:
        """Block until the incoming message is there; the outgoing one may be under way still.

        Errors are those of ``wait()``.
        """
        self._wait_until_left(1)

    def _wait_until_left(self, count: int) -> None:
        try:
            while len(self._steps) > count:
                self._steps.pop(0)()
        except RuntimeError as error:
            self._call.__exit__(type(error), error, error.__traceback__)
            raise


def started(pending: Pending, async_op: bool) -> Pending:
    """The transfer, complete unless its caller is to wait for it."""
    if not async_op:
        pending.wait()
    return pending
