"""What a process runs on."""

import os
import threading

import torch
from ranks import on_ranks

from microddp.comms import cpu_cores, cpu_name
from microddp.comms.machine import schedule_as_batch

linux = hasattr(os, "SCHED_BATCH")


def policies():
    """The scheduling class of each thread of this process."""
    if not linux:
        return {"none"}
    classes = {os.SCHED_BATCH: "batch", os.SCHED_OTHER: "other"}
    return {classes[os.sched_getscheduler(int(t))] for t in os.listdir("/proc/self/task")}


@on_ranks(1)
def test_the_class_batch_holds_for_all_threads_old_and_new(comms):
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    schedule_as_batch()
    new = threading.Thread(target=done.wait)
    new.start()
    assert policies() == {"batch" if linux else "none"}
    done.set()
    assert comms.all_gather(torch.ones(1)).tolist() == [[1]], "the group's threads still work"


def test_cores_are_those_this_process_may_use():
    assert 1 <= cpu_cores() <= os.cpu_count()
    if hasattr(os, "sched_setaffinity"):
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {min(allowed)})
            assert cpu_cores() == 1
        finally:
            os.sched_setaffinity(0, allowed)


def test_the_processor_has_a_name_of_one_line():
    name = cpu_name()
    assert name == name.strip() != ""
    assert "\n" not in name
