"""Local SGD and DiLoCo: average weights every few steps, instead of gradients in every step.

In between, each rank trains by itself. Every so many steps the ranks meet: they average how far
each has moved since the last time, and an outer optimizer moves the shared weights by that mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microddp.allreduce import ring_cost
from microddp.comms import Comms, Pending
from microddp.model import gradient_bytes
from microddp.program import Program
from microddp.replicas import broadcast_parameters
from microddp.step import Strategy
from microddp.strategies import average_gradients, register


@dataclass(frozen=True)
class Outer:
    """The outer optimizer, which moves the shared weights: SGD, optionally with Nesterov momentum.

    With the defaults the shared weights become the mean of the ranks' weights, which is local SGD.
    DiLoCo has 0.7 and 0.9, and AdamW as the inner optimizer.

    Attributes:
        lr: learning rate.
        momentum: Nesterov momentum, from 0 to below 1.
    """

    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Outer:
        """Read ``"mean"``, or ``"nesterov:LR,MOMENTUM"`` as in ``"nesterov:0.7,0.9"``.

        Raises:
            ValueError: the text is neither.
        """
        if text == "mean":
            return cls()
        kind, _, numbers = text.partition(":")
        try:
            lr, momentum = map(float, numbers.split(","))
        except ValueError:
            lr = momentum = -1.0
        if kind != "nesterov" or not 0 < lr < math.inf or not 0 <= momentum < 1:
            raise ValueError(
                "expected mean, or nesterov:LR,MOMENTUM with LR above 0 and MOMENTUM from 0 to "
                f"below 1, got {text!r}"
            )
        return cls(lr, momentum)


MEAN = Outer()


class Fragment:
    """Dense parameters of one dtype that are averaged at the same time, and their shared values.

    Attributes:
        shared: the shared values: flat, the same on every rank.
        optimizer: the optimizer of ``shared``.
        sent_after: number of steps taken when the values were last sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comms: Comms, outer: Outer) -> None:
        self.parameters: list[torch.Tensor] = list(parameters)
        self.comms = comms
        self.shared = nn.Parameter(self._flat())
        self.optimizer = torch.optim.SGD(
            [self.shared], outer.lr, outer.momentum, nesterov=outer.momentum > 0
        )
        self.sent_after = 0
        self._sent: torch.Tensor | None = None
        self._under_way: Pending | None = None

    def _flat(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters])  # a copy, of one, too

    def begin_anew(self) -> None:
        """Set the shared values to the parameters', which must be equal on all ranks."""
        self.shared.copy_(self._flat())

    def forget(self) -> None:
        """Wait for an average that is under way, and let nothing come of it."""
        if self._under_way is not None:
            self._under_way.wait()
        self._sent = self._under_way = None

    def send(self, steps: int) -> None:
        """Start to average how far the ranks have moved after so many steps. A collective."""
        self.sent_after = steps
        self._sent = self._flat()
        # The pseudo-gradient, shared minus local, points back to where the ranks started.
        self.shared.grad = self.shared.detach() - self._sent
        self._under_way = self.comms.all_reduce_mean(self.shared.grad, async_op=True)

    def arrive(self) -> None:
        """Wait for the average, update the shared values, and continue from them.

        What the parameters have moved since :meth:`send` is added.
        """
        if self._under_way is None or self._sent is None:
            return
        self._under_way.wait()
        self.optimizer.step()
        # If nothing was trained since then, the difference is 0, and the values are the shared
        # ones to the bit.
        values = self.shared.detach() + (self._flat() - self._sent)
        new = torch.split(values, [p.numel() for p in self.parameters])
        parts = zip(new, self.parameters, strict=True)
        torch._foreach_copy_(self.parameters, [part.view_as(p) for part, p in parts])
        self._sent = self._under_way = None


class LocalSteps:
    """Lets each rank train by itself, and averages the weights every so many steps.

    Call :meth:`after_step` after each step of the optimizer.

    Several fragments are averaged in turns, evenly spread over the steps, and their messages travel
    during the next step: they are smaller, and hidden.

    Args:
        module: at construction its parameters become those of rank 0.
        comms: the ranks.
        every: number of steps between two averages of a parameter.
        outer: the outer optimizer.
        fragments: number of fragments, at most ``every``.
        warm_up: number of steps at the beginning in which the caller averages gradients.

    Attributes:
        steps: number of steps taken.

    Raises:
        ValueError: an impossible number, parameters of several dtypes or devices, or batch norm
            with running statistics, which would differ on each rank.

    Source: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020 (with a warm-up);
    Douillard et al., "DiLoCo", 2023, algorithm 1; "Streaming DiLoCo", 2025 (fragments).
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        every: int,
        *,
        outer: Outer = MEAN,
        fragments: int = 1,
        warm_up: int = 0,
    ) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        who = f"rank {comms.rank}: expected"
        if every < 1 or warm_up < 0 or not 1 <= fragments <= min(every, len(parameters)):
            raise ValueError(
                f"{who} a meeting every 1 or more steps, after 0 or more, in 1 to "
                f"{min(every, len(parameters))} fragments; got {every}, {warm_up} and {fragments}"
            )
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            raise ValueError(f"{who} parameters of one dtype on one device")
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
                kind = type(part).__name__
                raise ValueError(f"{who} no running statistics, got {kind} in {name or 'it'}")
        broadcast_parameters(module, comms)
        self.comms = comms
        self.every, self.warm_up = every, warm_up
        self.fragments = [Fragment(part, comms, outer) for part in _deal(parameters, fragments)]
        self.steps = 0

    @property
    def warming_up(self) -> bool:
        """True if the gradients of the next step must be averaged."""
        return self.steps < self.warm_up

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def after_step(self) -> None:
        """Count a step, and average what is due after it. A collective.

        Raises:
            RuntimeError: the ranks have taken different numbers of steps.
        """
        warming_up = self.warming_up
        self.steps += 1
        if warming_up:
            for fragment in self.fragments:
                fragment.begin_anew()
                fragment.sent_after = self.steps
            return
        for fragment in self.fragments:
            fragment.arrive()
        phase = (self.steps - self.warm_up) % self.every
        for number, fragment in enumerate(self.fragments):
            if phase == number * self.every // len(self.fragments):
                self._check_steps()
                fragment.send(self.steps)
        if len(self.fragments) == 1:
            self.fragments[0].arrive()

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def meet(self) -> None:
        """Average all fragments now, so that every rank has the same weights. A collective.

        Raises:
            RuntimeError: as for :meth:`after_step`.
        """
        self._check_steps()
        for fragment in self.fragments:
            fragment.arrive()
            if fragment.sent_after < self.steps:
                fragment.send(self.steps)
        for fragment in self.fragments:
            fragment.arrive()

    def _check_steps(self) -> None:
        mine = torch.tensor([self.steps], device=self.comms.device)
        taken = self.comms.all_gather(mine).flatten().tolist()
        if len(set(taken)) > 1:
            raise RuntimeError(
                f"rank {self.comms.rank}: expected the same number of steps on every rank before "
                f"they meet, got {', '.join(map(str, taken))}: are there as many batches for all?"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state after :meth:`meet`, the same on every rank."""
        return {
            "steps": self.steps,
            "outer": [fragment.optimizer.state_dict() for fragment in self.fragments],
        }

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. The parameters stay as they are, and must be equal on all ranks."""
        self.steps = state["steps"]
        for fragment, outer in zip(self.fragments, state["outer"], strict=True):
            fragment.forget()
            fragment.sent_after = self.steps
            fragment.begin_anew()
            fragment.optimizer.load_state_dict(outer)


def _deal(parameters: Sequence[nn.Parameter], parts: int) -> Iterator[list[nn.Parameter]]:
    """Cut a list into consecutive parts of about the same number of values, none empty."""
    whole = sum(p.numel() for p in parameters)
    part: list[nn.Parameter] = []
    done, left = 0, parts
    for i, parameter in enumerate(parameters):
        part.append(parameter)
        done += parameter.numel()
        follow = len(parameters) - i - 1
        if left > 1 and (done >= whole * (parts - left + 1) / parts or follow < left):
            yield part
            part, left = [], left - 1
    yield part


@register("local")
class Local(Strategy):
    """Strategy of local SGD: gradients are not averaged, weights are, every few steps.

    Args:
        model, comms, bucket_cap_mb: as for any strategy.
        local: averages the weights; during its warm-up gradients are averaged, one by one. Default:
            weights are averaged after each step.
    """

    replicas = False
    copies = 3  # the shared values, how far they move, and what was sent

    def __init__(
        self,
        model: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        local: LocalSteps | None = None,
    ) -> None:
        super().__init__(model, comms, bucket_cap_mb)
        self.local = local or LocalSteps(model, comms, every=1)

    def finish(self) -> None:
        if self.local.warming_up:
            average_gradients(self.module, self.comms, self.timeline)

    def after_step(self) -> None:
        with self.timeline.span("wait for weights", lane="wait"):
            self.local.after_step()

    def meet(self) -> None:
        self.local.meet()

    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step after the warm-up, by formula: the mean over steps."""
        whole = ring_cost(self.comms.world_size, gradient_bytes(self.module))
        return whole.most_sent / self.local.every

    @classmethod
    def program(cls, program: Program) -> None:
        work = program.work
        program.micro_batches(program.accumulation)
        program.compute(work.optimizer)
        if (program.step + 1) % program.every == 0:
            program.wait(program.start("all_reduce", work.values * work.parameter_size))
