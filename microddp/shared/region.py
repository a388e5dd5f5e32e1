"""Memory that the ranks of one machine share, and a barrier in it.

At a barrier every rank says that it has come, and waits until all others have. What a rank wrote
before a barrier the others may read after it, until they come to the next one: so a rank that uses
two buffers in turn needs one barrier for each, not two.
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
from typing import TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from microddp.comms import Comms
from microddp.shared import semaphores
from microddp.shared.memory import Memory

# The first part of a rank's memory: headers that name its call, used in turn; the error that made
# it give up; a semaphore for each other rank; buffers, two in turn for inputs of a reduction and
# two for its results.
HEADERS, HEADER_BYTES = 2, 256
LAST_WORDS = slice(1024, 2048)
SEMAPHORES_AT = 4096
BUFFERS_AT = 1 << 20
BUFFERS, BUFFER_BYTES = 4, 1 << 20
FIRST_BYTES = BUFFERS_AT + BUFFERS * BUFFER_BYTES

# A look at a semaphore takes some 0.4 us, so a rank that finds nobody sleeps after about 40 us.
# Only where each rank has a core: else the ranks that it waits for need this one's.
TRIES = 100
SLICE = 0.2  # seconds of waiting after which a rank checks that the others are still alive
NOT_SHARED = -1
MOST_PARTS = 256  # parts of others' memory kept mapped; each takes a descriptor
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_OFFSET = struct.Struct("q")


def cached_per_comms(
    make: Callable[[Comms, *Arguments], T],
) -> Callable[[Comms, *Arguments], T]:
    """Decorate a function so that it is called once for each ``Comms``, and its result kept.

    If it takes further arguments, it is called once for each value of these. The results live as
    long as the ``Comms``.
    """
    made: weakref.WeakKeyDictionary[Comms, dict[object, T]] = weakref.WeakKeyDictionary()

    @wraps(make)
    def find(comms: Comms, *arguments: *Arguments) -> T:
        results = made.setdefault(comms, {})
        if arguments not in results:
            results[arguments] = make(comms, *arguments)
        return results[arguments]

    return find


class DifferentCalls(RuntimeError):
    """Raised on every rank if they came to a barrier in different calls."""


class SharedRegion:
    """Memory of each rank of a group, mapped by all of them, with a barrier.

    Making one is a collective. Only one thread of a rank may use it at a time, and all ranks must
    make the same calls in the same order.

    Attributes:
        memories: each rank's memory, by rank.
        barriers: number of barriers so far.

    Raises:
        RuntimeError: on every rank: the ranks are on several machines, or cannot share memory.
    """

    def __init__(self, comms: Comms) -> None:
        memories, machines, problem = _map_memories(comms)
        apart = f"memory shared by {' and '.join(map(str, machines))}{problem}"
        comms.fail_together(
            apart if len(machines) > 1 else "", "ranks of one machine that may share memory"
        )
        # A rank alone needs no memory that others could open.
        self.memories = [memory or Memory.alone(FIRST_BYTES) for memory in memories]
        self.rank, self.size = comms.rank, comms.world_size
        self.timeout = comms.timeout
        self.barriers = 0
        self.mine = self.memories[self.rank]
        self._broken = ""
        self._views: dict[torch.dtype, tuple[list[list[torch.Tensor]], ...]] = {}
        # Of any rank's memory, by rank, offset and bytes.
        self._parts: dict[tuple[int, int, int], torch.Tensor] = {}
        self._tries = TRIES if comms.cores >= comms.ranks_on_cores else 0
        others = [(self.rank + k) % self.size for k in range(1, self.size)]
        # A rank has a semaphore for every other one, which posts to it: so it sees who is missing.
        self._theirs = [self._semaphore(peer, self.rank) for peer in others]
        self._from = [(peer, self._semaphore(self.rank, peer)) for peer in others]
        for _, address in self._from:
            semaphores.make(address)
        comms.barrier()

    def _semaphore(self, owner: int, poster: int) -> int:
        offset = SEMAPHORES_AT + poster * semaphores.SEMAPHORE_BYTES
        return self.memories[owner].address + offset

    # ---- calls and barriers

    @contextmanager
    def call(self, call: str, offset: int = NOT_SHARED) -> Iterator[None]:
        """Announce a call, run the block, and tell the other ranks if it raises.

        :meth:`check` compares the announcements after the first barrier. If the block raises, the
        others get an error with its message when they wait for this rank.

        Args:
            call: the call with its arguments, in words.
            offset: offset in bytes of its tensor in this rank's memory, if it is there.
        """
        if self._broken:
            raise RuntimeError(
                f"rank {self.rank}: expected no error in an earlier call, got: {self._broken}"
            )
        start = (self.barriers % HEADERS) * HEADER_BYTES
        text = call.encode()[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8)
        self.mine.first[start : start + HEADER_BYTES] = text + _OFFSET.pack(offset)
        try:
            yield
        except DifferentCalls:
            raise  # on every rank, after as many barriers
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            raise

    def check(self) -> list[int]:
        """Compare what the ranks announced before the last barrier.

        Returns:
            The offset of each rank's tensor in its memory, by rank.

        Raises:
            DifferentCalls: on every rank: they announced different calls.
        """
        start = ((self.barriers - 1) % HEADERS) * HEADER_BYTES
        said = [memory.first[start : start + HEADER_BYTES] for memory in self.memories]
        calls = [text[:-8] for text in said]
        if calls.count(calls[0]) < self.size:
            got = "; ".join(f"rank {k}: {c.decode().strip()}" for k, c in enumerate(calls))
            raise DifferentCalls(
                f"rank {self.rank}: expected the same call on every rank, got {got}"
            )
        return [_OFFSET.unpack(text[-8:])[0] for text in said]

    def barrier(self) -> None:
        """Wait until all ranks have called this as often.

        Raises:
            RuntimeError: a rank has ended or given up, or the time-out has passed.
        """
        # A thread beside the one that computes leaves the core to it, and sleeps at once.
        mine = threading.current_thread() is threading.main_thread()
        tries = self._tries if mine else 0
        for address in self._theirs:
            semaphores.post(address)
        for k, (_, address) in enumerate(self._from):
            if not semaphores.wait(address, tries, SLICE):
                self._wait_for_first(self._from[k:])
        self.barriers += 1

    def _wait_for_first(self, missing: Sequence[tuple[int, int]]) -> None:
        (peer, address), begun = missing[0], time.monotonic()
        while True:
            for other, theirs in missing:
                memory = self.memories[other]
                if not memory.owner_lives():
                    if semaphores.wait(theirs, 1, 0):  # it had come before it ended
                        if other == peer:
                            return
                        semaphores.post(theirs)  # until it is its turn
                        continue
                    words = memory.first[LAST_WORDS].rstrip(b"\0").decode(errors="replace")
                    raise dist.DistError(
                        f"rank {self.rank}: expected rank {other} at a barrier in shared memory, "
                        f"got its {f'error: {words}' if words else 'end'}"
                    )
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise dist.DistError(
                    f"rank {self.rank}: expected rank {peer} at a barrier in shared memory within "
                    f"{self.timeout:g} s, got nobody"
                )
            if semaphores.wait(address, 0, min(SLICE, self.timeout)):
                return

    def _give_up(self, why: str) -> None:
        self._broken = why
        length = LAST_WORDS.stop - LAST_WORDS.start
        self.mine.first[LAST_WORDS] = self._broken.encode()[:length].ljust(length, b"\0")
        self.mine.disown()

    # ---- buffers and tensors

    def inputs(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """View each rank's two input buffers, by rank: what is to be reduced, 1-D, of a dtype."""
        return self._buffers(dtype)[0]

    def outputs(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """View each rank's two output buffers, by rank: results to copy out, 1-D, of a dtype."""
        return self._buffers(dtype)[1]

    def _buffers(self, dtype: torch.dtype) -> tuple[list[list[torch.Tensor]], ...]:
        if dtype not in self._views:
            with torch.inference_mode(False):  # kept for calls outside of it, too
                wholes = [
                    torch.frombuffer(memory.first, dtype=dtype, offset=BUFFERS_AT).view(BUFFERS, -1)
                    for memory in self.memories
                ]
                inputs = [list(whole[:2]) for whole in wholes]
                self._views[dtype] = inputs, [list(whole[2:]) for whole in wholes]
        return self._views[dtype]

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a flat tensor in this rank's memory, which an all-reduce need not copy."""
        return self.mine.grow(numel * dtype.itemsize).view(dtype)

    def offset_of(self, flat: torch.Tensor) -> int:
        """Find a tensor of :meth:`zeros` in this rank's memory: its offset, or ``NOT_SHARED``."""
        return self.mine.offsets.get(flat.data_ptr(), NOT_SHARED)

    def at(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Map a tensor of any rank, by its offset in that rank's memory."""
        key = (rank, offset, numel * dtype.itemsize)
        if key not in self._parts:
            if len(self._parts) > MOST_PARTS:
                self._parts.clear()
            with torch.inference_mode(False):
                self._parts[key] = self.memories[rank].part(offset, key[-1])
        return self._parts[key].view(dtype)


def machines_of(comms: Comms) -> list[list[int]]:
    """List the ranks of each machine. They have proved it: each has opened all others' memory.

    Hosts in a box count as machines. A group's first call is a collective.
    """
    return _map_memories(comms)[1]


def why_not_shared(comms: Comms) -> str:
    """Say what keeps ranks of one machine from sharing memory; empty if nothing does.

    A group's first call is a collective.
    """
    return _map_memories(comms)[2].removeprefix("; ")


@cached_per_comms
def _map_memories(comms: Comms) -> tuple[list[Memory | None], list[list[int]], str]:
    """Let each rank map the memory of every other one, where it can. A collective.

    Return each rank's memory, ``None`` on another machine; the ranks of each machine; and what kept
    ranks from making such memory.
    """
    handle: list[object] = []
    mine, problem = None, ""
    try:
        mine = Memory.create(FIRST_BYTES)
        handle = mine.handle
    except OSError as error:  # then this rank shares memory with nobody
        problem = f"; rank {comms.rank}: {error}"
    host = os.readlink("/proc/self/ns/net") if comms.box else ""
    said = comms.all_gather_data([handle, host, problem])
    memories: list[Memory | None] = [
        mine if rank == comms.rank
        else Memory.open(theirs, FIRST_BYTES) if handle and theirs and host == there
        else None
        for rank, (theirs, there, _) in enumerate(said)
    ]  # fmt: skip
    seen = comms.all_gather_data([rank for rank, memory in enumerate(memories) if memory])
    return memories, _machines(seen), "".join(problem for *_, problem in said)


def _machines(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group ranks into machines, by the ranks whose memory each could open.

    Ranks are on one machine if each could open the memory of all others of them, and of nobody
    else, in both directions. Any other rank is a machine of its own.
    """
    ranks = range(len(seen))
    near = [tuple(b for b in ranks if a == b or (b in seen[a] and a in seen[b])) for a in ranks]
    alike = [near[a] if all(near[b] == near[a] for b in near[a]) else (a,) for a in ranks]
    return [list(machine) for machine in dict.fromkeys(alike)]


@cached_per_comms
def region_of(comms: Comms) -> SharedRegion:
    """Return the region of a group. The first call, a collective, makes it.

    Raises:
        RuntimeError: as for :class:`SharedRegion`.
    """
    return SharedRegion(comms)
