"""Where members meet: a small server that knows who is there, and says who trains together.

A program of its own, run by its path as ``meeting.py SOCKET LEAST PARENT`` with a listening socket
and the job's secret as standard input, so that it starts without PyTorch, and lives on while the
member that started it is stopped. It ends with that member.

A member keeps one connection, and each line on it is JSON. First both ends prove that they know
the secret, without saying it::

    server  {"challenge": C}
    member  {"name": NAME, "nonce": N, "proof": proof(secret, "member", C, N, NAME)}
    server  {"proof": proof(secret, "meeting", C, N, NAME)}

From there on each line begins with a seal, which only the two ends of this connection can make: so
nobody in between, who may have passed the proofs on, can add, change, repeat or leave out a line.
The member says which generation it was in last (0: none): ``{"number": 3, "members": [...]}``.
Whenever it wants to be in the next one, it says ``{"come": {...}}`` with what the others are to
know of it. To all who have come the answer is ``{"number": 4, "members": [[name, {...}], ...]}`` in
rank order: those who were in the generation before keep theirs. Meanwhile, who trains is told
``{"waiting": true}``. A ``{"done": true}`` from a member is passed to all who wait. Whoever says
anything else is closed, and named in a line of standard error.

Who is connected is alive, at least its machine says so. A killed process is disconnected by the
kernel at once; a stopped one, or one behind a cut line, stays connected and does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import random
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Seconds without an arrival after which a job begins, and a new server knows its members.
BEGIN = 1.0
HUNG = 2.0  # seconds for which those who came wait for a member that is connected
TICK = 0.02

LINE_BYTES = 1 << 18  # of one message: a generation of a thousand members
PROOF_BYTES = 1 << 10
# Seconds for a proof: a member in the midst of a long step does not answer at once. So many
# connections may be without one at a time; of more, any is closed: who floods the meeting cannot
# know which, and a member tries again.
PROOF_SECONDS, UNPROVEN = 30.0, 256
NAMED = 100  # strangers, of whom no more are named: a log that nobody reads must not fill up


# ---- what a line may be

Form = Mapping[str, Callable[[Any], object]]


def _text(pattern: str) -> Callable[[Any], object]:
    whole = re.compile(pattern, re.ASCII)
    return lambda value: isinstance(value, str) and whole.fullmatch(value)


def _number(least: int, most: int) -> Callable[[Any], object]:
    return lambda value: type(value) is int and least <= value <= most


def _list(each: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda value: isinstance(value, list) and all(map(each, value))


def _is_member(value: Any) -> object:
    return isinstance(value, list) and len(value) == 2 and NAME(value[0]) and fits(value[1], PLACE)


def _is_true(value: Any) -> bool:
    return value is True


NAME, _HEX = _text(r"[\w.-]{1,300}"), _text("[0-9a-f]{64}")
_COUNT = _number(0, 2**53)
PLACE: Form = {
    "steps": _number(-1, 2**53),
    "address": _text(r"[\w.:%]{1,100}"),
    "port": _number(1, 2**16 - 1),
    "machine": NAME,
}
# From members, in this order: a proof, what it has seen, then one of the last two, again and again.
PROOF: Form = {"name": NAME, "nonce": _HEX, "proof": _HEX}
SEEN: Form = {"number": _COUNT, "members": _list(NAME)}
COME: Form = {"come": lambda value: fits(value, PLACE)}
DONE: Form = {"done": _is_true}
# From the server, which may say DONE, too.
CHALLENGE: Form = {"challenge": _HEX}
ADMITTED: Form = {"proof": _HEX}
REFUSED: Form = {"refused": _is_true}
WAITING: Form = {"waiting": _is_true}
GENERATION: Form = {"number": _COUNT, "members": _list(_is_member)}


def fits(value: Any, form: Form) -> bool:
    """Whether a value is a dictionary of exactly these keys, with values that may be theirs."""
    return (
        isinstance(value, dict)
        and value.keys() == form.keys()
        and all(may_be(value[key]) for key, may_be in form.items())
    )


def read(line: bytes, *forms: Form) -> dict[str, Any]:
    """The message of a line.

    Raises:
        ValueError: it is none of these forms; it names them, and what came.
    """
    with contextlib.suppress(ValueError, RecursionError):  # no JSON, or lists in lists in lists
        message = json.loads(line)
        if any(fits(message, form) for form in forms):
            return message  # type: ignore[no-any-return]
    expected = " or ".join("{" + ", ".join(form) + "}" for form in forms)
    line = line.rstrip(b"\r\n")
    came = f"{line[:40]!r}, {len(line)} bytes" if line else "an empty line or the end"
    raise ValueError(f"expected {expected}, got {came}")


def proof(secret: bytes, *parts: str) -> str:
    """The HMAC-SHA256 of these texts under the secret, in hexadecimal."""
    return hmac.new(secret, json.dumps(["microddp", *parts]).encode(), "sha256").hexdigest()


class Seal:
    """The marks that one end of a connection puts before its lines, and the other end checks.

    Args:
        secret: of the job.
        texts: of this connection and direction, no two alike.
    """

    def __init__(self, secret: bytes, *texts: str) -> None:
        self._key, self._count = proof(secret, "seal", *texts).encode(), 0

    def _next(self, text: bytes) -> bytes:
        self._count += 1
        return hmac.new(self._key, b"%d %b" % (self._count, text), "sha256").hexdigest().encode()

    def put(self, message: Mapping[str, Any]) -> bytes:
        """A message as a line."""
        text = json.dumps(message).encode()
        return self._next(text) + b" " + text + b"\n"

    def take(self, line: bytes, *forms: Form) -> dict[str, Any]:
        """The message of a line.

        Raises:
            ValueError: its seal is not the one that is due, or it is of none of these forms.
        """
        seal, _, text = line.rstrip(b"\r\n").partition(b" ")
        if not hmac.compare_digest(seal, self._next(text)):
            raise ValueError(f"expected a line with its seal, got {line[:40]!r}, {len(line)} bytes")
        return read(text, *forms)


# ---- who meets


class Member:
    """The meeting's end of a connection that is proved.

    Args:
        name: of the member.
        reader: what comes.
        writer: what goes.
        secret: of the job.
        texts: what both ends have proved by: challenge, nonce and name.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret: bytes,
        *texts: str,
    ) -> None:
        self.name, self._reader, self._writer = name, reader, writer
        self._theirs = Seal(secret, "member", *texts)
        self._ours = Seal(secret, "meeting", *texts)

    async def hear(self, *forms: Form) -> dict[str, Any] | None:
        """Its next message; ``None``: it is gone.

        Raises:
            ValueError: as :meth:`Seal.take`, or a line that is too long.
        """
        line = await self._reader.readline()
        return self._theirs.take(line, *forms) if line else None

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send it a message, sooner or later; if it is gone its reader will notice."""
        self._writer.write(self._ours.put(message))


@dataclass
class Meeting:
    """What the server knows.

    Attributes:
        least: members of a generation.
        secret: of the job.
        number: of the last generation, 0 before the first.
        members: that were in it, by rank.
        unproven: connections that have not proved yet that they belong.
        named: how many lines have told of strangers.
        connected: who is there.
        come: what those who want to be in the next generation say of themselves.
        done: whether the job is over.
        changed: when a member came last, or the server began.
    """

    least: int
    secret: bytes
    number: int = 0
    members: list[str] = field(default_factory=list)
    unproven: set[asyncio.StreamWriter] = field(default_factory=set)
    named: int = 0
    connected: dict[str, Member] = field(default_factory=dict)
    come: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    began: float = field(default_factory=time.monotonic)
    changed: float = field(default_factory=time.monotonic)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it is gone, or closed for what it says."""
        member = None
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                member = await self.prove(reader, writer)
                seen = await member.hear(SEEN)
            if seen is not None:
                self.know(member, seen)
            while message := await member.hear(COME, DONE):
                if self.connected.get(member.name) is not member:
                    raise ValueError("expected one connection of a member, got a second one")
                if "done" in message:
                    self.done = True
                else:
                    self.come[member.name] = message["come"]
                    self.changed = time.monotonic()
                self.call()
        except TimeoutError:
            self.tell_of(writer, member, f"expected a proof within {PROOF_SECONDS:g} s, got none")
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
        """Prove both ends to each other.

        Raises:
            OSError: it was gone before it said anything.
            ValueError: it has proved nothing.
        """
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
        message = read(line[:PROOF_BYTES], PROOF)
        texts = challenge, message["nonce"], message["name"]
        if not hmac.compare_digest(proof(self.secret, "member", *texts), message["proof"]):
            writer.write(b'{"refused": true}\n')
            raise ValueError(f"expected the job's secret, got another one from {message['name']}")
        mine = proof(self.secret, "meeting", *texts)
        writer.write(json.dumps({"proof": mine}).encode() + b"\n")
        return Member(message["name"], reader, writer, self.secret, *texts)

    def tell_of(self, writer: asyncio.StreamWriter, member: Member | None, problem: str) -> None:
        """Name who has been closed, up to a number."""
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
        """Tell those who train that they are to come: some wait, or the others went on without."""
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
        """Whether all have come who can be expected to."""
        if len(self.come) < max(1, self.least):
            return False
        now = time.monotonic()
        if not self.members:
            return now > self.changed + BEGIN
        missing = [name for name in self.members if name not in self.come]
        if not missing:
            return True
        if now < self.began + BEGIN:  # they may not have found this server yet
            return False
        if not any(name in self.connected for name in missing):
            return True
        # They come together, when a collective has failed, so who does not is hung. A new member
        # alone cannot know that: the others may be in a long step.
        return len(missing) < len(self.members) and now > self.changed + HUNG

    def send(self, message: Mapping[str, Any], names: Iterable[str]) -> None:
        """Send a message to some members."""
        for name in names:
            self.connected[name].tell(message)


async def serve(meeting: Meeting, listening: socket.socket, parent: int) -> None:
    """Be the server until the process that started this one is gone."""
    # Never closed: since Python 3.12 a server that is waits for all its connections to end.
    await asyncio.start_server(meeting.receive, sock=listening, limit=LINE_BYTES)
    while os.getppid() == parent:
        await asyncio.sleep(TICK)
        meeting.close()
    os._exit(0)  # at once: to be cancelled, each connection's task would print a traceback


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is its parent's to end, or to go on
    handle, least, parent = map(int, sys.argv[1:])
    meeting = Meeting(least, sys.stdin.buffer.read())
    asyncio.run(serve(meeting, socket.socket(fileno=handle), parent))
