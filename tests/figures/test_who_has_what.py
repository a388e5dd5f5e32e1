"""Who has what: every number is drawn, on its rank's colour, before and after."""

import itertools

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba

from microddp import figures
from microddp.figures import contributors
from microddp.figures.style import COLORS, GREY


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def drawn(axes):
    """Of each square or stripe from left to right, row by row: its text and its colour."""
    patches = sorted(axes.patches, key=lambda patch: (patch.get_y(), patch.get_x()))
    middles = {
        (text.get_position()[0], text.get_position()[1]): text.get_text() for text in axes.texts
    }
    found = []
    for patch in patches:
        left, top = patch.get_xy()
        inside = [
            text
            for (x, y), text in middles.items()
            if 0 < x - left < patch.get_width() and 0 < y - top < patch.get_height()
        ]
        assert len(inside) == 1, "a number in each square, and only one"
        found.append((inside[0], patch.get_facecolor()))
    return found


def colour(rank):
    return to_rgba(COLORS[rank])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_number_tells_whose_values_are_in_it(ranks):
    for members in itertools.product((False, True), repeat=ranks):
        inside = [rank for rank in range(ranks) if members[rank]]
        for part in range(ranks):
            assert contributors(sum((part + 1) * 10**rank for rank in inside)) == inside


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_square_has_its_number_on_the_colour_of_its_rank(ranks):
    table = [[(part + 1) * 10**rank for part in range(ranks)] for rank in range(ranks)]
    transposed = [list(column) for column in zip(*table, strict=True)]
    figures.holdings({"all-to-all": (table, transposed)}, title="finding")
    (axes,) = plt.gcf().axes
    expected = []
    for row in range(ranks):
        expected += [(str(number), colour(row)) for number in table[row]]
        expected += [(str(number), colour(r)) for r, number in enumerate(transposed[row])]
    assert drawn(axes) == expected
    texts = [text.get_text() for text in axes.texts]
    assert {"before all-to-all", "after all-to-all"} < set(texts)
    assert [text for text in texts if text.startswith("rank")] == [
        f"rank {rank}" for rank in range(ranks)
    ]
    assert plt.gcf().get_suptitle() == "finding"


def test_each_digit_of_a_sum_is_on_its_ranks_colour():
    figures.holdings({"sum": ([[101]], [[22]])}, title="")
    (axes,) = plt.gcf().axes
    assert drawn(axes) == [
        ("1", colour(2)),
        ("0", to_rgba(GREY)),
        ("1", colour(0)),
        ("2", colour(1)),
        ("2", colour(0)),
    ]


def test_a_rank_may_hold_nothing():
    figures.holdings({"gather": ([[1], [20]], [[1, 20], []])}, title="")
    (axes,) = plt.gcf().axes
    assert len(axes.patches) == 4
    assert sum(text.get_text() == "nothing" for text in axes.texts) == 1


def test_every_collective_has_a_panel_in_which_everything_is_inside():
    panel = ([[1, 2], [10, 20]], [[1, 10], [2, 20]])
    figures.holdings({"one": panel, "two": panel, "three": panel}, title="")
    figure = plt.gcf()
    figure.canvas.draw()
    assert len(figure.axes) == 3
    for axes in figure.axes:
        left, right = axes.get_xlim()
        bottom, top = axes.get_ylim()
        for patch in axes.patches:
            assert left < patch.get_x() < patch.get_x() + patch.get_width() < right
            assert top < patch.get_y() < patch.get_y() + patch.get_height() < bottom
    page = figure.bbox
    for text in (text for axes in figure.axes for text in axes.texts):
        box = text.get_window_extent()
        assert page.x0 <= box.x0, text.get_text()
        assert box.x1 <= page.x1, text.get_text()


def test_a_long_title_is_no_wider_than_the_figure():
    title = "A title that says in words what there is to be seen, and so has no room in one line"
    figures.holdings({"broadcast": ([[1]], [[1]])}, title=title)
    figure = plt.gcf()
    figure.canvas.draw()
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1
