"""Curves of losses: what they say of two ways to train."""

from microddp.workloads import Curves


def test_runs_are_told_apart_where_all_of_them_agree():
    low, middle, high = (
        Curves([[9.0, 4.0, end] for end in ends], every=16)
        for ends in ((1.0, 2.0), (1.5, 1.5), (1.5, 6.0))
    )
    assert low.mean == [9, 4, 1.5]
    assert str(high) == "3.75 (1.50 to 6.00)"
    assert high.steps_to(4) == [32, 32]
    assert high.steps_to(2) == [48, float("inf")]
    assert (low.beside(high), high.beside(low)) == ("below", "above")
    assert low.beside(middle) == middle.beside(low) == "not told apart from"
    assert low.sides(high, "So.") == {
        "below": (True, "So."),
        "above": (False, "So."),
        "not": (False, "So."),
    }
