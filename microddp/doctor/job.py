"""A job of torchrun's with a time limit, from both ends: who starts it, and what each rank does.

The ranks run this file as ``python -m microddp.doctor.job FOLDER LIMIT WHAT BACKEND``. In the
folder they leave ``said``, what rank 0 has to say, and ``rank0`` and so on: empty, or how the rank
failed or where it was when it was told to stop.
"""

from __future__ import annotations

import faulthandler
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from microddp.comms import end_with_parent

GRACE = 5  # seconds between SIGTERM and SIGKILL: for torchrun's ranks, then as many for torchrun
END = re.compile(r"rank +: (\d+).*?\n +exitcode +: (-?\d+)", re.DOTALL)  # in torchrun's summary


class JobFailed(Exception):
    """The message says which rank failed first, and how, then where the others were."""


class JobStopped(JobFailed):
    """It took longer than its limit; the message says where each rank was."""


def run_job(what: str, ranks: int, backend: str, limit: float) -> str:
    """Run one of ``checks.CHECKS``, or a chapter by its path, and return what rank 0 said.

    When this returns or raises, no process of the job is left.

    Raises:
        JobFailed: a rank failed; as JobStopped: the job took more than ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", f"--shutdown-timeout={GRACE}"),
            *("-m", "microddp.doctor.job", folder, f"{limit}", what, backend),
        ]
        with output.open("w") as file:
            torchrun = subprocess.Popen(
                command,
                env={**os.environ, "MPLBACKEND": "Agg"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = torchrun.wait(limit)
        finally:
            _stop(torchrun)
        if status is None:
            problem = f"stopped after its limit of {limit:g} s; where its ranks were:"
            raise JobStopped("\n".join([problem, *_stories(Path(folder), output)]))
        if status:
            problem = f"torchrun ended with status {status}"
            raise JobFailed("\n".join([problem, *_stories(Path(folder), output)]))
        said = Path(folder, "said")
        return said.read_text() if said.exists() else ""


def _stop(torchrun: subprocess.Popen[bytes]) -> None:
    """End what is left of a job: torchrun stops its ranks, and without torchrun they die."""
    torchrun.terminate()
    with suppress(subprocess.TimeoutExpired):
        torchrun.wait(2 * GRACE)
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter
        os.killpg(torchrun.pid, signal.SIGKILL)
    torchrun.wait()


def _stories(folder: Path, output: Path) -> list[str]:
    """How each rank ended, the first first: the others fail because of it, or are stopped."""
    files = sorted(folder.glob("rank*"), key=lambda path: path.stat().st_mtime_ns)
    told = {file.name.removeprefix("rank"): text for file in files if (text := _text(file))}
    stories = [f"\nrank {rank}:\n{text.rstrip()}" for rank, text in told.items()]
    printed = _text(output)
    silent = [
        f"\nrank {rank} ended without a word, with exit code {code}"
        for rank, code in END.findall(printed)
        if rank not in told and int(code) != -signal.SIGTERM
    ]
    lines = printed.splitlines()
    if stories and not silent:  # then only NCCL knows more; NCCL_DEBUG=INFO makes it talk
        lines = [line for line in lines if "NCCL" in line]
    last = ["\nThe job's last lines:", *lines[-30:]] if lines else []
    return [*silent, *stories, *last]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def main() -> None:
    """Be a rank."""
    folder, limit, what, backend = sys.argv[1:]
    # Open until the process is gone: whatever it still does may fail or hang.
    file = Path(folder, f"rank{os.environ['RANK']}")
    story = file.open("w", encoding="utf-8", errors="replace")
    faulthandler.enable(story)
    faulthandler.register(signal.SIGTERM, file=story, chain=True)
    # A rank that torchrun could not stop ends by itself: at the latest then, and with torchrun.
    faulthandler.dump_traceback_later(float(limit) + 3 * GRACE, exit=True, file=story)
    end_with_parent()
    try:
        _run(Path(folder), what, backend)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # how ranks that are not timed leave
            return
        traceback.print_exc(file=story)
        story.flush()
        # At once: to leave the group first would wait for the others, or let them fail before us.
        os._exit(1)


def _run(folder: Path, what: str, backend: str) -> None:
    if what.endswith(".py"):
        sys.argv = [what]
        runpy.run_path(what, run_name="__main__")
        return
    # Only here: who starts the job needs neither, and what fails in them is this rank's story.
    from microddp.comms import init
    from microddp.doctor.checks import CHECKS

    comms = init(backend)
    said = CHECKS[what](comms)
    if comms.rank == 0:
        (folder / "said").write_text(said)
    comms.close()


if __name__ == "__main__":
    main()
