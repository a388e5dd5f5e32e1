"""Printed tables in a browser: they are sorted by what their cells mean, and fit a phone."""

import random

import pytest
from test_site import REPOSITORY, Visit

from microddp.findings import mark_least
from microddp.report import human_bytes, human_seconds, table
from pages.printed_tables import as_html, pieces

STATIC = REPOSITORY / "docs" / "_static"
STYLE = "".join(
    f"<link rel=stylesheet href={(STATIC / name).as_uri()}>"
    for name in ("output.css", "tables.css")
)


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page with the table of these rows and headers."""
    visits = []

    def opened(rows, headers, **options):
        (read,) = pieces(table(rows, headers))
        page = tmp_path / "page.html"
        script = f"<script defer src={(STATIC / 'tables.js').as_uri()}></script>"
        head = f"<meta charset=utf-8><meta name=viewport content=width=device-width>{STYLE}{script}"
        page.write_text(f"<!doctype html>{head}{as_html(read)}", encoding="utf-8")
        visits.append(Visit(browser, page, **options))
        return visits[-1].page

    yield opened
    for visit in visits:
        assert not visit.complaints
        visit.context.close()


def column(page, place=0):
    rows = page.locator("tbody tr")
    return [
        text.strip()
        for text in rows.evaluate_all(
            "(rows, place) => rows.map(row => row.cells[place].textContent)", place
        )
    ]


def spread(seconds):
    return (
        f"{human_seconds(seconds)} ({human_seconds(seconds / 2)} to {human_seconds(2 * seconds)})"
    )


def speed(bits):
    return f"{bits / 1e6:g} Mbit/s" if bits < 1e9 else f"{bits / 1e9:g} Gbit/s"


# What writes a quantity, and quantities that it writes as different ones.
QUANTITIES = {
    "times": (human_seconds, [3.1e-9 * 7.7**k for k in range(19)]),
    "times with quartiles": (spread, [2.2e-6 * 9.1**k for k in range(12)]),
    "bytes": (human_bytes, [7 * 5.3**k for k in range(14)]),
    "speeds": (speed, [1e7 * 3.3**k for k in range(9)]),
    "shares": ("{:.1%}".format, [0.001, 0.02, 0.4, 0.97, 1.5]),
    "changes": ("{:+.1f} %".format, [-12.5, -3, -0.4, 0.2, 3.1, 25]),
    "exponents": ("{:.1e}".format, [-2.0, -1e-5, 0, 1e-17, 1e-05, 0.3, 40.0]),
    "thousands": ("{:,}".format, [-3500, 12, 999, 1000, 24697, 1052672]),
    "about": (lambda value: f"~{value}" if value % 2 else f"<{value}", [1, 8, 33, 260]),
    "parameters": (lambda value: f"{value / 1e6:.1f}M", [1e6, 4.6e6, 19.8e6]),
    "nanoseconds": ("{} ns".format, [1, 20, 300]),
    "with infinity": (str, [-4.0, 0.25, 12.0, float("inf")]),
}


@pytest.mark.parametrize("kind", QUANTITIES)
def test_quantities_are_sorted_by_value(kind, show):
    write, values = QUANTITIES[kind]
    shuffled = random.Random(1).sample(values, len(values))
    page = show([[number, write(value)] for number, value in enumerate(shuffled)], ["n", kind])
    expected = [write(value) for value in sorted(values)]
    assert len(set(expected)) == len(expected)
    button = page.get_by_role("button", name=kind, exact=True)
    button.click()
    assert column(page, 1) == expected
    button.click()
    assert column(page, 1) == expected[::-1]
    button.click()
    assert column(page, 1) == [write(value) for value in shuffled]


def test_stars_words_and_blanks(show):
    cells = mark_least(["3.0", "0.71", "12", "1.29"], [3, 0.71, 12, 1.29])
    rows = [
        ["b", cells[0], "16"],
        ["A", cells[1], "not yet"],
        ["rank 10", cells[2], None],
        ["rank 9", cells[3], "4"],
    ]
    page = show(rows, ["name", "ratio", "epoch"])
    buttons = page.locator("th button")
    buttons.nth(0).click()
    assert column(page, 0) == ["A", "b", "rank 9", "rank 10"], "numbers in words count"
    buttons.nth(1).click()
    assert column(page, 1) == ["0.71 *", "1.29", "3.0", "12"]
    buttons.nth(2).click()
    assert column(page, 2) == ["4", "16", "not yet", ""]
    buttons.nth(2).click()
    assert column(page, 2) == ["not yet", "16", "4", ""], "blanks are last both ways"


def test_equal_cells_keep_their_order(show):
    page = show([["x", 2], ["y", 1], ["z", 2], ["w", 1]], ["name", "n"])
    page.get_by_role("button", name="n", exact=True).click()
    assert column(page) == ["y", "w", "x", "z"]


ROWS = [["ring", 3, "1.5 ms (1.2 to 1.8)"], ["naive", 20, "9 us (8 to 10)"]]


def test_sorted_by_keyboard_and_said(show):
    page = show(ROWS, ["", "ranks", "time"])
    assert page.locator("th button").count() == 2, "none where there is no header"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "table-frame"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    said = []
    for key in ("Enter", "Space", "Enter"):
        page.keyboard.press(key)
        said.append([h.get_attribute("aria-sort") for h in page.locator("thead th").all()])
        assert page.evaluate("document.activeElement.textContent") == "time"
    assert said == [[None, "ascending"], [None, "descending"], [None, None]]
    page.locator("th button").first.click()
    page.locator("th button").last.click()
    assert page.locator("[aria-sort]").count() == 1
    assert page.locator("[aria-sort]").inner_text() == "time"


def test_sorted_by_touch(show):
    page = show(ROWS, ["", "ranks", "time"], has_touch=True)
    page.get_by_role("button", name="time").tap()
    assert column(page) == ["naive", "ring"]
    sizes = page.locator("th button").evaluate_all("all => all.map(b => b.offsetHeight)")
    assert min(sizes) >= 24


def test_complete_without_a_script(show):
    page = show(ROWS, ["", "ranks", "time"], java_script_enabled=False)
    assert page.locator("button").count() == 0
    assert page.locator("td").all_inner_texts() == ["", "3", ROWS[0][2], "20", ROWS[1][2]]


@pytest.mark.parametrize("columns", [3, 12])
def test_fits_a_phone(columns, show):
    """All of it can be reached: by wrapping, or by scrolling in its frame."""
    headers = ["", *(f"column number {place}" for place in range(columns - 1))]
    page = show(
        [[f"way {n}", *["12.5 ms (11 to 13)"] * (columns - 1)] for n in range(3)],
        headers,
        viewport={"width": 390, "height": 800},
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    frame = page.locator(".table-frame")
    needed, width = frame.evaluate("f => [f.scrollWidth, f.clientWidth]")
    assert (needed > width) == (columns == 12)
    frame.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(500)
    assert (frame.evaluate("f => f.scrollLeft") > 0) == (columns == 12)
    assert frame.locator("tbody th").first.bounding_box()["x"] >= 0, "names stay in sight"
