"""The simulator beside published measurements: ``published.toml``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from microddp.allreduce import bus_bandwidth
from microddp.performance.network import Network, Port
from microddp.performance.simulator import Way
from microddp.plan.library import read
from microddp.plan.planning import quickest
from microddp.program import Work


@dataclass(frozen=True)
class Compared:
    """A published figure, and the simulated one.

    Attributes:
        name: name of the publication.
        what: measured quantity, in words.
        published: published figure: a share of speed that is kept, or a bus bandwidth in GB/s.
        simulated: simulated figure, in the same unit.
        source: source of the published figure, and of the inputs.
        assumed: inputs that are not the source's, in words; empty where there are none.
    """

    name: str
    what: str
    published: float
    simulated: float
    source: str
    assumed: str

    @property
    def error(self) -> float:
        """Error of the simulated figure, as a share of the published one."""
        return self.simulated / self.published - 1


def compare_published() -> list[Compared]:
    """Simulate every published figure, in the order of the file."""
    book = read("published.toml")
    rows = [row for curve in book["curves"] for row in _curve(curve)]
    return rows + [row for entry in book["all_reduces"] for row in _all_reduces(entry)]


def _curve(curve: dict[str, Any]) -> Iterator[Compared]:
    """Compare the speeds with those of the first number of devices, which sets a device's rate."""
    rates = []
    first, count = curve["rates"][0], len(curve["devices"])
    between = curve["between"]  # one, or as it was measured on so many devices
    for devices, tokens, accumulation, bandwidth in zip(
        curve["devices"],
        curve["tokens"],
        curve["accumulation"],
        between if isinstance(between, list) else [between] * count,
        strict=True,
    ):
        size, parameters = curve["value_size"], curve["parameters"]
        rate = 6 * parameters * first  # operations a second
        work = Work.from_operations(
            parameters, curve["layers"], tokens / accumulation, rate, value_size=size
        )
        network = Network(
            devices,
            Port(bandwidth, curve.get("latency", 14e-6)),
            curve["node"],
            Port(curve["inside"], curve.get("latency", 3.4e-6)),
            curve["rails"],
        )
        way = Way(curve["strategy"], accumulation=accumulation)
        rates.append(tokens / quickest(work, network, way)[1].step)
    for devices, rate, published in zip(
        curve["devices"][1:], rates[1:], curve["rates"][1:], strict=True
    ):
        yield Compared(
            curve["name"],
            f"speed kept, {curve['devices'][0]} to {devices} devices",
            published / first,
            rate / rates[0],
            curve["source"],
            curve.get("assumed", ""),
        )


def _all_reduces(entry: dict[str, Any]) -> Iterator[Compared]:
    for case in entry["cases"]:
        n, nbytes = case["devices"], case["nbytes"]
        inside = Port(entry["inside"], entry["inside_latency"]) if "inside" in entry else None
        between = Port(case["between"], case["latency"])
        network = Network(
            n, between, entry["node"], inside, entry["rails"], adds="switch" in entry["algorithms"]
        )
        seconds = min(
            network.seconds("all_reduce", algorithm, nbytes) for algorithm in entry["algorithms"]
        )
        published = case.get("bus") or bus_bandwidth(nbytes, case["seconds"], n)
        simulated = bus_bandwidth(nbytes, seconds, n)
        link = f", {8e-9 * case['between']:g} Gbit/s, {1e3 * case['latency']:g} ms"
        what = f"GB/s, {nbytes / 1e6:,.0f} MB, {n} devices{link if entry['node'] == 1 else ''}"
        published, simulated = published / 1e9, simulated / 1e9
        yield Compared(
            entry["name"], what, published, simulated, entry["source"], entry.get("assumed", "")
        )


def summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 90th percentile and the largest of errors without their signs."""
    sizes = sorted(map(abs, errors))
    ninety = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    return statistics.median(sizes), ninety, sizes[-1]
