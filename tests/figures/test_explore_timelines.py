"""The timelines to look into: their data, and the table that stands still."""

import json
import re

import pytest

from microddp import figures
from microddp.report import human_seconds
from microddp.step_times import break_down, tracks
from microddp.timing import Span


def steps_of(ranks):
    steps = {}
    for name, late in (("naive", 0.0), ("hooks", 2.0)):
        steps[name] = [
            span
            for rank in range(ranks)
            for span in (
                Span(rank, "compute", "forward", 5.0 + rank / 8, 6.0),
                Span(rank, "compute", "backward", 6.0, 9.0),
                Span(rank, "gradients", "w", 7.0, 7.0),
                Span(rank, "communication", "all-reduce w", 9 - late, 11.0, 4096),
                Span(rank, "communication", "all-reduce v", 9.5 - late, 10.0 + rank, 1024),
                Span(rank, "wait", "wait for w", 8.5, 11.0),
                Span(rank, "compute", "optimizer", 13.0, 13.5),
            )
        ]
    return steps


def rows_of(data, step):
    """The spans that a script would read from the data."""
    return [
        Span(
            rank,
            data["lanes"][lane],
            data["names"][name][0],
            (step["origin"] + start) / 1e9,
            (step["origin"] + end) / 1e9,
            nbytes,
        )
        for rank, lane, name, start, end, nbytes, _ in step["spans"]
    ]


def embedded(live):
    return json.loads(re.search(r"json\">\n(.*)\n</script>", live._repr_html_(), re.DOTALL)[1])


def test_the_data_holds_every_span():
    steps = steps_of(3)
    data = embedded(figures.explore_timelines(steps, title="finding"))
    assert [step["name"] for step in data["steps"]] == list(steps)
    assert data["ranks"] == [0, 1, 2]
    for step in data["steps"]:
        spans = steps[step["name"]]
        assert rows_of(data, step) == spans
        assert [row[-1] for row in step["spans"]] == tracks(spans)
        assert min(row[3] for row in step["spans"]) == 0, "times since the step began"
    kinds = {text: data["kinds"][kind] for text, kind in data["names"]}
    assert kinds["all-reduce v"] == kinds["all-reduce w"] == ["all-reduce", "#1b9e77"]
    assert kinds["w"][0] == "gradient ready"


def test_times_add_up_as_the_analyzer_does():
    steps = steps_of(2)
    live = figures.explore_timelines(steps, title="")
    for step in embedded(live)["steps"]:
        for rank, *nanoseconds in step["sums"]:
            times = break_down([s for s in steps[step["name"]] if s.rank == rank])
            wanted = [times.total, times.exposed, times.hidden]
            assert [each / 1e9 for each in nanoseconds] == pytest.approx(wanted)
            cells = map(human_seconds, (times.total, times.forward, times.backward, *wanted[1:]))
            row = [step["name"], rank, *cells, 2, "5 KiB"]
            plain = r"\s*".join(f"<td[^>]*>\\s*{re.escape(str(cell))}\\s*</td>" for cell in row)
            assert re.search(plain, live.still), row


def test_of_many_ranks_the_first_are_drawn_and_the_table_says_so():
    live = figures.explore_timelines(steps_of(6), title="")
    data = embedded(live)
    assert (data["ranks"], data["world"]) == ([0, 1, 2, 3], 6)
    assert {row[0] for step in data["steps"] for row in step["spans"]} == {0, 1, 2, 3}
    assert "Ranks 0 to 3 of 6." in live.still
    assert "Ranks" not in figures.explore_timelines(steps_of(4), title="").still


def test_bytes_that_are_not_known_are_left_blank():
    spans = [
        Span(0, "communication", "a", 0.0, 1.0, 4),
        Span(0, "communication", "b", 1.0, 2.0),
    ]
    live = figures.explore_timelines({"torch": spans}, title="")
    assert re.search(r"<td[^>]*>\s*2</td><td[^>]*>\s*</td>", live.still)


def test_a_rank_that_lacks_a_step_is_named():
    steps = steps_of(2) | {"late": steps_of(1)["hooks"]}
    with pytest.raises(
        ValueError, match=r"late: expected spans of ranks \[0, 1\], got none of \[1\]"
    ):
        figures.explore_timelines(steps, title="")
