"""Figures on the site: as SVG, with a size, and with words for those who do not see them."""

import sys

import matplotlib.pyplot as plt
import pytest
from gallery_book import EXTENSIONS, Book

sys.path.insert(0, str(EXTENSIONS))

from figure_scraper import describe
from page_head import size, size_images

DRAW = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(3, 2))
axes.plot([1, 2], [3, 4], label="ring")
axes.set(title="It grows", xlabel="bytes", ylabel="time (ms)")
"""


def test_a_description_has_title_axes_and_names():
    figure, (left, right) = plt.subplots(1, 2)
    left.plot([1, 2], label="ring")
    left.annotate("naive", (1, 2))
    for text in ("7", "64 KiB", "2 devices"):
        left.annotate(text, (1, 2))
    left.set_title("It  grows\nfast", loc="left")
    left.set(xlabel="bytes", ylabel="time (ms)")
    right.set_yticks([0, 1], labels=["forward", "naive"])
    figure.legend([left.lines[0]], ["all of them"])
    expected = "It grows fast. time (ms) against bytes. Shown: ring, naive, 2 devices, "
    expected += "forward, all of them."
    assert describe(figure) == expected
    for name in ("_hidden", *(f"curve {letter}" for letter in "abcdefghijklmnopqrst")):
        left.plot([1, 2], label=name)
    text = describe(figure)
    assert text.count("curve") == 12 - 1, "ring is first"
    assert text.endswith(", 13 more."), text
    plt.close(figure)


def test_a_page_shows_the_figures_of_a_cell_as_svg_and_describes_each(tmp_path):
    book = Book(tmp_path / "book")
    scraper = {"image_scrapers": "figure_scraper.scrape"}
    book.configure("gallery_markdown", "page_head", gallery=scraper)
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
        assert f'alt="{title}. time (ms) against bytes. Shown: ring."' in page
    assert page.count('width="288" height="192"') == 2  # 3 by 2 inches


def test_sizes_are_in_pixels_of_the_page(tmp_path):
    figure = plt.figure(figsize=(3, 2), dpi=50)
    for name in ("a.svg", "a.png"):
        figure.savefig(tmp_path / name)
    plt.close(figure)
    assert size(tmp_path / "a.svg") == (288, 192)
    assert size(tmp_path / "a.png") == (150, 100)
    page = '<img alt="x" src="a.png"> <img alt="y" src="a.svg#z"> <img src="http://no.such/b.png">'
    assert size_images(page, tmp_path) == (
        '<img width="150" height="100" alt="x" src="a.png"> '
        '<img width="288" height="192" loading="lazy" alt="y" src="a.svg#z"> '
        '<img src="http://no.such/b.png">'
    )
    framed = size_images('<img class="sphx-glr-single-img" src="a.png">', tmp_path)
    assert framed.startswith('<div class="figure" tabindex="0"><img width="150" height="100"')
    (tmp_path / "b.svg").write_text('<svg viewBox="0 0 1 1">')
    with pytest.raises(ValueError, match=r"expected b.svg to begin with its size in points"):
        size(tmp_path / "b.svg")
