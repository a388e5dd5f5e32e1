"""Stage 3 in nodes, averaged between them: against PyTorch's, and DDP; bytes are counted."""

import itertools
import warnings

import pytest
import torch
from models import OPTIMIZERS, batch, by_ddp, odd, weights
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss

from microddp.message_counter import MessageCounter
from microddp.parts import clip_grad_norm
from microddp.replicas import check_replicas
from microddp.sharding import fully_shard, nodes_of
from microddp.step import take_step
from microddp.strategies import STRATEGIES

WIDTH, LAYERS = 64, 4
SIZE = LAYERS * WIDTH * WIDTH * 4  # bytes of the parameters below


def grid(comms, node=2, **options):
    """Some equal layers, a block each, sharded in nodes and averaged between them."""
    torch.manual_seed(comms.rank)  # what they begin with must be made equal
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    inside, across = nodes_of(comms, node)
    for layer in model:
        fully_shard(layer, inside, replicas=across, collectives="ring", **options)
    sharded = fully_shard(model, inside, replicas=across, collectives="ring", **options)
    return model, sharded, inside, across


def loss_of(model, comms, step=0):
    generator = torch.Generator().manual_seed(100 * step + comms.rank)
    return model(torch.randn(3, WIDTH, generator=generator)).square().mean()


def by_grid(comms, kind, node, clip=None, steps=20):
    model = odd()
    inside, across = nodes_of(comms, node)
    options = {"replicas": across, "collectives": "ring"}
    for layer in (model.first, model.twice, model.tied, model.frozen, model.last):
        fully_shard(layer, inside, **options)
    sharded = fully_shard(model, inside, **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mse_loss(model(batch(comms, step)[0]), batch(comms, step)[1]).backward()
        if clip:
            clip_grad_norm(model.parameters(), clip, inside)
        optimizer.step()
    sharded.remove()
    return weights(model)


@on_ranks(1, 2, 4)
def test_trains_as_ddp_does(comms):
    for kind, node in itertools.product(OPTIMIZERS, (1, 2, 4)):
        if comms.world_size % node == 0:
            found = by_grid(comms, kind, node)
            torch.testing.assert_close(found, by_ddp(comms, kind), rtol=1e-5, atol=1e-6)
            assert torch.equal(found, comms.all_gather(found)[0]), (kind, node)


@on_ranks(4)
def test_clipped_by_the_norm_over_a_node(comms):
    found, right = by_grid(comms, "sgd", 2, clip=0.1), by_ddp(comms, "sgd", clip=0.1)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_trains_as_pytorchs_own_does_on_a_mesh_of_two_dimensions(comms):
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own, of its jit
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard as theirs
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, sharded, *_ = grid(comms)
    sharded.remove()
    reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    reference.load_state_dict(model.state_dict())
    for module in (*reference, reference):
        theirs(module, mesh=mesh)
    model, sharded, *_ = grid(comms)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(each, comms, step).backward()
            optimizer.step()
    sharded.remove()
    right = torch.cat([p.full_tensor().flatten() for p in reference.parameters()]).detach()
    torch.testing.assert_close(weights(model), right, rtol=1e-5, atol=1e-6)


def sent(model, comms, *among, step=0):
    """Bytes that a step's collectives send among some ranks, this rank's."""
    counters = [MessageCounter(ranks) for ranks in among]
    for counter in counters:
        counter.__enter__()
    loss_of(model, comms, step).backward()
    for counter in counters:
        counter.__exit__(None, None, None)
    return [sum(m.nbytes for m in counter.messages) for counter in counters]


@on_ranks(4)
def test_bytes_inside_nodes_and_between_them(comms):
    for node in (2, 4, 1):
        model, _, inside, across = grid(comms, node)
        n, m = inside.world_size, across.world_size
        for step in range(3):
            within, between = sent(model, comms, inside, across, step=step)
            assert within == 3 * (n - 1) / n * SIZE
            assert between == 2 * (m - 1) / m * SIZE / n


@on_ranks(4)
def test_accumulated_as_shards_and_averaged_once(comms):
    model, sharded, inside, across = grid(comms)
    with sharded.no_all_reduce():
        for step in range(2):
            within, between = sent(model, comms, inside, across, step=step)
            assert (within, between) == (3 / 2 * SIZE, 0)
    assert all(p.grad is None for p in model.parameters()), "no mean yet"
    within, between = sent(model, comms, inside, across, step=2)
    assert (within, between) == (3 / 2 * SIZE, SIZE / 2)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for step in range(3):
        loss_of(model, comms, step).backward()
    for gradient, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad)


@on_ranks(4)
def test_in_lower_precision_both_levels_are_reduced_in_the_dtype_of_the_sum(comms):
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for reduced in (torch.float32, torch.bfloat16):
        model, _, inside, across = grid(comms, **dtypes | {"reduce_dtype": reduced})
        within, between = sent(model, comms, inside, across)
        assert within == (2 * 2 + reduced.itemsize) / 4 / 2 * SIZE
        assert between == SIZE / 2 * reduced.itemsize / 4
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(4)
def test_the_strategy(comms):
    ends, sizes = {}, {}
    for name, options in (("ddp", {}), ("hsdp", {"node": 2, "collectives": "ring"})):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(LAYERS)))
        strategy = STRATEGIES[name](model, comms, **options)
        optimizer = torch.optim.AdamW(strategy.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(comms.rank)
        for _ in range(3):
            take_step(strategy, mse_loss, optimizer, torch.randn(2, 6, 256, generator=generator))
        sizes[name] = strategy.sent_bytes()
        state, _ = strategy.state(model, optimizer)
        strategy.remove()
        check_replicas(model, comms)
        if comms.rank == 0 and name == "hsdp":
            assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        ends[name] = weights(model)
    torch.testing.assert_close(ends["hsdp"], ends["ddp"], rtol=1e-4, atol=1e-5)
    size = LAYERS * (256 * 256 + 256) * 4
    # Three halves of an all-reduce of two ranks, less the last layer's second gather, and an
    # all-reduce of half of it by two.
    assert sizes["hsdp"] == pytest.approx((3 / 2 - 1 / 2 / LAYERS + 1 / 2) * size, rel=0.001)


@on_ranks(2)
def test_equal_nodes_have_the_same_groups_each_time(comms):
    assert nodes_of(comms, 1) is nodes_of(comms, 1)
    assert nodes_of(comms, 1)[1].world_size == nodes_of(comms, 2)[0].world_size == 2
    assert nodes_of(comms) is nodes_of(comms, None)


@on_ranks(3)
def test_nodes_of_different_sizes_are_refused(comms):
    with pytest.raises(ValueError, match=r"rank \d: expected nodes of equal size, got \[2, 1\]"):
        nodes_of(comms, 2)
    for node in (0, -1, 1 + comms.rank):
        with pytest.raises(ValueError, match=rf"rank {comms.rank}: expected one number of ranks"):
            nodes_of(comms, node)


@on_ranks(4)
def test_what_differs_inside_one_node_is_refused_in_all(comms):
    inside, across = nodes_of(comms, 2)
    with pytest.raises(RuntimeError, match=r"the same parameters.*got weight=.*on rank 0"):
        fully_shard(nn.Linear(4 + (comms.rank == 1), 4), inside, replicas=across)
    sparse = nn.Embedding(3, 3, sparse=comms.rank == 3)
    with pytest.raises((ValueError, RuntimeError), match="dense gradients, got rank 1: sparse"):
        fully_shard(sparse, inside, replicas=across)
