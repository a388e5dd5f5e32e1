"""A training step of each sharding stage against DDP and PyTorch's stages, with bytes kept."""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.backward import tensors_in
from microddp.bench.ddp import Batch, models
from microddp.bench.rows import (
    Column,
    Row,
    in_milliseconds,
    mib,
    progress_bar,
    report,
    with_quartiles,
)
from microddp.comms import Comms
from microddp.model import parameter_count
from microddp.performance import bytes_alive, bytes_kept
from microddp.report import MIB
from microddp.sharding import elements, nodes_of  # and registers the strategies
from microddp.shared import AUTO, scatter_gather
from microddp.step import Loss, take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timing, measure

MODELS = ("MLP 512", "MLP 1024", "transformer")
OURS = {name: kind.stage for name, kind in STRATEGIES.items() if kind.stage}
STAGES = {"torch": 0, "ddp": 0, "torch zero1": 1, "torch zero3": 3, "torch hsdp": 3} | OURS
DDP, THEIRS = "torch", "torch zero3"


COLUMNS: dict[str, Column] = {
    "model": "{model}",
    "way": "{way}",
    "median ms": "{median_ms:.3g}",
    "quartiles": "{low_ms:.3g} to {high_ms:.3g}",
    "/ torch DDP": "{to_ddp:.2f} ({to_ddp_low:.2f} to {to_ddp_high:.2f})",
    "/ torch zero3": "{to_fsdp:.2f} ({to_fsdp_low:.2f} to {to_fsdp_high:.2f})",
    "kept MiB": mib("kept", ".1f"),
    "predicted": mib("predicted", ".1f"),
    "at most": mib("peak", ".1f"),
    "sent MiB": lambda row: f"{row['sent'] / MIB:.1f}" if row["sent"] else "",
}
Step = Callable[[], object]


def _make(
    name: str, model: nn.Module, loss_fn: Loss, batch: Batch, comms: Comms, node: int
) -> tuple[Step, nn.Module]:
    """Make a step of one way, and the model that the step trains."""
    replica = copy.deepcopy(model)
    kind, _, collectives = name.partition(", ")
    if kind.startswith("torch "):
        module, optimizer = _theirs(kind, replica, comms, node)
        strategy = STRATEGIES["none"](module, comms)
    else:
        options: dict[str, Any] = {"collectives": collectives} if collectives else {}
        options |= {"node": node} if STRATEGIES[kind].in_nodes else {}
        strategy = STRATEGIES[kind](replica, comms, **options)
        optimizer = torch.optim.AdamW(strategy.parameters(), lr=1e-4)
    return partial(take_step, strategy, loss_fn, optimizer, batch), replica


def _theirs(
    name: str, model: nn.Module, comms: Comms, node: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own, of its jit
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer
    if name == "torch zero1":
        ddp = TorchDDP(model, process_group=comms.group, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, process_group=comms.group, lr=1e-4
        )
        return ddp, optimizer
    if name == "torch hsdp":
        ranks = torch.arange(comms.world_size).view(-1, node)
        mesh = DeviceMesh(comms.device.type, ranks, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh.from_group(comms.group, comms.device.type)
    for block in elements(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _bytes(
    name: str, model: nn.Module, loss_fn: Loss, batch: Batch, comms: Comms, node: int
) -> tuple[int, int]:
    """Return the bytes kept after backward, and the most, in the second step of a way.

    Counted on rank 0, which looks at all objects for it; 0 on the others.
    """
    kept: list[int] = []
    during: list[int] = []
    _make(name, model, loss_fn, batch, comms, node)[0]()  # makes buffers that stay
    if comms.rank == 0:
        gc.collect()
        gc.freeze()  # leaves out the objects that exist already
    step, model = _make(name, model, loss_fn, batch, comms, node)

    def look(*_: object) -> None:
        during.append(bytes_alive())

    def watch(_: nn.Module, inputs: object, output: object) -> None:
        del output
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                tensor.register_hook(look)  # type: ignore[no-untyped-call]

    step()
    if comms.rank:
        step()
        return 0, 0
    blocks = elements(model)
    hooks = [m.register_forward_pre_hook(look) for m in [*blocks, model]]
    hooks += [m.register_forward_hook(watch) for m in blocks]
    for p in model.parameters():  # PyTorch's are called at the end of backward
        hooks.append(p.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]
    optimizer = step.args[2]  # type: ignore[attr-defined]
    handle = optimizer.register_step_pre_hook(lambda *_: kept.append(bytes_alive()))
    step()
    for hook in [*hooks, handle]:
        hook.remove()
    gc.unfreeze()
    return kept[0], max(during + kept)


def bench_sharded(options: argparse.Namespace, comms: Comms) -> None:
    """Time every way for every model, taking turns within one run."""
    comms.print(comms.describe())
    available = models(comms.device)
    node = nodes_of(comms, options.ranks_per_node)[0].world_size
    names = [name for name in STAGES if "hsdp" not in name or node < comms.world_size]
    if comms.device.type == "cpu" and scatter_gather(AUTO, comms).name != "ring":
        names += [f"{name}, ring" for name in OURS if name in names]  # as between machines
    rows: list[Row] = []
    rounds = len(options.models) * (options.warmup + options.iters)
    with progress_bar(rounds, comms) as bar:
        for name in options.models:
            bar.set_description(name)
            torch.manual_seed(comms.rank)
            model, loss_fn, batch = available[name]()
            kept = {way: _bytes(way, model, loss_fn, batch, comms, node) for way in names}
            ways = {way: _make(way, model, loss_fn, batch, comms, node)[0] for way in names}
            timings = measure(
                ways, comms, warmup=options.warmup, repeat=options.iters, progress=bar.update
            )
            rows += [
                _row(name, way, timings, kept[way], parameter_count(model), step, comms, node)
                for way, step in ways.items()
            ]
    if comms.rank == 0:
        report(rows, COLUMNS, conclusions(rows), options, comms)


def _row(
    model: str,
    way: str,
    timings: Mapping[str, Timing],
    kept: tuple[int, int],
    count: int,
    step: Step,
    comms: Comms,
    node: int,
) -> Row:
    """Make a row: ``to_ddp`` and ``to_fsdp`` are ratios of times to PyTorch's, round by round.

    ``kept`` are the bytes of parameters, gradients and optimizer on rank 0 after backward, and
    ``predicted`` the same by formula. ``peak`` is the most at once, looked at when a block's
    forward begins, and when a gradient of its parameters or of its input is ready. ``sent`` is what
    a rank sends in a step, by formula.
    """
    stage = STAGES[way.partition(",")[0]]
    divided = node if "hsdp" in way else comms.world_size
    strategy = step.args[0]  # type: ignore[attr-defined]
    return {
        "model": model,
        "way": way,
        **in_milliseconds(timings[way]),
        **with_quartiles("to_ddp", timings[way].ratio(timings[DDP])),
        **with_quartiles("to_fsdp", timings[way].ratio(timings[THEIRS])),
        "kept": kept[0],
        "predicted": bytes_kept(stage, count, divided).total,
        "peak": kept[1],
        "sent": strategy.sent_bytes(),
    }


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Say in a sentence of each of our ways how long it takes, and how well bytes are predicted."""
    sentences = []
    for way in dict.fromkeys(row["way"] for row in rows):
        if way.partition(",")[0] not in OURS:
            continue
        mine = [row for row in rows if row["way"] == way]
        off = max(abs(row["kept"] / row["predicted"] - 1) for row in mine)
        ddp = statistics.geometric_mean(row["to_ddp"] for row in mine)
        fsdp = statistics.geometric_mean(row["to_fsdp"] for row in mine)
        sentences.append(
            f"{way} takes {ddp:.2f} times as long as PyTorch's DDP and {fsdp:.2f} times as long as "
            f"its fully_shard (geometric mean of {len(mine)} models), and keeps what was predicted "
            f"within {off:.1%}."
        )
    return sentences
