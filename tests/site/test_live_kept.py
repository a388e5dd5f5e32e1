"""What ranks keep, moment by moment: bars add up, and words and numbers follow the moment."""

import pytest
from live_page import write_page
from test_site import Visit

from microddp import figures

MIB = 1 << 20
MOMENTS = [("forward", "one computes"), ("forward", "two computes"), ("backward", "two is ready")]
WAYS = {
    "all": [[8 * MIB, 0, 4 * MIB], [8 * MIB, 0, 4 * MIB], [8 * MIB, 4 * MIB, 4 * MIB]],
    "half": [[MIB, 0, 2 * MIB], [2 * MIB, 0, 2 * MIB], [MIB, MIB, 2 * MIB]],
}
PREDICTED = {"all": 16 * MIB, "half": 5 * MIB}
KINDS = ["parameters", "gradients", "means"]


@pytest.fixture
def page(tmp_path):
    picture = figures.explore_kept(WAYS, PREDICTED, moments=MOMENTS, kinds=KINDS, title="Kept")
    return write_page(tmp_path, picture)


def cells(page):
    lines = page.locator(".results tr").all()[1:]
    return [[cell.inner_text() for cell in line.locator("td").all()] for line in lines]


def heights(page, panel):
    bars = page.locator(".panels svg").nth(panel).locator("rect:not(.now)").all()
    return [float(bar.get_attribute("height")) for bar in bars]


def test_bars_are_as_high_as_bytes_are_many(browser, page):
    with Visit(browser, page) as visit:
        for panel, found in enumerate(WAYS.values()):
            bytes_kept = [size for moment in found for size in moment]
            scale = heights(visit.page, panel)[0] / bytes_kept[0]
            assert heights(visit.page, panel) == pytest.approx([scale * b for b in bytes_kept])
        assert heights(visit.page, 0)[0] == pytest.approx(8 * heights(visit.page, 1)[0]), (
            "one scale"
        )
        assert visit.page.locator(".panels line.predicted").count() == len(WAYS)
        assert not visit.complaints


def test_numbers_and_words_follow_the_moment(browser, page):
    with Visit(browser, page) as visit:
        told = visit.page.locator(".told")
        assert told.inner_text() == "Moment 1 of 3, forward: one computes."
        assert cells(visit.page)[0] == ["8 MiB", "0 B", "4 MiB", "12 MiB", "16 MiB"]
        visit.page.get_by_role("slider").focus()
        visit.page.keyboard.press("End")
        assert told.inner_text() == "Moment 3 of 3, backward: two is ready."
        assert cells(visit.page) == [
            ["8 MiB", "4 MiB", "4 MiB", "16 MiB", "16 MiB"],
            ["1 MiB", "1 MiB", "2 MiB", "4 MiB", "5 MiB"],
        ]
        box = visit.page.locator(".panels svg").nth(1).bounding_box()
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        assert told.inner_text() == "Moment 2 of 3, forward: two computes."
        assert not visit.complaints


def test_one_kind_is_shown_alone(browser, page):
    with Visit(browser, page) as visit:
        visit.page.get_by_label("gradients").check()
        assert len(heights(visit.page, 0)) == len(MOMENTS)
        assert visit.page.locator(".named").all_text_contents() == [
            "all: at most 4 MiB",
            "half: at most 1 MiB",
        ]
        assert cells(visit.page) == [["0 B"], ["0 B"]]
        assert visit.page.locator(".panels line.predicted").count() == 0, "that is of all kinds"
        assert not visit.complaints


def test_plays_to_the_end_and_again(browser, page):
    with Visit(browser, page) as visit:
        for _ in range(2):
            visit.page.get_by_role("button", name="Play").click()
            assert visit.page.get_by_role("button", name="Stop").is_visible()
            visit.page.get_by_role("button", name="Play").wait_for(timeout=5000)
            assert visit.page.locator(".told").inner_text().startswith("Moment 3 of 3")
        assert not visit.complaints
