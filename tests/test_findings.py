"""Findings: exactly one alternative is true, on every rank, and is printed."""

import contextlib
import io
import math
import re

import pytest
from ranks import on_ranks, run

from microddp.findings import Comparison, Prediction, compare, find
from microddp.launch import JobFailed
from microddp.timing import Timing

SLOW, FAST = Timing((2.0, 2.2, 1.8, 2.0)), Timing((1.0, 1.0, 1.0, 1.0))


def test_a_comparison_is_larger_for_what_is_faster():
    fast = compare(FAST, SLOW)
    assert (fast.faster, fast.slower, fast.alike) == (True, False, False)
    assert str(fast) == "2.00 times as fast (1.95 to 2.05)"
    assert fast.say("A ring", "a tree") == "A ring is 2.00 times as fast (1.95 to 2.05) as a tree"
    slow = compare(SLOW, FAST)
    assert (slow.faster, slow.slower, slow.alike) == (False, True, False)
    assert slow.ratio == pytest.approx(0.5)
    assert str(compare(Timing((1e-3,)), Timing((1.3,)))) == "1300 times as fast (1300 to 1300)"


@pytest.mark.parametrize(
    "rounds",
    [(0.9, 1.1, 1.0, 1.2), (1.001, 1.002, 1.003, 1.004), (0.999, 0.999, 0.998, 0.997)],
)
def test_what_reads_as_one_is_not_told_apart(rounds):
    """Neither where the quartiles enclose 1, nor where they are written as 1.00."""
    same = Comparison(Timing(rounds))
    assert (same.faster, same.slower, same.alike) == (False, False, True)
    assert same.than("DDP").startswith("not told apart from DDP (")
    assert same.say("A ring", "DDP").startswith("This run does not tell apart a ring and DDP (")


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        (1.96, "2 s (1.95 s to 2.05 s), with the predicted 1.96 s within the quartiles"),
        (1.0, "2 s (1.95 s to 2.05 s), 100% longer than the predicted 1 s"),
        (4.0, "2 s (1.95 s to 2.05 s), 50% less than the predicted 4 s"),
    ],
)
def test_a_prediction_is_within_the_quartiles_or_off_in_a_direction(predicted, words):
    prediction = Prediction(predicted, SLOW)
    assert str(prediction) == words
    assert [prediction.held, prediction.longer, prediction.shorter].count(True) == 1
    assert prediction.off == pytest.approx(2 / predicted - 1)


def test_a_prediction_that_is_off_by_nothing_says_so():
    prediction = Prediction(2.005, Timing((2.0, 2.0, 2.0)))
    assert str(prediction) == "2 s (2 s to 2 s), within 0.5% of the predicted 2 s"
    assert prediction.shorter


@on_ranks(1, 2, 3)
def test_the_true_one_is_shown(comms):
    sides = {"more": (comms.world_size > 2, "More."), "fewer": (comms.world_size <= 2, "Few.")}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        shown = find(comms, "how-many", **sides)
    assert shown is None, "a page would show it once more, below the sentence"
    expected = "> More. [how-many.more]" if comms.world_size > 2 else "> Few. [how-many.fewer]"
    assert output.getvalue().strip() == ("" if comms.rank else expected)


@on_ranks(2)
def test_what_is_no_finding_is_an_error_on_every_rank(comms):
    text = "A step takes 3 ms."
    for sides, message in (
        ({"a": (False, text), "b": (False, text)}, "got ranks 0, 1: none of a, b"),
        ({"a": (True, text), "b": (True, text)}, "got ranks 0, 1: a and b of a, b"),
        ({"a": (math.nan > 1, text), "b": (math.nan <= 1, text)}, "none of a, b"),
        ({"a": (True, f"{math.nan:.3f} ms.")}, "a with a number that is none: nan ms."),
        ({"a": (True, f"{math.inf} ms.")}, "a with a number that is none: inf ms."),
        ({"a": (comms.rank == 1, text)}, "got rank 0: none of a"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            find(comms, "what", **sides)
    mine = {"a": (comms.rank == 0, text), "b": (comms.rank == 1, text)}
    with pytest.raises(RuntimeError, match="the same finding on every rank, got"):
        find(comms, "what", **mine)
    with pytest.raises(RuntimeError, match="the same finding on every rank, got"):
        find(comms, f"what{comms.rank}", a=(True, text))
    with pytest.raises(ValueError, match="lower-case words with hyphens, got 'What!'"):
        find(comms, "What!", a=(True, text))


def find_on_rank_0(comms):
    if comms.rank == 0:
        find(comms, "alone", a=(True, "Alone."))
    else:
        comms.barrier()


def test_a_finding_that_is_not_reached_on_some_rank_ends_the_job():
    with pytest.raises(JobFailed, match="rank"):
        run(find_on_rank_0, 2, environment={"MICRODDP_TIMEOUT": "5"}, timeout=60)


@on_ranks(2)
def test_it_is_printed_once_wrapped_with_its_name(comms):
    sentence = "  ".join(["A step takes 3 ms, and `finish` waits for 2 of them;"] * 4)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        find(comms, "long-one", a=(True, sentence))
    lines = output.getvalue().splitlines()
    if comms.rank:
        assert lines == []
        return
    assert len(lines) > 2
    assert all(line.startswith("> ") and len(line) <= 88 for line in lines)
    whole = " ".join(line.removeprefix("> ") for line in lines)
    assert whole == " ".join(sentence.split()) + " [long-one.a]"
