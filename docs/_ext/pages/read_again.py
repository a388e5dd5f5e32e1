"""Have all pages read again when an extension has changed, or a list beside one."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from launcher.digests import digest_of

EXTENSIONS = Path(__file__).parents[1]


def read_again(_app: Sphinx, env: BuildEnvironment, *_: set[str]) -> set[str]:
    """Return all pages, or none; otherwise pages that Sphinx has read would stay as they were."""
    digest = digest_of(EXTENSIONS, ("**/*.py", "**/*.txt"))
    if getattr(env, "extensions_digest", "") == digest:
        return set()
    env.extensions_digest = digest  # type: ignore[attr-defined]
    return set(env.found_docs)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler."""
    app.connect("env-get-outdated", read_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
