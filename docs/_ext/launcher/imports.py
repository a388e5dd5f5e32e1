"""Find the files of a package that an example imports, directly or through other files."""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path


def files_of(script: Path, package: Path, programs: Path | None = None) -> list[Path]:
    """Return the package's files that a script imports, directly or not, sorted by name.

    Imports inside functions count, and so do strings: the name of a module, as `python -m` takes
    it, a program that imports, and the name of one in the folder `programs`, which is among the
    files then. A string that is a statement of its own is text; it does not. Beside a file of the
    package, all that is not Python counts: it may be data that the file reads.
    """
    found: set[Path] = set()
    pending = [*_imported(script, package, programs)]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imported(path, package, programs)
    folders = {path.parent for path in found if package in path.parents}
    beside = [near for folder in folders for near in folder.iterdir()]
    data = {near for near in beside if near.is_file() and near.suffix != ".py"}
    # Not what editors and file managers leave for themselves.
    return sorted(found | {file for file in data if file.name[0] != "." and file.name[-1] != "~"})


@cache  # as files do not change while a build starts
def _imported(path: Path, package: Path, programs: Path | None) -> tuple[Path, ...]:
    with suppress(SyntaxError):  # which the example's job reports
        within = (
            (package.name, *path.parent.relative_to(package).parts)
            if package in path.parents
            else ()
        )
        return tuple(_imports(path.read_text(encoding="utf-8"), package, programs, within))
    return ()


def _imports(
    source: str, package: Path, programs: Path | None, within: Sequence[str] = ()
) -> Iterator[Path]:
    """Yield what a source imports; `within` is the package that its relative imports begin at."""
    nodes = [*ast.walk(ast.parse(source))]
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level <= len(within):
            base = within[: len(within) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield from _files(".".join([*base, node.module or "", alias.name]), package)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name, package)
        elif isinstance(node, ast.Constant) and id(node) not in alone:
            yield from _named(node.value, package, programs)


def _named(value: object, package: Path, programs: Path | None) -> Iterator[Path]:
    """Yield what a program in a string imports, or the module or program that a string names."""
    if not isinstance(value, str):
        return
    if f"import {package.name}" in value or f"from {package.name}" in value:
        with suppress(SyntaxError):  # it is a sentence
            yield from _imports(textwrap.dedent(value), package, programs)
    elif re.fullmatch(rf"{package.name}\.[\w.]{{1,200}}", value):
        yield from _files(value, package)
        yield from _files(f"{value}.__main__", package)
    elif programs and value.endswith(".py") and len(value) < 200 and (programs / value).is_file():
        yield programs / value


def _files(module: str, package: Path) -> Iterator[Path]:
    """Yield the files that Python executes to import a module, or a name from one."""
    first, *parts = filter(None, module.split("."))
    if first != package.name:
        return
    folder = package
    for part in [*parts, ""]:
        if (path := folder / "__init__.py").is_file():
            yield path
        if (path := folder / f"{part}.py").is_file():
            yield path
            return
        folder /= part
        if not folder.is_dir():
            return
