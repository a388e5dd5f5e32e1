"""The timeline to look into, in Chromium; what it must say is computed in Python."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "figures"))
from live_page import write_page
from test_explore_timelines import steps_of
from test_site import Visit

from microddp import figures
from microddp.figures import save_chrome_trace


@pytest.fixture
def visit(browser, tmp_path):
    picture = figures.explore_timelines(steps_of(2), title="finding")
    page = write_page(tmp_path, picture, '<p style="height: 3000px"></p>')
    with Visit(browser, page, viewport={"width": 900, "height": 700}) as visit:
        yield visit
        assert not visit.complaints


def told(page):
    return page.get_by_role("status").inner_text()


def press(page, *keys):
    page.locator(".canvas").focus()
    for key in keys:
        page.keyboard.press(key)


def ticks(page):
    return page.locator(".canvas text[text-anchor]:not(.on-bar)").all_text_contents()


def switch(page, label):
    page.locator("label").filter(has_text=label).click()


def test_a_span_under_the_pointer_says_what_it_was(visit):
    page = visit.page
    switch(page, "hooks")
    assert told(page).startswith("hooks, rank 0: 8.5 s, 2.5 s exposed")
    bars = page.locator(".canvas rect.bar[fill='#1b9e77']")
    bars.first.hover()
    tip = page.locator(".tip").inner_text()
    for text in (told(page), tip):
        assert "all-reduce w" in text
        assert "hooks, rank 0, communication" in text
        assert "2000.000 ms to 6000.000 ms: 4 s" in text
        assert "4 KiB, 1 KiB/s" in text
    page.mouse.move(5, 690)
    assert not page.locator(".tip").is_visible()


def test_keys_go_from_span_to_span(visit):
    page = visit.page
    seen = []
    for key in (None, "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
        press(page, *filter(None, [key]))
        seen.append(told(page).split(";")[0])
    assert seen == [
        "forward",
        "backward",
        "optimizer",
        "optimizer",
        "backward",
        "w, at 2000.000 ms",
    ]
    press(page, "ArrowDown", "ArrowDown", "ArrowDown")
    assert "naive, rank 1, compute" in told(page)
    press(page, "End")
    assert told(page).startswith("optimizer")


def test_steps_and_ranks_can_be_switched_on_one_scale(visit):
    page = visit.page
    scale = ticks(page)
    titles = page.locator(".canvas text.title")
    assert [text.split(":")[0] for text in titles.all_text_contents()] == ["rank 0", "rank 1"]
    switch(page, "all")
    assert ticks(page) == scale
    page.get_by_role("checkbox", name="0").uncheck(force=True)
    names = [text.split(":")[0] for text in titles.all_text_contents()]
    assert names == ["naive, rank 1", "hooks, rank 1"]
    page.get_by_role("checkbox", name="1").uncheck(force=True)
    assert told(page) == "Choose a rank."


def test_zooms_by_key_button_and_control_wheel_and_lets_the_page_scroll(visit):
    page = visit.page
    whole = ticks(page)
    press(page, "+")
    assert ticks(page) != whole
    press(page, "0")
    assert ticks(page) == whole
    page.get_by_role("button", name="zoom in").click()
    assert ticks(page) != whole
    page.get_by_role("button", name="whole step").click()
    page.locator(".canvas").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function("!document.querySelector('.canvas').innerHTML.includes('>0 ms<')")
    assert page.evaluate("scrollY") == 0
    before = ticks(page)
    page.mouse.wheel(0, 300)
    page.wait_for_function("scrollY > 0")
    assert ticks(page) == before


def test_the_saved_file_is_what_python_writes(visit, tmp_path):
    page = visit.page
    for name, spans in steps_of(2).items():
        switch(page, name)
        with page.expect_download() as download:
            page.get_by_role("button", name="for Perfetto").click()
        assert download.value.suggested_filename == f"timeline-{name}.json"
        save_chrome_trace(spans, tmp_path / "python.json")
        saved = json.loads(download.value.path().read_text())
        assert saved == json.loads((tmp_path / "python.json").read_text())


def test_a_drag_moves(visit):
    page = visit.page
    press(page, "+", "+")
    before = ticks(page)
    box = page.locator(".canvas").bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    page.mouse.up()
    moved = ticks(page)
    assert moved != before
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    assert ticks(page) == moved, "a pointer that is not pressed moves nothing"
