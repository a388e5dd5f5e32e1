"""One training step of each strategy, from none to PyTorch's own DDP, timed in turns."""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity

from microddp import compression, torch_ddp  # noqa: F401 - the latter registers its strategy
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
from microddp.ddp import DDP
from microddp.model import FullMLP, ModelConfig, SimpleCNN
from microddp.performance import quiet_profile
from microddp.shared import carrier
from microddp.step import Loss, take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timing, measure
from microddp.workloads import Transformer, token_loss

Batch = tuple[torch.Tensor, torch.Tensor]
FREE, OURS, THEIRS = "none", "ddp", "torch"
COPIES = ", copies"
# Like for like: gradients that are views of their buckets, or copies.
REFERENCES = {OURS: THEIRS, OURS + COPIES: THEIRS + COPIES}


COLUMNS: dict[str, Column] = {
    "model": "{model}",
    "cap MiB": "{bucket_cap_mb:g}",
    "strategy": "{strategy}",
    "median ms": "{median_ms:.3g}",
    "quartiles": "{low_ms:.3g} to {high_ms:.3g}",
    "/ torch": "{ratio:.2f}",
    "its quartiles": "{ratio_low:.2f} to {ratio_high:.2f}",
    "exposed ms": "{exposed_ms:.3g}",
    "all-reduces": "{collectives}",
    "MiB": mib("nbytes", ".3g"),
    "MiB sent": mib("sent_bytes", ".3g"),
}


def models(device: torch.device) -> dict[str, Callable[[], tuple[nn.Module, Loss, Batch]]]:
    """Return the models, by name: each a function that makes a model, its loss and a batch."""

    def mlp(dim: int, depth: int = 16) -> tuple[nn.Module, Loss, Batch]:
        x, y = torch.randn(32, dim, device=device), torch.randn(32, dim, device=device)
        return FullMLP(dim, depth).to(device), nn.functional.mse_loss, (x, y)

    def cnn() -> tuple[nn.Module, Loss, Batch]:
        config = ModelConfig()
        shape = (16, config.inputs, config.size, config.size)
        x = torch.randn(shape, device=device)
        y = torch.randint(config.classes, (16,), device=device)
        return SimpleCNN(config).to(device), cross_entropy, (x, y)

    def transformer() -> tuple[nn.Module, Loss, Batch]:
        net = Transformer(vocabulary=1024, dim=256, depth=4, heads=4, context=64).to(device)
        x = torch.randint(1024, (4, 64), device=device)
        return net, token_loss, (x, x.roll(-1, dims=1))

    widths = {f"MLP {dim}": partial(mlp, dim) for dim in (128, 512, 1024)}
    small = {"100 small layers": partial(mlp, 16, depth=100)}
    return {**widths, **small, "CNN": cnn, "transformer": transformer}


def steps_of(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    comms: Comms,
    bucket_cap_mb: float,
    compress: Sequence[str] = (),
    all_reduce: Sequence[str] = (),
) -> dict[str, partial[torch.Tensor]]:
    """Make a step of each strategy, by name, each with its own replica and optimizer.

    Add steps of microddp's DDP with each compressor in ``compress`` and each all-reduce in
    ``all_reduce``.
    """
    strategies = {
        name: make(copy.deepcopy(model), comms, bucket_cap_mb)
        for name, make in STRATEGIES.items()
        if make.replicas
    }
    ours = DDP(
        copy.deepcopy(model), comms, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=False
    )
    theirs = TorchDDP(copy.deepcopy(model), process_group=comms.group, bucket_cap_mb=bucket_cap_mb)
    strategies |= {
        OURS + COPIES: STRATEGIES[OURS](ours, comms),
        THEIRS + COPIES: STRATEGIES[THEIRS](theirs, comms),
    }
    for compressor in compress:
        strategy = STRATEGIES[OURS](copy.deepcopy(model), comms, bucket_cap_mb)
        compression.compress(strategy, compressor)
        strategies[f"{OURS}, {compressor}"] = strategy
    for name in all_reduce:
        by = carrier(name, comms)
        wrapped = DDP(copy.deepcopy(model), comms, bucket_cap_mb=bucket_cap_mb, all_reduce=by)
        strategies[f"{OURS}, {name}"] = STRATEGIES[OURS](wrapped, comms)
    return {
        name: partial(
            take_step,
            strategy,
            loss_fn,
            torch.optim.SGD(strategy.parameters(), lr=1e-4),
            batch,
        )
        for name, strategy in strategies.items()
    }


def collectives(step: Callable[[], object]) -> tuple[int, int]:
    """Run a step; return the number of its all-reduces, and the bytes of their 32-bit values."""
    with quiet_profile([ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
    reduced = [
        event
        for event in recorded.events() or ()
        if event.name in ("gloo:all_reduce", "nccl:all_reduce")
    ]
    sizes = [torch.Size(event.input_shapes[0]).numel() for event in reduced]
    return len(reduced), 4 * sum(sizes)


def bench_ddp(options: argparse.Namespace, comms: Comms) -> None:
    """Time every strategy for every model and bucket size, taking turns within one run."""
    comms.print(comms.describe())
    available = models(comms.device)
    rows: list[Row] = []
    rounds = len(options.models) * len(options.bucket_cap_mb) * (options.warmup + options.iters)
    with progress_bar(rounds, comms) as bar:
        for name in options.models:
            torch.manual_seed(comms.rank)
            model, loss_fn, batch = available[name]()
            for cap in options.bucket_cap_mb:
                bar.set_description(f"{name}, {cap:g} MiB")
                steps = steps_of(
                    model, loss_fn, batch, comms, cap, options.compress, options.all_reduce
                )
                timings = measure(
                    steps,
                    comms,
                    warmup=options.warmup,
                    repeat=options.iters,
                    progress=bar.update,
                )
                counted = {name: collectives(step) for name, step in steps.items()}
                sent = {name: step.args[0].sent_bytes() for name, step in steps.items()}
                rows += compare(name, cap, timings, counted, sent)
    if comms.rank == 0:
        report(rows, COLUMNS, conclusions(rows), options, comms)


def compare(
    model: str,
    bucket_cap_mb: float,
    timings: Mapping[str, Timing],
    counted: Mapping[str, tuple[int, int]],
    sent: Mapping[str, float],
) -> list[Row]:
    """Make the rows of one model at one bucket size.

    ``ratio`` is the time divided by that of PyTorch's DDP in the same round, like for like, and
    ``exposed_ms`` what the median exceeds that without synchronisation by. ``collectives`` are the
    backend's all-reduces of a step, and ``nbytes`` what they reduce: gradients that are compressed,
    or added up otherwise, travel without. ``sent_bytes`` is what a rank sends, by the formula of a
    ring or of the compressor.
    """
    return [
        {
            "model": model,
            "bucket_cap_mb": bucket_cap_mb,
            "strategy": strategy,
            **in_milliseconds(timing),
            **with_quartiles("ratio", timing.ratio(timings[REFERENCES.get(strategy, THEIRS)])),
            "exposed_ms": (timing.median - timings[FREE].median) * 1e3,
            "collectives": counted[strategy][0],
            "nbytes": counted[strategy][1],
            "sent_bytes": sent[strategy],
        }
        for strategy, timing in timings.items()
    ]


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Compare each of our DDPs with PyTorch's, and with no averaging at all, in a sentence."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["strategy"], []).append(row)
    mean = {
        name: statistics.geometric_mean(row["ratio"] for row in cases)
        for name, cases in by_name.items()
    }
    sentences = []
    for name, cases in by_name.items():
        if not name.startswith(OURS):
            continue
        slowest = max(cases, key=lambda row: row["ratio"])
        sentence = (
            f"{name} takes {mean[name]:.3f} times as long as {REFERENCES.get(name, THEIRS)} "
            f"(geometric mean of {len(cases)} cases); at most {slowest['ratio']:.2f} times "
            f"({slowest['ratio_low']:.2f} to {slowest['ratio_high']:.2f}), for {slowest['model']} "
            f"at {slowest['bucket_cap_mb']:g} MiB."
        )
        if name not in REFERENCES and mean[FREE] < 1:
            won = (1 - mean[name]) / (1 - mean[FREE])
            sentence += f" It wins {won:.0%} of what no averaging at all would win."
        sentences.append(sentence)
    return sentences
