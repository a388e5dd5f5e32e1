"""Build a step of the course yourself, and have it checked on several ranks.

python -m microddp.labs list         the labs, and how far you have come
python -m microddp.labs start 02     write what is given of lab 02 to my_work/
python -m microddp.labs check 02     run it on 1, 2, 3 and 4 ranks, and say what does not hold
python -m microddp.labs hint 02      the first hint; "hint 02 2" is the second
python -m microddp.labs solution 02  print a right solution
"""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from microddp.labs.engine.catalogue import LABS, find
from microddp.labs.engine.job import run_job
from microddp.labs.engine.lab import Lab
from microddp.labs.engine.listener import Outcome
from microddp.labs.engine.results import WIDTH, explain, first_failure, overview
from microddp.labs.engine.work import Work
from microddp.report import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 1 if a check fails, or 2 for bad input."""
    options = _parse(arguments)
    try:
        status: int = options.command(options)
        return status
    except (OSError, ValueError) as error:
        print(f"microddp.labs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # of a script that hangs
        return 128 + signal.SIGINT


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m microddp.labs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, words in (
        (_list, "the labs, and how far you have come"),
        (_start, "write what is given of a lab"),
        (_check, "run a lab's checks on your script"),
        (_hint, "print a hint"),
        (_solution, "print a right solution"),
    ):
        aliases = ["progress"] if command is _list else []
        name = command.__name__[1:]
        sub = commands.add_parser(name, help=words, description=words, aliases=aliases)
        sub.set_defaults(command=command)
        if command is not _list:
            sub.add_argument("lab", help="its number, as 02")
        if command in (_list, _start, _check):
            where = "folder of your scripts (default: my_work)"
            sub.add_argument("--dir", type=Path, default=Path("my_work"), help=where)
        if command is _start:
            sub.add_argument("--overwrite", action="store_true", help="replace your script")
        if command is _hint:
            sub.add_argument("number", nargs="?", type=int, default=1, help="(default: 1)")
    return parser.parse_args(arguments)


def _list(options: argparse.Namespace) -> int:
    work = Work(options.dir)
    rows = [(lab.number, lab.title, lab.chapter, work.state(lab)) for lab in LABS.values()]
    print(table(rows, ["lab", "you build", "chapter", f"in {options.dir}"]))
    return 0


def _start(options: argparse.Namespace) -> int:
    lab = find(options.lab)
    path = Work(options.dir).start(lab, overwrite=options.overwrite)
    functions = ", ".join(lab.functions)
    print(f"{path}: write {functions}. Then: {_command('check', lab, options.dir)}")
    return 0


def _check(options: argparse.Namespace) -> int:
    lab = find(options.lab)
    work = Work(options.dir)
    script = work.script(lab)
    if not script.exists():
        raise FileNotFoundError(f"no {script.resolve()} yet: {_command('start', lab, options.dir)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of finally
    print(f"Lab {lab.number}, {lab.title}: {script}\n", flush=True)
    outcomes, digest = [], work.digest(lab)
    total = sum(len(lab.checks_on(stage)) for stage in lab.stages)
    with tqdm(total=total, unit="check", leave=False, disable=not sys.stderr.isatty()) as bar:
        for stage in lab.stages:
            bar.set_description(str(stage))
            outcomes.append(run_job(lab, script, stage, progress=lambda _: bar.update()))
            if (failure := outcomes[-1].failure) and failure.hangs:
                break  # to hang again takes as long again
    outcomes += [Outcome(stage) for stage in lab.stages[len(outcomes) :]]
    print(overview(lab, outcomes))
    for reason in {outcome.refused for outcome in outcomes} - {""}:
        print("\n" + textwrap.fill(f"Not run here: {reason}", WIDTH))
    failed = first_failure(lab, outcomes)
    if failed:
        print("\n" + explain(lab, failed))
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"\n{work.note(lab, outcomes, digest)} hold, in {seconds:.1f} s.", flush=True)
    return 1 if failed else 0


def _hint(options: argparse.Namespace) -> int:
    lab = find(options.lab)
    if not 1 <= options.number <= len(lab.hints):
        raise ValueError(f"expected a hint from 1 to {len(lab.hints)}, got {options.number}")
    print(f"Hint {options.number} of {len(lab.hints)}\n")
    print(textwrap.fill(lab.hints[options.number - 1], WIDTH))
    if options.number < len(lab.hints):
        print(f"\nThe next: python -m microddp.labs hint {lab.number} {options.number + 1}")
    return 0


def _solution(options: argparse.Namespace) -> int:
    print(find(options.lab).solution.read_text(), end="")
    return 0


def _command(name: str, lab: Lab, folder: Path) -> str:
    where = "" if folder == Path("my_work") else f" --dir {folder}"
    return f"python -m microddp.labs {name} {lab.number}{where}"


if __name__ == "__main__":
    sys.exit(main())
