"""The site's own extensions: links to the glossary, and what is said of each chapter."""

import re

import pytest
from gallery_book import LAUNCHER, Book

from links import torch_names
from lists.chapter_cards import CHAPTERS, head, read_chapter
from lists.running_times import said
from microddp.hosts import Box, Link
from pages.head import lead_to_the_script

GLOSSARY = """# Words

:::{glossary}
ring
  It goes round.

process group
  Some ranks.

group
  The same.
:::
"""


def test_the_first_use_of_a_term_links_to_the_glossary(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("links.first_use")
    book.write("docs/words.md", GLOSSARY)
    book.write("docs/index.md", "# Book\n\nA ring.\n\n```{toctree}\nwords\nchapters/index\n```\n")
    text = (
        '# %% [markdown]\n"""\n# A ring\n\nA `ring`, a string and two Rings; another ring in a '
        '[group](https://example.org) and a process group.\n"""\n\n# %%\nx = 1\n'
    )
    book.write("chapters/a.py", text)
    book.configure("pages.markdown", "links.first_use")
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    links = re.findall(r'<a class="term[^"]*" href="([^"]*)">([^<]*)</a>', book.page("a"))
    assert links == [
        ("../words.html#term-ring", "Rings"),
        ("../words.html#term-process-group", "process group"),
    ]
    assert 'class="term' not in (book.root / "_site/index.html").read_text()
    book.write("docs/words.md", GLOSSARY.replace("Ring", "String").replace("ring", "string"))
    assert book.build("-W").process.returncode == 0
    again = re.findall(r'<a class="term[^"]*" href="([^"]*)">([^<]*)</a>', book.page("a"))
    assert ("../words.html#term-string", "string") in again
    assert "term-ring" not in book.page("a")


@pytest.mark.parametrize("path", sorted(CHAPTERS.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_every_chapter_opens_with_a_question_and_says_what_is_built(path):
    chapter = read_chapter(path)
    assert chapter.question.endswith("?")
    assert f'# sphinx_gallery_builds = "{chapter.builds}"\n' in path.read_text()
    assert 3 <= chapter.minutes <= 25
    assert f"torchrun --nproc-per-node=3 chapters/{path.name}" in head(chapter, 3)[1]
    boxed = head(chapter, 2, Box((Link(1e9),) * 2, cores=2))[1]
    assert f"microddp.hosts --hosts 2 --link 1gbit -- chapters/{path.name}" in boxed
    several = head(chapter, 4, Box((Link(1e9),) * 2, cores=2))[1]
    assert f"--link 1gbit --ranks-per-host 2 -- chapters/{path.name}" in several


def test_a_chapter_without_a_question_is_refused(tmp_path):
    silent = tmp_path / "00_baseline.py"
    silent.write_text('# %% [markdown]\n"""\n# Title\n\nA question?\n"""\n')
    with pytest.raises(ValueError, match=r"expected 00_baseline.py to say what it builds"):
        read_chapter(silent)
    builds = '\n# %%\n# sphinx_gallery_builds = "a loop"\n'
    silent.write_text(f'# %% [markdown]\n"""\n# Title\n\nNo question.\n"""\n{builds}')
    with pytest.raises(ValueError, match=r"00_baseline.py to open with a question"):
        read_chapter(silent)
    silent.write_text(f'# %% [markdown]\n"""\n# Title\n\nA question?\n"""\n{builds}')
    with pytest.raises(ValueError, match=r"title of 00_baseline.py to begin with its number"):
        read_chapter(silent)


def test_words_that_people_search_for_lead_to_sections(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("pages.markdown", "links.search_words")
    text = '# %% [markdown]\n"""\n# 01. Split\n"""\n\n'
    text += '# %% [markdown] index=["unequal shards"]\n"""\n## Where it breaks: some\n"""\n'
    book.write("chapters/01_manual.py", text)
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    index = (book.root / "_site/genindex.html").read_text()
    place = "chapters/01_manual.html#where-it-breaks-some"
    assert re.search(f'<a href="{place}">(<strong>)?unequal shards', index), "the main entry"
    assert "unequal shards" in (book.root / "_site/searchindex.js").read_text()

    book.write("docs/other.md", "---\norphan: true\n---\n# Another page\n")
    assert book.build("-W").process.returncode == 0
    assert "Another page" in (search := (book.root / "_site/searchindex.js").read_text())
    assert "unequal shards" in search, "of a page that this build did not write"

    book.write("chapters/01_manual.py", text.replace("## ", ""))
    build = book.build()
    assert build.process.returncode != 0
    assert "01_manual has no section ''" in build.output


def test_a_page_says_how_long_the_chapters_ran(tmp_path):
    book = Book(tmp_path / "book")
    book.configure(*LAUNCHER, "lists.running_times", launcher={"ranks": 1})
    for name, pause in (("01_short", 0), ("02_long", 1)):
        book.chapter(name, f"import time\ntime.sleep({pause})")
    book.write(
        "docs/index.md",
        "# Book\n\n```{running-times}\n```\n\n```{toctree}\nchapters/index\n```\n",
    )
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    page = (book.root / "_site/index.html").read_text()
    assert re.search(r" 2 chapters took 0\.\d minutes .* chapter 02, \d seconds\.", page)
    assert said({}) == "No chapter has run in this build."
    assert "19 chapters took 9.5 minutes" in said({f"{i:02}": 30.0 for i in range(19)})


@pytest.mark.parametrize(
    ("page", "edited"),
    [
        ("install", ("docs/", ".md")),
        ("chapters/03_naive_dp", ("", ".py")),
        ("chapters/index", ("", "")),
    ],
)
def test_a_page_is_edited_where_it_is_written(page, edited):
    context = {"theme_source_directory": "docs/", "page_source_suffix": ".md"}
    lead_to_the_script(None, page, "page.html", context, None)
    assert (context["theme_source_directory"], context["page_source_suffix"]) == edited


def test_code_links_to_the_reference_and_to_pytorch_and_the_reference_back(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("sphinx.ext.autodoc", "pages.markdown", "links.torch_names", "links.used_in")
    book.write("tool.py", "class Tool:\n    'A tool.'\n\ndef other():\n    'Not used.'\n")
    directives = "```{eval-rst}\n.. autoclass:: tool.Tool\n.. autofunction:: tool.other\n```\n"
    book.write("docs/reference.md", f"# Reference\n\n{directives}")
    book.write("docs/index.md", "# Book\n\n```{toctree}\nreference\nchapters/index\n```\n")
    book.chapter(
        "04_uses", "import torch\nimport tool\nthing = tool.Tool()\ntorch.cat([torch.ones(2)])"
    )
    book.chapter("05_names", "x = 1").write_text("# %% [markdown]\n# # T\n# {class}`tool.Tool`\n")
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    page = book.page("04_uses")
    addresses = re.findall(r'href="([^"]*)" title="(?:tool|torch)', page)
    torch_page = "https://docs.pytorch.org/docs/stable/generated/torch.{0}.html#torch.{0}"
    assert addresses == [
        "../reference.html#tool.Tool",
        torch_page.format("cat"),
        torch_page.format("ones"),
    ]
    assert ">thing</span></a>" not in page, "a variable"
    back = re.findall("Used in .*</p>", (book.root / "_site/reference.html").read_text())
    assert len(back) == 1
    assert re.findall('href="([^"]*)" title="([^"]*)">([^<]*)', back[0]) == [
        ("chapters/04_uses.html", "04_uses", "04"),
        ("chapters/05_names.html", "T", "05"),
    ]

    # Where the links do not change, the reference is not touched; where they do, it is not read.
    names = book.root / "chapters/05_names.py"
    for change, written in (("# # T\n# More.", False), ("# # Title", True)):
        names.write_text(names.read_text().replace("# # T", change, 1))
        build = book.build("-W")
        assert not re.search(r"reading sources.*\breference", build.output)
        assert bool(re.search(r"writing output.*\breference", build.output)) == written
    assert 'title="Title">05' in (book.root / "_site/reference.html").read_text()


def test_a_line_that_names_nothing_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "names.txt"
    path.write_text("# a comment\n\ntensors.html class torch.Tensor\n")
    monkeypatch.setattr(torch_names, "LIST", path)
    assert torch_names.inventory().startswith(b"# Sphinx inventory version 2\n")
    path.write_text("tensors.html torch.Tensor\n")
    with pytest.raises(ValueError, match=r"address, role and names in names.txt, got 'tensors"):
        torch_names.inventory()


def test_pages_are_read_again_when_an_extension_or_a_list_has_changed(tmp_path):
    book = Book(tmp_path / "book")
    (book.root / "ours").mkdir()
    redirect = "from pages import read_again\nread_again.EXTENSIONS = Path(__file__).parent\n"
    module = book.write(
        "ours/redirect.py",
        f"from pathlib import Path\n{redirect}def setup(app): read_again.setup(app)\n",
    )
    names = book.write("ours/names.txt", "one")
    book.configure("ours.redirect", "pages.markdown")
    book.chapter("01_reads", "x = 1")
    assert book.build("-W").process.returncode == 0
    for changed in (None, module, names):
        if changed:
            changed.write_text(changed.read_text() + "\n\n")
        build = book.build("-W")
        assert build.process.returncode == 0, build.output
        assert bool(re.search(r"reading sources.*\bindex", build.output)) == bool(changed)
