"""The skeleton of a solution: the script without the bodies of the functions to write."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def skeleton(solution: str, functions: Sequence[str]) -> str:
    """Return a script with ``raise NotImplementedError`` in place of some functions' bodies.

    Their docstrings stay.
    """
    lines = solution.splitlines()
    found = definitions(solution)
    chosen = [found[name] for name in functions]
    for function in sorted(chosen, key=lambda function: -function.lineno):  # from the last one up
        docstring, *body = function.body
        error = " " * docstring.col_offset + f'raise NotImplementedError("{function.name}")'
        lines[docstring.end_lineno : body[-1].end_lineno] = [error]
    return "\n".join(lines) + "\n"


def definitions(script: str) -> dict[str, ast.FunctionDef]:
    """Return a script's functions and its classes' methods by name: ``step``, ``Counter.add``."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(script).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method for method in methods}
    return found
