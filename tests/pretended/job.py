"""A process of a job on a pretended machine, and the book's chapters on it."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from microddp.stage import stage
from microddp.workloads import case_study
from pretended import communicators, devices, torch_cuda
from pretended.communicators import Log
from pretended.devices import machine

MEMORY = 2 << 30  # bytes of a device
# Instead of the case study's full size, which chapter 09 takes on every GPU.
TINY = case_study.SIZES["small"] | {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
}


def on_pretended_gpus(
    body: Callable[..., object], gpus: int, ranks_here: int | None = None, *arguments: Any
) -> Log:
    """Run ``body(*arguments)`` on this rank's pretended machine; what it called.

    Args:
        body: joins and leaves the job by itself.
        gpus: of each machine.
        ranks_here: the number of ranks of each machine; default: all are on one.
        arguments: passed on.
    """
    if ranks_here:
        rank = int(os.environ["RANK"])
        os.environ |= {
            "LOCAL_RANK": str(rank % ranks_here),
            "LOCAL_WORLD_SIZE": str(ranks_here),
        }
    machine.__class__.gpus, machine.__class__.memory = gpus, MEMORY
    torch.set_num_threads(1)  # what is computed on GPUs takes no cores from the other ranks
    torch_cuda.install()
    recorder = communicators.install()
    devices.install()
    body(*arguments)
    return recorder.log


def run_chapter(script: Path, text: str) -> None:
    """Run a chapter to its end, with measurements that are made once only.

    Args:
        script: its path.
        text: what to run in its place.
    """
    os.environ["MICRODDP_ROUNDS"] = "1"
    case_study.SIZES["full"] = TINY
    stage.ON_GPUS |= {"vocabulary": 64, "dim": 32, "depth": 2, "heads": 2, "context": 16}
    warnings.resetwarnings()
    os.chdir(script.parent)
    sys.argv = [str(script)]
    # Told in words: a report that shows variables would show all of the chapter's.
    if problem := _execute(script, text):
        raise AssertionError(problem)


def _execute(script: Path, text: str) -> str:
    try:
        exec(compile(text, script, "exec"), {"__name__": "__main__", "__file__": str(script)})
    except SystemExit as end:
        return f"ended with status {end.code}" if end.code else ""
    except Exception:
        return traceback.format_exc()
    return ""
