"""What stands still of what ranks keep, and what the picture's script is given."""

import re

import pytest

from microddp import figures

MOMENTS = [("forward", "a computes"), ("backward", "b has its gradient")]
KINDS = ["parameters", "gradients"]
WAYS = {"all": [[4096, 0], [4096, 2048]], "half": [[2048, 1024], [1024, 0]]}
PREDICTED = {"all": 6144.0, "half": 4096.0}


def picture(ways=WAYS):
    return figures.explore_kept(ways, PREDICTED, moments=MOMENTS, kinds=KINDS, title="Kept")


def test_the_table_has_the_moment_at_which_each_keeps_most():
    rows = re.findall(r'<th scope="row">(.+?)</th>(.+?)</tr>', picture().still)
    cells = {name: re.findall("<td>(.+?)</td>", row) for name, row in rows}
    assert cells == {
        "all": ["backward: b has its gradient", "4 KiB", "2 KiB", "6 KiB", "6 KiB"],
        "half": ["forward: a computes", "2 KiB", "1 KiB", "3 KiB", "4 KiB"],
    }


def test_the_script_gets_every_number():
    data = picture().data
    assert [name for name, _ in data["kinds"]] == KINDS
    assert {way["name"]: way["bytes"] for way in data["ways"]} == WAYS
    assert {way["name"]: way["predicted"] for way in data["ways"]} == PREDICTED
    assert data["moments"] == MOMENTS


@pytest.mark.parametrize("found", [[[1, 2]], [[1, 2], [3]], [[1], [2]]])
def test_a_way_with_other_moments_or_kinds_is_refused(found):
    with pytest.raises(ValueError, match="expected 2 numbers for each of 2 moments of half, got"):
        picture({**WAYS, "half": found})


def test_more_kinds_than_colours_are_refused():
    with pytest.raises(ValueError, match="expected at most 3 kinds of bytes, got a, b, c, d"):
        figures.explore_kept({}, {}, moments=[], kinds="abcd", title="")
