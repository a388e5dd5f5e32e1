"""The verdict on what limits a step: counted by hand, then cases made to be each."""

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss

from microddp.model import FullMLP
from microddp.performance import Rates, WorkCounter, find_bottleneck, measure_rates
from microddp.performance.roofline import Operation, judge
from microddp.timing import measure

RATES = Rates(flops=100.0, nbytes=10.0, call=1.0)


@pytest.mark.parametrize(
    ("operations", "exposed", "bottleneck", "seconds"),
    [
        ([Operation("mm", 1000, 20)], 0, "compute", 10),
        ([Operation("add", 0, 200)], 0, "memory", 20),
        ([Operation("add", 0, 2)] * 30, 0, "host", 30),
        ([Operation("mm", 1000, 20), Operation("add", 0, 200)], 21, "communication", 21),
    ],
)
def test_each_operation_counts_for_what_limits_it(operations, exposed, bottleneck, seconds):
    verdict = judge(operations, RATES, measured=50, exposed=exposed)
    assert verdict.bottleneck == bottleneck
    assert verdict.seconds[bottleneck] == seconds
    assert verdict.operations == len(operations)
    assert f"{bottleneck} bound" in str(verdict)


def test_counts_are_those_worked_out_by_hand():
    weight = torch.ones(3, 4, requires_grad=True)
    x = torch.ones(2, 3)
    with WorkCounter() as counter:
        (x @ weight).sum().backward()
    products = [operation for operation in counter.operations if operation.flops]
    # Forward x @ w, backward x.T @ ones: 2 * 2 * 3 * 4 each; x needs no gradient.
    assert [operation.flops for operation in products] == [48, 48]
    assert products[0].nbytes == 4 * (2 * 3 + 3 * 4 + 2 * 4)
    with WorkCounter() as counter:
        x.view(3, 2).add_(1)
    (added,) = counter.operations  # the view moves nothing
    assert added.nbytes == 2 * x.nbytes


@on_ranks(1)
def test_cases_made_to_be_each_are_told_apart(comms):
    rates = measure_rates(comms)
    assert rates.flops > 1e8
    assert rates.nbytes > 1e7
    assert 1e-8 < rates.call < 1e-2

    def verdict(dim, depth, batch, optimizer):
        model = FullMLP(dim, depth)
        x, y = torch.randn(2, batch, dim)
        update = optimizer(model.parameters(), lr=1e-4)

        def step():
            update.zero_grad()
            mse_loss(model(x), y).backward()
            update.step()

        seconds = measure({"": step}, comms, warmup=1, repeat=3)[""].median
        return find_bottleneck(step, rates, measured=seconds)

    assert verdict(256, 4, 2048, torch.optim.SGD).bottleneck == "compute"
    # A sample uses each weight once; Adam reads and writes several numbers for each.
    assert verdict(1024, 3, 1, torch.optim.Adam).bottleneck == "memory"
    assert verdict(8, 64, 4, torch.optim.SGD).bottleneck == "host"


@on_ranks(2)
def test_communication_is_measured_and_not_counted(comms):
    layer = nn.Linear(4, 4)

    def step():
        layer.zero_grad()
        layer(torch.ones(1, 4)).sum().backward()
        for p in layer.parameters():
            comms.all_reduce(p.grad)

    with WorkCounter() as counter:
        step()
    assert not [operation for operation in counter.operations if "all" in operation.name]
    rates = Rates(1e12, 1e12, 1e-9)
    assert find_bottleneck(step, rates, measured=1, exposed=0.5).bottleneck == "communication"
