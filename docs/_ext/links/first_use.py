"""Link the first use of each term in a chapter to the glossary."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

OUR_OWN = {"measured-on", "chapter-head"}  # classes of what the build writes above a chapter
# Where a term is not prose, or is a link already.
NOT_PROSE = (nodes.reference, nodes.literal, nodes.math, nodes.title, nodes.table, nodes.caption)


def terms(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Return the page and anchor of each term, in lower case, the longest term first."""
    objects = app.env.domains.standard_domain.objects
    found = {name.lower(): place for (kind, name), place in objects.items() if kind == "term"}
    return {term: found[term] for term in sorted(found, key=len, reverse=True)}


def write_chapters_again(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Have all chapters written again when the glossary's terms change."""
    found = terms(app)
    if getattr(env, "terms", None) == found:
        return []
    env.terms = found  # type: ignore[attr-defined]
    return [name for name in env.found_docs if name.startswith("chapters/")]


def link_first_uses(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Link the first use of each term, or of its plural."""
    glossary = terms(app)
    if not docname.startswith("chapters/") or not glossary:
        return
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, glossary))})s?\b", re.IGNORECASE)
    seen = set()
    for text in list(doctree.findall(nodes.Text)):
        parents = []
        node = text.parent
        while node is not None:
            parents.append(node)
            node = node.parent
        in_prose = any(isinstance(parent, nodes.paragraph) for parent in parents)
        if not in_prose or any(isinstance(parent, NOT_PROSE) for parent in parents):
            continue
        if any(OUR_OWN & set(parent.get("classes", ())) for parent in parents):
            continue
        pieces: list[nodes.Node] = []
        end = 0
        for match in pattern.finditer(text):
            term = match[1].lower()
            if term in seen:
                continue
            seen.add(term)
            page, anchor = glossary[term]
            address = f"{app.builder.get_relative_uri(docname, page)}#{anchor}"
            link = nodes.reference("", match[0], refuri=address, internal=True, classes=["term"])
            pieces += [nodes.Text(text[end : match.start()]), link]
            end = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handler."""
    app.connect("env-updated", write_chapters_again)
    app.connect("doctree-resolved", link_first_uses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
