"""What our DDP refuses, and how it goes on after something failed, on every rank."""

import copy
import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from ddp_pairs import SMALL, VIEWS, WIDTH, Branches, accumulating, data, loss_of, mlp, sgd
from ranks import on_ranks, run
from torch import nn

from microddp.ddp import DDP
from microddp.replicas import broadcast_parameters, check_replicas
from microddp.shared import carrier

SECONDS_AFTER_DEATH = 10


def still_works(comms):
    total = torch.tensor(1)
    comms.all_reduce(total)
    return total.item() == comms.world_size


# ---- construction


@on_ranks(2, 3)
def test_the_first_difference_between_replicas_is_named_on_every_rank(comms):
    odd = comms.world_size - 1
    mine = comms.rank == odd

    def changed(change):
        module = mlp()
        if mine:
            change(module)
        return module

    def freeze(module):
        module[2].bias.requires_grad_(False)

    def freeze_all(module):
        module.requires_grad_(False)

    changes = {
        r"nothing on rank 0 \(12 in all\) and 11.weight: .* \(13\)": lambda m: m.append(
            nn.Linear(2, 2, bias=False)
        ),
        r"4.weight: float32 \(16, 16\) on rank 0 .* 4.weight: float32 \(3, 16\)": (
            lambda m: m.__setitem__(4, nn.Linear(WIDTH, 3))
        ),
        r"0.weight: float32 .* 0.weight: float64": lambda m: m[0].double(),
        r"2.bias: float32 \(16,\) on rank 0 .* 2.bias: float32 \(16,\), no gradient": freeze,
        r"0.weight: float32 \(16, 16\) on rank 0 .* no gradient on rank": freeze_all,
        r"nothing on rank 0 .* and counter: int64 \(\)": (
            lambda m: m.register_buffer("counter", torch.tensor(0))
        ),
    }
    for message, change in changes.items():
        start = f"^rank {comms.rank}: expected the same .* and options on every rank, got "
        with pytest.raises(RuntimeError, match=f"{start}{message}") as caught:
            DDP(changed(change), comms)
        assert f"on rank {odd}" in str(caught.value)
        assert still_works(comms)


@on_ranks(2, 3)
def test_construction_makes_replicas_equal_or_insists_that_they_are(comms):
    torch.manual_seed(comms.rank)
    module = Branches()
    module.norm.running_mean.fill_(comms.rank)
    with pytest.raises(
        RuntimeError, match=f"^rank {comms.rank}: parameter first.weight .* differs"
    ):
        DDP(module, comms, verify_replicas=True)
    torch.manual_seed(0)
    like_rank_0 = Branches()
    DDP(module, comms)
    check_replicas(module, comms)
    assert torch.equal(module.first.weight, like_rank_0.first.weight)
    assert module.norm.running_mean.eq(0).all()
    DDP(module, comms, verify_replicas=True)
    other = Branches()
    other.norm.running_mean.fill_(comms.rank)
    with pytest.warns(FutureWarning, match="use forward_sync_buffers, which still copies"):
        DDP(other, comms, broadcast_buffers=False)
    assert other.norm.running_mean.eq(comms.rank).all()
    DDP(other, comms, forward_sync_buffers=False)
    assert other.norm.running_mean.eq(0).all(), "at construction all are made equal"


@on_ranks(1, 2)
def test_what_cannot_be_wrapped_is_refused_on_every_rank(comms):
    frozen = mlp().requires_grad_(False)
    for module in (nn.Tanh(), frozen):
        with pytest.raises(RuntimeError, match="parameters that require gradients"):
            DDP(module, comms)
    with pytest.raises(RuntimeError, match="initialised parameters"):
        DDP(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), comms)
    with pytest.raises(ValueError, match="expected comms or process_group, got both"):
        DDP(mlp(), comms, process_group=dist.group.WORLD)
    two_kinds = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"one kind of device, got \['cpu', 'meta'\]"):
        DDP(two_kinds, comms)
    for cap in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"finite bucket_cap_mb above 0, got {cap}"):
            DDP(mlp(), comms, bucket_cap_mb=cap)
    assert still_works(comms)


@on_ranks(2)
def test_options_that_differ_are_an_error_on_every_rank(comms):
    for option, value in (("verify_replicas", True), ("output_device", 0), ("init_sync", False)):
        mine = {option: value} if comms.rank else {}
        if option == "init_sync":
            mine = {option: not comms.rank}
        with pytest.raises(RuntimeError, match="expected the same parameters, buffers and options"):
            DDP(mlp(), comms, **mine)
    ignoring = mlp()
    ignoring._ddp_params_and_buffers_to_ignore = ["0.weight"]
    with pytest.raises(TypeError, match=rf"^rank {comms.rank}: .*requires_grad_"):
        DDP(ignoring, comms)
    batch_norm = nn.BatchNorm1d(2)
    batch_norm.running_mean.fill_(comms.rank)
    DDP(batch_norm, comms, verify_replicas=True)
    assert not batch_norm.running_mean.any(), "rank 0's, though parameters are only compared"
    assert still_works(comms)


@on_ranks(2, 3)
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(comms):
    last = comms.rank == comms.world_size - 1
    for options in ({"bucket_cap_mb": 0.0}, {"static_graph": True}):
        name, value = next(iter(options.items()))
        with pytest.raises(RuntimeError, match=rf"rank {comms.rank}: .*got {name}=.*{value}"):
            DDP(mlp(), comms, **(options if last else {}))
    lazy = nn.LazyLinear(3) if last else nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match="weight: not initialised"):
        DDP(lazy, comms)
    assert still_works(comms)


# ---- a rank that dies


def die_in_backward(comms, options):
    """How long this rank waited for one that died; the death comes in the third step."""
    by = carrier(options.pop("all_reduce", "backend"), comms)
    ddp = DDP(mlp(), comms, all_reduce=by, **options)
    for step in range(2):
        ddp(data(comms.rank, step)[0]).sum().backward()
    loss = ddp(data(comms.rank, 2)[0]).sum()
    if comms.rank == 1:
        ddp.module[4].weight.register_post_accumulate_grad_hook(lambda _: os._exit(7))
        loss.backward()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {comms.rank}: .*bucket"):
        loss.backward()
    return time.monotonic() - start


WAYS = [{}, {"bucket_cap_mb": SMALL}, {"bucket_cap_mb": SMALL, "all_reduce": "shared"}]


@pytest.mark.parametrize("options", WAYS)
def test_a_rank_that_dies_in_backward_is_an_error_on_the_others(options):
    results = run(die_in_backward, 3, options, dies=[1])
    assert results[1] == 7
    assert max(results[0], results[2]) < SECONDS_AFTER_DEATH


# ---- what raises on all ranks, and the step after it


class Bomb(torch.autograd.Function):
    """The identity, whose backward fails as long as it is armed."""

    armed = False

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        if Bomb.armed:
            raise ArithmeticError("in backward")
        return grad


class Fragile(Branches):
    """Fails in backward: before any gradient has come, or when some are under way."""

    where = "middle"

    def forward(self, x, middle=True):
        if self.where == "end":
            left, right = super().forward(x, middle)
            return Bomb.apply(left), Bomb.apply(right)
        hidden = Bomb.apply(self.norm(self.first(x)))
        return self.left(hidden) + self.middle(hidden), self.right(hidden)


def after_one_process(comms, module, steps):
    """The parameters after training on all ranks' batches in one process, steps given."""
    optimizer = sgd(module)
    module.train()
    for step in steps:
        optimizer.zero_grad()
        for rank in range(comms.world_size):
            x, y = data(rank, step)
            (loss_of(module(x), y) / comms.world_size).backward()
        optimizer.step()
    return module


def without_norm(module):
    module.norm = nn.Identity()  # its statistics would differ between shards and whole
    return module


OPTIONS = [
    {**view, **cap, **more}
    for view in VIEWS
    for cap in ({}, {"bucket_cap_mb": SMALL})
    for more in ({}, {"find_unused_parameters": True}, {"static_graph": True})
]


@on_ranks(1, 2, 3)
def test_a_backward_that_raised_leaves_no_trace(comms):
    for options in OPTIONS:
        for where in ("end", "middle"):
            for fail_at in (0, 1, 3):
                module = without_norm(Fragile())
                module.where = where
                broadcast_parameters(module, comms)
                single = copy.deepcopy(module)
                ddp = DDP(module, comms, **options)
                optimizer = sgd(ddp)
                for step in range(5):
                    x, y = data(comms.rank, step)
                    for Bomb.armed in (True, False) if step == fail_at else (False,):
                        optimizer.zero_grad()
                        loss = loss_of(ddp(x), y)
                        if Bomb.armed:
                            with pytest.raises(ArithmeticError):
                                loss.backward()
                        else:
                            loss.backward()
                            optimizer.step()
                check_replicas(module, comms)
                expected = after_one_process(comms, single, range(5))
                for p, q in zip(module.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(p, q, msg=f"{options} {where} {fail_at}")


@on_ranks(2)
def test_gradients_that_are_zeroed_in_place_after_a_backward_that_raised(comms):
    module = without_norm(Fragile())
    ddp = DDP(module, comms, bucket_cap_mb=SMALL)
    for step in range(4):
        single = copy.deepcopy(module)
        for Bomb.armed in (True, False):
            module.zero_grad(set_to_none=False)
            loss = loss_of(ddp(data(comms.rank, step)[0]), data(comms.rank, step)[1])
            if Bomb.armed:
                time.sleep(0.2 * comms.rank)  # so that the other's buckets are still under way
                with pytest.raises(ArithmeticError):
                    loss.backward()
            else:
                loss.backward()
        after_one_process(comms, single, [step])
        for p, q in zip(module.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@on_ranks(2)
def test_an_exception_inside_no_sync_does_not_leave_it_on(comms):
    ddp = DDP(mlp(), comms)
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    with pytest.raises(KeyError), ddp.no_sync(), ddp.no_sync():
        raise KeyError
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        ddp(data(comms.rank, 1)[0]).sum().backward()
        grads = comms.all_gather(ddp.module[0].weight.grad)
        assert not torch.equal(grads[0], grads[1]), "the inner block ended, the outer did not"
    ddp(data(comms.rank, 0)[0]).sum().backward()
    grads = comms.all_gather(ddp.module[0].weight.grad)
    assert torch.equal(grads[0], grads[1])


@on_ranks(2)
def test_a_forward_that_raised_leaves_no_trace(comms):
    ddp = DDP(Branches(), comms)
    optimizer = sgd(ddp)
    for step in range(4):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ddp(torch.ones(2, WIDTH + 1))
        accumulating(comms)(ddp, optimizer, step)
    check_replicas(ddp.module, comms)


@on_ranks(1, 2, 3)
def test_unused_parameters_are_named_by_the_next_forward_on_every_rank(comms):
    for view in VIEWS:
        for cap in ({}, {"bucket_cap_mb": SMALL}):
            for bad_step in (0, 2):
                module = without_norm(Branches())
                broadcast_parameters(module, comms)
                single = copy.deepcopy(module)
                ddp = DDP(module, comms, **view, **cap)
                optimizer = sgd(ddp)
                for step in range(4):
                    x, y = data(comms.rank, step)
                    if step == bad_step:
                        optimizer.zero_grad()
                        loss_of(ddp(x, middle=False), y).backward()
                        message = (
                            f"^rank {comms.rank}: expected a gradient for every parameter, but the "
                            r"last backward brought none for .*middle.weight, middle.bias.* "
                            r"of 8\); .* find_unused_parameters=True"
                        )
                        with pytest.raises(RuntimeError, match=message):
                            ddp(x)
                    optimizer.zero_grad()
                    loss_of(ddp(x), y).backward()
                    optimizer.step()
                check_replicas(module, comms)
                expected = after_one_process(comms, single, range(4))
                for p, q in zip(module.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(p, q)


@on_ranks(2)
def test_evaluating_after_an_incomplete_backward_needs_no_gradients(comms):
    ddp = DDP(Branches(), comms)
    x, y = data(comms.rank, 0)
    loss_of(ddp(x, middle=False), y).backward()
    with torch.no_grad():
        ddp(x)
    with pytest.raises(RuntimeError, match=r"middle\.weight"):
        ddp(x)
