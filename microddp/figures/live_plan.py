"""A form in which a reader plans a step, and sees whether several devices are worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from microddp.figures.live import Live, html_table

COUNTS = tuple(2**k for k in range(11))  # numbers of devices in the still table
RATES = ("peak", "utilisation", "latency")  # of a device, in the script's order


def explore_plan(
    devices: Mapping[str, Mapping[str, float]],
    links: Mapping[str, float],
    *,
    parameters: float,
    tokens: float,
    ranks: int,
    budget: Callable[..., Any],
    gradient_bytes: float = 4,
) -> Live:
    """A form to plan a step of several devices beside that of one for the same tokens.

    The still table has the speed-up of the first device, for each number of them on each link.

    Args:
        devices: operations a second (``"peak"``), the share of them that training reaches
            (``"utilisation"``) and seconds to start a round of an all-reduce (``"latency"``) of
            each device, by name; the form begins with the first.
        links: bytes a second in each direction, by name; the form begins with the first.
        parameters: number of the model's parameters at the beginning.
        tokens: number of tokens of a device and step at the beginning.
        ranks: number of devices at the beginning.
        budget: :func:`~microddp.performance.worth.step_budget`, for the table; the script has the
            same model, with micro-batches and sharding.
        gradient_bytes: bytes sent for each gradient at the beginning.
    """
    name, device = next(iter(devices.items()))
    rows = []
    for n in COUNTS:
        cells = []
        for bandwidth in links.values():
            step = budget(
                parameters, tokens, n, bandwidth=bandwidth, gradient_bytes=gradient_bytes, **device
            )
            bare, hidden = (f"{o.speedup:.3g}" for o in (step.unhidden, step.overlapped))
            cells.append(bare if bare == hidden else f"{bare} to {hidden}")
        rows.append((n, *cells))
    still = (
        f"<p>Speed-up over one device ({name}) on the same tokens, {tokens:g} a device and step, "
        f"with {parameters:.3g} parameters: with nothing hidden, to all hidden that the last "
        f"backward can hide.</p>\n{html_table(rows, ['devices', *links])}"
    )
    data = {
        "devices": [[name, *map(device.get, RATES)] for name, device in devices.items()],
        "links": list(links.items()),
        "start": {
            "parameters": parameters,
            "tokens": tokens,
            "devices": ranks,
            "gradient_bytes": gradient_bytes,
        },
    }
    title = "Plan a step: what several devices take, and what one takes for the same tokens"
    return Live("plan", title, data, still)
