"""Stages 1 and 2 against PyTorch's DDP and its ZeroRedundancyOptimizer: weights, bytes, memory."""

import copy

import torch
from models import OPTIMIZERS, SMALL, batch, by_ddp, odd, storage_bytes, used_twice, weights
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss

from microddp.message_counter import MessageCounter
from microddp.model import gradient_bytes
from microddp.parts import clip_grad_norm
from microddp.sharding import ShardedGradients


def by_stage(comms, kind, steps=20, clip=None, **options):
    model = odd()
    sharded = ShardedGradients(model, comms, SMALL, collectives="ring", **options)
    optimizer = OPTIMIZERS[kind](sharded.shards)
    for step in range(steps):
        optimizer.zero_grad()
        mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
        sharded.finish()
        if clip:
            clip_grad_norm(sharded.shards, clip, comms)
        optimizer.step()
        sharded.all_gather()
    return weights(model)


@on_ranks(1, 2, 3)
def test_each_stage_trains_as_ddp_does(comms):
    for kind in OPTIMIZERS:
        right = by_ddp(comms, kind)
        for keep in (True, False):
            found = by_stage(comms, kind, keep_gradients=keep)
            if comms.world_size <= 2:  # a sum of two has one order
                assert torch.equal(found, right), kind
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
            assert torch.equal(found, comms.all_gather(found)[0]), "the same bits on every rank"


class Listed(nn.Module):
    """A list of layers; the last one's weight is also that of a layer which is used first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)
        self.first.weight = self.layers[2].weight

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


@on_ranks(2, 3)
def test_gathered_in_forward_each_layer_waits_for_its_own(comms):
    ends, coming = [], []
    for later in (False, True):
        torch.manual_seed(0)
        model = Listed()
        sharded = ShardedGradients(model, comms, 1e-5, collectives="ring")
        assert len(sharded.groups) == 9, "one for each parameter"
        optimizer = OPTIMIZERS["sgd"](sharded.shards)
        for layer in model.layers if later else ():
            layer.register_forward_pre_hook(
                lambda *_, groups=sharded.groups: coming.append(
                    sum(group._all_gather is not None for group in groups)
                )
            )
        for step in range(4):
            optimizer.zero_grad()
            mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
            sharded.finish()
            optimizer.step()
            (sharded.all_gather_in_forward if later else sharded.all_gather)()
        sharded.remove()
        ends.append(weights(model))
    assert torch.equal(*ends)
    # In the first step nothing is to come. Then the model waits for what is in no layer: the
    # shared weight, first's bias and last's two. A layer waits for what it has.
    assert coming == [0, 0, 0, *3 * [3, 1, 0]]


class Early(nn.Module):
    """Uses a layer of its second block before the first one, too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"only": nn.Linear(7, 7)}) for _ in range(2))
        self.early = self.blocks[1]["only"]

    def forward(self, x):
        return self.early(self.blocks[0]["only"](self.early(x)))


@on_ranks(2)
def test_gathered_in_forward_what_is_used_outside_of_its_block_is_waited_for(comms):
    model = Early()
    sharded = ShardedGradients(model, comms, 1e-5, collectives="ring")
    mine, coming = [*model.early.parameters()], []
    groups = [g for g in sharded.groups if any(p.parameter is q for p in g.params for q in mine)]
    model.early.register_forward_pre_hook(
        lambda *_: coming.extend(group._all_gather is not None for group in groups)
    )
    for _ in range(2):
        model(torch.ones(2, 7)).sum().backward()
        sharded.finish()
        sharded.all_gather_in_forward()
    sharded.remove()
    assert coming == [False] * 8


@on_ranks(2, 3)
def test_clipped_by_the_norm_of_all_ranks(comms):
    right = by_ddp(comms, "sgd", clip=0.1)
    found = by_stage(comms, "sgd", clip=0.1)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    assert (right - by_ddp(comms, "sgd")).abs().max() > 1e-3, "it was clipped"


@on_ranks(1, 2, 3)
def test_accumulated_first_and_sent_once(comms):
    ends = []
    for accumulate in ("no_sync", "one backward"):
        model = odd()
        sharded = ShardedGradients(model, comms, SMALL, collectives="ring")
        optimizer = torch.optim.SGD(sharded.shards, lr=0.1)
        losses = [mse_loss(model(batch(comms, k)[0]), batch(comms, k)[1]) for k in range(3)]
        with MessageCounter(comms) as counter:
            if accumulate == "no_sync":
                with sharded.no_sync():
                    for loss in losses[:-1]:
                        loss.backward()
                losses[-1].backward()
            else:
                sum(losses).backward()
            sharded.finish()
        optimizer.step()
        sharded.all_gather()
        n, size = comms.world_size, gradient_bytes(model)
        sent = sum(message.nbytes for message in counter.messages)
        padding = 4 * n * len(sharded.groups)
        assert size * (n - 1) / n <= sent <= (size + padding) * (n - 1) / n
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


@on_ranks(2)
def test_a_second_backward_adds_to_the_mean(comms):
    for keep in (True, False):
        model = odd()
        sharded = ShardedGradients(model, comms, SMALL, keep_gradients=keep)

        def backward(step, model=model, sharded=sharded):
            mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
            sharded.finish()
            return [shard.grad.clone() for shard in sharded.shards if shard.numel()]

        first = backward(0)
        both = backward(1)
        for shard in sharded.shards:
            shard.grad = None
        second = backward(1)
        for one, other, together in zip(first, second, both, strict=True):
            torch.testing.assert_close(together, one + other)


@on_ranks(2)
def test_gradients_that_come_in_several_portions(comms):
    ends = []
    for recomputed in (False, True):
        _, sharded = used_twice(comms, recomputed, ShardedGradients)
        sharded.finish()
        ends.append(torch.cat([p.grad for p in sharded.shards if p.numel()]))
    torch.testing.assert_close(*ends)


@on_ranks(2, 4)
def test_bytes_sent_and_kept(comms):
    n = comms.world_size
    for keep in (True, False):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        size = gradient_bytes(model)  # which n divides
        sharded = ShardedGradients(model, comms, 0.03, keep_gradients=keep, collectives="ring")
        assert len(sharded.groups) == 2
        optimizer = torch.optim.Adam(sharded.shards)
        with MessageCounter(comms) as counter:
            model(torch.ones(2, 64)).sum().backward()
            sharded.finish()
            optimizer.step()
            sharded.all_gather()
        assert sum(message.nbytes for message in counter.messages) == size * 2 * (n - 1) / n
        means = [shard.grad for shard in sharded.shards if shard.numel()]
        assert sum(mean.nbytes for mean in means) == size / n
        assert storage_bytes(*means) == (size if keep else size / n)
        assert all(parameter.grad is None for parameter in model.parameters())
        moments = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
        assert sum(moment.nbytes for moment in moments) == 2 * size / n


@on_ranks(2, 3)
def test_a_parameter_that_a_rank_did_not_use_counts_as_zero_there(comms):
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    before = copy.deepcopy(model)
    sharded = ShardedGradients(model, comms, SMALL)
    optimizer = torch.optim.SGD(sharded.shards, lr=1.0)
    used = [model[0], model[2]] if comms.rank else list(model)
    sum(layer(torch.ones(1, 4)).sum() for layer in used).backward()
    sharded.finish()
    optimizer.step()
    sharded.all_gather()
    moved = [(b.bias - a.bias).detach() for a, b in zip(model, before, strict=True)]
    mean = [1.0, 1 / comms.world_size, 1.0]
    for got, expected in zip(moved, mean, strict=True):
        torch.testing.assert_close(got, torch.full((4,), expected))
