"""Hosts in a box: their links, permissions, jobs on them, and that nothing is left of them."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from boxes import left, needs_hosts

from microddp.doctor.hang import report
from microddp.hosts import Box, Cluster, Link, Uplink, calibrate, human_bits, links_of_this_job
from microddp.hosts.__main__ import links, main

HERE = Path(__file__).parent
# In a user namespace of its own, as an ordinary user or as root, with a limit on what it may have.
# Whoever is not root in there has no capability there, as on any machine.
AS = """
import ctypes, os, sys
user, limits, command = sys.argv[1], sys.argv[2], sys.argv[3:]
real = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
for name, text in (
    ("setgroups", "deny"), ("uid_map", f"{user} {real[0]} 1"), ("gid_map", f"{user} {real[1]} 1")
):
    open(f"/proc/self/{name}", "w").write(text)
for name in limits.split(",") if limits else []:
    open(f"/proc/sys/user/max_{name}_namespaces", "w").write("0")
os.execvp(command[0], command)
"""


def hosts(*arguments, user=None, limits="", **options):
    """Run the command line, as this user or as another, and refuse it some kinds of namespaces."""
    command = [sys.executable, "-m", "microddp.hosts", *map(str, arguments)]
    if user is not None:
        command = [sys.executable, "-c", AS, str(user), limits, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)


def rows(output):
    """Return the rows of the calibration: hosts, asked, measured and their ratio."""
    pattern = r"(\d+ -> \d+) +(\S+ \wbit/s) +(\S+ \wbit/s) +(\S+) +(\S+ \w+)"
    return re.findall(pattern, output, re.IGNORECASE)


class TestLinks:
    """Names of links."""

    @pytest.mark.parametrize(
        ("text", "bits", "written"),
        [
            ("1gbit", 1e9, "1 Gbit/s"),
            ("2.5gbit", 2.5e9, "2.5 Gbit/s"),
            ("100Mbit", 1e8, "100 Mbit/s"),
            ("999.9mbit", 999.9e6, "1 Gbit/s"),
            ("500kbit", 5e5, "500 kbit/s"),
        ],
    )
    def test_read_and_written(self, text, bits, written):
        link = Link.parse(text)
        assert link.bits_per_second == bits
        assert link.bytes_per_second == bits / 8
        assert str(link) == human_bits(bits) == written
        assert Link.parse(link.option) == link

    def test_a_link_may_say_its_delay(self):
        link = Link.parse("1gbit+0.5ms", delay=2)
        assert link == Link(1e9, 0.0005)
        assert Link.parse(link.option) == link
        assert str(link) == "1 Gbit/s and 0.5 ms of delay"
        assert Link.parse("1gbit", delay=2) == Link(1e9, 2)

    @pytest.mark.parametrize(
        "text",
        ["", "1", "gbit", "1 gb", "-1gbit", "1e3mbit", "99kbit", "35gbit", "1gbit+5", "1gbit5ms"],
    )
    def test_not_a_link(self, text):
        with pytest.raises(ValueError, match=f"100kbit to 34gbit, .* got {re.escape(repr(text))}"):
            Link.parse(text)

    def test_one_host_has_another_link(self):
        all_of_them = links(4, "1gbit", "2ms", ["3=100mbit", "1=1gbit+5ms"])
        common = Link(1e9, 0.002)
        assert all_of_them == [common, Link(1e9, 0.005), common, Link(1e8, 0.002)]
        assert links(2, "1gbit+5ms", "", ["1=100mbit"])[1] == Link(1e8, 0.005)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--link", "fast"], "expected a link's speed"),
            (["--delay", "soon"], "as 100mbit or 1gbit+5ms, got '1gbit+soon'"),
            (["--delay", "10000ms"], "expected a delay from 0 to 10 seconds"),
            (["--delay=-1ms"], "got '1gbit+-1ms'"),
            (["--link", "1gbit+1ms", "--delay", "2ms"], "got '1gbit+1ms+2ms'"),
            (["--link-of", "2=1gbit"], "with a host from 0 to 1: '2=1gbit'"),
            (["--link-of", "fast"], "with a host from 0 to 1: 'fast'"),
            (["--hosts", "0"], "argument --hosts"),
            (["--uplink", "2=fast"], "expected a link's speed"),
            (["--uplink", "2,=1gbit"], "expected an uplink as 2,3=1gbit, got '2,=1gbit'"),
            (["--uplink", "1,2=1gbit"], "expected hosts from 0 to 1, got [1, 2]"),
            (["--uplink", "1,1=1gbit"], "at most one uplink for each host, got them of [1, 1]"),
        ],
    )
    def test_the_command_says_what_it_cannot_read(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as end:
            sys.exit(main(arguments))
        assert end.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]

    @pytest.mark.parametrize(
        ("uplinks", "written"),
        [((), ""), ((Uplink((0, 1), Link(5e8)),), ", hosts 0, 1 behind an uplink of 500 Mbit/s")],
    )
    def test_the_box_tells_its_programs(self, monkeypatch, uplinks, written):
        box = Box((Link(1e9), Link(1e8, 0.001)), 2, uplinks)
        for name, value in box.as_environment().items():
            monkeypatch.setenv(name, value)
        assert links_of_this_job() == box
        expected = "2 hosts in a box with links of 1 Gbit/s or 100 Mbit/s and 1 ms of delay"
        assert str(box) == expected + written

    def test_other_links(self):
        """Of one host, shared by some, and of all hosts, which then are at one switch."""
        plain = Box((Link(1e9, 0.001),) * 4, cores=2)
        slow = plain.relink("100mbit", host=2)
        assert slow.links == (Link(1e9, 0.001), Link(1e9, 0.001), Link(1e8, 0.001), plain.links[3])
        shared = slow.relink("2gbit+1ms", uplink=[3, 2]).relink("500mbit", uplink=(2, 3))
        assert shared.uplinks == (Uplink((2, 3), Link(5e8, 0.001)),)
        assert shared.links == slow.links
        assert shared.relink("1gbit", host=2).uplinks == shared.uplinks
        assert shared.relink("1gbit") == plain
        assert [
            shared.bits_per_second(*pair) for pair in ((0, 1), (1, 3), (3, 0), (2, 3), (2, 0))
        ] == [1e9, 5e8, 5e8, 1e8, 1e8]
        assert shared.seconds_per_byte == 8 / 1e8
        assert plain.relink("500mbit", uplink=[1]).seconds_per_byte == 8 / 5e8
        for wrong in ({"host": 4}, {"host": -1}, {"uplink": [4]}):
            with pytest.raises(ValueError, match="expected hosts from 0 to 3, got "):
                plain.relink("1gbit", **wrong)
        with pytest.raises(ValueError, match="at most one uplink for each host"):
            shared.relink("1gbit", uplink=[1, 2])
        with pytest.raises(ValueError, match=r"a host or an uplink, got 1 and \[2\]"):
            plain.relink("1gbit", host=1, uplink=[2])

    def test_outside_there_is_no_box(self):
        assert links_of_this_job() is None


LISTENS = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 29000))
for line in listener.accept()[0].makefile():
    print(time.monotonic(), flush=True)
"""
SENDS = """
import socket, sys, time
address, size = sys.argv[1:]
for _ in range(200):
    try:
        connection = socket.create_connection((address, 29000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(b"first\\n")
sys.stdin.read()
print(time.monotonic())
connection.sendall(b"x" * int(size) + b"\\n")
"""


@contextlib.contextmanager
def senders(cluster, pairs, size):
    """A program on the first host of each pair that sends to the second once its input closes.

    What it sends, and the other receives, is a line of that size. Both tell the moment.
    """
    with contextlib.ExitStack() as stack:

        def start(host, script, *arguments):
            command = [*cluster.on(host), sys.executable, "-c", script, *arguments]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            program = stack.enter_context(subprocess.Popen(command, **pipes))
            stack.callback(program.kill)
            return program

        programs = []
        for source, target in pairs:
            address = cluster.address(target)
            receiver = start(target, LISTENS, address)
            programs.append((start(source, SENDS, address, str(size)), receiver))
        for _, receiver in programs:
            assert receiver.stdout.readline()
        yield programs


def calibrated(*links, uplinks=()):
    """What no link exceeds. A difference of two times can be too small where other work fell into
    the smaller message alone, so a few are tried; a link that is not limited exceeds in all."""
    for _ in range(4):
        with Cluster(links, uplinks) as cluster:
            measured = calibrate(cluster)
        if all(each.bits_per_second < 1.05 * each.asked for each in measured):
            return measured
        time.sleep(2)  # until a burst of other work is over
    raise AssertionError(measured)


@needs_hosts
class TestCluster:
    """Namespaces and links."""

    def test_links_carry_what_was_asked_for(self):
        """Other work on the machine makes a link slower, or faster if a clock started late."""
        for rate in ("50mbit", "200mbit", "1gbit"):
            for attempt in range(4):
                with Cluster([Link.parse(rate)] * 2) as cluster:
                    shares = [each.bits_per_second / each.asked for each in calibrate(cluster)]
                if 0.95 < min(shares) <= max(shares) < 1.05:
                    break
                assert attempt < 3, (rate, shares)
                time.sleep(2)  # until a burst of other work is over

    def test_the_slower_link_decides(self):
        measured = calibrated(Link.parse("200mbit"), Link.parse("50mbit"), Link.parse("200mbit"))
        assert [each.asked for each in measured] == [5e7, 5e7, 2e8]
        assert measured[2].bits_per_second > 1.5 * measured[0].bits_per_second

    def test_an_uplink_decides_for_the_hosts_behind_it(self):
        measured = calibrated(*[Link.parse("200mbit")] * 3, uplinks=[Uplink.parse("1,2=50mbit")])
        assert [each.asked for each in measured] == [5e7, 2e8, 5e7]
        assert measured[1].bits_per_second > 1.5 * measured[0].bits_per_second

    def test_hosts_that_send_at_once_get_half_of_their_uplink_each(self):
        """Late starts make a time shorter than it should be, other work longer."""
        size, alone = 1 << 20, (1 << 20) / Link.parse("50mbit").bytes_per_second
        with Cluster([Link.parse("200mbit")] * 4, [Uplink.parse("2,3=50mbit")]) as cluster:
            for attempt in range(4):
                with senders(cluster, [(2, 0), (3, 1)], size) as programs:
                    for sender, _ in programs:
                        sender.stdin.close()
                    started = [float(sender.stdout.readline()) for sender, _ in programs]
                    ended = [float(receiver.stdout.readline()) for _, receiver in programs]
                shares = [(e - s) / alone for s, e in zip(started, ended, strict=True)]
                if 1.7 < min(shares) <= max(shares) < 2.3:
                    break
                assert attempt < 3, shares

    def test_what_is_sent_over_a_cut_link_arrives_when_it_is_mended(self):
        with Cluster([Link.parse("100mbit")] * 2) as cluster:
            with senders(cluster, [(1, 0)], 1) as [(sender, receiver)]:
                cluster.cut(1)
                sender.stdin.close()
                assert sender.stdout.readline()
                assert not select.select([receiver.stdout], [], [], 0.3)[0]
                cluster.mend(1)
                assert receiver.stdout.readline()
            for host in (-1, 2):
                with pytest.raises(ValueError, match="expected hosts from 0 to 1"):
                    cluster.cut(host)

    def test_a_host_has_cores_of_its_own_while_there_are_enough(self):
        ask = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        all_cores = os.sched_getaffinity(0)
        for count in (1, 2, len(all_cores) + 1):
            with Cluster([Link.parse("1gbit")] * count) as cluster:
                told = [subprocess.check_output([*cluster.on(host), *ask]) for host in range(count)]
            cores = [set(map(int, each.split())) for each in told]
            assert set().union(*cores) <= all_cores
            if count <= len(all_cores):
                assert sum(map(len, cores)) == len(set().union(*cores)) >= count
            else:
                assert all(len(each) == 1 for each in cores)

    def test_a_program_on_a_host_ends_as_it_ended(self):
        with Cluster([Link.parse("1gbit")]) as cluster:
            statuses = {"exit 0": 0, "exit 7": 7, "kill -KILL $$": -signal.SIGKILL}
            for script, status in statuses.items():
                assert subprocess.run([*cluster.on(0), "sh", "-c", script]).returncode == status
            command = [*cluster.on(0), "no such program"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 127
            assert done.stderr == "no such program: No such file or directory\n"

    def test_a_program_on_a_host_is_where_it_was_and_as_who_it_was(self, tmp_path):
        with Cluster([Link.parse("1gbit")]) as cluster:
            ask = [sys.executable, "-c", "import os; print(os.getcwd(), os.getuid())"]
            told = subprocess.check_output([*cluster.on(0), *ask], text=True, cwd=tmp_path)
        assert told.split() == [str(tmp_path), str(os.getuid())]

    def test_two_clusters_do_not_meet(self):
        with (
            Cluster([Link.parse("100mbit")] * 2) as one,
            Cluster([Link.parse("50mbit")] * 2) as two,
        ):
            assert calibrate(one)[0].bits_per_second > 1.3 * calibrate(two)[0].bits_per_second

    def test_closing_ends_what_runs_on_the_hosts(self, monkeypatch):
        monkeypatch.setenv("MARK", mark := uuid.uuid4().hex)
        cluster = Cluster([Link.parse("1gbit")] * 2)
        assert len(left(mark)) == 4  # the keeper, the switch, and the hosts
        sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
        started = subprocess.Popen([*cluster.on(1), *sleeper], stdout=subprocess.PIPE)
        assert started.stdout.readline() == b"\n"
        cluster.close()
        assert started.wait(5) == -signal.SIGKILL
        started.stdout.close()
        assert left(mark) == []


@needs_hosts
class TestWhoMay:
    """Permissions: any user where user namespaces are allowed, root without them."""

    @pytest.mark.parametrize("user", [0, 1000])
    def test_allowed(self, user):
        done = hosts("--link", "100mbit", user=user, limits="user" if user == 0 else "")
        assert done.returncode == 0, done.stderr
        assert len(rows(done.stdout)) == 2

    @pytest.mark.parametrize(
        ("user", "limits", "who"), [(1000, "user", "user 1000"), (0, "net", "root")]
    )
    def test_refused(self, user, limits, who):
        done = hosts("--", "script.py", user=user, limits=limits)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("microddp.hosts: error: no hosts in a box: this machine refuses ")
        assert f"refuses {who} network namespaces" in line
        assert "Run as root, or allow them" in line

    @pytest.mark.parametrize(
        ("delay", "least"), [(["--delay", "5ms"], 10), (["--link-of", "1=100mbit+5ms"], 5)]
    )
    def test_a_delay_takes_netem(self, delay, least):
        done = hosts("--link", "100mbit", *delay)
        if done.returncode:
            assert done.returncode == 2
            assert "this kernel has no netem, so links have no delay (`--delay`)" in done.stderr
        else:
            assert all(
                each[4].endswith(" ms") and float(each[4][:-3]) > least
                for each in rows(done.stdout)
            )


JOB = """
import os, sys, time
import torch
import microddp
from microddp.allreduce import ring_all_reduce
from microddp.message_counter import MessageCounter

comms = microddp.init()
n = comms.world_size
tensor = torch.full((n * 12,), float(comms.rank))
with MessageCounter(comms) as counter:
    ring_all_reduce(tensor, comms)
assert tensor.tolist() == [n * (n - 1) / 2] * (n * 12)
assert sum(message.nbytes for message in counter.messages) == 2 * (n - 1) * 12 * 4
assert comms.timed(computing=False) is comms
comms.print(comms.describe())
comms.print(comms.local_world_size, torch.get_num_threads(), comms.box.seconds_per_byte)
comms.barrier()
timed = comms.timed()
timed.print(timed.world_size)
timed.close()
"""


HIERARCHY = """
import time
from pathlib import Path
import torch
import microddp
from microddp.allreduce import ring_all_reduce
from microddp.shared import hierarchical_all_reduce, machines_of

def sent():  # by this host, bytes
    (link,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line]
    return int(link.split()[9])

with microddp.init() as comms:
    comms.print(machines_of(comms))
    tensor = torch.ones(1 << 20)
    for reduce in (ring_all_reduce, hierarchical_all_reduce):
        reduce(tensor, comms, "max")
        comms.barrier()
        before = sent()
        reduce(tensor, comms, "max")
        comms.barrier()
        time.sleep(0.2)
        comms.print((sent() - before) / tensor.nbytes)
"""


HANGS = """
import time
import microddp
comms = microddp.init()
comms.print("in vain")
if comms.rank == 0:
    comms.barrier()
time.sleep(100)
"""


LATE = """
import sys, time
from torch.distributed.elastic.utils import store
from microddp.hosts import __main__ as hosts
sign_in, stand_in = store._barrier_nonblocking, hosts._stand_in

def late(*arguments, **named):
    key = sign_in(*arguments, **named)
    time.sleep(0.5)
    return key

def some_are_late(cluster, host, *others):
    if host:
        store._barrier_nonblocking = late
    stand_in(cluster, host, *others)

hosts._stand_in = some_are_late
sys.exit(hosts.main())
"""


@needs_hosts
class TestJobs:
    """Ordinary jobs of several machines."""

    def test_four_hosts(self, tmp_path):
        script = tmp_path / "job.py"
        script.write_text(JOB)
        done = hosts("--hosts", 4, "--link", "1gbit", "--", script)
        assert done.returncode == 0, done.stderr
        assert len(rows(done.stdout)) == 4
        described, numbers, timed = done.stdout.splitlines()[-3:]
        cores = len(os.sched_getaffinity(0))
        assert described.startswith(
            f"gloo, 4 ranks on 4 hosts in a box with links of 1 Gbit/s, on {cores} core"
        )
        assert (", more ranks than cores, " in described) == (cores < 4)
        assert numbers == f"1 {max(1, cores // 8)} 8e-09"
        assert timed == f"{min(4, max(2, cores))}", "the others leave when it comes to computing"

    def test_several_ranks_on_a_host_and_a_module(self):
        done = hosts(
            *("--hosts", 2, "--ranks-per-host", 2, "--link", "100mbit", "--link-of", "1=200mbit"),
            *("--", "-m", "microddp.bench", "allreduce"),
            *("--size-mb", "0.1", "--iters", 1, "--check"),
        )
        assert done.returncode == 0, done.stderr
        assert "4 ranks on 2 hosts in a box with links of 100 Mbit/s or 200 Mbit/s" in done.stdout
        assert "time / wire" in done.stdout
        apart = "these share memory as [[0, 1], [2, 3]]"
        assert f"Without shared: shared needs ranks of one machine, and {apart}." in done.stdout

    def test_a_hosts_link_carries_each_sum_of_a_hierarchy_once(self, tmp_path):
        script = tmp_path / "job.py"
        script.write_text(HIERARCHY)
        done = hosts("--ranks-per-host", 2, "--link", "1gbit", "--", script)
        assert done.returncode == 0, done.stderr
        machines, *sent = done.stdout.splitlines()[-3:]
        assert machines == "[[0, 1], [2, 3]]"
        flat, hierarchical = map(float, sent)
        assert flat == pytest.approx(1.5, rel=0.05)  # 2 (n-1)/n of 4 ranks
        assert hierarchical == pytest.approx(1.0, rel=0.05)  # of 2 machines

    def test_ranks_that_hang_are_not_called_dead(self, tmp_path):
        """Their processes have other numbers inside than outside, where the doctor looks."""
        script = tmp_path / "job.py"
        script.write_text(HANGS)
        command = [sys.executable, "-m", "microddp.hosts", "--link", "1gbit", "--", str(script)]
        environment = os.environ | {"MICRODDP_RECORD": str(tmp_path / "calls")}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as job:
            try:
                while b"in vain" not in job.stdout.readline():
                    assert job.poll() is None
                time.sleep(0.5)
                told = report(tmp_path / "calls")
            finally:
                job.terminate()
        assert "gone" not in told, told
        assert re.search(r"0 +\d+ on \S+, elsewhere +waiting in barrier", told), told

    def test_the_status_is_the_jobs(self, tmp_path):
        script = tmp_path / "job.py"
        script.write_text("import os, sys; sys.exit(3 * (os.environ['RANK'] == '1'))")
        (tmp_path / "tmp").mkdir()
        done = hosts("--", script, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")})
        assert done.returncode == 1  # torchrun's own
        assert "exitcode  : 3" in done.stderr
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_the_first_agent_waits_for_late_ones(self, tmp_path):
        """Which have signed in at the end, but not yet asked its store whether all have."""
        script = tmp_path / "job.py"
        script.write_text("print('ran\\n', end='')")  # in one piece: unbuffered
        command = [sys.executable, "-c", LATE, "--hosts", "3", "--", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("ran\n") == 3


RELINKS = """
import time
import torch
import microddp
from microddp import hosts

comms = microddp.init()
tensor, least, boxes = torch.zeros(2**17), [], []
for speed, of in (
    ("400mbit", {}),
    ("50mbit", {}),
    ("400mbit", {}),
    ("50mbit", {"host": 1}),
    ("400mbit", {}),
    ("50mbit", {"uplink": [1]}),
    ("400mbit", {}),
):
    hosts.relink(comms, speed, **of)
    seconds = []
    for _ in range(3):
        comms.barrier()
        start = time.perf_counter()
        comms.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    least.append(min(seconds) / tensor.nbytes / comms.box.seconds_per_byte)
    boxes += comms.all_gather_data(str(comms.box))
assert str(comms.subgroup([0, 1]).box) == str(comms.box)
# Even what is under way while the links change arrives.
large = torch.ones(2**21)
pending = comms.all_reduce(large, async_op=True)
time.sleep(0.05)
hosts.relink(comms, "100mbit")
pending.wait()
assert large.unique().tolist() == [2.0]
# A host that is cut off can ask for its link, and another speed does not mend it.
moment = 0.0
comms.barrier()
if comms.rank == 1:
    comms.box.cut(1)
    comms.box.relink("400mbit", host=1).set_up()
    message = comms.send(torch.ones(1), 0, async_op=True)
    time.sleep(0.3)
    moment = time.monotonic()
    comms.box.mend(1)
    message.wait()
else:
    comms.recv(torch.zeros(1), 1)
    moment = time.monotonic()
received, mended = comms.all_gather_data(moment)
assert received > mended
try:
    hosts.relink(comms, "fast" if comms.rank else "1gbit")
except RuntimeError as error:
    comms.print(error)
    for box in boxes:
        comms.print(box)
    comms.print(*least)
"""


@needs_hosts
@pytest.mark.parametrize("user", [0, 1000])
def test_links_change_while_a_job_runs(tmp_path, user):
    """In units of the wire's time: two ranks send as many bytes as they reduce."""
    script = tmp_path / "job.py"
    script.write_text(RELINKS)
    tmp_path.chmod(0o755)
    done = hosts("--link", "1gbit", "--", script, user=user, limits="user" if user == 0 else "")
    assert done.returncode == 0, done.stderr
    error, *boxes, least = done.stdout.splitlines()[-16:]
    assert "got rank 1: expected a link's speed from 100kbit to 34gbit" in error
    fast, slow, one_slow, behind = (
        f"2 hosts in a box with links of {links}"
        for links in (
            "400 Mbit/s",
            "50 Mbit/s",
            "400 Mbit/s or 50 Mbit/s",
            "400 Mbit/s, host 1 behind an uplink of 50 Mbit/s",
        )
    )
    assert boxes[::2] == boxes[1::2] == [fast, slow, fast, one_slow, fast, behind, fast]
    for number, each in enumerate(map(float, least.split())):
        # The bucket's burst is free.
        assert 0.7 < each < (1.5 if number % 2 else 4), (number, least)


SITS = """
import os, pathlib, sys, time
import torch
import microddp

comms = microddp.init()
pathlib.Path(sys.argv[1], f"{comms.rank}.pid").write_text("")
comms.barrier()
comms.print("sitting")
if comms.rank == 1:
    time.sleep(1000)
comms.all_reduce(torch.ones(1))
"""


def find(mark, words):
    """The processes of a job whose command line has these words."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and words in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


@needs_hosts
@pytest.mark.parametrize(
    ("victim", "number", "status"),
    [
        ("microddp.hosts", signal.SIGTERM, 128 + signal.SIGTERM),
        ("microddp.hosts", signal.SIGINT, 128 + signal.SIGINT),
        ("microddp.hosts", signal.SIGKILL, -signal.SIGKILL),
        ("keeper.py", signal.SIGKILL, 128 + signal.SIGKILL),
        ("stand-in", signal.SIGKILL, 128 + signal.SIGKILL),
        ("agent", signal.SIGKILL, 128 + signal.SIGKILL),
        ("job.py", signal.SIGKILL, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value).split(".")[-1]),
)
def test_nothing_is_left_whatever_is_killed(tmp_path, victim, number, status):
    script, mark = tmp_path / "job.py", uuid.uuid4().hex
    script.write_text(SITS)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the tests run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]  # as nohup has it
    command += [sys.executable, "-m", "microddp.hosts", "--link", "100mbit", "--", script, tmp_path]
    job = subprocess.Popen(
        command,
        env={**os.environ, "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with job:
        while job.stdout.readline() not in ("sitting\n", ""):
            pass
        parent = psutil.Process(job.pid)
        stand_ins = [each for each in parent.children() if "keeper.py" not in each.cmdline()[1]]
        found = {
            "microddp.hosts": [parent],
            "keeper.py": find(mark, "keeper.py"),
            "stand-in": stand_ins,
            "agent": stand_ins[0].children(),
            "job.py": [each for each in find(mark, "job.py") if "-u" in each.cmdline()],
        }[victim]
        start = time.monotonic()
        job.send_signal(signal.SIGHUP)
        # The first of those that match: the keeper, and the stand-in of host 0 and its agent.
        found[0].send_signal(number)
        assert job.wait(40) == status
        assert left(mark, seconds=2) == []
        print(f"{victim} {number.name}: nothing left after {time.monotonic() - start:.1f} s")


@needs_hosts
def test_nothing_is_left_when_the_shell_goes(tmp_path):
    """A terminal that closes sends SIGHUP to all that it shows."""
    script, mark = tmp_path / "job.py", uuid.uuid4().hex
    script.write_text(SITS)
    line = f"{sys.executable} -m microddp.hosts --link 100mbit -- {script} {tmp_path}; true"
    with subprocess.Popen(
        ["sh", "-c", line],
        env={**os.environ, "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
    ) as shell:
        while shell.stdout.readline() not in ("sitting\n", ""):
            pass
        os.killpg(shell.pid, signal.SIGHUP)
        shell.wait(10)
        assert left(mark, seconds=20) == []
