"""Test if this machine allows hosts in a box, and find processes that are left of them."""

import time

import psutil
import pytest

from microddp.hosts import Cluster, Link


def refusal() -> str:
    """Say why this machine allows no hosts in a box; empty if it does."""
    try:
        Cluster([Link.parse("1gbit")]).close()
    except RuntimeError as error:
        return str(error)
    return ""


needs_hosts = pytest.mark.skipif(bool(reason := refusal()), reason=reason)


def left(mark: str, seconds: float = 0.0) -> list[str]:
    """Command lines of processes with ``MARK=mark`` in their environment, after so long a wait.

    A namespace without a process is gone, and with it what was in it.
    """
    end = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:  # ended meanwhile, or somebody else's
                continue
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)
