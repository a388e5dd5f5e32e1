"""Steps taken apart: made-up spans, then real steps of every kind."""

import copy
import time
from functools import partial

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.ddp import DDP
from microddp.model import FullMLP
from microddp.performance import DDPPerformanceAnalyzer, StepSummary, median_step
from microddp.step_times import StepTimes, break_down
from microddp.strategies import STRATEGIES
from microddp.timing import NOT_RECORDED, Span


def span(name, start, end, lane="compute"):
    return Span(0, lane, name, start, end)


STEP = [
    span("data", 0, 1, "data"),
    span("optimizer", 1, 2),
    span("forward", 2, 5),
    span("backward", 5, 12),
    span("bucket 0", 7, 10, "communication"),
    span("bucket 1", 9, 11, "communication"),
    span("wait for bucket 1", 10, 11, "wait"),
    span("optimizer", 13, 15),
]


def test_a_step_is_its_phases_without_the_waiting_inside_them():
    expected = StepTimes(1, 3, 6, exposed=1, hidden=3, optimizer=3, total=15)
    assert break_down(STEP) == expected
    assert expected.working == 14


def test_communication_after_backward_is_all_exposed():
    spans = [
        span("forward", 0, 2),
        span("backward", 2, 6),
        span("wait for gradients", 6, 9, "wait"),
        span("all-reduce a", 6, 7, "communication"),
        span("all-reduce b", 7.5, 9, "communication"),
    ]
    times = break_down(spans)
    assert (times.backward, times.exposed, times.hidden, times.total) == (4, 3, 0, 9)


def test_the_median_is_taken_of_each_number():
    steps = [StepTimes(*[float(i)] * 7) for i in (1, 9, 2)]
    assert median_step(steps) == StepTimes(*[2.0] * 7)


def test_the_straggler_is_the_rank_that_waits_least():
    slow = StepTimes(0, 5, 10, exposed=1, hidden=0, optimizer=1, total=17)
    quick = StepTimes(0, 3, 4, exposed=9, hidden=0, optimizer=1, total=17)
    summary = StepSummary((quick, slow))
    assert summary.slowest == 1
    assert summary.spread == 2
    assert "Rank 1 works longest (total less exposed), 2.00 times as long" in str(summary)
    assert str(summary).splitlines()[3].split() == ["forward", "3000.00", "5000.00"]
    assert "<table>" in summary._repr_html_()
    assert summary.bars["rank 1"]["backward"] == 10
    assert [sum(phases.values()) for phases in summary.bars.values()] == [17, 17]


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class SlowBackward(nn.Module):
    """Two layers with a pause between their gradients: time to hide communication in."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(Slow.apply(self.first(x), self.seconds))


SMALL = 64 * 65 * 4 / 2**20  # MiB: one layer is a bucket


def ways(comms, model):
    """Every way to train a model, by name; both DDPs also as a user passes them."""
    sgd = partial(torch.optim.SGD, lr=0.01)
    replicated = {name: make for name, make in STRATEGIES.items() if make.replicas}
    ways = {name: make(copy.deepcopy(model), comms, SMALL) for name, make in replicated.items()}
    ways["our wrapper"] = DDP(copy.deepcopy(model), comms, bucket_cap_mb=SMALL)
    ways["PyTorch's wrapper"] = TorchDDP(
        copy.deepcopy(model), process_group=comms.group, bucket_cap_mb=SMALL
    )
    modules = {name: way.module for name, way in ways.items()}  # a strategy's, or a wrapper's
    return {
        name: (way, modules[name], sgd(modules[name].parameters())) for name, way in ways.items()
    }


@on_ranks(1, 2)
def test_every_way_to_train_is_taken_apart(comms):
    pause = 0.1
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 64)
    for name, (way, _, optimizer) in ways(comms, SlowBackward(pause)).items():
        analyzer = DDPPerformanceAnalyzer(comms)
        for _ in range(3):  # DDP's first step has one bucket, and its second makes new ones
            comms.barrier()
            times = analyzer.time_step(way, x, y, optimizer, loss_fn=mse_loss)
        assert len(analyzer.steps) == 3
        assert times.backward >= pause, name
        parts = times.data + times.forward + times.backward + times.exposed + times.optimizer
        assert parts <= times.total * 1.001, name
        if name == "none":
            assert times.exposed == times.hidden == 0
        elif not getattr(way, "overlaps", True):  # after backward
            assert times.exposed > 0
            assert times.hidden == 0
        else:  # the last layer's all-reduce goes on while the first layer's gradient is awaited
            assert times.hidden > 0, name
            assert times.exposed > 0, name
        if name in (
            "torch",
            "PyTorch's wrapper",
        ):  # the gaps cannot be seen: from the first bucket to the last gradient
            assert times.hidden >= pause
        elif name in ("hooks", "bucketed", "ddp", "our wrapper"):
            assert times.hidden < pause, name


@on_ranks(2)
def test_timed_steps_train_like_any_others(comms):
    torch.manual_seed(comms.rank)
    x, y = torch.randn(2, 8, 64)
    torch.manual_seed(0)
    model = SlowBackward(0.0)
    plain = DDP(copy.deepcopy(model), comms)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        optimizer.step()
    for name, (way, timed, optimizer) in ways(comms, model).items():
        analyzer = DDPPerformanceAnalyzer(comms)
        for _ in range(3):
            analyzer.time_step(way, x, y, optimizer, loss_fn=mse_loss)
        for p, q in zip(timed.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-6) == (name != "none"), name
    assert plain.reducer.buckets.timeline is NOT_RECORDED


@on_ranks(2)
def test_a_slow_rank_is_named_although_the_other_one_waits(comms):
    def batches():
        for _ in range(3):
            if comms.rank == 1:
                time.sleep(0.25)
            yield torch.randn(8, 16), torch.randn(8, 16)

    model = DDP(FullMLP(16, 2), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    analyzer = DDPPerformanceAnalyzer(comms)
    for x, y in analyzer.batches(batches()):
        analyzer.time_step(model, x, y, optimizer, loss_fn=mse_loss)
    summary = analyzer.summary()
    assert summary.slowest == 1
    assert summary.ranks[1].data > 0.25
    assert summary.ranks[0].exposed > 0.15
    assert summary.spread > 2


@on_ranks(2)
def test_every_rank_hears_of_one_without_a_step(comms):
    analyzer = DDPPerformanceAnalyzer(comms)
    if comms.rank == 0:
        analyzer.steps.append(StepTimes(*[1.0] * 7))
    with pytest.raises(RuntimeError, match="expected timed steps, got rank 1: none"):
        analyzer.summary()


@on_ranks(1)
def test_a_step_that_raises_leaves_nothing_behind(comms):
    model = DDP(FullMLP(16, 2), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    analyzer = DDPPerformanceAnalyzer(comms)
    x, y = torch.randn(2, 4, 16)
    with pytest.raises(RuntimeError):
        analyzer.time_step(model, torch.randn(4, 15), y, optimizer, loss_fn=mse_loss)
    assert model.reducer.buckets.timeline is NOT_RECORDED
    assert analyzer.steps == []
    time.sleep(0.5)
    times = analyzer.time_step(model, x, y, optimizer, loss_fn=mse_loss)
    assert times.total < 0.5
