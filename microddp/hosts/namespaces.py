"""Hosts in a box: network namespaces whose links the kernel shapes, and the way into them.

A program of its own, run by its path, so that it starts without PyTorch:

    namespaces.py keep LINKS UPLINKS      build the hosts; keep them until standard input closes
    namespaces.py enter KEEPER HOST ...   run a command on a host, and end as it does

and :func:`ask` for what runs on a host and wishes for other links.

``keep`` unshares the namespaces of users (unless root calls), processes, mounts and networks. Its
child is the first process in them and the switch: a bridge. Each host is a child of that child,
with a network of its own, joined to the bridge by a pair of devices. A token bucket at each end
holds back what goes through. Hosts that share an uplink are joined to a bridge of their own, and
this to the first by such a pair. When the first process of a process namespace ends, the kernel
kills all others in it, and with the last process go namespaces and devices: nothing needs to be
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
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pyroute2 import IPRoute

NETWORK = "10.77.0"  # seen by nobody but the hosts
INTERFACE = "eth0"  # a host's end of its link
COUNTER = "\0microddp-links"  # where the switch takes wishes; on every host, and known there only
LONGEST = 1 << 16  # bytes of a wish
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


def keep(links: list[dict[str, float]], uplinks: list[dict[str, Any]]) -> None:
    """Build the hosts, write one line of JSON about them, and keep them until stdin closes.

    Meanwhile a line that comes in is a wish, as for :func:`ask`, and is answered with a line.
    """
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
            network = _Network(len(links))
            network.set_links(links, uplinks)
        except Exception as error:
            _send(tell, {"error": _story(error)})
            os._exit(1)
        _send(tell, {"hosts": network.hosts, "cores": len(os.sched_getaffinity(0))})
        network.serve()
        os._exit(0)
    os.close(tell)
    with open(told) as answer:
        message = json.loads(answer.readline() or '{"error": "the hosts died as they started"}')
    print(json.dumps({**message, "first": first}), flush=True)
    os.waitpid(first, 0)  # returns when all processes in there are gone


def ask(*wish: object) -> None:
    """Wish for something of the switch, from a process on a host.

    Args:
        wish: ``"set_links", links, uplinks``, ``"cut", host`` or ``"mend", host``.

    Raises:
        OSError: this process is on no such host.
        RuntimeError: the kernel refused; the message says what.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind("")  # a name that nobody else has, for the answer to find
        line.connect(COUNTER)
        line.send(json.dumps(wish).encode())
        granted(line.recv(LONGEST).decode())


def granted(answer: str) -> None:
    """Raise ``RuntimeError`` if the switch's answer says that a wish was not fulfilled."""
    if answer != "done":
        raise RuntimeError(answer or "the hosts died")


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


class _Network:
    """The switch, the hosts and what joins them: the first process in the namespaces.

    Attributes:
        hosts: the first process on each.
    """

    def __init__(self, count: int) -> None:
        from pyroute2 import IPRoute

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is orphaned in here
        with _allowed():
            _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            _call("mount", b"proc", b"/proc", b"proc", 0, None)
            _name_the_hosts(count)
            self._switch = IPRoute()
            self._bridge = self._add_bridge("switch")
        cores = sorted(os.sched_getaffinity(0))
        self._here = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.hosts: list[int] = []
        self._counters: list[socket.socket] = []
        self._ports: list[int] = []  # of the switch, to each host
        self._ends: list[tuple[IPRoute, int]] = []  # a host's own of its link
        self._links: list[dict[str, float]] = [{}] * count  # as they are
        # By hosts: the uplink, and devices, with which all of the rack goes.
        self._racks: dict[tuple[int, ...], tuple[dict[str, float], list[int]]] = {}
        for number in range(count):
            self._add_host(number, _share(cores, number, count))

    def _add_bridge(self, name: str) -> int:
        self._switch.link("add", ifname=name, kind="bridge", state="up")
        index: int = self._switch.link_lookup(ifname=name)[0]
        return index

    def _add_host(self, number: int, cores: list[int]) -> None:
        """Have a process stay in a network of its own, joined to the switch by a link."""
        from pyroute2 import IPRoute

        # What is opened in a network is of that network from then on.
        _call("unshare", CLONE_NEWNET)
        host = os.fork()
        if host == 0:
            while True:
                signal.pause()
        os.sched_setaffinity(host, cores)
        inside, counter = IPRoute(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        counter.bind(COUNTER)
        _call("setns", self._here, CLONE_NEWNET)
        name, peer = f"port{number}", {"ifname": INTERFACE, "net_ns_pid": host, "mtu": MTU}
        self._switch.link("add", ifname=name, kind="veth", peer=peer, mtu=MTU)
        port = self._switch.link_lookup(ifname=name)[0]
        self._switch.link("set", index=port, master=self._bridge, state="up")
        end = inside.link_lookup(ifname=INTERFACE)[0]
        inside.addr("add", index=end, address=address(number), prefixlen=24)
        for index in (end, inside.link_lookup(ifname="lo")[0]):
            inside.link("set", index=index, state="up")
        self.hosts.append(host)
        self._counters.append(counter)
        self._ports.append(port)
        self._ends.append((inside, end))

    def serve(self) -> None:
        """Fulfil what is wished, on a host or on standard input, until that closes."""
        lines: list[Any] = [0, *self._counters]
        while True:
            for line in select.select(lines, [], [])[0]:
                if line != 0:
                    wish, caller = line.recvfrom(LONGEST)
                    with contextlib.suppress(OSError):  # a caller that is gone
                        line.sendto(self._answer(wish), caller)
                elif wish := os.read(0, LONGEST):
                    os.write(1, self._answer(wish) + b"\n")
                else:
                    return

    def _answer(self, wish: bytes) -> bytes:
        can: dict[str, Callable[..., None]]
        can = {"set_links": self.set_links, "cut": self.cut, "mend": self.mend}
        try:
            name, *arguments = json.loads(wish)
            can[name](*arguments)
        except Exception as error:
            return _story(error).encode()
        return b"done"

    def cut(self, host: int) -> None:
        """Take a host's link down."""
        self._switch.link("set", index=self._ports[host], state="down")

    def mend(self, host: int) -> None:
        """Bring a host's link up."""
        self._switch.link("set", index=self._ports[host], state="up")

    def set_links(self, links: list[dict[str, float]], uplinks: list[dict[str, Any]]) -> None:
        """Change what is to be otherwise than it is, and leave the others' messages alone."""
        for host, link in enumerate(links):
            if self._links[host] != link:
                self._links[host] = {}  # unknown, should the kernel refuse
                inside, end = self._ends[host]
                _shape(inside, end, **link)
                _shape(self._switch, self._ports[host], link["bits_per_second"])
                self._links[host] = link
        wanted = {tuple(uplink["hosts"]): uplink["link"] for uplink in uplinks}
        for hosts, (link, _) in list(self._racks.items()):
            if wanted.get(hosts) != link:
                self._remove_rack(hosts)
        for hosts in wanted.keys() - self._racks.keys():
            self._add_rack(hosts, wanted[hosts])

    def _add_rack(self, hosts: tuple[int, ...], link: dict[str, float]) -> None:
        """Join some hosts to a switch of their own, and that to the first."""
        name = f"rack{hosts[0]}"
        rack, ends = self._add_bridge(name), [f"{name}up", f"{name}down"]
        peer = {"ifname": ends[1], "mtu": MTU}
        self._switch.link("add", ifname=ends[0], kind="veth", peer=peer, mtu=MTU)
        indices = [self._switch.link_lookup(ifname=end)[0] for end in ends]
        devices = [rack, indices[0]]
        self._racks[hosts] = {}, devices  # not as wanted, should the kernel refuse
        for index, bridge in zip(indices, (rack, self._bridge), strict=True):
            self._switch.link("set", index=index, master=bridge, state="up")
            _shape(self._switch, index, **link)
        for host in hosts:
            self._switch.link("set", index=self._ports[host], master=rack)
        self._racks[hosts] = link, devices

    def _remove_rack(self, hosts: tuple[int, ...]) -> None:
        for host in hosts:
            self._switch.link("set", index=self._ports[host], master=self._bridge)
        for index in self._racks.pop(hosts)[1]:
            self._switch.link("del", index=index)


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


def _shape(network: IPRoute, index: int, bits_per_second: float, delay: float = 0.0) -> None:
    """Set a device up to send so many bits a second, each so many seconds later.

    A bucket takes the place of an older one. If that were only changed, a piece that waits in it
    and is larger than the new burst would wait for ever, and all behind it.
    """
    largest = _largest(bits_per_second)
    network.link("set", index=index, gso_max_size=largest)
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
            keep(*map(json.loads, arguments[1:]))
        except Refused as error:
            print(json.dumps({"error": str(error)}), flush=True)
    else:
        end(enter(int(arguments[1]), int(arguments[2]), lambda: _execute(arguments[3:])))


if __name__ == "__main__":
    main(sys.argv[1:])
