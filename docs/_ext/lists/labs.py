"""List the labs and their checks."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import microddp.labs
from microddp.labs.engine.catalogue import LABS
from microddp.labs.engine.lab import Check, Lab


class LabList(SphinxDirective):
    """A paragraph on each lab: what to write, its chapter, its checks."""

    def run(self) -> list[nodes.Node]:
        """Write them in Markdown, and parse that."""
        folder = Path(microddp.labs.__file__).parent
        for path in (*folder.glob("engine/*.py"), *folder.glob("*/checks.py")):
            self.env.note_dependency(str(path))
        lines = [line for lab in LABS.values() for line in paragraphs(lab)]
        return self.parse_text_to_nodes("\n".join(lines))


def paragraphs(lab: Lab) -> list[str]:
    """Return the description of a lab, as lines of Markdown."""
    functions = ", ".join(f"`{name}`" for name in lab.functions)
    return [
        f"**Lab {lab.number}: {lab.title}.** You write {functions}, with "
        f"{{doc}}`chapter {lab.number} <chapters/{lab.chapter}>`. Its checks:",
        "",
        *(f"- {check.title} ({where(check)})" for check in lab.checks),
        "",
    ]


def where(check: Check) -> str:
    """Say on how many ranks, and over which links, a check runs."""
    *others, last = map(str, check.ranks)
    ranks = f"{', '.join(others)} and {last} ranks" if others else f"{last} rank"
    ranks += "s" if not others and last != "1" else ""
    return f"{ranks}, links of {check.link}" if check.link else ranks


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("lab-list", LabList)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
