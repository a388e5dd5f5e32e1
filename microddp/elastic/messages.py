"""Messages between a member and the meeting: their forms, and proofs that they are genuine.

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
``{"waiting": true}``. A ``{"done": true}`` from a member is passed to all who wait, and then back
to that member. A connection on which anything else is said is closed, and named in a line on
standard error.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

LINE_BYTES = 1 << 18  # of one message: a generation of a thousand members

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


def machine_name() -> str:
    """Return the name of this machine, as members' names begin with it."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)


def fits(value: Any, form: Form) -> bool:
    """Return True if a value is a dictionary of exactly these keys, with fitting values."""
    return (
        isinstance(value, dict)
        and value.keys() == form.keys()
        and all(may_be(value[key]) for key, may_be in form.items())
    )


def read(line: bytes, *forms: Form) -> dict[str, Any]:
    """Read the message of a line.

    Raises:
        ValueError: the message has none of these forms.
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
    """Return the HMAC-SHA256 of these texts under the secret, in hexadecimal."""
    return hmac.new(secret, json.dumps(["microddp", *parts]).encode(), "sha256").hexdigest()


class Seal:
    """The marks that one end of a connection puts before its lines, and the other end checks.

    The texts belong to this connection and direction alone.
    """

    def __init__(self, secret: bytes, *texts: str) -> None:
        self._key, self._count = proof(secret, "seal", *texts).encode(), 0

    def _next(self, text: bytes) -> bytes:
        self._count += 1
        return hmac.new(self._key, b"%d %b" % (self._count, text), "sha256").hexdigest().encode()

    def put(self, message: Mapping[str, Any]) -> bytes:
        """Return a message as a line with its seal."""
        text = json.dumps(message).encode()
        return self._next(text) + b" " + text + b"\n"

    def take(self, line: bytes, *forms: Form) -> dict[str, Any]:
        """Read the message of a line.

        Raises:
            ValueError: the seal is wrong, or the message has none of these forms.
        """
        seal, _, text = line.rstrip(b"\r\n").partition(b" ")
        if not hmac.compare_digest(seal, self._next(text)):
            raise ValueError(f"expected a line with its seal, got {line[:40]!r}, {len(line)} bytes")
        return read(text, *forms)
