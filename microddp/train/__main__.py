"""The command line: see :mod:`microddp.train`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict

from microddp.comms import Comms, init
from microddp.elastic import Members
from microddp.model import gradient_bytes, parameter_count
from microddp.report import human_bytes, human_seconds
from microddp.results import write_result
from microddp.train.elastic import train_elastically
from microddp.train.loop import Trainer, TrainingResult
from microddp.train.options import TrainingConfig, parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; see ``--help``."""
    config, problem = None, ""
    try:
        config = parse(arguments)
    except ValueError as error:
        problem = str(error)
    if config is not None and config.elastic:
        _be_a_member(config)
        return
    with init() as comms:
        try:
            comms.fail_together(problem, "options that can be used", ValueError)
            assert config is not None
            trainer = Trainer(config, comms)
        except ValueError as error:  # on every rank; rank 0 prints it before torchrun ends them all
            if comms.rank == 0:
                print(f"microddp.train: error: {error}", file=sys.stderr, flush=True)
            comms.barrier()
            sys.exit(2)
        comms.print(comms.describe())
        comms.print(
            f"{config.model} of {parameter_count(trainer.model):,} parameters, "
            f"{human_bytes(gradient_bytes(trainer.model))} of gradients a step"
        )
        _report(trainer.run(), config, comms)


def _be_a_member(config: TrainingConfig) -> None:
    try:
        with Members(config.elastic, least=config.least) as members:
            if result := train_elastically(config, members):
                _report(result, config, members.comms)
            else:
                print(f"The job at {config.elastic} is over")
    except ValueError as error:  # no rank of torchrun's waits for this process
        sys.exit(f"microddp.train: error: {error}")


def _report(result: TrainingResult, config: TrainingConfig, comms: Comms) -> None:
    """On rank 0, print where the time went, and write the file that ``--json`` names."""
    if comms.rank:
        return
    print(
        f"{len(result.epochs)} epochs of {result.steps // len(result.epochs)} steps; this run took "
        f"{human_seconds(result.seconds)}."
    )
    step = result.epochs[-1].step
    working = step.forward + step.backward + step.optimizer
    if step.total:  # else this run took no step of the last epoch
        print(
            f"A step of the last epoch took {human_seconds(step.total)}: {human_seconds(working)} "
            f"of computing and {human_seconds(step.exposed)} of waiting for communication "
            f"({step.exposed / step.total:.0%} overhead). {human_seconds(step.hidden)} of "
            "communication was hidden behind computing."
        )
    if result.report:
        print(f"\n{result.report}\n")
    if (written := result.checkpoints) and written.writing:
        stopped, writing = map(statistics.median, (written.stopped, written.writing))
        print(
            f"{len(written.writing)} checkpoints; for one, training stopped for "
            f"{human_seconds(stopped)}, and it was there after {human_seconds(writing)}."
        )
    if config.json:
        write_result(
            config.json,
            comms.describe(),
            config=asdict(config),
            parameters=parameter_count(result.model),
            gradient_bytes=gradient_bytes(result.model),
            epochs=[asdict(epoch) for epoch in result.epochs],
            steps=result.steps,
            seconds=result.seconds,
        )


if __name__ == "__main__":
    main()
