"""Plan a training on devices that you do not have: simulated, with the planner's error.

Measure tokens a second on the devices that you have, and let the planner carry that to more:

python -m microddp.plan --config config.json --tokens 16384 --measured 5762@8 --devices 64 1024

Without a measurement a device reaches what published trainings reached on its kind:

python -m microddp.plan --config config.json --tokens 8192 --devices 64 128 --link 100gbit
python -m microddp.plan --config config.json --batch 4e6 --in-all 1e12 --price 2.5 --cheapest
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from microddp.performance.failures import Failures
from microddp.plan.config import attention_width, count_parameters
from microddp.plan.library import Device, Link, devices, links, named
from microddp.plan.planning import (
    DAY,
    KEPT,
    Plan,
    Training,
    calibrated,
    cheapest,
    sweep,
    usual_failures,
)
from microddp.plan.published import Compared, compare_published, middle, skill, summary
from microddp.report import human_seconds, table
from microddp.results import output_file, picture_file, positive, write_result
from microddp.strategies import STRATEGIES

LEAST = 20  # figures that make a range
SEQUENCE = 8192  # tokens
COUNTS = tuple(8 << k for k in range(8))  # to 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; see ``--help``."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.library:
        print(library())
        return
    try:
        training, device, link = _asked(options)
        failures = Failures(3600 * options.failure_hours, options.checkpoint, options.restart)
        plans = sweep(
            training, device, link, options.devices, options.strategies, options.price, failures
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(
        f"{training.parameters:.3g} parameters in {training.layers} layers on {device.name}, "
        f"{link.name}; simulated, not measured"
    )
    rows = like(options.device, bool(options.measured))
    met = (options.measured[1], options.strategies[0]) if options.measured else None
    print(as_table(plans, training, rows, met))
    print(fill(ranges(rows), 100))
    if met in [(each.devices, each.strategy) for each in plans]:
        rate, count = options.measured
        print(f"{rate:,.0f} on {count} with {options.strategies[0]} are measured: no range there.")
    if not training.hidden:
        print("GB: parameters, gradients and optimizer. Activations come on top: give --config.")
    if options.cheapest:
        print(_advice(cheapest(plans, options.within and options.within * DAY), options))
    sentences = errors()
    for sentence in sentences:
        print(fill(sentence, 100, subsequent_indent="  "))
    if options.json:
        written = [{**asdict(each), "limit": each.limit} for each in plans]
        write_result(options.json, "simulated, not measured", rows=written, errors=sentences)
    if options.plot:
        _draw(plans, options.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m microddp.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--library", action="store_true", help="list devices and links, and end")
    model = parser.add_argument_group("what is trained")
    model.add_argument("--config", type=Path, metavar="FILE", help="config.json of the model")
    model.add_argument("--parameters", type=positive(float), help="of the model, without --config")
    model.add_argument("--layers", type=positive(int), help="of the model, without --config")
    model.add_argument(
        "--sequence", type=positive(float), help=f"tokens of a sequence, with --config ({SEQUENCE})"
    )
    model.add_argument(
        "--recompute", choices=KEPT, help="activations computed again, with --config (none)"
    )
    model.add_argument(
        "--gradient-bytes", type=int, choices=(2, 4), default=4, help="of a value as sent (4)"
    )
    size = model.add_mutually_exclusive_group()
    size.add_argument(
        "--tokens", type=positive(float), default=8192, help="of a device and micro-batch (8192)"
    )
    model.add_argument("--accumulation", type=positive(int), default=1, help="micro-batches (1)")
    size.add_argument(
        "--batch", type=positive(float), help="tokens of a step, all devices together; no --tokens"
    )
    model.add_argument(
        "--kept", type=positive(float), default=1.0, help="share of gradients that is sent (1)"
    )
    model.add_argument(
        "--every", type=positive(int), default=1, help="steps between meetings of local (1)"
    )
    model.add_argument("--in-all", type=positive(float), help="tokens of the whole training")
    where = parser.add_argument_group("on what")
    where.add_argument("--device", default="h100", help="of --library (h100)")
    where.add_argument("--link", default="8x400gbit", help="of --library, a node's (8x400gbit)")
    where.add_argument("--devices", type=positive(int), nargs="+", default=COUNTS, metavar="N")
    where.add_argument(
        "--strategies", nargs="+", default=["ddp", "zero1", "zero3"], metavar="NAME",
        help=f"of {', '.join(STRATEGIES)} (ddp zero1 zero3)",
    )  # fmt: skip
    speed = where.add_mutually_exclusive_group()
    speed.add_argument(
        "--measured",
        type=measurement,
        metavar="RATE@N",
        help="tokens a second of each of N devices, measured with the first of --strategies",
    )
    speed.add_argument("--utilisation", type=positive(float), help="of the device's peak")
    usual = usual_failures()
    for name, value, text in (
        ("--failure-hours", usual.between / 3600, "of one device between failures"),
        ("--checkpoint", usual.checkpoint, "seconds that a checkpoint takes"),
        ("--restart", usual.restart, "seconds that a restart takes"),
    ):
        where.add_argument(name, type=positive(float), default=value, help=f"{text} ({value:g})")
    where.add_argument("--price", type=positive(float), help="of a device's hour")
    parser.add_argument("--cheapest", action="store_true", help="name the cheapest that fits")
    parser.add_argument("--within", type=positive(float), metavar="DAYS", help="of the cheapest")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw the efficiency")
    return parser


def _asked(options: argparse.Namespace) -> tuple[Training, Device, Link]:
    hidden, vocabulary, attention = 0, 0, 0
    if options.config and not (options.parameters or options.layers):
        parameters: float
        config = json.loads(options.config.read_text())
        parameters, layers = count_parameters(config)
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        attention = attention_width(config)
    elif options.parameters and options.layers and not options.config:
        if options.sequence or options.recompute:
            raise ValueError("expected --config with --sequence and --recompute")
        parameters, layers = options.parameters, options.layers
    else:
        raise ValueError("expected --config, or --parameters and --layers")
    for asked, name in ((options.cheapest, "--cheapest"), (options.price, "--price")):
        if asked and options.in_all is None:
            raise ValueError(f"expected --in-all for {name}: without an end there is no price")
    if options.within and not options.cheapest:
        raise ValueError("expected --cheapest for --within")
    training = Training(
        parameters,
        layers,
        options.tokens,
        accumulation=options.accumulation,
        in_all=options.in_all,
        kept=options.kept,
        every=options.every,
        batch=options.batch,
        hidden=hidden,
        attention=attention,
        vocabulary=vocabulary,
        sequence=options.sequence or SEQUENCE,
        recompute=options.recompute or "none",
        gradient_size=options.gradient_bytes,
    )
    device: Device = named("device", options.device, devices())
    if options.utilisation:
        if options.utilisation > 1:
            raise ValueError(f"expected a utilisation of at most 1, got {options.utilisation}")
        device = replace(device, utilisation=options.utilisation)
    link: Link = named("link", options.link, links())
    if options.measured:
        rate, count = options.measured
        device = calibrated(training, device, link, options.strategies[0], rate, count)
    return training, device, link


def measurement(text: str) -> tuple[float, int]:
    """Read tokens a second of each device, and the number of devices, from ``RATE@N``."""
    rate, at, count = text.partition("@")
    try:
        found = float(rate), int(count)
    except ValueError:
        found = 0.0, 0
    if not (at and 0 < found[0] < float("inf") and found[1] > 0):
        raise argparse.ArgumentTypeError(f"expected tokens a second @ devices, got {text!r}")
    return found


def like(device: str, measured: bool) -> list[Compared]:
    """Return the published figures whose errors tell how far off a plan's speed may be."""
    found = compare_published()
    if measured:
        return [row for row in found if row.kind == "speed kept"]
    speeds = [row for row in found if row.kind == "speed"]
    return [row for row in speeds if row.device == device] or speeds


def ranges(rows: Sequence[Compared]) -> str:
    """Say what the ranges beside speeds are."""
    kept = "shares of speed kept"
    what, source = ("speeds", "utilisation") if rows[0].kind == "speed" else (kept, kept)
    return (
        f"Ranges: divided by what was predicted from other publishers' {source}, eight of ten "
        f"published {what} lie within them. Of {len(rows)} figures a range takes those on an "
        f"eighth as many devices or more; where they are fewer, the {LEAST} on the most devices."
    )


def on_as_many(rows: Sequence[Compared], devices: int) -> Sequence[Compared]:
    """Choose the rows of at least an eighth as many devices, or those of the most devices."""
    most = sorted(rows, key=lambda row: -row.devices)
    return most[: max(LEAST, sum(8 * row.devices >= devices for row in rows))]


def as_table(
    plans: Sequence[Plan],
    training: Training,
    beside: Sequence[Compared],
    measured: tuple[int, str] | None = None,
) -> str:
    """Write a table with a line for each plan, and the whole training where it has an end.

    Args:
        plans: plans.
        training: training that was planned.
        beside: published figures, of whose errors ranges are made.
        measured: devices and strategy of which the speed was measured: no range there.
    """
    rows: list[list[Any]] = []
    for each in plans:
        rate = each.tokens_per_second
        exact = (each.devices, each.strategy) == measured
        low, high = middle(on_as_many(beside, each.devices))
        row: list[Any] = [
            each.devices,
            each.strategy,
            f"{1e3 * each.step:,.4g}",
            f"{1e3 * each.exposed:,.3g}",
            f"{rate:,.0f}" + ("" if exact else f" ({low * rate:,.0f} to {high * rate:,.0f})"),
            f"{each.efficiency:.1%}",
            f"{each.memory / 1e9:.3g}",
            each.limit,
        ]
        if each.seconds is not None:
            hours = each.device_hours or 0.0
            days, least, most = (_days(each.seconds / share) for share in (1.0, high, low))
            days += "" if exact else f" ({least} to {most})"
            row += [
                f"{each.useful:.1%}",
                days if each.fits else "",
                f"{hours:,.0f}" if each.fits else "",
            ]
        if each.price is not None:
            row.append(f"{each.price:,.0f}" if each.fits else "")
        rows.append(row)
    headers = ["devices", "strategy", "step ms", "exposed ms", "tokens/s each"]
    headers += ["efficiency", "GB each", "limit"]
    if training.in_all is not None:
        headers += ["left", "days", "device-hours"]
    if plans and plans[0].price is not None:
        headers.append("price")
    return table(rows, headers)


def _days(seconds: float) -> str:
    days = seconds / DAY
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"


def _advice(best: Plan | None, options: argparse.Namespace) -> str:
    within = f" within {options.within:g} days" if options.within else ""
    if best is None:
        return f"None of these fits into memory and ends{within}."
    assert best.seconds is not None
    cost = f", for {best.price:,.0f}" if best.price is not None else ""
    return (
        f"Cheapest that fits{within}: {best.strategy} on {best.devices}, "
        f"{human_seconds(best.seconds)}{cost}."
    )


def errors() -> list[str]:
    """Report the planner's errors where it was checked, in sentences."""
    sentences = []
    found = compare_published()
    for what, guess, kind in (
        ("shares of speed kept", "all is kept", "speed kept"),
        ("shares below 0.95", "all is kept", "hard"),
        ("tokens a second", "as the nearest model's", "speed"),
        ("GiB at the peak (PyTorch's set a constant)", "all of the memory", "memory"),
        ("all-reduces (two set constants)", "as specified", "all-reduce"),
    ):
        rows = [each for each in found if (each.hard if kind == "hard" else each.kind == kind)]
        median, ninety = summary([row.error for row in rows])
        guessed = summary([row.guess_error for row in rows])[0]
        sentences.append(
            f"Error against published {what}: median {median:.1%}, nine of ten within "
            f"{ninety:.0%}; of the guess {guess!r}: {guessed:.1%}; skill "
            f"{skill(rows):.2f} ({len(rows)} figures of {len({r.publisher for r in rows})})."
        )
    return sentences


def library() -> str:
    """List devices and links, with their sources."""
    rows = [
        (key, d.name, f"{d.peak / 1e12:g}", f"{d.utilisation:.0%}", f"{d.memory / 1e9:g}",
         d.node, f"{d.inside / 1e9:g}", d.date)
        for key, d in devices().items()
    ]  # fmt: skip
    headers = ["", "device", "TFLOP/s", "reached", "GB", "in a node", "GB/s inside", "of"]
    text = table(rows, headers) + "\n\n"
    kinds = [
        (key, each.name, each.rails, f"{each.bandwidth / 1e9:g}", human_seconds(each.latency))
        for key, each in links().items()
    ]
    text += table(kinds, ["", "link", "rails", "GB/s each", "latency"]) + "\n"
    every: dict[str, Device | Link] = {**devices(), **links()}
    return text + "".join(f"\n{key}: {each.source} ({each.date})" for key, each in every.items())


def _draw(plans: Sequence[Plan], path: Path) -> None:
    from microddp import figures  # only now: matplotlib takes a second to load

    curves = {
        name: (
            [each.devices for each in plans if each.strategy == name],
            [each.efficiency for each in plans if each.strategy == name],
        )
        for name in dict.fromkeys(each.strategy for each in plans)
    }
    figures.lines(
        curves, title="efficiency", xlabel="devices", ylabel="efficiency", log="x", simulated=True
    )
    figures.save(path)


if __name__ == "__main__":
    main()
