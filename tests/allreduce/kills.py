"""Ranks killed at random moments of calls through shared memory, and a great many such calls.

``python tests/allreduce/kills.py --kills 200`` kills a rank with SIGKILL while all make one call
after another, and ends with status 1 unless every survivor reports the loss in time, and nothing is
left. ``--calls 2000000`` makes so many small calls instead, and checks each result.
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import run

from microddp.comms import Comms
from microddp.launch import JobFailed
from microddp.shared import (
    region_of,
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
    shared_reduce_scatter,
)

SIZES = (5, 1_000, 100_000, 1_000_000)  # float32: in one shot, in a piece, in several
LIMIT = 2.0  # seconds after a death in which all others know of it


def calls_until_killed(comms: Comms, seed: int, victim: int, after: float) -> float:
    """Make calls at random; how long after the death a survivor was told."""
    generator = random.Random(seed)  # the same calls on every rank
    region = region_of(comms)
    tensors = [torch.ones(size) for size in SIZES]
    tensors += [region.zeros(size, torch.float32) for size in SIZES]
    calls = (
        shared_all_reduce,
        lambda tensor, comms: shared_broadcast(tensor, comms, src=comms.world_size - 1),
        shared_reduce_scatter,
        shared_all_gather,
    )
    comms.barrier()
    # From outside, so that it comes at any moment, and not when Python is ready for it.
    planned = time.monotonic() + after
    if comms.rank == victim:
        os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", f"sleep {after}; kill -9 {os.getpid()}")
    try:
        while time.monotonic() < planned + LIMIT:
            generator.choice(calls)(generator.choice(tensors), comms)
    except RuntimeError as error:
        told = time.monotonic() - planned
        if f"rank {victim}" not in str(error) and "error:" not in str(error):
            raise
        return told
    raise AssertionError("told of nothing")


def many_calls(comms: Comms, times: int) -> float:
    """Check the sum of each of many small calls; seconds of one."""
    n, tensor = comms.world_size, torch.empty(3)
    shared_all_reduce(tensor, comms)
    began = time.monotonic()
    for k in range(times):
        tensor.fill_(comms.rank + k % 1000)
        shared_all_reduce(tensor, comms)
        if tensor.tolist() != [n * (k % 1000) + n * (n - 1) / 2] * 3:
            raise AssertionError((k, tensor))
    return (time.monotonic() - began) / times


def leftovers() -> list[str]:
    """What has a name in the machine's shared memory, and is ours."""
    return [name for name in os.listdir("/dev/shm") if "microddp" in name]


def kill(kills: int, seed: int) -> bool:
    """Print what came of each; whether all was right."""
    generator = random.Random(seed)
    told, wrong = [], 0
    for i in range(kills):
        n = generator.choice((2, 3, 4))
        victim, after = generator.randrange(n), generator.uniform(0, 0.3)
        try:
            said = run(calls_until_killed, n, seed + i, victim, after, dies=[victim])
            if left := leftovers():
                raise AssertionError(f"left: {left}")
            told += [t for rank, t in enumerate(said) if rank != victim]
            if max(told) > LIMIT:
                raise AssertionError(f"told after {max(told):.2f} s")
        except (AssertionError, JobFailed) as error:
            wrong += 1
            print(f"{n} ranks, rank {victim} killed after {after:.3f} s: {error}", flush=True)
    told.sort()
    print(
        f"{len(told)} survivors told {statistics.median(told):.2f} s after the kill (median), "
        f"{told[int(0.95 * len(told))]:.2f} s (95 %), {told[-1]:.2f} s at most\n"
        f"{kills} kills, {wrong} not right"
    )
    return not wrong


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--calls", type=int, help="instead: so many calls")
    parser.add_argument("--ranks", type=int, default=2, help="of those calls")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if options.calls:
        seconds = max(run(many_calls, options.ranks, options.calls, timeout=3600.0))
        print(f"{options.calls} calls of {options.ranks} ranks, {seconds * 1e6:.1f} us each: right")
        return 0
    print(f"--seed {options.seed}", flush=True)
    return not kill(options.kills, options.seed)


if __name__ == "__main__":
    sys.exit(main())
