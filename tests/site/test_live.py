"""What all live pictures of a built site keep to: their weight, and what is there without them."""

import gzip
import re

from conftest import pages_of
from test_site import Visit

MOST_BYTES = 40_000  # of a picture: its data, its script and style, and what all of them share
FIGURE = re.compile(r'<figure class="live" data-live="(\w+)">(.*?)</figure>', re.DOTALL)


def pytest_generate_tests(metafunc):
    site = metafunc.config.getoption("site").resolve()
    found = [
        (page, kind, text)
        for page in pages_of(site)
        for kind, text in FIGURE.findall(page.read_text(encoding="utf-8"))
    ]
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize(
            ("page", "kind", "text"), found, ids=[f"{kind}-{page.stem}" for page, kind, _ in found]
        )


def test_is_light(site, page, kind, text):
    del page
    files = [
        site / "_static" / "live" / f"{name}.{end}"
        for name in ("live", kind)
        for end in ("js", "css")
    ]
    parts = [text.encode(), *(file.read_bytes() for file in files if file.exists())]
    assert sum(len(gzip.compress(part)) for part in parts) < MOST_BYTES


def test_a_still_picture_stands_in_without_a_script(browser, page, kind, text):
    del text
    with Visit(browser, page, java_script_enabled=False) as visit:
        figure = visit.page.locator(f'figure.live[data-live="{kind}"]').first
        assert figure.locator(".still").is_visible()
        assert not figure.locator(".stage").is_visible()
        still = figure.locator(".still").inner_html()
        assert "<svg" in still or "<table" in still


def test_keyboard_less_motion_and_print(browser, page, kind, text):
    del text
    with Visit(browser, page, reduced_motion="reduce") as visit:
        figure = visit.page.locator(f'figure.live[data-live="{kind}"]').first
        still, stage = figure.locator(".still"), figure.locator(".stage")
        assert stage.is_visible()
        assert not still.is_visible()
        stage.scroll_into_view_if_needed()
        visit.page.wait_for_timeout(200)  # it may still be fitted to the page
        before = stage.inner_html()
        visit.page.wait_for_timeout(1100)  # where it would go in steps, it takes one a second
        assert stage.inner_html() == before, "nothing moves where motion is unwelcome"
        figure.evaluate("f => { f.tabIndex = -1; f.focus(); }")
        for _ in range(3):
            visit.page.keyboard.press("Tab")
            assert figure.evaluate("f => f.contains(document.activeElement)")
        visit.page.emulate_media(media="print")
        assert still.is_visible()
        assert not stage.is_visible()
