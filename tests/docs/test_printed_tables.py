"""Printed tables become tables of the page; what is not quite a table stays text."""

import html
import re

import pytest
import torch
from gallery_book import Book

from microddp.findings import mark_least
from microddp.report import table
from pages.printed_tables import Table, as_html, pieces

HEADERS = ["", "size", "time, median (quartiles)", "note"]
ROWS = [
    ["ring", 4, "1.5 ms (1.2 to 1.8)", "sent in chunks"],
    ["naive", 512, "inf", "whole < all"],
    ["to rank 3", None, "33 us (30 to 41)", None],
]
TEXTS = [[str(cell or "") for cell in row] for row in ROWS]


def simple(rows=ROWS, headers=HEADERS):
    return table(rows, headers)


def cells_of(text):
    """The texts of a table's cells, by row, with their tags, and nothing of the frame."""
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    found = [re.findall(r"<(t[hd])[^>]*>(.*?)</\1>", row, re.DOTALL) for row in rows]
    return [
        [
            (tag, html.unescape(re.sub("<[^>]+>", "", inner.replace("<br>", "\n"))))
            for tag, inner in r
        ]
        for r in found
    ]


class TestReading:
    """What `microddp.report.table` wrote is read back."""

    def test_a_table_alone(self):
        assert pieces(simple()) == [Table(HEADERS, TEXTS)]

    def test_between_text_in_order(self):
        text = f"caption\n{simple()}\nring is 3 times as fast, by rounds\n\nand more\n"
        assert pieces(text) == [
            "caption",
            Table(HEADERS, TEXTS),
            "ring is 3 times as fast, by rounds\n\nand more",
        ]

    @pytest.mark.parametrize("between", ["\n", "\n\n", "\npredicted / measured\n", "\nas is\n"])
    def test_one_after_the_other(self, between):
        found = pieces(simple() + between + simple())
        assert [piece for piece in found if isinstance(piece, Table)] == [
            Table(HEADERS, TEXTS),
            Table(HEADERS, TEXTS),
        ]
        assert [piece for piece in found if isinstance(piece, str)] == [
            line for line in between.split("\n") if line
        ]

    def test_rows_that_name_themselves(self):
        rows = [["parameters", 12], ["gradients", "9 MiB"]]
        text = f"of the model:\n\n{table(rows, [])}\nand so on"
        expected = Table([], [["parameters", "12"], ["gradients", "9 MiB"]])
        assert pieces(text) == ["of the model:", expected, "and so on"]

    def test_cells_of_several_lines(self):
        rows = [["278 KiB", "a.bias\na.weight"], ["3 KiB", "b"]]
        text = table(rows, ["bucket", "parameters\n(bytes)"], form="grid")
        assert pieces(f"{text}\nall") == [Table(["bucket", "parameters\n(bytes)"], rows), "all"]

    def test_a_grid_without_headers(self):
        rows = [["1", "a\nb"], ["2", "c"]]
        assert pieces(table(rows, [], form="grid")) == [Table([], rows)]

    def test_the_profilers(self):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3) + 1
        found, total = pieces(profile.key_averages().table())
        assert found.headers[:2] == ["Name", "Self CPU %"]
        assert [row[0] for row in found.rows] == [event.key for event in profile.key_averages()]
        assert total.startswith("Self CPU time total: ")

    @pytest.mark.parametrize(
        "follows", ["short", "a b c", "S = 4", "rank 0: a longer line of text"]
    )
    def test_a_line_behind_is_not_a_row(self, follows):
        assert pieces(f"{simple()}\n{follows}") == [Table(HEADERS, TEXTS), follows]


@pytest.mark.parametrize(
    "text",
    [
        "loss 1.000",
        "-----  ---",  # nothing above it
        "a title\n-------\ntext",  # one column: an underlined word
        "one  two\n---  ---\n",  # no rows
        "a header that is wider  than\n---  ---\n1    2",
        "a    b\n---  ---\n1    2345\n3    4",  # a cell that is wider than its column
        "a    b\n---  ---\n1    2    3",  # a column more
        "a    b\n---  ---\n1 1 1 2",  # across the gap
        "+---+---+\n| 1 | 2 |",  # not closed
        "+---+---+\n| 1 | 2  |\n+---+---+",
        "+---+---+\n+---+---+",
    ],
)
def test_what_is_not_quite_a_table_stays_text(text):
    assert pieces(text) == [text.strip("\n")]


class TestHtml:
    """A table says what its cells are."""

    def test_texts_and_headers(self):
        (head, *body) = cells_of(as_html(Table(HEADERS, TEXTS)))
        assert head == [("td", ""), *(("th", header) for header in HEADERS[1:])]
        assert [[text for _, text in row] for row in body] == TEXTS
        assert [row[0][0] for row in body] == ["th"] * 3, "they name the rows"
        assert {tag for row in body for tag, _ in row[1:]} == {"td"}

    def test_columns_with_a_header_do_not_name_rows(self):
        text = as_html(Table(["ranks", "time"], [["1", "2 s"]]))
        assert 'scope="row"' not in text
        assert text.count('scope="col"') == 2

    def test_quantities_are_aligned_as_in_the_terminal(self):
        text = as_html(Table(HEADERS, TEXTS))
        aligned = [re.findall(r'<t[hd][^>]*?(number|)"?>', row) for row in text.split("<tr>")[1:]]
        assert aligned == [["", "number", "number", ""]] * 4

    def test_stars_and_markup(self):
        cells = mark_least(["0.7", "12 <s>"], [1, 2])
        text = as_html(pieces(table(zip(["a", "b"], cells, strict=True), ["way", "x & y"]))[0])
        assert "x &amp; y" in text
        assert "12 &lt;s&gt;" in text
        assert '0.7<span class="star"> *</span>' in text

    def test_where_cells_may_break(self):
        text = as_html(Table(["a", "b"], [["torch.distributed.new_group", "1 ms (1 to 2)"]]))
        assert "torch.<wbr>distributed.<wbr>new<wbr>_group" in text
        assert "1 ms <wbr>(1 to 2)" in text

    def test_the_frame_has_a_name(self):
        assert 'tabindex="0" role="group" aria-label="Table: size, time' in as_html(
            Table(HEADERS, TEXTS)
        )


CODE = f"""
print({("before" + chr(10) + simple() + chr(10) + "after")!r})
"""


def test_on_the_page(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("pages.markdown", "pages.printed_tables")
    book.chapter("a", CODE)
    book.chapter("b", "print('no table')")
    book.chapter("c", "x = 1")
    build = book.build("-W", "-n")
    assert build.process.returncode == 0, build.output
    page = book.page("a")
    output = page[page.index('<div class="output docutils container">') :]
    order = ["<span></span>before\n</pre>", '<table class="printed">', "<span></span>after\n</pre>"]
    places = [output.index(part) for part in order]
    assert places == sorted(places)
    assert "----" not in output
    assert [[text for _, text in row] for row in cells_of(output)][1:] == TEXTS
    assert ["tables.js" in book.page(name) for name in "abc"] == [True, False, False]
    assert "sent in chunks" not in (book.root / "_site/chapters/b.html").read_text()
    assert "chunk" in (book.root / "_site/searchindex.js").read_text(), "found by a search"


def test_elsewhere_it_is_text(tmp_path):
    book = Book(tmp_path / "book")
    book.configure("pages.markdown", "pages.printed_tables")
    book.chapter("a", CODE)
    build = book.build("-W", "-b", "text")
    assert build.process.returncode == 0, build.output
    assert simple().split("\n")[1] in (book.root / "_site/chapters/a.txt").read_text()
