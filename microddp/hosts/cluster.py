"""A cluster in a box: several hosts on one machine, each with a link of known speed.

Not a simulation: processes and messages are real. ``keeper.py`` says how links get their speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn, Self

from microddp.hosts import namespaces
from microddp.hosts.link import Box, Link, Uplink

MOST = 254  # hosts: that many have an address
KEEPER = str(Path(__file__).with_name("keeper.py"))


class Cluster:
    """Hosts that exist until ``close()``, or until this process ends, in whatever way.

    Attributes:
        box: the hosts and their links, as they are at the start.
        environment: variables to be added to the environment of programs on the hosts.

    Raises:
        ValueError: an uplink names a host that does not exist, or that has another uplink.
        RuntimeError: the machine has or allows no network namespaces, or no such links. The
            message says why, and what helps.
    """

    def __init__(self, links: Sequence[Link], uplinks: Sequence[Uplink] = ()) -> None:
        if not 0 < len(links) <= MOST:
            raise ValueError(f"expected 1 to {MOST} hosts, got {len(links)}")
        box = Box(tuple(links), 0, tuple(uplinks))  # cores: as the keeper counts them
        wanted = [json.dumps([asdict(each) for each in kind]) for kind in (links, uplinks)]
        # Without PyTorch and outside of the terminal's process group: Ctrl-C is for the job.
        self._keeper = subprocess.Popen(
            [sys.executable, KEEPER, *wanted],
            env=os.environ | {"PYTHONSAFEPATH": ""},  # it imports the files beside it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._to_keeper, self._from_keeper = self._keeper.stdin, self._keeper.stdout
        answer = json.loads(self._from_keeper.readline() or '{"error": "see above"}')
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
        """Return what to put before a command to run it on a host.

        The program so started stays outside, passes signals on, and ends as the command does. The
        command ends with it.
        """
        return [sys.executable, namespaces.__file__, *map(str, self.processes(host))]

    def processes(self, host: int) -> tuple[int, int]:
        """Return the first process on all hosts, and the first on this one: the way in."""
        return self._first, self._hosts[host]

    def stand_in(self, host: int, run: Callable[[], int]) -> NoReturn:
        """In a child of this process, call ``run`` on a host, and end with its exit status.

        The child stays outside, as a program does that :meth:`on` starts. ``run`` begins with all
        that has been imported here.
        """
        self._to_keeper.close()  # only the parent keeps the hosts
        namespaces.end(namespaces.enter(*self.processes(host), run))

    def address(self, host: int) -> str:
        """Return the address at which the others reach a host."""
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
        print(json.dumps([name, host]), file=self._to_keeper, flush=True)
        namespaces.granted(self._from_keeper.readline().strip())

    def close(self) -> None:
        """End the hosts and all that runs on them; return when they are gone."""
        self._to_keeper.close()
        self._keeper.wait()
        self._from_keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
