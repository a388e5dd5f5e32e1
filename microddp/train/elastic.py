"""Training in which ranks may leave and join: ``python -m microddp.train --elastic HOST:PORT``.

Every step averages over all samples of its batch, however many ranks share them, so the result is
that of any other number of ranks, up to rounding. A rank that is new or behind gets the
state of a rank that has taken the most steps. Only where all are new does ``--resume`` read a
checkpoint.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from microddp.elastic import Generation, Members
from microddp.launch import is_echo
from microddp.step import apply_gradients, compute_gradients
from microddp.train.checkpoint import encode_state, share_state
from microddp.train.loop import OnStep, Trainer, TrainingResult
from microddp.train.options import TrainingConfig

Brought = list[dict[str, Any] | None]  # one: the state that a process brings to the next generation
TRIES = 5  # attempts at a step by the same members, none of which was lost


def train_elastically(
    config: TrainingConfig, members: Members, on_step: OnStep | None = None
) -> TrainingResult | None:
    """Train with the members that are present, until the job is done.

    Args:
        config: the same for all members.
        members: the job's members, of which this process is one.
        on_step: as in :func:`~microddp.train.loop.train`. A step that was lost is taken again.

    Returns:
        The result, or ``None`` if the job was over before this process could take part.

    Raises:
        ValueError: as in :func:`~microddp.train.loop.train`.
        RuntimeError: too few members came, or something failed although no member was lost.
    """
    began = time.perf_counter()
    # The first optimizer of a process imports for about a second: now, while nobody waits for it.
    torch.optim.SGD([torch.zeros(1)])
    gc.freeze()  # what is here refers to no group: the searches below leave it out
    brought: Brought = [None]
    failed: list[object] = []  # (members, step) of failures in a row with the same of both
    try:
        while generation := members.meet(brought[0]["step"] if brought[0] else -1):
            result, error = _train_generation(config, generation, members, brought, on_step)
            if result:
                members.done()
                return replace(result, seconds=time.perf_counter() - began)
            if error:
                now = members.names, brought[0] and brought[0]["step"]
                failed = [*(each for each in failed if each == now), now]
                if not is_echo(error) or len(failed) == TRIES:  # then nobody was lost
                    raise error
            # References to the group keep its connections open, and the ranks at their ends
            # waiting.
            error = None
            gc.collect()
    finally:
        gc.unfreeze()
    return None


def _train_generation(
    config: TrainingConfig,
    generation: Generation,
    members: Members,
    brought: Brought,
    on_step: OnStep | None,
) -> tuple[TrainingResult | None, Exception | None]:
    """Train until the end or the next generation; return a result, or an error, or neither.

    The list ``brought`` gives up its state to the trainer, and gets the trainer's at the end.
    """
    try:
        trainer = ElasticTrainer(config, generation, members, brought[0], on_step)
    except RuntimeError as error:
        return None, error.with_traceback(None)
    brought[0] = None  # else there would be two of everything while it trains
    try:
        return trainer.run(), None
    except OthersWait:
        brought[0] = trainer.state()
        return None, None
    except RuntimeError as error:
        what = str(error).partition(". ")[0]  # without gloo's advice
        print(f"{members.name}, after step {trainer.step}: {what}", flush=True)
        brought[0] = trainer.state()
        return None, error.with_traceback(None)


class OthersWait(Exception):
    """Raised between two steps, when all ranks must meet again because others wait to join."""


class ElasticTrainer(Trainer):
    """A training run of one generation, which goes on from its members' newest state.

    Arguments are those of :func:`train_elastically`, the generation, and this process's state from
    the one before, if it took part in it.

    Raises:
        OthersWait: from :meth:`run`, on every rank after the same step.
    """

    def __init__(
        self,
        config: TrainingConfig,
        generation: Generation,
        members: Members,
        state: dict[str, Any] | None,
        on_step: OnStep | None,
    ) -> None:
        self.generation, self.members, self.brought = generation, members, state
        self.others_wait = False
        super().__init__(config, generation.comms, on_step)
        self.brought = None  # what the trainer goes on from is its own by now
        self.random = self._random_state()

    def _begin_from(self) -> dict[str, Any] | None:
        steps, source, comms = self.generation.steps, self.generation.source, self.comms
        who = f"Generation {self.generation.number}, {comms.describe()}"
        if steps[source] < 0:
            comms.print(f"{who}: all are new")
            return super()._begin_from()
        comms.print(f"{who}: from rank {source}'s state after step {steps[source]}")
        # Also where all have taken as many steps: some may have ended the epoch, and others not.
        data = encode_state(self.brought) if self.brought and comms.rank == source else None
        return share_state(data, comms, source)

    def run(self) -> TrainingResult:
        if self.generation.steps[self.generation.source] >= 0:
            self._save()  # the checkpoint of that step may be lost with who was to write it
        return super().run()

    def _step(self, batch: Sequence[torch.Tensor]) -> None:
        if self.others_wait:
            raise OthersWait
        self.strategy.zero_grad(self.optimizer)
        loss = compute_gradients(self.strategy, self.task.loss, batch, **self._options())
        # Before the weights change: a step is taken with its loss known to all, or it is lost.
        waiting = float(self.members.others_wait())
        told = torch.tensor([loss.item(), waiting], dtype=torch.float64, device=loss.device)
        self.comms.all_reduce_mean(told)
        apply_gradients(self.strategy, self.optimizer, self.scaler)
        self._done(told[0])
        self.others_wait = told[1].item() > 0
        self.random = self._random_state()

    def state(self) -> dict[str, Any]:
        """Return the state after the last complete step, also if the next one failed halfway."""
        return super().state() | self.random
