"""The benchmark of sharding: its ways, what they keep beside what was predicted, its file."""

import json

import pytest
from test_bench_allreduce import bench


def test_reports_every_way_with_what_it_keeps(tmp_path):
    report = tmp_path / "report.json"
    options = ("--models", "MLP 512", "--iters", "2", "--warmup", "1", "--json", report)
    printed = bench("sharded", *options)
    assert "gloo, 2 ranks on " in printed
    assert "zero3 takes " in printed
    rows = {row["way"]: row for row in json.loads(report.read_text())["rows"]}
    assert {"torch", "ddp", "torch zero1", "zero1", "zero2", "torch zero3", "zero3"} <= set(rows)
    assert rows["torch"]["to_ddp"] == rows["torch zero3"]["to_fsdp"] == 1
    for way, row in rows.items():
        assert row["kept"] == pytest.approx(row["predicted"], rel=0.05), way
        assert row["peak"] >= row["kept"]
    assert rows["zero3"]["kept"] <= 1.01 * rows["torch zero3"]["kept"]
    # Three halves instead of two, but the last of 16 layers is gathered once.
    sent = rows["zero1"]["sent"] * (3 - 1 / 16) / 2
    assert rows["zero3"]["sent"] == pytest.approx(sent, rel=0.001)


def test_on_two_levels(tmp_path):
    report = tmp_path / "report.json"
    options = ("--models", "MLP 512", "--iters", "2", "--warmup", "1", "--json", report)
    bench("sharded", "--ranks-per-node", 2, *options, ranks=4)
    rows = {row["way"]: row for row in json.loads(report.read_text())["rows"]}
    for way in ("hsdp", "torch hsdp"):
        assert rows[way]["kept"] == pytest.approx(rows[way]["predicted"], rel=0.05), way
        assert rows[way]["kept"] > 1.9 * rows["zero3"]["kept"]
    # 3/2 of the parameters inside, less half of the last layer's, and an all-reduce of half of them
    # between two; zero1 sends 3/2.
    sent = rows["zero1"]["sent"] * (2 - 1 / 32) / 1.5
    assert rows["hsdp"]["sent"] == pytest.approx(sent, rel=0.001)
