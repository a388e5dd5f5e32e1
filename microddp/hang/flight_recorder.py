"""PyTorch's own record of collectives, its flight recorder, to a file and back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from microddp.comms import name_members
from microddp.hang.call_site import call_site
from microddp.hang.entry import Entry
from microddp.hang.history import History

LATEST = 200  # of its entries that are written
# Collectives to which every rank passes the same, so that it may be compared.
ALIKE = ("all_reduce", "broadcast", "all_gather", "_all_gather_base", "_reduce_scatter_base")


def torch_calls(*, stacks: bool = False) -> list[dict[str, Any]] | None:
    """Return the last collectives of this process that PyTorch recorded.

    Its flight recorder is on by default, for NCCL as for gloo (PyTorch 2.11, 2.13 and 2.15). It
    also has collectives that do not go through ``Comms``. gloo's entries stay "scheduled": their
    field "retired" says whether one is over. gloo's messages are not in it.

    Args:
        stacks: include them; the first take PyTorch half a second.

    Returns:
        PyTorch's entries; ``None`` if it has no recorder.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)  # a private name
    return None if dump is None else pickle.loads(dump(True, stacks, False)).get("entries", [])


def flight_record() -> str:
    """Return the latest of :func:`torch_calls` as JSON, with places as our record has them."""
    entries = (torch_calls(stacks=True) or [])[-LATEST:]
    for entry in entries:
        frames = entry.pop("frames", [])
        entry["place"] = call_site((frame["filename"], frame["line"]) for frame in frames)
    return json.dumps(entries)


def read_flight_records(histories: Iterable[History]) -> dict[int, list[Entry]]:
    """Read the collectives that PyTorch recorded on each rank, of the ranks that wrote them."""
    written: dict[int, list[dict[str, Any]]] = {}
    members: dict[str, set[int]] = {}  # of each group: PyTorch does not write them
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
    """Turn PyTorch's entries into those of a record."""
    for entry in entries:
        group, description = entry["process_group"]
        name = entry["profiling_name"].partition(":")[2]  # behind the backend's
        tensor = ""
        if name in ALIKE and entry["input_sizes"]:
            tensor = f"{entry['input_dtypes'][0]} {tuple(entry['input_sizes'][0])}"
        yield Entry(
            serial=entry["record_id"],
            group=group,
            ranks="" if description == "default_pg" else name_members(sorted(members[group])),
            number=entry["collective_seq_id"],
            call=f"{name}({tensor})",
            place=entry["place"],
            begun=entry["time_created_ns"],
            state="done" if entry["retired"] else "waiting",
        )
