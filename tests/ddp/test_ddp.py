"""Our DDP against PyTorch's, bit for bit: the models, and the ways forward and backward follow."""

import pytest
import torch
from ddp_pairs import (
    MODELS,
    NO_BROADCAST,
    SMALL,
    VIEWS,
    Branches,
    Pair,
    accumulating,
    data,
    errors_from_warnings_of_ours_only,
    loss_of,
    mlp,
    plain_step,
    sgd,
)
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

from microddp import buckets
from microddp.ddp import DDP
from microddp.replicas import check_replicas


@on_ranks(1, 3)
def test_twenty_steps_of_every_model_are_equal(comms):
    for name, make in MODELS.items():
        for view in VIEWS:
            for cap in ({}, {"bucket_cap_mb": SMALL}):
                pair = Pair(comms, make, **view, **cap)
                steps = 20 if bool(cap) == view["gradient_as_bucket_view"] else 5
                pair.train(plain_step(comms), steps, what=(name, view, cap))
                plan = [
                    sum(pair.ours.reducer.parameters[i].nbytes for i in bucket)
                    for bucket in pair.ours.reducer.buckets.plan
                ]
                theirs = pair.theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
                # In PyTorch the order of the last bucket of each dtype is that of a hash table.
                order = sorted if name == "mixed" else list
                assert order(plan) == order(int(size) for size in theirs.split(",")), (name, cap)
                assert not cap or len(plan) > 1, "the small cap should make several buckets"


@on_ranks(3)
def test_gradients_that_are_brought_in_one_by_one_have_the_same_bits(comms):
    for limit in (1, 300):  # every gradient is large; in some buckets only
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buckets, "LARGE_BYTES", limit)
            for view in VIEWS:
                pair = Pair(comms, MODELS["conv"], bucket_cap_mb=SMALL, **view)
                pair.train(plain_step(comms), steps=4, what=(limit, view))
                large = [each for bucket in pair.ours.reducer.buckets for each in bucket.large]
                assert any(large), limit
                assert all(large) == (limit == 1)


@on_ranks(2)
def test_the_wrong_scale_or_another_order_of_addition_would_be_noticed(comms):
    pair = Pair(comms, mlp)
    pair.ours._divisor = lambda *_: comms.world_size * (1 + 2e-7)
    with pytest.raises(AssertionError, match="gradient"):
        pair.train(plain_step(comms), steps=3)


@on_ranks(2, 3)
def test_all_reduces_are_as_many_and_as_large_as_pytorchs_and_broadcasts_fewer(comms):
    def of_a_step(pair, which, body, step):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            body([pair.ours, pair.theirs][which], pair.optimizers[which], step)
        return [
            (event.name, event.input_shapes)
            for event in seen.events()
            if event.name.startswith("gloo:") and event.name.count(":") == 1
        ]

    options = (
        {},
        {"bucket_cap_mb": SMALL},
        {"find_unused_parameters": True},
        {"static_graph": True},
    )
    for kwargs in options:
        pair = Pair(comms, MODELS["conv"], **kwargs)
        for step in range(4):
            rebuilt = pair.ours.reducer.planned
            with errors_from_warnings_of_ours_only():
                theirs = of_a_step(pair, 1, plain_step(comms), step)
                ours = of_a_step(pair, 0, plain_step(comms), step)
            reduced, broadcast = (
                [e for e in ours if e[0] == f"gloo:{name}"] for name in ("all_reduce", "broadcast")
            )
            expected = [e for e in theirs if e[0] == "gloo:all_reduce"]
            assert sorted(reduced) == sorted(expected), (kwargs, step)
            # All buffers in one, in PyTorch one for each dtype; and new buckets are agreed on.
            assert len(broadcast) == 1 + (pair.ours.reducer.planned and not rebuilt) < len(theirs)
            assert len(ours) == len(reduced) + len(broadcast)
            buffers = sum(buffer.nbytes for buffer in pair.ours.module.buffers())
            assert [[buffers]] in [shapes for _, shapes in broadcast]
            assert reduced, "the profiler should see something"
            assert step < 2 or not kwargs.get("bucket_cap_mb") or len(reduced) > 2


# ---- the ways forward and backward follow each other


def no_sync_around_backward_only(comms):
    def body(ddp, optimizer, step):
        optimizer.zero_grad()
        x, y = data(comms.rank, step)
        loss = loss_of(ddp(x), y)
        with ddp.no_sync():
            loss.backward()
        optimizer.step()

    return body


def no_sync_around_forward_only(comms):
    def body(ddp, optimizer, step):
        optimizer.zero_grad()
        for k in range(2):
            x, y = data(comms.rank, 10 * step + k)
            with ddp.no_sync():
                loss = loss_of(ddp(x), y)
            loss.backward()
        x, y = data(comms.rank, step)
        loss_of(ddp(x), y).backward()
        optimizer.step()

    return body


def two_forwards_one_backward(comms):
    def body(ddp, optimizer, step):
        optimizer.zero_grad()
        x, y = data(comms.rank, step)
        (loss_of(ddp(x), y) + loss_of(ddp(y), x)).backward()
        optimizer.step()

    return body


def forward_that_nobody_follows(comms):
    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        ddp(x)
        optimizer.zero_grad()
        loss_of(ddp(y), x).backward()
        optimizer.step()
        ddp(x)

    return body


def evaluating_between_steps(comms):
    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        optimizer.zero_grad()
        loss_of(ddp(x), y).backward()
        optimizer.step()
        ddp.eval()
        with torch.no_grad():
            first = ddp(y)[0]
        with torch.inference_mode():
            assert torch.equal(first, ddp(y)[0])
        ddp(y)
        loss_of(ddp(x), y).backward()
        ddp.train()

    return body


def retaining_the_graph(comms):
    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        optimizer.zero_grad()
        loss = loss_of(ddp(x), y)
        loss.backward(retain_graph=True)  # averaged
        loss.backward()  # as no forward came between: of this rank only
        optimizer.zero_grad()
        loss_of(ddp(x), y).backward()
        optimizer.step()

    return body


def gradients_of_two_losses(comms):
    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        optimizer.zero_grad()
        left, right = ddp(x)
        torch.autograd.backward([mse_loss(left, y), right.mean()])
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()

    return body


def unfreezing_later(comms):
    """What is frozen at construction is nobody's, also when a replan comes after."""

    def body(ddp, optimizer, step):
        ddp.module[0].requires_grad_(step > 0)
        plain_step(comms)(ddp, optimizer, step)

    return body


@on_ranks(2)
def test_parameters_are_those_of_the_construction(comms):
    def module():
        made = mlp()
        made[0].requires_grad_(False)
        return made

    Pair(comms, module).train(unfreezing_later(comms), alike=False)
    ddp = DDP(mlp(), comms)
    ddp(data(comms.rank, 0)[0]).sum().backward()
    ddp.module[0].requires_grad_(False)
    ddp(data(comms.rank, 1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"brought none for 0\.weight, 0\.bias \(2 of"):
        ddp(data(comms.rank, 2)[0])


@on_ranks(1, 3)
def test_every_sequence_of_forward_and_backward_is_equal(comms):
    sequences = (
        accumulating,
        no_sync_around_backward_only,
        no_sync_around_forward_only,
        two_forwards_one_backward,
        forward_that_nobody_follows,
        evaluating_between_steps,
        retaining_the_graph,
        gradients_of_two_losses,
    )
    options = ({}, *NO_BROADCAST, {"bucket_cap_mb": SMALL})
    for sequence in sequences:
        for view in VIEWS:
            for more in options:
                if sequence is two_forwards_one_backward and more not in NO_BROADCAST:
                    continue  # PyTorch's own changes the buffers that the first graph needs
                pair = Pair(comms, Branches, **view, **more)
                pair.train(sequence(comms), what=(sequence.__name__, view, more))


@on_ranks(2)
def test_two_forwards_and_one_backward_work_with_buffers_too(comms):
    ddp = DDP(Branches(), comms)
    step = two_forwards_one_backward(comms)
    optimizer = sgd(ddp)
    for i in range(3):
        step(ddp, optimizer, i)
    check_replicas(ddp.module, comms)


@on_ranks(2, 3)
def test_only_broadcasting_makes_buffers_equal(comms):
    for broadcast in (True, False):
        ddp = DDP(Branches(), comms, forward_sync_buffers=broadcast)
        for step in range(3):
            sum(ddp(data(comms.rank, step)[0])).sum().backward()
        ddp.module.eval()
        ddp(data(comms.rank, 0)[0])  # in which a step of this rank would change nothing
        means = comms.all_gather(ddp.module.norm.running_mean)
        assert bool((means == means[0]).all()) == broadcast
