"""Say how long this build's chapters ran."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from launcher.kept import Kept


class RunningTimes(SphinxDirective):
    """A sentence with the sum of the chapters' running times, and with the longest."""

    def run(self) -> list[nodes.Node]:
        """Read them from what is kept of the chapters' runs."""
        self.env.note_dependency("chapters/index.rst")  # made anew when there is another chapter
        seconds: dict[str, float] = {}
        for script in sorted(Path(self.env.srcdir, "chapters").glob("[0-9]*.py")):
            kept = script.with_name(f"{script.name}.job")
            self.env.note_dependency(str(kept))
            if run := Kept.read(kept):
                seconds[script.stem.partition("_")[0]] = run.seconds
        return [nodes.paragraph("", said(seconds))]


def said(seconds: dict[str, float]) -> str:
    """Return the sentence; `seconds` by the chapters' numbers."""
    if not seconds:
        return "No chapter has run in this build."
    longest = max(seconds, key=lambda number: seconds[number])
    return (
        f"The last runs of this build's {len(seconds)} chapters took "
        f"{sum(seconds.values()) / 60:.1f} minutes together, the longest, chapter {longest}, "
        f"{seconds[longest]:.0f} seconds. The time to start each of them comes on top."
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("running-times", RunningTimes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
