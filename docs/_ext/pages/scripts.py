"""Scripts that only the pages load which have what the script works on."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def load_where(marker: str, script: str, app: Sphinx) -> None:
    """Have each page whose body contains `marker` load a script."""

    def load(
        app: Sphinx,
        pagename: str,
        templatename: str,
        context: dict[str, Any],
        doctree: nodes.document,
    ) -> None:
        del pagename, templatename, doctree
        if marker in context.get("body", ""):
            app.add_js_file(script, loading_method="defer")

    app.connect("html-page-context", load, priority=400)  # before pages.head removes files
