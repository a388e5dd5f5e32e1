"""A member of a job whose ranks come and go, without a restart of the others."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from microddp.comms import Comms
from microddp.comms.environment import patience
from microddp.comms.job import form_group
from microddp.elastic import meeting
from microddp.elastic.generation import Generation, Parts
from microddp.elastic.line import Line
from microddp.elastic.messages import machine_name
from microddp.elastic.secret import find_secret

TIMEOUT = 10.0  # seconds, unless MICRODDP_TIMEOUT says: how long a hung rank goes unnoticed
PATIENCE = 300.0  # seconds to find the meeting, and enough members there
PAUSE = 0.02


class Members:
    """This process's membership in a job whose members meet at an address.

    A process that is killed, hung or unreachable is left behind by the others, and one that comes
    later is taken in when the others next :meth:`meet`. Close it at the end.

    The meeting is a small server, ``meeting.py``. A member that finds none, on the machine with the
    address, starts it. It ends with that member; then another one on that machine starts it. So a
    job lives as long as one member there, or one that is started there within ``PATIENCE`` seconds.
    The meeting takes in only members that know the job's secret: ``MICRODDP_SECRET``, or the one
    that :func:`~microddp.elastic.secret.find_secret` finds in a file of this user's. A collective
    waits for a member for ``MICRODDP_TIMEOUT`` seconds, by default 10; who comes to a meeting 2
    seconds later than the others is left behind.

    Args:
        address: address of the meeting, as ``"10.0.0.1:29400"`` or ``"[fd00::1]:29400"``, the same
            for all.
        least: least number of members with which to train.

    Raises:
        ValueError: the address, the number or the time-out is impossible, or there is no secret.

    Source: in the spirit of torchft's lighthouse, and of the rendezvous of torchrun.
    """

    def __init__(self, address: str, *, least: int = 1) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or least < 1:
            raise ValueError(
                f"expected HOST:PORT and at least 1 member, got {address!r} and {least}"
            )
        self.address, self.least = address, least
        self.host, self.port = host.strip("[]"), int(port)
        self.timeout = patience(None, TIMEOUT)
        self.machine = machine_name()
        self.name = f"{self.machine}-{os.getpid()}-{secrets.token_hex(3)}"
        self._secret = find_secret()
        self._believed = False  # the meeting has been here, and proved
        self._last: tuple[int, list[str]] = (0, [])
        self._line: Line | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._waiting = False
        self._looked = 0.0
        self._comms: Comms | None = None

    def meet(self, steps: int) -> Generation | None:
        """Leave the last group, and return the next one, when its members are known.

        Args:
            steps: number of steps that this process has behind it; -1 if it is new.

        Returns:
            The next generation; ``None`` if the job is over, and this process too late.

        Raises:
            RuntimeError: there was no meeting, or too few came, for ``PATIENCE`` seconds.
            ValueError: the server at the address does not know this job's secret, and never did.
        """
        deadline = time.monotonic() + PATIENCE
        problem = ""
        server, parts = self._server, Parts()
        while time.monotonic() < deadline:
            self._leave()
            parts.ended("let go")
            try:
                line = self._reach()
                parts.ended("find")
                # For the others, should this process become rank 0: where they make their group.
                with socket.create_server((line.address, 0), family=line.family) as listening:
                    answer = self._come(line, steps, listening.getsockname()[1], deadline)
                    parts.ended("wait")
                    if "done" in answer:
                        return None
                    number, members = answer["number"], answer["members"]
                    self._last = number, [name for name, _ in members]
                    self._comms = self._form_group(number, members, listening)
                parts.ended("form")
                steps_of_all = tuple(told["steps"] for _, told in members)
                started = self._server is not server
                return Generation(number, self._comms, steps_of_all, parts.seconds, started)
            except (OSError, RuntimeError) as error:  # the latter: one was lost meanwhile
                if isinstance(error, OSError):
                    self._hang_up()
                problem = str(error)
                time.sleep(PAUSE)
        raise RuntimeError(
            f"{self.name}: expected at least {self.least} members at {self.address} "
            f"within {PATIENCE:g} s; the last try: {problem}"
        )

    def others_wait(self) -> bool:
        """Return True if somebody waits to be taken in, or the meeting has lost this generation.

        Costs microseconds, but for some hundredths of a second to find the meeting again.
        """
        if self._line is None and time.monotonic() > self._looked + 10 * PAUSE:
            self._looked = time.monotonic()
            with suppress(OSError):
                self._prove(self._connect(limit=PAUSE), 3 * PAUSE)
        with suppress(OSError):
            self._waiting |= any("waiting" in message for message in self._messages(wait=0.0))
        return self._waiting

    @property
    def comms(self) -> Comms:
        """The group of the last generation."""
        assert self._comms is not None, "after meet()"
        return self._comms

    @property
    def names(self) -> list[str]:
        """Names of the members of this process's last generation, by rank."""
        return self._last[1]

    def done(self) -> None:
        """Say that the job is over, and return when processes that wait to join have been told."""
        deadline = time.monotonic() + self.timeout
        with suppress(OSError):
            self._reach().send({"done": True})
            while (left := deadline - time.monotonic()) > 0:
                if any("done" in message for message in self._messages(wait=left)):
                    break

    def close(self) -> None:
        """Leave the group and the meeting."""
        self._leave()
        self._hang_up()
        if self._server is not None:
            time.sleep(PAUSE)  # it may have something to pass on
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _leave(self) -> None:
        if self._comms is not None:
            self._comms.end()
            self._comms = None

    def _reach(self) -> Line:
        """Return the connection to the meeting, when both ends have proved that they belong."""
        line = self._line or self._connect(limit=self.timeout)
        self._prove(line, self.timeout)
        if not line.proven:
            raise TimeoutError(f"what answers there proves nothing in {self.timeout:g} s")
        self._believed = True
        return line

    def _prove(self, line: Line, seconds: float) -> None:
        """Wait for the proofs of both ends, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        while not line.proven and (left := deadline - time.monotonic()) > 0:
            self._messages(wait=left)

    def _come(self, line: Line, steps: int, port: int, deadline: float) -> dict[str, Any]:
        """Say that this process wants to be in the next generation, until it is told of it."""
        told = {"steps": steps, "address": line.address, "port": port, "machine": self.machine}
        line.send({"come": told})
        answer: dict[str, Any] = {}
        while not answer:
            if time.monotonic() > deadline:
                raise TimeoutError("too few have come")
            for message in self._messages(wait=1.0):
                self._waiting = "waiting" in message
                if not self._waiting:
                    answer = message
        return answer

    def _form_group(
        self, number: int, members: Sequence[tuple[str, dict[str, Any]]], listening: socket.socket
    ) -> Comms:
        rank = [name for name, _ in members].index(self.name)
        first = members[0][1]
        here = [i for i, (_, told) in enumerate(members) if told["machine"] == self.machine]
        store = TCPStore(
            first["address"],
            first["port"],
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout),
            master_listen_fd=listening.detach() if rank == 0 else None,
        )
        return form_group(
            PrefixStore(f"generation-{number}", store),
            rank,
            len(members),
            here.index(rank),
            len(here),
            backend="gloo",  # NCCL loses a rank with all that it has under way
            timeout=self.timeout,
        )

    def _connect(self, limit: float) -> Line:
        """Find the meeting, or start it where its address is this machine's and nobody has it."""
        if self._server is None or self._server.poll() is not None:
            self._start_server()
        number, members = self._last
        seen = {"number": number, "members": members}
        self._line = Line((self.host, self.port), self._secret, self.name, seen, limit)
        return self._line

    def _start_server(self) -> None:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listening = socket.create_server((self.host, self.port), family=family)
        except OSError:  # it is another machine's, or somebody has it
            return
        arguments = listening.fileno(), self.least, os.getpid()
        with listening:
            self._server = subprocess.Popen(
                [sys.executable, "-Es", meeting.__file__, *map(str, arguments)],
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,  # where nobody can look
            )
        assert self._server.stdin is not None
        with suppress(BrokenPipeError), self._server.stdin as secret:
            secret.write(self._secret)

    def _messages(self, wait: float) -> list[dict[str, Any]]:
        """Return the meeting's messages within so many seconds.

        Raises ``ValueError`` if the other end does not know this job's secret, and never did.
        """
        if self._line is None:
            raise ConnectionError("there is no connection")
        try:
            return self._line.messages(wait)
        except OSError:
            self._hang_up()
            raise
        except ValueError as error:
            self._hang_up()
            where = f"{self.name}: expected this job's meeting at {self.address}"
            if self._believed:  # it was there, and may come back
                raise ConnectionError(f"{where}: {error}") from error
            raise ValueError(
                f"{where}: {error}. All members need the same secret: set MICRODDP_SECRET for each "
                f"of them, or give each user the same file ~/.config/microddp/secret"
            ) from error

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
