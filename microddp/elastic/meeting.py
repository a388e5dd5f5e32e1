"""The meeting: a small server that knows which members are there, and says who trains together.

A program of its own, run by its path as ``meeting.py SOCKET LEAST PARENT`` with a listening socket
and the job's secret as standard input, so that it starts without PyTorch, and lives on while the
member that started it is stopped. ``messages.py`` has what a member and the server say.

A connected member counts as alive. A killed process is disconnected by the kernel at once; a
stopped one, or one behind a cut line, stays connected and does not come.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__ != "__main__":
    from microddp.elastic import messages
else:
    import messages  # the file beside this one: run by its path, it is in no package

# Seconds without an arrival after which a job begins, and a new server knows its members.
BEGIN = 1.0
HUNG = 2.0  # seconds for which those who came wait for a member that is connected
TICK = 0.02

PROOF_BYTES = 1 << 10
# Seconds for a proof: a member in the midst of a long step does not answer at once. At most so many
# connections may be without one at a time. Beyond that a random one is closed, so that a flood
# cannot choose whom it shuts out; a member tries again.
PROOF_SECONDS, UNPROVEN = 30.0, 256
NAMED = 100  # strangers, of whom no more are named: a log that nobody reads must not fill up


class Member:
    """The meeting's end of a connection that is proved by these texts."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        *texts: str,
    ) -> None:
        self.name, self._reader, self._writer = name, reader, writer
        self._theirs = messages.Seal(secret, "member", *texts)
        self._ours = messages.Seal(secret, "meeting", *texts)

    async def hear(self, *forms: messages.Form) -> dict[str, Any] | None:
        """Return its next message, or ``None`` if it is gone; errors are those of ``Seal.take``."""
        line = await self._reader.readline()
        return self._theirs.take(line, *forms) if line else None

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send it a message, sooner or later; if it is gone its reader will notice."""
        self._writer.write(self._ours.put(message))


@dataclass
class Meeting:
    """The state of the server."""

    least: int  # members of a generation
    secret: bytes
    number: int = 0  # of the last generation
    members: list[str] = field(default_factory=list)  # of that, by rank
    unproven: set[asyncio.StreamWriter] = field(default_factory=set)
    named: int = 0  # strangers
    connected: dict[str, Member] = field(default_factory=dict)
    come: dict[str, Any] = field(default_factory=dict)  # to the next one, with what they say
    done: bool = False
    began: float = field(default_factory=time.monotonic)
    changed: float = field(default_factory=time.monotonic)  # a member came last, or it began

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it is gone, or closed for what it says."""
        member = None
        try:
            try:
                async with asyncio.timeout(PROOF_SECONDS):
                    member = await self.prove(reader, writer)
                    seen = await member.hear(messages.SEEN)
            except TimeoutError:
                problem = f"expected a proof within {PROOF_SECONDS:g} s, got none"
                raise ValueError(problem) from None
            if seen is not None:
                self.know(member, seen)
            while message := await member.hear(messages.COME, messages.DONE):
                if self.connected.get(member.name) is not member:
                    raise ValueError("expected one connection of a member, got a second one")
                if "done" in message:
                    self.done = True
                    self.close()
                    member.tell({"done": True})  # after the others
                else:
                    self.come[member.name] = message["come"]
                    self.changed = time.monotonic()
                self.call()
        except ValueError as error:  # of readline's, too: a line that is too long
            self.tell_of(writer, member, str(error))
        except OSError:
            pass  # it is gone
        finally:
            if member and self.connected.get(member.name) is member:
                del self.connected[member.name]
                self.come.pop(member.name, None)
            writer.close()

    async def prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member:
        """Prove both ends to each other; ``ValueError`` if the other one has proved nothing."""
        self.unproven.add(writer)
        if len(self.unproven) > UNPROVEN:
            chosen = random.choice([*self.unproven])
            self.unproven.remove(chosen)
            chosen.transport.abort()
        challenge = secrets.token_hex(32)
        try:
            writer.write(json.dumps({"challenge": challenge}).encode() + b"\n")
            line = await reader.readline()
            if writer not in self.unproven:
                raise ValueError(f"expected a proof, got {UNPROVEN} other connections without one")
        finally:
            self.unproven.discard(writer)
        if not line:
            raise ConnectionResetError
        message = messages.read(line[:PROOF_BYTES], messages.PROOF)
        texts = challenge, message["nonce"], message["name"]
        if not hmac.compare_digest(messages.proof(self.secret, "member", *texts), message["proof"]):
            writer.write(b'{"refused": true}\n')
            raise ValueError(f"expected the job's secret, got another one from {message['name']}")
        mine = messages.proof(self.secret, "meeting", *texts)
        writer.write(json.dumps({"proof": mine}).encode() + b"\n")
        return Member(message["name"], reader, writer, self.secret, *texts)

    def tell_of(self, writer: asyncio.StreamWriter, member: Member | None, problem: str) -> None:
        """Name a connection that was closed, unless ``NAMED`` have been named."""
        self.named += 1
        if self.named <= NAMED:
            address = writer.get_extra_info("peername") or ("who has gone",)
            who = member.name if member else ":".join(map(str, address[:2]))
            last = "; no more are named" if self.named == NAMED else ""
            print(f"The meeting has closed {who}: {problem}{last}", file=sys.stderr, flush=True)

    def know(self, member: Member, seen: Mapping[str, Any]) -> None:
        """Take note of a member, and of the generation that it has seen."""
        self.connected[member.name] = member
        self.come.pop(member.name, None)  # by a connection before, with another port
        if seen["number"] > self.number:  # the server before this one is gone
            self.number, self.members = seen["number"], seen["members"]
        self.call()

    def call(self) -> None:
        """Tell members that train to come: somebody waits, or the others went on without them."""
        new = any(name not in self.members for name in self.come)
        training = self.connected.keys() - self.come.keys()
        self.send({"waiting": True}, training if new else training - set(self.members))

    def close(self) -> None:
        """Answer those who have come, if the job is over or a generation is complete."""
        if self.done:
            answer: dict[str, Any] = {"done": True}
        elif self.is_complete():
            new = [name for name in self.come if name not in self.members]
            self.members = [name for name in self.members if name in self.come] + new
            self.number += 1
            everyone = [[name, self.come[name]] for name in self.members]
            answer = {"number": self.number, "members": everyone}
        else:
            return
        self.send(answer, self.come)
        self.come = {}

    def is_complete(self) -> bool:
        """Return True if all members have come that can be expected to."""
        if len(self.come) < max(1, self.least):
            return False
        now = time.monotonic()
        if not self.members:
            return now > self.changed + BEGIN
        missing = [name for name in self.members if name not in self.come]
        if not missing:
            return True
        if now < self.began + BEGIN and not all(map(is_gone, missing)):
            return False  # they may not have found this server yet
        if not any(name in self.connected for name in missing):
            return True
        # They come together, when a collective has failed, so who does not is hung. A new member
        # alone cannot know that: the others may be in a long step.
        return len(missing) < len(self.members) and now > self.changed + HUNG

    def send(self, message: Mapping[str, Any], names: Iterable[str]) -> None:
        """Send a message to some members."""
        for name in names:
            self.connected[name].tell(message)


def is_gone(name: str) -> bool:
    """Return True if a member was a process of this machine, and that has ended.

    False where it cannot be known: on another machine, or without Linux's list of processes.
    """
    machine, _, number = name.rpartition("-")[0].rpartition("-")
    if machine != messages.machine_name() or not os.path.exists("/proc/self/stat"):
        return False
    try:
        with open(f"/proc/{int(number)}/stat", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return True
    return state in "ZX"  # it has ended, and its parent has not asked how


async def serve(meeting: Meeting, listening: socket.socket, parent: int) -> None:
    """Be the server until the process that started this one is gone."""
    # Never closed: since Python 3.12 a server that is waits for all its connections to end.
    await asyncio.start_server(meeting.receive, sock=listening, limit=messages.LINE_BYTES)
    while os.getppid() == parent:
        await asyncio.sleep(TICK)
        meeting.close()
    os._exit(0)  # at once: to be cancelled, each connection's task would print a traceback


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is its parent's to end, or to go on
    handle, least, parent = map(int, sys.argv[1:])
    meeting = Meeting(least, sys.stdin.buffer.read())
    asyncio.run(serve(meeting, socket.socket(fileno=handle), parent))
