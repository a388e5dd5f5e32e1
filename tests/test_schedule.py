"""Steps of every strategy against one process on the whole batch."""

import copy
import itertools

import pytest
import torch
from ranks import on_ranks
from torch.nn.functional import cross_entropy

from microddp.bucketing import BucketedDDPHooks
from microddp.data import ShardedBatches
from microddp.datasets import load_digits
from microddp.ddp import DDP
from microddp.hooks import AllReduceHooks
from microddp.model import FullMLP, ModelConfig, SimpleCNN, gradient_bytes
from microddp.replicas import check_replicas
from microddp.schedule import ddp_step, naive_data_parallel_step, register_ddp_hooks
from microddp.step import take_step
from microddp.step_times import break_down
from microddp.strategies import STRATEGIES, average_gradients
from microddp.timing import NOT_RECORDED, Timeline
from microddp.torch_ddp import strategy_of

STEPS = 20
# Those in parts have tests with the rest of sharding.
REPLICATED = {name: make for name, make in STRATEGIES.items() if make.replicas}
TOLERANCE = 1e-12  # of the weights' norm, in float64; rounding comes to some 1e-16


def optimizer_of(model, kind):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def train(comms, kind, step):
    """The distance of n replicas' weights from one model's, after STEPS steps on equal batches."""
    torch.manual_seed(0)
    replica = FullMLP(32, depth=4, inputs=64, outputs=10).double()
    single = copy.deepcopy(replica)
    optimizers = optimizer_of(replica, kind), optimizer_of(single, kind)
    digits, n = load_digits().train, comms.world_size
    mine = ShardedBatches(digits, 60, comms.rank, n)
    whole = ShardedBatches(digits, 60, 0, 1)
    for _, (x, y), (all_x, all_y) in zip(range(STEPS), mine.epoch(0), whole.epoch(0), strict=False):
        loss = step(replica, cross_entropy, optimizers[0], (x.double(), y), comms)
        assert not loss.requires_grad
        optimizers[1].zero_grad()
        whole_loss = cross_entropy(single(all_x.double()), all_y)
        whole_loss.backward()
        optimizers[1].step()
        comms.all_reduce_mean(loss)
        assert step is not naive_data_parallel_step or abs(loss - whole_loss) < TOLERANCE
    a, b = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (replica, single))
    return replica, ((a - b).norm() / b.norm()).item()


def without_averaging(model, loss_fn, optimizer, batch, _):
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


@on_ranks(1, 3, 4)
def test_n_ranks_train_as_one_process_on_the_whole_batch(comms):
    for kind in ("sgd", "adam"):
        replica, distance = train(comms, kind, naive_data_parallel_step)
        assert distance < TOLERANCE
        check_replicas(replica, comms)


@on_ranks(3)
def test_unequal_shares_weigh_each_sample_alike(comms):
    digits = load_digits().train
    (all_x, all_y), *_ = ShardedBatches(digits, 62, 0, 1).epoch(0)
    torch.manual_seed(0)
    single = FullMLP(32, depth=4, inputs=64, outputs=10).double()
    right = cross_entropy(single(all_x.double()), all_y)
    right.backward()
    right_gradient = torch.nn.utils.parameters_to_vector(p.grad for p in single.parameters())
    mine = ShardedBatches(digits, 62, comms.rank, 3, sizes=(7, 40, 15))
    for (name, kind), parts in itertools.product(REPLICATED.items(), (1, 4)):
        replica = copy.deepcopy(single)
        sgd = optimizer_of(replica, "sgd")
        x, y = next(mine.epoch(0))
        assert len(x) == (7, 40, 15)[comms.rank]
        batch, strategy = (x.double(), y), kind(replica, comms)
        loss = take_step(strategy, cross_entropy, sgd, batch, parts=parts, share=mine.share)
        strategy.remove()
        comms.all_reduce_mean(loss)
        assert abs(loss - right) < TOLERANCE
        gradient = torch.nn.utils.parameters_to_vector(p.grad for p in replica.parameters())
        distance = (gradient - right_gradient).norm() / right_gradient.norm()
        assert (distance < TOLERANCE) == (name != "none"), (name, parts)


@on_ranks(2)
def test_a_step_without_averaging_is_noticed(comms):
    replica, distance = train(comms, "sgd", without_averaging)
    assert distance > 1e-3
    with pytest.raises(RuntimeError, match=r"parameter layers\.0\.weight"):
        check_replicas(replica, comms)


@on_ranks(2)
def test_the_timeline_has_every_phase_in_order(comms):
    model = FullMLP(8, depth=3)
    timeline = Timeline(comms)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    naive_data_parallel_step(model, torch.nn.functional.mse_loss, sgd, batch, comms, timeline)
    mine = [span for span in timeline.gather() if span.rank == comms.rank]
    spans = [span for span in mine if span.lane != "wait"]
    reduced = [f"all-reduce {name}" for name, _ in model.named_parameters()]
    assert [s.name for s in spans] == ["forward", "backward", *reduced, "optimizer"]
    assert [s.lane for s in spans if s.name in reduced] == ["communication"] * len(reduced)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    (wait,) = (span for span in mine if span.lane == "wait")
    assert wait.name == "wait for gradients"
    assert spans[1].end <= wait.start <= spans[2].start, "all communication is exposed"
    assert spans[-2].end <= wait.end <= spans[-1].start
    assert break_down(mine).exposed == wait.end - wait.start
    assert break_down(mine).hidden < 1e-9


@on_ranks(2)
def test_a_parameter_without_gradient_is_left_alone(comms):
    model = FullMLP(8, depth=3)
    model.spare = torch.nn.Parameter(torch.ones(3))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    naive_data_parallel_step(model, torch.nn.functional.mse_loss, sgd, batch, comms)
    assert model.spare.grad is None
    assert torch.equal(model.spare, torch.ones(3))


@on_ranks(1, 2, 3)
def test_every_strategy_trains_as_one_process_in_one_part_or_several(comms):
    for name, make in REPLICATED.items():
        for parts in (1, 2):
            strategies = {}

            def step(
                model, loss_fn, optimizer, batch, comms, parts=parts, make=make, made=strategies
            ):
                if model not in made:
                    made[model] = make(model, comms, 0.001)
                return take_step(made[model], loss_fn, optimizer, batch, parts=parts)

            replica, distance = train(comms, "sgd", step)
            if name == "none":
                assert (distance < TOLERANCE) == (comms.world_size == 1)
                continue
            assert distance < TOLERANCE, (name, parts)
            check_replicas(replica, comms)
            (strategy,) = strategies.values()
            strategy.remove()


@on_ranks(2)
def test_every_strategy_records_its_phases_and_what_it_waits_for(comms):
    batch = torch.randn(4, 8), torch.randn(4, 8)
    for name, make in REPLICATED.items():
        strategy = make(FullMLP(8, depth=3), comms)
        sgd = torch.optim.SGD(strategy.module.parameters(), lr=0.1)
        timeline = Timeline(comms)
        hooks = []
        for recorder in (NOT_RECORDED, timeline, NOT_RECORDED):
            strategy.record(recorder)
            take_step(strategy, torch.nn.functional.mse_loss, sgd, batch)
            on_each = [p._post_accumulate_grad_hooks for p in strategy.module.parameters()]
            hooks.append([len(of_one or ()) for of_one in on_each])
        assert hooks[0] == hooks[2], (name, "a watch that nobody needs")
        spans = timeline.take()
        phases = [s.name for s in spans if s.name in ("forward", "backward", "optimizer")]
        assert phases == ["forward", "backward", "optimizer"], name
        assert any(s.lane == "wait" for s in spans) == strategy.averages, name
        assert any(s.lane == "communication" for s in spans) == strategy.averages, name
        sent = [s.nbytes for s in spans if s.lane == "communication"]
        if name == "torch":  # seen from outside
            assert sent == [None]
        else:
            whole = gradient_bytes(strategy.module) if strategy.averages else 0
            assert sum(sent) == whole, name
        assert all(s.nbytes is None for s in spans if s.lane != "communication"), name


BUCKETS = (None, 0.001, 25.0)  # MiB; None: each gradient alone


@on_ranks(1, 2, 3)
def test_steps_with_hooks_train_as_one_process_and_as_the_naive_step(comms):
    naive, _ = train(comms, "sgd", naive_data_parallel_step)
    for bucket_cap_mb in BUCKETS:
        hooks = {}

        def step(model, loss_fn, optimizer, batch, comms, mb=bucket_cap_mb, hooks=hooks):
            if model not in hooks:
                hooks[model] = register_ddp_hooks(model, comms, mb)
            return ddp_step(model, loss_fn, optimizer, batch, hooks[model])

        replica, distance = train(comms, "sgd", step)
        assert distance < TOLERANCE
        check_replicas(replica, comms)
        if comms.world_size <= 2:  # where a sum has one order
            for p, q in zip(replica.parameters(), naive.parameters(), strict=True):
                assert torch.equal(p, q)
        (made,) = hooks.values()
        assert type(made) is (AllReduceHooks if bucket_cap_mb is None else BucketedDDPHooks)
        made.remove()
        assert all(not p._post_accumulate_grad_hooks for p in replica.parameters())


@on_ranks(2)
def test_a_timeline_of_hooks_has_gradients_collectives_and_waits(comms):
    batch = torch.randn(4, 8), torch.randn(4, 8)
    for bucket_cap_mb, waits in ((None, 6), (25.0, 1)):
        model = FullMLP(8, depth=3)
        timeline = Timeline(comms)
        hooks = register_ddp_hooks(model, comms, bucket_cap_mb, timeline)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = ddp_step(model, torch.nn.functional.mse_loss, sgd, batch, hooks, timeline)
        assert not loss.requires_grad
        spans = [span for span in timeline.gather() if span.rank == comms.rank]
        phases = [s.name for s in spans if s.name in ("forward", "backward", "optimizer")]
        assert phases == ["forward", "backward", "optimizer"]
        assert sum(s.name.startswith("wait for ") for s in spans) == waits
        assert sum(s.lane == "communication" for s in spans) == waits
        names = {name for name, _ in model.named_parameters()}
        assert names <= {s.name for s in spans}
        hooks.remove()


@on_ranks(2)
def test_gradients_laid_out_as_channels_last_are_averaged_one_by_one(comms):
    cnn = SimpleCNN(ModelConfig(channels=(4, 8), hidden=16)).to(memory_format=torch.channels_last)
    images = torch.randn(6, 64, generator=torch.Generator().manual_seed(comms.rank))
    cnn(images).square().sum().backward()
    expected = [p.grad.contiguous().clone() for p in cnn.parameters()]
    average_gradients(cnn, comms)
    for parameter, mine in zip(cnn.parameters(), expected, strict=True):
        comms.all_reduce_mean(mine)
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, mine)


@on_ranks(2)
def test_a_strategy_leaves_the_hooks_of_a_wrapper_that_it_did_not_make(comms):
    ddp = DDP(torch.nn.Linear(3, 2), comms)
    strategy_of(ddp, comms).remove()
    ddp(torch.full((1, 3), comms.rank + 1.0)).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((2, 3), 1.5))


@on_ranks(2)
def test_every_strategy_averages_sparse_gradients(comms):
    for name in ("naive", "hooks", "bucketed", "ddp"):
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(6, 2, sparse=True)
        strategy = STRATEGIES[name](model, comms)
        strategy.module(torch.tensor([[comms.rank, 4]])).sum().backward()
        strategy.finish()
        expected = torch.zeros(6, 2)
        expected[:2], expected[4] = 0.25, 0.5
        assert torch.equal(model.weight.grad.to_dense(), expected), name


@on_ranks(2)
def test_a_step_after_one_that_raised_is_as_without_it(comms):
    batch = torch.full((4, 8), 1.0 + comms.rank), torch.zeros(4, 2)
    for name in ("none", "naive", "hooks", "bucketed", "ddp"):
        weights = []
        for raises in (True, False):
            torch.manual_seed(0)
            model = FullMLP(8, 3, outputs=2)
            strategy, optimizer = STRATEGIES[name](model, comms), optimizer_of(model, "sgd")
            if raises:
                first, *_ = model.layers
                handle = first.weight.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    take_step(strategy, torch.nn.functional.mse_loss, optimizer, batch)
                handle.remove()
            take_step(strategy, torch.nn.functional.mse_loss, optimizer, batch)
            weights.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *weights)), name


@on_ranks(2)
def test_parts_of_less_than_a_sample_are_refused(comms):
    model = FullMLP(8, 2)
    for parts in (0, 5):
        with pytest.raises(ValueError, match=rf"^rank {comms.rank}: .* got {parts} of 4 samples"):
            take_step(
                STRATEGIES["naive"](model, comms),
                torch.nn.functional.mse_loss,
                optimizer_of(model, "sgd"),
                (torch.zeros(4, 8), torch.zeros(4, 8)),
                parts=parts,
            )


@on_ranks(2)
def test_pytorchs_ddp_is_left_without_hooks(comms):
    model = FullMLP(8, 2)
    strategy = STRATEGIES["torch"](model, comms)
    strategy.record(Timeline(comms))
    strategy.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
