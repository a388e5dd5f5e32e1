"""The benchmark of sharding: its ways, what they keep beside what was predicted, its file."""

import json

import pytest
from test_bench_allreduce import TORCHRUN, run


def test_reports_every_way_with_what_it_keeps(tmp_path):
    report = tmp_path / "report.json"
    options = ("--models", "MLP 512", "--iters", "2", "--warmup", "1", "--json", report)
    printed = run(*TORCHRUN, "-m", "microddp.bench", "sharded", *options)
    assert "gloo, 2 ranks on " in printed
    assert "zero3 takes " in printed
    rows = {row["way"]: row for row in json.loads(report.read_text())["rows"]}
    assert {"torch", "ddp", "torch zero1", "zero1", "zero2", "torch zero3", "zero3"} <= set(rows)
    assert rows["torch"]["to_ddp"] == rows["torch zero3"]["to_fsdp"] == 1
    for way, row in rows.items():
        assert row["kept"] == pytest.approx(row["predicted"], rel=0.05), way
        assert row["peak"] >= row["kept"]
    assert rows["zero3"]["kept"] <= 1.01 * rows["torch zero3"]["kept"]
    assert rows["zero3"]["sent"] == pytest.approx(1.5 * rows["zero1"]["sent"], rel=0.01)
