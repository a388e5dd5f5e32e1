"""Checks by the ranks of a job: each result against its definition, or PyTorch's own.

Every check is a function of a :class:`~microddp.Comms` that all ranks call. It raises an error
with the rank's number on each rank with a wrong result, and returns its findings as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parameters_to_vector

from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.fitted import bus_bandwidth
from microddp.model import FullMLP
from microddp.replicas import check_replicas
from microddp.report import MIB, human_bytes, table
from microddp.shared import ALL_REDUCES, refused
from microddp.timing import Timing, measure

DTYPES = tuple(
    getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
)
ROUNDING = 1e-9  # of float64's 16 digits; a sum taken for a mean differs in the first
CAP_MB = 0.1  # for the model below: three buckets
SAMPLES = 8  # of each rank's batch


def check_primitives(comms: Comms) -> str:
    """Check all collectives and messages of :class:`~microddp.Comms`, for dtypes and shapes."""
    n, rank = comms.world_size, comms.rank
    last = n - 1
    compared = 0
    for dtype, shape in itertools.product(DTYPES, ((n,), (n, 3), (1001 * n, 5))):
        everyone = [_numbers(who, shape, dtype, comms.device) for who in range(n)]
        mine, all_of_them = everyone[rank], torch.stack(everyone)
        total = all_of_them.sum(0, dtype=dtype)
        results = {
            "all_reduce": (_in_place(comms.all_reduce, mine), total),
            "all_reduce max": (_in_place(comms.all_reduce, mine, "max"), all_of_them.amax(0)),
            "all_reduce min": (_in_place(comms.all_reduce, mine, "min"), all_of_them.amin(0)),
            "broadcast": (_in_place(comms.broadcast, mine, last), everyone[last]),
            "all_gather": (comms.all_gather(mine), all_of_them),
            "reduce_scatter": (comms.reduce_scatter(mine), total.chunk(n)[rank]),
            "all_to_all": (comms.all_to_all(mine), torch.cat([t.chunk(n)[rank] for t in everyone])),
            "scatter": (comms.scatter(mine, last), everyone[last].chunk(n)[rank]),
        }
        gathered = comms.gather(mine, last)
        if gathered is not None:
            results["gather"] = gathered, torch.cat(everyone)
        if dtype in (torch.float64, torch.int64):  # 3 to the power n is exact
            product = _in_place(comms.all_reduce, mine, "product")
            results["all_reduce product"] = product, all_of_them.prod(0)
        if dtype.is_floating_point:
            # Times n, so that what is added up are small integers again.
            mean = _in_place(comms.all_reduce_mean, mine * n)
            results["all_reduce_mean"] = mean, total
        if n > 1:
            incoming = torch.empty_like(mine)
            comms.sendrecv(mine, (rank + 1) % n, incoming, (rank - 1) % n)
            results["sendrecv"] = incoming, everyone[rank - 1]
            passed = torch.empty_like(mine)
            if rank > 0:
                comms.recv(passed, rank - 1)
                results["recv"] = passed, everyone[rank - 1]
            if rank < last:
                comms.send(mine, rank + 1)
        for name, (got, expected) in results.items():
            _expect(comms, f"{name} of {dtype}", got, expected)
        compared += len(results)
    _expect(comms, "all_gather_data", comms.all_gather_data([rank]), [[who] for who in range(n)])
    group = comms.subgroup([last, 0] if n > 1 else [0])
    if group is not None:
        both = _in_place(group.all_reduce, torch.ones(1, device=comms.device))
        _expect(comms, "all_reduce in a subgroup", both, torch.full_like(both, group.world_size))
        group.close()
    comms.barrier()
    return f"{compared} results on rank 0 as defined"


def check_allreduce(comms: Comms) -> str:
    """Check the all-reduces that these ranks can use, and PyTorch's own, against the exact sum."""
    algorithms = {name: call for name, call in ALL_REDUCES.items() if not refused(name, comms)}
    sizes = (1, comms.world_size + 1, 1000, 2**20 + 1)
    for dtype, size in itertools.product((torch.float32, torch.bfloat16, torch.int64), sizes):
        everyone = [_numbers(who, (size,), dtype, comms.device) for who in range(comms.world_size)]
        mine, total = everyone[comms.rank], torch.stack(everyone).sum(0, dtype=dtype)
        backend = _in_place(partial(dist.all_reduce, group=comms.group), mine)
        _expect(comms, f"torch.distributed, {dtype}", backend, total)
        for name, algorithm in algorithms.items():
            _expect(comms, f"{name}, {dtype}", _in_place(algorithm, mine, comms, "sum"), total)
    return f"exact sums by {', '.join(algorithms)} and torch.distributed"


def check_ddp(comms: Comms) -> str:
    """Compare three steps of microddp.DDP, PyTorch's DDP and one process on the whole batch."""
    x, y, mine = _batch(comms, torch.float64)
    ours, torchs, alone, start = (_model(comms, torch.float64) for _ in range(4))
    wrapped: list[tuple[nn.Module, slice]] = [
        (DDP(ours, comms, bucket_cap_mb=CAP_MB), mine),
        (TorchDDP(torchs, process_group=comms.group, bucket_cap_mb=CAP_MB), mine),
        (alone, slice(None)),
    ]
    for _ in range(3):
        for model, part in wrapped:
            _step(model, model(x[part]), y[part])
    check_replicas(ours, comms)
    weights = [_weights(model) for model in (ours, torchs, alone, start)]
    found = []
    for name, other in (("PyTorch's DDP", weights[1]), ("one process", weights[2])):
        distance = ((weights[0] - other).norm() / (other - weights[3]).norm()).item()
        found.append(f"{distance:.1e} from {name}")
        if not distance < ROUNDING:  # a NaN is not, either
            raise RuntimeError(
                f"rank {comms.rank}: expected microddp.DDP within {ROUNDING:g} of where {name} "
                f"went in 3 steps, got {distance:g}"
            )
    return f"weights equal on all ranks, {', '.join(found)} (allowed: {ROUNDING:g})"


def check_precision(comms: Comms) -> str:
    """Check that steps of microddp.DDP in bfloat16 stay finite, and equal on all ranks."""
    x, y, mine = _batch(comms, torch.float32)
    model = DDP(_model(comms, torch.float32), comms, bucket_cap_mb=CAP_MB)
    losses = []
    for _ in range(5):
        with torch.autocast(comms.device.type, torch.bfloat16):
            output = model(x[mine])
        losses.append(_step(model, output.float(), y[mine]))
        if output.dtype != torch.bfloat16 or not bool(_weights(model).isfinite().all()):
            raise RuntimeError(
                f"rank {comms.rank}: expected bfloat16 and finite weights, got {output.dtype} "
                f"and losses {losses}"
            )
    check_replicas(model, comms)
    return f"bfloat16, weights equal on all ranks, loss from {losses[0]:.3g} to {losses[-1]:.3g}"


def time_transfers(comms: Comms) -> str:
    """Time the backend's all-reduce at three sizes; on GPUs also copies from and to the host."""
    n = comms.world_size
    rows = []
    for size in (64 << 10, 4 * MIB, 64 * MIB):
        tensor = torch.zeros(size // 4, device=comms.device)
        time = measure({"": partial(comms.all_reduce, tensor)}, comms)[""]
        factor = bus_bandwidth(1, 1, n) if n > 1 else None
        rows.append(_row("all-reduce", size, time, factor))
    if comms.device.type == "cuda":
        host = torch.zeros(64 * MIB, dtype=torch.uint8, pin_memory=True)
        gpu = host.to(comms.device)
        copies = {"host to GPU": lambda: gpu.copy_(host), "GPU to host": lambda: host.copy_(gpu)}
        rows += [_row(name, 64 * MIB, t, 1) for name, t in measure(copies, comms).items()]
    headers = ("", "size", "ms", "quartiles", "bus GB/s", "quartiles")
    return f"{comms.describe()}\n{table(rows, headers)}"


def _row(name: str, size: int, time: Timing, factor: float | None) -> tuple[object, ...]:
    low, high = time.spread
    cells = (name, human_bytes(size), time.median * 1e3, f"{low * 1e3:.2f} to {high * 1e3:.2f}")
    if factor is None:  # one rank, no bus
        return *cells, None, None
    slow, middle, fast = (factor * size / seconds / 1e9 for seconds in (high, time.median, low))
    return *cells, middle, f"{slow:.2f} to {fast:.2f}"


def _model(comms: Comms, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return FullMLP(64, depth=8, inputs=16, outputs=4).to(comms.device, dtype)


def _weights(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def _batch(comms: Comms, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """Return inputs and labels of the whole batch, and this rank's slice."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES * comms.world_size, 16, generator=random, dtype=dtype)
    y = torch.randint(4, (len(x),), generator=random)
    mine = slice(SAMPLES * comms.rank, SAMPLES * (comms.rank + 1))
    return x.to(comms.device), y.to(comms.device), mine


def _step(model: nn.Module, output: torch.Tensor, labels: torch.Tensor) -> float:
    """One step of gradient descent; returns the loss before it."""
    model.zero_grad()
    loss = cross_entropy(output, labels)
    torch.autograd.backward(loss)
    with torch.no_grad():  # by hand: an optimizer would import for seconds
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    return loss.item()


def _numbers(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make a rank's tensor: 1, 2 or 3 in each place, so that sums over 85 ranks are exact."""
    places = torch.arange(torch.Size(shape).numel(), device=device)
    return ((places + rank) % 3 + 1).to(dtype).view(shape)


def _in_place(
    call: Callable[..., object], tensor: torch.Tensor, *arguments: object
) -> torch.Tensor:
    result = tensor.clone()
    call(result, *arguments)
    return result


def _expect(comms: Comms, what: str, got: object, expected: object) -> None:
    def explain(difference: str) -> str:
        return f"rank {comms.rank}: {what}: {difference}"

    torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=explain)


CHECKS: dict[str, Callable[[Comms], str]] = {
    "primitives": check_primitives,
    "allreduce": check_allreduce,
    "ddp": check_ddp,
    "precision": check_precision,
    "bandwidth": time_transfers,
}
