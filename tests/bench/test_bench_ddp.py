"""The benchmark of training steps: what it counts, compares and writes."""

import json

import pytest
import torch
from ranks import on_ranks
from test_bench_allreduce import TORCHRUN, run

from microddp.bench.ddp import REFERENCE, collectives, compare, models, schedules
from microddp.report import MIB
from microddp.timing import Timing

BENCH = ("-m", "microddp.bench", "ddp")


def test_reports_every_schedule_against_torch(tmp_path):
    report = tmp_path / "report.json"
    options = ("--models", "MLP 128", "--caps", "1", "--iters", "3", "--json", report)
    printed = run(*TORCHRUN, *BENCH, *options).stdout
    assert "gloo, 2 ranks on " in printed
    assert "microddp.DDP takes " in printed
    rows = {row["schedule"]: row for row in json.loads(report.read_text())["rows"]}
    reference = rows[REFERENCE]
    assert reference["ratio"] == reference["ratio_low"] == reference["ratio_high"] == 1
    gradients = sum(p.nbytes for p in models(torch.device("cpu"))["MLP 128"]()[0].parameters())
    assert rows["no synchronisation"]["collectives"] == 0
    assert rows["no synchronisation"]["exposed_ms"] == 0
    assert rows["naive"]["collectives"] == rows["hooks"]["collectives"] == 32
    for name in ("bucketed", "microddp.DDP", "microddp.DDP, copies"):
        assert rows[name]["collectives"] == reference["collectives"] == 1
    assert {row["nbytes"] for name, row in rows.items() if name != "no synchronisation"} == {
        gradients
    }
    free = rows["no synchronisation"]["median_ms"]
    for row in rows.values():
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["exposed_ms"] == pytest.approx(row["median_ms"] - free)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(("--models", "ResNet"), "invalid choice"), (("--caps", "0"), "expected a positive number")],
)
def test_refuses_what_it_cannot_do(options, complaint):
    assert complaint in run(*TORCHRUN, *BENCH, *options, status=1).stderr


@on_ranks(2)
def test_all_schedules_train_every_model_alike(comms):
    for name, make in models(comms.device).items():
        if name in ("MLP 512", "MLP 1024"):  # the same as the first, but slow
            continue
        torch.manual_seed(0)
        model, loss_fn, batch = make()
        steps = schedules(model, loss_fn, batch, comms, cap_mb=1.0)
        counted = {schedule: collectives(step) for schedule, step in steps.items()}
        for schedule in ("microddp.DDP", "bucketed"):
            assert counted[schedule][1] == counted[REFERENCE][1] > 0, (name, schedule)


def test_ratios_are_of_rounds_and_exposed_time_is_what_exceeds_no_synchronisation():
    timings = {
        "no synchronisation": Timing((1.0, 1.0, 1.0)),
        REFERENCE: Timing((2.0, 4.0, 8.0)),
        "microddp.DDP": Timing((3.0, 4.0, 4.0)),
    }
    rows = compare("toy", 25.0, timings, dict.fromkeys(timings, (3, MIB)))
    ours = rows[-1]
    assert (ours.ratio, ours.ratio_low, ours.ratio_high) == (1.0, 0.5, 1.5)
    assert (ours.median_ms, ours.exposed_ms) == (4000.0, 3000.0)
    assert (ours.collectives, ours.nbytes) == (3, MIB)
