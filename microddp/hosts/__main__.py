"""Run a job on several hosts in this one machine, each with a link of its own.

python -m microddp.hosts --hosts 4 --link 1gbit -- chapters/02_all_reduce.py
python -m microddp.hosts --hosts 2 --link 100mbit --link-of 1=50mbit -- -m microddp.bench allreduce
python -m microddp.hosts --hosts 4 --uplink 2,3=1gbit  # hosts 2 and 3 behind a switch of their own
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkProcess

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun

from microddp.hosts.calibration import calibration_table
from microddp.hosts.cluster import Cluster
from microddp.hosts.link import Link, Uplink
from microddp.hosts.namespaces import FORWARDED, address
from microddp.results import positive

PORT = 29500  # free on every host: its network is new
FORK = multiprocessing.get_context("fork")
GRACE = 5.0  # seconds for the other agents to end by themselves, and again when they are told to


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status of the first agent that failed, or 0."""
    options = _parse(arguments)
    status = 2
    try:
        cluster = Cluster(options.links, options.uplinks)
        status = 1
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs, cluster:
            print(calibration_table(cluster), flush=True)
            job = [f"--log-dir={logs}", *options.job]  # torchrun's default folder would stay
            return run(cluster, options.ranks_per_host, job) if options.job else 0
    except (RuntimeError, ValueError) as error:
        print(f"microddp.hosts: error: {error}", file=sys.stderr)
        return status
    except KeyboardInterrupt:  # while hosts start, or links are measured
        print("microddp.hosts: stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m microddp.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=positive(int), default=2, help="default: 2")
    parser.add_argument("--ranks-per-host", type=positive(int), default=1, help="default: 1")
    parser.add_argument("--link", default="1gbit", help="of each host, both ways (default: 1gbit)")
    parser.add_argument("--delay", default="", help="of each link, as 1ms, where --link has none")
    for name, metavar, example in (
        ("--link-of", "HOST=LINK", "as 3=100mbit or 3=1gbit+5ms"),
        ("--uplink", "HOSTS=LINK", "that hosts share, as 2,3=1gbit"),
    ):
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=example)
    parser.add_argument(
        "job",
        nargs="*",
        metavar="-- SCRIPT ARGUMENTS",
        help="or -m MODULE ARGUMENTS, as for torchrun; none: only measure the links",
    )
    options = parser.parse_args(arguments)
    try:
        options.links = links(options.hosts, options.link, options.delay, options.link_of)
        options.uplinks = [Uplink.parse(text) for text in options.uplink]
    except ValueError as error:
        parser.error(str(error))
    return options


def links(hosts: int, link: str, delay: str, of: Sequence[str]) -> list[Link]:
    """Read the link of each host from the options of the command line.

    Args:
        hosts: number of hosts.
        link: speed of every link, as ``Link.parse`` reads it.
        delay: delay of every link, as ``"1ms"``; empty: as ``link`` says.
        of: exceptions, as ``"3=100mbit"``.

    Raises:
        ValueError: a speed or a delay cannot be read, or there is no such host.
    """
    result = [Link.parse(f"{link}+{delay}" if delay else link)] * hosts
    for exception in of:
        host, _, rate = exception.partition("=")
        if not host.isdecimal() or int(host) >= hosts:
            raise ValueError(f"expected HOST=LINK with a host from 0 to {hosts - 1}: {exception!r}")
        result[int(host)] = Link.parse(rate, result[int(host)].delay)
    return result


def run(cluster: Cluster, ranks_per_host: int, job: Sequence[str]) -> int:
    """Be torchrun on each host, pass signals on, and wait.

    Returns:
        The exit status of the first agent that did not end well, as a shell would give it, or 0.
    """
    agents: list[ForkProcess] = []
    signals: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        signals.append(number)
        for agent in agents:
            if agent.exitcode is None and agent.pid is not None:
                with suppress(ProcessLookupError):  # it may just have ended
                    os.kill(agent.pid, number)

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, pass_on)
    pipe = others, theirs = os.pipe()  # all agents but the first hold `theirs` until they end
    for host in range(len(cluster.box.links)):
        # Forked, and not started: the agents share one import of PyTorch. Signals are held back
        # meanwhile, so that a child does not handle one that was sent to this process.
        agent = FORK.Process(target=_stand_in, args=(cluster, host, ranks_per_host, job, pipe))
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        if not signals:
            agent.start()
            agents.append(agent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.close(others)
    os.close(theirs)
    failed: list[int] = []
    deadline, told = float("inf"), False
    while running := [agent for agent in agents if agent.exitcode is None]:
        failed += [agent.exitcode for agent in agents if agent.exitcode and not failed]
        if deadline == float("inf") and (failed or signals):
            deadline = time.monotonic() + GRACE
        if time.monotonic() > deadline:
            if told:
                break  # closing the cluster ends them
            for agent in running:
                agent.terminate()
            deadline, told = time.monotonic() + GRACE, True
        time.sleep(0.02)
    failed += [agent.exitcode for agent in agents if agent.exitcode]
    if signals:
        return 128 + signals[0]
    status = failed[0] if failed else 0
    return status if status >= 0 else 128 - status


def _stand_in(
    cluster: Cluster, host: int, ranks_per_host: int, job: Sequence[str], pipe: tuple[int, int]
) -> None:
    others, theirs = pipe
    if host == 0:
        os.close(theirs)
    os.setsid()  # Ctrl-C comes to the parent only, to be passed on once
    arguments = [
        *(f"--nnodes={len(cluster.box.links)}", f"--node-rank={host}"),
        *(f"--master-addr={cluster.address(0)}", f"--master-port={PORT}"),
        f"--local-addr={cluster.address(host)}",
        f"--nproc-per-node={ranks_per_host}",
        *job,
    ]
    os.environ.update(cluster.environment)
    cluster.stand_in(host, partial(_be_torchrun, arguments, others if host == 0 else None))


def _be_torchrun(arguments: Sequence[str], others: int | None) -> int:
    """Run ``python -m torch.distributed.run``; return its exit status.

    At their end, too, agents meet in a store of the first one's process, which therefore stays
    until the pipe that the ``others`` hold closes.
    """
    status, _store = 0, None
    try:
        if others is not None:
            where = address(0), PORT
            _store = TCPStore(*where, None, True, multi_tenant=True, wait_for_workers=False)
        torchrun.main(arguments)
        if others is not None:
            os.read(others, 1)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
