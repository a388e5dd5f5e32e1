"""The options of the launcher."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The keys of the dictionary `launcher` in conf.py.

    A path is relative to the folder of conf.py. An import path, such as `"machine.ranks"`, names a
    function of an importable module: what conf.py defines itself cannot reach another process.
    """

    # Number of ranks of each example, or the import path of a function that returns it.
    ranks: int | str = 1

    # Import path of a function that says on which hosts an example runs: see "Several hosts".
    hosts: str | None = None

    # Seconds after which an example is stopped, counted from its start.
    timeout: float = 1800

    # Folder of the logs; each example has a folder in it.
    log_dir: str = "gallery_logs"

    # Globs. If a file that matches one changes, all examples run again.
    depends: Sequence[str] = ()

    # Globs. If a file that matches one changes, all pages are made again of what their examples
    # gave when they last ran.
    looks: Sequence[str] = ()

    # Environment variables. If the value of one changes, all examples run again.
    variables: Sequence[str] = ()

    # Folder of a package. If a file of it changes, the examples that import the file run again,
    # whether they import it themselves or through other files of the package.
    package: str | None = None

    # Folder of programs that examples start. If one changes, or what it imports from the package,
    # the examples run again that have its name in a string.
    programs: str | None = None

    # Modules that a build imports once, beside PyTorch, to fork all ranks from one process; `[]` is
    # PyTorch alone. `None`: each rank is a program of its own and imports for itself.
    imports: Sequence[str] | None = None

    # Import paths of functions that rank 0 calls before the example, without arguments.
    preload: Sequence[str] = ()

    # Import path of a function that rank 0 calls after the example, with the dictionary of its
    # global names. It returns facts about the run, as JSON can write them.
    facts: str | None = None

    # Import path of a function that is called with these facts and the path of the example. It
    # returns a list of Markdown texts. They become `file_conf["preamble"]`, for another extension
    # to put on the page.
    below_title: str | None = None
