"""Write formulas as MathML, which browsers show without a script, a font or a network."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.writers.html5 import HTML5Translator

log = getLogger(__name__)
# LaTeX takes the next digit, and this converter the next number: 12 over what follows.
WITHOUT_BRACES = re.compile(r"\\[dt]?frac\s*[^\s{]|[\^_]\d\d")


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_converted(node, as_block=False))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    formula = _converted(node, as_block=True)
    translator.body.append(f'<div class="math" tabindex="0">{formula}</div>\n')
    raise nodes.SkipNode


def _converted(node: nodes.math | nodes.math_block, as_block: bool) -> str:
    if found := WITHOUT_BRACES.search(node.astext()):
        log.warning("expected braces in a formula, got %r", found.group(), location=node)
    return str(latex2mathml.tex2mathml(node.astext(), as_block=as_block))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer ``mathml``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
