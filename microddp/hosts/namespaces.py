"""Hosts in a box: network namespaces whose links the kernel shapes, and the way into them.

A program of its own, run by its path, so that it starts without PyTorch:

    namespaces.py keep LINKS              build the hosts; keep them until standard input closes
    namespaces.py enter KEEPER HOST ...   run a command on a host, and end as it does

and :func:`change_link` for what runs on a host.

``keep`` unshares the namespaces of users (unless root calls), processes, mounts and networks. Its
child is the first process in them and the switch: a bridge. Each host is a child of that child,
with a network of its own, joined to the bridge by a pair of devices. A token bucket at each end
holds back what goes through. When the first process of a process namespace ends, the kernel kills
all others in it, and with the last process go namespaces and devices: nothing needs to be
cleaned up, whatever was killed. What ``enter`` starts is in there too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pyroute2 import IPRoute

NETWORK = "10.77.0"  # seen by nobody but the hosts
INTERFACE = "eth0"  # a host's end of its link
COUNTER = "\0microddp-link"  # where a host takes wishes; such a name is known on that host only
MTU = 9000  # bytes; clusters use such frames, and their headers take 0.7 % of the link
# Bytes. What all others have under way to one host must find room, or is sent twice.
QUEUE = 1 << 26
HANDLES = itertools.count(0x10000, 0x10000)  # names of queues: another one for each
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HOW_TO_ALLOW = (
    "Run as root, or allow them: sysctl -w user.max_user_namespaces=10000; on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --privileged"
)


class Refused(Exception):
    """The machine cannot do this; the message says why, and what helps."""


def address(host: int) -> str:
    """The address of a host, counted from 0."""
    return f"{NETWORK}.{host + 1}"


def _call(name: str, *arguments: object) -> None:
    """A function of the C library that returns 0 if all is well."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def keep(links: list[dict[str, float]]) -> None:
    """Build the hosts, write one line of JSON about them, and keep them until stdin closes."""
    if sys.platform != "linux":
        raise Refused(f"hosts in a box are Linux's network namespaces, this is {sys.platform}")
    with _allowed():
        _leave_the_machine()
    told, tell = os.pipe()
    first = os.fork()
    if first == 0:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(told)
        try:
            switch, hosts, lines = _be_the_switch(links)
        except Exception as error:
            _send(tell, {"error": _story(error)})
            os._exit(1)
        _send(tell, {"hosts": hosts, "cores": len(os.sched_getaffinity(0))})
        _serve(switch, lines)
        os._exit(0)
    os.close(tell)
    with open(told) as answer:
        message = json.loads(answer.readline() or '{"error": "the hosts died as they started"}')
    print(json.dumps({**message, "first": first}), flush=True)
    os.waitpid(first, 0)  # returns when all processes in there are gone


def change_link(bits_per_second: float) -> None:
    """Give the host that this process runs on a link of another speed, at both ends.

    What waits in the link's queues is lost, and sent again by whoever sent it. The delay stays.

    Raises:
        OSError: this process is on no such host, or its host is gone.
        RuntimeError: the kernel refused; the message says what.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(COUNTER)
        line.send(str(bits_per_second).encode())
        answer = line.recv(1000).decode()
    if answer != "done":
        raise RuntimeError(answer or "the host died")


def _story(error: Exception) -> str:
    return str(error) if isinstance(error, Refused) else repr(error)


def _send(pipe: int, message: dict[str, object]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")
    os.close(pipe)


def _leave_the_machine() -> None:
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS
    _call("unshare", flags if user == 0 else flags | CLONE_NEWUSER)
    if user != 0:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        who = "root" if os.getuid() == 0 else f"user {os.getuid()}"
        raise Refused(
            f"this machine refuses {who} network namespaces ({error}). {HOW_TO_ALLOW}"
        ) from error


def _be_the_switch(
    links: list[dict[str, float]],
) -> tuple[IPRoute, list[int], dict[socket.socket, int]]:
    """Build the network: the process of each host, and for the line to each host its port."""
    from pyroute2 import IPRoute

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is orphaned in here
    with _allowed():
        _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        _name_the_hosts(len(links))
        switch = IPRoute()
        switch.link("add", ifname="switch", kind="bridge")
    bridge = switch.link_lookup(ifname="switch")[0]
    switch.link("set", index=bridge, state="up")
    cores = sorted(os.sched_getaffinity(0))
    hosts, lines = [], {}
    for number, link in enumerate(links):
        ours, theirs = socket.socketpair()
        host = os.fork()
        if host == 0:
            ours.close()
            _be_a_host(number, link, _share(cores, number, len(links)), theirs)
        theirs.close()
        ours.recv(1)  # its network is there
        port, peer = f"port{number}", {"ifname": INTERFACE, "net_ns_pid": host}
        switch.link("add", ifname=port, kind="veth", peer=peer)
        index = switch.link_lookup(ifname=port)[0]
        switch.link("set", index=index, master=bridge)
        _shape(switch, index, link["bits_per_second"])
        ours.send(b"1")
        hosts.append(host)
        lines[ours] = index
    for line in lines:
        if (answer := line.recv(1000)) != b"ready":
            raise Refused(answer.decode() or "a host died as it started")
    return switch, hosts, lines


def _serve(switch: IPRoute, lines: dict[socket.socket, int]) -> None:
    """Shape the ports as hosts ask for it, until standard input closes."""
    watched: list[int | socket.socket] = [0, *lines]
    while 0 not in (ready := select.select(watched, [], [])[0]):
        for line in lines.keys() & ready:
            if wish := line.recv(100):
                line.send(_answer(switch, lines[line], wish))
            else:  # the host is gone
                watched.remove(line)


def _answer(network: IPRoute, index: int, wish: bytes, delay: float = 0.0) -> bytes:
    """Shape a device to as many bits a second as are wished."""
    try:
        _shape(network, index, float(wish), delay)
    except Exception as error:
        return _story(error).encode()
    return b"done"


def _name_the_hosts(count: int) -> None:
    """Let addresses have names in here, which torchrun asks for; there is nobody else to ask."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("127.0.0.1 localhost\n::1 localhost\n")
        for host in range(count):
            file.write(f"{address(host)} host{host}\n::ffff:{address(host)} host{host}\n")
        file.flush()
        os.chmod(file.name, 0o644)
        _call("mount", file.name.encode(), b"/etc/hosts", None, MS_BIND, None)


def _share(cores: list[int], host: int, hosts: int) -> list[int]:
    """The cores of a host: its own, while there are enough."""
    each = len(cores) // hosts
    return cores[host * each : (host + 1) * each] or [cores[host % len(cores)]]


def _be_a_host(number: int, link: dict[str, float], cores: list[int], line: socket.socket) -> None:
    """Have a network, set its end of the link up, and stay, to change it as is wished."""
    from pyroute2 import IPRoute

    try:
        os.sched_setaffinity(0, cores)
        _call("unshare", CLONE_NEWNET)
        line.send(b"1")
        line.recv(1)
        here = IPRoute()
        index = _join(here, number, link)
        counter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        counter.bind(COUNTER)
        counter.listen()
        line.send(b"ready")
    except Exception as error:
        line.send(_story(error).encode())
        os._exit(1)
    while True:
        caller, _ = counter.accept()
        with caller, contextlib.suppress(OSError):  # a caller that is gone
            wish = caller.recv(100)
            answer = _answer(here, index, wish, link["delay"])
            if answer == b"done":
                line.send(wish)
                answer = line.recv(1000)
            caller.send(answer)


def _join(here: IPRoute, number: int, link: dict[str, float]) -> int:
    """Set a host's devices up; returns the index of its end of the link."""
    here.link("set", index=here.link_lookup(ifname="lo")[0], state="up")
    index: int = here.link_lookup(ifname=INTERFACE)[0]
    here.addr("add", index=index, address=address(number), prefixlen=24)
    _shape(here, index, link["bits_per_second"], link["delay"])
    return index


def _shape(network: IPRoute, index: int, bits_per_second: float, delay: float = 0.0) -> None:
    """Set a device up to send so many bits a second, each so many seconds later.

    A bucket takes the place of an older one. If that were only changed, a piece that waits in it
    and is larger than the new burst would wait for ever, and all behind it.
    """
    largest = _largest(bits_per_second)
    network.link("set", index=index, mtu=MTU, gso_max_size=largest, state="up")
    bucket = next(HANDLES)
    rate = {"rate": round(bits_per_second / 8), "burst": _burst(bits_per_second), "limit": QUEUE}
    with _known("tbf, the token bucket, so links have no speed"):
        network.tc("replace", "tbf", index, handle=bucket, **rate)
    if delay:
        later = {"delay": round(delay * 1e6), "limit": 10**6}  # us, packets
        with _known("netem, so links have no delay (--delay)"):
            network.tc("add", "netem", index, handle=next(HANDLES), parent=bucket, **later)


@contextlib.contextmanager
def _known(kind: str) -> Iterator[None]:
    """Say what this kernel does not have, of a kind of queue that it may not know."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise
        raise Refused(f"this kernel has no {kind}") from error


def _largest(bits_per_second: float) -> int:
    """Bytes that the kernel may hand to the device as one piece; each piece costs the cores time.

    Measured at 1 Gbit/s, 4 hosts on 2 cores: with pieces of 16 KiB the cores are what limits.
    """
    return min(1 << 16, max(MTU, round(bits_per_second / 8 * 520e-6)))


def _burst(bits_per_second: float) -> int:
    """Bytes that a full token bucket lets through at once.

    As few as possible, since a message of that size is not held back at all; but a piece must fit
    in with its headers, and what the link carries in the time by which the kernel's timers may be
    late: with 130 us, 1 Gbit/s lost 10 %.
    """
    return max(2 * MTU, _largest(bits_per_second) + 4096, round(bits_per_second / 8 * 260e-6))


def enter(keeper: int, host: int, run: Callable[[], int]) -> int:
    """Call ``run`` in a child of this process that is on a host, and stay outside.

    Signals are passed on. Returns the exit status that ``run`` gave, or minus the signal that ended
    it. This process then cannot leave the namespaces it has entered half.
    """
    folder = os.getcwd()
    flags = CLONE_NEWPID | CLONE_NEWNS | (0 if os.getuid() == 0 else CLONE_NEWUSER)
    process = os.pidfd_open(keeper)
    _call("setns", process, flags)
    with open(f"/proc/{host}/ns/net") as network:
        _call("setns", network.fileno(), CLONE_NEWNET)
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.sched_setaffinity(0, os.sched_getaffinity(host))
        os._exit(run())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _execute(command: list[str]) -> int:
    """Become the command, or say why not."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


def end(status: int) -> NoReturn:
    """End this process with an exit status, or, if that is negative, by that signal."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):  # which nobody can handle
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def main(arguments: list[str]) -> None:
    """Be one of the two programs."""
    if arguments[0] == "keep":
        try:
            keep(json.loads(arguments[1]))
        except Refused as error:
            print(json.dumps({"error": str(error)}), flush=True)
    else:
        end(enter(int(arguments[1]), int(arguments[2]), lambda: _execute(arguments[3:])))


if __name__ == "__main__":
    main(sys.argv[1:])
