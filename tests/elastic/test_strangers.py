"""Strangers: nothing that they say changes a job, and each is closed and named."""

import contextlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import free_address

from microddp.elastic import Members, meeting, messages, secret
from microddp.elastic.line import Line

SECRET = b"a secret of these tests"
LINES = 10_000
CHALLENGE = json.dumps({"challenge": "0" * 64}).encode() + b"\n"
PLACE = {"steps": 3, "address": "127.0.0.1", "port": 4000, "machine": "m"}


class Server:
    """The meeting as a member starts it, with two members that train, and its words."""

    def __init__(self):
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        command = [sys.executable, "-Es", meeting.__file__, str(listening.fileno()), "1"]
        self.process = subprocess.Popen(
            [*command, str(os.getpid())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        listening.close()
        self.process.stdin.write(SECRET.decode())
        self.process.stdin.close()
        self.said = []
        self.ear = threading.Thread(
            target=lambda: self.said.extend(self.process.stderr), daemon=True
        )
        self.ear.start()
        self.lines = []
        self.members = [self.line("first"), self.line("second")]
        assert self.generation(*self.members) == (1, ["first", "second"])

    def line(self, name, number=0, members=(), address=None):
        seen = {"number": number, "members": list(members)}
        line = Line(address or self.address, SECRET, name, seen, limit=5)
        self.lines.append(line)
        while not line.proven:
            line.messages(5)
        return line

    def generation(self, *lines):
        """The next generation, in which these are. Who is new comes first, and the others once
        they are told, as one that has all who were in the last one begins at once."""
        for line in sorted(lines, key=self.members.__contains__):
            line.send({"come": PLACE})
            if line not in self.members:
                assert self.members[0].messages(60) == [{"waiting": True}]
        answers = []
        for line in lines:
            end, heard = time.monotonic() + 60, []
            while not heard and time.monotonic() < end:
                heard = [each for each in line.messages(1) if "waiting" not in each]
            answers.append((heard[0]["number"], [name for name, _ in heard[0]["members"]]))
        assert len(set(map(str, answers))) == 1
        return answers[0]

    def lines_of_said(self, count):
        """So many lines that the meeting has printed, as soon as they are there."""
        end = time.monotonic() + 10
        while len(self.said) < count and time.monotonic() < end:
            time.sleep(0.02)
        assert len(self.said) == count, self.said
        return self.said

    def stranger(self):
        return socket.create_connection(self.address, timeout=5)

    def close(self):
        for line in self.lines:
            line.close()
        self.process.kill()
        self.process.wait()
        self.ear.join()
        self.process.stderr.close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def heard_by(connection):
    """Return what is sent to a connection until it is closed."""
    heard = b""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while data := connection.recv(1 << 16):
            heard += data
    return heard


def is_closed(line):
    """Return True if the meeting closes a connection within a while."""
    with contextlib.suppress(OSError):
        for _ in range(5):
            line.messages(1)
        return False
    return True


def real_lines():
    """Every line that a member says in its life: a stranger may have seen them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        seen = {"number": 3, "members": ["first", "second"]}
        line = Line(listening.getsockname(), SECRET, "first", seen, limit=1)
        with listening.accept()[0] as server:
            server.sendall(CHALLENGE)
            line.messages(1)
            first = server.recv(1 << 16)
            texts = "0" * 64, json.loads(first)["nonce"], "first"
            mine = {"proof": messages.proof(SECRET, "meeting", *texts)}
            server.sendall(json.dumps(mine).encode() + b"\n")
            line.messages(1)  # and says which generation it has seen
            for message in ({"come": PLACE}, {"done": True}):
                line.send(message)
            line.close()
            return [first.strip(), *heard_by(server).splitlines()]


REAL = real_lines()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.sampled_from(["name", "nonce", "proof", "number", "members", "come", "done", "challenge"])
JSON = st.recursive(
    SCALARS | st.just(PLACE),
    lambda inside: st.lists(inside) | st.dictionaries(KEYS | st.text(), inside),
    max_leaves=5,
)
SAID = st.one_of(
    st.binary(max_size=200),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(REAL),  # replayed, in whatever order
    st.sampled_from(REAL).flatmap(lambda line: st.integers(0, len(line)).map(lambda n: line[:n])),
    st.sampled_from([b"[" * 100_000, b"9" * 100_000, b"x" * (2 * messages.LINE_BYTES)]),
)


def test_ten_thousand_lines_of_strangers_change_nothing(server):
    said = 0

    @settings(
        max_examples=LINES // 40,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(SAID, min_size=40, max_size=50))
    def say(lines):
        nonlocal said
        said += len(lines)
        for each in (lines, *([line] for line in lines)):  # the first one that is wrong is the last
            with server.stranger() as stranger, contextlib.suppress(OSError):  # it is closed
                stranger.sendall(b"".join(line + b"\n" for line in each))
                stranger.shutdown(socket.SHUT_WR)
                for answer in heard_by(stranger).splitlines():
                    kind = json.loads(answer)
                    assert set(kind) == {"challenge"} or kind == {"refused": True}

    say()
    assert said >= LINES
    for member in server.members:
        assert member.messages(0.2) == [], "nobody was told anything"
    third = server.line("third")
    assert server.generation(third, *server.members) == (2, ["first", "second", "third"])
    assert not any("Traceback" in line for line in server.said)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"done": true}', "expected {name, nonce, proof}, got b'{\"done\": true}', 14 bytes"),
        (json.dumps({"come": PLACE}).encode(), "expected {name, nonce, proof}, got"),
        (b"[1, 2]", "expected {name, nonce, proof}, got b'[1, 2]'"),
        (b"{}", "expected {name, nonce, proof}, got b'{}'"),
        (REAL[0], "expected the job's secret, got another one from first"),
        (b"x" * (2 * messages.LINE_BYTES), "chunk exceed"),
    ],
    ids=["done", "come", "a list", "no keys", "replayed", "too long"],
)
def test_a_stranger_is_closed_and_named_in_one_line(server, line, complaint):
    with server.stranger() as stranger:
        port = stranger.getsockname()[1]
        with contextlib.suppress(OSError):
            stranger.sendall(line + b"\n")
        heard_by(stranger)
    (said,) = server.lines_of_said(1)
    assert said.startswith(f"The meeting has closed 127.0.0.1:{port}: ")
    assert complaint in said
    assert server.generation(*server.members) == (2, ["first", "second"])


@pytest.mark.parametrize(
    "message",
    [
        {"done": False},
        {"come": {**PLACE, "port": 0}},
        {"come": {**PLACE, "address": "a b"}},
        {"come": {**PLACE, "steps": True}},
        {"come": PLACE, "done": True},
        {"number": 9, "members": []},  # once only, at first
    ],
    ids=str,
)
def test_a_member_that_says_what_none_says_is_closed(server, message):
    third = server.line("third")
    third.send(message)
    assert is_closed(third)
    (said,) = server.lines_of_said(1)
    assert said.startswith("The meeting has closed third: expected {come} or {done}, got")
    assert server.generation(*server.members) == (2, ["first", "second"])


def test_a_member_has_one_connection(server):
    again = server.line("first", number=1, members=["first", "second"])
    server.members[0].send({"done": True})
    assert is_closed(server.members[0])
    server.members[0] = again
    assert server.generation(*server.members) == (2, ["first", "second"])


def test_connections_that_say_nothing_are_closed_when_there_are_many(server):
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(server.stranger()) for _ in range(meeting.UNPROVEN + 5)]
        poll = select.poll()
        for stranger in silent:
            stranger.recv(1 << 10)  # its challenge
            poll.register(stranger, select.POLLIN | select.POLLHUP)
        end, closed = time.monotonic() + 20, set()
        while len(closed) < 5 and time.monotonic() < end:
            closed.update(handle for handle, _ in poll.poll(100))
        assert len(closed) == 5
        third = None
        while third is None:  # it may be the one that is chosen: a member tries again
            with contextlib.suppress(ConnectionResetError):
                third = server.line("third")
        assert server.generation(third, *server.members) == (2, ["first", "second", "third"])


def test_not_more_strangers_are_named_than_a_log_can_take(server):
    for _ in range(meeting.NAMED + 20):
        with server.stranger() as stranger:
            stranger.sendall(b"[]\n")
            heard_by(stranger)
    assert server.generation(*server.members) == (2, ["first", "second"])
    said = server.lines_of_said(meeting.NAMED)
    assert said[-1].endswith("; no more are named\n")


class Relay:
    """A stranger to whom a member connects, and who passes on what both ends say."""

    def __init__(self, server):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address, self.meeting = self.listening.getsockname(), server.stranger()
        threading.Thread(target=self.pass_on, daemon=True).start()

    def pass_on(self):
        self.member, _ = self.listening.accept()
        self.meeting.settimeout(None)
        ends = ((self.member, self.meeting), (self.meeting, self.member))
        for one, other in ends:
            threading.Thread(target=self.forward, args=(one, other), daemon=True).start()

    def forward(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self):
        for each in (self.listening, self.member, self.meeting):
            each.close()


@pytest.mark.parametrize(
    "line",
    [b'{"done": true}', b"0" * 64 + b' {"done": true}', REAL[-1]],
    ids=["without a seal", "with another one", "replayed"],
)
def test_who_has_passed_the_proofs_on_can_add_no_line(server, line):
    relay = Relay(server)
    third = server.line("third", address=relay.address)
    relay.meeting.sendall(line + b"\n")
    assert is_closed(third)
    (said,) = server.lines_of_said(1)
    assert said.startswith("The meeting has closed third: expected a line with its seal")
    assert server.generation(*server.members) == (2, ["first", "second"])
    relay.close()


def hear(line, seconds):
    """Hear all that comes: what the meeting says itself may come first."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        line.messages(left)


def test_a_member_takes_no_line_that_was_added(server):
    relay = Relay(server)
    third = server.line("third", address=relay.address)
    relay.member.sendall(b'{"done": true}\n')
    with pytest.raises(ValueError, match="expected a line with its seal, got"):
        hear(third, 5)
    relay.close()


# ---- a stranger where the meeting should be


def answers(*lines):
    """The address of something that says lines to the first that comes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listening, listening.accept()[0] as connection:
            connection.sendall(b"".join(lines))
            heard_by(connection)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([CHALLENGE, json.dumps({"proof": "1" * 64}).encode() + b"\n"], "has another secret"),
        ([CHALLENGE, b'{"refused": true}\n'], "has another secret"),
        ([b'{"done": true}\n'], r"expected \{challenge\}, got"),
        ([b"SSH-2.0-OpenSSH_9.9\r\n"], r"expected \{challenge\}, got b'SSH"),
    ],
    ids=["no secret", "refuses", "done", "another service"],
)
def test_a_member_does_not_believe_a_stranger(lines, complaint):
    with (
        Members(answers(*lines)) as members,
        pytest.raises(ValueError, match=f"{complaint}.*set MICRODDP_SECRET for each of them"),
    ):
        members.meet(-1)


# ---- the secret


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.delenv("MICRODDP_SECRET")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return secret.home()


def test_a_secret_is_made_once_and_only_its_user_can_read_it(own_home):
    found = []
    threads = [threading.Thread(target=lambda: found.append(secret.find_secret())) for _ in "12345"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [own_home.read_bytes()] * 5
    assert len(found[0]) == 64
    assert stat.S_IMODE(own_home.stat().st_mode) == 0o600
    assert [path.name for path in own_home.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_secret_that_others_can_read_is_none(own_home, mode):
    secret.find_secret()
    own_home.chmod(mode)
    with pytest.raises(ValueError, match=f"with mode {mode:03o}: chmod 600 it"):
        Members(free_address())


def test_a_secret_that_can_be_guessed_is_refused(own_home, monkeypatch):
    secret.find_secret()
    own_home.write_text("short")
    with pytest.raises(ValueError, match="has 5 bytes, and is to have 16"):
        secret.find_secret()
    monkeypatch.setenv("MICRODDP_SECRET", "fifteen letters")
    with pytest.raises(ValueError, match="16 characters or more, got 15"):
        secret.find_secret()


def test_a_user_without_a_home_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("MICRODDP_SECRET")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"expected MICRODDP_SECRET, or a file .* got: "):
        secret.find_secret()
