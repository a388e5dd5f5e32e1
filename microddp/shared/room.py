"""The ranks of a group that share memory, and their meetings.

At a meeting every rank says that it has come, and waits until all others have. What a rank wrote
before a meeting, the others may read after it, and until they have come to the next one: so a rank
that uses two buffers in turn needs one meeting for each, not two.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TypeVar

import torch

from microddp.comms import Comms
from microddp.shared import semaphores
from microddp.shared.memory import Memory

# The first part of a rank's memory: what it is about to do, in turns; why it came to no more
# meetings; a semaphore for each other rank; buffers, two in turn for what is reduced and two for
# results.
HEADERS, HEADER_BYTES = 2, 256
LAST_WORDS = slice(1024, 2048)
SEMAPHORES_AT = 4096
BUFFERS_AT = 1 << 20
BUFFERS, BUFFER_BYTES = 4, 1 << 20
FIRST_BYTES = BUFFERS_AT + BUFFERS * BUFFER_BYTES

# A look at a semaphore takes some 0.4 us, so a rank that meets nobody sleeps after about 40 us.
# Only where each rank has a core: else it is those that it waits for who need this one.
TRIES = 100
SLICE = 0.2  # seconds after which a rank that waits asks whether the others are still there
NOWHERE = -1
MOST_PARTS = 256  # that are kept mapped; each takes a descriptor
T = TypeVar("T")
_PLACE = struct.Struct("q")


def by_comms(make: Callable[[Comms], T]) -> Callable[[Comms], T]:
    """Make a thing once for each group of ranks, kept as long as its ``Comms``."""
    made: weakref.WeakKeyDictionary[Comms, T] = weakref.WeakKeyDictionary()

    @wraps(make)
    def find(comms: Comms) -> T:
        found = made.get(comms)
        if found is None:
            found = made[comms] = make(comms)
        return found

    return find


class DifferentCalls(RuntimeError):
    """The ranks have come to a meeting with different calls."""


class Room:
    """The ranks of a group, all on one machine, and memory of each that all have mapped.

    Making one is a collective. Calls of one group are made by one thread at a time, in the same
    order on every rank.

    Attributes:
        memories: by rank.
        step: how often the ranks have met.

    Raises:
        RuntimeError: on every rank alike: the ranks are not of one machine, or cannot share memory.
    """

    def __init__(self, comms: Comms) -> None:
        memories, machines, problem = _acquaint(comms)
        apart = f"memory shared by {' and '.join(map(str, machines))}{problem}"
        comms.fail_together(
            apart if len(machines) > 1 else "", "ranks of one machine that may share memory"
        )
        # A rank alone meets nobody, and needs no memory that others could open.
        self.memories = [memory or Memory.alone(FIRST_BYTES) for memory in memories]
        self.rank, self.size = comms.rank, comms.world_size
        self.timeout = comms.timeout
        self.step = 0
        self.mine = self.memories[self.rank]
        self._broken = ""
        self._views: dict[torch.dtype, tuple[list[list[torch.Tensor]], ...]] = {}
        self._parts: dict[tuple[int, int], torch.Tensor] = {}  # of others' memory, by their place
        self._tries = TRIES if comms.cores >= comms.ranks_on_cores else 0
        others = [(self.rank + k) % self.size for k in range(1, self.size)]
        # Rank r has a semaphore for each other rank, who posts to it: so it sees who is missing.
        self._theirs = [self._semaphore(peer, self.rank) for peer in others]
        self._from = [(peer, self._semaphore(self.rank, peer)) for peer in others]
        for _, address in self._from:
            semaphores.make(address)
        comms.barrier()

    def _semaphore(self, owner: int, poster: int) -> int:
        offset = SEMAPHORES_AT + poster * semaphores.SEMAPHORE_BYTES
        return self.memories[owner].address + offset

    # ---- meetings

    @contextmanager
    def call(self, call: str, place: int = NOWHERE) -> Iterator[None]:
        """Say what this rank is about to do; :meth:`check` compares it after the first meeting.

        Where the block raises, this rank gives up: the others hear why when they wait for it.

        Args:
            call: in words.
            place: of its tensor in this rank's memory, if it is there.
        """
        if self._broken:
            raise RuntimeError(
                f"rank {self.rank}: expected ranks that meet, got an error before: {self._broken}"
            )
        start = (self.step % HEADERS) * HEADER_BYTES
        text = call.encode()[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8)
        self.mine.first[start : start + HEADER_BYTES] = text + _PLACE.pack(place)
        try:
            yield
        except DifferentCalls:
            raise  # on every rank, and they have met as often
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            raise

    def check(self) -> list[int]:
        """Where each rank's tensor is, if all have said the same before the last meeting.

        Raises:
            DifferentCalls: on every rank, if they have not.
        """
        start = ((self.step - 1) % HEADERS) * HEADER_BYTES
        said = [memory.first[start : start + HEADER_BYTES] for memory in self.memories]
        calls = [text[:-8] for text in said]
        if calls.count(calls[0]) < self.size:
            got = "; ".join(f"rank {k}: {c.decode().strip()}" for k, c in enumerate(calls))
            raise DifferentCalls(
                f"rank {self.rank}: expected the same call on every rank, got {got}"
            )
        return [_PLACE.unpack(text[-8:])[0] for text in said]

    def meet(self) -> None:
        """Wait until all ranks have come here.

        Raises:
            RuntimeError: a rank has ended or given up, or the time-out passed.
        """
        # A thread beside the one that computes leaves the core to it.
        mine = threading.current_thread() is threading.main_thread()
        tries = self._tries if mine else 0
        for address in self._theirs:
            semaphores.post(address)
        for peer, address in self._from:
            if not semaphores.wait(address, tries, SLICE):
                self._wait_for(peer, address)
        self.step += 1

    def _wait_for(self, peer: int, address: int) -> None:
        begun = time.monotonic()
        while True:
            for other, memory in enumerate(self.memories):
                if other != self.rank and not memory.owner_lives():
                    if semaphores.wait(address, 1, 0):
                        return  # it had come here before
                    words = memory.first[LAST_WORDS].rstrip(b"\0").decode(errors="replace")
                    raise RuntimeError(
                        f"rank {self.rank}: expected rank {other} at a meeting in shared memory, "
                        f"got its {f'error: {words}' if words else 'end'}"
                    )
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise RuntimeError(
                    f"rank {self.rank}: expected rank {peer} at a meeting in shared memory within "
                    f"{self.timeout:g} s, got nobody"
                )
            if semaphores.wait(address, 0, min(SLICE, self.timeout)):
                return

    def _give_up(self, why: str) -> None:
        self._broken = why
        length = LAST_WORDS.stop - LAST_WORDS.start
        self.mine.first[LAST_WORDS] = self._broken.encode()[:length].ljust(length, b"\0")
        self.mine.disown()

    # ---- what ranks read and write

    def given(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """By rank, two buffers for what is to be added up, as values of a dtype."""
        return self._buffers(dtype)[0]

    def shown(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """By rank, two buffers for what is to be read, as values of a dtype."""
        return self._buffers(dtype)[1]

    def _buffers(self, dtype: torch.dtype) -> tuple[list[list[torch.Tensor]], ...]:
        if dtype not in self._views:
            wholes = [
                torch.frombuffer(memory.first, dtype=dtype, offset=BUFFERS_AT).view(BUFFERS, -1)
                for memory in self.memories
            ]
            given = [list(whole[:2]) for whole in wholes]
            self._views[dtype] = given, [list(whole[2:]) for whole in wholes]
        return self._views[dtype]

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in this rank's memory, which an all-reduce need not copy."""
        return self.mine.grow(numel * dtype.itemsize).view(dtype)

    def place(self, flat: torch.Tensor) -> int:
        """Where a tensor that :meth:`zeros` made lies in this rank's memory, or ``NOWHERE``."""
        return self.mine.places.get(flat.data_ptr(), NOWHERE)

    def at(self, rank: int, place: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A rank's tensor, by its place."""
        key = (rank, place)
        if key not in self._parts:
            if len(self._parts) > MOST_PARTS:
                self._parts.clear()
            self._parts[key] = self.memories[rank].part(place, numel * dtype.itemsize)
        return self._parts[key].view(dtype)


def machines_of(comms: Comms) -> list[list[int]]:
    """The ranks of each machine, which have proved it: each has opened the memory of all others.

    Hosts in a box count as machines. The first call of a group is a collective.
    """
    return _acquaint(comms)[1]


def why_apart(comms: Comms) -> str:
    """What keeps ranks from having memory that others of their machine can map; empty: nothing.

    The first call of a group is a collective.
    """
    return _acquaint(comms)[2].removeprefix("; ")


@by_comms
def _acquaint(comms: Comms) -> tuple[list[Memory | None], list[list[int]], str]:
    """Let each rank map the memory of each other, where it can. A collective.

    Returns:
        By rank its memory, ``None`` of one on another machine; the machines; and what kept ranks
        from having such memory.
    """
    told: list[object] = []
    mine, problem = None, ""
    try:
        mine = Memory.create(FIRST_BYTES)
        told = mine.told
    except OSError as error:  # then this rank shares with nobody
        problem = f"; rank {comms.rank}: {error}"
    place = os.readlink("/proc/self/ns/net") if comms.box else ""
    said = comms.all_gather_data([told, place, problem])
    memories: list[Memory | None] = [
        mine if rank == comms.rank
        else Memory.open(theirs, FIRST_BYTES) if told and theirs and place == there
        else None
        for rank, (theirs, there, _) in enumerate(said)
    ]  # fmt: skip
    seen = comms.all_gather_data([rank for rank, memory in enumerate(memories) if memory])
    return memories, _machines(seen), "".join(problem for *_, problem in said)


def _machines(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each machine, from those whose memory each rank has seen.

    A rank that does not see exactly those who see it, and whom they see, is a machine of its own.
    """
    ranks = range(len(seen))
    near = [tuple(b for b in ranks if a == b or (b in seen[a] and a in seen[b])) for a in ranks]
    alike = [near[a] if all(near[b] == near[a] for b in near[a]) else (a,) for a in ranks]
    return [list(machine) for machine in dict.fromkeys(alike)]


@by_comms
def room_of(comms: Comms) -> Room:
    """The room of a group, made at the first call, which is a collective. Errors are ``Room``'s."""
    return Room(comms)
