"""Join all style sheets into one: a browser shows nothing before it has loaded all of them.

A dozen small files cost a slow connection a second. Those in `SEPARATE` stay files of their own.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

NAME = "all.css"
# The theme writes the first after the pages. The second is as large as all others together, and
# few pages need it.
SEPARATE = ("pygments.css", "sphinx-design.min.css")


def join(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Write all style sheets of a page into one file, in their order, and load that instead."""
    del pagename, templatename, doctree
    whole, parts, kept = [], [], []
    for file in sorted(context["css_files"], key=lambda css: css.priority):
        name = Path(str(file.filename)).name
        (whole if name == NAME else kept if name in SEPARATE else parts).append(file)
    if not whole:
        return  # not an HTML page
    texts = [(app.outdir / str(file.filename)).read_text("utf-8") for file in parts]
    (app.outdir / str(whole[0].filename)).write_text("\n".join(texts), "utf-8")
    context["css_files"] = kept + whole


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler, after all handlers that add or remove style sheets."""
    app.add_css_file(NAME, priority=900)
    app.connect("html-page-context", join, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
