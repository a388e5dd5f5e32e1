"""The buckets to refill: plans and predictions are Python's, and words and bars follow them."""

import itertools
import re
from dataclasses import asdict

import pytest
import torch
from live_page import write_page
from test_site import Visit

from microddp import figures
from microddp.buckets import plan_buckets
from microddp.fitted import FittedCost
from microddp.performance import predict_plan
from microddp.step_times import Bucket, ComputeTimes
from microddp.timing import Timing

KIB = 1 << 10
SIZES = {f"layer {i}": [4, 64, 256, 33][i % 4] * KIB for i in range(12)}
TOTAL = sum(SIZES.values())
# The last but one gradient comes first, and after the last of them backward goes on for a while.
READY = {name: 0.01 * (i + 1) for i, name in enumerate(SIZES)} | {"layer 10": 0.001}
COMPUTE = ComputeTimes(0.05, 0.121, READY, 0.0, 2e-9)
COST = FittedCost(2e-3, 1e-7)
MEASURED = {1: (0.3, 0.31, 0.35), 256 * KIB: (0.27, 0.28, 0.29), TOTAL: (0.33, 0.33, 0.34)}


def planned(cap, sizes=SIZES):
    """Inputs of plans and predictions."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes.values()]
    names = list(sizes)
    plan = plan_buckets(tensors, [cap])
    buckets = [Bucket(tuple(names[i] for i in b), sum(sizes[names[i]] for i in b)) for b in plan]
    return plan, buckets


def picture(compute=COMPUTE, cost=COST, measured=MEASURED, sizes=SIZES):
    timings = {cap: Timing(seconds) for cap, seconds in measured.items()}
    return figures.explore_buckets(
        sizes, compute, cost, timings, predict=predict_plan, title="Refill"
    )


@pytest.fixture
def page(tmp_path):
    return write_page(tmp_path, picture())


def test_equals_pythons(browser, page):
    caps = [1, 4 * KIB, 4 * KIB + 1, *(3 * 2**k for k in range(11, 19)), TOTAL, 2 * TOTAL]
    computes = COMPUTE, ComputeTimes(0.01, 0.2, READY, 0.03, 0.0)
    grid = list(itertools.product(computes, (0, 1e-5, 1e-2), (0, 1e-9, 3e-7)))
    plans = [planned(cap) for cap in caps]
    cases, ours = [], []
    for compute, alpha, beta in grid:
        cost = FittedCost(alpha, beta)
        cases.append(picture(compute, cost).data)
        for plan, buckets in plans:
            ours.append((plan, asdict(predict_plan(compute, buckets, cost))))
    with Visit(browser, page) as visit:
        theirs = visit.page.evaluate(
            """([cases, caps]) => cases.flatMap(data => caps.map(cap => {
                const { plan, predict } = live.kinds.buckets;
                const buckets = plan(data.gradients, cap);
                return [buckets, predict(data, buckets)];
            }))""",
            [cases, caps],
        )
        assert not visit.complaints
    assert len(theirs) == len(ours) == len(grid) * len(caps)
    exposed = 0
    for (plan, predicted), (buckets, found) in zip(ours, theirs, strict=True):
        assert buckets == plan
        for name, seconds in predicted.items():
            assert found[name] == pytest.approx(seconds, rel=1e-9, abs=1e-15), name
        exposed += predicted["exposed"] > 0
    assert 0 < exposed < len(ours)


def test_the_drawn_step_adds_up(browser, page):
    """Messages do not overlap, what is exposed adds up, and all ends with the step."""
    data = picture().data
    with Visit(browser, page) as visit:
        for cap in (1, 100 * KIB, 256 * KIB, TOTAL):
            found = visit.page.evaluate(
                """([data, cap]) => {
                    const { plan, predict } = live.kinds.buckets;
                    return predict(data, plan(data.gradients, cap));
                }""",
                [data, cap],
            )
            messages = found["messages"]
            assert all(a["end"] <= b["start"] + 1e-12 for a, b in itertools.pairwise(messages))
            exposed = sum(m["end"] - m["alone"] for m in messages)
            assert exposed == pytest.approx(found["exposed"], abs=1e-12)
            assert found["backward"] == pytest.approx(COMPUTE.backward + COMPUTE.copy * TOTAL)
            last = max(messages[-1]["end"], found["backward"])
            assert COMPUTE.forward + last == pytest.approx(found["step"])


def status(page):
    return page.locator(".told").first.inner_text()


def milliseconds(text):
    return pytest.approx(float(re.match(r"[\d.]+", text)[0]) / 1e3, rel=0.006)


def test_begins_at_the_fastest_measured_cap_and_says_what_is_predicted(browser, page):
    with Visit(browser, page) as visit:
        said = status(visit.page)
        _, buckets = planned(256 * KIB)
        predicted = predict_plan(COMPUTE, buckets, COST)
        assert said.startswith(f"Cap 256 KiB: {len(buckets)} all-reduces, ")
        assert predicted.step == milliseconds(said.split("predicted to take ")[1])
        assert predicted.exposed == milliseconds(re.search(r", ([\d.]+) ms of it", said)[1])
        assert "Measured: 280 ms." in said
        bars = visit.page.locator(".canvas rect.bucket:not([fill^='url'])")
        assert bars.count() == len(SIZES) + len(buckets)
        assert visit.page.locator(".curves circle.measured").count() == len(MEASURED)
        assert not visit.complaints


def test_the_slider_goes_from_each_alone_to_all_in_one(browser, page):
    with Visit(browser, page) as visit:
        slider = visit.page.get_by_label("Cap of a bucket")
        slider.focus()
        slider.press("Home")
        assert status(visit.page).startswith(f"Cap 4 KiB: {len(SIZES)} all-reduces, ")
        assert slider.get_attribute("aria-valuetext") == "4 KiB, each gradient alone"
        assert "Measured: 310 ms." in status(visit.page)
        counts, steps = [], []
        for _ in range(int(slider.get_attribute("max"))):
            slider.press("ArrowRight")
            said = status(visit.page)
            counts.append(int(re.search(r"(\d+) all-reduce", said)[1]))
            steps.append(said)
        assert counts[-1] == 1
        assert "1 all-reduce," in steps[-1]
        assert "Measured: 330 ms." in steps[-1]
        assert len(set(counts)) > 5


def test_names_the_cap_that_is_predicted_least(browser, page):
    with Visit(browser, page) as visit:
        slider = visit.page.get_by_label("Cap of a bucket")
        slider.press("Home")
        least = re.search(
            r"Least on the slider: ([\d.]+ ms), for a cap of (.+?)\.$", status(visit.page)
        )
        every = {
            cap: predict_plan(COMPUTE, planned(cap)[1], COST).step
            for cap in range(KIB, TOTAL + KIB, KIB)
        }
        assert min(every.values()) == milliseconds(least[1])
        visit.page.get_by_role("button").click()
        assert status(visit.page).startswith(f"Cap {least[2]}: ")
        assert status(visit.page).endswith("No cap on the slider is predicted to take less.")


def test_a_bucket_says_what_it_holds(browser, page):
    with Visit(browser, page) as visit:
        told = visit.page.locator(".told").nth(1)
        visit.page.locator(".canvas").focus()
        visit.page.keyboard.press("ArrowRight")
        plan, buckets = planned(256 * KIB)
        first = f"bucket 1 of {len(plan)}: {buckets[0].nbytes:,} bytes; {len(plan[0])} gradients: "
        assert told.inner_text().startswith(first + "layer 0 to ")
        for _ in plan:  # once too often: it stays at the last
            visit.page.keyboard.press("ArrowRight")
        assert told.inner_text().startswith(f"bucket {len(plan)} of {len(plan)}: ")
        assert "of it exposed" in told.inner_text()
        assert visit.page.locator(".canvas .ready.mine").count() == len(plan[-1])
        visit.page.locator(".canvas rect.bucket").first.hover()
        assert visit.page.locator(".tip").inner_text().startswith(f"bucket 1 of {len(plan)}: ")
        visit.page.mouse.move(2, 2)
        assert not visit.page.locator(".tip").is_visible()
        assert not visit.complaints


def test_a_tap_asks_too(browser, page):
    with Visit(browser, page, has_touch=True, viewport={"width": 390, "height": 800}) as visit:
        visit.page.locator(".canvas rect.bucket").first.tap()
        assert visit.page.locator(".tip").inner_text().startswith("bucket 1 of ")


def test_one_gradient_is_one_bucket(browser, tmp_path):
    only = picture(ComputeTimes(0.1, 0.2, {"w": 0.2}, 0, 0), sizes={"w": 4}, measured={1: (0.3,)})
    with Visit(browser, write_page(tmp_path, only)) as visit:
        assert "No cap on the slider is predicted to take less." in status(visit.page)
        assert "NaN" not in visit.page.content()
        assert not visit.complaints


@pytest.mark.parametrize("width", [360, 1280])
def test_fits_the_screen(browser, page, width):
    with Visit(browser, page, viewport={"width": width, "height": 800}) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = visit.page.evaluate(
            """[...document.querySelectorAll('.stage svg text')]
                .map(text => text.getBoundingClientRect().toJSON())"""
        )
        assert min(box["height"] for box in boxes) >= 12
        assert all(box["left"] >= 0 and box["right"] <= width for box in boxes)
