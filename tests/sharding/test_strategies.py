"""The stages as strategies: one step, training with checkpoints, what is recorded and refused."""

import dataclasses
import itertools
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss

from microddp.model import FullMLP, gradient_bytes
from microddp.replicas import check_replicas
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.timing import NOT_RECORDED, Timeline
from microddp.train import TrainingConfig, train

STAGES = [name for name, make in STRATEGIES.items() if make.stage]
SMALL = TrainingConfig(
    data="synthetic", model="mlp", width=64, depth=4, epochs=2, batch_size=768, seed=3
)


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def steps(comms, name, parts):
    """A model's weights after three steps of a strategy, by way of one that divides."""
    torch.manual_seed(0)
    model = FullMLP(256, depth=3).double()
    make = STRATEGIES[name]
    strategy = make(model, comms, 0.1, **({"collectives": "ring"} if make.stage else {}))
    optimizer = torch.optim.AdamW(strategy.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(comms.rank)
    for _ in range(3):
        batch = torch.randn(2, 6, 256, generator=generator, dtype=torch.float64).unbind()
        take_step(strategy, mse_loss, optimizer, batch, parts=parts)
    strategy.remove()
    return flat(model)


@on_ranks(1, 2, 3)
def test_every_stage_trains_as_ddp_in_one_part_or_several(comms):
    right = steps(comms, "ddp", 1)
    for name, parts in itertools.product(STAGES, (1, 2)):
        found = steps(comms, name, parts)
        assert (found - right).norm() / right.norm() < 1e-9, (name, parts)


@on_ranks(2)
def test_every_stage_records_its_phases_and_what_it_sends(comms):
    batch = torch.randn(2, 4, 256).unbind()
    for name in STAGES:
        model = FullMLP(256, depth=3)
        strategy = STRATEGIES[name](model, comms, collectives="ring")
        size = gradient_bytes(FullMLP(256, depth=3))
        if name == "owned":  # three layers on two ranks: one owns two, and the other's are padded
            size *= 4 / 3
        optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        timeline = Timeline(comms)
        for recorder in (NOT_RECORDED, timeline):
            strategy.record(recorder)
            take_step(strategy, mse_loss, optimizer, batch)
        spans = timeline.take()
        assert [s.name for s in spans if s.lane == "compute"] == [
            "forward",
            "backward",
            "optimizer",
        ]
        assert any(s.lane == "wait" for s in spans)
        sent = sum(s.nbytes for s in spans if s.lane == "communication")
        times = 3 - 1 / 3 if STRATEGIES[name].stage == 3 else 2  # the last layer is gathered once
        assert sent == pytest.approx(times * size, rel=0.01)
        assert strategy.sent_bytes() == pytest.approx(times * size / 2, rel=0.01)


@on_ranks(2)
def test_an_optimizer_of_something_else_is_refused(comms):
    model = FullMLP(8, depth=2)
    strategy = STRATEGIES["zero2"](model, comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"rank \d: expected an optimizer of the strategy's param"):
        take_step(strategy, mse_loss, optimizer, torch.randn(2, 4, 8).unbind())


@on_ranks(2)
def test_options_that_differ_or_mean_nothing_are_refused_on_every_rank(comms):
    for name, (cap, how, error) in itertools.product(
        ("zero1", "zero2", "owned"),
        (
            (1.0 + comms.rank, "auto", RuntimeError),
            (None, ["auto", "ring"][comms.rank], RuntimeError),
            (None, ["auto", "none"][comms.rank], RuntimeError),
            (None, "none", ValueError),
            (-1.0, "auto", ValueError),
            (math.inf, "auto", ValueError),
        ),
    ):
        with pytest.raises(error, match=rf"rank {comms.rank}: expected"):
            STRATEGIES[name](nn.Linear(4, 4), comms, cap, collectives=how)
    for name in STAGES:
        sparse = nn.Embedding(4, 4, sparse=comms.rank == 1)
        with pytest.raises(ValueError, match="dense gradients, got rank 1: sparse ones of weight"):
            STRATEGIES[name](sparse, comms, **({"node": 2} if name == "hsdp" else {}))


@on_ranks(2)
def test_the_whole_state_is_of_one_group_of_parameters(comms):
    model = nn.Linear(4, 4)
    strategy = STRATEGIES["zero1"](model, comms)
    optimizer = torch.optim.SGD([{"params": [p]} for p in strategy.parameters()], lr=0.1)
    for call in (strategy.state, lambda *them: strategy.load(*them, {})):
        with pytest.raises(ValueError, match=r"expected an optimizer with one group .* got 2"):
            call(model, optimizer)


@on_ranks(2)
def test_an_overflow_on_one_rank_is_seen_by_all(comms):
    for name in STAGES:
        model = FullMLP(256, depth=2)
        strategy = STRATEGIES[name](model, comms)
        optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        before = [p.detach().clone() for p in strategy.parameters()]
        for p in strategy.parameters():
            p.grad = torch.ones_like(p)
        if comms.rank == 1:
            next(p.grad for p in strategy.parameters() if p.numel())[0] = torch.inf
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        strategy.share_overflow()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0, name
        assert all(map(torch.equal, before, strategy.parameters())), name


@on_ranks(2, 3)
def test_training_in_any_stage_and_precision(comms):
    for precision in ("fp32", "bf16", "fp16"):
        ends = {}
        for name in ("ddp", *STAGES):
            options = {"schedule": name, "precision": precision, "accumulate": 2}
            result = train(dataclasses.replace(SMALL, **options), comms)
            check_replicas(result.model, comms)
            assert all(not p._post_accumulate_grad_hooks for p in result.model.parameters())
            ends[name] = flat(result.model)
        for name in STAGES:
            apart = (ends[name] - ends["ddp"]).norm() / ends["ddp"].norm()
            assert apart < 1e-4, (precision, name)


@on_ranks(3)
def test_a_checkpoint_goes_on_in_another_stage(comms):
    whole = train(dataclasses.replace(SMALL, schedule="ddp"), comms)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(comms.all_gather_data(made)[0])
        for first, second in itertools.pairwise(["zero3", "zero1", "ddp", "zero2", "zero3"]):
            there = folder / f"{first}-{second}"
            options = {"checkpoint": there}
            train(dataclasses.replace(SMALL, schedule=first, epochs=1, **options), comms)
            again = dataclasses.replace(SMALL, schedule=second, resume=True, **options)
            result = train(again, comms)
            apart = (flat(result.model) - flat(whole.model)).norm() / flat(whole.model).norm()
            assert apart < 1e-5, (first, second)
        comms.barrier()


@on_ranks(3)
def test_muon_on_whole_matrices(comms):
    muon = dataclasses.replace(SMALL, optimizer="muon")
    whole = train(dataclasses.replace(muon, schedule="ddp"), comms)
    assert whole.epochs[-1].loss < whole.epochs[0].loss
    owned = train(dataclasses.replace(muon, schedule="owned"), comms)
    check_replicas(owned.model, comms)
    apart = (flat(owned.model) - flat(whole.model)).norm() / flat(whole.model).norm()
    assert apart < 1e-3, apart  # it computes in bf16
    with tempfile.TemporaryDirectory() as made:
        folder = Path(comms.all_gather_data(made)[0])
        for first, second in itertools.pairwise(["owned", "ddp", "owned"]):
            there = {"checkpoint": folder / first}
            train(dataclasses.replace(muon, schedule=first, epochs=1, **there), comms)
            again = dataclasses.replace(muon, schedule=second, resume=True, **there)
            ends = train(again, comms)
            apart = (flat(ends.model) - flat(whole.model)).norm() / flat(whole.model).norm()
            assert apart < 1e-3, (first, second, apart)
        comms.barrier()
    with pytest.raises(ValueError, match="--optimizer: expected a --schedule that keeps matrices"):
        dataclasses.replace(muon, schedule="zero3")


@on_ranks(3)
def test_a_rank_may_own_nothing(comms):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    strategy = STRATEGIES["owned"](model, comms)
    optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
    before = flat(model)
    take_step(strategy, mse_loss, optimizer, torch.randn(2, 4, 4).unbind())
    check_replicas(model, comms)
    assert not torch.equal(before, flat(model))


@on_ranks(3)
def test_a_rank_that_owns_nothing_scales_the_loss_as_the_others(comms):
    strategy = STRATEGIES["owned"](torch.nn.Linear(4, 2), comms)  # two parameters
    assert 0 in comms.all_gather_data(len(strategy.local_params))
    optimizer = torch.optim.Adam(strategy.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflows, scale in ((False, 4.0), (True, 2.0), (False, 2.0)):
        target = math.inf if overflows and comms.rank == 0 else 1.0
        batch = torch.ones(6, 4), torch.full((6, 2), target)
        take_step(strategy, mse_loss, optimizer, batch, scaler=scaler)
        assert scaler.get_scale() == scale
    check_replicas(strategy.module, comms)
    saved = [strategy.state(strategy.module, optimizer)]  # whole on rank 0
    dist.broadcast_object_list(saved)
    model, moments = saved[0]
    strategy.load(strategy.module, optimizer, {"model": model, "optimizer": moments})


@on_ranks(2)
def test_settings_of_the_optimizer_are_loaded_as_by_ddp(comms):
    for schedule in ("ddp", "zero1", "zero2", "zero3", "owned"):
        model = nn.Linear(8, 8)
        strategy = STRATEGIES[schedule](model, comms)
        optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.01
        saved = [strategy.state(model, optimizer)]  # whole on rank 0
        dist.broadcast_object_list(saved)
        whole, settings = saved[0]
        optimizer.param_groups[0]["lr"] = 0.1
        strategy.load(model, optimizer, {"model": whole, "optimizer": settings})
        assert optimizer.param_groups[0]["lr"] == 0.01, schedule


@on_ranks(2)
def test_a_step_after_a_backward_that_raised_knows_nothing_of_it(comms):
    def fail(_):
        raise ArithmeticError("on purpose")

    inputs, targets = torch.ones(2, 8) * (comms.rank + 1), torch.zeros(2, 8)
    for schedule in ("ddp", "zero1", "zero2", "zero3", "owned"):
        weights = []
        for raises in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            strategy = STRATEGIES[schedule](model, comms, 1e-4)
            optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
            if raises:
                handle = model[0].weight.register_hook(fail)
                with pytest.raises(ArithmeticError):
                    take_step(strategy, nn.functional.mse_loss, optimizer, (inputs, targets))
                handle.remove()
            take_step(strategy, nn.functional.mse_loss, optimizer, (inputs, targets))
            strategy.meet()
            strategy.remove()
            weights.append(flat(model))
        assert torch.equal(*weights), schedule


@on_ranks(3)
def test_ranks_without_values_scale_the_loss_as_the_others(comms):
    for name in STAGES:
        torch.manual_seed(0)
        strategy = STRATEGIES[name](nn.Linear(1, 1), comms)  # two values
        optimizer = torch.optim.Adam(strategy.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        take_step(strategy, mse_loss, optimizer, torch.ones(2, 3, 1).unbind(), scaler=scaler)
        assert scaler.get_scale() == 4.0, name
        data = torch.full((2, 3, 1), torch.inf if comms.rank == 0 else 1.0)
        take_step(strategy, mse_loss, optimizer, data.unbind(), scaler=scaler)
        assert scaler.get_scale() == 2.0, name


@on_ranks(3)
def test_a_rank_with_values_of_frozen_parameters_only_scales_the_loss_as_the_others(comms):
    for name in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).requires_grad_(False)
        model[1].bias.requires_grad_(True)  # one value
        strategy = STRATEGIES[name](model, comms)
        optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        data = torch.ones(4, 8), torch.full((4, 1), torch.inf if comms.rank == 0 else 1.0)
        take_step(strategy, mse_loss, optimizer, data, scaler=scaler)
        assert scaler.get_scale() == 2.0, name


class Centred(nn.Module):
    """Subtracts the mean over all ranks, as a batch norm of all ranks does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(300, 300)

    def forward(self, x):
        x = self.inner(x)
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


@on_ranks(3, environment={"MICRODDP_TIMEOUT": "10"})
def test_a_model_with_collectives_of_its_own_beside_those_of_the_backend(comms):
    ends = {}
    for name in ("ddp", "zero1", "zero3"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Centred() for _ in range(6)))
        how = {} if name == "ddp" else {"collectives": "backend"}
        strategy = STRATEGIES[name](model, comms, 0.1, **how)
        optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(comms.rank)
        for _ in range(8):
            take_step(
                strategy, mse_loss, optimizer, torch.randn(2, 4, 300, generator=generator).unbind()
            )
        strategy.meet()
        strategy.remove()
        ends[name] = flat(model)
    for name in ("zero1", "zero3"):
        torch.testing.assert_close(ends[name], ends["ddp"], msg=name)


@on_ranks(2)
def test_what_is_frozen_after_sharding_stays(comms):
    for name in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        strategy = STRATEGIES[name](model, comms)
        optimizer = torch.optim.AdamW(strategy.parameters(), weight_decay=0.5)
        model[0].weight.requires_grad_(False)
        before = strategy.state(model, optimizer)[0]
        take_step(strategy, mse_loss, optimizer, torch.randn(2, 3, 4).unbind())
        after = strategy.state(model, optimizer)[0]
        if comms.rank == 0:
            same = [key for key in before if torch.equal(before[key], after[key])]
            assert same == ["0.weight"], name


@on_ranks(2)
def test_a_step_forgets_what_a_raised_one_had_accumulated(comms):
    ends = {}
    for name in ("ddp", *STAGES):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        strategy = STRATEGIES[name](model, comms)
        optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
        data, losses = torch.randn(2, 4, 4).unbind(), []

        def second_raises(output, target, losses=losses):
            losses.append(mse_loss(output, target))
            if len(losses) == 2:
                raise ArithmeticError
            return losses[-1]

        with pytest.raises(ArithmeticError):
            take_step(strategy, second_raises, optimizer, data, parts=2)
        take_step(strategy, mse_loss, optimizer, data, parts=2)
        strategy.meet()
        ends[name] = strategy.state(model, optimizer)[0]
    if comms.rank == 0:
        for name in STAGES:
            for key, value in ends["ddp"].items():
                torch.testing.assert_close(ends[name][key], value, msg=f"{name} {key}")
