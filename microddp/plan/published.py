"""The planner beside published measurements: ``published.toml``.

A share of speed that is kept is predicted with ``tcp``, ``pcie`` and ``jitter`` as they fit the
rows of all other publishers; a speed with the utilisation that other publishers reach. No row is
left out of the rest: ``alone`` was set by the speeds, the activations that selective recomputation
keeps by PyTorch's memory; and of :mod:`microddp.performance.nccl`, ``ADDED`` and the share of the
bandwidth that trees reach by two rows of all-reduces. All these are compared here. Beside each
prediction stands a guess, which needs no model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from microddp.fitted import bus_bandwidth
from microddp.performance.nccl import NETWORK, NVLINK, PCIE
from microddp.performance.network import Network, Port
from microddp.performance.simulator import Way, simulate
from microddp.plan.library import Overheads, devices, links, read
from microddp.plan.planning import Plan, Training, plan
from microddp.program import Work

Kind = Literal["speed kept", "speed", "memory", "all-reduce"]
TOKENS = 8192  # of a device and micro-batch, where it is not published
HARD = 0.95  # share of speed kept below which a row is a hard one


@dataclass(frozen=True)
class Compared:
    """A published figure, a predicted one, and a guess.

    Attributes:
        kind: what it is.
        publisher: publisher of the figure.
        name: name of the publication.
        what: measured quantity, in words.
        published: published figure: a share of speed that is kept, tokens a second of a device,
            GiB, or a bus bandwidth in GB/s.
        simulated: predicted figure, in the same unit. The module says which parts of the model
            were fitted without this publisher's rows.
        guess: a guess beside it: all speed is kept; the speed of the nearest model that another
            publisher trained on such devices; all memory is taken; the specified bandwidth.
        source: source of the published figure, and of the inputs.
        assumed: inputs that are not the source's, in words; empty where there are none.
        devices: number of devices.
        device: key of their kind in ``library.toml``; empty where it makes no difference.
    """

    kind: Kind
    publisher: str
    name: str
    what: str
    published: float
    simulated: float
    guess: float
    source: str
    assumed: str
    devices: int
    device: str = ""

    @property
    def error(self) -> float:
        """Error of the predicted figure, as a share of the published one."""
        return self.simulated / self.published - 1

    @property
    def guess_error(self) -> float:
        """Error of the guess, as a share of the published figure."""
        return self.guess / self.published - 1

    @property
    def hard(self) -> bool:
        """True if much of the speed was lost."""
        return self.kind == "speed kept" and self.published < HARD


def skill(rows: Sequence[Compared]) -> float:
    """Compute 1 less the median error divided by the guess's: 0 is no better than the guess."""
    error = statistics.median(abs(row.error) for row in rows)
    return 1 - error / statistics.median(abs(row.guess_error) for row in rows)


@cache
def compare_published() -> tuple[Compared, ...]:
    """Predict every published figure, in the order of the file.

    Speeds are those of stage 3 on the fastest network that the library has for such devices.
    """
    book = read("published.toml")
    found = [row for curve in book["curves"] for row in _curve(curve)]
    found += [row for entry in book["speeds"] for row in _speeds(entry)]
    found += [row for entry in book["memory"] for row in _memory(entry)]
    return (*found, *(row for entry in book["all_reduces"] for row in _all_reduces(entry)))


def fitted_without(publisher: str) -> Overheads:
    """Return the usual overheads, with ``tcp``, ``pcie`` and ``jitter`` from others' rows."""
    found = read("published.toml")["fitted"]
    return replace(Overheads.usual(), **found.get(publisher, {}))


# ---- speed that is kept


def kept(curve: dict[str, Any], overheads: Overheads) -> list[tuple[float, float]]:
    """Return the shares of speed that are kept, published and predicted.

    A device is as fast as it was on the first number of devices.
    """
    rates, rate = curve["rates"], _rate(curve, overheads)
    first = curve["tokens"][0] / _step(curve, 0, rate, overheads)
    return [
        (rates[i] / rates[0], curve["tokens"][i] / _step(curve, i, rate, overheads) / first)
        for i in range(1, len(rates))
    ]


def cluster_of(name: str, count: int) -> tuple[Work, Network]:
    """Return the work and the network by which a published share of speed is predicted.

    Args:
        name: name of the publication.
        count: number of devices, one of those that it has.

    Raises:
        ValueError: nobody published that.
    """
    for curve in read("published.toml")["curves"]:
        if curve["name"] == name and count in curve["devices"]:
            overheads, i = fitted_without(curve["publisher"]), curve["devices"].index(count)
            return _work(curve, i, _rate(curve, overheads)), _network(curve, i, overheads)
    raise ValueError(f"expected a training of published.toml, got {name!r} on {count} devices")


def _rate(curve: dict[str, Any], overheads: Overheads) -> float:
    rates, operations = curve["rates"], 6 * curve["parameters"]
    rate = float(operations * rates[0])
    for _ in range(20):  # until the first figure is met
        got = curve["tokens"][0] / _step(curve, 0, rate, overheads)
        if abs(got / rates[0] - 1) < 1e-4 or rate > 10 * operations * rates[0]:
            break
        rate *= rates[0] / got
    return rate


def _step(curve: dict[str, Any], i: int, rate: float, overheads: Overheads) -> float:
    accumulation = curve["accumulation"][i]
    way = Way(curve["strategy"], "nccl", accumulation=accumulation, slowed=overheads.slowed)
    alone = simulate(_work(curve, i, rate), _network(curve, i, overheads), way).step
    return alone * overheads.waiting(curve["devices"][i])


def _work(curve: dict[str, Any], i: int, rate: float) -> Work:
    return Work.from_operations(
        curve["parameters"],
        curve["layers"],
        curve["tokens"][i] / curve["accumulation"][i],
        rate,
        curve["parameter_size"],
        gradient_size=curve["gradient_size"],
    )


def _network(curve: dict[str, Any], i: int, overheads: Overheads) -> Network:
    count, between = curve["devices"][i], curve["between"]
    bandwidth = between[i] if isinstance(between, list) else between  # as measured on so many
    bus, transport, node = curve["bus"], curve["transport"], min(curve["node"], count)
    latencies = {"nvlink": NVLINK, "pcie": PCIE, "between": NETWORK}
    if "latency" in curve:
        latencies = dict.fromkeys(latencies, curve["latency"])
    inside = Port(curve["inside"] * overheads.reached(bus), latencies[bus])
    link = Port(bandwidth * overheads.reached(transport), latencies["between"])
    return Network(count, link, node, inside, min(curve["rails"], node))


def _publication(entry: dict[str, Any]) -> dict[str, str]:
    always = {name: entry[name] for name in ("publisher", "name", "source")}
    return {**always, "assumed": entry.get("assumed", "")}


def _curve(curve: dict[str, Any]) -> Iterator[Compared]:
    first = curve["devices"][0]
    found = kept(curve, fitted_without(curve["publisher"]))
    for count, (published, predicted) in zip(curve["devices"][1:], found, strict=True):
        yield Compared(
            kind="speed kept",
            what=f"speed kept, {first} to {count} devices",
            published=published,
            simulated=predicted,
            guess=1.0,
            devices=count,
            **_publication(curve),
        )


# ---- absolute speed


def utilisation(row: dict[str, Any]) -> float:
    """Compute the share of a device's peak that a published speed is, without recomputation."""
    return float(row["rate"] * _training(row).operations / devices()[row["device"]].peak)


def _training(row: dict[str, Any]) -> Training:
    return Training(
        row["parameters"],
        row["layers"],
        row.get("tokens", TOKENS),
        hidden=row["hidden"],
        vocabulary=row.get("vocabulary", 0),
        sequence=row["sequence"],
        recompute=row["recompute"],
    )


@cache
def usual_utilisation(device: str, without: str = "") -> float:
    """Return the median of the publishers' medians on a kind of device.

    Args:
        device: key of the device in ``library.toml``.
        without: publisher to leave out.

    Raises:
        ValueError: nobody else published one.
    """
    by: dict[str, list[float]] = {}
    for entry in read("published.toml")["speeds"]:
        for case in entry["cases"]:
            if case["device"] == device and entry["publisher"] != without:
                by.setdefault(entry["publisher"], []).append(utilisation(case))
    if not by:
        raise ValueError(f"expected published speeds on {device}, got none")
    return statistics.median(map(statistics.median, by.values()))


def _speeds(entry: dict[str, Any]) -> Iterator[Compared]:
    others = [
        case
        for each in read("published.toml")["speeds"]
        if each["publisher"] != entry["publisher"]
        for case in each["cases"]
    ]
    for case in entry["cases"]:
        alike = [other for other in others if other["device"] == case["device"]]
        if not alike:
            continue
        share = usual_utilisation(case["device"], entry["publisher"])
        size = math.log(case["parameters"])
        nearest = min(alike, key=lambda other: abs(math.log(other["parameters"]) - size))
        yield Compared(
            kind="speed",
            what=f"tokens/s, {case['model']}, {case['devices']} {case['device']}",
            published=case["rate"],
            simulated=_plan(case, share).tokens_per_second,
            guess=nearest["rate"],
            devices=case["devices"],
            device=case["device"],
            **_publication(entry),
        )


def _plan(case: dict[str, Any], utilisation: float) -> Plan:
    device = replace(devices()[case["device"]], utilisation=utilisation)
    link = links()["8x200gbit" if case["device"] == "a100" else "8x400gbit"]
    return plan(_training(case), device, link, case["devices"], "zero3")


# ---- memory, and all-reduces alone


def _memory(entry: dict[str, Any]) -> Iterator[Compared]:
    for case in entry["cases"]:
        kind = devices()[case["device"]]
        yield Compared(
            kind="memory",
            what=f"GiB, {case['model']}, {case['devices']} {case['device']}",
            published=case["gib"],
            simulated=_plan(case, kind.utilisation).memory / 2**30,
            guess=kind.memory / 2**30,
            devices=case["devices"],
            device=case["device"],
            **_publication(entry),
        )


def _all_reduces(entry: dict[str, Any]) -> Iterator[Compared]:
    for case in entry["cases"]:
        n, nbytes = case["devices"], case["nbytes"]
        inside = Port(entry["inside"], entry["inside_latency"]) if "inside" in entry else None
        between = Port(case["between"], case["latency"])
        network = Network(
            n, between, entry["node"], inside, entry["rails"], adds=entry.get("adds", False)
        )
        seconds = network.seconds("all_reduce", "nccl", nbytes)
        published = case.get("bus") or bus_bandwidth(nbytes, case["seconds"], n)
        link = f", {8e-9 * case['between']:g} Gbit/s, {1e3 * case['latency']:g} ms"
        what = f"GB/s, {nbytes / 1e6:,.0f} MB, {n} devices{link if entry['node'] == 1 else ''}"
        specified = min(
            entry.get("inside", math.inf),
            case["between"] * entry["rails"] if n > entry["node"] else math.inf,
        )
        yield Compared(
            kind="all-reduce",
            what=what,
            published=published / 1e9,
            simulated=bus_bandwidth(nbytes, seconds, n) / 1e9,
            guess=specified / 1e9,
            devices=n,
            **_publication(entry),
        )


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile of errors without their signs."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[round(0.9 * (len(sizes) - 1))]


def middle(rows: Sequence[Compared]) -> tuple[float, float]:
    """Return the range in which eight of ten published figures lie, as shares of the predicted."""
    ratios = sorted(row.published / row.simulated for row in rows)
    last = len(ratios) - 1
    return ratios[round(0.1 * last)], ratios[round(0.9 * last)]
