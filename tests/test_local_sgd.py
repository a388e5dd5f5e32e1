"""Local SGD and DiLoCo: against one process, PyTorch's own, and what cannot be."""

import copy
import re

import pytest
import torch
from ddp_pairs import data, errors_from_warnings_of_ours_only, mlp, sgd
from ranks import on_ranks
from torch.nn.functional import mse_loss

from microddp.comms import Comms
from microddp.local_sgd import Local, LocalSteps, Outer
from microddp.replicas import check_replicas
from microddp.step import take_step
from microddp.strategies import average_gradients

DILOCO = Outer(0.7, 0.9)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def replica(dtype=torch.float64):
    torch.manual_seed(0)
    return mlp().to(dtype)


def train_alone(module, optimizer, comms, step):
    optimizer.zero_grad()
    x, y = (tensor.to(next(module.parameters()).dtype) for tensor in data(comms.rank, step))
    mse_loss(module(x), y).backward()


def trained(comms, steps, optimizer=torch.optim.SGD, lr=0.05, **options):
    """A replica after so many steps, and the mechanism."""
    module = replica()
    local = LocalSteps(module, comms, **options)
    inner = optimizer(module.parameters(), lr=lr)
    for step in range(steps):
        train_alone(module, inner, comms, step)
        if local.warming_up:
            average_gradients(module, comms)
        inner.step()
        local.after_step()
    return module, local


def trained_together(comms, steps):
    """A replica after so many data-parallel steps, and its optimizer."""
    module = replica()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        train_alone(module, optimizer, comms, step)
        average_gradients(module, comms)
        optimizer.step()
    return module, optimizer


@on_ranks(1, 2, 3)
def test_a_meeting_after_each_step_is_data_parallel_training(comms):
    module, _ = trained(comms, 6, every=1)
    expected, _ = trained_together(comms, 6)
    torch.testing.assert_close(flat(module), flat(expected), rtol=1e-12, atol=1e-12)
    check_replicas(module, comms)


@on_ranks(2, 3)
def test_means_of_weights_are_pytorchs(comms):
    with errors_from_warnings_of_ours_only():
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
    for warm_up in (0, 2):
        module, _ = trained(comms, 11, every=4, warm_up=warm_up)
        expected = replica()
        averager = PeriodicModelAverager(period=4, warmup_steps=warm_up + 3)
        inner = torch.optim.SGD(expected.parameters(), lr=0.05)
        theirs = PostLocalSGDOptimizer(inner, averager)
        for step in range(11):
            train_alone(expected, theirs, comms, step)
            if step < warm_up:
                average_gradients(expected, comms)
            theirs.step()
        torch.testing.assert_close(flat(module), flat(expected), rtol=1e-12, atol=1e-12)
        assert (11 - warm_up) % 4, "the ranks are apart in the end"
        everyone = comms.all_gather(flat(module))
        assert not torch.equal(everyone[0], everyone[1])


@on_ranks(2)
def test_diloco_is_its_algorithm(comms):
    """Written out: ranks one after the other, in one process each, and SGD by hand."""
    module, _ = trained(comms, 9, torch.optim.AdamW, lr=1e-3, every=3, outer=DILOCO)
    shared = flat(replica())
    velocity = torch.zeros_like(shared)
    workers = [replica() for _ in range(comms.world_size)]
    inner = [torch.optim.AdamW(worker.parameters(), lr=1e-3) for worker in workers]
    for meeting in range(3):
        gone = []
        for rank, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            torch.nn.utils.vector_to_parameters(shared.clone(), worker.parameters())
            for step in range(3 * meeting, 3 * meeting + 3):
                optimizer.zero_grad()
                x, y = (tensor.double() for tensor in data(rank, step))
                mse_loss(worker(x), y).backward()
                optimizer.step()
            gone.append(shared - flat(worker))
        gradient = torch.stack(gone).mean(dim=0)
        velocity = DILOCO.momentum * velocity + gradient
        shared = shared - DILOCO.lr * (gradient + DILOCO.momentum * velocity)
    torch.testing.assert_close(flat(module), shared, rtol=1e-9, atol=1e-9)
    check_replicas(module, comms)


@on_ranks(2)
def test_diloco_begins_where_the_warm_up_ends(comms):
    """As one that begins with the weights of then."""
    module, _ = trained(comms, 8, every=3, warm_up=2, outer=DILOCO)
    expected, inner = trained_together(comms, 2)
    local = LocalSteps(expected, comms, every=3, outer=DILOCO)
    for step in range(2, 8):
        train_alone(expected, inner, comms, step)
        inner.step()
        local.after_step()
    torch.testing.assert_close(flat(module), flat(expected), rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_the_wrong_sign_is_noticed(comms):
    """Local minus original: the shared weights would go away from where the ranks went."""

    def loss_after(meetings, local_steps=LocalSteps):
        module = replica()
        local = local_steps(module, comms, 2)
        inner = torch.optim.SGD(module.parameters(), lr=0.05)
        for _ in range(2 * meetings):
            train_alone(module, inner, comms, 0)
            inner.step()
            local.after_step()
        x, y = (tensor.double() for tensor in data(comms.rank, 0))
        return mse_loss(module(x), y).item()

    class Wrong(LocalSteps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for fragment in self.fragments:
                step = fragment.optimizer.step
                fragment.optimizer.step = lambda f=fragment, s=step: (f.shared.grad.neg_(), s())

    assert loss_after(10, Wrong) > loss_after(0) > loss_after(10)


@on_ranks(2, 3)
def test_fragments_meet_in_turns(comms):
    module = replica()
    local = LocalSteps(module, comms, 6, outer=DILOCO, fragments=3)
    assert sum(len(f.parameters) for f in local.fragments) == len(list(module.parameters()))
    sizes = [f.shared.numel() for f in local.fragments]
    assert max(sizes) < 2 * min(sizes)
    inner = torch.optim.SGD(module.parameters(), lr=0.05)
    sent, shared = [], [f.shared.detach().clone() for f in local.fragments]
    for step in range(1, 14):
        train_alone(module, inner, comms, step)
        inner.step()
        local.after_step()
        sent.append([f.sent_after == step for f in local.fragments])
        # What was sent in a step has arrived in the next.
        moved = [
            not torch.equal(f.shared, old) for f, old in zip(local.fragments, shared, strict=True)
        ]
        assert moved == (sent[-2] if step > 1 else [False] * 3), step
        shared = [f.shared.detach().clone() for f in local.fragments]
    turns = [[step for step, row in enumerate(sent, 1) if row[f]] for f in range(3)]
    assert turns == [[6, 12], [2, 8], [4, 10]]
    everyone = comms.all_gather(flat(module))
    assert not torch.equal(everyone[0], everyone[1])
    local.meet()
    check_replicas(module, comms)
    before = flat(module)
    local.meet()
    assert torch.equal(flat(module), before), "nothing has happened since"


@on_ranks(2)
def test_a_fragment_of_one_parameter_is_averaged_too(comms):
    for module, fragments in ((torch.nn.Linear(4, 4, bias=False), 1), (replica(), 4)):
        fragments = min(fragments, len(list(module.parameters())))
        local = LocalSteps(module, comms, 2 * fragments, fragments=fragments)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(comms.rank + 1.0)
        for _ in range(2 * fragments):
            local.after_step()
        local.meet()
        check_replicas(module, comms)


@on_ranks(2)
def test_steps_go_on_while_a_fragment_travels(comms):
    """What a rank has learned meanwhile is kept: its weights less those that it had sent."""
    module = replica()
    local = LocalSteps(module, comms, 4, fragments=2)
    inner = torch.optim.SGD(module.parameters(), lr=0.05)
    fragment = local.fragments[1]
    weights = []
    for step in range(1, 4):
        train_alone(module, inner, comms, step)
        inner.step()
        weights.append(fragment._flat())
        local.after_step()
    learned = weights[2] - weights[1]
    expected = comms.all_gather(learned)[comms.rank] + fragment.shared.detach()
    torch.testing.assert_close(fragment._flat(), expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_it_goes_on_bitwise_from_a_meeting(comms):
    for options in ({"outer": DILOCO}, {"fragments": 2, "outer": DILOCO}, {"warm_up": 3}):
        results = []
        for parts in ((8,), (4, 4)):
            module, step = replica(torch.float32), 0
            local = LocalSteps(module, comms, 3, **options)
            inner = sgd(module)
            for steps in parts:
                if step:
                    saved = copy.deepcopy((local.state_dict(), inner.state_dict()))
                    local = LocalSteps(module, comms, 3, **options)
                    local.load_state_dict(saved[0])
                    inner = sgd(module)
                    inner.load_state_dict(saved[1])
                for _ in range(steps):
                    train_alone(module, inner, comms, step)
                    if local.warming_up:
                        average_gradients(module, comms)
                    inner.step()
                    local.after_step()
                    step += 1
                    if step in (4, 8):
                        local.meet()
            results.append(flat(module))
        assert torch.equal(*results), options


@on_ranks(3)
def test_ranks_with_other_numbers_of_steps_are_told_on_all(comms):
    module = replica()
    local = LocalSteps(module, comms, 2)
    inner = torch.optim.SGD(module.parameters(), lr=0.05)
    message = f"rank {comms.rank}: expected the same number of steps on every rank .* got 2, 2, 1"
    for step in range(1 if comms.rank == 2 else 2):
        train_alone(module, inner, comms, step)
        inner.step()
        if step == 0:
            local.after_step()
    with pytest.raises(RuntimeError, match=message):
        (local.meet if comms.rank == 2 else local.after_step)()


@on_ranks(2)
def test_what_cannot_be_is_refused(comms):
    who = f"rank {comms.rank}: expected "
    for options in (
        {"every": 0},
        {"every": 2, "warm_up": -1},
        {"every": 2, "fragments": 3},
        {"every": 2, "fragments": 0},
    ):
        with pytest.raises(ValueError, match=f"{who}a meeting every 1 or more steps"):
            LocalSteps(replica(), comms, **options)
    norm = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=f"{who}no running statistics, got BatchNorm1d in 1"):
        LocalSteps(norm, comms, 2)
    norm = torch.nn.Sequential(torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    with pytest.raises(ValueError, match=f"{who}no running statistics, got InstanceNorm1d in 0"):
        LocalSteps(norm, comms, 2)
    mixed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
    with pytest.raises(ValueError, match=f"{who}parameters of one dtype"):
        LocalSteps(mixed, comms, 2)


def test_outer_steps_are_read():
    assert Outer.parse("mean") == Outer(1.0, 0.0)
    assert Outer.parse("nesterov:0.7,0.9") == DILOCO
    for text in ("", "sgd", "nesterov", "nesterov:0.7", "nesterov:0,0.9", "nesterov:0.7,1"):
        with pytest.raises(ValueError, match=re.escape(f"got {text!r}")):
            Outer.parse(text)


@on_ranks(3)
def test_ranks_begin_with_rank_0s_weights(comms: Comms):
    torch.manual_seed(comms.rank)
    module = mlp()
    LocalSteps(module, comms, 2)
    check_replicas(module, comms)


@on_ranks(2)
def test_the_strategy_ends_with_equal_weights_and_says_what_it_sent(comms):
    module = replica()
    strategy = Local(module, comms, local=LocalSteps(module, comms, 4))
    optimizer = sgd(module)
    for step in range(6):
        batch = [tensor.double() for tensor in data(comms.rank, step)]
        take_step(strategy, mse_loss, optimizer, batch)
    strategy.meet()
    assert torch.equal(*comms.all_gather(flat(module)))
    assert strategy.sent_bytes() == flat(module).nbytes / 4


@on_ranks(2)
def test_what_is_under_way_when_a_state_is_loaded_comes_to_nothing(comms):
    module = replica(torch.float64)
    local = LocalSteps(module, comms, 4, outer=DILOCO, fragments=2)
    saved = copy.deepcopy(local.state_dict())
    begun = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p += comms.rank + 1
    for _ in range(4):
        local.after_step()  # after which one of the fragments is sent
    with torch.no_grad():
        for p, at_first in zip(module.parameters(), begun, strict=True):
            p.copy_(at_first)
    local.load_state_dict(saved)
    local.meet()
    assert all(map(torch.equal, begun, module.parameters()))
