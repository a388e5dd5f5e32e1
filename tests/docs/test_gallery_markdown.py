"""The page bridge: Markdown chapters become MyST pages and jupytext notebooks."""

import html
import json
import re
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest
from gallery_book import Book, Build
from sphinx.errors import ExtensionError

from pages import markdown

RICH = r'''# %% [markdown]
r"""
# Everything at **once**

The *intro* has $\alpha$, `code` and [a link](other.py).

## A heading

Inline $\beta + 1$ and

$$\nabla f = 0$$

| left | right |
|------|-------|
| cell | other |

::: {note}
An admonition.
:::

A footnote[^1], a class {py:class}`thing.Thing`, [the other chapter](other.py) and
[its section](other.py#a-section).

![A drawing](drawing.svg)

[^1]: The text of the footnote.
"""

# %%
# A cell that starts with a comment is code.
import sys

# sphinx_gallery_thumbnail_number = 1
print("line", sys._getframe().f_lineno)  # here-1

# %% [markdown]
# ## Comment cells
#
# Text in comment lines, with `# %%` and a fence:
#
# ```python
# x = 1
# ```

# %%
text = """
# %% not a cell
"""
print("line", sys._getframe().f_lineno)  # here-2
print("```")

# %% [raw]
# not on the page

# %%
import matplotlib.pyplot as plt

plt.plot([0, 1])
print(plt.gcf().axes[0].get_lines()[0].get_xdata())
'''

OTHER = '''# %% [markdown]
"""
# The other chapter

Nothing here.

## A section
"""

# %%
"""A string alone in a code cell is code."""
'''

FOLDS = '''# %% [markdown]
"""
# A chapter with plumbing

Some of it is folded.
"""

# %% tags=["imports"]
# sphinx_gallery_thumbnail_number = -1
import json

# %% tags=["plumbing"]
rows = json.loads("[1, 2]")

# %% tags=["plumbing"]
print("the rows are", rows)

# %% tags=["plumbing"]
rows.clear()

# %% a title tags=["other"]
print("in", "sight")
'''


def rich_book(root: Path) -> Book:
    book = Book(root)
    book.configure("pages.markdown", gallery={"min_reported_time": 1000})
    book.write(
        "docs/index.md",
        "# Book\n\n```{py:class} thing.Thing\n```\n\n```{toctree}\nchapters/index\n```\n",
    )
    book.write("chapters/rich.py", RICH)
    book.write("chapters/other.py", OTHER)
    book.write("chapters/folds.py", FOLDS)
    book.write(
        "chapters/drawing.svg",
        '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>',
    )
    return book


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[Book, Build]:
    book = rich_book(tmp_path_factory.mktemp("rich") / "book")
    return book, book.build("-W", "-n")


class TestSplitting:
    """The cells are jupytext's, with the script's own lines for code."""

    @pytest.mark.parametrize(
        "text",
        [
            RICH,
            OTHER,
            "# ---\n# jupyter:\n#   jupytext:\n#     formats: py:percent\n# ---\n\n" + RICH,
            OTHER + "\n\n# %% a title\nif x ==:\n    pass",  # wrong syntax
            OTHER + "\n#%%\n\n\nx = 1\n\n\n\n# %% [markdown]\n# last\n\n\n",
        ],
    )
    def test_cells_are_jupytexts(self, text: str) -> None:
        expected = jupytext.reads(text, fmt="py:percent").cells
        cells = markdown.read_cells(text)
        found = [(cell.kind, cell.source) for cell in cells]
        assert found == [(cell.cell_type, cell.source) for cell in expected]

    @pytest.mark.parametrize("text", [RICH, OTHER + "\n#%%\n\n\nx = 1\n\n\n\n# %%\ny = 1"])
    def test_lines_are_the_scripts(self, text: str) -> None:
        lines = text.split("\n")
        for cell in markdown.read_cells(text):
            script = cell.script.split("\n")
            assert lines[cell.lineno - 1 :][: len(script)] == script

    @pytest.mark.parametrize("text", ["# %%\nx = 1\n# %% [markdown]\n# # Late\n", "x = 1\n", ""])
    def test_needs_a_title(self, tmp_path: Path, text: str) -> None:
        script = tmp_path / "chapter.py"
        script.write_text(text)
        with pytest.raises(ExtensionError, match=r"chapter\.py: the first cell"):
            markdown.split_script(script)

    def test_intro_and_title_are_plain(self) -> None:
        docstring = "# On `x`\n\nA *fine* [link](a.md), {class}`~a.B`[^1] and $n$\nmore.\n\nRest"
        intro, title = markdown.intro_and_title("x.py", docstring)
        assert (intro, title) == ("A fine link, ~a.B and n more.", "On x")


class TestPage:
    """A page that Sphinx builds without a warning."""

    def test_builds_without_warnings(self, rich: tuple[Book, Build]) -> None:
        assert rich[1].process.returncode == 0, rich[1].output

    @pytest.mark.parametrize(
        "fragment",
        [
            "<h1>Everything at <strong>once</strong>",
            "<h2>A heading",
            r"\(\beta + 1\)",
            r"\nabla f = 0",
            "<td><p>cell</p></td>",
            'class="admonition note"',
            "text of the footnote",
            'href="../index.html#thing.Thing"',
            'href="other.html"><span class="std std-doc">the other chapter</span>',
            'href="other.html#a-section"',
            'src="../_images/drawing.svg"',
            "# A cell that starts with a comment is code.",
            "<h2>Comment cells",
            "with <code",
            "not a cell",
            "```\n",
            "sphx_glr_rich_001.png",
            "rich.ipynb",
            "rich.py",
        ],
    )
    def test_shows(self, rich: tuple[Book, Build], fragment: str) -> None:
        page = html.unescape(rich[0].page("rich"))
        assert fragment in re.sub(r"</?span[^>]*>", "", page) or fragment in page

    @pytest.mark.parametrize("fragment", ["not on the page", "sphinx_gallery_", "Go to the end"])
    def test_does_not_show(self, rich: tuple[Book, Build], fragment: str) -> None:
        assert fragment not in re.sub(r"</?span[^>]*>", "", rich[0].page("rich"))

    def test_lines_in_frames_are_true(self, rich: tuple[Book, Build]) -> None:
        for number, line in enumerate(RICH.split("\n"), 1):
            if "# here-" in line:
                assert f"line {number}\n" in rich[0].page("rich")

    def test_index_has_plain_titles_and_intros(self, rich: tuple[Book, Build]) -> None:
        index = html.unescape(rich[0].page("index"))
        assert 'tooltip="The intro has \\alpha, code and a link."' in index
        assert "Everything at once" in index


class TestFolding:
    """The code of tagged cells is folded away; what the cell printed is not."""

    @pytest.fixture
    def page(self, rich: tuple[Book, Build]) -> str:
        return html.unescape(re.sub(r"</?span[^>]*>", "", rich[0].page("folds")))

    def test_the_code_is_folded_under_the_tags_name(self, page: str) -> None:
        folded = re.findall(
            r'<details class="folded"><summary>(\w+)</summary>(.*?)</details>', page, re.DOTALL
        )
        assert [summary for summary, _ in folded] == ["Imports", "Plumbing", "Plumbing"]
        assert "import json" in folded[0][1]
        assert "json.loads" in folded[1][1]
        assert 'print("the rows are", rows)' in folded[1][1], "in a row with one that said nothing"
        assert "rows.clear()" in folded[2][1], "what was printed is between"
        assert all('<div class="highlight"><pre>' in code for _, code in folded), "as any other"
        assert page.count("</details>") == 3

    def test_output_stays_in_sight(self, page: str) -> None:
        in_sight = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
        assert "the rows are [1, 2]" in in_sight
        assert 'print("in", "sight")' in in_sight
        assert "import json" not in in_sight
        assert in_sight.count("sphx-glr-script-out") == page.count("sphx-glr-script-out") > 0

    def test_settings_in_folded_cells_are_not_shown(self, rich: tuple[Book, Build]) -> None:
        page = rich[0].page("folds")
        assert "sphinx_gallery_" not in page

    def test_the_notebook_keeps_the_tags(self, rich: tuple[Book, Build]) -> None:
        text = (rich[0].root / "docs/chapters/folds.ipynb").read_text(encoding="utf-8")
        cells = nbformat.reads(text, as_version=4).cells  # type: ignore[no-untyped-call]
        tags = [cell.metadata.get("tags") for cell in cells]
        assert tags == [None, ["imports"], *[["plumbing"]] * 3, ["other"]]


class TestNotebook:
    """The notebook is jupytext's, the same in every build."""

    def notebook(self, book: Book, name: str) -> nbformat.NotebookNode:
        text = (book.root / f"docs/chapters/{name}.ipynb").read_text(encoding="utf-8")
        return nbformat.reads(text, as_version=4)  # type: ignore[no-any-return, no-untyped-call]

    def test_cells(self, rich: tuple[Book, Build]) -> None:
        notebook = self.notebook(rich[0], "rich")
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        assert [cell.id for cell in notebook.cells] == [f"cell-{i}" for i in range(6)]
        expected = [cell.source for cell in jupytext.reads(RICH, fmt="py:percent").cells]
        expected[0] = expected[0].replace("other.py", "other.ipynb")
        expected[1] = re.sub(r"# sphinx_gallery.*\n", "", expected[1])
        assert [cell.source for cell in notebook.cells] == expected

    def test_the_gallerys_first_cell_is_below_the_title(self, tmp_path: Path) -> None:
        book = Book(tmp_path / "book")
        note = "# %pip install it"
        book.configure("pages.markdown", gallery={"first_notebook_cell": note})
        script = book.chapter("a", "x = 1")
        build = book.build("-W")
        assert build.process.returncode == 0, build.output
        cells = self.notebook(book, "a").cells
        nbformat.validate(self.notebook(book, "a"))
        assert [cell.source for cell in cells[1:]] == [note, "x = 1"]
        assert cells[0].source.startswith("# a\n")
        assert [cell.id for cell in cells] == ["cell-0", "cell-1", "cell-2"]
        copy = book.root / "docs/chapters/a.py"
        assert copy.read_bytes() == script.read_bytes(), "the script has no note"
        downloads = {path.name for path in (book.root / "_site/_downloads").rglob("a.*")}
        assert downloads == {"a.py", "a.ipynb"}, "and no zip"

    def test_runs(self, rich: tuple[Book, Build]) -> None:
        notebook = self.notebook(rich[0], "other")
        nbclient.NotebookClient(notebook, timeout=60).execute()
        (output,) = notebook.cells[1].outputs
        assert "A string alone" in output.data["text/plain"]

    def test_is_the_same_in_every_build(self, rich: tuple[Book, Build], tmp_path: Path) -> None:
        notebook = rich[0].root / "docs/chapters/rich.ipynb"
        again = tmp_path / "rich.ipynb.new"
        (tmp_path / "rich.py").write_text(RICH)
        markdown.save_chapter_notebook({}, again)
        assert json.loads(again.read_text()) == json.loads(notebook.read_text())


def test_next_builds(tmp_path: Path) -> None:
    """Pages are read again when their script ran, and go when it goes."""
    book = Book(tmp_path / "book")
    book.configure("pages.markdown", gallery={"min_reported_time": 1000})
    book.chapter(
        "draws",
        """
        import os
        import matplotlib.pyplot as plt
        _ = plt.plot([0, 1], color=os.environ["COLOUR"])
        """,
    )
    book.chapter("goes", "print('here today')")
    assert book.build("-W", COLOUR="red").process.returncode == 0
    page = book.root / "docs/chapters/draws.md"
    picture = book.root / "_site/_images/sphx_glr_draws_001.png"
    text, red = page.read_text(), picture.read_bytes()

    unchanged = book.build("-W", COLOUR="red")
    assert "0 added, 0 changed, 0 removed" in unchanged.output

    (book.root / "docs/chapters/draws.py.md5").unlink()
    assert book.build("-W", COLOUR="blue").process.returncode == 0
    assert page.read_text() == text
    assert picture.read_bytes() != red

    (book.root / "chapters/goes.py").unlink()
    gone = book.build("-W", COLOUR="blue")
    assert gone.process.returncode == 0, gone.output
    assert not list((book.root / "docs/chapters").glob("goes.*"))
    assert list((book.root / "docs/chapters").glob("*.rst")) == [
        book.root / "docs/chapters/index.rst"
    ]
