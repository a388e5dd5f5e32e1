"""Slow rank or slow link? Both look like long communication; the report says which, if either.

A collective ends late because a rank came to it late, or because its bytes travelled slowly. A rank
that comes late may itself have been let go late, by the transfer before. So some steps, as a
:class:`~microddp.timing.timeline.Timeline` recorded them on all ranks, are taken apart:

- *Work* is the time in which a rank does not wait in a collective. What blocks it unrecorded, say a
  barrier of one's own, counts as work.
- A *transfer* lasts from when all ranks are there, and the collective before is over, to the end.
- A rank *holds the others up* by what a step's last collective would have ended earlier without it:
  in a replay in which each begins once the other ranks are there and takes as long as it took. No
  more of that counts than what the rank worked longer than the others, their median, in that step.
  So one that was let go late is not blamed.

**A rank is named** if in three quarters of the steps it works 1.15 times as long as the others or
more, and in the median step holds them up for 4 % of it. **A link is named** if the ranks wait for
transfers for 4 % of the time, all being there, and messages from rank to rank, beside the training,
show one link, and only one, at less than half the speed of the others, their median. Messages are
what tells links apart: in an all-reduce all wait for the slowest. Both may be named, or neither.

Why these numbers: 500 runs of 20 steps with each way of averaging, on 2 to 4 hosts in a box and
over loopback, on 2 cores that other programs used as well. A rank that slept, had twice the work,
shared its core with busy processes or ran a quarter of the time worked that much longer in 80 % of
the steps at least (in 30 to 70 % in 3 of 240 runs, which named nobody) and held the others up for
6 %. Of all other ranks, those that held up for 4 % did so with longer work in 70 % of the steps at
most, and those that worked longer in three quarters held up for 2 %: ranks that share a core work
longer than one that has its own, and wait for each other. A link at a third of the speed was
measured at 0.33 to 0.34, one like the others at 0.7 at least.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest

import torch

from microddp.comms import Comms, name_ranks
from microddp.report import MIB, human_seconds, table
from microddp.timing import Span, common, seconds_now, union

# What is considerable; the module's first lines say why.
LONGER = 1.15  # times the others' work
USUALLY = 0.75  # of the steps
CONSIDERABLE = 0.04  # of a step
SLOW = 0.5  # times the others' speed

# Seconds that a message takes at least, so that neither its first bytes matter, which a sender's
# token bucket lets through for free, nor some milliseconds in which a busy core lets the last wait.
LONG_ENOUGH = 12e-3
SMALLEST, LARGEST = 1 << 16, 64 * MIB  # bytes
MESSAGES = 2  # of a size that takes long enough
# Other work on the machine can only slow a message down, so the best of all rounds counts. While a
# link seems slower than this, of the others' speed, there are more rounds, of messages that take
# twice as many seconds each time: a core that is busy, too, is soon no longer what limits them.
ROUNDS, MOST_ROUNDS, ALIKE = 3, 5, 0.7

PARTS = ("works", "waits for ranks", "waits for transfers")
WATCHED = "all-reduce"  # what TorchDDPWatch calls all collectives of a backward together


@dataclass(frozen=True)
class Collective:
    """One collective of all ranks.

    Attributes:
        name: of what it carries, as recorded.
        step: in which it was, from 0.
        arrivals: by rank, when it was launched there, in seconds of the timeline. With PyTorch's
            DDP all of a backward counts as one, which a rank comes to when it begins to wait.
        ends: by rank, when it was complete there.
        began: when all were there and the one before was over.
    """

    name: str
    step: int
    arrivals: tuple[float, ...]
    ends: tuple[float, ...]
    began: float

    @property
    def last(self) -> int:
        """The rank that came last."""
        return self.arrivals.index(max(self.arrivals))

    @property
    def transfer(self) -> float:
        """Seconds that it took once all were there."""
        return max(0.0, max(self.ends) - self.began)


@dataclass(frozen=True)
class RankTimes:
    """What one rank did, in seconds.

    Attributes:
        work: in each step.
        delays: that it held the others up in each step, by longer work than theirs.
        last: the share of collectives that it was the last to come to; no seconds.
        for_ranks: that it waited for others to come, in each step.
        for_transfers: that it waited when all were there, in each step.
    """

    work: tuple[float, ...]
    delays: tuple[float, ...]
    last: float
    for_ranks: tuple[float, ...]
    for_transfers: tuple[float, ...]


@dataclass(frozen=True)
class LinkSpeed:
    """What a rank's link carries, in bytes a second, with whichever neighbour is better.

    Attributes:
        rank: whose link it is; of the ranks on one machine the first.
        sends: from the rank.
        receives: to the rank.
    """

    rank: int
    sends: float
    receives: float


@dataclass(frozen=True)
class StragglerReport:
    """Who works, who waits for whom, and who is to blame.

    Attributes:
        steps: seconds of each, from the end of one update to that of the next.
        ranks: in rank order.
        collectives: in their order.
        links: where they were probed.
        sent_bytes: by a rank in a step, where known.
    """

    steps: tuple[float, ...]
    ranks: tuple[RankTimes, ...]
    collectives: tuple[Collective, ...]
    links: tuple[LinkSpeed, ...] = ()
    sent_bytes: float | None = None

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.steps)

    @property
    def rank(self) -> int | None:
        """The slow rank, if there is one; of several the one that holds up longest."""
        slow = [rank for rank in range(len(self.ranks)) if self._is_slow(rank)]
        return max(slow, key=self.delay, default=None)

    @property
    def link(self) -> int | None:
        """The rank whose link is slow, if it is the only one."""
        slow = _slow_links(self.links)
        return slow[0] if len(slow) == 1 and self.waiting >= CONSIDERABLE else None

    def _is_slow(self, rank: int) -> bool:
        return self.longer(rank) >= USUALLY and self.delay(rank) >= CONSIDERABLE * self.step

    def slowness(self, rank: int) -> list[float]:
        """A rank's work in each step, by that of the others, their median."""
        others = _others([times.work for times in self.ranks], rank)
        return [mine / theirs for mine, theirs in zip(self.ranks[rank].work, others, strict=True)]

    def longer(self, rank: int) -> float:
        """The share of steps in which a rank worked considerably longer than the others."""
        return sum(ratio >= LONGER for ratio in self.slowness(rank)) / len(self.steps)

    def delay(self, rank: int) -> float:
        """Seconds by which a rank held the others up in the median step."""
        return statistics.median(self.ranks[rank].delays)

    @property
    def transfer(self) -> float:
        """Seconds of transfer, all ranks being there, in the median step."""
        seconds = [0.0] * len(self.steps)
        for collective in self.collectives:
            seconds[collective.step] += collective.transfer
        return statistics.median(seconds)

    @property
    def waiting(self) -> float:
        """The share of the time in which all are there and ranks wait for transfers, their mean."""
        waits = statistics.mean(sum(times.for_transfers) for times in self.ranks)
        return waits / sum(self.steps)

    @property
    def bytes_per_second(self) -> float | None:
        """What a rank sends while it is transferred; ``None`` where bytes or time are not known.

        Of PyTorch's DDP only the end of the transfers is seen.
        """
        seen = self.transfer and self.collectives[0].name != WATCHED
        return self.sent_bytes / self.transfer if self.sent_bytes and seen else None

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """The seconds of a step on each rank, medians, as ``figures.stacked_bars`` takes them."""
        return {
            f"rank {rank}": dict(zip(PARTS, map(statistics.median, parts), strict=True))
            for rank, parts in enumerate(
                (times.work, times.for_ranks, times.for_transfers) for times in self.ranks
            )
        }

    @property
    def verdict(self) -> str:
        """Who is to blame, in words."""
        words = f"{self._about_ranks()} {self._about_links()}"
        if self.rank is None and self.link is None:
            return f"Neither a rank nor a link is to blame. {words}"
        return words

    def _about_ranks(self) -> str:
        if self.rank is not None:
            ratio = statistics.median(self.slowness(self.rank))
            return (
                f"Rank {self.rank} is slow: it works {ratio:.2f} times as long as the others, and "
                f"holds them up for {self.delay(self.rank) / self.step:.0%} of a step (medians)."
            )
        held = [sum(times.delays) / sum(self.steps) for times in self.ranks]
        most = held.index(max(held))
        if held[most] < CONSIDERABLE:
            return f"No rank alone holds the others up for more than {held[most]:.0%} of the time."
        return (
            f"Rank {most} alone holds the others up for {held[most]:.0%} of the time, but not "
            f"steadily: for {self.delay(most) / self.step:.0%} of the median step, and it works "
            f"{LONGER} times as long as they do in {self.longer(most):.0%} of the steps."
        )

    def _about_links(self) -> str:
        if not self.collectives:
            return "Nothing was exchanged."
        waits = f"Once all are there, ranks wait for transfers for {self.waiting:.0%} of the time"
        if self.bytes_per_second:
            waits += f", at {_speed(self.bytes_per_second)} a rank"
        if len(self.links) < 3:
            return f"{waits}; to tell a slow link takes three of them, here are {len(self.links)}."
        slow = _slow_links(self.links)
        if not slow:
            return f"{waits}; no link is much slower than the others."
        if len(slow) > 1:
            return f"{waits}; the links of {name_ranks(slow)} are slow, not one alone."
        link, sends, receives = _beside_others(self.links, slow[0])
        return (
            f"The link of rank {link.rank} is slow: it sends {_speed(link.sends)} and receives "
            f"{_speed(link.receives)}, the others {_speed(sends)} and {_speed(receives)}. {waits}."
        )

    def __str__(self) -> str:
        return f"{self._table('simple')}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return f"{self._table('html')}<p>{self.verdict}</p>"

    def _table(self, form: str) -> str:
        everyone = range(len(self.ranks))
        parts = self.bars.values()
        rows: list[tuple[object, ...]] = [
            *((f"{name}, ms", *(part[name] * 1e3 for part in parts)) for name in PARTS),
            (
                "works, by the others",
                *(f"{statistics.median(self.slowness(rank)):.2f}" for rank in everyone),
            ),
            (f"{LONGER} or more, % of steps", *(self.longer(rank) * 1e2 for rank in everyone)),
            ("holds others up, ms", *(self.delay(rank) * 1e3 for rank in everyone)),
            ("comes last, %", *(times.last * 1e2 for times in self.ranks)),
        ]
        if self.links:
            links = {link.rank: link for link in self.links}
            for name in ("sends", "receives"):
                speeds = (getattr(links.get(rank), name, None) for rank in everyone)
                rows.append((f"link {name}, MB/s", *(speed and speed / 1e6 for speed in speeds)))
        headers = [f"step of {human_seconds(self.step)}", *(f"rank {rank}" for rank in everyone)]
        return table(rows, headers, floats=".1f", form=form)


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def _slow_links(links: Sequence[LinkSpeed], share: float = SLOW) -> list[int]:
    """The ranks whose links have less than a share of the others' speed, either way.

    Two links cannot be told apart: what one sends slowly, the other receives slowly.
    """
    slow = []
    for rank in [link.rank for link in links if len(links) > 2]:
        link, sends, receives = _beside_others(links, rank)
        if link.sends < share * sends or link.receives < share * receives:
            slow.append(rank)
    return slow


def _beside_others(links: Sequence[LinkSpeed], rank: int) -> tuple[LinkSpeed, float, float]:
    """The link of a rank, and what the others send and receive, their medians."""
    (link,) = (link for link in links if link.rank == rank)
    others = [link for link in links if link.rank != rank]
    sends = statistics.median(link.sends for link in others)
    return link, sends, statistics.median(link.receives for link in others)


def straggler_report(
    spans: Sequence[Span], comms: Comms, sent_bytes: float | None = None
) -> StragglerReport:
    """Find out who is to blame for slow steps, and probe the links for it. A collective.

    Args:
        spans: of all ranks, as :meth:`Timeline.gather() <microddp.timing.timeline.Timeline.gather>`
            returns them, the same on every rank; see :func:`find_stragglers`.
        comms: the ranks.
        sent_bytes: by a rank in a step, where known, as ``Strategy.sent_bytes()`` says it.

    Returns:
        The same report on every rank.

    Raises:
        ValueError: on every rank, as :func:`find_stragglers`.
        RuntimeError: another rank failed, or the time-out passed.
    """
    return find_stragglers(spans, comms.world_size, probe_links(comms), sent_bytes)


def find_stragglers(
    spans: Sequence[Span],
    world_size: int,
    links: Sequence[LinkSpeed] = (),
    sent_bytes: float | None = None,
) -> StragglerReport:
    """Find out who is to blame for slow steps.

    Args:
        spans: of all ranks, over steps that follow each other, each of which ends with a span
            ``"optimizer"``: what :func:`~microddp.step.take_step` records of any strategy. The
            first step counts as the preparation for the others, since nobody knows what came
            before it.
        world_size: the number of ranks.
        links: from :func:`probe_links`; without them no link is named.
        sent_bytes: by a rank in a step, where known.

    Raises:
        ValueError: ranks have different numbers of steps, or less than two, or other collectives
            than rank 0.
    """
    ranks = [_Recorded([s for s in spans if s.rank == rank]) for rank in range(world_size)]
    _check_alike(ranks)
    collectives = _match(ranks)
    by_step: list[list[Collective]] = [[] for _ in pairwise(ranks[0].updates)]
    for collective in collectives:
        by_step[collective.step].append(collective)
    work = [
        [end - start - rank.waited(start, end) for start, end in pairwise(rank.updates)]
        for rank in ranks
    ]
    lengths = [[end - start for start, end in pairwise(rank.updates)] for rank in ranks]
    return StragglerReport(
        steps=tuple(map(statistics.mean, zip(*lengths, strict=True))),
        ranks=tuple(_times(rank, ranks, by_step, work) for rank in range(world_size)),
        collectives=tuple(collectives),
        links=tuple(links),
        sent_bytes=sent_bytes,
    )


class _Recorded:
    """What one rank recorded.

    Attributes:
        updates: the end of each, seconds.
        calls: its collectives, in order: start, end and name.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        waits = [span for span in spans if span.lane == "wait"]
        under_way = [span for span in spans if span.lane == "communication"]
        # The watch does not see when the last of a backward's collectives is launched.
        launches = {(WATCHED, span.end): span.start for span in waits}
        self.updates = sorted(span.end for span in spans if span.name == "optimizer")
        self.calls = sorted(
            (launches.get((span.name, span.end), span.start), span.end, span.name)
            for span in under_way
        )
        # In naive averaging a rank works while it "waits", between one collective and the next.
        waited = common(union(waits), union(under_way))
        self._starts = [start for start, _ in waited]
        self._ends = [end for _, end in waited]
        self._sums = [0.0, *accumulate(end - start for start, end in waited)]

    def waited(self, start: float, end: float) -> float:
        """Seconds from ``start`` to ``end`` in which it waited in a collective."""
        return self._waited_until(end) - self._waited_until(start) if end > start else 0.0

    def _waited_until(self, moment: float) -> float:
        i = bisect_right(self._starts, moment) - 1
        if i < 0:
            return 0.0
        return self._sums[i] + min(moment, self._ends[i]) - self._starts[i]


def _check_alike(ranks: Sequence[_Recorded]) -> None:
    first = ranks[0]
    names = [name for *_, name in first.calls]
    for rank, recorded in enumerate(ranks):
        count = len(recorded.updates)
        if count < 2 or count != len(first.updates):
            raise ValueError(
                "expected spans of two steps or more, as many on every rank, got "
                f"{len(first.updates)} on rank 0 and {count} on rank {rank}"
            )
        others = [name for *_, name in recorded.calls]
        for mine, theirs in zip_longest(names, others, fillvalue="nothing"):
            if mine != theirs:
                raise ValueError(
                    f"expected the same collectives on every rank, got {mine} on rank 0 and "
                    f"{theirs} on rank {rank}"
                )


def _match(ranks: Sequence[_Recorded]) -> list[Collective]:
    """The collectives of all steps but the first, the k-th of every rank together."""
    collectives, over = [], -math.inf
    for calls in zip(*(rank.calls for rank in ranks), strict=True):
        arrivals, ends, (name, *_) = zip(*calls, strict=True)
        step = bisect_right(ranks[0].updates, arrivals[0]) - 1
        if 0 <= step < len(ranks[0].updates) - 1:
            collectives.append(Collective(name, step, arrivals, ends, max(*arrivals, over)))
        over = max(over, *ends)
    return collectives


def _times(
    rank: int,
    ranks: Sequence[_Recorded],
    by_step: Sequence[Sequence[Collective]],
    work: Sequence[Sequence[float]],
) -> RankTimes:
    me, collectives = ranks[rank], list(chain(*by_step))
    let_go, for_ranks, for_transfers = me.updates[0], [0.0] * len(by_step), [0.0] * len(by_step)
    for collective in collectives:
        end, ready = collective.ends[rank], max(collective.arrivals)
        for_ranks[collective.step] += me.waited(let_go, min(ready, end))
        for_transfers[collective.step] += me.waited(max(let_go, ready), end)
        let_go = max(let_go, end)
    replays = (_delay(rank, ranks, step) for step in by_step)
    delays = [
        min(delay, max(0.0, mine - others))
        for delay, mine, others in zip(replays, work[rank], _others(work, rank), strict=True)
    ]
    last = sum(collective.last == rank for collective in collectives)
    return RankTimes(
        work=tuple(work[rank]),
        delays=tuple(delays),
        last=last / max(1, len(collectives)),
        for_ranks=tuple(for_ranks),
        for_transfers=tuple(for_transfers),
    )


def _delay(rank: int, ranks: Sequence[_Recorded], step: Sequence[Collective]) -> float:
    """Seconds by which the last collective of a step would end earlier without one rank."""
    earlier, over = 0.0, -math.inf
    for collective in step:
        arrivals = []
        for other, recorded in enumerate(ranks):
            arrival = collective.arrivals[other]
            # A rank that has waited in this step comes when it is let go: then earlier, too.
            if recorded.waited(recorded.updates[collective.step], arrival) > 0:
                arrival -= earlier
            if other != rank:
                arrivals.append(arrival)
        over = max([over, *arrivals]) + collective.transfer
        earlier = collective.began + collective.transfer - over
    return earlier


def _others(work: Sequence[Sequence[float]], rank: int) -> list[float]:
    """Of each step what the others worked, their median; a rank alone is its own measure."""
    others = [times for other, times in enumerate(work) if other != rank] or [work[rank]]
    return [statistics.median(times) for times in zip(*others, strict=True)]


def probe_links(comms: Comms) -> list[LinkSpeed]:
    """Measure what each rank's link carries, both ways. A collective.

    Each rank sends to both of its neighbours on a ring, and receives from them, one message on the
    network at a time. A link's speed is that with the better neighbour, so that one slow link
    slows no other. Of the ranks on one machine, which share its link, only the first takes
    part. That takes about half a second a link, and a second a link where one is slow.

    Returns:
        A speed for each machine, the same on every rank; none if there is but one.

    Raises:
        RuntimeError: another rank failed, or the time-out passed.
    """
    places = comms.all_gather_data(comms.local_rank)
    ring = [rank for rank, place in enumerate(places) if place == 0]
    if len(ring) < 2:
        return []
    following = [*ring[1:], ring[0]]
    pairs = dict.fromkeys([*zip(ring, following, strict=True), *zip(following, ring, strict=True)])
    best: dict[int, float] = {}
    links: list[LinkSpeed] = []
    for round_number in range(1, MOST_ROUNDS + 1):
        seconds = LONG_ENOUGH * 2 ** max(0, round_number - ROUNDS)
        for src, dst in pairs:
            comms.barrier()
            if comms.rank == src:
                best[dst] = max(best.get(dst, 0.0), _send(dst, comms, seconds))
            elif comms.rank == dst:
                _answer(src, comms)
        if round_number < ROUNDS:
            continue
        speeds = comms.all_gather_data([best.get(dst, 0.0) for dst in range(comms.world_size)])
        links = [
            LinkSpeed(rank, max(speeds[rank]), max(row[rank] for row in speeds)) for rank in ring
        ]
        if not _slow_links(links, ALIKE):
            break
    return links


def _send(dst: int, comms: Comms, seconds: float) -> float:
    """Bytes a second from this rank to another, of the best message that takes some seconds."""
    device = comms.device
    message = torch.zeros(SMALLEST, dtype=torch.uint8, device=device)
    size, answer = torch.zeros(1, dtype=torch.int64, device=device), message[:1].clone()
    times: list[float] = []
    while len(times) < MESSAGES:
        comms.send(size.fill_(message.nbytes), dst)
        start = seconds_now(device)
        comms.send(message, dst)
        comms.recv(answer, dst)
        times.append(seconds_now(device) - start)
        if times[-1] < seconds and message.nbytes < LARGEST:
            message, times = torch.cat([message, message]), []
    comms.send(size.zero_(), dst)
    return message.nbytes / min(times)


def _answer(src: int, comms: Comms) -> None:
    """Take what :func:`_send` sends."""
    size = torch.zeros(1, dtype=torch.int64, device=comms.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=comms.device)
    while True:
        comms.recv(size, src)
        if not size:
            return
        comms.recv(comms.scratch(int(size), like=answer), src)
        comms.send(answer, src)
