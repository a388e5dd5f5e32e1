"""Figures in a browser: one of four pictures is loaded, and its values can be pointed at."""

import io
from pathlib import Path
from shutil import copyfile

import furo
import matplotlib.pyplot as plt
import pytest
from PIL import Image
from test_site import REPOSITORY, Visit

from figures.light_and_dark import show
from figures.scraper import NARROW, as_html, save, values
from microddp import figures

STATIC = REPOSITORY / "docs" / "_static"
THEME = Path(furo.__file__).parent / "theme" / "furo" / "static" / "styles" / "furo.css"
SIZES = {"wide": (1280, 1500), "narrow": (390, 1500)}
BLUE = (0x3B, 0x8B, 0xD9)  # of the first curve
CURVES = {"ring": ([1, 2, 4], [10, 20, 40]), "naive": ([1, 2, 4], [30, 60, 80])}
BARS = {
    "rank 0": {"forward": 1.0, "exposed": 0.5},
    "rank 1": {"forward": 0.5, "exposed": 1.0},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with two figures: curves, and bars."""
    folder, drawn = tmp_path_factory.mktemp("values"), tmp_path_factory.mktemp("drawn")
    figures.lines(CURVES, title="It grows", xlabel="ranks", ylabel="ms")
    figures.stacked_bars(BARS, title="It waits", xlabel="a step")
    body = ""
    for number in plt.get_fignums():
        wide = plt.figure(number)
        narrow = wide.narrow()
        file, copy = (place / f"{number}.svg" for place in (drawn, folder))
        save(wide, file)
        save(narrow, drawn / f"{number}{NARROW}.svg")
        copyfile(file, copy)
        script = "\n".join(as_html(values(wide, narrow)).split("\n")[2:])
        shown = show(f'<img alt="x" src="{number}.svg">', file, copy)
        body += f'<div class="figure">{shown}\n{script}</div>'
    plt.close("all")
    links = [THEME, STATIC / "book.css", STATIC / "figures.css", STATIC / "live" / "live.css"]
    head = "".join(f'<link rel="stylesheet" href="{link.as_uri()}">' for link in links)
    for name in ("live", "values"):
        head += f'<script defer src="{(STATIC / "live" / name).as_uri()}.js"></script>'
    path = folder / "page.html"
    head += '<meta name="viewport" content="width=device-width"><title>x</title>'
    path.write_text(f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>")
    return path


def opened(browser, page, form="wide", **options):
    width, height = SIZES[form]
    return Visit(browser, page, viewport={"width": width, "height": height}, **options)


def loaded(visit):
    """Names of the pictures that were asked for: on a busy machine seconds after the page."""

    def asked():
        return sorted(Path(url).name for url in visit.requests if url.endswith(".svg"))

    for _ in range(100):
        if len(asked()) > 1:
            break
        visit.page.wait_for_timeout(100)
    visit.page.wait_for_load_state("networkidle")
    return asked()


def tips(visit):
    shown = visit.page.locator(".tip:visible")
    return [tip.inner_text().split("\n") for tip in shown.all()]


@pytest.mark.parametrize(
    ("form", "scheme", "ending"),
    [
        ("wide", "light", ""),
        ("wide", "dark", "-dark"),
        ("narrow", "light", "-narrow"),
        ("narrow", "dark", "-narrow-dark"),
    ],
)
def test_one_picture_of_each_figure_is_loaded_and_nothing_moves(
    browser, page, form, scheme, ending
):
    with opened(browser, page, form, color_scheme=scheme) as visit:
        assert loaded(visit) == [f"1{ending}.svg", f"2{ending}.svg"]
        images = visit.page.locator("img:visible")
        assert images.count() == 2
        for box in (image.bounding_box() for image in images.all()):
            assert box["width"] <= SIZES[form][0]
        needed = visit.page.evaluate("document.documentElement.scrollWidth")
        assert needed <= SIZES[form][0]
        assert not visit.complaints
        # Each has the proportions that its page kept free for it.
        kept = visit.page.evaluate(
            """[...document.images].filter(i => i.offsetWidth)
                .map(i => i.offsetWidth / i.offsetHeight - i.naturalWidth / i.naturalHeight)"""
        )
        assert all(abs(off) < 0.02 for off in kept)


def test_paper_is_light(browser, page):
    with opened(browser, page, color_scheme="dark") as visit:
        # Before the paper: a browser may fetch the light ones for it as soon as it is asked for.
        assert loaded(visit) == ["1-dark.svg", "2-dark.svg"]
        visit.page.emulate_media(media="print", color_scheme="dark")
        assert visit.page.locator("picture.only-light:visible").count() == 2
        assert visit.page.locator("picture.only-dark:visible").count() == 0


def test_figures_are_there_without_javascript(browser, page):
    with opened(browser, page, java_script_enabled=False) as visit:
        # A browser without scripts leaves no picture for later: the others are loaded as well.
        assert {"1.svg", "2.svg"} < set(loaded(visit))
        shown = [
            Path(image.get_attribute("src")).name
            for image in visit.page.locator("img:visible").all()
        ]
        assert shown == ["1.svg", "2.svg"]


@pytest.mark.parametrize("form", ["wide", "narrow"])
def test_a_bar_is_told_where_it_lies(browser, page, form):
    with opened(browser, page, form) as visit:
        figure = visit.page.locator(".figure").nth(1)
        figure.scroll_into_view_if_needed()
        visit.page.wait_for_load_state("networkidle")
        image = figure.locator("img:visible")
        box = image.bounding_box()
        found = set()
        for down in range(2, 100, 3):
            for across in (0.3, 0.6, 0.85):
                x, y = box["x"] + across * box["width"], box["y"] + down / 100 * box["height"]
                visit.page.mouse.move(x, y)
                found |= {tuple(lines) for lines in tips(visit)}
                assert len(tips(visit)) <= 1
        assert found == {
            ("rank 0", "forward: 1 s"),
            ("rank 0", "exposed: 500 ms"),
            ("rank 1", "forward: 500 ms"),
            ("rank 1", "exposed: 1 s"),
        }
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 3)
        assert not tips(visit), "far from all of them"


def test_a_tap_tells_the_nearest_point_and_a_tap_beside_hides_it(browser, page):
    with opened(browser, page, "narrow", has_touch=True, is_mobile=True) as visit:
        figure = visit.page.locator(".figure").first
        keys = figure.locator(".pointing")
        keys.focus()
        for _ in range(3):
            visit.page.keyboard.press("ArrowRight")
        mark = figure.locator(".mark").bounding_box()
        visit.page.keyboard.press("Escape")
        assert not tips(visit)
        middle = mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2
        visit.page.touchscreen.tap(middle[0] - 9, middle[1] + 7)
        assert tips(visit) == [["ring", "ranks: 4", "ms: 40"]]
        tip = visit.page.locator(".tip:visible").bounding_box()
        assert tip["x"] >= 0
        assert tip["x"] + tip["width"] <= SIZES["narrow"][0]
        visit.page.touchscreen.tap(200, SIZES["narrow"][1] - 20)
        assert not tips(visit)


def test_the_arrow_keys_go_along_a_curve_and_to_another_one_and_all_is_said(browser, page):
    with opened(browser, page) as visit:
        figure = visit.page.locator(".figure").first
        height = visit.page.evaluate("document.documentElement.scrollHeight")
        visit.page.keyboard.press("Tab")
        said = []
        for key in ("Right", "Right", "Down", "Right", "Right", "Up", "Left"):
            visit.page.keyboard.press(f"Arrow{key}")
            said.append(figure.locator("[role=status]").inner_text())
        assert said == [
            "ring, ranks: 1, ms: 10",
            "ring, ranks: 2, ms: 20",
            "naive, ranks: 2, ms: 60",
            "naive, ranks: 4, ms: 80",
            "naive, ranks: 4, ms: 80",
            "ring, ranks: 4, ms: 40",
            "ring, ranks: 2, ms: 20",
        ]
        assert tips(visit) == [["ring", "ranks: 2", "ms: 20"]]
        visit.page.keyboard.press("Tab")
        assert not tips(visit)
        visit.page.keyboard.press("ArrowRight")
        assert tips(visit) == [["rank 0", "forward: 1 s"]]
        assert visit.page.evaluate("document.documentElement.scrollHeight") == height


@pytest.mark.parametrize("form", ["wide", "narrow"])
def test_the_mark_lies_on_the_curve(browser, page, form):
    with opened(browser, page, form) as visit:
        figure = visit.page.locator(".figure").first
        figure.locator(".pointing").focus()
        visit.page.wait_for_load_state("networkidle")
        middles = []
        for _ in range(3):
            visit.page.keyboard.press("ArrowRight")
            mark = figure.locator(".mark").bounding_box()
            middles.append((mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2))
        visit.page.keyboard.press("Escape")
        seen = Image.open(io.BytesIO(visit.page.screenshot())).convert("RGB")
    assert len(set(middles)) == 3
    for x, y in middles:
        pixel = seen.getpixel((round(x), round(y)))
        assert max(abs(a - b) for a, b in zip(pixel, BLUE, strict=True)) < 40, (pixel, x, y)
