"""Predicted steps: cases worked out by hand, and the parts they are made of."""

import pytest
import torch
from ranks import on_ranks
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.bucketing import BucketedDDPHooks
from microddp.ddp import DDP
from microddp.fitted import FittedCost
from microddp.model import FullMLP
from microddp.performance import measure_compute, predict_plan
from microddp.step_times import Bucket, ComputeTimes

# Backward takes 10 s; its gradients come after 4 s and 10 s.
COMPUTE = ComputeTimes(forward=5, backward=10, ready={"b": 4, "a": 10}, optimizer=1, copy=0)
BOTH = [Bucket(("b",), 3), Bucket(("a",), 2)]
ONE = [Bucket(("b", "a"), 5)]
NETWORK = FittedCost(alpha=0, beta=1)


@pytest.mark.parametrize(
    ("buckets", "cost", "step", "exposed", "hidden"),
    [
        (BOTH, NETWORK, 18, 2, 3),  # b travels from 4 to 7, a from 10 to 12
        (ONE, NETWORK, 21, 5, 0),
        (BOTH, FittedCost(1, 1), 19, 3, 4),  # each starts up for a second
        (BOTH, FittedCost(0, 3), 5 + 4 + 15 + 1, 9, 6),  # a waits for b: 4 to 13 to 19
    ],
)
def test_buckets_travel_one_after_the_other_behind_backward(buckets, cost, step, exposed, hidden):
    predicted = predict_plan(COMPUTE, buckets, cost)
    assert (predicted.step, predicted.exposed, predicted.hidden) == (step, exposed, hidden)


def test_all_is_hidden_if_backward_goes_on_for_long_enough():
    compute = ComputeTimes(5, 20, {"b": 4, "a": 10}, 1, copy=0)
    assert predict_plan(compute, BOTH, NETWORK).step == 26
    assert predict_plan(compute, BOTH, NETWORK).hidden == 5


def test_copies_into_buckets_lengthen_backward():
    compute = ComputeTimes(5, 10, {"b": 4, "a": 10}, 1, copy=0.5)
    predicted = predict_plan(compute, BOTH, NETWORK)
    assert predicted.step == 5 + 10 + 2.5 + 2 + 1


@on_ranks(2)
def test_hooks_and_both_wrappers_plan_alike(comms):
    for cap in (0.01, 0.05, 25.0, None):
        sizes = [b.buffer().nbytes for b in BucketedDDPHooks(FullMLP(64, 6), comms, cap).buckets]
        ddp = trained_once(DDP(FullMLP(64, 6), comms, bucket_cap_mb=cap))
        torchs = trained_once(TorchDDP(FullMLP(64, 6), bucket_cap_mb=cap))
        assert sizes == [b.buffer().nbytes for b in ddp.reducer.buckets]
        theirs = torchs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert sizes == [int(size) for size in theirs.split(",")]


def trained_once(ddp):
    """Train until both wrappers have planned their buckets anew, and PyTorch has logged that."""
    for _ in range(4):
        ddp(torch.ones(2, 64)).sum().backward()
    return ddp


@on_ranks(1, 2)
def test_the_parts_of_a_step(comms):
    model = FullMLP(64, 4)
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    compute = measure_compute(
        model, mse_loss, batch, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), comms, repeat=5
    )
    names = [name for name, _ in model.named_parameters()]
    assert sorted(compute.ready) == sorted(names)
    assert next(iter(compute.ready)).startswith("layers.3"), "the last layer's gradients are first"
    assert 0 < max(compute.ready.values()) <= compute.backward * 1.5
    assert min(compute.forward, compute.optimizer, compute.copy) > 0
    assert all(p.grad is None for p in model.parameters()), "it works on a copy"
