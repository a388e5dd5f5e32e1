"""Make MyST pages and jupytext notebooks of a gallery's Markdown chapters.

A Markdown chapter is a jupytext percent script. Its text cells begin with `# %% [markdown]`, in a
triple-quoted string or in comment lines; the first opens with the title, `# Title`. sphinx-gallery
takes text for reStructuredText, so this extension replaces the functions by which it splits a
script, assembles its page and saves its notebook.

- A link to another chapter names its file, `[the ring](02_all_reduce.py)`, or one with `#heading`.
  The page links to the page, the notebook to the notebook. A path with a slash, `./name.py`,
  downloads the script.
- A picture lies beside the chapter; sphinx-gallery's `copyfile_regex` has to match its name.
- The gallery's index shows the title and the first paragraph, as plain text. Its header,
  `GALLERY_HEADER.rst`, is reStructuredText.
- The page folds the code of a cell with one of the tags in `FOLDED`, as in
  `# %% tags=["plumbing"]`; cells in a row under one summary, up to one that printed or drew. What
  it printed and drew is not folded. `# %% [raw]` cells are in the notebook only.
- sphinx-gallery's `first_notebook_cell` is a code cell below the notebook's title.
- The outputs of a run are on the page in directives, `{of-run} below-title`, and `{of-run} N` for
  code cell N, counted from 0. Another extension can replace `OfRun`.

`install()` makes the replacements in a process without a Sphinx application, such as rank 0 of a
job of the launcher.
"""

import itertools
import os
import re
from collections.abc import Mapping
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
import nbformat
from docutils import nodes
from jupytext.cell_reader import DoublePercentScriptCellReader
from jupytext.header import header_to_metadata_and_cell
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from sphinx_gallery import gen_rst, py_source_parser
from sphinx_gallery.gen_rst import codestr2rst
from sphinx_gallery.gen_rst import save_rst_example as save_rst_page
from sphinx_gallery.py_source_parser import Block

# Stands for the page's blocks, between the header and the footer that sphinx-gallery writes.
_BODY = "\n.. gallery-markdown-body\n"

# Tags of cells whose code is folded, and the summary that is shown instead.
FOLDED = {"imports": "Imports", "plumbing": "Plumbing"}

_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


class Cell(NamedTuple):
    """One jupytext cell."""

    kind: str  # "markdown", "code" or "raw"
    source: str  # as in a notebook
    script: str  # the script's lines, without the cell marker
    lineno: int  # of the first of these lines, counted from 1
    metadata: Mapping[str, Any]  # as in a notebook

    @property
    def tags(self) -> list[str]:
        """Its tags, of which there may be none."""
        tags: list[str] = self.metadata.get("tags", [])
        return tags


@cache  # four ask for a chapter's, and jupytext takes a tenth of a second
def read_cells(text: str) -> tuple[Cell, ...]:
    """Split a percent script into the cells that jupytext sees, with their line numbers."""
    lines = text.removesuffix("\n").split("\n")
    *_, position = header_to_metadata_and_cell(lines, "#", "", ".py")
    cells = []
    while position < len(lines):
        reader = DoublePercentScriptCellReader({"extension": ".py"}, "python")
        cell, length = reader.read(lines[position:])
        first = lines[position]
        marked = reader.start_code_re.match(first) or reader.alternative_start_code_re.match(first)
        lineno = position + (2 if marked else 1)
        script = "\n".join(reader.org_content)
        cells.append(Cell(cell.cell_type, cell.source, script, lineno, cell.metadata))
        position += length
    return tuple(cells)


def split_script(source_file: str | Path, return_node: bool = False) -> tuple[Any, ...]:
    """Split a script into the gallery's blocks; text blocks hold the Markdown unchanged.

    Returns the script's `sphinx_gallery_*` settings, its blocks and, with `return_node`, its
    syntax tree (None where the syntax is wrong).

    Raises `ExtensionError` if the script does not begin with its title.
    """
    node, text = py_source_parser.parse_source_file(source_file)
    cells = read_cells(text)
    if not cells or cells[0].kind != "markdown" or not cells[0].source.lstrip().startswith("# "):
        raise ExtensionError(f"{source_file}: the first cell must be Markdown, with a '# Title'")

    blocks = []
    for cell in cells:
        if cell.kind == "markdown":
            blocks.append(Block("text", cell.source, cell.lineno))
        elif cell.kind == "code" and cell.script.strip():
            blocks.append(Block("code", cell.script + "\n", cell.lineno))
    code = "".join(block.content for block in blocks if block.type == "code")
    folded = {cell.lineno: FOLDED[tag] for cell in cells for tag in cell.tags if tag in FOLDED}
    file_conf = {"folded": folded, **py_source_parser.extract_file_config(code)}
    return (file_conf, blocks, node) if return_node else (file_conf, blocks)


def intro_and_title(filename: str | Path, docstring: str) -> tuple[str, str]:
    """Return a chapter's first paragraph and title as plain text, for the gallery's index."""
    del filename
    title, *paragraphs = docstring.strip().split("\n\n")
    title, _, rest = title.partition("\n")
    intro = rest or (paragraphs[0] if paragraphs else title)
    return _plain(intro.removeprefix("# ")), _plain(title.removeprefix("# "))


def _plain(markdown: str) -> str:
    text = re.sub(r"\{[\w:+-]+\}(`[^`]*`)", r"\1", markdown)  # {role}`x` -> `x`
    text = re.sub(r"!?\[([^\]^]*)\]\([^)]*\)", r"\1", text)  # [x](link) -> x
    text = re.sub(r"\[\^[^\]]*\]", "", text)  # footnotes
    return " ".join(re.sub(r"[`*$]", "", text).split())


def _link_chapters(markdown: str, suffix: str) -> str:
    """Change the suffix of links to a bare `chapter.py`."""
    return re.sub(r"(\]\([\w-]+)\.py(?=[)#])", rf"\g<1>{suffix}", markdown)


def fenced(directive: str, content: str) -> str:
    """Write a directive, `{name} argument`, around content that may have fences of its own."""
    longest = max(map(len, re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join(filter(None, (f"{fence}{directive}", content.strip("\n"), fence)))


def eval_rst(rst: str) -> str:
    """Wrap reStructuredText for a Markdown page; an empty text stays empty."""
    return fenced("{eval-rst}", rst.strip()) if rst.strip() else ""


BELOW_TITLE = "below-title"


class OfRun(SphinxDirective):
    """Outputs of an example's run, in Markdown; the argument names their place."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Show them."""
        return self.parse_text_to_nodes("\n".join(self.content))


def page_blocks(
    script_blocks: list[Block],
    output_blocks: list[str],
    file_conf: dict[str, Any],
    gallery_conf: dict[str, Any],
    *,
    language: str = "python",
) -> str:
    """Assemble a page's MyST text: Markdown unchanged, code and output as reStructuredText.

    `file_conf["preamble"]`, Markdown, is put below the title. `file_conf["folded"]` has the
    summaries of the blocks whose code is folded, by the numbers of their first lines.
    """
    del gallery_conf
    parts: list[str] = []
    place = itertools.count()
    fold_end, silent = 0, ""  # of the fold before, and its summary if nothing came out
    for block, output in zip(script_blocks, output_blocks, strict=True):
        if block.type == "text":
            parts.append(_link_chapters(block.content.strip(), ".md"))
            silent = ""
            continue
        said = fenced(f"{{of-run}} {next(place)}", eval_rst(output))
        if block.content.strip():  # blank where it held nothing but settings
            code = codestr2rst(block.content, language)
            summary = file_conf["folded"].get(block.lineno, "")
            if summary and summary == silent:
                parts.insert(fold_end, eval_rst(code))
                fold_end += 1
            elif summary:
                opened = f'<details class="folded"><summary>{summary}</summary>'
                parts += [opened, eval_rst(code), "</details>"]
                fold_end = len(parts) - 1
            else:
                parts.append(eval_rst(code))
            silent = "" if output.strip() else summary
            parts.append(said)
    title, _, rest = parts[0].partition("\n")
    below = fenced(f"{{of-run}} {BELOW_TITLE}", file_conf.get("preamble", ""))
    parts[:1] = [title, below, rest]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def save_page(
    example_rst: str,
    example_file: str | Path,
    time_elapsed: float,
    memory_used: float,
    gallery_conf: dict[str, Any],
    *,
    language: str = "python",
    file_conf: dict[str, Any],
) -> None:
    """Write a chapter's page, `.md`, with the gallery's label and footer around the blocks.

    The page of a script that ran is always written, so that Sphinx reads it again even if only a
    figure changed.
    """
    page = Path(example_file).with_suffix(".md")
    arguments = (example_file, time_elapsed, memory_used, gallery_conf)
    save_rst_page(_BODY, *arguments, language=language, file_conf=file_conf)
    rst = page.with_suffix(".rst")
    header, footer = rst.read_text(encoding="utf-8").split(_BODY)
    rst.unlink()
    # The page offers script and notebook, without a zip of both.
    footer = footer.replace(gen_rst.ZIP_DOWNLOAD.format(page.with_suffix(".zip").name), "")
    (label,) = re.findall(r"^\.\. _(sphx_glr_.*):$", header, re.MULTILINE)
    text = f"({label})=\n\n{example_rst}\n\n{eval_rst(footer)}\n"
    if time_elapsed > 0 or not page.exists() or page.read_text(encoding="utf-8") != text:
        new = page.with_suffix(".md.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, page)


def save_chapter_notebook(work_notebook: dict[str, Any], write_file: str | Path) -> None:
    """Write jupytext's notebook of the script beside `write_file`, `chapter.ipynb.new`.

    Settings of the gallery are left out. The ids of cells are numbers, so that equal scripts give
    equal notebooks. `work_notebook`, the gallery's, begins with `first_notebook_cell`, if there is
    one, and else with the title; the cell is put below the title.
    """
    text = Path(write_file).with_suffix("").with_suffix(".py").read_text(encoding="utf-8")
    text = py_source_parser.remove_config_comments(py_source_parser.remove_ignore_blocks(text))
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    for first in work_notebook.get("cells", [])[:1]:
        if first["cell_type"] == "code":
            source = "".join(first["source"])
            notebook.cells.insert(1, nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "markdown":
            cell.source = _link_chapters(cell.source, ".ipynb")
    notebook.metadata.kernelspec = _KERNEL
    notebook.nbformat_minor = 5  # the first with cell ids
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    Path(write_file).write_text(text + "\n", encoding="utf-8")


def install() -> None:
    """Replace the gallery's functions with those of this module."""
    py_source_parser.split_code_and_text_blocks = split_script
    gen_rst.extract_intro_and_title = intro_and_title
    gen_rst.rst_blocks = page_blocks
    gen_rst.save_rst_example = save_page
    gen_rst.save_notebook = save_chapter_notebook


def remove_stale_pages(app: Sphinx) -> None:
    """Remove generated files of chapters that no longer exist."""
    conf = app.config.sphinx_gallery_conf
    sources, galleries = (
        value if isinstance(value, list) else [value]
        for value in (conf["examples_dirs"], conf["gallery_dirs"])
    )
    for source, gallery in zip(sources, galleries, strict=False):
        for page in Path(app.srcdir, gallery).rglob("*.md"):
            copy = page.with_suffix(".py")  # the gallery copies the script to the page's folder
            chapter = Path(app.srcdir, source, copy.relative_to(Path(app.srcdir, gallery)))
            if copy.exists() and not chapter.exists():
                for generated in page.parent.glob(f"{escape(page.stem)}.*"):
                    generated.unlink()


def setup(app: Sphinx) -> dict[str, Any]:
    """Set up the extension."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    install()
    app.add_directive("of-run", OfRun)
    # The gallery generates its pages at priority 500.
    app.connect("builder-inited", remove_stale_pages, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
