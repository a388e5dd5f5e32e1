"""Transfers under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar


class Pending:
    """A transfer under way. Its tensors may be read or written again once ``wait()`` returns."""

    __slots__ = ("_steps",)

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

    def wait(self) -> None:
        """Block until the transfer is complete (on CUDA: until the stream may use the result).

        Raises:
            RuntimeError: the other side failed, or the time-out passed; see
                :class:`~microddp.Comms` for what NCCL does instead.
        """
        while self._steps:
            self._steps.pop(0)()


class Exchange(Pending):
    """A message each way under way: first to receive, then to send. ``wait()`` waits for both."""

    __slots__ = ()

    def received(self) -> None:
        """Block until the incoming message is there; the outgoing one may be under way still.

        Errors are those of ``wait()``.
        """
        if len(self._steps) == 2:
            self._steps.pop(0)()


AnyPending = TypeVar("AnyPending", bound=Pending)


def started(pending: AnyPending, async_op: bool) -> AnyPending:
    """The transfer, complete unless its caller is to wait for it."""
    if not async_op:
        pending.wait()
    return pending
