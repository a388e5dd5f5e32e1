"""Link the reference back to the chapters that use a name, and remove links from variables.

sphinx-gallery links the names in a chapter's code to their documentation, and writes what it found
to a file beside the chapter. It also links every variable to the class of its value. These links
are removed here: there are so many that they hide the others.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform

REFERENCE = "reference"
ROLE = re.compile(r"\{(?:func|class|meth|attr)\}`[^`]*?~?([\w.]+)>?`")


def uses(chapters: Path) -> dict[str, list[str]]:
    """Return the chapters (``"02_all_reduce"``) in whose code or prose each full name occurs."""
    found = defaultdict(set)
    for page in chapters.glob("[0-9]*.md"):
        for name in ROLE.findall(page.read_text(encoding="utf-8")):
            found[name].add(page.stem)
        in_code = page.with_suffix(".codeobj.json")  # a chapter without names has none
        names = json.loads(in_code.read_text(encoding="utf-8")) if in_code.exists() else {}
        for candidates in names.values():
            for each in candidates:
                for module in (each["module"], each["module_short"]):
                    found[f"{module}.{each['name']}"].add(page.stem)
    return {name: sorted(stems) for name, stems in found.items()}


def write_reference_again(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Have the reference written again, which is quick, when its links to chapters change.

    It does not depend on the chapters' pages, since then every change of a word would have it read
    again, too.
    """
    found = uses(Path(app.srcdir, "chapters"))
    stems = {stem for names in found.values() for stem in names}
    titles = {stem: env.titles[f"chapters/{stem}"].astext() for stem in sorted(stems)}
    if REFERENCE not in env.found_docs or getattr(env, "used_in", None) == (found, titles):
        return []
    env.used_in = found, titles  # type: ignore[attr-defined]
    return [REFERENCE]


def link_back(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Write below each description in the reference which chapters use the name."""
    if docname != REFERENCE:
        return
    chapters = uses(Path(app.srcdir, "chapters"))
    for description in doctree.findall(addnodes.desc):
        signature, content = description[0], description[-1]
        stems = sorted({stem for name in signature["ids"] for stem in chapters.get(name, ())})
        if not stems:
            continue
        line = nodes.paragraph("", "Used in chapter " if len(stems) == 1 else "Used in chapters ")
        line["classes"].append("used-in")
        for place, stem in enumerate(stems):
            address = app.builder.get_relative_uri(docname, f"chapters/{stem}")
            text = nodes.Text(stem[:2])
            title = app.env.titles[f"chapters/{stem}"].astext()
            link = nodes.reference("", "", text, refuri=address, internal=True, reftitle=title)
            line += [nodes.Text(", "), link] if place else [link]
        members = content.first_child_matching_class(addnodes.desc)
        content.insert(len(content) if members is None else members, line)


class UnlinkVariables(SphinxPostTransform):
    """Remove the links from variables to their classes."""

    default_priority = 6  # after sphinx-gallery's links, at 5
    formats = ("html",)

    def run(self, **_: Any) -> None:
        """Replace each link by its content."""
        for link in list(self.document.findall(nodes.reference)):
            if "sphx-glr-backref-instance" in link["classes"]:
                link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers and the transform."""
    app.connect("env-updated", write_reference_again)
    app.connect("doctree-resolved", link_back)
    app.add_post_transform(UnlinkVariables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
