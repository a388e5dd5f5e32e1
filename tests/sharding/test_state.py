"""State of sharded training: in parts and whole, on other numbers of ranks, and from nowhere."""

import copy

import pytest
import torch
from models import batch, odd, weights
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss

from microddp.parts import from_torch, load_parts, own_parts, whole_state
from microddp.sharding import ShardedGradients, fully_shard, shard_blocks


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class Run:
    """Training in any stage, that can be looked at and gone on with."""

    def __init__(self, comms, stage, model=None):
        self.comms, self.stage, self.model = comms, stage, model or odd()
        if stage == 3:
            self.sharded = shard_blocks(self.model, comms, least_bytes=1, collectives="ring")
            self.local_params, parameters = (
                self.sharded.context.local_params,
                list(self.model.parameters()),
            )
        else:
            self.sharded = ShardedGradients(
                self.model, comms, 0.0005, keep_gradients=stage == 1, collectives="ring"
            )
            self.local_params, parameters = self.sharded.local_params, self.sharded.shards
        self.optimizer = adam(parameters)

    def steps(self, *numbers):
        for number in numbers:
            self.optimizer.zero_grad()
            x, y = batch(self.comms, number)
            mse_loss(self.model(x), y).backward()
            if self.stage < 3:
                self.sharded.finish()
            self.optimizer.step()
            if self.stage < 3:
                self.sharded.all_gather()

    def weights(self):
        if self.stage == 3:
            self.sharded.remove()
        return weights(self.model)


@on_ranks(2, 3)
def test_the_whole_state_is_that_of_one_process(comms):
    """Trained on the same data everywhere, so that one process can do the same."""
    for stage in (1, 2, 3):
        run, single = Run(comms, stage), odd()
        optimizer = adam(single.parameters())
        for number in range(3):
            torch.manual_seed(number)
            x, y = torch.randn(5, 7), torch.randn(5, 3)
            run.optimizer.zero_grad()
            optimizer.zero_grad()
            mse_loss(run.model(x), y).backward()
            mse_loss(single(x), y).backward()
            if stage < 3:
                run.sharded.finish()
            run.optimizer.step()
            optimizer.step()
            if stage < 3:
                run.sharded.all_gather()
        model, state = whole_state(run.local_params, comms, run.model, run.optimizer)
        if stage == 3:
            by_name = run.sharded.whole_state_dict()
            assert comms.rank == 0 or by_name == {}
            assert all(torch.equal(by_name[name], model[name]) for name in by_name)
        if comms.rank > 0:
            kept = [value for state in state["state"].values() for value in state.values()]
            assert all(value.dim() == 0 for value in kept), "values are together on rank 0 only"
            continue
        right = optimizer.state_dict()
        assert list(model) == list(single.state_dict())
        for name, value in single.state_dict().items():
            torch.testing.assert_close(model[name], value, rtol=1e-5, atol=1e-6)
        assert state["state"].keys() == right["state"].keys()
        for i, kept in right["state"].items():
            assert kept["step"] == state["state"][i]["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state["state"][i][key], kept[key], rtol=1e-4, atol=1e-7)
        fresh = odd()
        fresh.load_state_dict(model)
        adam(fresh.parameters()).load_state_dict(state)


@on_ranks(4)
def test_parts_of_four_ranks_go_on_on_three_and_in_another_stage(comms):
    four = Run(comms, 3)
    four.steps(0, 1, 2)
    parts = copy.deepcopy(own_parts(four.local_params, four.optimizer))
    whole = whole_state(four.local_params, comms, four.model, four.optimizer)
    files = gathered(comms, parts)
    three = comms.subgroup([0, 1, 2])
    if three is None:
        return
    ends = []
    for stage in (1, 2, 3):
        torch.manual_seed(5)  # other weights than those that are loaded
        again = Run(three, stage, odd_with_noise())
        load_parts(again.local_params, three, files, again.optimizer)
        if stage < 3:
            again.sharded.all_gather()
        again.steps(3, 4)
        ends.append(again.weights())
    torch.testing.assert_close(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2])
    if three.rank == 0:
        assert from_torch(odd_with_noise(), *whole)["last.bias"]["parts"].keys() == {
            *("parameter", "exp_avg", "exp_avg_sq", "step")
        }


def odd_with_noise():
    model = odd()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.requires_grad)
    return model


def gathered(comms, parts):
    """The parts of all ranks."""
    said = comms.all_gather_data(
        {
            name: {**entry, "parts": {k: v.tolist() for k, v in entry["parts"].items()}}
            for name, entry in parts.items()
        }
    )
    for theirs in said:
        for entry in theirs.values():
            entry["parts"] = {k: torch.tensor(v) for k, v in entry["parts"].items()}
    return said


@on_ranks(2, 3)
def test_state_without_a_count_of_steps_is_whole_too(comms):
    """A momentum has none; and what got no gradient has no momentum."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    sharded = fully_shard(model, comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for name, p in model.named_parameters():
        p.grad = None if name == "1.bias" else torch.full_like(p, 2.0)
    optimizer.step()
    weights, state = whole_state(sharded.context.local_params, comms, model, optimizer)
    if comms.rank > 0:
        return
    for i, (name, whole) in enumerate(weights.items()):
        if name == "1.bias":
            assert i not in state["state"]
        else:
            assert state["state"][i].keys() == {"momentum_buffer"}
            assert state["state"][i]["momentum_buffer"].shape == whole.shape
            assert state["state"][i]["momentum_buffer"].eq(2).all(), name


@on_ranks(2)
def test_parts_that_do_not_fit_are_refused(comms):
    run = Run(comms, 3)
    run.steps(0)
    parts = own_parts(run.local_params)
    first = next(iter(parts))
    with pytest.raises(ValueError, match=rf"rank {comms.rank}: expected all values .*{first}"):
        load_parts(run.local_params, comms, [{k: v for k, v in parts.items() if k != first}])
    kept = parts[first]["parts"]["parameter"]
    half = {**parts, first: {**parts[first], "parts": {"parameter": kept[: len(kept) // 2]}}}
    with pytest.raises(ValueError, match=rf"expected all values .*{first}"):
        load_parts(run.local_params, comms, [half, half])
    load_parts(run.local_params, comms, [parts, parts])  # as replicas of shards have them
    wrong = {**parts, first: {**parts[first], "shape": (1, 2)}}
    with pytest.raises(ValueError, match=rf"expected all values .*{first} of shape \(1, 2\)"):
        load_parts(run.local_params, comms, [wrong])

    def read():
        if comms.rank == 1:
            raise OSError("no such file")
        yield parts

    with pytest.raises(ValueError, match="got rank 1: OSError: no such file"):
        load_parts(run.local_params, comms, read())


class Scaled(nn.Module):
    """Has a parameter without dimensions, whose moments look like a count of steps."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(7, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.layer(x)


@on_ranks(2)
def test_a_parameter_that_is_one_number(comms):
    for stage in (2, 3):
        torch.manual_seed(0)
        run = Run(comms, stage, Scaled())
        run.steps(0, 1)
        whole = whole_state(run.local_params, comms, run.model, run.optimizer)
        parts = gathered(comms, own_parts(run.local_params, run.optimizer))
        run.steps(2)
        again = Run(comms, 5 - stage, Scaled())
        load_parts(again.local_params, comms, parts, again.optimizer)
        if again.stage < 3:
            again.sharded.all_gather()
        again.steps(2)
        torch.testing.assert_close(again.weights(), run.weights())
        alone = comms.subgroup([0])
        if alone is not None:
            adam(Scaled().parameters()).load_state_dict(whole[1])
            single = Run(alone, stage, Scaled())
            load_parts(single.local_params, alone, [from_torch(Scaled(), *whole)], single.optimizer)
            moments = [s["exp_avg"].shape for s in single.optimizer.state.values()]
            assert sorted(moments) == [(1,), (3,), (21,)]


class Own(nn.Module):
    """Has a parameter and no reset_parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@on_ranks(2, 3)
def test_a_model_that_was_never_whole(comms):
    def build():
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.BatchNorm1d(6))
        model[3].weight = model[0].weight
        return model

    with torch.device("meta"):
        model = build()
    torch.manual_seed(0)
    most = 0
    for layer in model:
        fully_shard(layer, comms)
        whole = [p for p in model.parameters() if not p.is_meta and p.dim() > 1]
        most = max(most, len(whole))
    assert most == 0, "each is in parts before the next is made"
    sharded = fully_shard(model, comms)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model[4].running_var.tolist() == [1.0] * 6
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    sharded.remove()
    assert model[3].weight is model[0].weight
    with torch.device("meta"):
        own = Own()
    with pytest.raises(ValueError, match=r"reset_parameters.., got .* a Own on the meta device"):
        fully_shard(own, comms)
    own.reset_parameters = lambda: own.scale.fill_(comms.rank + 2.0)
    fully_shard(own, comms)
    assert all(value == 2 for value in own.scale.tolist()), "rank 0's"


@on_ranks(2, 3)
def test_an_optimizer_that_has_state_already_goes_on_from_the_loaded_one(comms):
    for stage in (2, 3):
        run, again = Run(comms, stage), Run(comms, stage)
        parts = gathered(comms, own_parts(run.local_params, run.optimizer))
        run.steps(0)
        load_parts(run.local_params, comms, parts, run.optimizer)
        if stage < 3:
            run.sharded.all_gather()
        for trained in (run, again):
            trained.steps(1)
        torch.testing.assert_close(run.weights(), again.weights())


@on_ranks(2)
def test_a_whole_state_does_not_change_with_the_model(comms):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sharded = fully_shard(model, comms)
    kept = sharded.whole_state_dict()
    before = copy.deepcopy(kept)
    model(torch.randn(8, 4))
    assert all(torch.equal(kept[name], value) for name, value in before.items())


@on_ranks(3)
def test_a_parameter_without_values_keeps_its_shape(comms):
    model = nn.Linear(4, 4)
    model.nothing = nn.Parameter(torch.zeros(0, 5))
    whole = fully_shard(model, comms).whole_state_dict()
    assert comms.rank > 0 or whole["nothing"].shape == (0, 5)


@on_ranks(2)
def test_what_only_one_rank_cannot_initialise_is_refused_on_all(comms):
    with torch.device("meta" if comms.rank else "cpu"):
        model = Own()
    with pytest.raises(ValueError, match=r"reset_parameters.., got rank 1: a Own on the"):
        fully_shard(model, comms)
