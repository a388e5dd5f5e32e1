"""microddp's collectives against the backend's own, at one size or over a sweep."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from microddp.bench.rows import Column, Row, progress_bar, report
from microddp.carrier import BACKEND
from microddp.comms import Comms
from microddp.fitted import bus_bandwidth
from microddp.report import human_bytes
from microddp.shared import (
    ALL_REDUCES,
    SCATTER_GATHERS,
    refused,
    region_of,
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
)
from microddp.timing import Timing, measure

SWEEP = tuple(2**k for k in range(10, 27, 2))  # bytes
LARGE = 1 << 20  # bytes; from here on a message's start-up is short beside its time on the wire
# Small tensors are sent several times in a row and timed together, as nccl-tests does: ranks leave
# a barrier one after the other, over a longer time than such a call takes. A row has ROW_BYTES.
ROW_BYTES, MOST_IN_A_ROW = 4 << 20, 50
COLLECTIVES = ("all_reduce", "broadcast", "all_gather")
IN_PLACE = "shared, no copies"  # on a tensor that is in shared memory
Call = Callable[[torch.Tensor], object]
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
}
COLUMNS: dict[str, Column] = {
    "size": lambda row: human_bytes(row["nbytes"]),
    "algorithm": "{algorithm}",
    "median ms": "{median_ms:.3g}",
    "p95 ms": "{p95_ms:.3g}",
    "algorithm GB/s": "{algorithm_gbs:.3g}",
    "bus GB/s": "{bus_gbs:.3g}",
    "time / backend": lambda row: row["ratio_to_backend"],
}
IF_KNOWN = {
    "time / wire": ("ratio_to_wire", "{ratio_to_wire:.2f}"),
    "time / copy": ("ratio_to_copy", "{ratio_to_copy:.3g}"),
}


def bench_allreduce(options: argparse.Namespace, comms: Comms) -> None:
    """Time every chosen algorithm at every size, taking turns within one run."""
    groups: dict[str, list[str]] = {"all": [*ALL_REDUCES, IN_PLACE], BACKEND: []}
    chosen = groups.get(options.algorithm, [options.algorithm])
    if options.collective != "all_reduce" and options.algorithm != BACKEND:
        if options.algorithm not in ("all", "shared"):
            raise RuntimeError(
                f"rank {comms.rank}: expected all, shared or {BACKEND} as --algorithm of "
                f"{options.collective}, got {options.algorithm}"
            )
        chosen = ["shared"]
    not_here = {name: why for name in chosen if (why := refused(name.split(",")[0], comms))}
    if not_here and options.algorithm != "all":
        raise RuntimeError(f"rank {comms.rank}: {not_here[options.algorithm]}")
    calls_of = {
        name: _call(options.collective, name, comms)
        for name in [BACKEND, *chosen]
        if name not in not_here
    }
    # Whole values; in an all-gather of the backend's, as many on each rank.
    value = DTYPES[options.dtype].itemsize
    value *= comms.world_size if options.collective == "all_gather" else 1
    asked = SWEEP if options.sweep else (int(options.size_mb * 2**20),)
    sizes = [max(1, size // value) * value for size in asked]
    comms.print(comms.describe())
    for name, why in not_here.items():
        comms.print(f"Without {name}: {why}.")
    timings: dict[str, dict[int, Timing]] = {name: {} for name in calls_of}
    rows: list[Row] = []
    rounds = len(sizes) * (options.warmup + options.iters)
    with progress_bar(rounds, comms) as bar:
        for nbytes in sizes:
            bar.set_description(human_bytes(nbytes))
            measured = _measure(nbytes, calls_of, options, comms, bar.update)
            for name, by_size in timings.items():
                by_size[nbytes] = measured[name]
                rows.append(_row(options.collective, name, nbytes, measured, comms))
    if comms.rank == 0:
        _report(rows, options, comms, timings)


def _measure(
    nbytes: int,
    calls_of: Mapping[str, Call],
    options: argparse.Namespace,
    comms: Comms,
    progress: Callable[[], object],
) -> dict[str, Timing]:
    """Time each call on a tensor of so many bytes, and a copy of the tensor."""
    dtype = DTYPES[options.dtype]
    numel = nbytes // dtype.itemsize
    tensor = torch.empty(numel, dtype=dtype, device=comms.device)
    twin = torch.empty_like(tensor)
    tensors = dict.fromkeys([*calls_of, "copy"], tensor)
    if IN_PLACE in calls_of:
        tensors[IN_PLACE] = region_of(comms).zeros(numel, dtype)
    if options.check:
        check = check_sum if options.collective == "all_reduce" else check_chunks
        for name, call in calls_of.items():
            check(name, call, tensors[name], comms)
    times = max(1, min(MOST_IN_A_ROW, ROW_BYTES // nbytes))

    def in_a_row(call: Call, tensor: torch.Tensor) -> None:
        for _ in range(times):
            call(tensor)

    def prepare() -> None:
        for each in set(tensors.values()):  # most are one
            each.fill_(1)

    measured = measure(
        {
            name: partial(in_a_row, call, tensors[name])
            for name, call in {**calls_of, "copy": twin.copy_}.items()
        },
        comms,
        warmup=options.warmup,
        repeat=options.iters,
        prepare=prepare,
        progress=progress,
    )
    return {
        name: Timing(tuple(seconds / times for seconds in timing.seconds))
        for name, timing in measured.items()
    }


def _call(collective: str, name: str, comms: Comms) -> Call:
    """Find a collective by name: the backend's or one of ours."""
    backend: dict[str, Call] = {
        "all_reduce": comms.all_reduce,
        "broadcast": comms.broadcast,
        "all_gather": lambda whole: SCATTER_GATHERS[BACKEND].all_gather(whole, comms).wait(),
    }
    if name == BACKEND:
        return backend[collective]
    if collective == "broadcast":
        return lambda tensor: shared_broadcast(tensor, comms)
    if collective == "all_gather":
        return lambda tensor: shared_all_gather(tensor, comms)
    algorithm = shared_all_reduce if name == IN_PLACE else ALL_REDUCES[name]
    return lambda tensor: algorithm(tensor, comms, "sum")


def check_chunks(name: str, call: Call, tensor: torch.Tensor, comms: Comms) -> None:
    """Check a broadcast of rank 0's tensor, or an all-gather of chunks, against the known result.

    Raises:
        RuntimeError: on every rank, if any rank has another result.
    """
    for rank, chunk in enumerate(tensor.tensor_split(comms.world_size)):
        chunk.fill_(rank if comms.rank in (0, rank) else -1)
    call(tensor)
    chunks = enumerate(tensor.tensor_split(comms.world_size))
    wrong = sum(int((chunk != rank).sum()) for rank, chunk in chunks)
    expected = f"rank r's number r in chunk r, after {name} in {tensor.numel()} places"
    comms.fail_together(f"{wrong} wrong" if wrong else "", expected)


def check_sum(name: str, reduce: Call, tensor: torch.Tensor, comms: Comms) -> None:
    """Check an all-reduce against a sum that is known exactly, in any dtype of up to 254 ranks.

    Of n places in a row each rank contributes 2 in its own, 1 in the others: all sums are n + 1.
    bfloat16 has all integers up to 256.

    Raises:
        RuntimeError: on every rank, if any rank has another result.
    """
    n = comms.world_size
    own = torch.arange(tensor.numel(), device=tensor.device) % n == comms.rank
    tensor.copy_(own + 1)
    reduce(tensor)
    wrong = int((tensor != n + 1).sum())
    expected = f"the exact sum of {name} in {tensor.numel()} places"
    comms.fail_together(f"{wrong} wrong" if wrong else "", expected)


def _row(
    collective: str, name: str, nbytes: int, measured: Mapping[str, Timing], comms: Comms
) -> Row:
    """Make the row of one algorithm at one size.

    Bandwidths are in GB/s (10^9 bytes): the size divided by the median time, and that of a bus as
    nccl-tests defines it. ``ratio_to_backend`` is the median over the rounds. ``ratio_to_wire`` is
    the time divided by that in which the links carry what a ring sends: 2 (n-1)/n of the bytes in
    an all-reduce, half of that in an all-gather, all of them in a broadcast. ``ratio_to_copy`` is
    the time divided by that of a copy of the tensor on all ranks at once: how near the memory's
    limit a collective is. ``None`` stands for what is unknown: the links' speed, or memory's where
    the tensor is not in main memory.
    """
    timing, backend = measured[name], measured[BACKEND]
    bus = bus_bandwidth(nbytes, timing.median, comms.world_size)
    if collective == "broadcast":
        bus = nbytes / timing.median
    elif collective == "all_gather":
        bus /= 2
    on_cpu = comms.device.type == "cpu"
    return {
        "algorithm": name,
        "nbytes": nbytes,
        "median_ms": timing.median * 1e3,
        "p95_ms": timing.percentile(95) * 1e3,
        "algorithm_gbs": nbytes / timing.median / 1e9,
        "bus_gbs": bus / 1e9,
        "ratio_to_backend": None if timing is backend else timing.ratio(backend).median,
        "ratio_to_wire": 1 / (bus * comms.box.seconds_per_byte) if comms.box and bus else None,
        "ratio_to_copy": timing.ratio(measured["copy"]).median if on_cpu else None,
    }


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Compare each algorithm with the backend, in a sentence on small and on large sizes."""
    said = []
    compared = [row for row in rows if row["ratio_to_backend"]]
    for name in dict.fromkeys(row["algorithm"] for row in compared):
        parts = []
        for large in (False, True):
            ratios = {
                row["nbytes"]: row["ratio_to_backend"]
                for row in compared
                if row["algorithm"] == name and (row["nbytes"] >= LARGE) == large
            }
            if ratios:
                ends = map(human_bytes, sorted({min(ratios), max(ratios)}))
                mean = statistics.geometric_mean(ratios.values())
                parts.append(f"{mean:.2f} times for {' to '.join(ends)}")
        said.append(f"{name}, by the time of the backend: {', '.join(parts)} (geometric mean).")
    return said


def _report(
    rows: Sequence[Row],
    options: argparse.Namespace,
    comms: Comms,
    timings: dict[str, dict[int, Timing]],
) -> None:
    columns = COLUMNS | {name: cell for name, (key, cell) in IF_KNOWN.items() if rows[0][key]}
    exact = "sum" if options.collective == "all_reduce" else "tensor"
    checked = [f"Every result was the exact {exact}."] if options.check else []
    report(rows, columns, [*conclusions(rows), *checked], options, comms)
    if options.plot:
        from microddp import figures  # only now: matplotlib takes a second to load

        what = options.collective.replace("_", "-").capitalize()
        figures.times_by_size(timings, title=f"{what}, {comms.describe()}")
        figures.save(options.plot)
