"""Figures on a phone and on dark pages: nothing is cut off or small, text has enough contrast."""

import itertools

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from microddp import figures
from microddp.figures.drawing import text_width, wrapped
from microddp.figures.style import COLORS, DARK, INK, NAMES, NARROW, ROLES, WIDE, looks
from microddp.hooks import GradientReady
from microddp.message_counter import Message
from microddp.timing import Span, Timing

LONG = "A title that says in words what there is to be seen, and so has no room in one line"
PAPER, NIGHT = "#ffffff", "#131416"  # the theme's grounds
AA = 4.5


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def curve(*ys):
    return list(range(1, len(ys) + 1)), list(ys)


def messages(n):
    return [
        [Message(r, (r + 1) % n, 8, (r - 1 - step) % n * 8) for step in range(2 * (n - 1))]
        for r in range(n)
    ]


STEP = [
    Span(rank, lane, name, start, start + 0.01)
    for rank, (lane, name, start) in itertools.product(
        range(2), [("compute", "forward", 0.1), ("communication", "bucket 1", 0.103)]
    )
]
NAMED = {"26 of 26122, rest forgotten": curve(1, 2, 3), "this machine's all-reduce": curve(3, 2, 1)}
BARS = {"accumulation of 8 (46.4 ms)": {"computing during all-reduce": 0.123, "exposed": 0.456}}
TABLE = [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]]
KINDS = {
    "lines": lambda: figures.lines(NAMED, title=LONG, xlabel=LONG, ylabel=LONG, log="xy"),
    "stacked_bars": lambda: figures.stacked_bars(BARS, title=LONG, xlabel="a step"),
    "buckets": lambda: figures.buckets({"cap 25 MiB": [[2**20] * 3, [2**22]]}, title=LONG),
    "times_by_size": lambda: figures.times_by_size(
        {"ring": {4**k: Timing((1.0, 2.0, 4.0)) for k in range(3, 14)}}, title=LONG
    ),
    "timelines": lambda: figures.timelines({"naive": STEP, "hooks": STEP}, title=LONG),
    "gradient_order": lambda: figures.gradient_order(
        [GradientReady(0, "layers.0.weight", (2, 2), 16, 1.0)], title=LONG
    ),
    "holdings": lambda: figures.holdings({"all-reduce": (TABLE, [[1111] * 4] * 4)}, title=LONG),
    "traffic": lambda: figures.traffic({"a": [[0, 9], [9, 0]], "b": [[0, 9], [9, 0]]}, title=LONG),
    "ring_rounds": lambda: figures.ring_rounds(messages(4), 32, title=LONG),
    "questions": lambda: figures.questions({"It is slow": [(f"{LONG[:40]}?", LONG)] * 2}),
}
UNPOINTED = {"holdings", "ring_rounds", "questions"}  # what they show, they write


def contrast(one, other):
    """WCAG's contrast of two colours, from 1 to 21."""

    def luminance(color):
        parts = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
        return sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_is_drawn_again_for_a_phone_with_all_its_text_inside_and_none_small(kind):
    KINDS[kind]()
    wide = plt.gcf()
    narrow = wide.narrow()
    assert narrow.get_figwidth() == NARROW < wide.get_figwidth() <= WIDE
    narrow.canvas.draw()
    written = [text for text in narrow.findobj(Text) if text.get_visible() and text.get_text()]
    assert len(written) > 5
    for text in written:
        box = text.get_window_extent()
        shown = narrow.bbox.x0 - 3 <= box.x0 and box.x1 <= narrow.bbox.x1 + 3
        # Ticks beyond the axes' limits are not drawn, and have places all the same.
        assert shown or text.get_text() in tick_labels(narrow), text.get_text()
        # 328 pixels of the smallest phone for NARROW inches, of 72 points each.
        pixels = text.get_fontsize() * 328 / (72 * NARROW)
        assert pixels >= 10.9, (text.get_text(), pixels)


def tick_labels(figure):
    ticks = (
        axis.get_ticklabels(which="both")
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
    )
    return {label.get_text() for labels in ticks for label in labels}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - UNPOINTED))
def test_what_is_drawn_can_be_pointed_at_in_both_forms(kind):
    KINDS[kind]()
    wide = plt.gcf()
    narrow = wide.narrow()
    assert wide.series
    for one, other in zip(wide.series, narrow.series, strict=True):
        assert len(one.places) == len(one.texts) > 0
        assert len(one.places) == len(other.places)
        assert wide.axes.index(one.axes) == narrow.axes.index(other.axes)


def test_quartiles_are_told_with_their_median():
    timings = {"ring": {1024: Timing((1e-3, 2e-3, 4e-3))}}
    figures.times_by_size(timings, title="", models={"ring": lambda _: 3e-3})
    measured, predicted = plt.gcf().series
    low, high = timings["ring"][1024].spread
    assert measured.texts == [("1 KiB", f"2 ms ({1e3 * low:.3g} ms to {1e3 * high:.3g} ms)")]
    assert (predicted.name, predicted.texts) == ("ring, predicted", [("1 KiB", "3 ms")])


def test_a_part_has_the_same_look_in_bars_and_timelines_and_other_parts_take_no_roles_colour():
    names = ("forward", "exposed", "starts", "imports")
    bars = {"a": dict.fromkeys(names, 1.0)}
    figures.stacked_bars(bars, title="", xlabel="")
    drawn = [(patch.get_facecolor()[:3], patch.get_hatch()) for patch in plt.gcf().axes[0].patches]
    figures.timelines(
        {"": [Span(0, "compute", "forward", 0.0, 1.0), Span(0, "wait", "wait", 1.0, 2.0)]}, title=""
    )
    spans = [(patch.get_facecolor()[:3], patch.get_hatch()) for patch in plt.gcf().axes[0].patches]
    assert drawn[:2] == spans
    assert drawn[1] == (to_rgb("#e0524d"), "////")
    taken = {look.color for look in ROLES.values()}
    assert not {look.color for name, look in looks(names).items() if name not in ROLES} & taken
    assert len(set(drawn)) == 4


def test_text_has_enough_contrast_on_light_and_dark_pages_and_on_bars():
    for color in (INK, *NAMES.values()):
        assert contrast(color, PAPER) >= AA
        assert contrast(DARK[color], NIGHT) >= AA
    for look in looks([*ROLES, "other", "and", "some", "more", "parts"]).values():
        assert contrast("black", look.color) >= AA
    for color in COLORS:  # curves; orange has 2.85 on white, and is backward's in every figure
        assert min(contrast(color, PAPER), contrast(color, NIGHT)) >= 2.8


def test_lines_are_broken_where_they_would_be_too_wide():
    lines = wrapped(LONG, 2.0).split("\n")
    assert " ".join(lines) == LONG
    assert all(text_width(line) <= 2 for line in lines)
    assert all(
        text_width(f"{one} {other.split()[0]}") > 2 for one, other in itertools.pairwise(lines)
    )
    assert wrapped("unbreakable " * 2, 0.1) == "unbreakable\nunbreakable"
