"""Telling a rank's own failure from the echo of another's."""

from __future__ import annotations

# What PyTorch's store, its sockets, NCCL, and ranks that meet in shared memory raise; then Python.
GONE = {"DistError", "ConnectionResetError", "BrokenPipeError"}
# These are about a rank's own call: a message too long for its tensor, a group that NCCL refuses.
OWN = ("op.preamble", "ncclInvalidUsage", "ncclInvalidArgument")


def is_echo(error: BaseException | None) -> bool:
    """Return whether an error only says that another rank has gone, failed, or does not answer.

    Then the cause is that rank's. The exceptions that an error was raised from count as well.
    """
    seen: set[int] = set()  # `raise e from e` makes a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
        # gloo's errors are plain RuntimeErrors, which name their place in its source.
        of_gloo = "RuntimeError" in kinds and "/gloo/" in text
        if (kinds & GONE or of_gloo) and not any(word in text for word in OWN):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
