"""Data-parallel training with any schedule: ``torchrun --nproc-per-node=2 -m microddp.train``.

Any number of ranks, any schedule and any accumulation give the same result for the same batch
size, up to rounding: they add up gradients in different orders. In fp32 that changes a loss by some
1e-7 of it, and by some 1e-3 once rounding has moved the input of a ReLU across zero. A run that is
killed and resumed on as many ranks gives bitwise the weights of one that was not, on a GPU if its
kernels are deterministic.

With ``MICRODDP_DEBUG=1`` the ranks compare their weights after every step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from microddp.comms import Comms
from microddp.figures import human_bytes, human_seconds
from microddp.job import init
from microddp.model import gradient_bytes, parameter_count
from microddp.options import TrainingConfig, parse
from microddp.trace import write_whole
from microddp.trainer import OnStep, Trainer, TrainingResult


def train(config: TrainingConfig, comms: Comms, on_step: OnStep | None = None) -> TrainingResult:
    """Train as :class:`~microddp.options.TrainingConfig` says. A collective.

    Sets the seed of torch's default generator.

    Args:
        config: the same on every rank.
        comms: the ranks that train together.
        on_step: called after each optimizer step with its number, from 1, and the model, which
            still has the step's gradients.

    Raises:
        ValueError: on every rank, if the options do not fit the data, the ranks or the checkpoint.
        RuntimeError: another rank failed, or the checkpoint cannot be written; with
            ``MICRODDP_DEBUG=1`` also that ranks have different weights, with the step, the ranks
            and the first parameter that differs.
    """
    return Trainer(config, comms, on_step).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; see ``--help``."""
    config, problem = None, ""
    try:
        config = parse(arguments, __doc__)
    except ValueError as error:
        problem = str(error)
    with init() as comms:
        problems = [text for text in comms.all_gather_data(problem) if text]
        try:
            if problems or config is None:
                raise ValueError(problems[0])
            trainer = Trainer(config, comms)
        except ValueError as error:  # on every rank, but only one speaks, before torchrun ends all
            if comms.rank == 0:
                print(f"microddp.train: error: {error}", file=sys.stderr, flush=True)
            comms.barrier()
            sys.exit(2)
        comms.print(comms.describe())
        comms.print(
            f"{config.model} of {parameter_count(trainer.model):,} parameters, "
            f"{human_bytes(gradient_bytes(trainer.model))} of gradients a step"
        )
        result = trainer.run()
        if comms.rank == 0:
            _report(result, config, comms)


def _report(result: TrainingResult, config: TrainingConfig, comms: Comms) -> None:
    """Print where the time went; write the file that was asked for."""
    print(
        f"{len(result.epochs)} epochs of {result.steps // len(result.epochs)} steps; this run took "
        f"{human_seconds(result.seconds)}."
    )
    step = result.epochs[-1].step
    working = step.forward + step.backward + step.optimizer
    print(
        f"A step of the last epoch took {human_seconds(step.total)}: {human_seconds(working)} of "
        f"computing and {human_seconds(step.exposed)} of waiting for communication "
        f"({step.exposed / step.total:.0%} overhead). {human_seconds(step.hidden)} of "
        "communication was hidden behind computing."
    )
    if config.json:
        report = {
            "run": comms.describe(),
            "command": sys.argv[1:],
            "config": asdict(config),
            "parameters": parameter_count(result.model),
            "gradient_bytes": gradient_bytes(result.model),
            "epochs": [asdict(epoch) for epoch in result.epochs],
            "steps": result.steps,
            "seconds": result.seconds,
        }
        write_whole(config.json, json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
