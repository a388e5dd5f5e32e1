"""The command line: ``python -m microddp.doctor --help``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from microddp.doctor import hang
from microddp.doctor.checks import CHECKS
from microddp.doctor.job import run_job
from microddp.doctor.machine import facts
from microddp.launch import JobFailed, JobStopped
from microddp.results import output_file, positive, whole_file

CHAPTERS = ("01", "03", "06")  # a gradient by hand, the first whole step, the wrapper
BUDGET = 300.0  # seconds, after which no job is begun


@dataclass(frozen=True)
class Job:
    """A check, or a chapter by its path, to be run as a job; or why it cannot be."""

    name: str
    what: str = ""
    ranks: int = 2
    backend: str = ""  # a chapter's own choice
    obstacle: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 if a check failed, 2 without records."""
    options = _parse(arguments)
    # Being told to end is an exception, so that the job under way is ended, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    said: list[str] = []

    def say(text: str, end: str = "\n") -> None:
        print(text, end=end, flush=True)
        said.append(text + end)

    failed = 0
    if options.folder:
        try:
            say(hang.report(options.folder))
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    else:
        failed = _examine(options, say)
    if options.report:
        with whole_file(options.report) as path:
            path.write_text("".join(said), encoding="utf-8")
        print(f"The report is in {options.report}")
    return min(1, failed)


def _examine(options: argparse.Namespace, say: Callable[..., None]) -> int:
    """Ask this machine what it has, run the checks, and return how many failed."""
    start = time.monotonic()
    say("# microddp.doctor\n\n## The machine\n")
    for name, text in facts():
        said_of_it = _block(text) if "\n" in text else text
        say(f"- **{name}**: {said_of_it}")
    say("\n## The checks\n")
    ends: Counter[str] = Counter()
    stuck: set[str] = set()  # backends; what stopped one check would most likely stop the next
    for job in _plan(options.only):
        say(f"- **{job.name}**: ", end="")  # so that one sees what is being waited for
        obstacle = job.obstacle
        if job.backend in stuck:
            obstacle = f"a job over {job.backend} had to be stopped; --only {job.what} tries it"
        elif time.monotonic() > start + BUDGET:
            obstacle = f"{BUDGET:g} s are over"
        end, detail = (f"skipped, {obstacle}", "") if obstacle else _run(job, options.limit, stuck)
        ends[end.partition(",")[0]] += 1
        say(end + _block(detail))
    seconds = time.monotonic() - start
    say(f"\n## {', '.join(f'{n} {end}' for end, n in ends.items())} in {seconds:.0f} s")
    return ends["FAILED"]


def _block(text: str) -> str:
    """Format lines below an entry in Markdown; without text, nothing."""
    lines = "".join(f"  {line}".rstrip() + "\n" for line in text.splitlines())
    return f"\n\n  ```text\n{lines}  ```\n" if text else ""


def _run(job: Job, limit: float, stuck: set[str]) -> tuple[str, str]:
    """Run a job; return how it ended, in a line, and the details."""
    start = time.monotonic()
    try:
        end, detail = "ok", run_job(job.what, job.ranks, job.backend, limit)
    except JobFailed as error:
        end, detail = "FAILED", str(error)
        if isinstance(error, JobStopped) and job.backend:
            stuck.add(job.backend)
    return f"{end}, {time.monotonic() - start:.1f} s", detail


def _plan(only: Sequence[str]) -> Iterator[Job]:
    checks = [name for name in CHECKS if name in only]
    gpus = torch.cuda.device_count()
    where = "sharing the GPUs" if gpus else "on CPU"
    yield from (Job(f"{c}, gloo, 2 ranks {where}", c, 2, "gloo") for c in checks)
    if gpus and dist.is_nccl_available():
        yield from (Job(f"{c}, nccl, a rank on each GPU", c, gpus, "nccl") for c in checks)
    elif checks:
        yield Job("nccl", obstacle="not built in" if gpus else "no GPU that torch can use")
    if "chapters" not in only:
        return
    paths = sorted(p for p in Path("chapters").glob("[0-9]*.py") if p.name.startswith(CHAPTERS))
    if not paths:
        yield Job("chapters", obstacle="there is no chapters/ in the current directory")
    for path in paths:
        yield Job(f"chapter {path.stem}, 2 ranks", str(path))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m microddp.doctor",
        description="Say what this machine has, and check that ranks on it compute what they "
        "should: in jobs over NCCL, with a rank on each GPU, and over gloo. With a folder of "
        "records, say why a job hangs.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="of the records of a job that hangs: what MICRODDP_RECORD is in its environment",
    )
    parts = [*CHECKS, "chapters"]
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=parts, help="default: all; not for a folder"
    )
    parser.add_argument(
        "--limit",
        type=positive(float),
        default=120.0,
        help="seconds for a job (default 120); not for a folder",
    )
    parser.add_argument("--report", type=output_file, metavar="FILE", help="write it all to a file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
