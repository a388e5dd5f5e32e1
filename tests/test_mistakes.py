"""The mistakes people make with data parallelism: each is made here, and the oracle notices.

The oracle is one process that takes the step on all ranks' samples at once. Every test first shows
that the right way passes it.
"""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from microddp.backward import Buckets
from microddp.bucketing import BucketedDDPHooks
from microddp.ddp import DDP
from microddp.replicas import broadcast_parameters, check_replicas

MICRO_BATCHES, STEPS, ROWS, WIDTH = 4, 3, 4, 6


def model(comms, spare=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
    if spare:
        module.spare = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    broadcast_parameters(module, comms)
    return module


def micro_batch(rank, i):
    generator = torch.Generator().manual_seed(100 * i + rank)
    return torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).unbind()


def whole_batch(comms, batches):
    """The inputs and targets of all ranks in some micro-batches."""
    parts = [micro_batch(rank, i) for i in batches for rank in range(comms.world_size)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.2)


def distance(comms, replica, steps):
    """Of a replica's weights from those of one process, relative; on the rank furthest off.

    ``replica(module)`` trains a module; ``steps`` lists the micro-batches of each step.
    """
    module = model(comms)
    single = copy.deepcopy(module)
    replica(module)
    optimizer = sgd(single)
    for batches in steps:
        optimizer.zero_grad()
        x, y = whole_batch(comms, batches)
        mse_loss(single(x), y).backward()
        optimizer.step()
    ours, theirs = (nn.utils.parameters_to_vector(m.parameters()) for m in (module, single))
    furthest = (ours - theirs).norm() / theirs.norm()
    comms.all_reduce(furthest.detach(), "max")
    return furthest.item()


RIGHT, WRONG = 1e-12, 1e-4
ACCUMULATED = [range(i, i + MICRO_BATCHES) for i in range(0, STEPS * MICRO_BATCHES, MICRO_BATCHES)]


def accumulate(comms, sync_at=MICRO_BATCHES - 1, divide=True, around="both"):
    """Training with accumulation: right by default, and wrong in the ways people get it."""

    def train(module):
        ddp = DDP(module, comms)
        optimizer = sgd(ddp)
        for i in range(STEPS * MICRO_BATCHES):
            x, y = micro_batch(comms.rank, i)
            syncs = i % MICRO_BATCHES == sync_at
            ddp.require_backward_grad_sync = syncs or around == "backward"
            loss = mse_loss(ddp(x), y) / (MICRO_BATCHES if divide else 1)
            ddp.require_backward_grad_sync = syncs or around == "forward"
            loss.backward()
            if (i + 1) % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()

    return train


@on_ranks(1, 2, 3)
def test_accumulation_is_a_larger_batch(comms):
    assert distance(comms, accumulate(comms), ACCUMULATED) < RIGHT
    assert distance(comms, accumulate(comms, around="forward"), ACCUMULATED) < RIGHT


@on_ranks(2)
def test_no_sync_around_backward_only_saves_nothing(comms):
    """Right numbers here, since averaging averages again changes nothing; but four times the sends.

    What it costs is seen by counting.
    """
    sent = []

    def count(around):
        sent.clear()

        def train(module):
            send = Buckets.all_reduce
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    Buckets,
                    "all_reduce",
                    lambda buckets, bucket: sent.append(bucket.index()) or send(buckets, bucket),
                )
                accumulate(comms, around=around)(module)

        assert distance(comms, train, ACCUMULATED) < RIGHT
        return len(sent)

    assert count("backward") == MICRO_BATCHES * count("both")


@on_ranks(1, 2)
def test_a_loss_that_is_not_divided_by_the_micro_batches_is_noticed(comms):
    assert distance(comms, accumulate(comms, divide=False), ACCUMULATED) > WRONG


@on_ranks(2)
def test_synchronising_one_micro_batch_too_early_is_noticed(comms):
    assert distance(comms, accumulate(comms, sync_at=0), ACCUMULATED) > WRONG


# ---- what a hook gets, and when it is over


def with_hooks(comms, hook):
    """Train with a post-accumulate hook of ``(parameter)`` on every parameter."""

    def train(module):
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(hook)
        optimizer = sgd(module)
        for i in range(STEPS):
            optimizer.zero_grad()
            x, y = micro_batch(comms.rank, i)
            mse_loss(module(x), y).backward()
            optimizer.step()

    return train


SINGLE = [[i] for i in range(STEPS)]


@on_ranks(2, 3)
def test_averaging_the_parameter_in_the_place_of_its_gradient_is_noticed(comms):
    def right(p):
        comms.all_reduce_mean(p.grad)

    @torch.no_grad()
    def wrong(p):
        comms.all_reduce_mean(p.data)

    assert distance(comms, with_hooks(comms, right), SINGLE) < RIGHT
    assert distance(comms, with_hooks(comms, wrong), SINGLE) > WRONG


@on_ranks(2)
def test_averaging_parameters_looks_fine_for_a_while(comms):
    """After one step of plain SGD the mean of the weights is what the mean gradient gives."""

    def train(module):
        optimizer = sgd(module)
        x, y = micro_batch(comms.rank, 0)
        mse_loss(module(x), y).backward()
        optimizer.step()
        for p in module.parameters():
            comms.all_reduce_mean(p.data)

    assert distance(comms, train, SINGLE[:1]) < RIGHT


def with_buckets(comms, reset):
    def train(module):
        hooks = BucketedDDPHooks(module, comms, 0.0001)
        optimizer = sgd(module)
        for i in range(STEPS):
            optimizer.zero_grad()
            x, y = micro_batch(comms.rank, i)
            mse_loss(module(x), y).backward()
            last = hooks.backward
            hooks.finish()
            hooks.backward = hooks.backward if reset else last
            optimizer.step()

    return train


@on_ranks(2)
def test_buckets_that_are_not_emptied_are_noticed_at_the_second_step(comms):
    assert distance(comms, with_buckets(comms, reset=True), SINGLE) < RIGHT
    with pytest.raises(RuntimeError, match="came again before finish"):
        distance(comms, with_buckets(comms, reset=False), SINGLE)


@on_ranks(2, 3)
def test_an_unused_parameter_raises_where_it_would_hang(comms):
    x, y = micro_batch(comms.rank, 0)
    ddp = DDP(model(comms, spare=True), comms)
    mse_loss(ddp(x), y).backward()
    with pytest.raises(RuntimeError, match=f"rank {comms.rank}: .* none for spare"):
        ddp(x)
    found = DDP(model(comms, spare=True), comms, find_unused_parameters=True)
    optimizer = sgd(found)
    for _ in range(2):
        mse_loss(found(x), y).backward()
        optimizer.step()
    check_replicas(found.module, comms)
    assert found.module.spare.grad is None


# ---- mean and sum


def gradient(comms, loss_of, rows):
    """Of the averaged loss in DDP, and of the mean over all rows in one process."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.arange(rows) % WIDTH
    module = model(comms)
    single = copy.deepcopy(module)
    mine = [part.tensor_split(comms.world_size)[comms.rank] for part in (x, y)]
    ddp = DDP(module, comms)
    loss_of(ddp(mine[0]), mine[1]).backward()
    cross_entropy(single(x), y).backward()
    return tuple(torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (module, single))


def close(pair):
    return torch.allclose(*pair, rtol=1e-9, atol=1e-15)


@on_ranks(1, 2, 3)
def test_the_mean_over_shards_needs_equal_shards_or_a_weight(comms):
    n = comms.world_size

    def total(outputs, y):
        return cross_entropy(outputs, y, reduction="sum")

    def weighted(rows):
        return lambda outputs, y: total(outputs, y) * n / rows

    even, uneven = 4 * n, 4 * n + (n - 1)
    assert close(gradient(comms, cross_entropy, even))
    assert close(gradient(comms, weighted(even), even))
    assert close(gradient(comms, weighted(uneven), uneven))
    if n > 1:
        # The mistakes: the last batch does not divide; a sum; a loss times the world size.
        assert not close(gradient(comms, cross_entropy, uneven))
        assert not close(gradient(comms, total, even))
        assert not close(gradient(comms, lambda o, y: cross_entropy(o, y) * n, even))
        averaged, whole = gradient(comms, total, even)
        torch.testing.assert_close(averaged, whole * even / n)


@on_ranks(2)
def test_tokens_are_counted_over_all_ranks(comms):
    """Rank 0 has one token that counts, rank 1 has five: the mean of the means is another."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.arange(12).view(2, 6) % WIDTH
    y[0, 1:] = y[1, 5:] = -100  # padding, which cross_entropy leaves out
    module = model(comms)
    single = copy.deepcopy(module)
    cross_entropy(single(x).flatten(0, 1), y.flatten()).backward()

    def averaged(by_tokens):
        ddp = DDP(copy.deepcopy(module), comms)
        loss = cross_entropy(ddp(x[comms.rank]), y[comms.rank], reduction="sum")
        count = (y[comms.rank] >= 0).sum()
        if by_tokens:
            comms.all_reduce(count)
            loss = loss * comms.world_size
        (loss / count).backward()
        pairs = zip(ddp.module.parameters(), single.parameters(), strict=True)
        return all(torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-15) for p, q in pairs)

    assert averaged(by_tokens=True)
    assert not averaged(by_tokens=False)
