"""The benchmark of sharding: its ways, what they keep beside what was predicted, its file."""

import json

import pytest
import torch
from ranks import be_the_module, run
from torch.nn.functional import mse_loss

from microddp.bench import sharded
from microddp.model import FullMLP


def bench(ranks, report, *options):
    """Run it; what rank 0 prints, and the rows of its file by way."""
    usual = ("--models", "MLP 512", "--iters", "2", "--warmup", "1", "--json", str(report))
    printed = run(_on_a_smaller_model, ranks, *usual, *options, join=False)[0]
    return printed, {row["way"]: row for row in json.loads(report.read_text())["rows"]}


def _on_a_smaller_model(*options):
    values = torch.randn(32, 256)
    smaller = lambda: (FullMLP(256, depth=4), mse_loss, (values, values))  # noqa: E731
    sharded.models = lambda _: {"MLP 512": smaller}
    return be_the_module("microddp.bench", "sharded", *options)


def test_reports_every_way_with_what_it_keeps(tmp_path):
    printed, rows = bench(2, tmp_path / "report.json")
    assert "gloo, 2 ranks on " in printed
    assert "zero3 takes " in printed
    assert {"torch", "ddp", "torch zero1", "zero1", "zero2", "torch zero3", "zero3"} <= set(rows)
    assert rows["torch"]["to_ddp"] == rows["torch zero3"]["to_fsdp"] == 1
    for way, row in rows.items():
        assert row["kept"] == pytest.approx(row["predicted"], rel=0.05), way
        assert row["peak"] >= row["kept"]
    assert rows["zero3"]["kept"] <= 1.01 * rows["torch zero3"]["kept"]
    # Three halves instead of two, but the last of 4 layers is gathered once.
    sent = rows["zero1"]["sent"] * (3 - 1 / 4) / 2
    assert rows["zero3"]["sent"] == pytest.approx(sent, rel=0.001)


def test_on_two_levels(tmp_path):
    _, rows = bench(4, tmp_path / "report.json", "--ranks-per-node", "2")
    for way in ("hsdp", "torch hsdp"):
        assert rows[way]["kept"] == pytest.approx(rows[way]["predicted"], rel=0.05), way
        assert rows[way]["kept"] > 1.9 * rows["zero3"]["kept"]
    # 3/2 of the parameters inside, less half of the last layer's, and an all-reduce of half of them
    # between two; zero1 sends 3/2.
    sent = rows["zero1"]["sent"] * (2 - 1 / 8) / 1.5
    assert rows["hsdp"]["sent"] == pytest.approx(sent, rel=0.001)
