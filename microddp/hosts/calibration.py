"""Measurement of the links of hosts in a box: the speed they have, beside the speed asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass

from microddp.hosts import sockets
from microddp.hosts.cluster import Cluster
from microddp.hosts.link import human_bits
from microddp.report import human_seconds, table


@dataclass(frozen=True)
class Measured:
    """The measured way from a host to the next.

    Attributes:
        asked: speed of the slowest link on the way, bits a second.
        bits_per_second: measured speed of large messages, with their start left out.
        round_trip: seconds for one byte there and one back.
    """

    asked: float
    bits_per_second: float
    round_trip: float


def calibrate(cluster: Cluster) -> list[Measured]:
    """Measure from host 0 to 1, ... and from the last to 0: each link once in each direction.

    One host alone sends nothing over its link, so nothing is measured.

    Raises:
        RuntimeError: the hosts do not reach each other.
    """
    count = len(cluster.box.links)
    hosts = range(count if count > 1 else 0)
    with ExitStack() as stack:
        programs, asked = [], []
        for host in hosts:
            following = (host + 1) % len(hosts)
            asked.append(cluster.box.bits_per_second(host, following))
            addresses = cluster.address(host), cluster.address(following)
            program = subprocess.Popen(
                [*cluster.on(host), sys.executable, sockets.__file__, *addresses, str(asked[-1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the caller, who ends them
            )
            programs.append(stack.enter_context(program))
            # All, before any is waited for: a program says so if the next one goes.
            stack.callback(lambda: [*map(subprocess.Popen.kill, programs)])
        for program in programs:
            _line(program)  # it listens
        results = []
        for program, bits_per_second in zip(programs, asked, strict=True):
            print(file=program.stdin, flush=True)
            results.append(Measured(bits_per_second, *json.loads(_line(program))))
        # They end by themselves. If they were killed, each would leave an orphan for this machine's
        # init to reap, which some do only every two seconds, and the hosts could not end before.
        for program in programs:
            program.wait()
        return results


def _line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        raise RuntimeError(f"the links could not be measured, status {program.wait()}")
    return line


def calibration_table(cluster: Cluster) -> str:
    """Return the results of :func:`calibrate` as a table of text, or that there is one host."""
    if len(cluster.box.links) == 1:
        return "One host: nothing goes over its link."
    rows = []
    for host, link in enumerate(calibrate(cluster)):
        speeds = human_bits(link.asked), human_bits(link.bits_per_second)
        share = f"{link.bits_per_second / link.asked:.3f}"
        following = (host + 1) % len(cluster.box.links)
        rows.append((f"{host} -> {following}", *speeds, share, human_seconds(link.round_trip)))
    return table(rows, ["hosts", "link", "measured", "measured / link", "round trip"])
