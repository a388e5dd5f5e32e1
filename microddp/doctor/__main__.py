"""The command line: ``python -m microddp.doctor --help``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from microddp.doctor.checks import CHECKS
from microddp.doctor.job import JobFailed, JobStopped, run_job
from microddp.doctor.machine import facts
from microddp.report import whole_file

CHAPTERS = ("01", "03", "06")  # a gradient by hand, the first whole step, the wrapper
BUDGET = 300.0  # seconds, after which no job is begun but those of --all-chapters


@dataclass
class Report:
    """What is said, at once on the terminal, and in Markdown for a file."""

    markdown: list[str] = field(default_factory=lambda: ["# microddp.doctor"])

    def heading(self, text: str) -> None:
        """Begin a section."""
        print(f"\n{text}\n", flush=True)
        self.markdown += ["", f"## {text}", ""]

    def begin(self, name: str) -> None:
        """Name an entry before its text is known, so that one sees what is being waited for."""
        print(f"{name}: ", end="", flush=True)
        self.markdown.append(f"- **{name}**: ")

    def end(self, text: str, detail: str = "") -> None:
        """Say the rest of the entry: one line, and perhaps several more."""
        lines = [f"    {line}".rstrip() for line in detail.splitlines()]
        print("\n".join([text, *lines]), flush=True)
        self.markdown[-1] += text
        if lines:
            self.markdown += ["", "  ```text", *(line[2:] for line in lines), "  ```", ""]


@dataclass(frozen=True)
class Job:
    """A check, or a chapter by its path, to be run as a job; or why it cannot be."""

    name: str
    what: str = ""
    ranks: int = 2
    backend: str = ""  # a chapter's own choice
    obstacle: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 if a check failed, else 0."""
    options = _parse(arguments)
    # Being told to end is an exception, so that the job under way is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start = time.monotonic()
    report = Report()
    report.heading("The machine")
    for name, text in facts():
        report.begin(name)
        report.end(*(("", text) if "\n" in text else (text,)))
    report.heading("The checks")
    ends: Counter[str] = Counter()
    stuck: set[str] = set()  # backends; what stopped one check would most likely stop the next
    for job in _plan(options):
        report.begin(job.name)
        obstacle = job.obstacle
        if job.backend in stuck:
            obstacle = f"a job over {job.backend} had to be stopped; --only {job.what} tries it"
        elif time.monotonic() > start + BUDGET and not options.all_chapters:
            obstacle = f"{BUDGET:g} s are over"
        end, detail = (f"skipped, {obstacle}", "") if obstacle else _run(job, options.limit, stuck)
        ends[end.partition(",")[0]] += 1
        report.end(end, detail)
    seconds = time.monotonic() - start
    report.heading(f"{', '.join(f'{n} {end}' for end, n in ends.items())} in {seconds:.0f} s")
    if options.report:
        with whole_file(options.report) as path:
            path.write_text("\n".join(report.markdown).rstrip() + "\n", encoding="utf-8")
        print(f"The report is in {options.report}")
    return min(1, ends["FAILED"])


def _run(job: Job, limit: float, stuck: set[str]) -> tuple[str, str]:
    """How a job ended, in a line, and what there is to say about it."""
    start = time.monotonic()
    try:
        end, detail = "ok", run_job(job.what, job.ranks, job.backend, limit)
    except JobFailed as error:
        end, detail = "FAILED", str(error)
        if isinstance(error, JobStopped) and job.backend:
            stuck.add(job.backend)
    return f"{end}, {time.monotonic() - start:.1f} s", detail


def _plan(options: argparse.Namespace) -> Iterator[Job]:
    checks = [name for name in CHECKS if name in options.only]
    gpus = torch.cuda.device_count()
    where = "sharing the GPUs" if gpus else "on CPU"
    yield from (Job(f"{c}, gloo, 2 ranks {where}", c, 2, "gloo") for c in checks)
    if gpus and dist.is_nccl_available():
        yield from (Job(f"{c}, nccl, a rank on each GPU", c, gpus, "nccl") for c in checks)
    elif checks:
        yield Job("nccl", obstacle="not built in" if gpus else "no GPU that torch can use")
    if "chapters" not in options.only or options.no_chapters:
        return
    paths = sorted(Path("chapters").glob("[0-9]*.py"))
    if not paths:
        yield Job("chapters", obstacle="there is no chapters/ in the current directory")
    for path in paths:
        if options.all_chapters or path.name.startswith(CHAPTERS):
            yield Job(f"chapter {path.stem}, 2 ranks", str(path))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m microddp.doctor",
        description="Say what this machine has, and check that ranks on it compute what they "
        "should: in jobs over NCCL, with a rank on each GPU, and over gloo.",
    )
    parts = [*CHECKS, "chapters"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="default: all")
    chapters = parser.add_mutually_exclusive_group()
    chapters.add_argument("--no-chapters", action="store_true", help="half as long")
    chapters.add_argument(
        "--all-chapters", action="store_true", help=f"not only {', '.join(CHAPTERS)}; many minutes"
    )
    parser.add_argument(
        "--limit", type=_seconds, default=120.0, help="seconds for a job (default 120)"
    )
    parser.add_argument("--report", type=_file, metavar="FILE", help="write it all as Markdown")
    return parser.parse_args(arguments)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():  # said now, and not when all is checked
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text}")
    return path


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
