"""Choose the ranks and hosts of the book's chapters, and write what pages say about them."""

import os
import re
import shlex
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from builds.other_build import both
from launcher.job import Agent, JobFailed
from launcher.kept import Kept
from lists.chapter_cards import head, read_chapter
from microddp.comms import Comms
from microddp.hosts import Box, Cluster, Link, calibration_table, links_of_this_job
from microddp.stage import Stage

# Enough for a ring to be a ring. Chapters measure times on as many of the ranks as have a core or a
# GPU of their own, and say so.
USUAL = 4
OF_ALL_RANKS = ("MICRODDP_DEBUG", "MICRODDP_ROUNDS")  # which no prefix hands on: all or none
REFUSED = "MICRODDP_NO_HOSTS"  # tells rank 0 why the machine refused the chapter's hosts


def ranks() -> int:
    """Return the number of ranks of a chapter that does not set its own.

    It is ``MICRODDP_NPROC`` if set; else the number of GPUs if there are several; else four.

    Raises ``ValueError`` if ``MICRODDP_NPROC`` is not a number from 1 on.
    """
    gpus = torch.cuda.device_count()
    return _wanted() or (gpus if gpus > 1 else USUAL)


def _wanted() -> int | None:
    text = os.environ.get("MICRODDP_NPROC")
    if text is not None and not (text.isdecimal() and int(text)):
        raise ValueError(f"expected MICRODDP_NPROC to be a number from 1 on, got {text!r}")
    return None if text is None else int(text)


class RealHosts:
    """The machines of ``MICRODDP_HOSTS``, which has their prefixes, separated by semicolons.

    A prefix starts a command on its machine. The first machine is the build's, and its prefix may
    be empty: ``"; ssh node1; ssh node2"``.
    """

    def __init__(self, text: str) -> None:
        own = os.environ.get("MASTER_ADDR", socket.gethostname())
        prefixes = [shlex.split(entry) for entry in text.strip().removesuffix(";").split(";")]
        ranks = _wanted() or max(1, torch.cuda.device_count())
        asked = {name: os.environ[name] for name in OF_ALL_RANKS if name in os.environ}
        self.agents = [
            Agent(ranks, prefix, "" if number else own, asked)
            for number, prefix in enumerate(prefixes)
        ]
        named = ", ".join(" ".join(prefix) or own for prefix in prefixes)
        self.text = f"{len(prefixes)} machines, {self.agents[0].ranks} ranks on each: {named}"

    def __str__(self) -> str:
        return self.text

    def __enter__(self) -> Sequence[Agent]:
        return self.agents

    def __exit__(self, *error: object) -> None:
        pass


class HostsInABox:
    """Hosts on this machine, from a chapter's ``"4 x 1gbit"`` or ``"2 x 1gbit, 2 ranks each"``.

    If the machine refuses any, the same ranks meet over loopback, and the page says so. Raises
    ``JobFailed`` if it does not, but these cannot be had.
    ``MICRODDP_NPROC`` replaces the number of all ranks, ``MICRODDP_LINK`` the speed of the links.

    Attributes:
        ranks: the number of ranks of each host.
        measured: hosts and links whose speed this build has measured: once for all chapters.
    """

    measured: ClassVar[set[Box]] = set()

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"(\d+) x (\w+)(?:, (\d+) ranks each)?", text)
        if not match:
            raise ValueError(
                f"expected hosts as '4 x 1gbit' or '2 x 1gbit, 2 ranks each', got {text!r}"
            )
        each = int(match[3] or 1)
        ranks = _wanted() or int(match[1]) * each
        self.ranks = [min(each, ranks - first) for first in range(0, ranks, each)]
        link = Link.parse(os.environ.get("MICRODDP_LINK", match[2]))
        self.box = Box((link,) * len(self.ranks), os.cpu_count() or 1)
        self.stack = ExitStack()

    def __str__(self) -> str:
        return f"{self.named()}{'' if possible() else ', refused'}"

    def named(self) -> str:
        """Return what the chapter asks for."""
        several = f", {sum(self.ranks)} ranks" if max(self.ranks) > 1 else ""
        return f"{self.box}{several}"

    def __enter__(self) -> Sequence[Agent]:
        try:
            cluster = self.stack.enter_context(Cluster(self.box.links))
            if self.box not in HostsInABox.measured:  # each takes a link 0.3 seconds
                print(calibration_table(cluster))
                HostsInABox.measured.add(self.box)
        except (OSError, RuntimeError) as error:
            self.stack.close()
            if possible():
                raise JobFailed(f"{self.named()}, which this machine allows: {error}") from error
            return [Agent(sum(self.ranks), environment={REFUSED: f"{self.named()}: {error}"})]
        return [
            Agent(
                ranks,
                address=cluster.address(host),
                environment=cluster.environment,
                within=("microddp.hosts.namespaces.enter", *cluster.processes(host)),
            )
            for host, ranks in enumerate(self.ranks)
        ]

    def __exit__(self, *error: object) -> None:
        self.stack.close()


@cache
def possible() -> bool:
    """Return whether this machine has and allows hosts in a box; if that changes, chapters run."""
    try:
        Cluster([Link(1e9)]).close()
    except RuntimeError:
        return False
    return True


def hosts(wish: str | None) -> RealHosts | HostsInABox | None:
    """Return the hosts of a chapter, or ``None`` for this machine.

    They are the machines of ``MICRODDP_HOSTS`` if it is set; this machine if it has a GPU for each
    rank; else hosts in a box if the chapter asks for them.

    Args:
        wish: the hosts that the chapter asks for, ``"4 x 1gbit"``; ``None`` if it does not.
    """
    if real := os.environ.get("MICRODDP_HOSTS"):
        return RealHosts(real)
    enough = torch.cuda.device_count() >= ranks() > 1
    return None if wish is None or enough else HostsInABox(wish)


def facts(namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about a run that its page needs, from the chapter's global names."""
    comms = namespace["comms"]
    comms.box = links_of_this_job()  # which may have changed since, and back
    return {
        "machine": comms.describe(),
        "short": shorten(comms.where, comms.backend),
        "refused": os.environ.get(REFUSED),
        "ranks": comms.world_size,
        "timed": timed_ranks(namespace),
        "links": [link.option for link in comms.box.links] if comms.box else [],
    }


def timed_ranks(namespace: dict[str, Any]) -> str:
    """Say how many of a chapter's ranks are timed; empty if it times none."""
    n, stage, timed = namespace["comms"].world_size, namespace.get("stage"), namespace.get("timed")
    said = []
    if isinstance(stage, Stage) and stage.sides:
        said.append(f"{n} of {n} ranks as devices of known speed")
    if isinstance(timed, Comms) and not (said and timed.world_size == n):
        said.append(f"{timed.world_size} of {n} {'where cores compute' if said else 'ranks'}")
    return ", ".join(said)


def shorten(where: str, backend: str) -> str:
    """Shorten ``Comms.where``: the machine first, without models of processors."""
    hosts, _, machine = re.sub(r"NVIDIA | \(.*\)", "", where).rpartition(", on ")
    nccl = "NCCL" if backend == "nccl" else ""
    return ", ".join(filter(None, (machine, hosts.replace(" in a box with", ","), nccl)))


def label(facts: dict[str, Any]) -> str:
    """Return what a chapter ran on, in a few words: ``"8 x A100, NCCL"``."""
    return str(facts["short"])


def below_title(facts: dict[str, Any], script: Path) -> list[str]:
    """Return what stands below a chapter's title."""
    links = tuple(map(Link.parse, facts["links"]))
    box = Box(links, os.cpu_count() or 1) if links else None
    return [measured_on(facts, script)[0], *head(read_chapter(script), facts["ranks"], box)]


def measured_on(facts: dict[str, Any], script: Path) -> list[str]:
    """Return the line on what a chapter ran on, and whether the machine refused its hosts."""
    del script
    lines = [f"Measured on {facts['machine']}."]
    if facts["refused"]:
        lines.append(f"Over loopback, since there are no {facts['refused']}")
    if facts.get("timed"):
        lines.append(f"Timed: {facts['timed']}.")
    lines.append(
        "A sentence with ◆ was not typed: the run chose it by its results. The numbers of "
        '"1.4 times as fast (1.3 to 1.5)" are the median and the quartiles of ratios, repetition '
        "by repetition: the ratio of two medians may be another. Where 1 lies between such "
        "quartiles, the run does not tell the two apart."
    )
    return [":::{div} measured-on\n" + "\n".join(lines) + "\n:::"]


class MeasuredOn(SphinxDirective):
    """What a chapter was measured on, in this build and in one that it takes outputs from."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Read it from what is kept of the chapter's runs."""
        docname = f"chapters/{self.arguments[0]}"
        kept = Path(self.env.srcdir, f"{docname}.py.job")
        self.env.note_dependency(str(kept))
        run, pair = Kept.read(kept), both(self.env, docname)
        lines = [f"Measured on {run.facts['machine']}." if run else "Not measured in this build."]
        if pair and not pair.why_not:
            lines.append(f"Each chapter can show what {pair.there.facts['machine']} gave instead.")
        return [nodes.paragraph("", line, classes=["measured-on"]) for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("measured-on", MeasuredOn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
