"""Make sections of chapters found by words that people search for: main entries of the index.

Sphinx's search finds pages by their words, and sections by entries of the index. A chapter lists
such words at the cell in which a section begins: `# %% [markdown] index=["ring"]`.
"""

import re
from pathlib import Path
from typing import Any

import jupytext
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def words_of(script: Path) -> dict[str, list[str]]:
    """Return a chapter's words for the index, by titles of sections."""
    found = {}
    for cell in jupytext.read(script).cells:
        if words := cell.metadata.get("index"):
            title = HEADING.search(cell.source)
            found[title[1] if title else ""] = list(words)
    return found


class MarkSections(SphinxTransform):
    """Add the entries to the sections."""

    default_priority = 800  # before the domains collect them, at 850

    def apply(self, **_: Any) -> None:
        """Add them; raises `ExtensionError` if a cell has words, but begins no section."""
        script = Path(self.app.confdir, f"{self.env.docname}.py")
        if not script.is_file():
            return
        words = words_of(script)
        for section in list(self.document.findall(nodes.section)):
            entries = [
                ("single", word, section["ids"][0], "main", None)
                for word in words.pop(section[0].astext().replace("’", "'"), ())  # noqa: RUF001
            ]
            if entries:
                section.insert(1, addnodes.index(entries=entries))
        if words:
            missing = ", ".join(map(repr, words))
            raise ExtensionError(f"search_words: {script.stem} has no section {missing}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_transform(MarkSections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
