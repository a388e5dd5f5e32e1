"""Why a job hangs: the records of its ranks, read while it hangs or afterwards.

Run the job with ``MICRODDP_RECORD=DIR`` in its environment, and ``python -m microddp.doctor DIR``
when it hangs or has failed. Ranks that run on this machine are sent SIGUSR1, for their stacks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from microddp.comms import name_members
from microddp.doctor.diagnosis import Rank, diagnose, whereabouts
from microddp.hang import Entry, History, locate, read_record
from microddp.report import table

PATIENCE = 3.0  # seconds for the ranks' answers
FRAME = re.compile(r' *File "(.+)", line (\d+), in (.+)')
INNERMOST = 3  # of the user's frames of a rank
# Collectives to which every rank passes the same, so that it may be compared.
ALIKE = ("all_reduce", "broadcast", "all_gather", "_all_gather_base", "_reduce_scatter_base")


def report(folder: Path) -> str:
    """Where each rank is, what is wrong, and where those that run are in the program; as Markdown.

    Raises:
        ValueError: there is no record, or a file there is none.
    """
    histories, ranks = examine(folder)
    now = time.time_ns()
    rows = []
    for number, history in histories.items():
        process = f"{history.pid} on {history.host}, {ranks[number].process}"
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
    """The records of the last job that left some in a folder, and what is known of its ranks now.

    Raises:
        ValueError: there is no record, or a file there is none.
    """
    histories = _newest_job(folder)
    states = {rank: _process(history) for rank, history in histories.items()}
    answered = _ask(h for rank, h in histories.items() if states[rank] == "running")
    histories = _newest_job(folder)  # as they were when the ranks answered
    torch_calls = _torch_calls(histories.values())
    ranks = {
        rank: Rank(
            history.calls,
            states[rank],
            _users_frames(history.file("stack").read_text()) if rank in answered else (),
            torch_calls.get(rank),
        )
        for rank, history in histories.items()
    }
    return histories, ranks


def _newest_job(folder: Path) -> dict[int, History]:
    """The records of the last job that left some here, by rank."""
    histories = [read_record(path) for path in folder.glob("rank*.record")]
    if not histories:
        raise ValueError(f"expected a folder with records of ranks, got {folder}")
    newest = max(histories, key=lambda history: history.started)
    job = newest.job, newest.world_size
    same = {h.rank: h for h in histories if (h.job, h.world_size) == job}
    return dict(sorted(same.items()))


def _process(history: History) -> str:
    """Whether a record's process runs; another one may have got its number since."""
    if history.host != socket.gethostname():
        return "elsewhere"
    process = Path("/proc", str(history.pid))
    if not process.with_name("self").exists():
        return "not known"  # macOS
    try:
        mapped = str(history.file("record").resolve()) in process.joinpath("maps").read_text()
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
    """The innermost frames of the main thread that are the user's: ``"train.py:30 in load"``."""
    _, main, *_ = stack.split("\nthread ")
    frames = [(*locate(file), line, name) for file, line, name in FRAME.findall(main)]
    return [f"{shown}:{n} in {name}" for near, shown, n, name in frames if near == 2][-INNERMOST:]


def _torch_calls(histories: Iterable[History]) -> dict[int, list[Entry]]:
    """What PyTorch recorded on each rank that has written it."""
    written: dict[int, list[dict[str, Any]]] = {}
    members: dict[str, set[int]] = {}  # of a group, which PyTorch does not tell
    for history in histories:
        if (path := history.file("torch.json")).exists():
            entries = [entry for entry in json.loads(path.read_text()) if not entry["is_p2p"]]
            written[history.rank] = entries
            for entry in entries:
                members.setdefault(entry["process_group"][0], set()).add(history.rank)
    return {rank: list(_entries(entries, members)) for rank, entries in written.items()}


def _entries(
    entries: Iterable[Mapping[str, Any]], members: Mapping[str, set[int]]
) -> Iterator[Entry]:
    """PyTorch's entries as those of a record."""
    for entry in entries:
        group, description = entry["process_group"]
        name = entry["profiling_name"].partition(":")[2]  # behind the backend's
        what = ""
        if name in ALIKE and entry["input_sizes"]:
            what = f"{entry['input_dtypes'][0]} {tuple(entry['input_sizes'][0])}"
        yield Entry(
            serial=entry["record_id"],
            group=group,
            ranks="" if description == "default_pg" else name_members(sorted(members[group])),
            number=entry["collective_seq_id"],
            call=f"{name}({what})",
            place=entry["place"],
            begun=entry["time_created_ns"],
            state="done" if entry["retired"] else "waiting",
        )
