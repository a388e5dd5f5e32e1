"""One rank of a job: `gallery_launcher_rank.py FOLDER`, started by torchrun, or forked for it.

Rank 0 runs sphinx-gallery on the chapter and leaves its result in the folder; the others run
the chapter from top to bottom. What ended a rank before its time is left there too:

    result.pkl       from rank 0: what `generate_file_rst` returned, and the warnings logged
    rank<N>.json     the exception that ended rank N: rank, time, secondary, text
    rank<N>.stack    where rank N was when it was told to stop
"""

import atexit
import faulthandler
import importlib
import json
import logging
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

# How long a rank that failed because of another waits for that one to report: when a rank
# ends, torchrun stops the others.
_SECONDS_FOR_THE_CAUSE = 2


class Job(NamedTuple):
    """What a rank needs to know."""

    chapter: str
    sys_path: list[str]
    imports: list[str] | None
    preload: list[str]
    facts: str | None
    below_title: str | None
    call: bytes  # the pickled arguments of generate_file_rst, read by rank 0 only


def import_object(path: str) -> Any:
    """Return what `package.module.name` names.

    Raises `ImportError` or `AttributeError` if there is no such module or name.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class _GalleryLog(logging.Handler):
    """Keep the gallery's warnings for the build to log, and show the chapter's output.

    The gallery logs, one level below INFO, each line that it captures for the page.
    """

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        kind, subtype = getattr(record, "type", ""), getattr(record, "subtype", "")
        if record.levelno < logging.INFO and record.msg != "Output from %s":
            print(record.getMessage(), file=sys.__stdout__)
        elif record.levelno >= logging.WARNING and subtype != "example_error":
            self.warnings.append((record.getMessage(), kind, subtype))


def _run_gallery(job: Job) -> dict[str, Any]:
    """Run sphinx-gallery on the chapter; an exception of the chapter ends it."""
    # Ranks above 0 must not pay for these imports.
    from gallery_launcher_kept import code_of, replaced, show_below_title
    from sphinx.util.logging import VERBOSE
    from sphinx_gallery import gen_rst

    log = _GalleryLog()
    logging.getLogger("sphinx").setLevel(VERBOSE)
    logging.getLogger("sphinx").addHandler(log)
    for path in job.preload:
        import_object(path)()
    fname, target_dir, src_dir, gallery_conf = pickle.loads(job.call)
    kept: dict[str, Any] = {}

    def execute_and_keep(
        blocks: Any, script_vars: dict[str, Any], conf: Any, file_conf: dict[str, Any]
    ) -> Any:
        outputs, seconds = execute_script(blocks, script_vars, conf, file_conf)
        code, lines = code_of(blocks)
        said = [output for block, output in zip(blocks, outputs, strict=True) if _is_code(block)]
        facts = None
        if job.facts is not None:
            facts = import_object(job.facts)(script_vars["example_globals"])
        parts = write_below_title(job.below_title, facts, Path(job.chapter))
        kept.update(code=code, lines=lines, outputs=said, seconds=seconds)
        kept.update(figures=len(script_vars["image_path_iterator"]), facts=facts, below_title=parts)
        show_below_title(file_conf, parts)
        return outputs, seconds

    # Otherwise the gallery would go on after an exception while the other ranks wait.
    gallery_conf["abort_on_example_error"] = True
    with replaced("execute_script", execute_and_keep) as execute_script:
        result = gen_rst.generate_file_rst(fname, target_dir, src_dir, gallery_conf)
    return {"result": result, "warnings": log.warnings, "kept": kept}


def _is_code(block: Any) -> bool:
    return bool(block.type == "code")


def write_below_title(function: str | None, facts: Any, chapter: Path) -> list[str]:
    """Return what the function of that import path, if any, makes of a run's facts."""
    return [] if function is None else list(import_object(function)(facts, chapter))


def _run_script(job: Job) -> None:
    sys.argv = [job.chapter]
    try:
        runpy.run_path(job.chapter, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise


def _is_secondary(error: BaseException | None) -> bool:
    """Say whether an error came from the communication library.

    Such an error is most often the echo of another rank's, and can come before that rank has
    come round to reporting its own.
    """
    while error is not None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if "DistError" in kinds or "/gloo/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _traceback(error: BaseException, chapter: str) -> str:
    """Format an exception from the chapter's own frame on."""
    told = traceback.TracebackException.from_exception(error)
    inside = [i for i, frame in enumerate(told.stack) if frame.filename == chapter]
    if inside:
        del told.stack[: inside[0]]
    elif isinstance(error, SyntaxError):  # it names file and line itself
        told.stack.clear()
    return "".join(told.format())


def main(folder: Path) -> None:
    """Run this rank's part of the job in `folder`."""
    rank = int(os.environ["RANK"])
    # Written by the signal handler itself, so also while a collective blocks the interpreter.
    stack = open(folder / f"rank{rank}.stack", "w")  # noqa: SIM115 - open until the end
    faulthandler.register(signal.SIGTERM, file=stack, all_threads=False, chain=True)
    job = Job(*pickle.loads((folder / "job.pkl").read_bytes()))
    sys.path[:] = job.sys_path
    for stream in (sys.stdout, sys.stderr):
        # torchrun starts us unbuffered, and would mix the pieces of our lines with others'.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    try:
        if rank == 0:
            (folder / "result.pkl").write_bytes(pickle.dumps(_run_gallery(job)))
        else:
            _run_script(job)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody is to be stopped half told
        failure = {
            "rank": rank,
            "time": time.time(),
            "secondary": _is_secondary(error),
            "text": _traceback(error, job.chapter),
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(failure))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        if failure["secondary"]:
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        # At once: no thread or exit handler of the chapter may keep a failed rank alive.
        os._exit(1)
    # What Python itself does at its end: it tells thread pools to stop, waits for all threads that
    # are not daemons, and only then calls what was registered to be called at exit.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is done but Python's own end. There, a thread of the communication library that still lets
    # go of a tensor aborts the process; a chapter that does not leave its group would now and then
    # fail for it.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
