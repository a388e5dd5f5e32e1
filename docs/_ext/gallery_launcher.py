"""Run each example of a sphinx-gallery project as a torchrun job of several ranks.

Rank 0 of the job is sphinx-gallery, which runs the example block by block and writes its
page; the other ranks run the same script from top to bottom. `gallery_launcher` in conf.py
takes the fields of `Options`. docs/launcher.md tells how to use it and what it does on a fault.
"""

import hashlib
import os
import pickle
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from gallery_launcher_imports import files_of
from gallery_launcher_job import ENVIRONMENT, Agent, JobFailed, run_job
from gallery_launcher_kept import Kept, code_of
from gallery_launcher_rank import Job, import_object, write_below_title
from gallery_launcher_server import Server
from sphinx.application import Sphinx
from sphinx.errors import ConfigError, ExtensionError
from sphinx.util import logging
from sphinx_gallery import gen_rst
from sphinx_gallery.gen_gallery import _expected_failing_examples
from sphinx_gallery.gen_rst import generate_file_rst as generate_here
from sphinx_gallery.utils import WARNING_TYPE, get_md5sum

logger = logging.getLogger(__name__)

# What generate_file_rst takes and returns.
Call = tuple[str, str | Path, str | Path, dict[str, Any]]
Result = tuple[str, str, tuple[float, float], dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """The options in conf.py. Import paths read `package.module.name`."""

    ranks: int | str = 1  # or the import path of a callable that returns the number
    hosts: str | None = None  # import path: what the example says of hosts -> Hosts, or None
    timeout: float = 1800  # seconds for one example, from its start to its end
    log_dir: str = "gallery_logs"  # relative to the folder of conf.py
    depends: Sequence[str] = ()  # globs, likewise; if such a file changes, all run again
    package: str | None = None  # a folder, likewise; what of it an example imports counts for it
    imports: Sequence[str] | None = None  # modules; ranks are forked from a process that has them
    preload: Sequence[str] = ()  # import paths of callables that rank 0 calls first
    facts: str | None = None  # import path: example's globals -> what JSON can write
    below_title: str | None = None  # import path: (these facts, example's path) -> [Markdown]


class Hosts(Protocol):
    """The hosts of a job: a context in which its agents can be started.

    Its `str` is part of what an example's page depends on.
    """

    def __enter__(self) -> Sequence[Agent]: ...

    def __exit__(self, *error: object) -> None: ...


@dataclass(frozen=True)
class Launcher:
    """Stands in for the gallery's `generate_file_rst`."""

    options: Options
    ranks: int
    log_dir: Path
    surroundings: str  # digest of what all examples depend on
    package: Path | None
    server: Server | None  # for options.imports

    def generate_file_rst(
        self, fname: str, target_dir: str | Path, src_dir: str | Path, gallery_conf: dict[str, Any]
    ) -> Result:
        """Generate an example's page, through a job if the example has to run.

        Raises `ExtensionError` if a setting in the file is wrong or, where the gallery is to
        abort on an error, if the job failed.
        """
        call = (fname, target_dir, src_dir, gallery_conf)
        source = Path(os.path.normpath(Path(src_dir, fname)))
        parser, _ = gen_rst._get_parser(fname, gallery_conf)
        file_conf, blocks = parser.split_code_and_text_blocks(source)
        ranks = file_conf.get("ranks", self.ranks)
        timeout = file_conf.get("timeout", self.options.timeout)
        if not (_is_count(ranks) and isinstance(timeout, int | float) and timeout > 0):
            raise ExtensionError(f"{source}: not possible: ranks {ranks!r}, timeout {timeout!r}")
        hosts = self._hosts(source, file_conf)

        # The gallery makes its mark when rank 0 is done, this one is made when all ranks are.
        md5_mark, job_mark = (Path(target_dir, f"{fname}.{kind}") for kind in ("md5", "job"))
        state = f"{self.surroundings} {self._imported(source)} {hosts or ranks}"
        kept = Kept.read(job_mark) if md5_mark.is_file() else None
        if kept and (kept.state != state or gallery_conf["run_stale_examples"]):
            kept = None
        if kept and md5_mark.read_text() == get_md5sum(source, mode="t"):
            return generate_here(*call)  # type: ignore[no-any-return]
        md5_mark.unlink(missing_ok=True)
        job_mark.unlink(missing_ok=True)
        if not gen_rst.executable_script(source, gallery_conf):
            return generate_here(*call)  # type: ignore[no-any-return]
        if kept and kept.fits(blocks):
            logger.info("%s: only its text changed", fname)
            parts = write_below_title(self.options.below_title, kept.facts, source)
            result: Result = kept.show_again(lambda: generate_here(*call), parts)
            lines = code_of(blocks)[1]
            replace(kept, lines=lines, below_title=parts).write(job_mark)
            return result

        logger.info("%s: running on %s", fname, hosts or f"{ranks} ranks")
        start = time.monotonic()
        folder = self.log_dir / os.path.relpath(target_dir, gallery_conf["src_dir"]) / source.stem
        job = Job(
            chapter=str(source),
            # An empty entry means the current folder: the build's, not the job's.
            sys_path=[str(source.parent), *map(os.path.abspath, sys.path)],
            imports=None if self.options.imports is None else list(self.options.imports),
            preload=list(self.options.preload),
            facts=self.options.facts,
            below_title=self.options.below_title,
            call=_pickle(call),
        )
        try:
            with hosts or nullcontext([Agent(ranks)]) as agents:
                outcome = run_job(job, folder, agents, timeout, logger.info, self.server)
        except JobFailed as error:
            seconds = time.monotonic() - start
            message = f"{fname} failed after {seconds:.1f} s. {error}\n\nIts logs: {folder}"
            return _fail(call, str(source), message)
        for message, kind, subtype in outcome["warnings"]:
            logger.warning("%s", message, type=kind, subtype=subtype)
        Kept(state, **outcome["kept"]).write(job_mark)
        logger.info("%s: took %.1f s", fname, time.monotonic() - start)
        return outcome["result"]  # type: ignore[no-any-return]

    def _imported(self, source: Path) -> str:
        """Digest what an example imports from the package."""
        if self.package is None:
            return ""
        return digest_of_files(files_of(source, self.package), self.package.parent)

    def _hosts(self, source: Path, file_conf: dict[str, Any]) -> Hosts | None:
        """The hosts of an example that does not set its own number of ranks; none: this machine.

        Raises `ExtensionError` if what the example says of them is wrong.
        """
        if self.options.hosts is None or "ranks" in file_conf:
            return None
        try:
            return import_object(self.options.hosts)(file_conf.get("hosts"))  # type: ignore[no-any-return]
        except ValueError as error:
            raise ExtensionError(f"{source}: not possible: {error}") from error


def _fail(call: Call, source: str, message: str) -> Result:
    """Report a failure; give the example a page that shows its code alone."""
    fname, target_dir, src_dir, gallery_conf = call
    if source in _expected_failing_examples(gallery_conf):
        logger.info("As expected, %s", message)
    elif gallery_conf["abort_on_example_error"]:
        raise ExtensionError(message)
    else:
        logger.warning("%s", message, type=WARNING_TYPE, subtype="example_error")
    Path(target_dir, f"{fname}.md5").unlink(missing_ok=True)
    code_only = {**gallery_conf, "plot_gallery": False}
    *rest, out_vars = generate_here(fname, target_dir, src_dir, code_only)
    # With this entry the gallery lists the example at the end, and fails the build.
    return (*rest, {**out_vars, "formatted_exception": message})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _pickle(call: Call) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"sphinx_gallery_conf cannot be handed to another process: {error}. "
            "Name what conf.py defines itself by import path."
        ) from error


def _surroundings(confdir: Path, depends: Sequence[str]) -> str:
    """Digest what all examples depend on: files, torch, Python and the machine.

    Raises `ConfigError` if a glob matches no file.
    """
    machine = (version("torch"), platform.python_version(), os.cpu_count(), _gpus())
    text = f"{digest_of(confdir, depends)} {machine!r}"
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(folder: Path, patterns: Sequence[str]) -> str:
    """Digest the files below a folder that match globs, with their names.

    Raises `ConfigError` if a glob matches no file.
    """
    found: list[Path] = []
    for pattern in patterns:
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not files:
            raise ConfigError(f"{folder}: no file matches {pattern!r}")
        found += files
    return digest_of_files(found, folder)


def digest_of_files(files: Iterable[Path], folder: Path) -> str:
    """Digest files below a folder, with their names."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)} {get_md5sum(path)}\n".encode())
    return digest.hexdigest()


def _gpus() -> str:
    """Name the GPUs, without torch: to ask it costs seconds and a context on a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout


def install(app: Sphinx) -> None:
    """Let the gallery generate its examples through jobs.

    Raises `ConfigError` if an option is unknown or wrong.
    """
    try:
        options = Options(**app.config.gallery_launcher)
    except TypeError as error:
        raise ConfigError(f"gallery_launcher: {error}") from error
    confdir = Path(app.confdir)
    ranks = import_object(options.ranks)() if isinstance(options.ranks, str) else options.ranks
    if not _is_count(ranks):
        raise ConfigError(f"gallery_launcher['ranks'] gives {ranks!r}, not a number from 1 on")
    if app.config.sphinx_gallery_conf["parallel"]:
        raise ConfigError("sphinx_gallery_conf['parallel'] is not possible with gallery_launcher")
    surroundings = _surroundings(confdir, options.depends)
    server = None if options.imports is None else Server(options.imports, ENVIRONMENT)
    package = confdir / options.package if options.package else None
    if package and not package.is_dir():
        raise ConfigError(f"gallery_launcher['package']: no folder {package}")
    launcher = Launcher(options, ranks, confdir / options.log_dir, surroundings, package, server)
    gen_rst.generate_file_rst = launcher.generate_file_rst
    if server:
        app.connect("env-before-read-docs", lambda *_: server.close())  # all examples have run


def setup(app: Sphinx) -> dict[str, Any]:
    """Set up the extension."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    app.add_config_value("gallery_launcher", {}, "", types=[dict])
    # The gallery generates its pages at priority 500.
    app.connect("builder-inited", install, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
