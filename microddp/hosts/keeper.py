"""The keeper of hosts in a box: network namespaces whose links the kernel shapes.

A program of its own, run by its path, so that it starts without PyTorch::

    keeper.py LINKS UPLINKS   build the hosts; keep them until standard input closes

It unshares the namespaces of users (unless root calls), processes, mounts and networks. Its
child is the first process in them and the switch: a bridge. Each host is a child of that child,
with a network of its own, joined to the bridge by a pair of devices. A token bucket at each end
holds back what goes through. Hosts that share an uplink are joined to a bridge of their own, and
this to the first by such a pair. When the first process of a process namespace ends, the kernel
kills all others in it, and with the last process go namespaces and devices: nothing needs to be
cleaned up, whatever was killed. Programs that ``namespaces.py`` starts are in there, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyroute2 import IPRoute

    from microddp.hosts import namespaces
    from microddp.hosts.shaping import MTU, Refused, shape
else:  # run by its path, it is in no package: these are the files beside it
    import namespaces
    from shaping import MTU, Refused, shape

MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
HOW_TO_ALLOW = (
    "Run as root, or allow them: `sysctl -w user.max_user_namespaces=10000`; on Ubuntu also "
    "`kernel.apparmor_restrict_unprivileged_userns=0`; in Docker `--privileged`"
)


def keep(links: list[dict[str, float]], uplinks: list[dict[str, Any]]) -> None:
    """Build the hosts, write one line of JSON about them, and keep them until stdin closes.

    Meanwhile each line that comes in is a wish, as for ``namespaces.ask``; a line answers it.
    """
    if sys.platform != "linux":
        raise Refused(f"hosts in a box are Linux's network namespaces, this is {sys.platform}")
    with _allowed():
        _leave_the_machine()
    told, tell = os.pipe()
    first = os.fork()
    if first == 0:
        namespaces.call("prctl", namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
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


def _story(error: Exception) -> str:
    return str(error) if isinstance(error, Refused) else repr(error)


def _send(pipe: int, message: dict[str, object]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")
    os.close(pipe)


def _leave_the_machine() -> None:
    user, group = os.getuid(), os.getgid()
    flags = namespaces.CLONE_NEWPID | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS
    namespaces.call("unshare", flags if user == 0 else flags | namespaces.CLONE_NEWUSER)
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
        hosts: number of the first process on each host.
    """

    def __init__(self, count: int) -> None:
        from pyroute2 import IPRoute

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is orphaned in here
        with _allowed():
            namespaces.call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            namespaces.call("mount", b"proc", b"/proc", b"proc", 0, None)
            _name_the_hosts(count)
            self._switch = IPRoute()
            self._bridge = self._add_bridge("switch")
        cores = sorted(os.sched_getaffinity(0))
        self._here = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.hosts: list[int] = []
        self._counters: list[socket.socket] = []
        self._ports: list[int] = []  # the switch's devices, one to each host
        self._ends: list[tuple[IPRoute, int]] = []  # each host's device
        self._links: list[dict[str, float]] = [{}] * count  # at present
        # The uplink and the devices of each rack, by its hosts.
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

        # A socket stays in the network in which it was opened.
        namespaces.call("unshare", namespaces.CLONE_NEWNET)
        host = os.fork()
        if host == 0:
            while True:
                signal.pause()
        os.sched_setaffinity(host, cores)
        inside, counter = IPRoute(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        counter.bind(namespaces.COUNTER)
        namespaces.call("setns", self._here, namespaces.CLONE_NEWNET)
        name, peer = (
            f"port{number}",
            {"ifname": namespaces.INTERFACE, "net_ns_pid": host, "mtu": MTU},
        )
        self._switch.link("add", ifname=name, kind="veth", peer=peer, mtu=MTU)
        port = self._switch.link_lookup(ifname=name)[0]
        self._switch.link("set", index=port, master=self._bridge, state="up")
        end = inside.link_lookup(ifname=namespaces.INTERFACE)[0]
        inside.addr("add", index=end, address=namespaces.address(number), prefixlen=24)
        for index in (end, inside.link_lookup(ifname="lo")[0]):
            inside.link("set", index=index, state="up")
        self.hosts.append(host)
        self._counters.append(counter)
        self._ports.append(port)
        self._ends.append((inside, end))

    def serve(self) -> None:
        """Answer wishes, from hosts and from standard input, until that closes."""
        lines: dict[int, Any] = {0: 0} | {line.fileno(): line for line in self._counters}
        poll = select.poll()  # select() knows no number above 1023
        for number in lines:
            poll.register(number, select.POLLIN)
        while True:
            for line in [lines[number] for number, _ in poll.poll()]:
                if line != 0:
                    wish, caller = line.recvfrom(namespaces.LONGEST)
                    with contextlib.suppress(OSError):  # a caller that is gone
                        line.sendto(self._answer(wish), caller)
                elif wish := os.read(0, namespaces.LONGEST):
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
        """Change the links that differ from these; messages on the others are left alone."""
        for host, link in enumerate(links):
            if self._links[host] != link:
                self._links[host] = {}  # unknown, should the kernel refuse
                inside, end = self._ends[host]
                shape(inside, end, **link)
                shape(self._switch, self._ports[host], link["bits_per_second"])
                self._links[host] = link
        wanted = {tuple(uplink["hosts"]): uplink["link"] for uplink in uplinks}
        for hosts, (link, _) in list(self._racks.items()):
            if wanted.get(hosts) != link:
                self._remove_rack(hosts)
        for hosts in wanted.keys() - self._racks.keys():
            self._add_rack(hosts, wanted[hosts])

    def _add_rack(self, hosts: tuple[int, ...], link: dict[str, float]) -> None:
        """Join some hosts to a switch of their own, and this switch to the first."""
        name = f"rack{hosts[0]}"
        rack, ends = self._add_bridge(name), [f"{name}up", f"{name}down"]
        peer = {"ifname": ends[1], "mtu": MTU}
        self._switch.link("add", ifname=ends[0], kind="veth", peer=peer, mtu=MTU)
        indices = [self._switch.link_lookup(ifname=end)[0] for end in ends]
        devices = [rack, indices[0]]
        self._racks[hosts] = {}, devices  # not as wanted, should the kernel refuse
        for index, bridge in zip(indices, (rack, self._bridge), strict=True):
            self._switch.link("set", index=index, master=bridge, state="up")
            shape(self._switch, index, **link)
        for host in hosts:
            self._switch.link("set", index=self._ports[host], master=rack)
        self._racks[hosts] = link, devices

    def _remove_rack(self, hosts: tuple[int, ...]) -> None:
        for host in hosts:
            self._switch.link("set", index=self._ports[host], master=self._bridge)
        for index in self._racks.pop(hosts)[1]:
            self._switch.link("del", index=index)


def _name_the_hosts(count: int) -> None:
    """Give the addresses names, which torchrun asks for; nobody else in here would know any."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("127.0.0.1 localhost\n::1 localhost\n")
        for host in range(count):
            address = namespaces.address(host)
            file.write(f"{address} host{host}\n::ffff:{address} host{host}\n")
        file.flush()
        os.chmod(file.name, 0o644)
        namespaces.call("mount", file.name.encode(), b"/etc/hosts", None, MS_BIND, None)


def _share(cores: list[int], host: int, hosts: int) -> list[int]:
    """Return the cores of a host: cores of its own, while there are enough."""
    each = len(cores) // hosts
    return cores[host * each : (host + 1) * each] or [cores[host % len(cores)]]


if __name__ == "__main__":
    try:
        keep(*map(json.loads, sys.argv[1:]))
    except Refused as error:
        print(json.dumps({"error": str(error)}), flush=True)
