"""The diagnosis of a hang, from the ranks' records: where each rank is, and which are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from microddp.comms import name_ranks
from microddp.hang import Entry


@dataclass(frozen=True)
class Rank:
    """A rank, as its record and its process show it.

    Attributes:
        calls: calls of its record, the latest last.
        process: ``"running"``, ``"stopped"``, ``"gone"``, or why that is not known.
        stack: lines of the user's program that it is in, the innermost last:
            ``"train.py:30 in load"``.
        torch_calls: collectives in PyTorch's own record, ``None`` without one.
    """

    calls: Sequence[Entry]
    process: str = "running"
    stack: Sequence[str] = ()
    torch_calls: Sequence[Entry] | None = None

    @property
    def call(self) -> Entry | None:
        """The call that it waits in, else its last one."""
        calls = [entry for entry in self.calls if not entry.is_end and not entry.is_close]
        waiting = [entry for entry in calls if entry.state == "waiting"]
        return next(reversed(waiting or calls), None)

    @property
    def from_the_start(self) -> bool:
        """True if none of its calls was dropped."""
        return not self.calls or self.calls[0].serial == 0

    @property
    def end(self) -> Entry | None:
        """The entry that says how it left, by an exception if one ended it."""
        ends = [entry for entry in self.calls if entry.is_end]
        errors = [entry for entry in ends if entry.state == "failed"]
        return next(reversed(errors or ends), None)


def whereabouts(rank: Rank, now: int) -> tuple[str, str, str]:
    """Say where a rank is: the call, a time that belongs to it, and what else is known."""
    entry, end = rank.call, rank.end
    text, when, more = "in no call yet", "", ""
    if entry is not None:
        since = f"{(now - entry.begun) / 1e9:.1f} s"
        text, when = {
            "waiting": (f"waiting in {entry}", f", for {since}"),
            "begun": (f"has called {entry}", f", {since} ago, and its end is not recorded"),
            "failed": (f"failed in {entry}", f", after {(entry.ended - entry.begun) / 1e9:.1f} s"),
            "done": (f"in no call; through its last, {entry}", ""),
        }[entry.state]
        if entry.state == "done" and entry.ended:
            when = f", {(now - entry.ended) / 1e9:.1f} s ago"
        if entry.state != "failed" and (end or rank.process == "gone"):
            when = ""
    if end is not None:
        more = f"; then {end.call.partition(':')[0]}{end.at_place}"
    elif rank.process in ("gone", "stopped"):
        more = f"; process {rank.process}"
    elif rank.stack and (entry is None or entry.state == "done"):
        more = f"; now at {rank.stack[-1]}"
    return text, when, more


def diagnose(ranks: Mapping[int, Rank], world_size: int, now: int) -> str:
    """Say what is wrong, in Markdown.

    Args:
        ranks: ranks that have a record, by number.
        world_size: number of ranks in the job.
        now: present time, nanoseconds since 1970.
    """
    found = _compare_groups(ranks, world_size, now)
    if not found:
        of_torch = {
            number: replace(rank, calls=[*rank.torch_calls, *filter(None, [rank.end])])
            for number, rank in ranks.items()
            if rank.torch_calls is not None
        }
        found = _compare_groups(of_torch, world_size, now)
        if found:
            found = ["PyTorch's own record has every collective, and counts them all:", *found]
    calls = [rank.call for rank in ranks.values()]
    if not found and any(_waits(call) and not call.number for call in calls if call):
        found = ["Ranks wait for messages.", _list(ranks, now)]
        if all(call and _waits(call) and call.call.startswith("send(") for call in calls):
            found[0] = (
                "All ranks send, and none receives: `sendrecv` does both at once, and so does "
                "`async_op=True` with a wait after receiving."
            )
    lines = [f"- {fate}" for fate in _fates(ranks, world_size)]
    paragraphs = (["\n".join(lines)] if lines else []) + found
    return "\n\n".join(paragraphs) or "No rank waits for another one."


def _fates(ranks: Mapping[int, Rank], world_size: int) -> list[str]:
    """List the ranks that are gone, the first first: the others may have failed because of it."""
    lines = []
    if absent := [number for number in range(world_size) if number not in ranks]:
        lines.append(f"{_name(absent)} left no record here: of another machine, or never started.")
    ended = [(rank.end, number) for number, rank in ranks.items() if rank.end]
    for end, number in sorted(ended, key=lambda pair: (pair[0].begun, pair[1])):
        if end.state == "failed":
            lines.append(f"Rank {number} {end.call}{end.at_place}.")
    for process, why in (
        ("gone", "gone without a word, as when they are killed"),
        ("stopped", "stopped, as by SIGSTOP"),
    ):
        if who := [n for n, rank in ranks.items() if rank.process == process and not rank.end]:
            lines.append(f"{_name(who)}: {why}.")
    return lines


def _compare_groups(ranks: Mapping[int, Rank], world_size: int, now: int) -> list[str]:
    """Say in paragraphs what is wrong in each group; none if its ranks are through the same calls.

    A group is over, whatever became of its calls, once all ranks that used it have closed it.
    """
    groups: dict[str, dict[int, dict[int, Entry]]] = {}
    closed = {(e.group, number) for number, rank in ranks.items() for e in rank.calls if e.is_close}
    for number, rank in ranks.items():
        for entry in rank.calls:
            if entry.number:
                calls = groups.setdefault(entry.group, {}).setdefault(number, {})
                calls[entry.number] = entry
    lines = []
    for group, by_rank in groups.items():
        if all((group.split(" ")[0], number) in closed for number in by_rank):
            continue
        some = next(iter(next(iter(by_rank.values())).values()))
        # A long record may have dropped what a rank called in a group that is not used any more.
        waited_for = any(_waits(calls[max(calls)]) for calls in by_rank.values())
        members = [
            m
            for m in sorted({*by_rank, *some.members(world_size)})
            if m in by_rank or (m in ranks and (waited_for or ranks[m].from_the_start))
        ]
        problem = _compare({member: by_rank.get(member, {}) for member in members})
        if problem:
            among = f"Among ranks {some.ranks}: " if some.ranks else ""
            lines += [among + problem, _list({m: ranks[m] for m in members}, now)]
    return lines


def _compare(calls: Mapping[int, Mapping[int, Entry]]) -> str:
    """Say what is wrong with the collectives of a group; ``calls``: by rank and number."""
    last = {rank: max(numbered, default=0) for rank, numbered in calls.items()}
    if different := _first_difference(calls, lambda entry: entry.call):
        return f"The ranks made different calls: {different}."
    # A rank that has left out a call has made the next like it from another line.
    different = _first_difference(calls, lambda entry: entry.place)
    hint = f" The first call from different lines: {different}." if different else ""
    least, top = min(last.values()), max(last.values())
    if least < top:
        late = [rank for rank in last if last[rank] == least]
        missed = [numbered[least + 1] for numbered in calls.values() if least + 1 in numbered]
        what = missed[0] if missed else f"collective {least + 1}"
        return f"{_name(late)} {'has' if len(late) == 1 else 'have'} not come to {what}.{hint}"
    at_top = {rank: numbered[top] for rank, numbered in calls.items() if top in numbered}
    waiting = [rank for rank, entry in at_top.items() if _waits(entry)]
    through = [rank for rank, entry in at_top.items() if entry.state == "done"]
    if not waiting:
        return ""
    if through:
        return f"{_name(through)}: through {at_top[through[0]]}; {name_ranks(waiting)} not."
    return (
        f"All ranks are in the same call, {at_top[waiting[0]]}, and none is missing: look at the "
        f"network between them, and for a rank that is not in the record.{hint}"
    )


def _first_difference(calls: Mapping[int, Mapping[int, Entry]], of: Callable[[Entry], str]) -> str:
    """Name the first collective that differs between ranks, as each made it; else empty."""
    for number in sorted(set().union(*calls.values())):
        made = {rank: numbered[number] for rank, numbered in calls.items() if number in numbered}
        if len(set(map(of, made.values()))) > 1:
            who: dict[str, list[int]] = {}
            for rank, entry in made.items():
                who.setdefault(str(entry), []).append(rank)
            return "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in who.items())
    return ""


def _list(ranks: Mapping[int, Rank], now: int) -> str:
    """List where the ranks are; ranks in the same place share a line."""
    who: dict[tuple[str, str], list[int]] = {}
    times: dict[tuple[str, str], str] = {}
    for number, rank in ranks.items():
        text, when, more = whereabouts(rank, now)
        who.setdefault((text, more), []).append(number)
        times.setdefault((text, more), when)
    return "\n".join(
        f"- {name_ranks(numbers)}: {text}{times[text, more]}{more}"
        for (text, more), numbers in who.items()
    )


def _waits(entry: Entry | None) -> bool:
    return entry is not None and entry.state in ("waiting", "failed")


def _name(ranks: Iterable[int]) -> str:
    return name_ranks(ranks).capitalize()
