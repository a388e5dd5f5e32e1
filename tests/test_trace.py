"""Repeated measurements, and what happened when."""

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from microddp.trace import Span, Timeline, Timing, measure, peak_memory, save_chrome_trace

SLOW = 0.05  # seconds


# ---- measurements


def test_a_timing_has_the_usual_statistics():
    timing = Timing(tuple(float(i) for i in range(20, 0, -1)))
    assert timing.median == 10.5
    assert timing.percentile(95) == 19
    assert timing.percentile(100) == 20
    assert timing.spread == (5, 15)
    assert str(Timing((0.001, 0.002, 0.003))) == "2 ms (1 to 3)"


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
    assert first.end <= second.start


@on_ranks(2)
def test_a_timeline_without_spans_is_empty(comms):
    assert Timeline(comms).gather() == []


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
