"""The reason why a job hangs, from the records of its ranks: read while it hangs or afterwards.

Ranks that run on this machine are sent SIGUSR1, for their stacks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from microddp.doctor.diagnosis import Rank, diagnose, whereabouts
from microddp.hang import History, Origin, locate, machine, read_flight_records, read_record
from microddp.report import table

PATIENCE = 3.0  # seconds for the ranks' answers
FRAME = re.compile(r' *File "(.+)", line (\d+), in (.+)')
INNERMOST = 3  # of the user's frames of a rank


def report(folder: Path) -> str:
    """Report in Markdown what is wrong, and where in the program each rank is.

    Raises:
        ValueError: the folder has no record, or a file there is no record.
    """
    histories, ranks = examine(folder)
    now = time.time_ns()
    rows = []
    for number, history in histories.items():
        machine_name = history.host.partition(" ")[0]  # see hang.machine
        process = f"{history.pid} on {machine_name}, {ranks[number].process}"
        rows.append((number, process, "".join(whereabouts(ranks[number], now))))
    script, world_size = history.script, history.world_size  # all have the same
    lines = [
        f"# {script} on {world_size} ranks, from their records in {folder}\n",
        "## The ranks\n\nThe number of a collective counts those of its group of ranks.\n",
        f"```text\n{table(rows, ['rank', 'process', 'where'])}\n```\n",
        f"## The diagnosis\n\n{diagnose(ranks, world_size, now)}",
    ]
    running = [number for number, rank in ranks.items() if rank.process == "running"]
    if running:
        lines.append("\n## Where they are in the program, innermost last\n")
    for number in running:
        frames = "; ".join(ranks[number].stack)
        silence = f"no answer; py-spy dump --pid {histories[number].pid} may tell"
        lines.append(f"- rank {number}: {frames or silence}")
    return "\n".join(lines)


def examine(folder: Path) -> tuple[dict[int, History], dict[int, Rank]]:
    """Read the records of the last job in a folder, and ask about its ranks.

    Returns:
        By rank, its record, and what is known of it now.

    Raises:
        ValueError: the folder has no record, or a file there is no record.
    """
    histories = _newest_job(folder)
    states = {rank: _process(history) for rank, history in histories.items()}
    answered = _ask(h for rank, h in histories.items() if states[rank] == "running")
    histories = _newest_job(folder)  # as they were when the ranks answered
    torch_calls = read_flight_records(histories.values())
    ranks = {
        rank: Rank(
            history.calls,
            states.get(rank) or _process(history),  # it may have begun only now
            _users_frames(history.file("stack").read_text("utf-8")) if rank in answered else (),
            torch_calls.get(rank),
        )
        for rank, history in histories.items()
    }
    return histories, ranks


def _newest_job(folder: Path) -> dict[int, History]:
    """Read the records of the last job that left some here, by rank."""
    histories = [read_record(path) for path in folder.glob("rank*.record")]
    if not histories:
        raise ValueError(f"expected a folder with records of ranks, got {folder}")
    newest = max(histories, key=lambda history: history.started)
    job = newest.job, newest.world_size
    same = [h for h in histories if (h.job, h.world_size) == job and not _was_over(h, newest)]
    return {h.rank: h for h in sorted(same, key=lambda history: history.rank)}


def _was_over(history: History, newest: History) -> bool:
    """Return True for an earlier job's record: it is gone, and was through a call of all ranks."""
    done = [call for call in history.calls if call.number and call.state == "done"]
    first = min((call.ended for call in done if not call.ranks), default=time.time_ns())
    earlier = history.host == newest.host and first < newest.started * 1e9
    return earlier and _process(history) == "gone"


def _process(history: History) -> str:
    """Say if a record's process runs; another one may have got its number since."""
    if history.host != machine():
        return "elsewhere"
    process = Path("/proc", str(history.pid))
    if not process.with_name("self").exists():
        return "not known"  # macOS
    try:
        file = os.fsencode(history.file("record").resolve())
        mapped = file in process.joinpath("maps").read_bytes()
        state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except PermissionError:
        return "not known"
    return "gone" if not mapped else "stopped" if state in "Tt" else "running"


def _ask(histories: Iterable[History]) -> set[int]:
    """Send processes SIGUSR1, and return the ranks that have answered."""
    able = [history for history in histories if history.answers]  # others it would end
    stacks = {history.rank: history.file("stack") for history in able}
    before = {rank: _changed(stack) for rank, stack in stacks.items()}
    for history in able:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(history.pid, signal.SIGUSR1)
    answered: set[int] = set()
    end = time.monotonic() + PATIENCE
    while len(answered) < len(stacks) and time.monotonic() < end:
        time.sleep(0.05)
        answered = {rank for rank, stack in stacks.items() if _changed(stack) != before[rank]}
    return answered


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _users_frames(stack: str) -> list[str]:
    """Return the user's innermost frames of the main thread: ``"train.py:30 in load"``."""
    _, main, *_ = stack.split("\nthread ")
    frames = [(*locate(file), line, name) for file, line, name in FRAME.findall(main)]
    return [f"{shown}:{n} in {name}" for near, shown, n, name in frames if near is Origin.USER][
        -INNERMOST:
    ]
