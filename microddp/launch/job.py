"""A job's ranks on this machine: forked from a server that has PyTorch, heard, and ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from microddp.launch.rank import Order, be_a_rank, take_words

MOST_AT_ONCE = 1 << 20  # bytes that are read of a rank's words
SERVER = multiprocessing.get_context("forkserver")


def start_server(*modules: str) -> None:
    """Start the process that ranks are forked from, unless it runs; it imports these modules."""
    # What init() imports, and, for a second, a process's first optimizer.
    SERVER.set_forkserver_preload([__name__, "microddp.hang", "torch._dynamo", *modules])
    forkserver.ensure_running()


@dataclass(frozen=True)
class Gone:
    """The last news of a rank: its process has ended.

    Attributes:
        status: its exit status; negative: the signal that ended it.
    """

    status: int

    def __str__(self) -> str:
        """Say it in words, as ``"ended by SIGKILL"``."""
        if self.status < 0:
            numbers = {number.value: number.name for number in signal.Signals}  # not all have names
            return f"ended by {numbers.get(-self.status, f'signal {-self.status}')}"
        return f"ended with status {self.status}"


class Job:
    """Ranks that run: what :func:`started` gives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        self._open: dict[Any, int] = {}  # by what becomes ready when a rank tells something or ends
        self._come: dict[int, bytearray] = defaultdict(bytearray)  # what of words is not whole yet

    def start(self, order: Order) -> None:
        """Start the next rank."""
        ours, theirs = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=be_a_rank, args=(theirs, order), daemon=True)
        process.start()
        theirs.close()
        # Both of them, since what a rank has started may keep its line open.
        self._open |= {ours: len(self._ranks), process.sentinel: len(self._ranks)}
        self._ranks.append((process, ours))

    def hear(self, until: float) -> list[tuple[int, Any]]:
        """Wait for a word of any rank, until a moment of the monotonic clock.

        Returns:
            Ranks, each with what it has told or, at last, :class:`Gone`. Nothing if the time is
            over, or all are gone.
        """
        heard: list[tuple[int, Any]] = []
        while not heard and self._open:
            ready = wait(list(self._open), max(0.0, until - time.monotonic()))
            for end in ready:
                rank = self._open[end]
                process, line = self._ranks[rank]
                if end is line:
                    if not (came := os.read(line.fileno(), MOST_AT_ONCE)):
                        del self._open[line]
                    self._come[rank] += came
                    heard += [(rank, pickle.loads(word)) for word in take_words(self._come[rank])]
                elif line not in self._open or not line.poll():  # and no word is left
                    self._open = {end: other for end, other in self._open.items() if other != rank}
                    heard.append((rank, Gone(process.exitcode or 0)))
            if not ready:
                break
        return heard

    def ask(self, ranks: Sequence[int]) -> None:
        """Have ranks print where they are."""
        for rank in ranks:
            pid = self._ranks[rank][0].pid
            assert pid is not None  # it was started
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGUSR2)
        time.sleep(2 if ranks else 0)  # on a busy machine it takes a while

    def printed(self, rank: int, most: int) -> str:
        """The last of what a rank has printed, at most so many bytes."""
        file = self._folder / f"rank{rank}.printed"
        return file.read_bytes()[-most:].decode(errors="replace").strip() if file.exists() else ""

    def end(self) -> None:
        """End all ranks, and what they have started."""
        for process, line in self._ranks:
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
            line.close()


@contextmanager
def started(
    function: Callable[..., object],
    ranks: int,
    arguments: Sequence[object],
    folder: Path,
    environment: Mapping[str, str],
    within: Sequence[Callable[[Callable[[], int]], object]] = (),
    values: bool = False,
) -> Iterator[Job]:
    """Start a function on every rank of a job, of which nothing is left when the block ends.

    Args:
        function: of a module, so that the ranks can import it.
        ranks: how many.
        arguments: of the function.
        folder: for what ranks print.
        environment: variables, beside this process's own and those that torchrun would set.
        within: of each rank, what calls it elsewhere, as on a host in a box; empty: all are here.
        values: whether a traceback shows the values of variables.
    """
    start_server()
    with socket.create_server(("127.0.0.1", 0)) as listening:  # a store that nobody else reaches
        (host, port), file = listening.getsockname(), listening.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
    everywhere = {
        **os.environ,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    work = pickle.dumps((function, arguments))
    job = Job(folder)
    try:
        for rank in range(ranks):
            variables = {**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            there = within[rank] if within else None
            job.start(Order(work, variables, folder / f"rank{rank}.printed", there, values))
        yield job
    finally:
        job.end()
