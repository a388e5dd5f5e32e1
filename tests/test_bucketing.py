"""Bucket plans against PyTorch's, and bucketed hooks against one process on the whole batch."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.backward import Backward
from microddp.bucketing import BucketedDDPHooks
from microddp.buckets import GradientBucket, bucket_caps, plan_buckets
from microddp.ddp import DDP
from microddp.model import FullMLP
from microddp.replicas import broadcast_parameters, check_replicas
from microddp.report import MIB
from microddp.timing import NOT_RECORDED

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


# ---- plans


def pytorchs_plan(tensors, caps, sparse=(), in_order=True):
    """The plan of torch, which is in the order of the buckets' first tensors unless told not."""
    indices = list(range(len(tensors))) if in_order else []
    plan, _ = dist._compute_bucket_assignment_by_size(tensors, list(caps), list(sparse), indices)
    return plan


def resnet18():
    """The shapes of ResNet-18's parameters, in their order of definition."""

    def conv(outputs, inputs, size):
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]  # and its batch norm

    shapes = conv(64, 3, 7)
    width = 64
    for stage in (64, 128, 256, 512):
        for block in range(2):
            shapes += conv(stage, width, 3) + conv(stage, stage, 3)
            if block == 0 and stage != 64:
                shapes += conv(stage, width, 1)
            width = stage
    shapes += [(1000, 512), (1000,)]
    return [torch.empty(shape, device="meta") for shape in shapes]


@pytest.mark.parametrize(
    ("cap_mb", "sizes"),
    [(25, [2052000, 28852224, 15853824]), (35, [2052000, 38297600, 6408448])],
)
def test_the_published_bucket_sizes_of_resnet18(cap_mb, sizes):
    parameters = resnet18()[::-1]
    assert sum(p.numel() for p in parameters) == 11_689_512
    caps = [1 * MIB, cap_mb * MIB]
    plan = plan_buckets(parameters, caps)
    assert [sum(parameters[i].nbytes for i in bucket) for bucket in plan] == sizes
    assert plan == pytorchs_plan(parameters, caps)


def test_plans_of_known_models_are_pytorchs():
    models = {
        "mlp": FullMLP(64, depth=9),
        "one": nn.Linear(3, 1, bias=False),
        "transformer": nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        "lstm": nn.LSTM(8, 16, 3),
        "resnet": nn.ParameterList(resnet18()),
    }
    for name, model in models.items():
        for parameters in (list(model.parameters()), list(model.parameters())[::-1]):
            for caps in ([1], [100], [1000, 5000], [0, 3000, 100], [1 << 40], [MIB, 25 * MIB]):
                plan = plan_buckets(parameters, caps)
                assert plan == pytorchs_plan(parameters, caps), (name, caps)
                assert sorted(i for bucket in plan for i in bucket) == list(range(len(parameters)))


tensors_of_one_dtype = st.lists(st.integers(0, 50), min_size=1, max_size=30)
limits = st.lists(st.integers(1, 400), min_size=1, max_size=4)


@given(sizes=tensors_of_one_dtype, caps=limits, data=st.data())
def test_any_plan_of_one_dtype_is_pytorchs(sizes, caps, data):
    tensors = [torch.empty(size) for size in sizes]
    sparse = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    assert plan_buckets(tensors, caps) == pytorchs_plan(tensors, caps)
    assert plan_buckets(tensors, caps, sparse) == pytorchs_plan(tensors, caps, sparse)


@given(
    tensors=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from(DTYPES), st.booleans()), min_size=1
    ),
    caps=limits,
)
def test_any_plan_of_several_dtypes_has_pytorchs_buckets(tensors, caps):
    sparse = [is_sparse for *_, is_sparse in tensors]
    made = [torch.empty(size, dtype=dtype) for size, dtype, _ in tensors]
    plan = plan_buckets(made, caps, sparse)
    # Which bucket comes first is not said, where it was filled last: that of a hash table's order.
    assert sorted(plan) == sorted(pytorchs_plan(made, caps, sparse, in_order=False))
    assert sorted(plan) == sorted(pytorchs_plan(made, caps, sparse))
    full = [b for b in plan if not sparse[b[0]]]
    for kind in DTYPES:
        of_kind = [b for b in full if made[b[0]].dtype == kind]
        assert [i for b in of_kind for i in b] == sorted(i for b in of_kind for i in b)


def test_what_is_left_of_several_dtypes_comes_in_the_order_of_its_last_tensor():
    single, double = torch.empty(1), torch.empty(1, dtype=torch.float64)
    assert plan_buckets([single, double, single], [100]) == [[1], [0, 2]]
    assert plan_buckets([single, double, double, single, single], [8]) == [[1], [2], [0, 3], [4]]
    # A kind has caps of its own: the first bucket of each is small.
    assert plan_buckets([single, double, single, single, double], [4, 8]) == [[0], [1], [2, 3], [4]]


# ---- one bucket


def parameters_of(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def copy_in(bucket, divisor, as_view):
    """Bring all gradients in, as a backward does that has only this bucket."""
    slots = range(len(bucket.parameters()))
    places = {slot: (0, slot) for slot in slots}
    alone = {"plan": [slots], "places": places, "all": [bucket], "send": lambda _: None}
    how = {"divisor": divisor, "as_view": as_view, "timeline": NOT_RECORDED}
    backward = Backward(SimpleNamespace(**alone, **how))
    with torch.no_grad():
        for slot, p in enumerate(bucket.parameters()):
            backward.mark_ready(slot, p.grad)
    return backward


def test_a_bucket_holds_gradients_side_by_side():
    parameters = parameters_of((2, 3), (), (0,), (4,))
    bucket = GradientBucket(parameters, index=3, is_last=False)
    assert (bucket.index(), bucket.is_last()) == (3, False)
    assert bucket.parameters() == parameters
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, i + 1.0)
    copy_in(bucket, 2, as_view=False)
    assert bucket.buffer().tolist() == [0.5] * 6 + [1] + [2] * 4
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in parameters]
    bucket.buffer().mul_(10)
    assert parameters[0].grad.eq(1).all(), "copied, not shared"
    bucket.copy_out(as_view=False)
    assert [p.grad.unique().tolist() for p in parameters] == [[5], [10], [], [20]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_many_gradients_in_one_call_are_scaled_as_one_by_one(dtype):
    large, channels = (800, 800), (4, 3, 2, 2)  # too large to wait for the others; not plain
    for shapes in ([(5,), (3, 3), (7,)], [large, (5,), (3, 3)], [channels, (5,)], [large, large]):
        parameters = parameters_of(*shapes, dtype=dtype)
        if channels in shapes:
            parameters[0] = nn.Parameter(parameters[0].data.to(memory_format=torch.channels_last))
        bucket = GradientBucket(parameters)
        assert bucket.large == [shape == large for shape in shapes]
        for at_home in (False, True):  # as copies or none, and as views of the bucket
            grads = [torch.randn(p.shape).to(dtype) for p in parameters]
            for p, view, grad in zip(parameters, bucket.views, grads, strict=True):
                p.grad = view.copy_(grad) if at_home else grad.clone()
            copy_in(bucket, 3, as_view=True)
            for view, grad in zip(bucket.views, grads, strict=True):
                assert torch.equal(view, grad / 3 if at_home else grad * (1 / 3)), shapes


def test_a_sparse_gradient_is_let_go_of_once_it_is_on_its_way():
    (p,) = parameters_of((3, 2))
    bucket = GradientBucket([p], sparse=True)
    p.grad = torch.eye(3, 2).to_sparse(1)
    backward = copy_in(bucket, 2, as_view=False)
    assert backward.complete
    assert backward.waiting == [{}]
    assert bucket.buffer().to_dense().equal(torch.eye(3, 2) / 2)


def test_as_views_gradients_live_in_the_bucket():
    (p,) = parameters_of((2, 2))
    bucket = GradientBucket([p])
    p.grad = torch.ones(2, 2)
    copy_in(bucket, 4, as_view=True)
    assert p.grad.data_ptr() == bucket.buffer().data_ptr()
    bucket.buffer().fill_(8)
    bucket.copy_out(as_view=True)
    assert p.grad.eq(8).all()
    copy_in(bucket, 4, as_view=True)
    assert bucket.buffer().eq(2).all(), "divided in place, not copied over itself"


def test_a_gradient_that_did_not_come_counts_as_zero_and_is_made():
    for as_view in (True, False):
        parameters = parameters_of((3,), (2,))
        bucket = GradientBucket(parameters)
        bucket.buffer().fill_(7)
        copy_in(bucket, 2, as_view)
        assert bucket.buffer().eq(0).all()
        bucket.buffer().fill_(3)
        bucket.copy_out(as_view, unused=[1])
        assert parameters[0].grad.eq(3).all()
        assert parameters[1].grad is None, "nobody used it"
        shares = parameters[0].grad.data_ptr() == bucket.buffer().data_ptr()
        assert shares == as_view


def test_gradients_are_laid_out_like_their_parameters():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    sliced = nn.Parameter(torch.randn(4, 6)[:, ::2])
    turned = nn.Parameter(torch.randn(4, 6).T)
    bucket = GradientBucket([weight, sliced, turned])
    for view, p in zip(bucket.gradients(), (weight, sliced, turned), strict=True):
        assert view.stride() == torch.empty_like(p).stride()
    for p in (weight, sliced, turned):
        p.grad = torch.randn_like(p)
    kept = [p.grad.clone() for p in (weight, sliced, turned)]
    copy_in(bucket, 1, as_view=True)
    for p, grad in zip((weight, sliced, turned), kept, strict=True):
        assert torch.equal(p.grad, grad)
    assert bucket.buffer().numel() == 48 + 12 + 24


# ---- hooks


def train(comms, steps, cap, as_view, average=None, dtype=torch.float64):
    """Losses' and weights' way with hooks (or ``average``), and in one process on all batches."""
    torch.manual_seed(0)
    replica = FullMLP(16, depth=5).to(dtype)
    single = copy.deepcopy(replica)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (replica, single)]
    hooks = None
    if average is None:
        hooks = BucketedDDPHooks(replica, comms, cap, gradient_as_bucket_view=as_view)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(2, 8 * comms.world_size, 16, generator=generator, dtype=dtype)
        x, y = whole.view(2, comms.world_size, 8, 16)[:, comms.rank]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        mse_loss(replica(x), y).backward()
        if hooks:
            hooks.finish()
        else:
            average(replica)
        mse_loss(single(whole[0]), whole[1]).backward()
        for p, q in zip(replica.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    check_replicas(replica, comms)
    return replica, hooks


@on_ranks(1, 2, 3)
def test_bucketed_hooks_train_as_one_process_and_as_averaging_one_by_one(comms):
    def average(replica):
        for p in replica.parameters():
            comms.all_reduce_mean(p.grad)

    naive, _ = train(comms, 8, None, None, average)
    for cap in (1e-4, 0.002, 25):
        for as_view in (True, False):
            replica, hooks = train(comms, 8, cap, as_view)
            expected = {1e-4: 10, 25: 1}.get(cap)
            assert expected is None or len(hooks.buckets.all) == expected
            for p, q in zip(replica.parameters(), naive.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
                if comms.world_size <= 2:
                    assert torch.equal(p, q), "a sum of two has one order"
            inside = hooks.buckets.all[-1].buffer().untyped_storage().data_ptr()
            grad = replica.layers[0].weight.grad
            assert (grad.untyped_storage().data_ptr() == inside) == as_view


@on_ranks(2)
def test_the_comparison_notices_a_missing_average(comms):
    with pytest.raises(AssertionError, match="not close"):
        train(comms, 2, None, None, average=lambda _: None)


@on_ranks(2)
def test_the_order_of_definition_is_filled_from_the_end(comms):
    model = FullMLP(16, depth=5)
    hooks = BucketedDDPHooks(model, comms, 0.002)
    caps = [int(0.002 * MIB)] * 2
    backwards = list(model.parameters())[::-1]
    expected = pytorchs_plan(backwards, caps)
    names = [[hooks.buckets.names[i] for i in bucket] for bucket in hooks.buckets.plan]
    of = [name for name, _ in model.named_parameters()][::-1]
    assert names == [[of[i] for i in bucket] for bucket in expected]
    assert len(names) > 2


@on_ranks(2)
def test_messages_do_not_grow_from_step_to_step(comms):
    def sizes(model, reset):
        hooks = BucketedDDPHooks(model, comms, 0.002)
        sent, send = [], hooks.buckets.send
        hooks.buckets.send = lambda bucket: sent.append(bucket.buffer().nbytes) or send(bucket)
        steps = []
        for step in range(4):
            sent.clear()
            model(torch.full((2, 16), step + 1.0)).sum().backward()
            last = hooks.backward
            hooks.finish()
            hooks.backward = hooks.backward if reset else last
            steps.append(list(sent))
        return steps

    steps = sizes(FullMLP(16, depth=5), reset=True)
    assert steps == [steps[0]] * 4
    assert sum(steps[0]) == sum(p.nbytes for p in FullMLP(16, depth=5).parameters())
    assert len(steps[0]) > 2
    with pytest.raises(RuntimeError, match=f"rank {comms.rank}: the gradient of .* came again"):
        sizes(FullMLP(16, depth=5), reset=False)


@on_ranks(1, 2, 3)
def test_a_missing_gradient_is_named_on_every_rank_and_the_next_step_is_right(comms):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = FullMLP(16, depth=3)
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, right=True):
            hidden = self.body(x)
            return self.left(hidden) + (self.right(hidden) if right else 0)

    for as_view in (True, False):
        for cap in (1e-4, 25):
            model = TwoHeads()
            broadcast_parameters(model, comms)
            alone = copy.deepcopy(model)
            hooks = BucketedDDPHooks(model, comms, cap, gradient_as_bucket_view=as_view)
            x = torch.full((2, 16), comms.rank + 1.0)
            model(x, right=False).sum().backward()
            message = f"^rank {comms.rank}: no gradient for right.weight, right.bias$"
            with pytest.raises(RuntimeError, match=message):
                hooks.finish()
            model.zero_grad()
            model(x).sum().backward()
            hooks.finish()
            alone(x).sum().backward()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                comms.all_reduce_mean(q.grad)
                torch.testing.assert_close(p.grad, q.grad)


@on_ranks(2)
def test_a_second_backward_before_finish_is_refused(comms):
    model = FullMLP(8, depth=2)
    hooks = BucketedDDPHooks(model, comms)
    model(torch.ones(1, 8)).sum().backward()
    again = model(torch.ones(1, 8)).sum()
    message = f"rank {comms.rank}: the gradient of layers.1.* came again before finish"
    with pytest.raises(RuntimeError, match=message):
        again.backward()
    hooks.abandon()
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    hooks.finish()


@on_ranks(2)
def test_what_was_sent_of_a_backward_that_is_given_up_comes_to_rest(comms):
    class Sent:
        def __init__(self, work):
            self.work, self.rests = work, False
            sent.append(self)

        def wait(self):
            self.work.wait()
            self.rests = True

    def watch(buckets):
        send = buckets.send
        buckets.send = lambda bucket: Sent(send(bucket))

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, whole=True):
            return self.last(self.first(x) if whole else x)

    sent, x = [], torch.ones(1, 8)
    model = Skips()
    hooks = BucketedDDPHooks(model, comms, 1e-4)
    watch(hooks.buckets)
    model(x, whole=False).sum().backward()
    with pytest.raises(RuntimeError, match=r"no gradient for first\.weight"):
        hooks.finish()
    ddp = DDP(Skips(), comms, bucket_cap_mb=1e-4)
    ddp(x).sum().backward()
    ddp(x)
    watch(ddp.reducer.buckets)
    ddp(x, whole=False).sum().backward()
    with pytest.raises(RuntimeError, match=r"brought none for first\.weight"):
        ddp(x)
    assert len(sent) == 2, "the last layer, of both"
    assert all(work.rests for work in sent)


@on_ranks(2)
def test_without_synchronisation_gradients_add_up_on_each_rank_until_the_next_backward(comms):
    for as_view, cap in itertools.product((True, False), (1e-4, 25)):
        model = FullMLP(8, depth=3).double()
        broadcast_parameters(model, comms)
        alone = copy.deepcopy(model)
        hooks = BucketedDDPHooks(model, comms, cap, gradient_as_bucket_view=as_view)
        with pytest.raises(ZeroDivisionError), hooks.no_sync():
            1 / 0  # noqa: B018
        for to_none in (True, False):  # without gradients at first, and with views of zeros
            for replica in (model, alone):
                replica.zero_grad(set_to_none=to_none)
            for part in range(3):
                x = torch.full((2, 8), 2.0 * part + comms.rank, dtype=torch.float64)
                alone(x).square().sum().backward()
                if part < 2:
                    with hooks.no_sync():
                        model(x).square().sum().backward()
                    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                        assert torch.equal(p.grad, q.grad), "this rank's own"
                else:
                    model(x).square().sum().backward()
            hooks.finish()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                comms.all_reduce_mean(q.grad)
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_removed_hooks_average_no_more(comms):
    model = FullMLP(8, depth=2)
    broadcast_parameters(model, comms)
    hooks = BucketedDDPHooks(model, comms)
    hooks.remove()
    model(torch.full((1, 8), comms.rank + 1.0)).square().sum().backward()
    grads = comms.all_gather(model.layers[1].weight.grad)
    assert not torch.equal(grads[0], grads[1])
    assert not hooks.backward.arrived


@on_ranks(1, 2)
def test_bad_arguments_are_refused(comms):
    for model in (nn.Tanh(), nn.Linear(2, 2).requires_grad_(False)):
        words = f"rank {comms.rank}: expected parameters to train, got none"
        with pytest.raises(ValueError, match=words):
            BucketedDDPHooks(model, comms, 1.0)
    for cap in (0, -1.0, math.inf):
        words = f"rank {comms.rank}: expected a finite bucket_cap_mb above 0, got {cap}"
        with pytest.raises(ValueError, match=words):
            BucketedDDPHooks(nn.Linear(2, 2), comms, cap)


def test_who_sets_a_cap_sets_that_of_the_first_bucket_too():
    assert bucket_caps(None) == [1 * MIB, 25 * MIB]
    assert bucket_caps(2.5) == [2.5 * MIB]


@on_ranks(1, 2)
def test_equal_caps_make_equal_buckets_whoever_averages(comms):
    for cap, first in ((None, 1), (2.0, 2), (0.5, 1)):  # MiB; a layer alone has 1
        model = FullMLP(512, depth=5)
        wrappers = [
            DDP(copy.deepcopy(model), comms, bucket_cap_mb=cap),
            TorchDDP(copy.deepcopy(model), process_group=comms.group, bucket_cap_mb=cap),
        ]
        for wrapper in wrappers * 4:  # planned anew after the first, and logged after that
            wrapper(torch.ones(1, 512)).sum().backward()
        ours, theirs = wrappers
        hooks = BucketedDDPHooks(model, comms, cap)
        sizes = [bucket.buffer().nbytes for bucket in ours.reducer.buckets]
        assert sizes == [bucket.buffer().nbytes for bucket in hooks.buckets]
        logged = theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert sizes == [int(size) for size in logged.split(",")]
        assert sizes[0] == first * (512 + 1) * 512 * 4
