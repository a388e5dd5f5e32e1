"""This machine: its cores, processor and links, how threads are scheduled, who ends with whom."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import sys
from typing import Protocol

import torch

LINKS_VARIABLE = "MICRODDP_LINKS"  # a module, with a function links_of_this_job()
PR_SET_PDEATHSIG = 1


def schedule_as_batch() -> None:
    """Set the scheduling class of every thread of this process to Linux's "batch".

    gloo's background thread polls its sockets and *tries* the lock of a connection; while another
    thread holds it, the poll returns at once and the thread spins (gloo, transport/tcp/pair.cc,
    handleEvents). Under Linux's default class the background thread, woken by arriving data,
    may preempt the sender in the middle of its send, on the same core and with that lock held: it
    then spins until the scheduler's next tick, 4 ms at 250 Hz. Threads of class "batch" do not
    preempt on waking, so the sender finishes first. New threads inherit the class. Elsewhere than
    on Linux this does nothing.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, in whatever way. Linux only.

    A launcher that is killed cannot stop what it has started. Without this call, ranks would
    train on with nobody to restart them or to tell them to stop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_cores() -> int:
    """The number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name where Linux tells it, else the machine's architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held so far: of the GPU's allocator, or of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Links(Protocol):
    """Links of known speed between hosts that are one machine; in words, by ``str``."""

    @property
    def cores(self) -> int:
        """Processor cores of all hosts together."""
        ...

    @property
    def seconds_per_byte(self) -> float:
        """Seconds a byte takes on the slowest link, which a ring waits for."""
        ...


def known_links() -> Links | None:
    """The links of this job, as told by the module that ``MICRODDP_LINKS`` names."""
    if LINKS_VARIABLE not in os.environ:
        return None
    links: Links | None = importlib.import_module(os.environ[LINKS_VARIABLE]).links_of_this_job()
    return links
