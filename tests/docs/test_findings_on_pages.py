"""Findings as prose of their page, on the page of all findings, and in its file."""

import html
import json
import re
import subprocess
import sys

from gallery_book import EXTENSIONS, LAUNCHER, PRELOAD, Book

from builds.compare_findings import changes, read
from pages.findings import Finding, pieces

PRINTED = """\
before
> A step takes 143 ms (140 to 146), as long as 5 of `finish`, and
> this line goes on. [price.dear]
> Two. [other-one.a]

name   ms
----  ---
ring    3
> after, in no brackets"""

CHAPTER = """
import os

if os.environ["RANK"] == "0":
    print("before")
    print("> A step is", os.environ["STEP"], "than")
    print("> `one` <device>. [step." + os.environ["STEP"] + "]")
    print("after")
"""


OTHER = """
import os

other_build = {"record": os.environ.get("RECORD"), "there": os.environ.get("THERE")}
"""


def test_findings_are_split_from_what_else_was_printed():
    sentence = "A step takes 143 ms (140 to 146), as long as 5 of `finish`, and this line goes on."
    assert list(pieces(PRINTED)) == [
        "before",
        Finding("price", "dear", sentence),
        Finding("other-one", "a", "Two."),
        "name   ms\n----  ---\nring    3\n> after, in no brackets",
    ]
    assert list(pieces("nothing\nfound")) == ["nothing\nfound"]


def test_a_book_lists_its_findings_and_two_builds_are_compared(tmp_path):
    book = Book(tmp_path / "book")
    book.configure(
        *(*LAUNCHER, "builds.other_build", "pages.printed_tables", "pages.findings"),
        launcher={"ranks": 2, "preload": PRELOAD},
    )
    conf = book.root / "conf.py"
    conf.write_text(conf.read_text() + OTHER)
    book.chapter("steps", CHAPTER)
    index = "# Book\n\n```{toctree}\nfindings\nchapters/index\n```\n"
    book.write("docs/index.md", index)
    book.write("docs/findings.md", "# Findings\n\n```{findings}\n```\n")
    record = str(tmp_path / "record")
    build = book.build_in_forks("-W", STEP="faster", RECORD=record)
    assert build.process.returncode == 0, build.output

    page = html.unescape(book.page("steps"))
    said = re.search(r'<p class="finding" id="finding-step">(.*?)</p>', page, re.DOTALL)[1]
    words = " ".join(re.sub("<[^d].*?>", "", said).split())
    assert words == "A step is faster than one <device>. ◆"
    assert 'title="Computed by this run: step.faster"' in said
    assert "> A step is faster" not in page
    shown = page[page.index("sphx-glr-script-out") :]
    assert shown.index("before") < shown.index("finding-step") < shown.index("after")

    listed = html.unescape((book.root / "_site/findings.html").read_text())
    assert "A step is faster than" in listed
    assert 'href="chapters/steps.html#finding-step"' in listed

    first = tmp_path / "first.json"
    (book.root / "_site/findings.json").rename(first)
    assert json.loads(first.read_text())["chapters/steps"][0]["side"] == "faster"
    assert book.build_in_forks("-W", STEP="slower").ran() == []  # the list needs no run
    assert read(book.root / "_site") == read(first)

    (book.root / "docs/chapters/steps.py.md5").unlink()
    build = book.build_in_forks("-W", STEP="slower", THERE=record)
    assert build.ran() == ["steps.py"], build.output
    page, listed = book.page("steps"), (book.root / "_site/findings.html").read_text()
    for name, side in (("finding-step", "slower"), ("finding-step-there", "faster")):
        assert f"A step is {side} than" in page[page.index(f'id="{name}"') :][:200]
        assert f'href="chapters/steps.html#{name}"' in listed
    assert "<em>There: </em>A step is faster than" in listed
    script = EXTENSIONS / "builds/compare_findings.py"
    told = subprocess.run(
        [sys.executable, script, first, book.root / "_site"], capture_output=True, text=True
    ).stdout
    assert told.splitlines() == [
        "chapters/steps: step",
        "  old: (faster) A step is faster than `one` <device>.",
        "  new: (slower) A step is slower than `one` <device>.",
        "1 findings in the old build, 1 in the new, 1 in both",
    ]


def test_what_only_one_build_found_is_a_change():
    old, new = {"a: x": ("more", "More.")}, {"a: y": ("more", "More.")}
    assert list(changes(old, old)) == []
    assert list(changes(old, new)) == [
        *("a: x", "  old: (more) More.", "  new: not there"),
        *("a: y", "  old: not there", "  new: (more) More."),
    ]
