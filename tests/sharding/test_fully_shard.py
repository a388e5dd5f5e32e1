"""Stage 3 against PyTorch's DDP and its fully_shard: weights, bytes, memory, and odd modules."""

import copy
import gc
import itertools
import warnings
from dataclasses import dataclass

import pytest
import torch
from models import OPTIMIZERS, batch, by_ddp, odd, storage_bytes, used_twice, weights
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from microddp.message_counter import MessageCounter
from microddp.parts import clip_grad_norm
from microddp.sharding import ShardedGradients, fully_shard, shard_blocks
from microddp.workloads import Transformer


def sharded_odd(comms, **options):
    """A block for each layer, two of which have a weight in common, and one used twice."""
    model = odd()
    for layer in (model.first, model.twice, model.tied, model.frozen, model.last):
        fully_shard(layer, comms, **options)
    return model, fully_shard(model, comms, **options)


def by_stage_3(comms, kind, steps=20, clip=None, **options):
    model, sharded = sharded_odd(comms, **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
        if clip:
            clip_grad_norm(model.parameters(), clip, comms)
        optimizer.step()
    sharded.remove()
    return weights(model)


def layers(comms, count=4, width=64, **options):
    """A block for each of some equal layers, whose values any of the ranks divide."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    for layer in model:
        fully_shard(layer, comms, **options)
    return model, fully_shard(model, comms, **options)


@on_ranks(1, 2, 3)
def test_trains_as_ddp_does(comms):
    for kind in OPTIMIZERS:
        right = by_ddp(comms, kind)
        for options in ({"collectives": "ring"}, {"collectives": "shared"}):
            for free in (True, False):
                found = by_stage_3(comms, kind, reshard_after_forward=free, **options)
                if comms.world_size <= 2:  # a sum of two has one order
                    assert torch.equal(found, right), (kind, options, free)
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
                assert torch.equal(found, comms.all_gather(found)[0])


@on_ranks(2, 3)
def test_clipped_by_the_norm_of_all_ranks(comms):
    found, right = by_stage_3(comms, "sgd", clip=0.1), by_ddp(comms, "sgd", clip=0.1)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def transformer():
    torch.manual_seed(0)
    return Transformer(vocabulary=32, dim=16, depth=3, heads=2, context=8)


def tokens(comms, step):
    generator = torch.Generator().manual_seed(100 * step + comms.rank)
    return torch.randint(32, (3, 8), generator=generator)


def train_transformer(model, comms, kind, steps=20):
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        numbers = tokens(comms, step)
        logits = model(numbers).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), numbers.roll(-1, 1).flatten()).backward()
        optimizer.step()


@on_ranks(2, 3)
def test_trains_as_pytorchs_own_does(comms):
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own, of its jit
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard as theirs
    mesh = init_device_mesh("cpu", (comms.world_size,))
    for kind in OPTIMIZERS:
        reference = transformer()
        for module in (*reference.blocks, reference):
            theirs(module, mesh=mesh)
        train_transformer(reference, comms, kind)
        right = torch.cat([p.full_tensor().flatten() for p in reference.parameters()]).detach()
        model = transformer()
        sharded = shard_blocks(model, comms, least_bytes=1)
        assert len(sharded.context.modules) == 4
        train_transformer(model, comms, kind)
        sharded.remove()
        found = weights(model)
        if comms.world_size <= 2:  # a sum of two has one order
            assert torch.equal(found, right), (kind, (found - right).abs().max())
        elif kind == "sgd":
            # Not with AdamW, which makes steps of full size of a gradient that is rounding alone:
            # the bias of keys, which no softmax can see.
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@on_ranks(2, 4)
def test_bytes_sent(comms):
    n = comms.world_size
    for free, times in ((True, 3), (False, 2)):
        model, _ = layers(comms, reshard_after_forward=free, collectives="ring")
        size = 4 * 64 * 64 * 4
        for _ in range(3):  # with what is gathered ahead, from the second on
            with MessageCounter(comms) as counter:
                model(torch.ones(2, 64)).sum().backward()
            assert sum(m.nbytes for m in counter.messages) == times * size * (n - 1) / n
        with MessageCounter(comms) as counter, torch.no_grad():
            model(torch.ones(2, 64))
        assert sum(m.nbytes for m in counter.messages) == size * (n - 1) / n


@on_ranks(2, 4)
def test_bytes_kept_at_each_moment(comms):
    n = comms.world_size
    model, sharded = layers(comms, collectives="ring")
    groups, one = sharded.context.groups, 64 * 64 * 4
    optimizer = torch.optim.Adam(model.parameters())
    held = []

    def look(*_):
        held.append(storage_bytes(*(group.unsharded for group in groups)))

    for layer in model:
        layer.register_forward_pre_hook(look)
        layer.weight.register_hook(look)
    for _ in range(2):
        held.clear()
        model(torch.ones(2, 64)).sum().backward()
        assert storage_bytes(*(group.unsharded for group in groups)) == 0
        assert storage_bytes(*(p.grad for p in model.parameters())) == 4 * one / n
        optimizer.step()
        optimizer.zero_grad()
    # The block that computes, and the next one, which comes meanwhile.
    assert max(held) == 2 * one
    assert storage_bytes(*model.parameters()) == 4 * one / n
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    assert storage_bytes(*moments) == 2 * 4 * one / n


@on_ranks(2, 3)
def test_accumulated_first_and_sent_once(comms):
    ends = []
    for accumulate in (True, False):
        model, sharded = sharded_odd(comms, collectives="ring")
        with MessageCounter(comms) as counter:
            losses = []
            for step in range(3):
                loss = mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1])
                if accumulate and step < 2:
                    with sharded.no_sync():
                        loss.backward()
                elif accumulate:
                    before = sum(m.nbytes for m in counter.messages)
                    loss.backward()
                    reduced = sum(m.nbytes for m in counter.messages) - before
                    assert reduced > 0
                else:
                    losses.append(loss)
            if losses:
                sum(losses).backward()
        ends.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*ends)


@on_ranks(2)
def test_a_second_backward_adds_to_the_mean(comms):
    model, _ = sharded_odd(comms)

    def gradients(*steps):
        for step in steps:
            mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    for one, other, together in zip(gradients(0), gradients(1), gradients(0, 1), strict=True):
        torch.testing.assert_close(together, one + other)


class Half(nn.Module):
    """Uses one of its layers on some ranks only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        return self.a(x) + (self.b(x) if both else 0)


@on_ranks(2, 3)
def test_what_is_not_used(comms):
    model = nn.Sequential(Half(), nn.Linear(4, 4))
    for block in model:
        fully_shard(block, comms)
    sharded = fully_shard(model, comms)
    model[0](torch.ones(1, 4), both=comms.rank == 0).sum().backward()
    assert all(p.grad is None for p in model[1].parameters()), "in no forward"
    mine = any(p.grad is not None for p in model[0].b.parameters())
    assert any(comms.all_gather_data(mine)), "rank 0 used it"
    sharded.remove()
    assert model[0].b.bias.shape == (4,)


@on_ranks(2, 3)
def test_a_parameter_that_a_rank_did_not_use_counts_as_zero_there(comms):
    half = Half()
    before = half.b.bias.detach().clone()
    sharded = fully_shard(half, comms)
    optimizer = torch.optim.SGD(half.parameters(), lr=1.0)
    half(torch.ones(1, 4), both=comms.rank == 0).sum().backward()
    optimizer.step()
    sharded.remove()
    moved = comms.all_gather(before)[0] - half.b.bias.detach()
    torch.testing.assert_close(moved, torch.full((4,), 1 / comms.world_size))


@on_ranks(2, 3)
def test_a_layer_in_the_midst_that_only_one_rank_uses_keeps_the_order(comms):
    """Its gradients are complete early on one rank, and at the end of backward on others."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), Half(), nn.Linear(4, 4)])
    x = torch.full((2, 4), comms.rank + 1.0)

    def loss():
        first, half, last = model
        return last(half(first(x), both=comms.rank == 0)).square().sum()

    loss().backward()
    none = torch.zeros(())
    grads = [none.expand_as(p) if p.grad is None else p.grad for p in model.parameters()]
    right = [comms.all_gather(grad.contiguous()).mean(0) for grad in grads]
    model.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    for block in model:
        fully_shard(block, comms, collectives="ring")
    sharded = fully_shard(model, comms, collectives="ring")
    loss().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    sharded.remove()
    for p, old, gradient in zip(model.parameters(), before, right, strict=True):
        torch.testing.assert_close(p.detach(), old - gradient)


@on_ranks(2)
def test_gradients_that_come_in_several_portions(comms):
    ends = []
    for recomputed in (False, True):
        layer, _ = used_twice(comms, recomputed, fully_shard)
        ends.append(torch.cat([p.grad for p in layer.parameters() if p.grad is not None]))
    torch.testing.assert_close(*ends)


@on_ranks(2)
def test_modules_that_compute_again_in_backward(comms):
    ends = []
    for reentrant in (None, False, True):
        model, _ = layers(comms, collectives="ring")
        x = torch.ones(2, 64, requires_grad=True)
        with MessageCounter(comms) as counter:
            for layer in model:
                again = {"use_reentrant": reentrant}
                x = layer(x) if reentrant is None else checkpoint(layer, x, **again)
                x = torch.tanh(x)
            x.sum().backward()
        sent = sum(m.nbytes for m in counter.messages)
        assert sent == 3 * 4 * 64 * 64 * 4 / 2, "a block is gathered once in backward, all the same"
        ends.append(torch.cat([p.grad for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@on_ranks(2, 3)
def test_lower_precision_and_master_weights(comms):
    """Against the same computed by hand on one rank: forward in bf16, sums and update in fp32."""
    for reduce_dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        master = [p.detach().clone() for p in model.parameters()]
        for layer in model:
            fully_shard(layer, comms, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
        sharded = fully_shard(model, comms, **dtypes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        inputs = torch.randn(comms.world_size, 5, 8, generator=torch.Generator().manual_seed(1))
        out = model(inputs[comms.rank])
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        low = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
        total = [torch.zeros_like(p, dtype=reduce_dtype) for p in master]
        for x in inputs:
            for p, value in zip(low.parameters(), master, strict=True):
                p.data, p.grad = value.bfloat16(), None
            low(x.bfloat16()).float().square().mean().backward()
            for sum_, p in zip(total, low.parameters(), strict=True):
                sum_ += p.grad.to(reduce_dtype) * (1 / comms.world_size)
        right = [p - 0.5 * g.float() for p, g in zip(master, total, strict=True)]
        whole = []
        for group in sharded.context.groups:  # the masters, not what is used
            values = comms.all_gather(group.shard).flatten()
            whole += [values[param.flat_range] for param in group.params]
        for found, expected in zip(whole, right, strict=True):
            tight = reduce_dtype == torch.float32 or comms.world_size == 2
            tolerance = 1e-6 if tight else 1e-3
            torch.testing.assert_close(found, expected.flatten(), rtol=tolerance, atol=tolerance)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(self.other(self.one(x)))


@on_ranks(2)
def test_a_block_used_twice_in_lower_precision(comms):
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Twice()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(comms.rank)).bfloat16()
        if sharded:
            for block in (model.one, model.other):
                fully_shard(block, comms, param_dtype=torch.bfloat16)
            handle = fully_shard(model, comms, param_dtype=torch.bfloat16)
        else:
            model.bfloat16()
        model(x).float().sum().backward()
        if not sharded:
            named = model.named_parameters()
            ends.append({name: comms.all_gather(p.grad.float()).mean(0) for name, p in named})
            continue
        means = {}
        for group in handle.context.groups:
            mine = torch.zeros(group.shard_numel)
            for param in group.local_params:
                mine[param.shard_range] = param.parameter.grad
            values = comms.all_gather(mine).flatten()
            means |= {param.name: values[param.flat_range] for param in group.params}
        ends.append(means)
    for name, right in ends[0].items():
        torch.testing.assert_close(ends[1][name], right.flatten(), rtol=0.02, atol=0.02)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3).double()

    def forward(self, x):
        return self.last(self.first(x).double())


@on_ranks(2, 3)
def test_parameters_of_several_dtypes(comms):
    torch.manual_seed(0)
    model = Mixed()
    x = torch.full((1, 3), float(comms.rank + 1))
    model(x).square().sum().backward()
    right = [comms.all_gather(p.grad).mean(0) for p in model.parameters()]
    model.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    sharded = fully_shard(model, comms)
    assert [group.unsharded.dtype for group in sharded.groups] == [torch.float32, torch.float64]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).square().sum().backward()
    optimizer.step()
    sharded.remove()
    for p, old, gradient in zip(model.parameters(), before, right, strict=True):
        torch.testing.assert_close(p.detach(), old - gradient)


@on_ranks(2)
def test_buffers_and_evaluation(comms):
    torch.manual_seed(comms.rank)  # rank 0's come to all
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].running_mean += comms.rank
    fully_shard(model[0], comms, reshard_after_forward=False)
    sharded = fully_shard(model, comms, reshard_after_forward=False)
    assert model[1].running_mean.tolist() == [0] * 8
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    with torch.no_grad():
        before = model(x)
    assert storage_bytes(*(u.unsharded for u in sharded.context.groups)) == 0, (
        "nobody comes back for it"
    )
    assert torch.equal(comms.all_gather(before)[0], before)
    model.train()
    model(x)  # and no backward
    model(x).sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        assert not torch.equal(model(x), before), "what was left whole is not used again"
        assert torch.equal(model(x), comms.all_gather(model(x))[0])


@on_ranks(2)
def test_a_frozen_block_is_freed_in_backward(comms):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in model[:3]:
        layer.requires_grad_(False)
    for layer in model:
        fully_shard(layer, comms)
    sharded = fully_shard(model, comms)
    x = torch.ones(2, 8, requires_grad=True)
    held = []
    x.register_hook(
        lambda _: held.append(sum(not group.is_sharded for group in sharded.context.groups))
    )
    for _ in range(2):
        model(x).sum().backward()
    assert max(held) <= 1, "the first, whose backward is just over"


@on_ranks(2)
def test_after_a_backward_that_raised(comms):
    for collectives in ("auto", "ring"):  # the latter are under way when it raises
        raises_and_goes_on(comms, collectives)


def raises_and_goes_on(comms, collectives):
    model, _ = sharded_odd(comms, collectives=collectives)
    x, y = batch(comms, 0)
    mse_loss(model(x), y).backward()
    right = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    def fail(_):
        raise ArithmeticError("on purpose")

    loss = mse_loss(model(x), y)
    handle = model.first.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    mse_loss(model(x), y).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, right))


@on_ranks(1, 2)
def test_gradients_may_be_cleared_between_forward_and_backward(comms):
    model, _ = layers(comms, reshard_after_forward=False)
    x = torch.full((2, 64), comms.rank + 1.0)
    model(x).sum().backward()
    right = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        loss = model(x).sum()
        model.zero_grad()
        loss.backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], right))


@on_ranks(1, 2)
def test_a_forward_between_backward_and_step_hides_no_gradient(comms):
    model, sharded = layers(comms, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 64), comms.rank + 1.0)
    model(x).sum().backward()
    shards = [param.sharded_data for param in sharded.context.local_params]
    before = [shard.clone() for shard in shards]
    model(x)  # to log something, say
    optimizer.step()
    assert not any(map(torch.equal, before, shards))


class Skipped(nn.Module):
    """Returns its input, the very tensor, where it is told to."""

    def __init__(self):
        super().__init__()
        self.inner, self.skips = nn.Linear(6, 6), False

    def forward(self, x):
        return x if self.skips else x + self.inner(x)


@on_ranks(2)
def test_blocks_that_return_their_input_on_one_rank_only(comms):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *(Skipped() for _ in range(3)))
    model[2].skips = comms.rank == 0
    x = torch.full((2, 6), comms.rank + 1.0)
    for collectives in ("ring", "shared", "backend"):
        model(x).square().sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        right = []
        for p in model.parameters():
            right.append(torch.zeros_like(p) if p.grad is None else p.grad)
            comms.all_reduce_mean(right[-1])
        model.zero_grad()
        for block in model:
            fully_shard(block, comms, collectives=collectives)
        sharded = fully_shard(model, comms, collectives=collectives)
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        sharded.remove()
        for p, old, gradient in zip(model.parameters(), before, right, strict=True):
            torch.testing.assert_close(p.detach(), old - gradient)
            p.data = old


@on_ranks(2)
def test_outputs_of_every_block_gather_none_once_more(comms):
    class Every(nn.Sequential):
        def forward(self, x):
            return list(
                itertools.accumulate(self, lambda x, layer: torch.tanh(layer(x)), initial=x)
            )

    model = Every(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for block in model:
        fully_shard(block, comms, collectives="ring")
    fully_shard(model, comms, collectives="ring")
    for _ in range(2):
        with MessageCounter(comms) as counter:
            sum(x.sum() for x in model(torch.ones(2, 8))).backward()
        assert sum(m.nbytes for m in counter.messages) == 3 * (4 * 8 * 8 * 4) / 2


@on_ranks(1)
def test_after_a_forward_that_raised_where_the_model_itself_is_never_called(comms):
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for block in model:
        fully_shard(block, comms)
    sharded = fully_shard(model, comms)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model[0](torch.ones(2, 5))
    assert not sharded.context.forward_stack
    assert all(group.is_sharded for group in sharded.context.groups)


@on_ranks(2)
def test_a_module_without_parameters_and_one_with_gradients(comms):
    assert not fully_shard(nn.ReLU(), comms).whole_state_dict()
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    fully_shard(model, comms, param_dtype=torch.bfloat16)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad.shape == p.shape and p.grad.eq(2).all() for p in model.parameters())


@on_ranks(2)
def test_what_is_unfrozen_later_is_trained(comms):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 4))
    fully_shard(model[0], comms)
    fully_shard(model, comms)
    model[0].requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad is not None


@on_ranks(2)
def test_made_whole_after_a_backward_that_sent_nothing(comms):
    model, sharded = layers(comms, param_dtype=torch.bfloat16)
    with sharded.no_sync():
        model(torch.ones(1, 64)).sum().backward()
    sharded.remove()
    assert {p.shape for p in model.parameters()} == {(64, 64)}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_a_model_that_is_let_go_leaves_nothing(comms):
    model, sharded = layers(comms)
    model(torch.ones(1, 64)).sum().backward()
    shard = sharded.context.groups[0].shard
    del model, sharded
    gc.collect()
    assert len(gc.get_referrers(shard)) <= 1


@on_ranks(2)
def test_refused(comms):
    model = nn.Linear(3, 3)
    fully_shard(model, comms)
    with pytest.raises(ValueError, match=r"rank \d: expected a module that is not sharded"):
        fully_shard(model, comms)
    with pytest.raises(ValueError, match="dense gradients, got rank 1: sparse ones of weight"):
        fully_shard(nn.Embedding(3, 3, sparse=comms.rank == 1), comms)
    outer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sharded = fully_shard(outer, comms)
    with pytest.raises(ValueError, match="got a part of one: shard blocks first"):
        fully_shard(outer[0], comms)
    sharded.remove()
    fully_shard(outer[0], comms)
    act = nn.GELU()  # a part without parameters belongs to nobody, and can be copied
    fully_shard(nn.Sequential(nn.Linear(3, 3), act), comms)
    assert not vars(copy.deepcopy(act)).keys() - vars(nn.GELU()).keys()
    with pytest.raises(RuntimeError, match=r"expected the same parameters.*weight"):
        fully_shard(nn.Linear(3 + comms.rank, 3), comms)
    with pytest.raises(ValueError, match="expected one of auto, ring, shared, backend, got 'x'"):
        fully_shard(nn.Linear(3, 3), comms, collectives="x")


class Branches(nn.Module):
    """Nested blocks with parameters of their own, branches, and several outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.pair = nn.Linear(4, 4), nn.Linear(4, 4), Pair()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        one, other = self.pair(self.left(x) * self.scale, self.right(x))
        return Outputs(one * self.scale, other)


@dataclass
class Outputs:
    one: torch.Tensor
    other: torch.Tensor


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x, y):
        x = self.first(x) + self.shift
        return x, torch.tanh(self.second(y) - self.shift) * x


@on_ranks(2, 3)
def test_branches_nested_blocks_and_outputs_in_a_dataclass(comms):
    torch.manual_seed(0)
    model = Branches()
    x = torch.full((2, 4), comms.rank + 1.0)

    def step(model, times=1):
        outputs = model(x)
        loss = outputs.one.square().sum() + outputs.other.sum()
        for time in range(times):
            loss.backward(retain_graph=time + 1 < times)

    reference = copy.deepcopy(model)
    step(reference)
    with torch.no_grad():
        for p in reference.parameters():
            p -= 2 * comms.all_gather(p.grad).mean(0)
    for block in (model.left, model.right, model.pair.first, model.pair.second, model.pair):
        fully_shard(block, comms, collectives="ring")
    sharded = fully_shard(model, comms, collectives="ring")
    with torch.no_grad():
        model(x)  # an evaluation between leaves nothing behind
    step(model, times=2)
    assert storage_bytes(*(group.unsharded for group in sharded.context.groups)) == 0
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    sharded.remove()
    torch.testing.assert_close(weights(model), weights(reference))


@on_ranks(2)
def test_lists_in_a_block_are_part_of_it(comms):
    def block():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    model = nn.ModuleDict({"body": nn.Sequential(block(), block()), "head": nn.Linear(64, 2)})
    sharded = shard_blocks(model, comms, least_bytes=1)
    body = model["body"]
    assert [one.module for one in sharded.context.modules] == [body[0], body[1], model]
    assert [len(group.params) for group in sharded.groups] == [2], "the head's"


@on_ranks(3)
def test_what_was_made_whole_can_be_sharded_again(comms):
    """Among fewer ranks, in another precision: nothing of the first time is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    fully_shard(model[0], comms)
    fully_shard(model, comms).remove()
    ShardedGradients(model, comms).remove()
    pair = comms.subgroup([0, 1])
    if pair is None:
        return
    before = weights(model)
    fully_shard(model[0], pair, param_dtype=torch.bfloat16)
    sharded = fully_shard(model, pair, param_dtype=torch.bfloat16)
    assert all(group.shard_params for group in sharded.context.groups)
    assert all(group.comms is pair for group in sharded.context.groups)
    assert model(torch.ones(3, 4)).dtype == torch.bfloat16
    sharded.remove()
    torch.testing.assert_close(weights(model)[0], before[0], rtol=0.01, atol=0.01)


@on_ranks(2)
def test_few_blocks_are_whole_at_a_time_also_in_checkpoints(comms):
    """Blocks of a model that recomputes each of them, and that is a block itself."""
    for reentrant in (False, True):
        model = Recomputed(reentrant)
        for layer in model.layers:
            fully_shard(layer, comms, collectives="ring")
        sharded = fully_shard(model, comms, collectives="ring")
        held = []

        def look(*_, groups=sharded.context.groups, held=held):
            held.append(sum(not group.is_sharded for group in groups))

        for layer in model.layers:
            layer.weight.register_hook(look)
        for _ in range(2):
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        assert len(held) == 12
        assert max(held) <= 3, "its own, the next, and what backward has just left"


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@on_ranks(2, 3)
def test_a_weight_that_the_enclosing_module_uses_after_its_block(comms):
    """The block may not release it: the module around it is not through."""

    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(2)))
        model[1].weight = model[0].weight
        return model

    x, alone = torch.linspace(-1, 1, 15).view(3, 5), tied()
    for free in (True, False):
        model = tied()
        fully_shard(model[0], comms, collectives="ring")
        sharded = fully_shard(model, comms, free, collectives="ring")
        for step in (alone, model):
            step(x).square().sum().backward()
            torch.optim.SGD(step.parameters(), lr=0.1).step()
            step.zero_grad()
        sharded.remove()
        torch.testing.assert_close(weights(model), weights(alone))
        alone = tied()


@on_ranks(2, 3)
def test_every_parameter_has_a_gradient_if_only_an_empty_one(comms):
    model, _ = sharded_odd(comms, collectives="ring")
    optimizer = torch.optim.AdamW(model.parameters())
    empty = 0
    for step in range(2):
        mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
        for p in model.parameters():
            assert (p.grad is not None) == p.requires_grad
            if p.grad is not None:
                assert (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype)
                empty += not p.numel()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(comms.all_gather_data(empty)), "a rank has nothing of some parameter"


class Nested(nn.Module):
    """Blocks that are lists of layers, and never called themselves."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            for layer in block:
                x = layer(x)
        return x


@on_ranks(2)
def test_lists_in_lists_are_no_blocks(comms):
    torch.manual_seed(0)
    model = Nested()
    whole, x = copy.deepcopy(model), torch.randn(3, 8)
    shard_blocks(model, comms, least_bytes=1)
    torch.testing.assert_close(model(x), whole(x))


@on_ranks(2)
def test_ranks_that_train_other_parameters_are_refused(comms):
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(comms.rank == 0)
    with pytest.raises(RuntimeError, match=r"bias=float32 \(4,\), no gradient on rank 1"):
        fully_shard(model, comms)


@on_ranks(2)
def test_all_gradients_can_be_forgotten(comms):
    """Those of no_sync(), and those of a backward that raised half-way, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, comms)
    sharded, x = fully_shard(model, comms), torch.ones(1, 4) * (comms.rank + 1)
    model(x).sum().backward()
    right = [p.grad.clone() for p in model.parameters()]

    def fail(_):
        raise ArithmeticError

    def raises():
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model(x).sum().backward()
        handle.remove()

    def alone():
        with sharded.no_sync():
            model(x).sum().backward()

    for before in (alone, raises, lambda: (alone(), raises())):
        before()
        sharded.zero_grad()
        model(x).sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), right, strict=True))


@on_ranks(2)
def test_the_norm_of_complex_gradients_has_both_parts(comms):
    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    fully_shard(model, comms)
    model.weight.grad = torch.tensor([3j if comms.rank else 4j])
    assert clip_grad_norm(model.parameters(), 1.0, comms).item() == pytest.approx(5)
    assert model.weight.grad.abs().item() == pytest.approx(0.6 if comms.rank else 0.8)
