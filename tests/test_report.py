"""How results are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microddp.findings import mark_least
from microddp.report import human_bytes, human_seconds, table


def test_what_is_below_zero_has_the_unit_of_its_size():
    assert (human_seconds(-0.002), human_seconds(-7200)) == ("-2 ms", "-2 h")
    assert (human_bytes(-3 << 20), human_bytes(-1000)) == ("-3 MiB", "-1000 B")
    assert human_bytes(1023.7 * 1024) == "1 MiB"


@given(st.integers(0, 2**50))
def test_bytes_in_words_are_right_to_three_digits(count):
    number, unit = human_bytes(count).split()
    scale = 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)
    assert float(number) * scale == pytest.approx(count, rel=0.006)
    assert "e" not in number


@given(st.floats(1e-9, 1e9))
def test_times_in_words_are_right_to_three_digits(seconds):
    number, unit = human_seconds(seconds).split()
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(seconds, rel=0.006)
    assert "e+" not in number


def test_the_least_is_marked_and_the_rest_stays_aligned():
    assert mark_least(["3 ms", "2 ms", "9 ms"], [3, 2, 9]) == ["3 ms  ", "2 ms *", "9 ms  "]
    assert mark_least(["3 ms", "2 ms", "9 ms"], [3, 2, 9], 1.5) == ["3 ms *", "2 ms *", "9 ms  "]


class TestTable:
    """Numbers and quantities end at one place, texts begin at one."""

    def test_columns_of_numbers_and_quantities_are_aligned_right(self):
        rows = [("ring", 4, "1.5 ms (1 to 2)", "+3%"), ("direct", 12, "20 ms (9 to 31)", "-10%")]
        assert table(rows, ["name", "messages", "time", "error"]).splitlines() == [
            "name      messages             time    error",
            "------  ----------  ---------------  -------",
            "ring             4  1.5 ms (1 to 2)      +3%",
            "direct          12  20 ms (9 to 31)     -10%",
        ]

    def test_one_text_among_quantities_aligns_the_column_left(self):
        assert table([("3 ms",), ("late",)], ["time"]).splitlines()[2:] == ["3 ms", "late"]

    def test_nothing_is_blank_and_leaves_numbers_aligned(self):
        rows = [(1, 0.5), (2, None), (3, float("nan")), ("none", float("inf"))]
        lines = table(rows, ["step", "loss"]).splitlines()
        assert lines[2:] == ["     1    0.50", "     2", "     3     nan", "  none     inf"]

    def test_each_column_can_have_its_format(self):
        rows = [("a", 1, 0.25, 0.25), ("b", 10, 12.5, 1e-9)]
        lines = table(rows, ["", "n", "share", "error"], floats=("", "", ".0%", ".0e")).splitlines()
        assert lines[2:] == ["a     1      25%    2e-01", "b    10    1250%    1e-09"]

    def test_stars_do_not_move_numbers(self):
        cells = mark_least(["10 ms", "2 ms"], [10, 2])
        assert table(zip(cells), ["time"]).splitlines()[2:] == ["10 ms", " 2 ms *"]

    def test_rows_may_name_themselves_and_may_be_missing(self):
        lines = table([("size", 3), ("depth", 14)], []).splitlines()
        assert lines[1:3] == ["size    3", "depth  14"]
        assert table([], ["a", "b"]).splitlines()[0].split() == ["a", "b"]

    def test_a_page_gets_texts_and_no_tags(self):
        page = table([("<script>", "a & b", 0.5)], ["x < y", "", ""], form="html")
        assert "&lt;script&gt;" in page
        assert "a &amp; b" in page
        assert "x &lt; y" in page
        assert "<script>" not in page
        assert page.count("text-align: right") == 2  # the number, in its head and in its row
