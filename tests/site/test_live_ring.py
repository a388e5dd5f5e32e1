"""The live picture of chapter 02: what its script computes, and what its controls do."""

import re
from dataclasses import astuple

import pytest
from live_page import write_page
from messages import all_messages
from test_site import Visit

from microddp.allreduce import all_reduce_cost
from microddp.figures import all_reduces
from microddp.figures.who_has_what import contributors

NAMES = ("naive", "direct", "ring")


def page_with(folder, n, elements=1003):
    """A page with only the picture of a run on n ranks."""
    return write_page(folder, all_reduces(all_messages(n, elements), elements, itemsize=4))


@pytest.fixture
def open_run(browser, tmp_path):
    """Opens the picture of a run, at rest."""
    visits = []

    def open_page(n=4, elements=1003, **options):
        visits.append(Visit(browser, page_with(tmp_path, n, elements), **options))
        return visits[-1].page

    yield open_page
    for visit in visits:
        visit.context.close()
        assert not visit.complaints


def offered(page, call):
    """What the script computes, `data` being what the page has for it."""
    given = "JSON.parse(document.querySelector('figure.live script').textContent)"
    return page.evaluate(f"() => (({{ ring }}, data) => {call})(live.kinds, {given})")


def held_by_values(name, n):
    """How many ranks' values each rank holds after each round, from sums that tell of whom."""
    values = [[10**rank] * (n if name == "ring" else 1) for rank in range(n)]
    yield [[1] * len(row) for row in values]
    for messages in zip(*all_messages(n, n)[name], strict=True) if name != "naive" else naive(n):
        before = [list(row) for row in values]
        for message in messages:
            part = message.offset // 4
            if name == "direct":
                values[message.dst][0] += 10**message.src
            elif name == "naive" and message.src == 0:
                values[message.dst][0] = before[0][0]
            elif len(contributors(before[message.src][part])) == n:
                values[message.dst][part] = before[message.src][part]
            else:
                values[message.dst][part] += before[message.src][part]
        yield [[len(contributors(value)) for value in row] for row in values]


def naive(n):
    back, *there = all_messages(n, n)["naive"]
    return [[message] for messages in (*there, back) for message in messages]


@pytest.mark.parametrize("n", range(2, 9))
def test_the_schedules_send_what_python_sends(open_run, n):
    page = open_run(n=8 if n == 2 else 2, reduced_motion="reduce")
    for name, by_rank in all_messages(n, 1003).items():
        rounds = offered(page, f"ring.schedule('{name}', {n}, 1003, 4)")
        for rank, messages in enumerate(by_rank):
            sent = [tuple(m) for together in rounds for m in together if m[0] == rank]
            assert sent == [astuple(message) for message in messages], (name, rank)


@pytest.mark.parametrize("n", range(2, 9))
def test_the_schedules_are_the_recorded_rounds_and_cost_what_python_says(open_run, n):
    elements = 840  # a multiple of every n: all chunks are of one size
    page = open_run(n=n, elements=elements, reduced_motion="reduce")
    for name in NAMES:
        recorded = offered(page, f"ring.roundsOf(data, '{name}', {n})")
        assert recorded == offered(page, f"ring.schedule('{name}', {n}, {elements}, 4)")
        cost = all_reduce_cost(name, n, 4 * elements)
        assert offered(page, f"ring.counts(data, '{name}', {n}, {cost.rounds})") == {
            "rounds": len(recorded),
            "messages": cost.messages,
            "most": cost.most_sent,
            "time": round(cost.seconds(0, n / (4 * elements)), 6),
        }
        assert len(recorded) == cost.rounds


@pytest.mark.parametrize("n", range(2, 9))
def test_what_ranks_hold_is_what_values_say(open_run, n):
    page = open_run(n=3, reduced_motion="reduce")
    for name in NAMES:
        for done, held in enumerate(held_by_values(name, n)):
            assert offered(page, f"ring.holdings(data, '{name}', {n}, {done})") == held, (
                name,
                done,
            )
        assert {count for row in held for count in row} == {n}


def test_chunks_of_unequal_sizes_are_numbered_by_their_places(open_run):
    page = open_run(n=8, elements=12, reduced_motion="reduce")
    assert offered(page, "ring.holdings(data, 'ring', 8, 14)") == [[8] * 8] * 8


def test_it_says_whether_the_run_recorded_what_it_shows(open_run):
    page = open_run(n=4, reduced_motion="reduce")
    told = page.locator(".stage > .told")
    assert "recorded in this run, 4 ranks" in told.text_content()
    page.get_by_role("radio", name="6", exact=True).check(force=True)
    assert "by the algorithms' schedules, 6 ranks" in told.text_content()
    assert "This run had 4." in told.text_content()
    assert page.locator(".panel:last-child .held tr").count() == 1 + 6


def test_for_the_runs_ranks_the_recording_counts(open_run):
    page = open_run(n=3, reduced_motion="reduce")
    recording = "{ n: 3, elements: 9, itemsize: 4, rounds: { ring: [[[0, 1, 7, 0]]] } }"
    assert offered(page, f"ring.counts({recording}, 'ring', 3, 1).most") == 7
    assert offered(page, f"ring.counts({recording}, 'ring', 4, 1).most") == 12


def test_a_run_on_one_rank_shows_four_by_schedule(open_run):
    page = open_run(n=1, reduced_motion="reduce")
    assert "schedules, 4 ranks" in page.locator(".stage > .told").text_content()


def test_steps_by_buttons_and_by_arrow_keys(open_run):
    page = open_run(n=4, reduced_motion="reduce")
    shown = page.locator(".slider output")
    assert shown.text_content() == "0 of 6"
    page.get_by_role("button", name="Step on").press("Enter")
    page.get_by_role("slider").press("ArrowRight")
    assert shown.text_content() == "2 of 6"
    said = page.locator(".panel .told").all_text_contents()
    assert said[0] == "Round 3: rank 3 sends its tensor to rank 0, which adds it."
    assert all(words.startswith("Round 3: every rank sends") for words in said[1:])
    page.get_by_role("button", name="Step back").click()
    assert shown.text_content() == "1 of 6"
    page.get_by_role("slider").press("End")
    assert set(page.locator(".panel .told").all_text_contents()) == {
        "Done: every rank has the sum."
    }
    assert page.locator(".message").count() == 0


def test_in_the_same_time_the_ring_ends_first(open_run):
    page = open_run(n=4, reduced_motion="reduce")
    page.get_by_role("radio", name="the same time").check(force=True)
    page.get_by_role("slider").fill("6")
    rounds = page.locator(".counted tr:first-child td").all_text_contents()
    assert rounds == ["1 of 6", "1 of 3", "6 of 6"]
    times = page.locator(".counted tr:last-child td").all_text_contents()
    assert times == ["6 of 24", "6 of 12", "6 of 6"]


def place(page):
    return page.locator(".panel:last-child .message").first.get_attribute("transform")


def test_it_plays_when_it_is_seen_and_pauses(open_run):
    page = open_run(n=4)
    page.get_by_role("button", name="Pause").click()  # it began by itself
    stopped = place(page)
    page.wait_for_timeout(300)
    assert place(page) == stopped
    page.get_by_role("button", name="Play").click()
    page.wait_for_timeout(300)
    assert place(page) != stopped


def test_with_less_motion_it_waits_and_then_goes_in_steps(open_run):
    page = open_run(n=4, reduced_motion="reduce")
    page.wait_for_timeout(300)
    assert page.locator(".stage button").first.text_content() == "Play"
    page.get_by_role("button", name="Play").click()
    start = place(page)
    page.wait_for_timeout(400)
    assert place(page) == start  # no message is on its way
    page.wait_for_function("document.querySelector('.slider output').textContent === '1 of 6'")


def test_a_phone_shows_one_of_the_three_at_a_time(open_run):
    page = open_run(n=8, reduced_motion="reduce", viewport={"width": 360, "height": 740})
    assert page.locator(".panel:visible .name").all_text_contents() == ["ring"]
    page.get_by_role("radio", name="naive").check(force=True)
    assert page.locator(".panel:visible .name").all_text_contents() == ["naive"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_print_and_no_script_have_the_table(browser, tmp_path):
    with Visit(browser, page_with(tmp_path, 3)) as visit:
        assert not visit.page.locator(".still").is_visible()
        visit.page.emulate_media(media="print")
        assert visit.page.locator(".still table").is_visible()
        assert not visit.page.locator(".stage").is_visible()
    with Visit(browser, page_with(tmp_path, 3), java_script_enabled=False) as visit:
        assert re.findall(r"\d to \d", visit.page.locator(".still tbody").inner_text())
