"""Which files of a package an example depends on: those that it imports, and that these import."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


def files_of(script: Path, package: Path) -> list[Path]:
    """Return the package's files that a script imports, directly or not, in order of their names.

    An import inside a function counts, and a module named in a string: one that is the name alone,
    as `python -m` takes it, or one that a program in a string imports. What stands by itself is
    text, and does not count.
    """
    found: set[Path] = set()
    coming = [*_imported(script, package)]
    while coming:
        path = coming.pop()
        if path not in found:
            found.add(path)
            coming += _imported(path, package)
    return sorted(found)


@cache  # files do not change while a build begins
def _imported(path: Path, package: Path) -> tuple[Path, ...]:
    return tuple(_imports(path.read_text(encoding="utf-8"), package))


def _imports(source: str, package: Path) -> Iterator[Path]:
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield from _files(f"{node.module}.{alias.name}", package)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name, package)
        elif isinstance(node, ast.Constant) and id(node) not in alone:
            yield from _named(node.value, package)


def _named(value: object, package: Path) -> Iterator[Path]:
    """What a string's program imports, or the module whose name the string is."""
    if not isinstance(value, str):
        return
    if f"import {package.name}" in value or f"from {package.name}" in value:
        with suppress(SyntaxError):  # a sentence
            yield from _imports(value, package)
    elif value.startswith(f"{package.name}."):
        yield from _files(value, package)
        yield from _files(f"{value}.__main__", package)


def _files(module: str, package: Path) -> Iterator[Path]:
    """The files that are executed when a module, or a name in one, is imported."""
    first, *parts = module.split(".")
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
