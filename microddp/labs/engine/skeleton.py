"""The skeleton of a solution: the script without the bodies of the functions to write."""

from __future__ import annotations

import ast
from collections.abc import Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef


def skeleton(solution: str, functions: Sequence[str]) -> str:
    """Return a script with ``raise NotImplementedError`` in place of some functions' bodies.

    Their docstrings stay.

    Raises:
        ValueError: one of the functions is not there, or has no docstring.
    """
    lines = solution.splitlines()
    found = definitions(solution)
    for name in sorted(functions, key=lambda name: -found[name].lineno if name in found else 0):
        if name not in found or ast.get_docstring(found[name]) is None:
            raise ValueError(f"expected {name} with a docstring, got {sorted(found)}")
        docstring, *body = found[name].body
        indent = " " * docstring.col_offset
        end = body[-1].end_lineno if body else docstring.end_lineno
        short = name.rpartition(".")[2]
        lines[docstring.end_lineno : end] = [f'{indent}raise NotImplementedError("{short}")']
    return "\n".join(lines) + "\n"


def definitions(script: str) -> dict[str, Function]:
    """Return a script's functions and its classes' methods by name: ``step``, ``Counter.add``."""
    found: dict[str, Function] = {}
    for node in ast.parse(script).body:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, Function)]
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found
