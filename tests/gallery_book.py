"""Small books in temporary folders, built by a real sphinx-build."""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
from warm import OFFSPRING, python

EXTENSIONS = Path(__file__).parents[1] / "docs" / "_ext"

CONF = """
import sys

sys.path[:0] = [{extensions!r}, {root!r}]
project = "book"
extensions = ["myst_parser", "sphinx_gallery.gen_gallery", *{added!r}]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 2
html_theme = "basic"
# The gallery warns of a space anywhere in a chapter's path.
suppress_warnings = ["sphinx_gallery.space_in_filename"]
sphinx_gallery_conf = {{
    "examples_dirs": "../chapters",
    "gallery_dirs": "chapters",
    "filename_pattern": r"\\.py$",
    "within_subsection_order": "FileNameSortKey",
    "copyfile_regex": r".*\\.svg",
    "download_all_examples": False,
    "write_computation_times": False,
    "show_signature": False,
    "remove_config_comments": True,
    **{gallery!r},
}}
launcher = {launcher!r}
"""

# The extensions that run chapters as jobs, and what rank 0 then has to call first.
LAUNCHER = ("pages.markdown", "launcher")
PRELOAD = ["pages.markdown.install"]

# Joins the ranks; with now() a chapter tells when its fault is due.
JOIN = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist

def now():
    pathlib.Path(sys.argv[0]).with_suffix(".moment").write_text(str(time.time()))

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
total = torch.ones(3)
dist.all_reduce(total)
"""

CHAPTER = '''
# %% [markdown]
"""
# {title}

This chapter is called {title}.
"""

# %%
{code}
'''


@dataclass
class Build:
    """A sphinx-build that runs, or ran: its lines of output, each with its time of arrival."""

    process: "subprocess.Popen[str]"
    marker: str  # in the environment of all its processes
    deadline: threading.Timer  # kills a build that hangs
    lines: list[tuple[float, str]] = field(default_factory=list)

    def wait_for(self, text: str) -> float:
        """Read on to the line that contains `text` and return when it came."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))
            if text in line:
                return self.lines[-1][0]
        raise AssertionError(f"no {text!r} in the output:\n{self.output}")

    def finish(self) -> int:
        """Read on to the end and return the build's status."""
        assert self.process.stdout is not None
        self.lines += [(time.time(), line.rstrip("\n")) for line in self.process.stdout]
        self.process.stdout.close()
        self.deadline.cancel()
        return self.process.wait()

    def time_of(self, text: str) -> float:
        """Return when the first line with `text` came."""
        return next(moment for moment, line in self.lines if text in line)

    @property
    def output(self) -> str:
        """All that was written so far."""
        return "\n".join(line for _, line in self.lines)

    def ran(self) -> list[str]:
        """Return the names of the chapters that were run as jobs."""
        return [line.split(":")[0] for _, line in self.lines if ": running on " in line]

    def processes(self) -> list[psutil.Process]:
        """Return the build's processes that are alive, however far they have drifted off."""
        alive = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("BOOK_BUILD") == self.marker:
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def processes_after(self, seconds: float) -> list[psutil.Process]:
        """Wait until no process is alive, for `seconds` at most; end and return what is left."""
        end = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        for process in alive:
            process.kill()
        return alive


@dataclass
class Book:
    """A book of `chapters/` and `docs/` below `root`."""

    root: Path

    def __post_init__(self) -> None:
        (self.root / "docs").mkdir(parents=True)
        (self.root / "chapters").mkdir()
        self.write("docs/index.md", "# Book\n\n```{toctree}\nchapters/index\n```\n")
        self.write("chapters/GALLERY_HEADER.rst", "Chapters\n========\n")

    def write(self, path: str, text: str) -> Path:
        """Write a file below `root`."""
        file = self.root / path
        file.write_text(text, encoding="utf-8")
        return file

    def configure(
        self,
        *added: str,
        launcher: dict[str, Any] | None = None,
        gallery: dict[str, Any] | None = None,
    ) -> None:
        """Write conf.py with the extensions `added`."""
        conf = CONF.format(
            extensions=str(EXTENSIONS),
            root=str(self.root),
            added=list(added),
            launcher={"imports": ["jupytext"], **(launcher or {})},
            gallery=gallery or {},
        )
        self.write("conf.py", conf)

    def chapter(self, name: str, code: str) -> Path:
        """Write the chapter `name`.py: a title, and `code` in one cell."""
        text = CHAPTER.format(title=name, code=dedent(code).strip())
        return self.write(f"chapters/{name}.py", text.lstrip())

    def start(self, *arguments: str, inside: Sequence[str] = (), **environment: str) -> Build:
        """Start sphinx-build, from a folder that is not the book's, with `inside` before it."""
        marker = uuid.uuid4().hex
        folders: list[str | Path] = ["-c", self.root, self.root / "docs", self.root / "_site"]
        executable = sys.executable if inside else python()  # whose server is outside
        process = subprocess.Popen(
            [*inside, executable, "-u", "-m", "sphinx", *arguments, *folders],
            cwd=self.root.parent,
            env={**os.environ, "BOOK_BUILD": marker, "NO_COLOR": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        deadline = threading.Timer(240, process.kill)
        deadline.daemon = True
        deadline.start()
        return Build(process, marker, deadline)

    def build(self, *arguments: str, inside: Sequence[str] = (), **environment: str) -> Build:
        """Run sphinx-build to its end."""
        build = self.start(*arguments, inside=inside, **environment)
        build.finish()
        return build

    def build_in_forks(self, *arguments: str, **environment: str) -> Build:
        """Run sphinx-build to its end; all that it starts are forks, whom ``processes`` misses."""
        return self.build(*arguments, **{OFFSPRING: "1"}, **environment)

    def page(self, name: str) -> str:
        """Return the HTML page of a chapter."""
        return (self.root / f"_site/chapters/{name}.html").read_text(encoding="utf-8")
