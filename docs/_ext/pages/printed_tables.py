"""Show the tables that a chapter prints as table elements of its page.

A chapter prints tables as text, for a terminal (`microddp.report.table`). In HTML each becomes a
table element that wraps, scrolls in its own frame, and can be sorted (docs/_static/tables.js). Text
before and after it stays text, and so does text that is not quite a table.
"""

import re
from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from pages.scripts import load_where

PRINTED = "sphx-glr-script-out"  # sphinx-gallery's class

# Below the headers; torch.profiler also frames its tables with it. One column would be an
# underlined word.
RULE = re.compile(r"-+(?:  -+)+ *")
GRID = re.compile(r"\+(?:-+\+)+")  # a line above, between and below rows
# Cells that microddp.report.table aligns to the right.
QUANTITY = re.compile(r"[ +~<-]*\d.*|inf|nan|none|", re.IGNORECASE | re.DOTALL)
# A name so long that it may be broken.
LONG_NAME = re.compile(r"[\w.]{20,}")


class Table(NamedTuple):
    """The cells of a printed table; a cell of several lines contains line feeds."""

    headers: list[str]  # each may be blank; empty for a table without a header
    rows: list[list[str]]


def pieces(text: str) -> list[str | Table]:
    """Split printed text into tables and what stands between them, in order."""
    lines = text.split("\n")
    found: list[str | Table] = []
    begun = 0  # the first line that is in no piece yet
    for place in range(len(lines)):
        if place < begun or not (read := _grid(lines, place) or _simple(lines, place, begun)):
            continue
        table, first, end = read
        found += [*_text(lines[begun:first]), table]
        begun = end
    return [*found, *_text(lines[begun:])]


def _text(lines: list[str]) -> list[str]:
    text = "\n".join(lines).strip("\n")
    return [text] if text.strip() else []


def _simple(lines: list[str], place: int, begun: int) -> tuple[Table, int, int] | None:
    """Read the table whose rule of dashes is line `place`, if it is one.

    Lines before `begun` are not part of it. Returns the table, its first line, and the line after
    its last.
    """
    if not RULE.fullmatch(lines[place]):
        return None
    spans = [match.span() for match in re.finditer("-+", lines[place])]
    headers = _cut(lines[place - 1], spans) if place > begun else None
    first = place if headers is None else place - 1
    framed = first > begun and lines[first - 1] == lines[place]  # by torch.profiler
    closed = headers is None or framed  # there is also a rule below the rows
    rows: list[list[str]] = []
    end = place + 1
    while end < len(lines) and not RULE.fullmatch(lines[end]):
        row = _cut(lines[end], spans)
        heads_the_next = not closed and RULE.fullmatch("".join(lines[end + 1 : end + 2]))
        if row is None or heads_the_next:
            break
        rows.append(row)
        end += 1
    if closed:
        if lines[end : end + 1] != [lines[place]]:
            return None
        first, end = first - framed, end + 1
    while not closed and rows and _values(rows[-1]) == 1:  # a narrow line of text
        rows.pop()
        end -= 1
    goes_on = closed and end < len(lines) and _values(_cut(lines[end], spans) or []) > 1
    if not rows or goes_on or _like_a_row(lines[end : end + 2]):
        return None
    return Table(headers or [], rows), first, end


def _values(row: list[str]) -> int:
    return sum(map(bool, row))


def _cut(line: str, spans: list[tuple[int, int]]) -> list[str] | None:
    """Return the cells of a line with these columns, or `None` if it has text between them."""
    edges = [0, *(edge for span in spans for edge in span)]
    between = [line[start:end] for start, end in zip(edges[::2], edges[1::2], strict=False)]
    if not line.strip() or "".join([*between, line[edges[-1] :]]).strip():
        return None
    return [line[start:end].strip() for start, end in spans]


def _like_a_row(lines: list[str]) -> bool:
    """Return whether the first line has gaps as a row has, and does not head another table."""
    if not lines or RULE.fullmatch(lines[-1]):
        return False
    return "  " in lines[0].strip()


def _grid(lines: list[str], place: int) -> tuple[Table, int, int] | None:
    """Read the table with lines between its rows that begins at line `place`, as `_simple` does."""
    if not GRID.fullmatch(lines[place]):
        return None
    width = len(lines[place])
    bars = [match.start() for match in re.finditer(r"\+", lines[place])]
    below_headers = lines[place].replace("-", "=")
    groups: list[list[list[str]]] = [[]]  # the lines of each row, split into columns
    headers: list[str] = []
    end = place + 1
    for end in range(place + 1, len(lines)):
        line = lines[end]
        if line in (lines[place], below_headers):
            if line == below_headers:
                headers = _joined(groups.pop())
            groups.append([])
        elif len(line) == width and all(line[bar] == "|" for bar in bars):
            inside = pairwise(bars)
            groups[-1].append([line[start + 1 : stop].strip() for start, stop in inside])
        else:
            break
    else:
        end = len(lines)
    rows = [_joined(group) for group in groups if group]
    if groups[-1] or not rows:  # not closed, or without rows
        return None
    return Table(headers, rows), place, end


def _joined(group: Iterable[list[str]]) -> list[str]:
    return ["\n".join(column).strip("\n") for column in zip(*group, strict=True)]


def as_html(table: Table) -> str:
    """The table in a frame that scrolls if it is too wide.

    Where the first column has no header, its cells are the rows' headers.
    """
    columns = list(zip(*table.rows, strict=True))
    quantities = [all(map(QUANTITY.fullmatch, column)) for column in columns]
    named = not table.headers or not table.headers[0]
    names = ", ".join(_spoken(filter(None, table.headers))) or "names and values"
    return "\n".join(
        [
            f'<div class="table-frame" tabindex="0" role="group" aria-label="Table: {names}">',
            '<table class="printed">',
            *_head(table.headers, quantities),
            "<tbody>",
            *(f"<tr>{''.join(_row(row, quantities, named))}</tr>" for row in table.rows),
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def _spoken(headers: Iterable[str]) -> Iterator[str]:
    return (escape(" ".join(header.split())) for header in headers)


def _head(headers: list[str], quantities: list[bool]) -> list[str]:
    if not headers:
        return []
    cells = (
        _cell("th" if header else "td", ' scope="col"' if header else "", escape(header), quantity)
        for header, quantity in zip(headers, quantities, strict=True)
    )
    return ["<thead>", f"<tr>{''.join(cells)}</tr>", "</thead>"]


def _row(row: list[str], quantities: list[bool], named: bool) -> Iterator[str]:
    for place, (text, quantity) in enumerate(zip(row, quantities, strict=True)):
        names_the_row = named and place == 0 and text
        yield _cell(
            "th" if names_the_row else "td",
            ' scope="row"' if names_the_row else "",
            _quantity(text) if quantity else _words(text),
            quantity,
        )


def _cell(tag: str, scope: str, content: str, quantity: bool) -> str:
    kind = ' class="number"' if quantity else ""
    content = content.replace("\n", "<br>")
    return f"<{tag}{scope}{kind}>{content}</{tag}>"


def _quantity(text: str) -> str:
    """Allow breaks before a spread and after commas; let a star hang over the edge."""
    content = re.sub(r" (?=\()|(?<=,) ", r"\g<0><wbr>", escape(text))
    return re.sub(r" \*$", '<span class="star"> *</span>', content)


def _words(text: str) -> str:
    """Allow breaks in long names, after a dot or before an underscore."""
    return LONG_NAME.sub(
        lambda name: re.sub(r"\.(?=\w)|(?=_)", r"\g<0><wbr>", name[0]), escape(text)
    )


class ShowOutput(SphinxPostTransform):
    """Put what a cell printed into an element of class "output", with its tables as tables."""

    default_priority = 500
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Replace the literal blocks of printed text."""
        del kwargs
        for block in list(self.document.findall(nodes.literal_block)):
            if PRINTED in block["classes"]:
                parts = [self.shown(block, piece) for piece in pieces(block.astext())]
                # replace_self() would hand the block's class on.
                block.parent.replace(block, nodes.container("", *parts, classes=["output"]))

    def shown(self, block: nodes.literal_block, piece: str | Table) -> nodes.Node:
        """Return the node of a piece of a block's text."""
        if isinstance(piece, Table):
            return nodes.raw("", as_html(piece), format="html")
        return nodes.literal_block(piece, piece, **block.attributes)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.add_post_transform(ShowOutput)
    load_where('class="printed"', "tables.js", app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
