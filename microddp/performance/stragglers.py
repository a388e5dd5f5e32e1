"""Slow rank or slow link? Both look like long communication; the report says which, if either.

A collective ends late because a rank came to it late, or because its bytes travelled slowly. A rank
that comes late may itself have been let go late, by the transfer before. So some steps, as a
:class:`~microddp.timing.timeline.Timeline` recorded them on all ranks, are taken apart:

- *Work* is the time in which a rank does not wait in a collective. Time in which something blocks
  it unrecorded, say a barrier of your own, counts as work.
- A *transfer* lasts from when all ranks have arrived, and the collective before is over, to the
  end.
- A rank *holds the others up* by the time that a step's last collective would have ended earlier
  without it: in a replay in which each begins once the other ranks have arrived and takes as long
  as it took. That is at most the time by which the rank worked longer than the median of the others
  in that step. So a rank that was let go late is not blamed.

**A rank is named** if in three quarters of the steps it works 1.15 times as long as the others or
more, and in the median step holds them up for 4 % of it. **A link is named** if the ranks wait for
transfers for 4 % of the time though all have arrived, and messages from rank to rank, beside the
training, show one link, and only one, at less than half the speed of the others, their median.
Messages are what tells links apart: in an all-reduce all wait for the slowest. Both may be named,
or neither.

Why these numbers: 500 runs of 20 steps, on 2 to 4 hosts in a box and over loopback, on 2 cores that
other programs used as well. A planted slow rank worked that much longer in 80 % of the steps at
least (in 3 of 240 runs in fewer: nobody was named) and held the others up for 6 %; no other rank
came near on both counts. A link at a third of the speed was measured at 0.33 to 0.34, one like the
others at 0.7 at least. With nothing planted, a hundred reports of 8 steps named nobody
(`tests/performance/false_alarms.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from microddp.comms import Comms, name_ranks
from microddp.performance.link_speed import LinkSpeed, beside_others, probe_links, slow_links
from microddp.performance.rank_times import (
    WATCHED,
    CollectiveTimes,
    RankTimes,
    times_of_ranks,
    work_of_others,
)
from microddp.report import human_seconds, table
from microddp.timing import Span

# The module's first lines say why; SLOW, for links, is in link_speed.py.
LONGER = 1.15  # times the others' work
USUALLY = 0.75  # of the steps
CONSIDERABLE = 0.04  # of a step

PARTS = ("works", "waits for ranks", "waits for transfers")


@dataclass(frozen=True)
class StragglerReport:
    """Work and waiting of all ranks, and the rank or link that is to blame. Prints as a table.

    Attributes:
        steps: seconds of each step, from the end of one update to the end of the next.
        ranks: times of each rank, in rank order.
        collectives: times of each collective, in order.
        links: speed of each link; empty if the links were not probed.
        sent_bytes: bytes that a rank sends in a step, where known.
    """

    steps: tuple[float, ...]
    ranks: tuple[RankTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    links: tuple[LinkSpeed, ...] = ()
    sent_bytes: float | None = None

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.steps)

    @property
    def rank(self) -> int | None:
        """The slow rank, if there is one; of several, the one that holds the others up longest."""
        everyone, least = range(len(self.ranks)), CONSIDERABLE * self.step
        slow = [r for r in everyone if self.longer(r) >= USUALLY and self.delay(r) >= least]
        return max(slow, key=self.delay, default=None)

    @property
    def link(self) -> int | None:
        """The rank whose link is slow, if it is the only one."""
        slow = slow_links(self.links)
        return slow[0] if len(slow) == 1 and self.waiting >= CONSIDERABLE else None

    def slowness(self, rank: int) -> list[float]:
        """Divide a rank's work in each step by the median work of the others."""
        others = work_of_others([times.work for times in self.ranks], rank)
        return [mine / theirs for mine, theirs in zip(self.ranks[rank].work, others, strict=True)]

    def longer(self, rank: int) -> float:
        """The share of steps in which a rank worked considerably longer than the others."""
        return sum(ratio >= LONGER for ratio in self.slowness(rank)) / len(self.steps)

    def delay(self, rank: int) -> float:
        """Seconds by which a rank held the others up in the median step."""
        return statistics.median(self.ranks[rank].delays)

    @property
    def transfer(self) -> float:
        """Seconds of transfer, once all ranks have arrived, in the median step."""
        seconds = [0.0] * len(self.steps)
        for collective in self.collectives:
            seconds[collective.step] += collective.transfer
        return statistics.median(seconds)

    @property
    def waiting(self) -> float:
        """The share of the time that ranks wait for transfers, all having arrived; their mean."""
        waits = statistics.mean(sum(times.for_transfers) for times in self.ranks)
        return waits / sum(self.steps)

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes that a rank sends in a second of transfer; ``None`` where either is not known.

        Of PyTorch's DDP only the end of the transfers is seen.
        """
        seen = self.transfer and self.collectives[0].name != WATCHED
        return self.sent_bytes / self.transfer if self.sent_bytes and seen else None

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """The seconds of the median step on each rank, as ``figures.stacked_bars`` takes them."""
        return {
            f"rank {rank}": dict(zip(PARTS, map(statistics.median, parts), strict=True))
            for rank, parts in enumerate(
                (times.work, times.for_ranks, times.for_transfers) for times in self.ranks
            )
        }

    @property
    def verdict(self) -> str:
        """The rank or link that is to blame, in words."""
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
            f"Rank {most} alone holds the others up for {held[most]:.0%} of the time, and for "
            f"{self.delay(most) / self.step:.0%} of the median step. It works {LONGER} times as "
            f"long as they do, or longer, in {self.longer(most):.0%} of the steps."
        )

    def _about_links(self) -> str:
        if not self.collectives:
            return "Nothing was exchanged."
        waits = (
            f"For {self.waiting:.0%} of the time of all steps ranks wait though all have arrived"
        )
        if self.bytes_per_second:
            sends = _speed(self.bytes_per_second)
            waits += f"; from then until the last is done a rank sends {sends}"
        if len(self.links) < 3:
            return f"{waits}; to tell a slow link takes three of them, here are {len(self.links)}."
        slow = slow_links(self.links)
        if not slow:
            return f"{waits}; no link is much slower than the others."
        if len(slow) > 1:
            return f"{waits}; the links of {name_ranks(slow)} are slow, not one alone."
        link, others = beside_others(self.links, slow[0])
        return (
            f"The link of rank {link.rank} is slow: it sends {_speed(link.sends)} and receives "
            f"{_speed(link.receives)}, the others {_speed(others.sends)} and "
            f"{_speed(others.receives)}. {waits}."
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
                "work / others' median",
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


def straggler_report(
    spans: Sequence[Span], comms: Comms, sent_bytes: float | None = None
) -> StragglerReport:
    """Find the rank or link that slows the steps down, and probe the links for it. A collective.

    Args:
        spans: spans of all ranks, as for :func:`find_stragglers`, the same on every rank.
        comms: ranks that took the steps.
        sent_bytes: bytes that a rank sends in a step, where known: ``Strategy.sent_bytes()``.

    Returns:
        The same report on every rank.

    Raises:
        ValueError: on every rank, as for :func:`find_stragglers`.
        RuntimeError: another rank failed, or the time-out passed.
    """
    return find_stragglers(spans, comms.world_size, probe_links(comms), sent_bytes)


def find_stragglers(
    spans: Sequence[Span],
    world_size: int,
    links: Sequence[LinkSpeed] = (),
    sent_bytes: float | None = None,
) -> StragglerReport:
    """Find the rank or link that slows the steps down.

    Args:
        spans: spans of all ranks, as :meth:`Timeline.gather()
            <microddp.timing.timeline.Timeline.gather>` returns them, over consecutive steps, each
            of which ends with a span ``"optimizer"``: :func:`~microddp.step.take_step` records
            that of any strategy. The first step only prepares the others, since nobody knows what
            came before it.
        world_size: number of ranks.
        links: speeds from :func:`~microddp.performance.link_speed.probe_links`; without them no
            link is named.
        sent_bytes: bytes that a rank sends in a step, where known.

    Raises:
        ValueError: ranks have different numbers of steps, or less than two, or other collectives
            than rank 0.
    """
    steps, ranks, collectives = times_of_ranks(spans, world_size)
    return StragglerReport(tuple(steps), tuple(ranks), tuple(collectives), tuple(links), sent_bytes)
