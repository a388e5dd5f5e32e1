"""Our DDP against PyTorch's, bit for bit: unused parameters, hooks, uneven inputs, groups."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ddp_pairs import (
    NO_BROADCAST,
    SMALL,
    VIEWS,
    WIDTH,
    Branches,
    Pair,
    accumulating,
    data,
    loss_of,
    mlp,
    plain_step,
    sgd,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.allreduce import ring_all_reduce
from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.replicas import check_replicas
from microddp.shared import ALL_REDUCES, all_reduce_hook
from microddp.timing import Timeline

CAPS = ({}, {"bucket_cap_mb": SMALL})


# ---- unused parameters


def leaving_out(comms, who, set_to_none=True, fill=None, only_left=False):
    """A step in which the ranks of ``who(step)`` leave ``middle`` out."""

    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        optimizer.zero_grad(set_to_none=set_to_none)
        if fill is not None:
            for p in ddp.parameters():
                p.grad = torch.full_like(p, fill + comms.rank)
        outputs = ddp(x, comms.rank not in who(step))
        loss_of(outputs[:1] if only_left else outputs, y).backward()
        optimizer.step()

    return body


def used_before_the_last_micro_batch(comms):
    """Used under no_sync, and not in the forward pass that synchronises."""

    def body(ddp, optimizer, step):
        optimizer.zero_grad()
        x, y = data(comms.rank, step)
        with ddp.no_sync():
            loss_of(ddp(x, True), y).backward()
        loss_of(ddp(y, comms.rank == 1 and step == 2), x).backward()
        optimizer.step()

    return body


@on_ranks(1, 3)
def test_finding_unused_parameters_is_equal(comms):
    everyone = range(comms.world_size)
    wishes = {
        "none": lambda _: (),
        "all ranks": lambda _: everyone,
        "some ranks": lambda step: (0,) if step % 2 else everyone[1:],
        "now and then": lambda step: everyone if step % 2 else (),
    }
    for view, cap in itertools.product(VIEWS, CAPS):
        options = {"find_unused_parameters": True, **view, **cap}
        for name, who in wishes.items():
            for extra in ({}, {"set_to_none": False}, {"fill": 3.0}, {"only_left": True}):
                body = leaving_out(comms, who, **extra)
                pair = Pair(comms, Branches, **options)
                # The gradients that this fills in stay as they are where nobody has others.
                pair.train(body, what=(name, extra, options), alike="fill" not in extra)
        for body in (accumulating, used_before_the_last_micro_batch):
            Pair(comms, Branches, **options).train(body(comms), what=(body, options))


@on_ranks(2, 3)
def test_unused_parameters_keep_none_or_get_the_average(comms):
    for view in VIEWS:
        ddp = DDP(Branches(), comms, find_unused_parameters=True, **view)
        weight = ddp.module.middle.weight
        x, y = data(comms.rank, 0)
        loss_of(ddp(x, False), y).backward()
        assert weight.grad is None, "no rank used it"
        loss_of(ddp(x, comms.rank == 0), y).backward()
        mine = torch.zeros_like(weight)
        if comms.rank == 0:
            left, _ = ddp.module(x)
            mine = torch.autograd.grad(mse_loss(left, y), weight)[0]
        comms.all_reduce_mean(mine)
        torch.testing.assert_close(weight.grad, mine)
        assert weight.grad.any()


@on_ranks(2)
def test_a_loss_that_needs_no_parameter_is_a_step_too(comms):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, use):
            return self.layer(x) if use else x * 2

    ddp = DDP(Sometimes(), comms, find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        x, y = data(comms.rank, step)
        x.requires_grad_()
        mse_loss(ddp(x, comms.rank == 0), y).backward()
        assert ddp.module.layer.weight.grad.any(), "rank 1 has rank 0's, halved"
        everyone = comms.all_gather(ddp.module.layer.weight.grad)
        assert torch.equal(everyone[0], everyone[1])


@on_ranks(3)
def test_a_static_graph_is_equal(comms):
    for view in VIEWS:
        for cap in CAPS:
            options = {"static_graph": True, **view, **cap}
            for who in ((), range(comms.world_size)):
                body = leaving_out(comms, lambda _, who=who: who)
                Pair(comms, Branches, **options).train(body, what=(who, options))

            def first_without_no_sync(ddp, optimizer, step):  # with it PyTorch's own fails
                accumulating(comms, 3 if step else 1)(ddp, optimizer, step)

            Pair(comms, Branches, **options).train(first_without_no_sync, what=options)


@on_ranks(2)
def test_a_static_graph_may_return_what_the_loss_does_not_need(comms):
    # PyTorch's own averages nothing in the second step, and raises in the third.
    results = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(0)
        ddp = DDP(Branches(), comms, **options)
        body, optimizer = leaving_out(comms, lambda _: (), only_left=True), sgd(ddp)
        for step in range(4):
            body(ddp, optimizer, step)
        check_replicas(ddp.module, comms)
        assert ddp.module.right.weight.grad is None
        results.append(torch.nn.utils.parameters_to_vector(ddp.parameters()))
    assert torch.equal(*results), "at two ranks the order of addition does not matter"


@on_ranks(2)
def test_a_static_graph_may_begin_with_accumulation(comms):
    results = []
    for static in (False, True):
        torch.manual_seed(0)
        ddp = DDP(Branches(), comms, static_graph=static)
        for step in range(3):
            accumulating(comms)(ddp, sgd(ddp), step)
        results.append(torch.nn.utils.parameters_to_vector(ddp.parameters()))
    assert torch.equal(*results), "at two ranks the order of addition does not matter"


# ---- sparse gradients


@on_ranks(2, 3)
def test_sparse_gradients_are_equal(comms):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, WIDTH, sparse=True)
            self.bag = nn.EmbeddingBag(20, WIDTH, sparse=True)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            words = (x * 10).long().abs() % 20
            return self.last(self.words(words[:, 0]) + self.bag(words))

    for cap in CAPS:
        for more in ({}, {"find_unused_parameters": True}):
            pair = Pair(comms, Bag, **cap, **more)
            pair.optimizers = [
                torch.optim.SGD(d.parameters(), 0.05) for d in (pair.ours, pair.theirs)
            ]
            pair.train(plain_step(comms), what=(cap, more))
            assert pair.ours.module.words.weight.grad.is_sparse


# ---- hooks


@on_ranks(3)
def test_pytorchs_own_hooks_are_equal(comms):
    hooks = (
        (None, default_hooks.allreduce_hook),
        (dist.group.WORLD, default_hooks.fp16_compress_hook),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    )
    for view in VIEWS:
        for cap in CAPS:
            for hook in hooks:
                for body in (plain_step, accumulating):
                    make = mlp if body is plain_step else Branches
                    pair = Pair(comms, make, **view, **cap)
                    pair.ours.register_comm_hook(*hook)
                    pair.theirs.register_comm_hook(*hook)
                    pair.train(body(comms), what=(hook, view, cap))


@on_ranks(2)
def test_hooks_get_the_same_buckets_and_gradients_as_pytorchs(comms):
    def note(seen, bucket):
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        shapes = [tuple(g.shape) for g in bucket.gradients()]
        assert shapes == [tuple(p.shape) for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), shapes, bucket.buffer().clone()))
        future = torch.futures.Future()
        future.set_result(bucket.buffer().zero_() if bucket.index() else bucket.buffer() * 2)
        return future

    for options in CAPS:
        pair = Pair(comms, mlp, **options)
        ours, theirs = [], []
        pair.ours.register_comm_hook(ours, note)
        pair.theirs.register_comm_hook(theirs, note)
        for step in range(3):
            pair.each(plain_step(comms), step)
            pair.check(step)
        assert len(ours) == len(theirs) > 2
        for mine, other in zip(ours, theirs, strict=True):
            assert mine[:3] == other[:3]
            assert torch.equal(mine[3], other[3])


@on_ranks(3, 4)
def test_every_algorithm_of_this_book_can_carry_the_gradients(comms):
    for name, algorithm in ALL_REDUCES.items():
        for cap in CAPS:
            pair = Pair(comms, Branches, gradient_as_bucket_view=True, **cap)
            pair.ours.register_comm_hook((comms, algorithm), all_reduce_hook)
            body = accumulating(comms)
            for step in range(5):
                pair.each(body, step)
                for p, q in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
                    # Another order of addition, in float32.
                    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
            check_replicas(pair.ours.module, comms)


@on_ranks(2)
def test_what_goes_wrong_in_a_hook_is_raised_by_backward(comms):
    for error in (KeyError, SystemExit):  # the thread's end must not be the main thread's wait

        def fail(*_, error=error):
            raise error("in the algorithm")

        ddp = DDP(mlp(), comms)
        ddp.register_comm_hook((comms, fail), all_reduce_hook)
        loss = ddp(data(comms.rank, 0)[0]).sum()
        with pytest.raises(RuntimeError, match=f"{error.__name__}: .*in the algorithm"):
            loss.backward()
    with pytest.raises(RuntimeError, match=f"rank {comms.rank}: expected one hook, got a second"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)


@on_ranks(2)
def test_a_timeline_sees_the_buckets_that_a_hook_sends(comms):
    hooks = (comms.group, default_hooks.allreduce_hook), ((comms, ring_all_reduce), all_reduce_hook)
    for state, hook in hooks:
        ddp = DDP(mlp(), comms, bucket_cap_mb=SMALL)
        ddp.register_comm_hook(state, hook)
        timeline = Timeline(comms)
        ddp.reducer.buckets.timeline = timeline
        for step in range(2):
            timeline.take()
            ddp(data(comms.rank, step)[0]).sum().backward()
        spans = timeline.take()
        for lane in ("communication", "wait"):
            assert sum(s.lane == lane for s in spans) == len(ddp.reducer.buckets.all) > 1
        sent = [s.nbytes for s in spans if s.lane == "communication"]
        assert sorted(sent) == sorted(b.buffer().nbytes for b in ddp.reducer.buckets)


# ---- uneven inputs


def batches(comms, kind):
    return {
        "one more each": comms.rank + 1,
        "one less each": comms.world_size - comms.rank,
        "none at first": comms.rank * 2,
        "none at last": 3 if comms.rank == 0 else 0,
        "even": 3,
    }[kind]


@on_ranks(1, 2, 3)
def test_uneven_inputs_are_equal(comms):
    options = (
        {},
        {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        *NO_BROADCAST,
    )
    for kind in ("one more each", "one less each", "none at first", "none at last", "even"):
        for initial in (True, False):
            for more in options:
                if "static_graph" in more and kind.startswith("none"):
                    continue  # PyTorch's own fails if a rank joins before the first step
                pair = Pair(comms, Branches, **more)

                def epoch(ddp, optimizer, kind=kind, initial=initial, more=more):
                    body = accumulating(comms, 1 if "static_graph" in more else 2)
                    with ddp.join(divide_by_initial_world_size=initial):
                        for step in range(batches(comms, kind)):
                            body(ddp, optimizer, step)

                # Twice: the first time may end before the buckets are planned anew.
                for times in range(2):
                    pair.each(epoch)
                    pair.check((kind, initial, more, times))
                check_replicas(pair.ours.module, comms)
                pair.each(accumulating(comms, 1), 9)
                pair.check("a step after it")


@on_ranks(2)
def test_a_rank_without_a_batch_joins_a_static_graph(comms):
    results = []
    for static in (False, True):
        torch.manual_seed(0)
        ddp = DDP(Branches(), comms, static_graph=static)
        optimizer = sgd(ddp)
        with ddp.join():
            for step in range(batches(comms, "none at first")):
                accumulating(comms)(ddp, optimizer, step)
        accumulating(comms)(ddp, sgd(ddp), 9)  # a new one: momentum is not shared
        check_replicas(ddp.module, comms)
        results.append(torch.nn.utils.parameters_to_vector(ddp.parameters()))
    assert torch.equal(*results), "at two ranks the order of addition does not matter"


@on_ranks(2)
def test_the_mean_is_over_all_ranks_or_those_with_a_batch(comms):
    for initial in (True, False):
        ddp = DDP(nn.Linear(1, 1, bias=False), comms)
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(1 + comms.rank):
                ddp.zero_grad()
                ddp(torch.full((1, 1), 4.0)).sum().backward()
        if comms.rank == 1:
            assert ddp.module.weight.grad.item() == (2.0 if initial else 4.0)


@on_ranks(2)
def test_a_rank_may_evaluate_before_its_second_backward_when_others_have_joined(comms):
    for mode in (torch.no_grad, torch.inference_mode):  # the buckets are planned anew in it
        ddp = DDP(mlp(), comms)
        with ddp.join():
            for step in range(1 + comms.rank):
                if step == 1:
                    with mode():
                        ddp(data(0, 0)[0])
                plain_step(comms)(ddp, sgd(ddp), step)
        check_replicas(ddp.module, comms)


@on_ranks(2)
def test_a_joined_job_can_end_early_and_several_wrappers_join(comms):
    ddp, other = DDP(Branches(), comms), DDP(mlp(), comms)

    def train(steps):
        for step in range(steps):
            accumulating(comms, 1)(ddp, sgd(ddp), step)
            other(data(comms.rank, step)[0]).sum().backward()

    with Join([ddp, other]):
        train(1 + 2 * comms.rank)
    for module in (ddp.module, other.module):
        check_replicas(module, comms)
    with pytest.raises(RuntimeError), ddp.join(throw_on_early_termination=True):
        train(1 + 2 * comms.rank)
    with ddp.join(enable=False):
        train(2)


# ---- groups


@on_ranks(3)
def test_a_process_group_in_the_place_of_comms_is_equal(comms):
    Pair(comms, Branches, dist.group.WORLD).train(accumulating(comms))
    few = dist.new_group([0, 2])
    if comms.rank != 1:
        members = Comms.of_group(few, comms.device)
        pair = Pair(members, Branches, few, bucket_cap_mb=SMALL)
        assert (pair.ours.comms.world_size, pair.ours.comms.rank) == (2, comms.rank // 2)
        pair.train(accumulating(members))
    ours = comms.subgroup([1, 2])
    if ours:
        ddp = DDP(mlp(), ours)
        ddp(data(comms.rank, 0)[0]).sum().backward()
        check_replicas(ddp.module, ours)
        with pytest.raises(RuntimeError, match="only a wrapper over all ranks can be copied"):
            ddp.__getstate__()
    comms.barrier()


@on_ranks(2)
def test_without_either_it_is_over_all_ranks(comms):
    ddp = DDP(mlp())
    assert ddp.comms.world_size == 2
    ddp(data(comms.rank, 0)[0]).sum().backward()
    everyone = comms.all_gather(ddp.module[0].weight.grad)
    assert torch.equal(everyone[0], everyone[1])


@on_ranks(2)
def test_gradients_of_an_input_are_computed_before_a_backward(comms):
    """A penalty on them: autograd goes through the output, and accumulates nothing."""

    def penalised(ddp, optimizer, step):
        optimizer.zero_grad()
        x = data(comms.rank, step)[0].requires_grad_()
        loss = ddp(x)
        loss = loss.sum(1).square().mean()
        (of_input,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + of_input.norm()).backward()
        optimizer.step()

    for options in ({}, {"find_unused_parameters": True}):
        Pair(
            comms, lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)), **options
        ).train(penalised, what=options)


@on_ranks(1, 2)
def test_a_model_may_be_evaluated_in_inference_mode_before_it_trains(comms):
    ddp = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), comms)
    with torch.inference_mode():
        ddp(torch.ones(4, 4))
    for _ in range(2):
        ddp(torch.randn(4, 4)).square().sum().backward()
    check_replicas(ddp.module, comms)


@on_ranks(2)
def test_that_buffers_are_copied_can_be_changed_later(comms):
    for kind in (DDP, TorchDDP):
        ddp = kind(nn.BatchNorm1d(2))
        ddp.forward_sync_buffers = ddp.broadcast_buffers = False
        for _ in range(2):
            ddp(torch.full((2, 2), float(comms.rank))).sum().backward()
        mean = comms.all_gather(ddp.module.running_mean)
        assert not torch.equal(mean[0], mean[1]), kind
