"""What a chapter is about, said once: on the landing page and at the top of its own page."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
from docutils import nodes
from docutils.statemachine import StringList
from gallery_launcher_kept import Kept
from gallery_markdown import FOLDED
from other_build import both
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from microddp.hosts import Box

CHAPTERS = Path(__file__).parents[2] / "chapters"
WORDS_A_MINUTE, LINES_A_MINUTE = 200, 20  # prose is read, code is worked through
OPTIONAL = re.compile(r"^## (?:Appendix|Exercises)\b", re.MULTILINE)  # from there on

# What the reader has built at the end.
BUILDS = {
    "00_baseline": "a training loop that is timed part by part",
    "01_manual": "two replicas in one process, their gradients averaged by hand",
    "02_all_reduce": "three all-reduces from send and receive, the ring among them",
    "03_naive_dp": "data-parallel training in a dozen lines",
    "04_hooks": "an all-reduce that starts inside backward",
    "05_bucketing": "a bucket plan, and hooks that follow it",
    "06_ddp": "a small wrapper, and see what the full one adds",
    "07_sync_primitives": "the chores of a training job, and mistakes that hang or spoil one",
    "08_performance": "a clock for every part of a step, and a prediction to hold against it",
    "09_case_study": "one language model trained on one device and on several",
    "10_compression": "three ways to send less, and error feedback, which keeps the rest",
    "11_local_sgd": "training whose ranks meet now and then, and DiLoCo",
    "12_uneven": "an all-reduce for links of unequal speed, and shards for ranks of unequal speed",
    "13_faults": "training that outlives its ranks, and a reader for hangs",
    "14_your_script": "a script of stock PyTorch for any number of devices, to download",
    "15_one_machine": "an all-reduce through memory that ranks share, and one by machine",
    "16_sharding": "training of which each rank keeps an n-th, in three stages",
    "17_thousand": "a simulator of many devices, held against what was measured",
}


@dataclass(frozen=True)
class Chapter:
    """A chapter in a few words; `minutes` is how long it takes to read, up to what is optional."""

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

    Raises `ValueError` if nothing is said of what it builds, or it opens with no question.
    """
    if path.stem not in BUILDS:
        raise ValueError(f"expected an entry for {path.stem} in chapter_cards.BUILDS")
    cells = jupytext.read(path).cells
    title, _, text = cells[0].source.partition("\n")
    question = re.search(r"[^.?]*\?", " ".join(text.split()))
    if question is None:
        raise ValueError(f"expected {path.name} to open with a question")
    words = lines = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            text, *optional = OPTIONAL.split(cell.source)
            words += len(text.split())
            if optional:
                break
        elif FOLDED.keys().isdisjoint(cell.metadata.get("tags", ())):
            lines += len(cell.source.splitlines())
    minutes = math.ceil(words / WORDS_A_MINUTE + lines / LINES_A_MINUTE)
    name = title.removeprefix("# ").strip()
    if not name.startswith(f"{path.stem[:2]}. "):
        raise ValueError(
            f"expected the title of {path.name} to begin with its number, got {name!r}"
        )
    return Chapter(path.stem, name, question[0].strip(), BUILDS[path.stem], minutes)


def head(chapter: Chapter, ranks: int, box: Box | None = None) -> tuple[str, str]:
    """Return what stands below the title of a chapter's page, as Markdown: words and commands.

    The commands are how it ran here, and, if that was on hosts in a box, how it runs without.
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
    """A card for each chapter of a part, `NN to NN`: title, question, picture, what is built."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Write the cards in Markdown, and have that parsed."""
        lines = [":::::{grid} 1 2 2 2", ":gutter: 3", ":class-container: chapter-cards"]
        first, last = self.arguments[0].split(" to ")
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
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, "chapter-cards"), 0, holder)
        return holder.children


class MeasuredOn(SphinxDirective):
    """The lines on what a chapter of this build was measured on, and of another one taken in."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Take them from what the chapter's run left."""
        docname = f"chapters/{self.arguments[0]}"
        kept = Path(self.env.srcdir, f"{docname}.py.job")
        self.env.note_dependency(str(kept))
        run, pair = Kept.read(kept), both(self.env, docname)
        lines = [f"Measured on {run.facts['machine']}." if run else "Not measured in this build."]
        if pair and not pair.why_not:
            lines.append(f"Each chapter can show what {pair.there.facts['machine']} gave instead.")
        return [nodes.paragraph("", line, classes=["measured-on"]) for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    app.add_directive("chapter-cards", ChapterCards)
    app.add_directive("measured-on", MeasuredOn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
