"""Add what the theme leaves out of a page for search engines, keyboards and screen readers."""

import re
from html import escape
from pathlib import Path
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


def mend_body(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Let the keyboard reach what scrolls sideways; set the number in a chapter's title apart."""
    del app, pagename, templatename, doctree
    if "body" in context:
        body = context["body"].replace("<pre>", '<pre tabindex="0">')
        number = r'<h1><span class="number">\1</span> '
        context["body"] = re.sub(r"<h1>(\d\d\.) ", number, body, count=1)


# Elements of the theme's templates, and the same with what the site needs: names for screen
# readers, and a size, so that nothing moves when the image has loaded.
MENDED = {
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="This page">',
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
    '<img src="_static/minus.png"': '<img width="11" height="11" src="_static/minus.png"',
}


# Style sheets and scripts that extensions load for features this site does not use.
UNUSED = ("sg_gallery-binder", "sg_gallery-dataframe", "sg_gallery-rendered-html", "sg-tags")
UNUSED += ("design-tabs",)


def leave_unused_files_out(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Load no style sheet and no script that the page does not use."""
    del app, pagename, templatename, doctree
    unused = UNUSED if "sd-card" in context.get("body", "") else (*UNUSED, "sphinx-design")
    for kind in ("css_files", "script_files"):
        context[kind] = [
            file
            for file in context[kind]
            if not any(name in str(getattr(file, "filename", file)) for name in unused)
        ]


def lead_to_the_script(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Make "edit this page" lead to a chapter's script; the gallery's own pages lead nowhere."""
    del app, templatename, doctree
    folder, _, name = pagename.rpartition("/")
    if folder == "chapters":
        context["theme_source_directory"] = ""
        context["page_source_suffix"] = ".py" if name[:2].isdigit() else ""


def finish_pages(app: Sphinx, exception: Exception | None) -> None:
    """Mend the theme's elements on every page that was written."""
    if exception or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = before = page.read_text(encoding="utf-8")
        for element, mended in MENDED.items():
            if mended not in text:
                text = text.replace(element, mended)
        if text != before:
            page.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.connect("html-page-context", describe)
    app.connect("html-page-context", mend_body)
    app.connect("html-page-context", leave_unused_files_out)
    app.connect("html-page-context", lead_to_the_script)
    app.connect("build-finished", finish_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
