"""One rank of a job: `rank FOLDER`, started by torchrun or forked for it.

Rank 0 runs sphinx-gallery on the chapter; the others run the chapter from top to bottom. They
write to the folder:

    result.pkl       rank 0: what `generate_file_rst` returned, the warnings, what `Kept` keeps
    rank<N>.json     the exception that ended rank N: rank, time, secondary, text
    rank<N>.stack    the stack of rank N when it was told to stop
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

# A rank that failed because of another one waits so long before it ends, so that the other can
# report: when a rank ends, torchrun stops the others.
_SECONDS_FOR_THE_CAUSE = 2
# Errors of a communication library, or of a connection, that others cause; and words of those that
# are about a rank's own call.
_GONE = {"DistError", "ConnectionResetError", "BrokenPipeError"}
_OWN = ("op.preamble", "ncclInvalidUsage", "ncclInvalidArgument")


class Job(NamedTuple):
    """What a rank needs to know."""

    chapter: str  # path of the example's script
    sys_path: list[str]
    imports: list[str] | None
    preload: list[str]
    facts: str | None
    below_title: str | None
    call: bytes  # pickled arguments of generate_file_rst, which only rank 0 reads


def import_object(path: str) -> Any:
    """Return the object that `package.module.name` names.

    Raises `ImportError` or `AttributeError` if there is no such module or name.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class _GalleryLog(logging.Handler):
    """Collect the gallery's warnings, which the build logs, and show the chapter's output.

    The gallery logs each line that it captures for the page, one level below INFO.
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
    """Run sphinx-gallery on the chapter; raises what the chapter raises."""
    # Not above: ranks above 0 do not need them.
    from sphinx.util.logging import VERBOSE
    from sphinx_gallery import gen_rst

    from .kept import code_of, replaced, show_below_title

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
        of_code = [o for block, o in zip(blocks, outputs, strict=True) if block.type == "code"]
        facts = None
        if job.facts is not None:
            facts = import_object(job.facts)(script_vars["example_globals"])
        parts = write_below_title(job.below_title, facts, Path(job.chapter))
        kept.update(code=code, lines=lines, outputs=of_code, seconds=seconds)
        kept.update(figures=len(script_vars["image_path_iterator"]), facts=facts, below_title=parts)
        show_below_title(file_conf, parts)
        return outputs, seconds

    # Otherwise the gallery would go on after an exception, while the other ranks wait.
    gallery_conf["abort_on_example_error"] = True
    with replaced("execute_script", execute_and_keep) as execute_script:
        result = gen_rst.generate_file_rst(fname, target_dir, src_dir, gallery_conf)
    return {"result": result, "warnings": log.warnings, "kept": kept}


def write_below_title(function: str | None, facts: Any, chapter: Path) -> list[str]:
    """Return the Markdown that a function, given by its import path, writes from the facts."""
    return [] if function is None else list(import_object(function)(facts, chapter))


def _run_script(job: Job) -> None:
    sys.argv = [job.chapter]
    try:
        runpy.run_path(job.chapter, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise


def _is_secondary(error: BaseException | None) -> bool:
    """Return whether an error only says that another rank has gone, failed, or does not answer.

    Such an error can come before that rank has come round to reporting its own.
    """
    seen: set[int] = set()  # `raise e from e` makes a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
        if (kinds & _GONE or "/gloo/" in text) and not any(word in text for word in _OWN):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _traceback(error: BaseException, chapter: str) -> str:
    """Format an exception, beginning at the chapter's own frame."""
    told = traceback.TracebackException.from_exception(error)
    inside = [i for i, frame in enumerate(told.stack) if frame.filename == chapter]
    if inside:
        del told.stack[: inside[0]]
    elif isinstance(error, SyntaxError):  # whose message names file and line
        told.stack.clear()
    return "".join(told.format())


def main(folder: str | Path) -> None:
    """Run this rank's part of the job in `folder`, and end the process."""
    folder, rank = Path(folder), int(os.environ["RANK"])
    # The signal handler itself writes it, even while a collective blocks the interpreter.
    stack = open(folder / f"rank{rank}.stack", "w")  # noqa: SIM115 - open until the end
    faulthandler.register(signal.SIGTERM, file=stack, all_threads=False, chain=True)
    job = Job(*pickle.loads((folder / "job.pkl").read_bytes()))
    sys.path[:] = job.sys_path
    for stream in (sys.stdout, sys.stderr):
        # torchrun starts ranks unbuffered, which would mix pieces of their lines.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    try:
        if rank == 0:
            (folder / "result.pkl").write_bytes(pickle.dumps(_run_gallery(job)))
        else:
            _run_script(job)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # do not stop before the report is written
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
    # As Python does at its end: stop thread pools, wait for all threads that are not daemons, then
    # call the exit handlers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own end is left out. There, a thread of the communication library that still frees a
    # tensor aborts the process, so that a chapter that does not leave its group fails at times.
    os._exit(0)
