"""A torchrun job, seen from the build and from torchrun.

`run_job` starts this file as a program of its own, `gallery_launcher_job.py FOLDER ARGUMENTS`.
That program is torchrun with the given arguments, and does two things more. It stops the job
when its standard input closes, a pipe that only the build holds open, so that no rank outlives
the build. And if a rank fails, it leaves `exits.json` in the folder: `[rank, status]` for each
rank that did not end well, the first one noticed first; a negative status is a signal.
"""

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from gallery_launcher_rank import Job

_RANK_PROGRAM = Path(__file__).with_name("gallery_launcher_rank.py")
# Set in every process of a job, to a value of that job's own.
_MARK = "GALLERY_LAUNCHER_JOB"
# torchrun gives its ranks this long between SIGTERM and SIGKILL, then has to end itself.
_SECONDS_FOR_RANKS = 5
_SECONDS_FOR_TORCHRUN = 8


class JobFailed(Exception):
    """A job gave no result; the message says which rank failed, and how."""


@dataclass(order=True)
class _Failure:
    """How a rank failed; failures sort by how likely they are to be the cause."""

    secondary: bool
    time: float
    rank: int
    text: str


def run_job(
    job: Job, folder: Path, ranks: int, timeout: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a job and return what rank 0 left in `result.pkl`.

    `folder` is emptied first; it holds the ranks' logs afterwards. `say` is called, from
    another thread, with each line that a rank writes. When this returns or raises, no process
    of the job is left.

    Raises `JobFailed` if a rank fails or the job takes more than `timeout` seconds.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.pkl").write_bytes(pickle.dumps(tuple(job)))
    mark = uuid.uuid4().hex
    command: list[str | Path] = [
        *(sys.executable, "-u", __file__, folder),
        *("--standalone", f"--nproc-per-node={ranks}", "--role=rank"),
        *(f"--log-dir={folder}", "--tee=3", f"--shutdown-timeout={_SECONDS_FOR_RANKS}"),
        *(_RANK_PROGRAM, folder),
    ]
    torchrun = subprocess.Popen(
        command,
        cwd=Path(job.chapter).parent,
        env={**os.environ, _MARK: mark, "MPLBACKEND": "Agg"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the build, which then stops the job
    )
    relay = threading.Thread(target=_relay, args=(torchrun.stdout, say), daemon=True)
    relay.start()
    try:
        status = torchrun.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _stop(torchrun, mark)
        relay.join()
    if status is None:
        raise JobFailed(_explain_timeout(job, folder, ranks, timeout))
    result = folder / "result.pkl"
    if status != 0 or not result.exists():
        raise JobFailed(_explain_failure(folder, status))
    return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]


def _relay(output: IO[str], say: Callable[[str], None]) -> None:
    for line in output:
        say(line.rstrip("\n"))


def _stop(torchrun: "subprocess.Popen[str]", mark: str) -> None:
    """End whatever still runs of a job, also what its ranks started and left behind."""
    try:
        torchrun.terminate()
        with suppress(subprocess.TimeoutExpired):
            torchrun.wait(_SECONDS_FOR_TORCHRUN)
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # ended meanwhile, or somebody else's
                if process.environ().get(_MARK) == mark:
                    process.kill()
        torchrun.wait()
        assert torchrun.stdin is not None
        torchrun.stdin.close()


def _explain_failure(folder: Path, status: int) -> str:
    reports = sorted(folder.glob("rank*.json"))
    failures = [_Failure(**json.loads(report.read_text())) for report in reports]
    told = {failure.rank for failure in failures}
    exits = folder / "exits.json"
    for place, (rank, code) in enumerate(json.loads(exits.read_text()) if exits.exists() else []):
        # torchrun stops the other ranks when one fails.
        stopped = place > 0 and code in (-signal.SIGTERM, -signal.SIGKILL)
        if rank not in told and not stopped:
            failures.append(_Failure(False, 0.0, rank, _describe_exit(code)))
    if not failures:
        return f"torchrun ended with status {status} and rank 0 gave no result."
    first, *others = sorted(failures)
    lines = [f"Rank {first.rank} failed first:", "", first.text.rstrip()]
    for failure in others:
        lines += ["", f"Rank {failure.rank} failed, too: {failure.text.rstrip().splitlines()[-1]}"]
    return "\n".join(lines)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"It exited with status {code}, without an exception."
    names = {number.value: number.name for number in signal.Signals}
    return f"It was ended by signal {names.get(-code, -code)}."


def _explain_timeout(job: Job, folder: Path, ranks: int, timeout: float) -> str:
    lines = [f"The job was stopped after its time-out, {timeout:g} s. Where its ranks were:"]
    for rank in range(ranks):
        stack = folder / f"rank{rank}.stack"
        frames = stack.read_text().splitlines()[1:] if stack.exists() else []
        # Below the chapter's own frames are only those that started it.
        inside = [i for i, frame in enumerate(frames) if f'"{job.chapter}"' in frame]
        shown = frames[: inside[-1] + 1] if inside else frames
        lines += ["", f"Rank {rank}, most recent call first:", *shown]
        if not frames:
            lines[-1] = f"Rank {rank} had ended, or not begun."
    return "\n".join(lines)


def _stop_when_the_build_ends() -> None:
    build = os.dup(0)
    # The ranks inherit standard input; theirs is to be empty.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        os.read(build, 1)
        os.kill(os.getpid(), signal.SIGTERM)  # on which torchrun stops its ranks

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, arguments: list[str]) -> int:
    """Be torchrun; return 0 if every rank ended well."""
    _stop_when_the_build_ends()
    # The build has no use for torch: only this program imports it.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its advice on OMP_NUM_THREADS would come with every chapter, and the failure that it logs
    # as the first is the first by whole seconds only.
    logging.disable(logging.ERROR)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        exits = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        (folder / "exits.json").write_text(json.dumps(exits))
        return 1
    except SignalException:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
