"""Figures on the site: SVG with a size, in light and dark, wide and narrow; words and values."""

import json
import re

import matplotlib.pyplot as plt
import pytest
from gallery_book import Book

from figures.light_and_dark import show, size
from figures.scraper import as_html, describe, values
from microddp import figures
from microddp.figures.style import DARK, INK

DRAW = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(3, 2))
axes.plot([1, 2], [3, 4], label="ring")
axes.set(title="It grows", xlabel="bytes", ylabel="time (ms)")
"""


BOOK_DRAW = """
from microddp import figures
figures.lines({"ring, measured": ([1, 2], [3, 4]), "H = 4": ([1, 2], [1, 2])}, title="Grows",
              xlabel="bytes", ylabel="ms")
figures.stacked_bars({"rank 0": {"forward": 1.0, "exposed": 0.5}}, title="Waits", xlabel="a step")
"""


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_a_description_has_titles_axes_and_all_names():
    curves = {name: ([1, 2], [3, 4]) for name in ("ring, predicted", "H = 4", "26 of 26122")}
    figures.lines(
        curves | {str(i): ([1, 2], [i, i]) for i in range(12)},
        title="It grows, and grows, and grows, until " + "more " * 12 + "has no room in one line",
        xlabel="bytes",
        ylabel="time, ms",
    )
    assert plt.gcf().get_suptitle().count("\n") == 1
    rest = "; ".join(map(str, range(12)))
    assert describe(plt.gcf()) == (
        f"It grows, and grows, and grows, until {'more ' * 12}has no room in one line. "
        f"time, ms against bytes. Curves: ring, predicted; H = 4; 26 of 26122; {rest}."
    )


def test_bars_and_panels_are_described():
    bars = {"naive": {"forward": 1.0, "exposed": 2.0}, "ddp": {"forward": 1.0, "exposed": 1.0}}
    figures.stacked_bars(bars, title="It waits.", xlabel="a step")
    text = "It waits. a step. Bars: naive; ddp. Parts: forward; exposed."
    assert describe(plt.gcf()) == text
    figures.traffic({"ring": [[0, 8], [8, 0]], "naive": [[0, 8], [8, 0]]}, title="Who sends")
    text = "Who sends. ring. naive. from rank (squares: B) against to rank. to rank. "
    assert describe(plt.gcf()) == f"{text}Squares: ring; naive."


def test_values_lie_where_they_are_drawn_in_both_pictures():
    figures.stacked_bars({"a": {"x": 1.0}, "b": {"x": 4.0}}, title="", xlabel="")
    wide = plt.gcf()
    narrow = wide.narrow()
    for figure in (wide, narrow):
        figure.canvas.draw()
    found = values(wide, narrow)
    assert [series["texts"] for series in found["series"]] == [[("x: 1 s",)], [("x: 4 s",)]]
    for name, figure in (("wide", wide), ("narrow", narrow)):
        left, top, width, height = found[name]["boxes"][0]
        for patch, ((x0, y0, x1, y1),) in zip(
            figure.axes[0].patches, found[name]["places"], strict=True
        ):
            seen = patch.get_window_extent().transformed(figure.transFigure.inverted())
            at = (left + width * x0, left + width * x1, top + height * y0, top + height * y1)
            assert at == pytest.approx((seen.x0, seen.x1, 1 - seen.y1, 1 - seen.y0), abs=0.01)
            assert y0 < y1


def test_points_of_a_curve_are_written_once_for_both_pictures():
    figures.lines({"a": ([1, 10], [5, 50])}, title="", xlabel="n", ylabel="ms", log="xy")
    wide = plt.gcf()
    narrow = wide.narrow()
    for figure in (wide, narrow):
        figure.canvas.draw()
    found = values(wide, narrow)
    assert "places" not in found["narrow"]
    (series,) = found["series"]
    assert series["labels"] == ("n", "ms")
    assert series["texts"] == [("1", "5"), ("10", "50")]
    (x0, y0), (x1, y1) = found["wide"]["places"][0]
    assert (x0, y0) == pytest.approx((1 - x1, 1 - y1), abs=2e-4)
    assert x0 < x1
    assert y0 > y1, "from the top"


def test_a_long_curve_has_some_of_its_points_the_ends_among_them():
    count = 1000
    figures.lines({"a": (range(count), range(count))}, title="", xlabel="n", ylabel="ms")
    (series,) = plt.gcf().series
    assert len(series.texts) == 128
    assert (series.texts[0], series.texts[-1]) == (("0", "0"), ("999", "999"))


def test_no_line_of_the_values_is_too_long_for_docutils_and_none_ends_the_script():
    figures.lines({"</script>": (range(1000), range(1000))}, title="", xlabel="", ylabel="")
    wide = plt.gcf()
    wide.canvas.draw()
    text = as_html(values(wide, wide))
    assert max(map(len, text.splitlines())) < 10_000
    assert text.count("</script>") == 1


def test_a_page_shows_the_figures_of_a_cell_as_svg_and_describes_each(tmp_path):
    book = Book(tmp_path / "book")
    scraper = {"image_scrapers": "figures.scraper.scrape"}
    book.configure("pages.markdown", "figures.light_and_dark", gallery=scraper)
    book.chapter("draws", DRAW + DRAW.replace("grows", "grows again"))
    for _ in range(2):  # the same drawing, the same file
        build = book.build("-W", "-E")
        assert build.process.returncode == 0, build.output
        pictures = sorted((book.root / "_site/_images").glob("sphx_glr_draws_00*"))
        assert [picture.name[-7:] for picture in pictures] == ["001.svg", "002.svg"]
        saved = [picture.read_bytes() for picture in pictures]
        (book.root / "docs/chapters/draws.py.md5").unlink()
    assert [picture.read_bytes() for picture in pictures] == saved
    page = book.page("draws")
    for title in ("It grows", "It grows again"):
        assert f'alt="{title}. time (ms) against bytes."' in page
    assert page.count('width="288" height="192"') == 2  # 3 by 2 inches


def test_figures_of_the_book_are_wide_and_narrow_light_and_dark_and_have_their_values(tmp_path):
    book = Book(tmp_path / "book")
    scraper = {"image_scrapers": "figures.scraper.scrape"}
    book.configure("pages.markdown", "figures.light_and_dark", "figures.live", gallery=scraper)
    book.chapter("draws", BOOK_DRAW)
    build = book.build("-W")
    assert build.process.returncode == 0, build.output
    page, folder = book.page("draws"), book.root / "_site/_images"
    for number in ("001", "002"):
        stem = f"sphx_glr_draws_{number}"
        for ending in ("", "-narrow"):
            light = (folder / f"{stem}{ending}.svg").read_text()
            dark = (folder / f"{stem}{ending}-dark.svg").read_text()
            assert INK in light
            assert not any(color in dark for color in DARK)
            assert DARK[INK] in dark
            for page_is in ("", "-dark"):
                assert f"../_images/{stem}{ending}{page_is}.svg" in page
    assert page.count('alt="Grows. ms against bytes. Curves: ring, measured; H = 4."') == 2
    pairs = (
        '<div class="figure[^"]*">\\s*<picture class="only-light">.*?<picture class="only-dark">.*?'
    )
    framed = re.findall(f"{pairs}<script[^>]*>(.*?)</script></div>", page, re.DOTALL)
    curves, bars = map(json.loads, framed)
    assert [series["name"] for series in curves["series"]] == ["ring, measured", "H = 4"]
    assert bars["series"][0]["texts"] == [["forward: 1 s"], ["exposed: 500 ms"]]
    assert "live/values.js" in page
    cards = (book.root / "_site/chapters/index.html").read_text()
    assert "thumb-dark.svg" in cards


def test_sizes_are_in_pixels_of_the_page(tmp_path):
    figure = plt.figure(figsize=(3, 2), dpi=50)
    for name in ("a.svg", "a.png"):
        figure.savefig(tmp_path / name)
    plt.close(figure)
    assert size(tmp_path / "a.svg") == 'width="288" height="192"'
    assert size(tmp_path / "a.png") == 'width="150" height="100"'
    for name, pixels in (
        ("a.svg", size(tmp_path / "a.svg")),
        ("a.png", 'width="150" height="100"'),
    ):
        tag = f'<img alt="x" src="../{name}" />'
        shown = f'<img {pixels} loading="lazy" alt="x" src="../{name}" />'
        assert show(tag, tmp_path / name, tmp_path / "site" / name) == shown
    assert not (tmp_path / "site").exists(), "a figure of another's has no dark form"
