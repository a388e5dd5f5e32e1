"""When a generation is complete: whom a new server need not wait for."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from ranks import free_address, run

from microddp.elastic import Members, meeting
from microddp.elastic.line import Line
from microddp.elastic.meeting import BEGIN, Meeting, is_gone
from microddp.elastic.messages import machine_name


def name(pid, machine=None):
    return f"{machine or machine_name()}-{pid}-abc123"


@pytest.fixture
def ended():
    """A process that has ended, and whose parent has not asked how."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while not is_gone(name(process.pid)):
            time.sleep(0.02)
        assert process.returncode is None
        yield process.pid


@pytest.fixture
def over():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


linux = pytest.mark.skipif(sys.platform != "linux", reason="it has a list of processes")


@linux
def test_who_is_gone(ended, over):
    assert is_gone(name(ended))
    assert is_gone(name(over))
    assert not is_gone(name(os.getpid()))
    assert not is_gone(name(over, "another-machine"))
    assert not is_gone("nobody")


def new_server(*members):
    """A server that a survivor has just started, to which all but the last member have come."""
    here = dict.fromkeys(members[:-1])
    return Meeting(1, b"", number=1, members=[*members], connected=dict(here), come=here)


@linux
def test_a_new_server_does_not_wait_for_a_process_that_has_ended(ended):
    assert new_server(name(os.getpid()), name(ended)).is_complete()


def test_a_new_server_waits_for_who_may_be_on_the_way(over):
    for late in (name(os.getppid()), name(over, "another-machine")):
        meeting = new_server(name(os.getpid()), late)
        assert not meeting.is_complete()
        meeting.began -= BEGIN + 0.1
        assert meeting.is_complete()


@linux
def test_all_who_live_are_waited_for(ended):
    meeting = new_server(name(os.getpid()), name(os.getppid()), name(ended))
    assert meeting.is_complete()
    del meeting.connected[name(os.getppid())], meeting.come[name(os.getppid())]
    assert not meeting.is_complete()


STARTS_A_SERVER = """
import os, socket, subprocess, sys
with socket.create_server(("127.0.0.1", 0)) as listening:
    handle = listening.fileno()
    server = [sys.executable, "-Es", sys.argv[1], str(handle), "1", str(os.getpid())]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    print(subprocess.Popen(server, pass_fds=[handle], **pipes).pid)
"""


@linux
def test_the_server_ends_with_who_started_it():
    command = [sys.executable, "-c", STARTS_A_SERVER, meeting.__file__]
    pid = int(subprocess.check_output(command, timeout=60))
    end = time.monotonic() + 20
    while not is_gone(name(pid)) and time.monotonic() < end:
        time.sleep(0.05)
    if not is_gone(name(pid)):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it is there after 20 seconds")


def tell_who_waits(address):
    """Also where the server is slow, as on a busy machine."""
    host, port = address.split(":")
    with Members(address) as member:
        member.meet(-1)
        line = Line((host, int(port)), b"x" * 32, "waits-1-aa", {"number": 0, "members": []}, 1)
        while not line.proven:
            line.messages(1)
        place = {"steps": -1, "address": host, "port": int(port), "machine": "other"}
        line.send({"come": place})
        while not member.others_wait():
            time.sleep(0.01)
        server = member._server.pid
        os.kill(server, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (server, signal.SIGCONT)).start()
        member.done()
    heard = []
    while not any("done" in message for message in heard):
        heard += line.messages(3)
    line.close()


def test_who_waits_is_told_that_the_job_is_over():
    run(tell_who_waits, 1, free_address(), join=False, environment={"MICRODDP_SECRET": "x" * 32})


def meet_over_ipv6(address):
    with Members(address, least=2) as member:
        total = torch.ones(1)
        member.meet(-1).comms.all_reduce(total)
        member.done()
        return total.item()


def test_members_meet_over_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
            port = listening.getsockname()[1]
    except OSError as error:
        pytest.skip(f"needs IPv6: {error}")
    environment = {"MICRODDP_SECRET": "x" * 32}
    address = f"[::1]:{port}"
    assert run(meet_over_ipv6, 2, address, join=False, environment=environment) == [2.0] * 2
