"""The speed of each rank's link, probed by messages beside the training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microddp.comms import Comms
from microddp.report import MIB
from microddp.timing import seconds_now

SLOW = 0.5  # times the others' speed; `stragglers` says why
# A message takes at least so many seconds. Then neither its first bytes matter, which a sender's
# token bucket lets through for free, nor the milliseconds in which a busy core lets the last wait.
LONG_ENOUGH = 12e-3
SMALLEST, LARGEST = 1 << 16, 64 * MIB  # bytes
MESSAGES = 2  # of a size that takes long enough
# Other work on the machine can only slow a message down, so the best of all rounds counts. While a
# link seems slower than this share of the others' speed, there are more rounds, of messages that
# take twice as long each time: then a busy core is soon no longer what limits them.
ROUNDS, MOST_ROUNDS, ALIKE = 3, 5, 0.7


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a rank's link in bytes a second, with the better of two neighbours.

    Attributes:
        rank: rank whose link it is; of the ranks on one machine the first.
        sends: speed from the rank.
        receives: speed to the rank.
    """

    rank: int
    sends: float
    receives: float


def slow_links(links: Sequence[LinkSpeed], share: float = SLOW) -> list[int]:
    """Name the ranks whose links have less than a share of the others' speed, either way.

    Two links cannot be told apart: what one sends slowly, the other receives slowly.
    """
    slow = []
    for rank in [link.rank for link in links if len(links) > 2]:
        link, others = beside_others(links, rank)
        if link.sends < share * others.sends or link.receives < share * others.receives:
            slow.append(rank)
    return slow


def beside_others(links: Sequence[LinkSpeed], rank: int) -> tuple[LinkSpeed, LinkSpeed]:
    """Return a rank's link, and the median speeds of the other links."""
    (link,) = (link for link in links if link.rank == rank)
    others = [link for link in links if link.rank != rank]
    sends = statistics.median(link.sends for link in others)
    return link, LinkSpeed(-1, sends, statistics.median(link.receives for link in others))


def probe_links(comms: Comms) -> list[LinkSpeed]:
    """Measure each rank's link, both ways. A collective.

    Each rank sends to both of its neighbours on a ring, and receives from them, one message on the
    network at a time. The better neighbour counts, so that one slow link slows no other. Ranks of
    one machine share its link, and only the first of them takes part. It takes about half a second
    for each link, and a second where one is slow.

    Returns:
        A speed for each machine, the same on every rank; none if there is but one machine.

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
        if not slow_links(links, ALIKE):
            break
    return links


def _send(dst: int, comms: Comms, seconds: float) -> float:
    """Send longer messages until one takes ``seconds``; return the best bytes a second."""
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
    """Take the messages of :func:`_send`, and answer each."""
    size = torch.zeros(1, dtype=torch.int64, device=comms.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=comms.device)
    while True:
        comms.recv(size, src)
        if not size:
            return
        comms.recv(comms.scratch(int(size), like=answer), src)
        comms.send(answer, src)
