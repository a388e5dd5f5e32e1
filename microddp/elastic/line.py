"""A member's connection to the meeting: first both ends prove that they belong to the job."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from microddp.elastic.messages import (
    ADMITTED,
    CHALLENGE,
    DONE,
    GENERATION,
    LINE_BYTES,
    REFUSED,
    WAITING,
    Seal,
    proof,
    read,
)

SEND_SECONDS = 5.0  # for a line of bytes, which the kernel takes at once unless nobody reads


class Line:
    """A connection to the meeting; :meth:`messages` also exchanges the proofs.

    ``seen`` is this member's first message, once both ends are proved, and ``limit`` the seconds to
    connect. All raise ``OSError`` if nobody answers there, or the connection is lost.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        name: str,
        seen: Mapping[str, Any],
        limit: float,
    ) -> None:
        self._secret, self._name, self._seen = secret, name, seen
        self._texts: tuple[str, ...] = ()  # by which both ends prove, once there is a challenge
        self._received = b""
        self._theirs: Seal | None = None
        self._socket = socket.create_connection(address, timeout=limit)
        self.address: str = self._socket.getsockname()[0]  # of this end
        self.family = self._socket.family

    @property
    def proven(self) -> bool:
        """True once both ends have proved that they know the secret."""
        return self._theirs is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, once both ends are proved."""
        self._send(self._ours.put(message))

    def _send(self, line: bytes) -> None:
        self._socket.settimeout(SEND_SECONDS)
        self._socket.sendall(line)

    def messages(self, wait: float) -> list[dict[str, Any]]:
        """Return the meeting's messages, after at most so many seconds; proofs are left out.

        Raises:
            ValueError: the other end has another secret, refuses this process, or says what no
                meeting says.
        """
        self._socket.settimeout(wait)
        try:
            data = self._socket.recv(LINE_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        if not data:
            raise ConnectionResetError("the meeting has closed the connection")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > LINE_BYTES:
            raise ValueError(f"expected lines of at most {LINE_BYTES} bytes, got a longer one")
        said = []
        for line in lines:
            if self._theirs:
                said.append(self._theirs.take(line, GENERATION, WAITING, DONE))
            else:
                self._prove(line)
        return said

    def _prove(self, line: bytes) -> None:
        if not self._texts:
            challenge, nonce = read(line, CHALLENGE)["challenge"], secrets.token_hex(32)
            self._texts = challenge, nonce, self._name
            mine = proof(self._secret, "member", *self._texts)
            message = {"name": self._name, "nonce": nonce, "proof": mine}
            self._send(json.dumps(message).encode() + b"\n")
            return
        message = read(line, ADMITTED, REFUSED)
        expected = proof(self._secret, "meeting", *self._texts)
        if "refused" in message or not hmac.compare_digest(message["proof"], expected):
            raise ValueError("what answers there has another secret")
        self._ours = Seal(self._secret, "member", *self._texts)
        self._theirs = Seal(self._secret, "meeting", *self._texts)
        self.send(self._seen)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
