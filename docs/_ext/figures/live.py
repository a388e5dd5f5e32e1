"""Load the scripts of live pictures (`microddp.figures.live`) on the pages that have some.

Likewise the script for figures whose values can be pointed at, which `figures.scraper` writes.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def load_scripts(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Add the shared script, and the script of each kind of picture on the page."""
    del pagename, templatename, doctree
    body = context.get("body", "")
    kinds = re.findall(r'<figure class="live" data-live="(\w+)"', body)
    if '<script type="application/json" class="values">' in body:
        kinds.append("values")
    if kinds:
        for name in ("live", *dict.fromkeys(kinds)):
            app.add_js_file(f"live/{name}.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler."""
    app.connect("html-page-context", load_scripts, priority=400)  # before pages.head removes files
    return {"parallel_read_safe": True, "parallel_write_safe": True}
