"""Compression in DDP: in microddp's and PyTorch's, against PyTorch's hooks, and its mistakes."""

import copy

import numpy as np
import pytest
import torch
from ddp_pairs import SMALL, Pair, data, errors_from_warnings_of_ours_only, mlp
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp import DDP
from microddp.compression import (
    Compression,
    RandomK,
    compress,
    compress_hook,
    compressor,
    hook,
)
from microddp.replicas import check_replicas
from microddp.strategies import STRATEGIES

NAMES = ("top-k:0.1", "random-k:0.1", "int8", "sign", "power:2", "fp16", "bf16")


def gradients_of(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


@on_ranks(2, 3)
def test_both_wrappers_take_the_hook_and_do_the_same(comms):
    for name in NAMES:
        for options in ({"bucket_cap_mb": SMALL}, {"find_unused_parameters": True}):
            pair = Pair(comms, mlp, **options)
            pair.ours.register_comm_hook(*hook(name, comms))
            pair.theirs.register_comm_hook(*hook(name, comms))

            def body(ddp, optimizer, step):
                optimizer.zero_grad()
                with ddp.no_sync():
                    mse_loss(ddp(data(comms.rank, step)[0]), data(comms.rank, step)[1]).backward()
                mse_loss(ddp(data(comms.rank, -step)[0]), data(comms.rank, -step)[1]).backward()
                optimizer.step()

            pair.train(body, what=(name, options))


def lost(comms, make_hook, forget=None, steps=5):
    """By how much the means and what is left differ from all gradients there were.

    The model never changes, so its gradients are known. Buckets are dealt anew after the first.
    """
    torch.manual_seed(0)
    module = mlp().double()
    alone = copy.deepcopy(module)
    ddp = DDP(module, comms, bucket_cap_mb=2 * SMALL)
    state, function = make_hook()
    ddp.register_comm_hook(state, function)
    difference = 0
    for step in range(steps):
        x, y = (tensor.double() for tensor in data(comms.rank, step))
        for each in (ddp, alone):
            each.zero_grad()
            mse_loss(each(x), y).backward()
        mean = gradients_of(alone)
        comms.all_reduce_mean(mean)
        difference = difference + mean - gradients_of(module)
        if forget:
            forget(state)
    assert len(ddp.reducer.buckets.all) > 2
    left = torch.cat([state.residuals[p] for p in module.parameters()])
    comms.all_reduce_mean(left)
    return (difference - left).abs().max().item()


@on_ranks(2, 3)
def test_nothing_is_lost_when_buckets_are_dealt_anew(comms):
    for name in ("top-k:0.1", "random-k:0.1", "int8", "sign", "power:2"):
        assert lost(comms, lambda name=name: hook(name, comms)) < 1e-12, name


@on_ranks(2)
def test_the_mistakes_people_make_are_noticed(comms):
    def own_seed():
        own = RandomK(0.1)
        own.generator.manual_seed(comms.rank)
        return Compression(own, comms), compress_hook

    def forget(state):
        state.residuals.clear()
        state._together.clear()

    def with_the_bucket(state):  # kept for each bucket, and not for each parameter
        if len(state._together) == 1:
            forget(state)

    assert lost(comms, own_seed) > 1e-3
    assert lost(comms, lambda: hook("top-k:0.1", comms), with_the_bucket) > 1e-3


@on_ranks(2, 3)
def test_power_sgd_is_pytorchs_from_the_second_iteration_on(comms):
    """PyTorch's begins then, with factors that it draws; before, both just average."""
    torch.manual_seed(0)
    pair = Pair(comms, mlp, bucket_cap_mb=1)
    theirs = powerSGD_hook.PowerSGDState(
        None, 2, start_powerSGD_iter=2, min_compression_rate=1, random_seed=7
    )
    pair.theirs.register_comm_hook(theirs, powerSGD_hook.powerSGD_hook)
    state, compress = hook("power:2", comms)
    whole = Compression(compressor("top-k:1.0"), state.comms)
    step = 0

    def ours(state, bucket):
        if step < 2:
            return compress_hook(whole, bucket)
        if step == 2:
            generator = torch.Generator().manual_seed(
                np.random.RandomState(7).randint(1_000_000_000)
            )
            for p in bucket.parameters():
                if p.dim() == 2:
                    drawn = torch.randn(1, p.shape[1], 2, generator=generator)
                    state.compressor.factors[p] = drawn[0]
        return compress(state, bucket)

    pair.ours.register_comm_hook(state, ours)
    for step in range(8):
        for ddp, optimizer in zip((pair.ours, pair.theirs), pair.optimizers, strict=True):
            optimizer.zero_grad()
            x, y = data(comms.rank, step)
            with errors_from_warnings_of_ours_only():
                mse_loss(ddp(x), y).backward()
            optimizer.step()
        for p, q in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6, msg=f"step {step}")
    check_replicas(pair.ours.module, comms)
    assert len(state.compressor.factors) == sum(p.dim() == 2 for p in pair.ours.parameters())


@on_ranks(2)
def test_bf16_works_where_pytorchs_own_hook_is_refused(comms):
    for wrapper in (DDP, TorchDDP):
        ddp = wrapper(mlp())
        ddp.register_comm_hook(*hook("bf16", comms))
        ddp(data(comms.rank, 0)[0]).sum().backward()
        assert gradients_of(ddp).isfinite().all()


@on_ranks(2)
def test_what_was_kept_goes_on_bitwise_from_a_state(comms):
    for name in NAMES:
        torch.manual_seed(0)
        whole, first = mlp(), None
        states = []
        for parts in ((6,), (3, 3)):
            module, saved, step = copy.deepcopy(whole), None, 0
            for steps in parts:
                ddp = DDP(module, comms, bucket_cap_mb=SMALL)
                state, function = hook(name, comms)
                ddp.register_comm_hook(state, function)
                # Buckets as they are after the first backward, in both.
                ddp(data(comms.rank, 0)[0]).sum().backward()
                if saved is None:
                    saved = state.state_dict(module)
                state.load_state_dict(saved, module)
                for _ in range(steps):
                    ddp.zero_grad()
                    x, y = data(comms.rank, step)
                    mse_loss(ddp(x), y).backward()
                    step += 1
                saved = state.state_dict(module)
                ddp.reducer.remove()
            states.append((gradients_of(module), saved["residuals"]))
        (first, kept), (second, also_kept) = states
        assert torch.equal(first, second), name
        assert kept.keys() == also_kept.keys() == dict(whole.named_parameters()).keys()
        assert all(torch.equal(kept[key], also_kept[key]) for key in kept), name


@on_ranks(2)
def test_a_name_that_is_not_known_is_an_error_on_every_rank(comms):
    with pytest.raises(ValueError, match="expected one of top-k"):
        hook("zip", comms)


@on_ranks(1)
def test_a_second_compressor_is_refused_and_the_first_goes_on(comms):
    strategy = STRATEGIES["ddp"](nn.Linear(4, 4), comms)
    compress(strategy, "int8")
    first = strategy.compression
    with pytest.raises(RuntimeError, match="got a second"):
        compress(strategy, "sign")
    assert strategy.compression is first
