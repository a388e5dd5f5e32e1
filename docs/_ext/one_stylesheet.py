"""One style sheet for all pages: a browser shows no word before it has every one it was told of.

A dozen small files cost a slow connection a second. `SEPARATE` ones stay as they are.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

NAME = "all.css"
# The theme writes the first when pages are done. The other is as large as all else, for few pages.
SEPARATE = ("pygments.css", "sphinx-design.min.css")


def join(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Load, in the place of every style sheet, the one that has them all, in their order."""
    del pagename, templatename, doctree
    whole, parts, kept = [], [], []
    for file in sorted(context["css_files"], key=lambda css: css.priority):
        name = Path(str(file.filename)).name
        (whole if name == NAME else kept if name in SEPARATE else parts).append(file)
    if not whole:
        return  # A page of another kind than HTML.
    texts = [(app.outdir / str(file.filename)).read_text("utf-8") for file in parts]
    (app.outdir / str(whole[0].filename)).write_text("\n".join(texts), "utf-8")
    context["css_files"] = kept + whole


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler, after all that add style sheets or take them out."""
    app.add_css_file(NAME, priority=900)
    app.connect("html-page-context", join, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
