"""Describe chapters: on cards of the landing page, and at the top of their own pages."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from microddp.hosts import Box
from pages.markdown import FOLDED, read_cells

CHAPTERS = Path(__file__).parents[3] / "chapters"
WORDS_A_MINUTE, LINES_A_MINUTE = 200, 20
OPTIONAL = re.compile(r"^## (?:Appendix|Exercises)\b", re.MULTILINE)  # what follows is optional
SETTING = re.compile(r"^# sphinx_gallery_.*\n", re.MULTILINE)  # not shown on the page
# The chapter's own words on what its reader builds.
BUILDS = re.compile(r'^# sphinx_gallery_builds = "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Chapter:
    """A chapter in a few words; `minutes` to read it, without what is optional."""

    stem: str
    title: str
    question: str
    builds: str
    minutes: int

    @property
    def number(self) -> str:
        """Two digits, as in the name of the file."""
        return self.stem[:2]


def read_chapter(path: Path) -> Chapter:
    """Read a chapter's script.

    Raises `ValueError` if it does not say what it builds, opens without a question, or has a title
    without its number.
    """
    script = path.read_text(encoding="utf-8")
    builds = BUILDS.search(script)
    if builds is None:
        raise ValueError(f"expected {path.name} to say what it builds: sphinx_gallery_builds")
    cells = read_cells(script)
    title, _, text = cells[0].source.partition("\n")
    question = re.search(r"[^.?]*\?", " ".join(text.split()))
    if question is None:
        raise ValueError(f"expected {path.name} to open with a question")
    words = lines = 0
    for cell in cells:
        if cell.kind == "markdown":
            text, *optional = OPTIONAL.split(cell.source)
            words += len(text.split())
            if optional:
                break
        elif FOLDED.keys().isdisjoint(cell.tags):
            lines += len(SETTING.sub("", cell.source).splitlines())
    minutes = math.ceil(words / WORDS_A_MINUTE + lines / LINES_A_MINUTE)
    name = title.removeprefix("# ").strip()
    if not name.startswith(f"{path.stem[:2]}. "):
        raise ValueError(
            f"expected the title of {path.name} to begin with its number, got {name!r}"
        )
    return Chapter(path.stem, name, question[0].strip(), builds[1], minutes)


def head(chapter: Chapter, ranks: int, box: Box | None = None) -> tuple[str, str]:
    """Return what stands below the title of a chapter's page, as Markdown: words, and commands.

    The commands start the chapter as it ran here and, if that was on hosts in a box, without hosts.
    """
    commands = [f"$ torchrun --nproc-per-node={ranks} chapters/{chapter.stem}.py"]
    if box:
        hosts = f"--hosts {len(box.links)} --link {box.links[0].option}"
        if ranks > len(box.links):
            hosts += f" --ranks-per-host {-(-ranks // len(box.links))}"
        commands.insert(0, f"$ python -m microddp.hosts {hosts} -- chapters/{chapter.stem}.py")
    return (
        f":::{{div}} chapter-head\n**In this chapter you build** {chapter.builds}. "
        f"About {chapter.minutes} minutes to read, without exercises. Run it yourself:\n:::",
        "\n".join(["```console", *commands, "```"]),
    )


class ChapterCards(SphinxDirective):
    """Cards of the chapters `NN to NN`: title, question, picture, what the reader builds."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Write the cards in Markdown, and parse that."""
        lines = [":::::{grid} 1 2 2 2", ":gutter: 3", ":class-container: chapter-cards"]
        first, last = self.arguments[0].split(" to ")
        self.env.note_dependency("chapters/index.rst")  # made anew when there is another chapter
        for path in sorted(CHAPTERS.glob("[0-9]*.py")):
            if not first <= path.stem[:2] <= last:
                continue
            chapter = read_chapter(path)
            self.env.note_dependency(str(path))
            lines += [
                f"::::{{grid-item-card}} {chapter.title}",
                f":link: chapters/{chapter.stem}",
                ":link-type: doc",
                f":img-top: chapters/images/thumb/sphx_glr_{chapter.stem}_thumb.svg",
                f":img-alt: A figure of chapter {chapter.number}",
                chapter.question,
                ":::{card-footer}",
                f"You build {chapter.builds}. About {chapter.minutes} minutes.",
                ":::",
                "::::",
            ]
        lines.append(":::::")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("chapter-cards", ChapterCards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
