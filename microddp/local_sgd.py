"""Averaging weights now and then, instead of gradients in every step.

Between two meetings each rank trains by itself. At a meeting the ranks compare how far each has
come since the last one, and move the weights they share by the mean of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from microddp.allreduce import ring_cost
from microddp.comms import Comms, Pending
from microddp.model import gradient_bytes
from microddp.program import Program
from microddp.replicas import broadcast_parameters
from microddp.step import Strategy
from microddp.strategies import average_gradients, register


@dataclass(frozen=True)
class Outer:
    """How the shared weights move at a meeting: SGD, with Nesterov momentum if there is some.

    The defaults make the mean of the ranks' weights of it, which is local SGD. DiLoCo has 0.7 and
    0.9, and AdamW inside.

    Attributes:
        lr: the outer learning rate.
        momentum: from 0 to below 1.
    """

    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Outer:
        """Read ``"mean"``, or ``"nesterov:LR,MOMENTUM"`` as in ``"nesterov:0.7,0.9"``.

        Raises:
            ValueError: it is neither.
        """
        if text == "mean":
            return cls()
        kind, _, numbers = text.partition(":")
        try:
            lr, momentum = map(float, numbers.split(","))
        except ValueError:
            lr = momentum = -1.0
        if kind != "nesterov" or not lr > 0 or not 0 <= momentum < 1:
            raise ValueError(
                "expected mean, or nesterov:LR,MOMENTUM with LR above 0 and MOMENTUM from 0 to "
                f"below 1, got {text!r}"
            )
        return cls(lr, momentum)


MEAN = Outer()


class Fragment:
    """Parameters that meet at the same time, and the values the ranks share of them.

    Args:
        parameters: dense, of one dtype and device.
        comms: the ranks.
        outer: how the shared values move.

    Attributes:
        shared: flat, the same on every rank.
        optimizer: of those.
        sent_after: the steps that had been taken when its values were sent last.
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
        flat: torch.Tensor = _flatten_dense_tensors([p.detach() for p in self.parameters])  # type: ignore[no-untyped-call]
        return flat

    def begin_anew(self) -> None:
        """Share the values that the parameters have, which must be equal on all ranks."""
        self.shared.copy_(self._flat())

    def send(self, steps: int) -> None:
        """Begin to average how far the ranks have come after so many steps. A collective."""
        self.sent_after = steps
        self._sent = self._flat()
        # The pseudo-gradient points back to where the ranks started from: shared minus local.
        self.shared.grad = self.shared.detach() - self._sent
        self._under_way = self.comms.all_reduce_mean(self.shared.grad, async_op=True)

    def arrive(self) -> None:
        """Go on from the shared values, with what was trained since they were sent."""
        if self._under_way is None or self._sent is None:
            return
        self._under_way.wait()
        self.optimizer.step()
        # If nothing was, the difference is 0, and the values are the shared ones to the bit.
        values = self.shared.detach() + (self._flat() - self._sent)
        new = _unflatten_dense_tensors(values, self.parameters)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(self.parameters, list(new))
        self._sent = self._under_way = None


class LocalSteps:
    """Lets the ranks train by themselves, and brings them together every so many steps.

    Call :meth:`after_step` after each step of the optimizer.

    With several fragments these meet in turns, evenly spread over the steps, and what is sent
    travels during the next step: the messages are smaller, and hidden.

    Args:
        module: at construction its parameters become those of rank 0.
        comms: the ranks.
        every: steps from one meeting of a parameter to the next.
        outer: how the shared weights move.
        fragments: the number of parts, at most ``every``.
        warm_up: steps at the beginning, in which the caller averages gradients.

    Attributes:
        steps: taken so far.

    Raises:
        ValueError: a number that is not possible, parameters of several dtypes or devices, or
            batch norm with running statistics, of which each rank would have its own.

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
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                raise ValueError(f"{who} no running statistics, got batch norm in {name or 'it'}")
        broadcast_parameters(module, comms)
        self.comms = comms
        self.every, self.warm_up = every, warm_up
        self.fragments = [Fragment(part, comms, outer) for part in _deal(parameters, fragments)]
        self.steps = 0

    @property
    def warming_up(self) -> bool:
        """Whether the next step is one of those whose gradients are to be averaged."""
        return self.steps < self.warm_up

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def after_step(self) -> None:
        """Meet, if it is time. A collective.

        Raises:
            RuntimeError: the ranks have taken different numbers of steps, another rank failed, or
                the time-out passed.
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
        """Bring all fragments together now: then every rank has the same weights. A collective.

        Raises:
            RuntimeError: as :meth:`after_step`.
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
        """What to go on from after :meth:`meet`, the same on every rank."""
        return {
            "steps": self.steps,
            "outer": [fragment.optimizer.state_dict() for fragment in self.fragments],
        }

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the parameters as they are, which must be equal on all ranks."""
        self.steps = state["steps"]
        for fragment, outer in zip(self.fragments, state["outer"], strict=True):
            fragment.sent_after = self.steps
            fragment.begin_anew()
            fragment.optimizer.load_state_dict(outer)


def _deal(parameters: Sequence[nn.Parameter], parts: int) -> Iterator[list[nn.Parameter]]:
    """Cut a list into parts of about as many values, none empty."""
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
    """Not at all: each rank trains by itself, and at times the weights are averaged.

    Args:
        model: this rank's replica.
        comms: the ranks that share the weights.
        bucket_cap_mb: means nothing here.
        local: brings them together; in its warm-up gradients are averaged, one by one. Default:
            they meet after each step.
    """

    replicas = False

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
        whole = ring_cost(self.comms.world_size, gradient_bytes(self.module))
        return whole.most_sent / self.local.every

    @classmethod
    def program(cls, program: Program) -> None:
        super().program(program)
        if (program.step + 1) % program.every == 0:
            program.wait(program.start("all_reduce", program.parameter_bytes))
