"""Figures draw what they are given, on rank 0 only."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.collections import PathCollection
from messages import ring_messages
from ranks import on_ranks

from microddp import figures
from microddp.hooks import GradientReady
from microddp.timing import Span, Timing


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_lines_are_named_at_their_ends_without_overlap():
    series = {name: ([1, 2, 3], [1, 2, height]) for name, height in (("a", 3), ("b", 3.001))}
    figures.lines(series, title="finding", xlabel="x", ylabel="y")
    (axes,) = plt.gcf().axes
    assert plt.gcf().get_suptitle() == "finding"
    assert sorted(texts(axes)) == ["a", "b"]
    low, high = sorted(text.xy[1] for text in axes.texts)
    assert high - low > 0.05 * axes.get_ylim()[1]
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 2, 3], [1, 2, 3.001]]


def test_names_of_curves_that_end_side_by_side_stay_where_they_are():
    series = {"a": ([0, 5], [2, 1]), "b": ([0, 10], [2, 1])}
    figures.lines(series, title="", xlabel="", ylabel="")
    (axes,) = plt.gcf().axes
    assert [text.xy for text in axes.texts] == [(5, 1), (10, 1)]


def test_what_nobody_measured_looks_different():
    curves = {"": ([1, 2], [1, 2])}
    for simulated in (False, True):
        figures.lines(curves, title="a", xlabel="x", ylabel="y", simulated=simulated)
        texts = [text.get_text() for text in plt.gca().texts]
        assert ("simulated" in texts) == simulated
        assert plt.gcf().get_suptitle().startswith("Simulated: ") == simulated


def test_moments_are_crossed():
    marks = [(1, 2), (3, 4)]
    figures.lines({"a": ([0, 5], [2, 1])}, title="", xlabel="", ylabel="", crosses=marks)
    (axes,) = plt.gcf().axes
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [(*cross.get_xdata(), *cross.get_ydata()) for cross in crosses] == marks


def test_curves_begin_at_zero_unless_asked_not_to():
    for zero in (True, False):
        figures.lines({"a": ([1, 2], [5, 6])}, title="", xlabel="", ylabel="", zero=zero)
        bottom, _ = plt.gcf().axes[0].get_ylim()
        assert (bottom == 0) == zero


def test_every_curve_is_drawn_however_many_there_are():
    figures.lines({str(i): ([1, 2], [i, i]) for i in range(20)}, title="", xlabel="", ylabel="")
    (axes,) = plt.gcf().axes
    assert len(axes.lines) == 20


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
def test_labels_stay_inside_the_axes(log):
    series = {f"curve {i}": ([1, 2], [1, 100 + i]) for i in range(6)}
    figures.lines(series, title="", xlabel="", ylabel="", log=log)
    (axes,) = plt.gcf().axes
    bottom, top = axes.get_ylim()
    assert len(axes.texts) == 6
    assert all(bottom <= text.xy[1] <= top * 1.0001 for text in axes.texts)


def test_stacked_bars_have_their_lengths():
    bars = {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 3.0, "b": 4.0}}
    figures.stacked_bars(bars, title="", xlabel="")
    (axes,) = plt.gcf().axes
    drawn = [(patch.get_x(), patch.get_width()) for patch in axes.patches]
    assert drawn == [(0, 1), (0, 3), (1, 2), (3, 4)]


def test_every_part_of_every_bar_is_drawn_and_can_be_pointed_at():
    bars = {"one": {"a": 1.0, "x": 0.0, "y": 0.0}, "two": {"b": 2.0}}
    figures.stacked_bars(bars, title="", xlabel="")
    assert max(patch.get_x() + patch.get_width() for patch in plt.gcf().axes[0].patches) == 2
    said = [[text for (text,) in series.texts] for series in plt.gcf().series]
    assert said == [["a: 1 s", "x: 0", "y: 0"], ["b: 2 s"]], "also where boxes are equal"
    figures.questions({f"part {k}": [(f"{k}?", "yes")] for k in range(8)})
    assert {f"part {k}" for k in range(8)} <= set(texts(plt.gcf().axes[0]))


def test_what_is_beside_the_usual_is_drawn():
    figures.stacked_bars({"nothing": {"a": 0.0}}, title="", xlabel="")
    figures.lines({"a loss": ([1, 2], [-3.0, 1.0])}, title="", xlabel="", ylabel="")
    assert plt.gcf().axes[0].get_ylim()[0] < -3
    figures.speed_ups({"luck": Timing((2.5, 2.6, 2.8))}, 2, title="")
    assert plt.gcf().axes[0].get_xlim()[1] > 2.8


def test_buckets_have_a_cell_for_each_parameter_and_a_colour_for_each_bucket():
    figures.buckets({"plan": [[8, 24], [64]], "other": [[32, 64]]}, title="finding")
    (axes,) = plt.gcf().axes
    drawn = [(patch.get_x(), patch.get_width()) for patch in axes.patches]
    assert drawn == [(0, 8), (8, 24), (32, 64), (0, 32), (32, 64)]
    colors = [patch.get_facecolor() for patch in axes.patches]
    assert colors[0] == colors[1] == colors[3] == colors[4] != colors[2]
    assert texts(axes) == ["32 B", "64 B", "96 B"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plan", "other"]


def test_traffic_shows_every_link_that_carries_bytes():
    figures.traffic({"ring": [[0, 8, 0], [0, 0, 4096], [8192, 0, 0]]}, title="")
    (axes,) = plt.gcf().axes
    assert texts(axes) == [".0078", "4", "8"]
    assert axes.get_ylabel() == "from rank (squares: KiB)"


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_ring_rounds_end_with_every_chunk_complete(n):
    figures.ring_rounds(ring_messages(n, 2 * n), n * 8, title="")
    panels = {axes.get_title(loc="left"): axes for axes in plt.gcf().axes}
    assert len([name for name in panels if name.startswith("round")]) == 2 * (n - 1)
    values = [text for text in texts(panels["result"]) if not text.startswith("rank")]
    cells = [value for value in values if value == str(n)]
    assert len(cells) >= n * n, "n chunks on each of n ranks contain all n ranks' values"
    assert len(panels["round 1"].patches) == n, "every rank sends"


def test_chunks_of_unequal_sizes_have_their_own_columns():
    figures.ring_rounds(ring_messages(8, 12), 48, title="")
    first = plt.gcf().axes[0].patches
    assert sorted(round(patch.get_x() + 0.44) for patch in first) == list(range(8))


def test_times_are_drawn_with_quartiles_and_prediction():
    timings = {"ring": {1024: Timing((1.0, 2.0, 4.0)), 4096: Timing((2.0, 3.0, 5.0))}}
    figures.times_by_size(timings, title="", models={"ring": lambda nbytes: nbytes / 1024})
    (axes,) = plt.gcf().axes
    measured, predicted = axes.lines
    assert list(measured.get_ydata()) == [2.0, 3.0]
    assert list(predicted.get_ydata()) == [1.0, 4.0]
    assert sorted(texts(axes)) == ["ring", "ring, predicted"]


def drawn(axes):
    boxes = [(p.get_x(), p.get_width(), p.get_y(), p.get_height()) for p in axes.patches]
    return [tuple(round(number, 6) for number in box) for box in boxes]


def test_a_timeline_has_a_row_for_each_rank_and_lane():
    spans = [
        Span(0, "compute", "forward", 1.0, 2.0),
        Span(0, "communication", "all-reduce a", 2.0, 3.0),
        Span(1, "compute", "forward", 1.5, 2.5),
    ]
    figures.timelines({"": spans}, title="finding")
    (axes,) = plt.gcf().axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0 compute", "rank 0 communication", "rank 1 compute"]
    beginnings_and_lengths = [(x, width) for x, width, *_ in drawn(axes)]
    assert beginnings_and_lengths == [(0, 1), (1, 1), (0.5, 1)], "from the first span's beginning"
    assert [y for *_, y, _ in drawn(axes)] == [0.1, 1.1, 2.1]
    assert plt.gcf().get_suptitle() == "finding"


def test_marks_are_ticks_waits_are_hatched_and_overlapping_spans_share_a_row():
    spans = [
        Span(0, "communication", "all-reduce a", 0.0, 2.0),
        Span(0, "communication", "all-reduce b", 1.0, 3.0),
        Span(0, "gradients", "a", 1.0, 1.0),
        Span(0, "wait", "wait for b", 2.0, 3.0),
        Span(0, "compute", "something else", 2.0, 3.0),
    ]
    figures.timelines({"": spans}, title="")
    (axes,) = plt.gcf().axes
    first, second, mark, wait, other = axes.patches
    assert first.get_y() + first.get_height() == pytest.approx(second.get_y())
    assert mark.get_width() == 0
    assert mark.get_edgecolor()[3] == 1, "a tick is seen by its edge"
    assert (first.get_hatch(), wait.get_hatch()) == (None, "////")
    (legend,) = plt.gcf().legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "all-reduce",
        "gradient ready",
        "waiting for communication",
        "something",
    ]
    colors = [p.get_edgecolor() for p in (first, mark, wait, other)]
    assert second.get_edgecolor() == first.get_edgecolor()
    assert len(set(colors)) == 4


def test_timelines_are_drawn_above_each_other_on_one_scale():
    short = [Span(0, "compute", "forward", 5.0, 6.0)]
    long = [Span(0, "compute", "forward", 1.0, 4.0), Span(1, "compute", "forward", 1.0, 2.0)]
    figures.timelines({"short": short, "long": long}, title="")
    above, below = plt.gcf().axes
    assert (above.get_title(loc="left"), below.get_title(loc="left")) == ("short", "long")
    assert above.get_xlim() == below.get_xlim()
    assert [(x, width) for x, width, *_ in drawn(above)] == [(0, 1)]
    assert [(x, width) for x, width, *_ in drawn(below)] == [(0, 3), (0, 1)]


def test_gradients_are_drawn_at_their_times_in_the_order_asked_for():
    rows = [
        GradientReady(0, "second.weight", (2, 2), 16, 1.0),
        GradientReady(1, "first.weight", (4, 2), 32, 2.0),
        GradientReady(None, "spare", (1,), 4, None),
    ]
    figures.gradient_order(rows, title="", forward=["first.weight", "second.weight", "spare"])
    (axes,) = plt.gcf().axes
    assert next(label.get_text() for label in axes.get_yticklabels()) == "first.weight"
    dots = [c for c in axes.collections if isinstance(c, PathCollection)]
    assert [tuple(dot.get_offsets()[0]) for dot in dots] == [(1, 1), (2, 0)]
    assert dots[0].get_sizes() < dots[1].get_sizes()
    assert texts(axes) == [" no gradient"]


def test_figures_are_kept_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MICRODDP_FIGURES", str(tmp_path / "new"))
    monkeypatch.setattr("sys.argv", ["chapters/99_test.py"])
    figures.lines({"calls": ([1.0], [1.0])}, title="", xlabel="", ylabel="")
    (saved,) = (tmp_path / "new").iterdir()
    assert saved.name == f"99_test-{plt.gcf().number}.png"
    assert saved.read_bytes().startswith(b"\x89PNG")


@on_ranks(2)
def test_only_rank_0_draws(comms):
    figures.lines({"calls": ([1.0], [1.0])}, title="", xlabel="", ylabel="")
    assert plt.get_fignums() == ([1] if comms.rank == 0 else [])
    plt.close("all")


def test_speed_ups_stand_beside_one_device_and_all_of_them():
    times = {"naive": Timing((2.0, 3.0, 4.0)), "hooks": Timing((5.0, 5.0, 5.0))}
    figures.speed_ups(times, 8, title="finding")
    (axes,) = plt.gcf().axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 3.0, 5.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one device", *times]
    assert texts(axes) == ["1.00", "3.00", "5.00", "all 8"]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [8]
    assert "hooks (5.00)" in " ".join(plt.gcf().told)
