"""Benchmarks: ``torchrun --nproc-per-node=2 -m microddp.bench {allreduce,ddp,sharded} --help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from microddp.bench.allreduce import COLLECTIVES, DTYPES, bench_allreduce
from microddp.bench.ddp import bench_ddp, models
from microddp.bench.sharded import MODELS, bench_sharded
from microddp.comms import init
from microddp.compression import NAMES, compressor
from microddp.results import output_file, picture_file, positive
from microddp.shared import ALL_REDUCES, AUTO


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; see ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m microddp.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    allreduce = commands.add_parser("allreduce", help="microddp's algorithms against the backend's")
    _add_allreduce_options(allreduce)
    ddp = commands.add_parser("ddp", help="training steps, from no averaging to PyTorch's DDP")
    _add_ddp_options(ddp)
    sharded = commands.add_parser("sharded", help="stages of sharding against DDP, with AdamW")
    _add_sharded_options(sharded)
    options = parser.parse_args(arguments)
    with init() as comms:
        options.run(options, comms)


def _add_allreduce_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bench_allreduce)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--size-mb", type=positive(float), default=100, help="MiB (default 100)")
    size.add_argument("--sweep", action="store_true", help="1 KiB to 64 MiB")
    parser.add_argument(
        "--algorithm", choices=[*ALL_REDUCES, "backend", "all"], default="all", help="default: all"
    )
    parser.add_argument(
        "--collective",
        choices=COLLECTIVES,
        default=COLLECTIVES[0],
        help="default: all_reduce; of the others there is one through shared memory",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--check", action="store_true", help="compare with the known sum first")
    _add_run_options(parser)
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw time against size")


def _add_ddp_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bench_ddp)
    _add_models(parser, list(models(torch.device("cpu"))))
    parser.add_argument(
        "--bucket-cap-mb",
        nargs="+",
        type=positive(float),
        default=[1.0, 25.0],
        metavar="MB",
        help="sizes of a bucket in MiB (default: 1 25)",
    )
    parser.add_argument(
        "--compress",
        nargs="+",
        default=[],
        type=_compressor,
        metavar="NAME",
        help=f"also microddp's DDP with compressed gradients: {NAMES}",
    )
    parser.add_argument(
        "--all-reduce",
        nargs="+",
        default=[],
        choices=[AUTO, *ALL_REDUCES],
        metavar="NAME",
        help=f"also microddp's DDP over another all-reduce: {', '.join([AUTO, *ALL_REDUCES])}",
    )
    _add_run_options(parser)


def _add_sharded_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=bench_sharded)
    _add_models(parser, list(MODELS))
    parser.add_argument(
        "--ranks-per-node",
        type=positive(int),
        metavar="N",
        help="for hsdp (default: those of each machine)",
    )
    _add_run_options(parser)


def _add_models(parser: argparse.ArgumentParser, default: list[str]) -> None:
    choices = list(models(torch.device("cpu")))
    said = f"default: {', '.join(default)}"
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", choices=choices, default=default, help=said
    )


def _compressor(name: str) -> str:
    try:
        compressor(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iters", type=positive(int), default=20, help="counted rounds")
    parser.add_argument("--warmup", type=positive(int), default=3, help="rounds not counted")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the rows and the machine"
    )


if __name__ == "__main__":
    main()
