"""Hooks: when gradients are ready, and averages that are there when finish() returns."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from microddp.hooks import (
    AllReduceHooks,
    HookTracker,
    demonstrate_hook_order,
)
from microddp.model import FullMLP, ModelConfig, SimpleCNN
from microddp.replicas import check_replicas
from microddp.schedule import ddp_step, naive_data_parallel_step
from microddp.step_times import break_down
from microddp.strategies import STRATEGIES
from microddp.timing import Timeline
from microddp.workloads import Transformer

DEBUG = {"MICRODDP_DEBUG": "1"}


def mlp():
    torch.manual_seed(0)
    return FullMLP(8, depth=4).double()


def batch(rows=60, features=8):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, features, generator=generator, dtype=torch.float64) for _ in "xy")
    return x, y


def my_part(tensor, comms):
    return tensor.chunk(comms.world_size)[comms.rank]


# ---- the tracker


def test_a_networks_gradients_come_in_the_reverse_order_of_its_layers():
    model = mlp()
    x, y = batch()
    with HookTracker(model) as tracker:
        tracker.start(mse_loss(model(x), y)).backward()
    layers = [row.name.split(".")[1] for row in tracker.rows]
    assert layers == ["3", "3", "2", "2", "1", "1", "0", "0"]
    assert {row.name for row in tracker.rows} == {name for name, _ in model.named_parameters()}
    assert [row.order for row in tracker.rows] == list(range(8))
    assert tracker.rows[0].seconds > 0
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(tracker.rows))
    sizes = {row.name: (row.shape, row.nbytes) for row in tracker.rows}
    assert sizes["layers.2.weight"] == ((8, 8), 8 * 8 * 8)
    assert sizes["layers.2.bias"] == ((8,), 8 * 8)


def test_a_backward_that_is_started_replaces_the_last_one():
    model = mlp()
    x, y = batch()
    tracker = HookTracker(model)
    tracker.start(model(x).sum()).backward()
    first = tracker.rows
    tracker.start(mse_loss(model(x), y)).backward()
    second = tracker.rows
    assert [row.name for row in first] == [row.name for row in second]
    assert [row.seconds for row in first] != [row.seconds for row in second]
    tracker.remove()
    tracker.start(model(x).sum()).backward()
    assert {row.order for row in tracker.rows} == {None}, "nothing watches any more"


def test_a_tied_parameter_has_one_row_after_its_last_use():
    torch.manual_seed(0)
    model = Transformer(vocabulary=11, dim=8, depth=1, heads=2, context=6)
    with HookTracker(model) as tracker:
        tracker.start(model(torch.tensor([[1, 2, 3]])).sum()).backward()
    names = [row.name for row in tracker.rows]
    assert names.count("tokens.weight") == 1
    assert "output.weight" not in names
    assert names.index("tokens.weight") > names.index("blocks.0.qkv.weight")


def test_frozen_parameters_have_no_row_and_unused_ones_no_time():
    model = mlp()
    model.layers[1].requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    with HookTracker(model) as tracker:
        tracker.start(model(batch()[0]).sum()).backward()
    assert len(tracker.rows) == 7
    assert not any(row.name.startswith("layers.1") for row in tracker.rows)
    unused = tracker.rows[-1]
    assert (unused.name, unused.order, unused.seconds) == ("spare", None, None)
    assert unused.shape == (3, 2)


class Both(torch.autograd.Function):
    """Two outputs from two inputs; an output that is not used has no gradient, rather than 0."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return a.clone(), b.clone()

    @staticmethod
    def backward(_, a, b):
        return a, b


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        a, _ = Both.apply(self.a, self.b)
        return a * x


def test_a_parameter_behind_an_output_that_the_loss_leaves_out_has_no_time():
    model = Pair()
    with HookTracker(model) as tracker:
        tracker.start(model(torch.ones(2)).sum()).backward()
    assert [(row.name, row.order) for row in tracker.rows] == [("a", 0), ("b", None)]


def test_the_trace_is_shown_as_text_and_as_a_table_of_a_page():
    model = nn.Linear(2, 3)
    model.name_with_angle = nn.Parameter(torch.ones(()))
    with HookTracker(model) as tracker:
        tracker.start(model(torch.ones(1, 2)).sum()).backward()
    text = str(tracker).splitlines()
    assert [word in text[0] for word in ("order", "parameter", "shape", "bytes", "ready")]
    rows = {line.split()[1]: line.split() for line in text[2:]}
    assert rows["weight"][2:6] == ["3", "x", "2", "24"]
    assert rows["name_with_angle"][0] == "none"
    page = tracker._repr_html_()
    assert page.startswith("<table>")
    assert page.count("<tr>") == 1 + 3


# ---- averages


def averaged(model, comms, loss, **options):
    hooks = AllReduceHooks(model, comms, **options)
    loss.backward()
    hooks.finish()
    return hooks


@on_ranks()
def test_gradients_are_those_of_one_process_on_the_whole_batch(comms):
    replica, single = mlp(), mlp()
    x, y = batch()
    hooks = AllReduceHooks(replica, comms)
    for _ in range(3):  # gradients of the steps before are the mean already, and add up
        mse_loss(single(x), y).backward()
        replica.zero_grad()
        mse_loss(replica(my_part(x, comms)), my_part(y, comms)).backward()
        hooks.finish()
        for mine, whole in zip(replica.parameters(), single.parameters(), strict=True):
            assert (mine.grad - whole.grad).abs().max() < 1e-14
        single.zero_grad()


@on_ranks(3)
def test_every_kind_of_model_gets_the_mean_of_the_ranks_gradients(comms):
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(comms.rank))
    images = torch.randn(6, 64, generator=torch.Generator().manual_seed(comms.rank))
    frozen = mlp()
    frozen.layers[1].requires_grad_(False)
    torch.manual_seed(0)
    transformer = Transformer(vocabulary=11, dim=8, depth=2, heads=2, context=6)
    cnn = SimpleCNN(ModelConfig(channels=(4, 8), hidden=16))
    channels_last = copy.deepcopy(cnn).to(memory_format=torch.channels_last)
    for model, inputs in (
        (transformer, tokens),
        (cnn, images),
        (channels_last, images),
        (frozen, my_part(batch()[0], comms)),
    ):
        alone = copy.deepcopy(model)
        alone(inputs).square().sum().backward()
        averaged(model, comms, model(inputs).square().sum())
        for mine, own in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (own.grad is None) == (not mine.requires_grad)
            if mine.grad is not None:
                expected = own.grad.contiguous()
                comms.all_reduce_mean(expected)
                assert torch.allclose(mine.grad, expected, rtol=1e-5, atol=1e-7)


@on_ranks(1)
def test_what_is_sent_is_contiguous_however_a_parameter_lies_in_memory(comms):
    """NCCL takes nothing else."""
    sent = []
    model = nn.ParameterList([torch.ones(3, 4).t(), torch.ones(2, 3, 4, 5).permute(2, 0, 3, 1)])
    hooks = AllReduceHooks(model, comms)
    reduce = comms.group.allreduce
    group = SimpleNamespace(allreduce=lambda tensors: sent.extend(tensors) or reduce(tensors))
    hooks.comms = SimpleNamespace(group=group, agree=comms.agree, world_size=2)
    sum(p.sum() for p in model).backward()
    hooks.finish()
    assert [tensor.is_contiguous() for tensor in sent] == [True, True]
    for p in model:
        assert p.grad.stride() == p.stride()
        assert p.grad.eq(0.5).all()


@on_ranks(2)
def test_unused_parameters_are_left_out_and_outputs_left_out_do_no_harm(comms):
    model = mlp()
    model.spare = nn.Parameter(torch.ones(3))
    averaged(model, comms, model(batch()[0]).sum())
    assert model.spare.grad is None
    assert all(p.grad is not None for p in model.layers.parameters())
    pair = Pair()
    averaged(pair, comms, pair(torch.full((2,), 2.0 * comms.rank)).sum())
    assert pair.a.grad.tolist() == [1, 1]
    assert pair.b.grad is None


class Conjugated(nn.Module):
    """The gradient's memory has other values than the gradient: a conjugation is pending."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return (self.weight.conj() * x).real.sum()


@on_ranks(3)
def test_gradients_that_are_yet_to_be_conjugated_are_averaged(comms):
    x = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(comms.rank))
    alone = Conjugated()
    alone(x).backward()
    assert alone.weight.grad.is_conj()
    mean = comms.all_gather(x).mean(0)
    for name in ("naive", "hooks", "bucketed", "ddp"):
        model = Conjugated()
        strategy = STRATEGIES[name](model, comms)
        strategy.module(x).backward()
        strategy.finish()
        torch.testing.assert_close(model.weight.grad.resolve_conj(), mean, msg=name)


@on_ranks(2)
def test_removed_hooks_do_nothing(comms):
    model = mlp()
    x, _ = batch()
    mine = (comms.rank + 1) * model(x).sum()
    hooks = AllReduceHooks(model, comms)
    hooks.remove()
    mine.backward()
    hooks.finish()
    bias = model.layers[-1].bias
    assert torch.equal(bias.grad, torch.full_like(bias, 60.0 * (comms.rank + 1)))


@on_ranks(2)
def test_without_synchronisation_gradients_add_up_on_each_rank_until_the_next_backward(comms):
    accumulated, single = mlp(), mlp()
    x, y = batch()
    hooks = AllReduceHooks(accumulated, comms)
    mine = my_part(x, comms), my_part(y, comms)
    with pytest.raises(ZeroDivisionError), hooks.no_sync():
        1 / 0  # noqa: B018
    with hooks.no_sync():
        with hooks.no_sync():
            pass
        mse_loss(accumulated(mine[0]), mine[1]).backward()  # the inner block did not end the outer
    hooks.finish()
    first = accumulated.layers[0].weight.grad.clone()
    gathered = comms.all_gather(first)
    assert not torch.equal(gathered[0], gathered[1])
    mse_loss(accumulated(mine[0]), mine[1]).backward()
    hooks.finish()
    mse_loss(single(x), y).backward()
    for a, b in zip(accumulated.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a.grad, 2 * b.grad, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_a_forgotten_finish_is_an_error_in_the_next_backward(comms):
    model = mlp()
    x, _ = batch()
    hooks = AllReduceHooks(model, comms)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=rf"rank {comms.rank}: layers\.3\..* expected finish"):
        model(x).sum().backward()
    hooks.finish()
    model.zero_grad()
    (comms.rank * model(x).sum()).backward()
    hooks.finish()
    bias = model.layers[-1].bias
    assert torch.equal(bias.grad, torch.full_like(bias, 30.0)), "all is well again"


@on_ranks(2)
def test_an_exception_in_backward_passes_through_and_can_be_recovered_from(comms):
    model = mlp()
    x, _ = batch()
    hooks = AllReduceHooks(model, comms)
    handle = model.layers[1].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    handle.remove()
    hooks.finish()
    model.zero_grad()
    (comms.rank * model(x).sum()).backward()
    hooks.finish()
    bias = model.layers[-1].bias
    assert torch.equal(bias.grad, torch.full_like(bias, 30.0))


@on_ranks(3, environment=DEBUG)
def test_ranks_with_other_gradients_are_named_where_asked_for(comms):
    model = mlp()
    model.spare = nn.Parameter(torch.ones(1, dtype=torch.float64))
    AllReduceHooks(model, comms)
    loss = model(batch()[0]).sum()
    if comms.rank == 1:
        loss = loss + model.spare.sum()
    with pytest.raises(
        RuntimeError, match=r"the ranks disagree: rank 1 calls all-reduce of .*spare"
    ):
        loss.backward()


@on_ranks(2, environment=DEBUG)
def test_a_rank_with_fewer_gradients_is_named_when_it_finishes(comms):
    model = nn.Linear(2, 2, bias=False)
    hooks = AllReduceHooks(model, comms)
    loss = model(torch.ones(1, 2)).sum()
    call = loss.backward if comms.rank == 0 else hooks.finish
    with pytest.raises(RuntimeError, match=rf"rank {comms.rank}: the ranks disagree"):
        call()


@on_ranks(3)
def test_training_with_hooks_leaves_the_weights_of_the_naive_step(comms):
    naive, hooked = mlp(), mlp()
    sgds = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (naive, hooked)]
    hooks = AllReduceHooks(hooked, comms)
    mine = tuple(my_part(tensor, comms) for tensor in batch())
    for _ in range(5):
        naive_data_parallel_step(naive, mse_loss, sgds[0], mine, comms)
        ddp_step(hooked, mse_loss, sgds[1], mine, hooks)
    for a, b in zip(naive.parameters(), hooked.parameters(), strict=True):
        assert torch.equal(a, b)
    check_replicas(hooked, comms)


@on_ranks(2)
def test_the_timeline_has_gradients_collectives_and_waits(comms):
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    timeline = Timeline(comms)
    with timeline.span("backward"):
        averaged(model, comms, model(batch()[0]).sum(), timeline=timeline)
    spans = timeline.gather()
    mine = [span for span in spans if span.rank == comms.rank]
    lanes = {lane: [s for s in mine if s.lane == lane] for lane in {s.lane for s in mine}}
    assert sorted(s.name for s in lanes["gradients"]) == sorted(names)
    assert sorted(s.name for s in lanes["communication"]) == sorted(
        f"all-reduce {name}" for name in names
    )
    assert [s.name for s in lanes["wait"]] == [f"wait for {s.name}" for s in lanes["gradients"]]
    ready = {s.name: s.start for s in lanes["gradients"]}
    assert all(s.start >= ready[s.name.split()[1]] for s in lanes["communication"])
    waits = sum(s.end - s.start for s in lanes["wait"])
    assert break_down(mine).exposed == pytest.approx(waits)


# ---- the demonstrations


@on_ranks(1, 3)
def test_the_demonstration_shows_one_order_and_leaves_the_model_alone(comms):
    model = mlp()
    averaged(model, comms, model(batch()[0]).sum()).remove()
    before = [p.grad.clone() for p in model.parameters()]
    printed = []
    comms.print = lambda *values: printed.extend(map(str, values))
    rows = demonstrate_hook_order(model, comms)
    assert [row.name.split(".")[1] for row in rows] == ["3", "3", "2", "2", "1", "1", "0", "0"]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert all(row.name in printed[0] for row in rows)


@on_ranks(2)
def test_the_demonstration_takes_inputs_and_losses_of_any_model(comms):
    model = Transformer(vocabulary=11, dim=8, depth=1, heads=2, context=6)
    tokens = torch.tensor([[1, 2, 3]])
    rows = demonstrate_hook_order(
        model, comms, tokens, lambda logits: cross_entropy(logits.flatten(0, 1), tokens.flatten())
    )
    assert len(rows) == len(list(model.parameters()))
    with pytest.raises(ValueError, match=f"rank {comms.rank}: expected inputs .* got Conv2d"):
        demonstrate_hook_order(nn.Conv2d(1, 1, 3), comms)


class Choosy(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        first, second = (self.a, self.b) if self.rank != 1 else (self.b, self.a)
        return second(first(x))


@on_ranks(3)
def test_another_order_on_one_rank_is_an_error_on_all(comms):
    with pytest.raises(RuntimeError) as caught:
        demonstrate_hook_order(Choosy(comms.rank), comms)
    assert str(caught.value) == (
        f"rank {comms.rank}: expected gradients in the same order on every rank, got another one "
        "on rank 1: a.weight, b.weight; on the others b.weight, a.weight"
    )
