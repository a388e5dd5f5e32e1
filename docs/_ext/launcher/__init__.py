"""Run each example of a sphinx-gallery project as a torchrun job of several ranks.

Rank 0 of the job is sphinx-gallery, which runs the example block by block and writes its page; the
other ranks run the same script from top to bottom. README.md says how to use it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def setup(app: "Sphinx") -> dict[str, Any]:
    """Set up the extension."""
    from .gallery import install  # not above: ranks import this package, and need no Sphinx

    app.setup_extension("sphinx_gallery.gen_gallery")
    app.add_config_value("launcher", {}, "", types=[dict])
    # The gallery generates its pages at priority 500.
    app.connect("builder-inited", install, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
