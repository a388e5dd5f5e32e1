"""The form that plans a step: its numbers are Python's, and its words follow them."""

import itertools
import math
from dataclasses import asdict

import pytest
from live_page import write_page
from planned_step import step_budget
from test_site import Visit

from microddp import figures

DEVICES = {
    "fast": {"peak": 1e15, "utilisation": 0.4, "latency": 3e-6},
    "slow": {"peak": 1e11, "utilisation": 1, "latency": 1e-4},
}
LINKS = {"wide": 450e9, "narrow": 1.25e9}


@pytest.fixture
def page(tmp_path):
    form = figures.explore_plan(
        DEVICES, LINKS, parameters=1e9, tokens=1024, ranks=8, budget=step_budget
    )
    return write_page(tmp_path, form)


def grid():
    for parameters, tokens, devices, stage, bandwidth, latency, accumulation, nbytes in (
        itertools.product(
            (1.5e5, 7e9), (1, 4096), (1, 2, 7, 1024), (0, 1, 2, 3), (1e7, 450e9), (0, 3e-6),
            (1, 12), (0.25, 4),
        )
    ):  # fmt: skip
        yield {
            "parameters": parameters,
            "tokens": tokens,
            "devices": devices,
            "peak": 989e12,
            "utilisation": 0.05 if stage % 2 else 1,
            "stage": stage,
            "bandwidth": bandwidth,
            "latency": latency,
            "accumulation": accumulation,
            "gradient_bytes": nbytes,
        }


def numbers(budget):
    outcomes = [budget.pop(how) for how in ("overlapped", "unhidden")]
    return {
        **budget,
        **{f"{i} {name}": value for i, each in enumerate(outcomes) for name, value in each.items()},
    }


def test_equals_pythons(browser, page):
    plans = list(grid())
    assert len(plans) == 1024
    with Visit(browser, page) as visit:
        # JSON has no infinity.
        found = visit.page.evaluate(
            """plans => plans.map(plan => JSON.parse(JSON.stringify(
                live.kinds.plan.budget(plan),
                (_, value) => value === Infinity ? "inf" : value)))""",
            plans,
        )
        assert not visit.complaints
    unreachable = 0
    for plan, theirs in zip(plans, found, strict=True):
        theirs = {name: float(value) for name, value in numbers(theirs).items()}
        ours = numbers(asdict(step_budget(**plan)))
        unreachable += math.inf in ours.values()
        assert theirs == pytest.approx(ours, rel=1e-12, abs=0), plan
    assert 0 < unreachable < 1024


def test_says_what_the_numbers_say(browser, page):
    start = {"parameters": 1e9, "tokens": 1024, "accumulation": 1, "gradient_bytes": 4}
    start |= {"peak": 1e15, "utilisation": 0.4, "latency": 0}
    cases = {  # devices and bandwidth, and how the sentence begins and ends
        (1, 1e9): ("One device", "itself."),
        (8, 1e9): ("8 devices take ", "Not worth it either way."),
        (8, 1e13): ("8 devices take ", "Worth it either way."),
        (2, 2e11): ("2 devices take ", "only as far as computing hides communication."),
    }
    with Visit(browser, page) as visit:
        for (devices, bandwidth), (begins, ends) in cases.items():
            plan = {**start, "devices": devices, "bandwidth": bandwidth}
            said = visit.page.evaluate("plan => live.kinds.plan.verdict(plan)", plan)
            assert said.startswith(begins), said
            assert said.endswith(ends), said
            budget = step_budget(**plan)
            assert (budget.overlapped.speedup > 1) == ends.startswith(("Worth", "only"))
            assert (budget.unhidden.speedup > 1) == ends.startswith("Worth")


def test_fields_sliders_and_presets_move_each_other(browser, page):
    with Visit(browser, page) as visit:
        form = visit.page
        before = form.locator(".verdict").inner_text()
        form.get_by_label("Devices", exact=True).and_(form.locator("[type=number]")).fill("16")
        assert form.locator(".verdict").inner_text().startswith("16 devices take ")
        slider = form.locator("[type=range][aria-label='Devices']")
        slider.focus()
        slider.press("ArrowRight")
        devices = int(form.locator("[id^=plan-devices]").input_value())
        assert devices > 16
        form.locator("label").filter(has_text="narrow").click()
        assert form.locator("[id^=plan-bandwidth]").input_value() == "1.25"
        form.locator("[id^=plan-bandwidth]").fill("2")
        assert form.locator("fieldset").nth(1).locator("[value=other]").is_checked()
        form.locator("[id^=plan-devices]").fill("2.5")  # no device is half
        assert form.locator("[id^=plan-devices]").get_attribute("aria-invalid") == "true"
        assert form.get_by_role("alert").filter(has_text="whole number from 1 to 1024").count() == 1
        assert form.locator(".verdict").inner_text().startswith(f"{devices} devices take ")
        assert form.locator(".verdict").inner_text() != before
        assert not visit.complaints


def test_a_plan_can_be_shared(browser, page):
    with Visit(browser, page) as visit:
        visit.page.locator("[id^=plan-devices]").fill("24")
        visit.page.get_by_role("button").click()
        address = visit.page.url
        said = visit.page.locator(".verdict").inner_text()
        visit.page.goto("about:blank")
        visit.page.goto(address)
        assert visit.page.locator("[id^=plan-devices]").input_value() == "24"
        assert visit.page.locator(".verdict").inner_text() == said
        visit.page.goto("about:blank")
        visit.page.goto(address.replace(",24,", ",-24,"))  # and one out of range is not taken
        assert visit.page.locator("[id^=plan-devices]").input_value() == "8"
        assert not visit.complaints


def test_sharding_changes_memory_and_messages_and_is_shared(browser, page):
    with Visit(browser, page) as visit:
        form = visit.page
        results = form.locator(".results")
        assert "14.9 GiB" in results.inner_text()
        form.locator("label").filter(has_text="stage 3").click()
        assert "1.86 GiB" in results.inner_text(), "an eighth"
        said = form.locator(".verdict").inner_text()
        form.get_by_role("button").click()
        address = form.url
        assert address.endswith(",3")
        form.goto("about:blank")
        form.goto(address)
        assert form.locator(".verdict").inner_text() == said
        form.goto("about:blank")
        form.goto(address.removesuffix(",3"))  # as addresses were before
        assert "14.9 GiB" in results.inner_text()
        assert not visit.complaints


@pytest.mark.parametrize("width", [360, 1280])
def test_fits_the_screen(browser, page, width):
    with Visit(browser, page, viewport={"width": width, "height": 800}) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = visit.page.evaluate(
            """[...document.querySelectorAll('.stage svg text')]
                .map(text => text.getBoundingClientRect().height)"""
        )
        assert min(sizes) >= 12
