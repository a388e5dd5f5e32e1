"""A cluster in a box: several hosts on one machine, each with a link of known speed.

Not a simulation: what the hosts run are ordinary processes, their messages are real, and the kernel
lets them through at the speed of the link. See ``namespaces.py`` for how.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NoReturn, Self

from microddp.hosts import namespaces
from microddp.hosts.link import Box, Link, Uplink


class Cluster:
    """Hosts that are there until ``close()``, or until this process ends in whatever way.

    Attributes:
        links: one for each host.
        box: the same, with the uplinks that hosts share; as it was in the beginning.
        environment: what programs on the hosts need to know, to be added to their environment.

    Raises:
        ValueError: an uplink is of a host that there is not, or that has another one.
        RuntimeError: the machine has or allows no network namespaces, or no such links. The
            message says why, and what helps.
    """

    def __init__(self, links: Sequence[Link], uplinks: Sequence[Uplink] = ()) -> None:
        self.links = list(links)
        box = Box(tuple(links), 0, tuple(uplinks))  # cores: as the keeper counts them
        wanted = [json.dumps([asdict(each) for each in kind]) for kind in (links, uplinks)]
        # Without PyTorch and outside of the terminal's process group: Ctrl-C is for the job.
        self._keeper = subprocess.Popen(
            [sys.executable, namespaces.__file__, "keep", *wanted],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        answer = json.loads(self._keeper.stdout.readline() or '{"error": "see above"}')
        if "error" in answer:
            self.close()
            raise RuntimeError(f"no hosts in a box: {answer['error']}")
        self._first, self._hosts = answer["first"], answer["hosts"]
        self.box = replace(box, cores=answer["cores"])
        self.environment = self.box.as_environment() | {
            "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
            "NCCL_SOCKET_IFNAME": namespaces.INTERFACE,
        }

    def on(self, host: int) -> list[str]:
        """What to put before a command that is to run on a host.

        The program so started stays outside, passes signals on, ends as the command does, and the
        command ends with it.
        """
        into = ["enter", *map(str, self.processes(host))]
        return [sys.executable, namespaces.__file__, *into]

    def processes(self, host: int) -> tuple[int, int]:
        """The first process on all hosts and the first on this one: by them a host is entered."""
        return self._first, self._hosts[host]

    def stand_in(self, host: int, run: Callable[[], int]) -> NoReturn:
        """Let a child of this process stand outside for ``run``, which is called on a host.

        It ends as what it stands for, as a program does that :meth:`on` starts. ``run`` begins with
        all that has been imported here.
        """
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()  # only the parent keeps the hosts
        namespaces.end(namespaces.enter(*self.processes(host), run))

    def address(self, host: int) -> str:
        """Where the others reach a host."""
        return namespaces.address(host)

    def cut(self, host: int) -> None:
        """Take a host's link down, until :meth:`mend`.

        :meth:`~microddp.hosts.link.Box.cut` does that from a host.

        Raises:
            ValueError: there is no such host.
            OSError: the hosts are gone.
        """
        self._ask("cut", host)

    def mend(self, host: int) -> None:
        """Bring a host's link up again. Errors are those of :meth:`cut`."""
        self._ask("mend", host)

    def _ask(self, name: str, host: int) -> None:
        self.box.check(host)
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(json.dumps([name, host]), file=self._keeper.stdin, flush=True)
        namespaces.granted(self._keeper.stdout.readline().strip())

    def close(self) -> None:
        """End all that runs on the hosts, and the hosts; returns when they are gone."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
