"""What search engines and screen readers want of a page, and the theme leaves out."""

import re
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONGEST_DESCRIPTION = 160  # characters; search engines cut longer ones


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Give the page a meta description: its first paragraph."""
    del app, pagename, templatename
    if doctree is None:
        return
    for paragraph in doctree.findall(nodes.paragraph):
        if not isinstance(paragraph.parent, nodes.section):
            continue  # a note, a table cell
        text = " ".join(paragraph.astext().split())
        if len(text) > LONGEST_DESCRIPTION:
            text = text[: LONGEST_DESCRIPTION - 4].rsplit(" ", 1)[0] + " ..."
        context["metatags"] += f'\n<meta name="description" content="{escape(text)}">'
        return


def let_blocks_scroll(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Let the keyboard reach what scrolls sideways: code, output and tables."""
    del app, pagename, templatename, doctree
    if "body" in context:
        context["body"] = re.sub(r"<pre>", '<pre tabindex="0">', context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.connect("html-page-context", describe)
    app.connect("html-page-context", let_blocks_scroll)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
