"""The launcher across hosts: in a box, and behind prefixes as ssh would be."""

import math
import os
import re
import signal
import time
from pathlib import Path
from textwrap import dedent

import pytest
from boxes import needs_hosts
from gallery_book import JOIN, LAUNCHER, PRELOAD, Book, Build
from test_launcher import FAULTS as ON_ONE_HOST
from test_launcher import SECONDS_AFTER_FAULT, in_order, report

from builds.book_run import HostsInABox
from launcher.job import JobFailed

# The second stands for ssh: a program that starts another one, passes no signal on, and leaves
# variables here.
SSH = "env -u MICRODDP_ROUNDS sh -c '\"$@\" || exit 1' sh"
PREFIXES = {"MICRODDP_HOSTS": f"; {SSH}; ", "MICRODDP_NPROC": "1", "MICRODDP_ROUNDS": "1"}
PREFIXES |= {"MASTER_ADDR": "127.0.0.1"}

ON_HOSTS = "# sphinx_gallery_hosts = '2 x 1gbit'\n"
OF_TWO_RANKS = "# sphinx_gallery_hosts = '2 x 1gbit, 2 ranks each'\n"
FAULTS = {
    "raises": (
        """
        if rank == 1:
            now()
            raise ValueError("boom on 1")
        dist.all_reduce(total)
        """,
        ["Rank 1 failed first", 'raises.py", line', "ValueError: boom on 1"],
    ),
    "killed": ON_ONE_HOST["killed"],
    "deadlocks": (
        """
        # sphinx_gallery_timeout = TIMEOUT
        now()
        dist.recv(total, 1 - rank)
        """,
        [
            "time-out, TIMEOUT s",
            "Rank 0, ",
            'deadlocks.py", line',
            "Rank 1, ",
            'deadlocks.py", line',
        ],
    ),
    "loses_its_agent": (
        """
        if rank == 1:
            now()
            os.kill(os.getppid(), signal.SIGKILL)
        dist.recv(total, 1 - rank)
        """,
        ["loses_its_agent.py failed after"],
    ),
}
GOOD = """
import os
import microddp

comms = microddp.init()
comms.print("hosts", comms.world_size // comms.local_world_size, "of", comms.world_size, "ranks")
comms.print("rounds", comms.all_gather_data(comms.most_rounds))
timed = comms
comms.close()
"""
# Whoever is not on the first host is late to ask whether all agents are there, at the end.
LATE = """
import socket, time
from torch.distributed.elastic.utils import store
sign_in = store._barrier_nonblocking
def late(*arguments, **named):
    key = sign_in(*arguments, **named)
    try:
        socket.socket().bind(("10.77.0.1", 0))
    except OSError:
        time.sleep(0.5)
    return key
store._barrier_nonblocking = late
"""


def book(folder: Path, **options: object) -> Book:
    """A book whose chapters run where the real book's do."""
    made = Book(folder)
    launcher = {
        "ranks": "builds.book_run.ranks",
        "hosts": "builds.book_run.hosts",
        "facts": "builds.book_run.facts",
        "below_title": "builds.book_run.measured_on",
        "preload": PRELOAD,
        **options,
    }
    made.configure("sphinx_design", *LAUNCHER, launcher=launcher)
    return made


@pytest.fixture(scope="module")
def timeout(beginnings: tuple[float, float]) -> int:
    """Five times as many seconds as a first job takes to begin; more run at once than there."""
    return math.ceil(5 * beginnings[0])


@pytest.fixture(scope="module", params=["box", "prefixes"])
def faulty(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, timeout: int
) -> tuple[Book, Build]:
    """A book of faults and a good chapter, built on two hosts."""
    from boxes import reason

    if request.param == "box" and reason:
        pytest.skip(reason)
    made = book(tmp_path_factory.mktemp("hosts") / request.param)
    for name, (code, _) in FAULTS.items():
        head = 'comms = type("Comms", (), {"describe": lambda self: "", "world_size": 2})()\n'
        made.chapter(name, ON_HOSTS + JOIN + head + dedent(code).replace("TIMEOUT", str(timeout)))
    made.chapter("then", ON_HOSTS + GOOD)
    made.chapter("then_of_two", OF_TWO_RANKS + GOOD)
    return made, made.build(**(PREFIXES if request.param == "prefixes" else {}))


class TestFaults:
    """As on one machine: explained, soon, with nothing left, and no other chapter harmed."""

    def test_report(self, faulty: tuple[Book, Build], timeout: int) -> None:
        _, build = faulty
        assert build.process.returncode != 0
        assert f"Unexpected failing examples ({len(FAULTS)})" in build.output
        for name, (_, expected) in FAULTS.items():
            expected = [part.replace("TIMEOUT", str(timeout)) for part in expected]
            assert in_order(report(build, name), expected), report(build, name)
        # A rank that is told to stop a moment later than another sees that one go.
        where = re.findall(
            r"^Rank (\d), (?:most recent call first|which others left):$",
            report(build, "deadlocks"),
            re.MULTILINE,
        )
        assert where == ["0", "1"]

    def test_soon(self, faulty: tuple[Book, Build], timeout: int) -> None:
        made, build = faulty
        for name in FAULTS:
            fault = float((made.root / f"chapters/{name}.moment").read_text())
            seconds = build.time_of(f"{name}.py failed after") - fault
            print(f"{name}: {seconds:.1f} s after the fault")
            assert seconds < (timeout if name == "deadlocks" else 0) + SECONDS_AFTER_FAULT, name

    def test_no_process_is_left(self, faulty: tuple[Book, Build]) -> None:
        assert faulty[1].processes_after(0) == []

    def test_next_chapter_is_right(self, faulty: tuple[Book, Build]) -> None:
        made, build = faulty
        assert "then.py: took" in build.output
        assert "hosts 2 of 2 ranks" in made.page("then")
        assert "Timed: 2 of 2 ranks." in made.page("then")
        box = "2 ranks on 2 hosts in a box with links of 1 Gbit/s" in made.page("then")
        machines = "2 ranks on 2 machines of" in made.page("then")
        boxed = made.root.name == "box"
        assert (box, machines) == (boxed, not boxed)
        assert ("rounds [1, 1]" in made.page("then")) == (not boxed)
        ranks = 4 if boxed else 2
        assert f"hosts 2 of {ranks} ranks" in made.page("then_of_two")
        assert build.output.count("measured / link") == boxed, "once for all chapters"


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_build(tmp_path: Path, number: signal.Signals) -> None:
    made = book(tmp_path / "book")
    made.chapter(
        "sits", ON_HOSTS + JOIN + "print('sitting', flush=True)\ndist.recv(total, 1 - rank)"
    )
    build = made.start()
    build.wait_for("measured / link")
    build.wait_for("[rank1]:sitting")
    os.killpg(build.process.pid, number)
    start = time.monotonic()
    assert build.finish() != 0
    assert build.processes_after(SECONDS_AFTER_FAULT) == []
    print(f"{number.name}: nothing left after {time.monotonic() - start:.1f} s")


@needs_hosts
def test_a_machine_that_refuses_hosts_builds_over_loopback_and_says_so(tmp_path: Path) -> None:
    made = book(tmp_path / "book")
    made.chapter("asks", ON_HOSTS + GOOD)
    # In namespaces of users and networks that may have no network below them.
    limit = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    build = made.build("-W", inside=("unshare", "-Ur", "sh", "-c", limit, "sh"))
    assert build.process.returncode == 0, build.output
    page = made.page("asks")
    assert "hosts 1 of 2 ranks" in page
    assert "Over loopback, since there are no 2 hosts in a box with links of 1 Gbit/s" in page
    assert "this machine refuses root network namespaces" in page
    assert re.search(r"in Docker <code.*--privileged.*</code>", page)


@needs_hosts
def test_the_first_agent_waits_for_late_ones(tmp_path: Path) -> None:
    made = book(tmp_path / "book", imports=["late"])
    made.write("late.py", LATE)
    made.chapter("leaves", ON_HOSTS + GOOD)
    build = made.build("-W")
    assert build.process.returncode == 0, build.output
    assert "hosts 2 of 2 ranks" in made.page("leaves")
    assert "TCPStore" not in build.output


@needs_hosts
@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_hosts_that_are_allowed_but_fail_are_no_reason_for_loopback(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(_: object) -> str:
        raise error("not measured")

    monkeypatch.setattr("builds.book_run.calibration_table", fail)
    monkeypatch.setattr(HostsInABox, "measured", set())
    with pytest.raises(JobFailed, match="which this machine allows: not measured"):
        HostsInABox("2 x 1gbit").__enter__()


def test_what_is_said_of_hosts_can_be_wrong(tmp_path: Path) -> None:
    made = book(tmp_path / "book")
    made.chapter("wants", "# sphinx_gallery_hosts = 'plenty'\n" + GOOD)
    build = made.build()
    assert build.process.returncode != 0
    forms = "'4 x 1gbit' or '2 x 1gbit, 2 ranks each'"
    assert f"wants.py: not possible: expected hosts as {forms}, got 'plenty'" in build.output


@pytest.mark.parametrize(("ranks", "each"), [(None, [2, 2]), ("3", [2, 1]), ("1", [1])])
def test_ranks_are_dealt_to_hosts(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, each: list[int]
) -> None:
    if ranks:
        monkeypatch.setenv("MICRODDP_NPROC", ranks)
    assert HostsInABox("2 x 1gbit, 2 ranks each").ranks == each
