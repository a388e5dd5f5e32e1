"""Where members meet: a small server that knows who is there, and says who trains together.

A program of its own, run by its path as ``meeting.py SOCKET LEAST PARENT`` with a listening socket,
so that it starts without PyTorch, and lives on while the member that started it is stopped. It ends
with that member.

A member keeps one connection, and each line on it is JSON. It says who it is, and which generation
it was in last (0: none): ``{"name": ..., "number": 3, "members": [...]}``. Whenever it wants to be
in the next one, it says ``{"come": {...}}`` with what the others are to know of it. To all who have
come the answer is ``{"number": 4, "members": [[name, {...}], ...]}`` in rank order: those who were
in the generation before keep theirs. Meanwhile, who trains is told ``{"waiting": true}``. A
``{"done": true}`` from a member is passed to all who wait.

Who is connected is alive, at least its machine says so. A killed process is disconnected by the
kernel at once; a stopped one, or one behind a cut line, stays connected and does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Seconds without an arrival after which a job begins, and a new server knows its members.
BEGIN = 1.0
HUNG = 2.0  # seconds for which those who came wait for a member that is connected
TICK = 0.02


@dataclass
class Meeting:
    """What the server knows.

    Attributes:
        least: members of a generation.
        number: of the last generation, 0 before the first.
        members: that were in it, by rank.
        connected: who is there.
        come: what those who want to be in the next generation say of themselves.
        done: whether the job is over.
        changed: when a member came last, or the server began.
    """

    least: int
    number: int = 0
    members: list[str] = field(default_factory=list)
    connected: dict[str, asyncio.StreamWriter] = field(default_factory=dict)
    come: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    began: float = field(default_factory=time.monotonic)
    changed: float = field(default_factory=time.monotonic)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a member until it is gone."""
        name = ""
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                message = json.loads(line)
                if "name" in message:
                    name = message["name"]
                    self.know(name, message["number"], message["members"], writer)
                elif "done" in message:
                    self.done = True
                else:
                    self.come[name] = message["come"]
                    self.changed = time.monotonic()
                self.call()
        if self.connected.get(name) is writer:
            del self.connected[name]
            self.come.pop(name, None)
        writer.close()

    def know(
        self, name: str, number: int, members: list[str], writer: asyncio.StreamWriter
    ) -> None:
        """Take note of a member, and of the generation that it has seen."""
        self.connected[name] = writer
        if number > self.number:  # the server before this one is gone
            self.number, self.members = number, members

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

    def send(self, message: dict[str, Any], names: Iterable[str]) -> None:
        """Send a line to some members; one that is gone will be noticed by its reader."""
        for name in names:
            self.connected[name].write(json.dumps(message).encode() + b"\n")


async def serve(listening: socket.socket, least: int, parent: int) -> None:
    """Be the server until the process that started this one is gone."""
    meeting = Meeting(least)
    server = await asyncio.start_server(meeting.receive, sock=listening)
    async with server:
        while os.getppid() == parent:
            await asyncio.sleep(TICK)
            meeting.close()
    os._exit(0)  # at once: to be cancelled, each connection's task would print a traceback


if __name__ == "__main__":
    handle, *numbers = map(int, sys.argv[1:])
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(socket.socket(fileno=handle), *numbers))
