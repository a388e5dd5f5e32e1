"""Scale models: the cluster's numbers, computed by hand, and a stage that has its ratios."""

import re
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

from microddp.replicas import check_replicas
from microddp.report import human_seconds
from microddp.stage import (
    cluster,
    known_all_reduces,
    known_clusters,
    published_cluster,
    set_stage,
    stage,
    stage_of,
    work_of,
)

GPT = {"parameters": 355e6, "tokens": 24_576, "layers": 16}


@on_ranks(2)
def test_on_gpus_each_rank_draws_its_own_tokens(comms):
    stage.ON_GPUS |= {"dim": 8, "depth": 1, "heads": 1, "context": 16}  # in this process only
    made = stage._on_gpus(comms)
    tokens = comms.all_gather(made.batch[0].contiguous())
    assert not torch.equal(tokens[0], tokens[1])
    check_replicas(made.model, comms)


def test_a_cluster_is_what_its_sources_say():
    side = cluster("a100", "25gbit", nodes=8, node=1, **GPT)
    assert side.devices == 8
    assert side.nbytes == 710e6
    assert side.compute == pytest.approx(6 * 355e6 * 24_576 / (312e12 * 0.52))
    assert side.messages == pytest.approx(14 * (710e6 / 8 / 3.125e9 + 14e-6))
    assert side.start == pytest.approx(15 / 16 * 14 * 14e-6), "M has a start, too"
    assert side.ratio == side.messages / side.compute


def test_a_node_of_eight_uses_its_own_links():
    side = cluster("h100", "8x400gbit", nodes=1, node=8, **GPT)
    assert side.messages == pytest.approx(14 * (710e6 / 8 / 367.6e9 + 3.4e-6))
    first, *_ = known_clusters(**GPT)
    assert first.words == "8 H100 of a node, NVLink"


def test_all_reduces_of_known_clusters_are_nccls():
    seconds = known_all_reduces([0, 8 * 10**9])["8 machines of an A100, 25 Gbit/s"]
    tree = 6.8e-6 + 2 * 3 * 5e-6  # LL
    ring = 8.4e-6 + 14 * (1e9 / 3.125e9 + 1.4 * 14e-6)  # Simple
    assert seconds == pytest.approx([tree, ring])


def test_a_published_training_is_a_cluster():
    name = "NVIDIA, BERT large, pre-training, fp16, 512 tokens, 1 to 8 V100"
    side = published_cluster(name, 8)
    assert (side.devices, side.layers) == (8, 24)
    assert side.nbytes == pytest.approx(2 * 336e6)
    assert side.compute == pytest.approx(2048 / 13639.7, rel=1e-3)
    assert side.messages > 14 / 8 * side.nbytes / 130e9
    assert 0 < side.start < side.messages
    with pytest.raises(ValueError, match="expected a training of"):
        published_cluster(name, 7)


@pytest.mark.parametrize(
    ("device", "link", "node", "message"),
    [
        ("h10", "25gbit", 1, "did you mean 'h100'?"),
        ("h100", "25gbits", 1, "did you mean '25gbit'?"),
        ("h100", "8x400gbit", 4, "expected at most 4 rails, one a device, got 8"),
    ],
)
def test_what_is_not_known_is_named(device, link, node, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cluster(device, link, nodes=2, node=node, **GPT)


def test_a_stage_has_the_clusters_ratio():
    there = cluster("a100", "25gbit", nodes=8, node=1, **GPT)
    here = stage_of(there, "here", 1 << 19, messages=0.123, start=0.001)
    assert here.ratio == pytest.approx(there.ratio)
    assert (here.devices, here.layers, here.nbytes) == (8, 16, 8 << 20)
    work = work_of(here)
    assert work.seconds == pytest.approx(here.compute)
    assert work.values * 4 == 8 << 20
    assert sum(layer.backward for layer in work.layers) == pytest.approx(here.compute * 2 / 3)


@pytest.mark.parametrize(
    ("start", "spread", "said", "share"),
    [
        (0.001, None, "1 ms", "0.0081"),
        (0.001, (-0.002, 0.003), "1 ms (-2 ms to 3 ms)", "0.0081"),
        (0.0, (-0.002, 0.003), "not resolved", ""),
    ],
)
def test_a_start_that_is_lost_in_its_spread_is_not_called_nothing(start, spread, said, share):
    there = cluster("a100", "25gbit", nodes=8, node=1, **GPT)
    here = replace(stage_of(there, "here", 1 << 19, messages=0.123, start=start), compute=0.123)
    words = replace(here, start_spread=spread).in_words()
    assert (words["start of a message"], words["start/C"]) == (said, share)
    alone = replace(here, devices=1, messages=0.0, start=0.0)
    assert alone.in_words()["start of a message"] == human_seconds(0)


def test_a_stage_that_is_too_quick_says_which_would_fit():
    there = cluster("a100", "25gbit", nodes=8, node=1, **GPT)
    with pytest.raises(ValueError, match="layers of ") as raised:
        stage_of(there, "here", 1 << 19, messages=0.0123, start=0.001)
    number, unit = re.search(r"layers of ([\d.]+) (\w+) would", str(raised.value)).groups()
    enough = float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
    stage_of(there, "here", int(enough), messages=0.0123 * 1.01 * enough / (1 << 19), start=0.001)


@on_ranks(1, 2)
def test_a_stage_is_set_on_the_ranks_that_there_are(comms):
    n = comms.world_size
    few = GPT | {"layers": 2}  # over loopback, more would have to be large
    stage = set_stage(comms, cluster("a100", "25gbit", nodes=n, node=1, **few))
    there, here = stage.sides
    assert here.devices == n
    assert here.ratio == pytest.approx(there.ratio)
    if n == 1:
        assert here.compute == 0.1
    assert "M/C" in str(stage)
    sides = comms.all_gather_data([here.compute, here.nbytes])
    assert sides == [sides[0]] * n, "the same on every rank"
    with pytest.raises(ValueError, match=f"expected {n + 1} ranks, one for each device"):
        set_stage(comms, cluster("a100", "25gbit", nodes=n + 1, node=1, **GPT))
    if n == 1:
        stage.step("naive")()
        stage.step("zero1")()  # whose optimizer has shards
        stage.step(stage.strategy("ddp", 1.0))()


def test_speed_ups_follow_from_n_and_the_ratio():
    side = cluster("a100", "25gbit", nodes=8, node=1, parameters=1e9, tokens=4096, layers=8)
    for ratio, unhidden, overlapped in ((0, 8, 8), (1, 4, 6), (3, 2, 2.4)):
        made = replace(side, compute=1.0, messages=float(ratio))
        assert (made.unhidden, made.overlapped) == pytest.approx((unhidden, overlapped))
