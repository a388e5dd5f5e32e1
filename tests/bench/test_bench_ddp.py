"""The benchmark of training steps: what it counts, compares and writes."""

import json

import pytest
import torch
from ranks import on_ranks
from test_bench_allreduce import bench, refused

from microddp.bench.ddp import (
    COPIES,
    FREE,
    OURS,
    THEIRS,
    collectives,
    compare,
    conclusions,
    models,
    steps_of,
)
from microddp.bench.rows import with_quartiles
from microddp.report import MIB
from microddp.timing import Timing


def test_reports_every_strategy_against_torch(tmp_path):
    report = tmp_path / "report.json"
    options = ("--models", "MLP 128", "--bucket-cap-mb", "1", "--iters", "3", "--json", report)
    options += ("--compress", "int8", "power:2", "--all-reduce", "shared", "auto")
    printed = bench("ddp", *options)
    assert "gloo, 2 ranks on " in printed
    assert "ddp takes " in printed
    assert "ddp, copies takes " in printed
    assert "ddp, shared takes " in printed
    rows = {row["strategy"]: row for row in json.loads(report.read_text())["rows"]}
    reference = rows[THEIRS]
    assert reference["ratio"] == reference["ratio_low"] == reference["ratio_high"] == 1
    gradients = sum(p.nbytes for p in models(torch.device("cpu"))["MLP 128"]()[0].parameters())
    assert rows[FREE]["collectives"] == 0
    assert rows[FREE]["exposed_ms"] == 0
    assert rows["naive"]["collectives"] == rows["hooks"]["collectives"] == 32
    for name in ("bucketed", OURS, OURS + COPIES, THEIRS + COPIES):
        assert rows[name]["collectives"] == reference["collectives"] == 1
    compressed = {name: rows.pop(f"{OURS}, {name}") for name in ("int8", "power:2")}
    assert {row["collectives"] for row in compressed.values()} == {0}, "from one rank to another"
    assert compressed["int8"]["sent_bytes"] == pytest.approx(gradients / 4, rel=0.01)
    assert 0 < compressed["power:2"]["sent_bytes"] < gradients / 20
    in_memory = rows.pop(f"{OURS}, shared")
    assert in_memory["collectives"] == in_memory["nbytes"] == 0
    assert rows.pop(f"{OURS}, auto")["collectives"] in (0, 1), "whichever is the fastest"
    assert {row["nbytes"] for name, row in rows.items() if name != FREE} == {gradients}
    assert {row["sent_bytes"] for name, row in rows.items() if name != FREE} == {gradients}
    free = rows[FREE]["median_ms"]
    assert rows[THEIRS + COPIES]["ratio"] != 1 or rows[THEIRS + COPIES]["ratio_low"] != 1
    for row in rows.values():
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["exposed_ms"] == pytest.approx(row["median_ms"] - free)


def test_conclusions_say_what_is_won_of_what_could_be():
    ratios = {FREE: (0.5, 0.72), OURS: (1.0, 1.0), THEIRS: (1.0, 1.0), "ddp, shared": (0.6, 0.74)}
    rows = [
        {"model": model, "bucket_cap_mb": 25, "strategy": name, **with_quartiles("ratio", ratio)}
        for name, each in ratios.items()
        for model, ratio in (("a", Timing(each[:1])), ("b", Timing(each[1:])))
    ]
    ours, shared = conclusions(rows)  # geometric means: none 0.6, shared 0.666
    assert ours.startswith("ddp takes 1.000 times as long as torch (geometric mean of 2 cases); ")
    assert ours.endswith("for a at 25 MiB.")
    assert "ddp, shared takes 0.666 times" in shared
    assert "at most 0.74 times (0.74 to 0.74), for b at 25 MiB." in shared
    assert shared.endswith("It wins 83% of what no averaging at all would win.")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--models", "ResNet"), "invalid choice"),
        (("--bucket-cap-mb", "0"), "expected a positive number"),
        (("--compress", "zip"), "expected one of top-k:K"),
        (("--all-reduce", "star"), "invalid choice: 'star'"),
    ],
)
def test_refuses_what_it_cannot_do(options, complaint, capsys):
    refused("ddp", *options, complaint=complaint, capsys=capsys)


@on_ranks(2)
def test_buckets_send_every_model_as_pytorchs_do(comms):
    for name, make in models(comms.device).items():
        if name in ("MLP 512", "MLP 1024"):  # the same as the first, but slow
            continue
        torch.manual_seed(0)
        model, loss_fn, batch = make()
        steps = steps_of(model, loss_fn, batch, comms, bucket_cap_mb=1.0)
        # PyTorch's profiler reads a step's events for a second.
        counted = {name: collectives(steps[name]) for name in (THEIRS, OURS, "bucketed")}
        for strategy in (OURS, "bucketed"):
            assert counted[strategy][1] == counted[THEIRS][1] > 0, (name, strategy)


def test_ratios_are_of_rounds_and_exposed_time_is_what_exceeds_no_synchronisation():
    timings = {
        FREE: Timing((1.0, 1.0, 1.0)),
        THEIRS: Timing((2.0, 4.0, 8.0)),
        THEIRS + COPIES: Timing((3.0, 8.0, 8.0)),
        OURS + COPIES: Timing((3.0, 4.0, 4.0)),
        OURS: Timing((3.0, 4.0, 4.0)),
    }
    counted, sent = dict.fromkeys(timings, (3, MIB)), dict.fromkeys(timings, 1.5 * MIB)
    rows = compare("toy", 25.0, timings, counted, sent)
    copies, ours = rows[-2:]
    assert copies["ratio"] == 0.5, "like for like"
    assert list(ours.items()) == [
        *(("model", "toy"), ("bucket_cap_mb", 25.0), ("strategy", OURS)),
        *(("median_ms", 4000.0), ("low_ms", 3500.0), ("high_ms", 4000.0)),
        *(("ratio", 1.0), ("ratio_low", 0.75), ("ratio_high", 1.25)),
        *(("exposed_ms", 3000.0), ("collectives", 3), ("nbytes", MIB), ("sent_bytes", 1.5 * MIB)),
    ]
