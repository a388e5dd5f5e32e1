"""Make sections of chapters found by words that people search for: main entries of the index.

Sphinx's search finds pages by their words, and sections by entries of the index. A chapter lists
such words at the cell in which a section begins: `# %% [markdown] index=["ring"]`.
"""

import pickle
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import ENV_PICKLE_FILENAME, Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

from pages.markdown import read_cells

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def words_of(script: Path) -> dict[str, list[str]]:
    """Return a chapter's words for the index, by titles of sections."""
    found = {}
    for cell in read_cells(script.read_text(encoding="utf-8")):
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


def save_again(app: Sphinx, exception: Exception | None) -> None:
    """Save the environment once more, with the entries of the pages that were written.

    Sphinx gives them to the search as it writes a page, and saves them before. In a later build,
    which does not write that page again, they would be gone.
    """
    if exception is None:
        with Path(app.doctreedir, ENV_PICKLE_FILENAME).open("wb") as file:
            pickle.dump(app.env, file, pickle.HIGHEST_PROTOCOL)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform, and connect the handler."""
    app.add_transform(MarkSections)
    app.connect("build-finished", save_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
