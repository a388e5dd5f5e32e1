"""microddp's all-reduce algorithms against the backend's own, at one size or over a sweep."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from microddp.allreduce import ALGORITHMS, bus_bandwidth
from microddp.bench.rows import report
from microddp.comms import Comms
from microddp.report import human_bytes
from microddp.timing import Timing, measure

SWEEP = tuple(2**k for k in range(10, 27, 2))  # bytes
LARGE = 1 << 20  # bytes; from here on the start-up of a message is small beside its travel
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
}


@dataclass(frozen=True)
class Row:
    """One algorithm at one size; times in milliseconds, bandwidths in GB/s (10^9 bytes).

    The ratio to the backend is the median of those of each round. That to the wire is to the time
    in which the links carry what a ring must send, 2 (n-1)/n of the bytes.
    """

    algorithm: str
    nbytes: int
    median_ms: float
    p95_ms: float
    algorithm_gbs: float
    bus_gbs: float
    ratio_to_backend: float | None
    ratio_to_wire: float | None = None  # where the links' speed is known


def bench_allreduce(options: argparse.Namespace, comms: Comms) -> None:
    """Time every chosen algorithm at every size, taking turns within one run."""
    groups: dict[str, list[str]] = {"all": [*ALGORITHMS], "backend": []}
    chosen = groups.get(options.algorithm, [options.algorithm])
    reduce: dict[str, Callable[[torch.Tensor], object]] = {"backend": comms.all_reduce}
    reduce |= {name: _bind(ALGORITHMS[name], comms) for name in chosen}
    sizes = SWEEP if options.sweep else (int(options.size_mb * 2**20),)
    comms.print(comms.describe())
    timings: dict[str, dict[int, Timing]] = {name: {} for name in reduce}
    rounds = len(sizes) * (options.warmup + options.iters)
    with tqdm(
        total=rounds, disable=None if comms.rank == 0 else True, unit="round", leave=False
    ) as bar:
        for nbytes in sizes:
            dtype = DTYPES[options.dtype]
            tensor = torch.empty(max(1, nbytes // dtype.itemsize), dtype=dtype, device=comms.device)
            bar.set_description(human_bytes(nbytes))
            if options.check:
                for name, call in reduce.items():
                    check_sum(name, call, tensor, comms)
            calls = {name: partial(call, tensor) for name, call in reduce.items()}
            measured = measure(
                calls,
                comms,
                warmup=options.warmup,
                repeat=options.iters,
                prepare=partial(tensor.fill_, 1),
                progress=bar.update,
            )
            for name, timing in measured.items():
                timings[name][nbytes] = timing
    rows = [
        _row(name, nbytes, by_size[nbytes], timings["backend"][nbytes], comms)
        for nbytes in sizes
        for name, by_size in timings.items()
    ]
    if comms.rank == 0:
        _report(rows, options, comms, timings)


def _bind(
    algorithm: Callable[[torch.Tensor, Comms, str], None], comms: Comms
) -> Callable[[torch.Tensor], None]:
    return lambda tensor: algorithm(tensor, comms, "sum")


def check_sum(
    name: str, reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor, comms: Comms
) -> None:
    """Compare an all-reduce with a sum that is known exactly, in any dtype.

    Rank r contributes r + 1 in every third place, 1 in the others: the sums are small integers.

    Raises:
        RuntimeError: on every rank, if any rank has another result.
    """
    places = torch.arange(tensor.numel(), device=tensor.device) % 3 == 0
    tensor.copy_(torch.where(places, comms.rank + 1, 1))
    reduce(tensor)
    n = comms.world_size
    expected = torch.where(places, n * (n + 1) // 2, n).to(tensor.dtype)
    wrong = int((tensor != expected).sum())
    comms.fail_together(
        f"{wrong} wrong" if wrong else "",
        f"the exact sum of {name} in {tensor.numel()} places",
    )


def _row(name: str, nbytes: int, timing: Timing, backend: Timing, comms: Comms) -> Row:
    bus = bus_bandwidth(nbytes, timing.median, comms.world_size)
    return Row(
        algorithm=name,
        nbytes=nbytes,
        median_ms=timing.median * 1e3,
        p95_ms=timing.percentile(95) * 1e3,
        algorithm_gbs=nbytes / timing.median / 1e9,
        bus_gbs=bus / 1e9,
        ratio_to_backend=None if timing is backend else timing.ratio(backend).median,
        ratio_to_wire=1 / (bus * comms.box.seconds_per_byte) if comms.box and bus else None,
    )


def conclusions(rows: Sequence[Row]) -> list[str]:
    """A sentence on each algorithm against the backend: where start-up counts, where bytes do."""
    said = []
    for name in dict.fromkeys(row.algorithm for row in rows if row.ratio_to_backend):
        parts = []
        for large in (False, True):
            ratios = {
                row.nbytes: row.ratio_to_backend
                for row in rows
                if row.algorithm == name and row.ratio_to_backend and (row.nbytes >= LARGE) == large
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
    cells = [
        {
            "size": human_bytes(row.nbytes),
            "algorithm": row.algorithm,
            "median ms": f"{row.median_ms:.3g}",
            "p95 ms": f"{row.p95_ms:.3g}",
            "algorithm GB/s": f"{row.algorithm_gbs:.3g}",
            "bus GB/s": f"{row.bus_gbs:.3g}",
            "time / backend": "" if row.ratio_to_backend is None else f"{row.ratio_to_backend:.2f}",
            **({"time / wire": f"{row.ratio_to_wire:.2f}"} if row.ratio_to_wire else {}),
        }
        for row in rows
    ]
    checked = ["Every result was the exact sum."] if options.check else []
    report(rows, cells, [*conclusions(rows), *checked], options, comms)
    if options.plot:
        # Only now: matplotlib takes a second to load.
        import matplotlib.pyplot as plt

        from microddp import figures

        figures.times_by_size(timings, title=f"All-reduce, {comms.describe()}")
        plt.savefig(options.plot, dpi=150, facecolor="white")
