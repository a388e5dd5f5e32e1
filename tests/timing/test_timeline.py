"""Repeated measurements, and what happened when."""

import itertools
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from microddp.comms import peak_memory
from microddp.figures import save_chrome_trace
from microddp.step_times import break_down, covered, in_both, tracks
from microddp.timing import Instant, Span, Timeline, Timing, measure, slowest_rank

SLOW, LATE = 0.05, 0.3  # seconds


# ---- measurements


def test_a_timing_has_the_usual_statistics():
    timing = Timing(tuple(float(i) for i in range(20, 0, -1)))
    assert timing.median == 10.5
    assert timing.percentile(95) == 19
    assert timing.percentile(100) == 20
    assert timing.spread == (5.75, 15.25)
    assert Timing((4.0, 1.0, 3.0, 2.0)).spread == (1.75, 3.25)
    assert Timing((7.0,)).spread == (7, 7)
    assert str(Timing((0.001, 0.002, 0.003))) == "2 ms (1.5 to 2.5)"


@given(
    seconds=st.lists(st.floats(0, 1e3), min_size=1, max_size=50),
    percent=st.integers(0, 100),
)
def test_a_percentile_is_the_smallest_measurement_that_so_many_do_not_exceed(seconds, percent):
    value = Timing(tuple(seconds)).percentile(percent)
    needed = len(seconds) * percent / 100
    assert value in seconds
    assert sum(s <= value for s in seconds) >= needed
    smaller = [s for s in seconds if s < value]
    assert not smaller or sum(s <= max(smaller) for s in seconds) < needed


def test_a_ratio_is_taken_round_by_round():
    ratio = Timing((2.0, 9.0, 4.0)).ratio(Timing((1.0, 3.0, 4.0)))
    assert ratio.seconds == (2.0, 3.0, 1.0)
    with pytest.raises(ValueError, match="zip"):
        ratio.ratio(Timing((1.0,)))


@on_ranks(1)
def test_what_ends_before_it_is_seen_to_begin_took_no_time(comms):
    # As on CUDA: an all-reduce of one rank may be done before the stream that launched it has come
    # to the event after the launch.
    timeline, ended = Timeline(comms), Instant(comms.device)
    time.sleep(0.001)
    timeline.between("sum", "communication", Instant(comms.device), ended)
    (span,) = timeline.take()
    assert span.end == span.start > 0


@on_ranks(1, 3)
def test_a_measurement_is_the_slowest_ranks_time_on_every_rank(comms):
    slowest = comms.world_size - 1
    calls = {
        "slow on one": lambda: time.sleep(SLOW if comms.rank == slowest else 0),
        "quick": lambda: None,
    }
    timings = measure(calls, comms, warmup=0, repeat=3)
    assert list(timings) == list(calls)
    assert min(timings["slow on one"].seconds) >= SLOW
    assert min(timings["quick"].seconds) < SLOW / 2, "the wait for the others is not counted"
    everyone = comms.all_gather_data([list(t.seconds) for t in timings.values()])
    assert all(theirs == everyone[0] for theirs in everyone)


@on_ranks(2)
def test_the_slowest_ranks_times_leave_a_ranks_own_as_they_are(comms):
    mine = torch.tensor([1.0 + comms.rank], dtype=torch.float64)
    assert slowest_rank(mine, comms).item() == 2
    assert mine.item() == 1 + comms.rank


@on_ranks(2)
def test_a_rank_that_comes_late_is_not_counted_in_the_time_of_the_others(comms):
    total = torch.ones(1)
    timings = measure(
        {"all-reduce": lambda: comms.all_reduce(total)},
        comms,
        warmup=0,
        repeat=5,
        prepare=lambda: time.sleep(LATE * comms.rank),
    )
    # The least, since a busy machine makes a call long, but none short.
    assert min(timings["all-reduce"].seconds) < LATE / 2


@on_ranks(2)
def test_calls_take_turns_and_are_prepared_before_each_and_reported_after_each_round(comms):
    events = []
    timings = measure(
        {"a": lambda: events.append("a"), "b": lambda: events.append("b")},
        comms,
        warmup=1,
        repeat=2,
        prepare=lambda: events.append("prepare"),
        progress=lambda: events.append("progress"),
    )
    calls = [event for event in events if event in "ab"]
    assert [sorted(calls[i : i + 2]) for i in (0, 2, 4)] == [["a", "b"]] * 3
    for i, call in enumerate(calls):
        events[events.index(call)] = f"call {i}"
    expected = [[f"prepare call {i}", f"prepare call {i + 1} progress"] for i in (0, 2, 4)]
    assert " ".join(events) == " ".join(text for round_ in expected for text in round_)
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 2, "b": 2}


@on_ranks(1)
def test_warm_up_and_preparation_are_not_counted(comms):
    pauses = iter([SLOW, SLOW, 0, 0])
    timing = measure(
        {"first two slow": lambda: time.sleep(next(pauses))},
        comms,
        warmup=2,
        repeat=2,
        prepare=lambda: time.sleep(SLOW),
    )["first two slow"]
    assert max(timing.seconds) < SLOW / 2


@on_ranks(1, environment={"MICRODDP_ROUNDS": "2"})
def test_a_quick_look_takes_few_rounds_and_says_so(comms):
    calls = []
    timing = measure({"": lambda: calls.append(1)}, comms, warmup=5, repeat=9)[""]
    assert (len(calls), len(timing.seconds)) == (1 + 2, 2)
    assert ", at most 2 rounds a measurement, torch " in comms.describe()


@on_ranks(1)
def test_measuring_nothing_is_refused(comms):
    with pytest.raises(ValueError, match="rank 0: expected at least one repeat, got 0"):
        measure({"": lambda: None}, comms, repeat=0)


def hold(nbytes):
    return torch.ones(nbytes, dtype=torch.uint8).sum()


@on_ranks(1)
def test_peak_memory_grows_by_what_is_held(comms):
    before = peak_memory(comms.device)
    hold(before + (100 << 20))  # more than the process has ever held
    after = peak_memory(comms.device)
    assert after - before > 90 << 20
    assert peak_memory(comms.device) >= after, "it is a peak: it does not fall again"


# ---- timelines


@on_ranks(1, 3)
def test_a_timeline_gathers_nested_and_raising_spans_of_all_ranks_on_every_rank(comms):
    timeline = Timeline(comms)
    with timeline.span("outer"):
        with timeline.span(f"inner {comms.rank}", lane="communication"):
            time.sleep(0.01)
        with pytest.raises(KeyError), timeline.span("raises"):
            raise KeyError
    spans = timeline.gather()
    names = [(span.rank, span.lane, span.name) for span in spans]
    assert names == [
        name
        for rank in range(comms.world_size)
        for name in (
            (rank, "communication", f"inner {rank}"),
            (rank, "compute", "raises"),
            (rank, "compute", "outer"),
        )
    ]
    for inner, raises, outer in (spans[i : i + 3] for i in range(0, len(spans), 3)):
        assert outer.start <= inner.start < inner.end <= raises.start <= raises.end <= outer.end
        assert inner.end - inner.start >= 0.01
    everyone = comms.all_gather_data([[s.rank, s.name, s.start, s.end] for s in spans])
    assert all(theirs == everyone[0] for theirs in everyone)


@on_ranks(2)
def test_the_ranks_of_one_machine_share_a_clock(comms):
    timeline = Timeline(comms)
    timeline._origin.seconds -= 60 * comms.rank  # as if rank 1 had begun a minute earlier
    if comms.rank == 0:
        with timeline.span("first"):
            time.sleep(0.01)
        comms.send(torch.ones(1), 1)
    else:
        comms.recv(torch.ones(1), 0)
        with timeline.span("second"):
            time.sleep(0.01)
    first, second = timeline.gather()
    assert (first.name, second.name) == ("first", "second")
    assert first.end <= second.start < first.end + 30


@on_ranks(2)
def test_a_timeline_without_spans_is_empty(comms):
    assert Timeline(comms).gather() == []


@on_ranks(1, 2)
def test_a_mark_is_a_span_without_length(comms):
    timeline = Timeline(comms)
    with timeline.span("backward"):
        timeline.mark("weight")
    mark, backward, *_ = timeline.gather()
    assert (mark.name, mark.lane) == ("weight", "gradients")
    assert backward.start <= mark.start == mark.end <= backward.end


@on_ranks(2)
def test_taking_waits_for_what_was_only_launched(comms):
    timeline = Timeline(comms)
    ones = torch.ones(1 << 20)
    timeline.launched("sum", dist.all_reduce(ones, group=comms.group, async_op=True))
    assert [span.name for span in timeline.take()] == ["sum"]
    assert timeline.take() == []


@on_ranks(2)
def test_a_launched_collective_lasts_until_it_is_complete(comms):
    timeline = Timeline(comms)
    if comms.rank == 1:  # the collective cannot complete before both have come
        time.sleep(SLOW)
    tensor = torch.ones(3)
    with timeline.span("launch"):
        work = dist.all_reduce(tensor, group=comms.group, async_op=True)
        timeline.launched("all-reduce", work)
    if comms.rank == 0:
        work.wait()
    spans = timeline.gather()  # which waits for it on rank 1
    assert tensor.tolist() == [2, 2, 2]
    for rank in (0, 1):
        collective, launch = sorted((s for s in spans if s.rank == rank), key=lambda s: s.lane)
        assert (launch.name, launch.lane) == ("launch", "compute")
        assert (collective.name, collective.lane) == ("all-reduce", "communication")
        assert launch.start <= collective.start <= launch.end
    first, second = (s for s in spans if s.name == "all-reduce")
    assert first.end - first.start > SLOW / 2, "rank 0 launched early"
    assert second.start - first.start > SLOW / 2
    # Rank 1 has come when it launches; its span begins a moment later, when the call has returned.
    assert first.end >= next(s.start for s in spans if s.rank == 1 and s.name == "launch")


@on_ranks(2)
def test_every_launched_collective_is_recorded_when_the_timeline_is_gathered(comms):
    timeline = Timeline(comms)
    tensors = [torch.ones(1 << 16) for _ in range(20)]
    for i, tensor in enumerate(tensors):
        work = dist.all_reduce(tensor, group=comms.group, async_op=True)
        timeline.launched(f"all-reduce {i}", work)
    spans = timeline.gather()
    for rank in (0, 1):
        names = {span.name for span in spans if span.rank == rank}
        assert names == {f"all-reduce {i}" for i in range(20)}


@on_ranks(2)
def test_spans_keep_the_bytes_they_were_told_of(comms):
    timeline = Timeline(comms)
    tensor = torch.ones(3 + comms.rank)
    with timeline.span("all-reduce", "communication", tensor.nbytes), timeline.span("inner"):
        timeline.mark("weight")
    work = dist.all_reduce(torch.ones(5), group=comms.group, async_op=True)
    timeline.launched("launched", work, nbytes=20)
    told = {(span.rank, span.name): span.nbytes for span in timeline.gather()}
    for rank in (0, 1):
        sizes = [told[rank, name] for name in ("all-reduce", "launched", "inner", "weight")]
        assert sizes == [12 + 4 * rank, 20, None, None]
    mine = {span.name: span.nbytes for span in timeline.take()}
    assert mine == {name: size for (rank, name), size in told.items() if rank == comms.rank}


def test_exposed_is_what_a_rank_waited_and_hidden_what_was_sent_meanwhile():
    spans = [
        Span(0, "compute", "forward", 0.0, 1.0),
        Span(0, "compute", "backward", 1.0, 3.0),
        Span(0, "communication", "a", 1.5, 2.5),
        Span(0, "communication", "b", 2.0, 4.0),
        Span(0, "wait", "wait for a", 3.0, 3.25),
        Span(0, "wait", "wait for b", 3.25, 4.0),
        Span(1, "compute", "forward", 0.0, 2.0),
    ]
    times = [break_down([span for span in spans if span.rank == rank]) for rank in (0, 1)]
    assert (times[0].exposed, times[0].hidden) == (1.0, 1.5)
    assert times[1].exposed == times[1].hidden == 0.0


SPANS_OF_ONE_LANE = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=12
)


@given(SPANS_OF_ONE_LANE)
def test_no_two_spans_on_a_track_overlap_and_no_track_is_wasted(pairs):
    spans = [Span(0, "communication", "", start, start + length) for start, length in pairs]
    numbers = tracks([*spans, Span(1, "communication", "", 0, 30), Span(0, "wait", "", 0, 30)])
    assert numbers[-2:] == [0, 0], "other ranks and lanes have tracks of their own"
    for i, j in itertools.combinations(range(len(spans)), 2):
        apart = spans[i].end <= spans[j].start or spans[j].end <= spans[i].start
        assert apart or numbers[i] != numbers[j]
    used = max(numbers) + 1
    at_once = max(sum(s.start <= t < s.end for s in spans) for t in range(26))
    assert used == at_once


SPANS = [
    Span(0, "compute", "forward", 0.0, 0.5),
    Span(0, "communication", "all-reduce w", 0.5, 0.75),
    Span(2, "compute", "forward", 0.25, 0.5),
]


def test_a_chrome_file_has_a_process_for_each_rank_and_a_thread_for_each_lane(tmp_path):
    path = tmp_path / "trace.json"
    save_chrome_trace(SPANS, path)
    events = json.loads(path.read_text())["traceEvents"]
    labels = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert labels == {
        ("process_name", 0, 0): "rank 0",
        ("process_name", 2, 0): "rank 2",
        **{("thread_name", rank, 0): "compute" for rank in (0, 2)},
        **{("thread_name", rank, 1): "communication" for rank in (0, 2)},
    }
    drawn = [e for e in events if e["ph"] == "X"]
    microseconds = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in drawn]
    assert microseconds == [
        ("forward", 0, 0, 0, 500_000),
        ("all-reduce w", 0, 1, 500_000, 250_000),
        ("forward", 2, 0, 250_000, 250_000),
    ]
    assert len(events) == len(labels) + len(drawn)


def test_marks_are_instants_and_overlapping_spans_have_threads_of_their_own(tmp_path):
    path = tmp_path / "trace.json"
    overlapping = [
        Span(0, "communication", "a", 0.0, 0.5),
        Span(0, "communication", "b", 0.25, 0.75),
        Span(0, "communication", "c", 0.5, 1.0),
        Span(0, "gradients", "weight", 0.25, 0.25),
    ]
    save_chrome_trace(overlapping, path)
    events = json.loads(path.read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {0: "communication", 1: "communication 2", 2: "gradients"}
    assert [(e["name"], e["tid"]) for e in events if e["ph"] == "X"] == [
        ("a", 0),
        ("b", 1),
        ("c", 0),
    ]
    (mark,) = (e for e in events if e["ph"] == "i")
    assert (mark["name"], mark["tid"], mark["ts"], mark["s"]) == ("weight", 2, 250_000, "t")
    assert "dur" not in mark


def test_a_chrome_file_has_whole_nanoseconds_and_the_bytes_that_are_known(tmp_path):
    path = tmp_path / "trace.json"
    spans = [
        Span(0, "communication", "a", 0.1 + 0.2, 0.7, 1 << 20),
        Span(0, "communication", "b", 0.7, 0.8),
    ]
    save_chrome_trace(spans, path)
    a, b = (e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X")
    assert (a["ts"], a["dur"]) == (300_000, 400_000), "not 300000.00000000006"
    assert a["args"] == {"bytes": 1 << 20}
    assert "args" not in b


def test_a_chrome_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    save_chrome_trace(SPANS, str(path))
    whole = path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"], "nothing else is left"

    def disk_full(self, text):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(OSError, match="no space left"):
        save_chrome_trace(SPANS * 2, path)
    assert path.read_text() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"], "the half is taken away"


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=8)


@given(RANGES, RANGES)
def test_intervals_are_counted_once_and_intersected_exactly(first, second):
    a, b = (
        [Span(0, "compute", "forward", start, start + length) for start, length in ranges]
        for ranges in (first, second)
    )
    seconds = range(26)
    of_a, of_b = ({s for s in seconds for e in r if e.start <= s < e.end} for r in (a, b))
    assert covered(a) == len(of_a)
    assert in_both(a, b) == len(of_a & of_b)
