"""Show findings as prose, list those of all chapters on one page, and write them to a file.

A chapter prints a finding (`microddp.findings`) as lines that begin with "> " and end with its
name in brackets, among other output. Here each becomes a paragraph where it was printed. The
directive `findings` lists them, by chapter; `findings.json` has them for a comparison of builds.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from builds.other_build import THERE
from pages.printed_tables import PRINTED

FINDING = re.compile(r"^> (?:.*\n> )*?.*\[(?P<name>[a-z0-9-]+)\.(?P<side>\w+)\]$", re.MULTILINE)
FILE = "findings.json"
MARK = "\N{BLACK DIAMOND}"


@dataclass(frozen=True)
class Finding:
    """A finding of a chapter: its name, the alternative that was true, and the sentence."""

    name: str
    side: str
    text: str
    there: bool = False  # found by another machine's build

    @property
    def anchor(self) -> str:
        """The id of its paragraph."""
        return f"finding-{self.name}{'-there' * self.there}"


def pieces(text: str, there: bool = False) -> Iterator[str | Finding]:
    """Split printed text into findings and what stands between them, in order."""
    end = 0
    for found in FINDING.finditer(text):
        if between := text[end : found.start()].strip("\n"):
            yield between
        said = " ".join(line.removeprefix("> ") for line in found[0].split("\n"))
        label = f" [{found['name']}.{found['side']}]"
        yield Finding(found["name"], found["side"], said.removesuffix(label), there)
        end = found.end()
    if rest := text[end:].strip("\n"):
        yield rest


def in_words(finding: Finding) -> list[nodes.Node]:
    """Return the sentence, with code where it has backticks."""
    parts = finding.text.split("`")
    return [
        nodes.literal("", part) if i % 2 else nodes.Text(part)
        for i, part in enumerate(parts)
        if part
    ]


class ShowFindings(SphinxTransform):
    """Take findings out of what a cell printed, and show them as paragraphs."""

    default_priority = 710  # after what is said at the top of the page has left the outputs

    def apply(self, **_: Any) -> None:
        """Replace blocks of printed text that have findings, and keep these for the list."""
        kept: list[Finding] = []
        for block in list(self.document.findall(nodes.literal_block)):
            if PRINTED not in block["classes"]:
                continue
            there = _within(block, THERE)
            parts = list(pieces(block.astext(), there))
            findings = [part for part in parts if isinstance(part, Finding)]
            if findings:
                block.parent.replace(block, [self._shown(block, part) for part in parts])
            kept += findings
        _findings(self.env)[self.env.docname] = kept

    def _shown(self, block: nodes.literal_block, part: str | Finding) -> nodes.Node:
        if isinstance(part, str):
            return nodes.literal_block(part, part, **block.attributes)
        mark = nodes.reference(
            "",
            MARK,
            refid=part.anchor,
            reftitle=f"Computed by this run: {part.name}.{part.side}",
            classes=["finding-mark"],
        )
        paragraph = nodes.paragraph("", "", *in_words(part), nodes.Text(" "), mark)
        paragraph["classes"].append("finding")
        paragraph["ids"].append(part.anchor)
        return paragraph


def _within(node: nodes.Node, name: str) -> bool:
    while node is not None:
        if name in getattr(node, "attributes", {}).get("classes", ()):
            return True
        node = node.parent
    return False


def _findings(env: BuildEnvironment) -> dict[str, list[Finding]]:
    if not hasattr(env, "findings"):
        env.findings = {}  # type: ignore[attr-defined]
    found: dict[str, list[Finding]] = env.findings
    return found


def _lists(env: BuildEnvironment) -> set[str]:
    if not hasattr(env, "lists_of_findings"):
        env.lists_of_findings = set()  # type: ignore[attr-defined]
    pages: set[str] = env.lists_of_findings
    return pages


class ListOfFindings(nodes.General, nodes.Element):
    """The place of the list, until all pages are read."""


class Findings(SphinxDirective):
    """List all findings of this build, chapter by chapter, each linked to its place."""

    def run(self) -> list[nodes.Node]:
        """Keep the place."""
        _lists(self.env).add(self.env.docname)
        return [ListOfFindings()]


class FindingOf(SphinxDirective):
    """Quote a finding of this build, with a link to its chapter: `{finding} 06_ddp climax`."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Keep the place."""
        _lists(self.env).add(self.env.docname)
        page, name = self.arguments
        return [ListOfFindings(page=f"chapters/{page}", name=name)]


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the lists, and single findings, in their places."""
    for place in list(doctree.findall(ListOfFindings)):
        shown: list[nodes.Node] = []
        for page in _pages(app.env):
            if "name" not in place:
                shown.append(_chapter(app, docname, page))
            elif page == place["page"]:
                found = [f for f in _findings(app.env)[page] if f.name == place["name"]]
                shown += [_linked(app, docname, page, one) for one in found if not one.there]
        place.replace_self(shown)


def _pages(env: BuildEnvironment) -> list[str]:
    return sorted(page for page, found in _findings(env).items() if found)


def _chapter(app: Sphinx, docname: str, page: str) -> nodes.section:
    title = app.env.titles[page].astext()
    items = nodes.bullet_list(classes=["findings"])
    for found in _findings(app.env)[page]:
        words = _linked(app, docname, page, found)
        if found.there:
            words.insert(0, nodes.emphasis("", "There: "))
        items += nodes.list_item("", words)
    return nodes.section("", nodes.title("", title), items, ids=[nodes.make_id(page)])


def _linked(app: Sphinx, docname: str, page: str, found: Finding) -> nodes.paragraph:
    address = f"{app.builder.get_relative_uri(docname, page)}#{found.anchor}"
    link = nodes.reference(
        "",
        MARK,
        refuri=address,
        internal=True,
        reftitle=f"In its chapter: {found.name}",
        classes=["finding-mark"],
    )
    return nodes.paragraph("", "", *in_words(found), nodes.Text(" "), link, classes=["finding"])


def write_again(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Have the list written anew, as what it lists may have changed."""
    del app
    return [page for page in env.found_docs if page in _lists(env)]


def purge(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """Forget the findings of a page that is read again, or gone."""
    del app
    _findings(env).pop(docname, None)


def merge(app: Sphinx, env: BuildEnvironment, docnames: list[str], other: BuildEnvironment) -> None:
    """Take over what another process read."""
    del app
    for docname in docnames:
        if docname in _findings(other):
            _findings(env)[docname] = _findings(other)[docname]
    _lists(env).update(_lists(other))


def write_file(app: Sphinx, error: Exception | None) -> None:
    """Write the findings of this build to a file of the site."""
    if error is None and app.builder.format == "html":
        listed = {
            page: [asdict(found) for found in _findings(app.env)[page] if not found.there]
            for page in _pages(app.env)
        }
        Path(app.outdir, FILE).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.add_transform(ShowFindings)
    app.add_node(ListOfFindings)
    app.add_directive("findings", Findings)
    app.add_directive("finding", FindingOf)
    app.connect("env-purge-doc", purge)
    app.connect("env-merge-info", merge)
    app.connect("env-updated", write_again)
    app.connect("doctree-resolved", fill)
    app.connect("build-finished", write_file)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": 1}
