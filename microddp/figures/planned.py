"""A form in which a reader plans a step, and sees whether several devices are worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from html import escape
from typing import Protocol

from microddp.figures.live import Live, html_table

COUNTS = tuple(2**k for k in range(11))  # of devices, in the still table


@dataclass(frozen=True)
class Device:
    """What a device enters a plan with.

    Attributes:
        peak: operations a second.
        utilisation: the share of them that training reaches.
        latency: seconds to start a round of an all-reduce between such devices.
    """

    peak: float
    utilisation: float
    latency: float


class Outcome(Protocol):
    """A step on several devices: how many times as fast as one it trains."""

    @property
    def speedup(self) -> float: ...


class Budget(Protocol):
    """A step with nothing hidden, and with all hidden that can be."""

    @property
    def unhidden(self) -> Outcome: ...
    @property
    def overlapped(self) -> Outcome: ...


def explore_plan(
    devices: Mapping[str, Device],
    links: Mapping[str, float],
    *,
    parameters: float,
    tokens: float,
    ranks: int,
    budget: Callable[..., Budget],
    gradient_bytes: float = 4,
    checked: str = "",
) -> Live:
    """A step to plan: what several devices take, and what one takes for the same tokens.

    What stands still is the speed-up of the first device, for each number of them on each link.

    Args:
        devices: by name; the form begins with the first.
        links: bytes a second in each direction, by name; the form begins with the first.
        parameters: of the model, to begin with, like the following.
        tokens: of a device and step.
        ranks: the number of devices.
        budget: :func:`~microddp.performance.worth.step_budget`, whose model the script has.
        gradient_bytes: sent for each gradient.
        checked: how far off such plans were where they were checked, in words.
    """
    name, device = next(iter(devices.items()))
    rows = []
    for n in COUNTS:
        cells = []
        for bandwidth in links.values():
            step = budget(
                parameters, tokens, n, bandwidth=bandwidth, gradient_bytes=gradient_bytes,
                peak=device.peak, utilisation=device.utilisation, latency=device.latency,
            )  # fmt: skip
            bare, hidden = (f"{o.speedup:.3g}" for o in (step.unhidden, step.overlapped))
            cells.append(bare if bare == hidden else f"{bare} to {hidden}")
        rows.append((n, *cells))
    still = (
        f"<p>Speed-up over one device ({name}) on the same tokens, {tokens:g} a device and step, "
        f"with {parameters:.3g} parameters: with nothing hidden, to all hidden that the last "
        f"backward can hide. {escape(checked)}</p>\n{html_table(rows, ['devices', *links])}"
    )
    data = {
        "devices": [[name, *astuple(device)] for name, device in devices.items()],
        "links": list(links.items()),
        "checked": checked,
        "start": {
            "parameters": parameters,
            "tokens": tokens,
            "devices": ranks,
            "gradient_bytes": gradient_bytes,
        },
    }
    title = "Plan a step: what several devices take, and what one takes for the same tokens"
    return Live("plan", title, data, still)
