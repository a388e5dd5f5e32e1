"""How results are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microddp.report import human_bytes, human_seconds, mark_least


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
