"""Show only once what a chapter was measured on: at the top of its page.

A chapter also prints this line, for those who run it; here it is taken out of the outputs.
"""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class SayItOnce(SphinxTransform):
    """Remove the line at the top of a page from the outputs below it."""

    default_priority = 700

    def apply(self, **_: Any) -> None:
        """Remove the line; an output without other lines is removed as a whole."""
        top = [
            node.astext()
            for node in self.document.findall(nodes.container)
            if "measured-on" in node["classes"]
        ]
        outputs = [n for n in self.document.findall(nodes.literal_block) if _is_output(n)]
        for output in outputs if top else []:
            lines = output.astext().split("\n")
            kept = [
                line for line in lines if not any(f"Measured on {line}." in text for text in top)
            ]
            if kept == lines:
                continue
            if any(line.strip() for line in kept):
                text = "\n".join(kept)
                output.rawsource, output[:] = text, [nodes.Text(text)]
            else:
                output.parent.remove(output)


def _is_output(node: nodes.literal_block) -> bool:
    return "sphx-glr-script-out" in (*node["classes"], *node.parent.get("classes", ()))


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_transform(SayItOnce)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
