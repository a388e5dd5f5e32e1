"""The build's side: which examples have to run, as jobs; `rank.py` writes their pages there."""

import fcntl
import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sphinx.application import Sphinx
from sphinx.errors import ConfigError, ExtensionError
from sphinx.util import logging
from sphinx_gallery import gen_rst
from sphinx_gallery.gen_gallery import _expected_failing_examples
from sphinx_gallery.gen_rst import generate_file_rst as generate_here
from sphinx_gallery.utils import WARNING_TYPE, get_md5sum

from .digests import digest_of_files, digest_of_looks, digest_of_surroundings
from .imports import files_of
from .job import ENVIRONMENT, Agent, JobFailed, run_job
from .kept import Kept, code_of
from .options import Options
from .rank import Job, import_object, write_below_title
from .server import Server

logger = logging.getLogger(__name__)

# What generate_file_rst takes and returns.
Call = tuple[str, str | Path, str | Path, dict[str, Any]]
Result = tuple[str, str, tuple[float, float], dict[str, Any]]


class Hosts(Protocol):
    """The hosts of a job: a context manager that gives the agents to start.

    Its `str` names them; if it changes, the example runs again.
    """

    def __enter__(self) -> Sequence[Agent]: ...

    def __exit__(self, *error: object) -> None: ...


@dataclass(frozen=True)
class Launcher:
    """A replacement of the gallery's `generate_file_rst`."""

    options: Options
    ranks: int
    log_dir: Path
    surroundings: str  # a digest of what all examples depend on
    look: str  # a digest of what else all pages depend on
    confdir: Path
    package: Path | None
    programs: Path | None
    server: Server | None  # which has imported options.imports

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

        # The gallery writes its mark when rank 0 has ended; this one is written when all have.
        md5_mark, job_mark = (Path(target_dir, f"{fname}.{kind}") for kind in ("md5", "job"))
        state = f"{self.surroundings} {self._imported(source)} {hosts or ranks}"
        kept = Kept.read(job_mark) if md5_mark.is_file() else None
        if kept and (kept.state != state or gallery_conf["run_stale_examples"]):
            kept = None
        if kept and kept.look == self.look and md5_mark.read_text() == get_md5sum(source, mode="t"):
            return generate_here(*call)  # type: ignore[no-any-return]
        md5_mark.unlink(missing_ok=True)
        job_mark.unlink(missing_ok=True)
        if not gen_rst.executable_script(source, gallery_conf):
            return generate_here(*call)  # type: ignore[no-any-return]
        if kept and kept.fits(blocks):
            logger.info("%s: only its page is made again", fname)
            parts = write_below_title(self.options.below_title, kept.facts, source)
            result: Result = kept.show_again(lambda: generate_here(*call), parts)
            lines = code_of(blocks)[1]
            replace(kept, lines=lines, below_title=parts, look=self.look).write(job_mark)
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
        Kept(state, look=self.look, **outcome["kept"]).write(job_mark)
        logger.info("%s: took %.1f s", fname, time.monotonic() - start)
        return outcome["result"]  # type: ignore[no-any-return]

    def _imported(self, source: Path) -> str:
        """Return a digest of what an example imports from the package."""
        if self.package is None:
            return ""
        files = files_of(source, self.package, self.programs)
        return digest_of_files(files, self.confdir)

    def _hosts(self, source: Path, file_conf: dict[str, Any]) -> Hosts | None:
        """Return the hosts of an example, or `None` for this machine.

        An example that sets its own number of ranks runs on this machine.

        Raises `ExtensionError` if the example's setting of hosts is wrong.
        """
        if self.options.hosts is None or "ranks" in file_conf:
            return None
        try:
            return import_object(self.options.hosts)(file_conf.get("hosts"))  # type: ignore[no-any-return]
        except ValueError as error:
            raise ExtensionError(f"{source}: not possible: {error}") from error


def _fail(call: Call, source: str, message: str) -> Result:
    """Report a failure, and write a page that shows the example's code without output."""
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
    # This entry makes the gallery list the example at the end and fail the build.
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


@cache  # by this process until it ends, however often it builds
def _be_alone(log_dir: Path) -> None:
    """Raise `ConfigError` if another build has this folder: each would take the other's results."""
    log_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(log_dir / "lock", os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another build runs in this folder, with logs in {log_dir}") from None
    except OSError:  # not every network's file system has locks
        os.close(lock)


def install(app: Sphinx) -> None:
    """Make the gallery generate its examples through jobs.

    Raises `ConfigError` if an option is unknown or wrong, or another build runs in this folder.
    """
    try:
        options = Options(**app.config.launcher)
    except TypeError as error:
        raise ConfigError(f"launcher: {error}") from error
    confdir = Path(app.confdir)
    ranks = import_object(options.ranks)() if isinstance(options.ranks, str) else options.ranks
    if not _is_count(ranks):
        raise ConfigError(f"launcher['ranks'] gives {ranks!r}, not a number from 1 on")
    if app.config.sphinx_gallery_conf["parallel"]:
        raise ConfigError("sphinx_gallery_conf['parallel'] is not possible with the launcher")
    surroundings = digest_of_surroundings(confdir, options.depends, options.variables)
    look = digest_of_looks(confdir, options.looks, app.config.sphinx_gallery_conf)
    server = None if options.imports is None else Server(options.imports, ENVIRONMENT)
    package, programs = (
        confdir / name if (name := getattr(options, kind)) else None
        for kind in ("package", "programs")
    )
    for kind, folder in (("package", package), ("programs", programs)):
        if folder and not folder.is_dir():
            raise ConfigError(f"launcher[{kind!r}]: no folder {folder}")
    if programs and not package:
        raise ConfigError("launcher['programs'] needs launcher['package']")
    _be_alone(confdir / options.log_dir)
    launcher = Launcher(
        *(options, ranks, confdir / options.log_dir, surroundings, look, confdir),
        *(package, programs, server),
    )
    gen_rst.generate_file_rst = launcher.generate_file_rst
    if server:
        app.connect("env-before-read-docs", lambda *_: server.close())  # all examples have run
