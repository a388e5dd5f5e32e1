"""Our DDP against PyTorch's, bit for bit: what a module may return and contain; copies, pickles."""

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from ddp_pairs import (
    SMALL,
    VIEWS,
    WIDTH,
    Branches,
    Pair,
    accumulating,
    data,
    errors_from_warnings_of_ours_only,
    loss_of,
    mlp,
    plain_step,
    sgd,
)
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from microddp.ddp import DDP
from microddp.replicas import check_replicas


@on_ranks(2)
def test_the_outputs_are_those_of_the_module(comms):
    @dataclass
    class Data:
        value: torch.Tensor
        rest: object

    nested = namedtuple("nested", ["value", "rest"])
    kinds = {
        "dict": lambda a, b: {"a": a, "deep": [b, {"b": 3, "none": None}]},
        "tuple": lambda a, b: (a, (b, "text")),
        "named": lambda a, b: nested(a, [b]),
        "dataclass": lambda a, b: Data(a, b),
        "tensor": lambda a, b: a + b,
    }

    class Outputs(Branches):
        def forward(self, x, *, kind, scale=1.0):
            a, b = super().forward(x)
            return kinds[kind](a * scale, b)

    def tensors(output):
        if isinstance(output, torch.Tensor):
            return [output]
        if isinstance(output, Data):
            return [*tensors(output.value), *tensors(output.rest)]
        if isinstance(output, dict):
            return tensors(list(output.values()))
        return [t for o in output for t in tensors(o)] if isinstance(output, (tuple, list)) else []

    def body(ddp, optimizer, step, kind):
        x, y = data(comms.rank, step)
        optimizer.zero_grad()
        output = ddp(x, kind=kind, scale=2.0)
        with torch.no_grad():
            ddp.module.eval()
            plain = ddp.module(x, kind=kind, scale=2.0)
            ddp.module.train()
        assert type(output) is type(plain)
        loss_of(tensors(output), y).backward()
        optimizer.step()

    for kind in kinds:
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            pair = Pair(comms, Outputs, **options)
            if (kind, options) == ("dataclass", {"static_graph": True}):
                # PyTorch averages nothing here, and says nothing; ours does.
                pair.theirs = DDP(copy.deepcopy(pair.theirs.module), comms)
                pair.optimizers[1] = sgd(pair.theirs)
            pair.train(lambda *a, kind=kind: body(*a, kind), 3, what=(kind, options))


@on_ranks(2)
def test_an_output_may_be_changed_in_place(comms):
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):

        def body(ddp, optimizer, step):
            x, y = data(comms.rank, step)
            optimizer.zero_grad()
            out = ddp(x)
            out.mul_(2).add_(1)
            mse_loss(out, y).backward()
            optimizer.step()

        Pair(comms, mlp, **options).train(body, what=options)


@on_ranks(2, 3)
def test_create_graph_averages_gradients_of_the_first_order(comms):
    # PyTorch's own raises: "a leaf Variable that requires grad is being used in an in-place..."
    def body(ddp, optimizer, step):
        x, y = data(comms.rank, step)
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward(create_graph=isinstance(ddp, DDP))
        for p in ddp.parameters():
            p.grad = p.grad.detach()  # else a cycle keeps the graph alive
        optimizer.step()

    with errors_from_warnings_of_ours_only():  # torch says that such gradients make a cycle
        for view in VIEWS:
            Pair(comms, mlp, **view).train(body, steps=3, what=view)


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, reentrant, shared=False):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(lambda h: torch.tanh(self.second(h)), x, use_reentrant=self.reentrant)
        if self.shared:
            x = checkpoint(lambda h: torch.tanh(self.second(h)), x, use_reentrant=self.reentrant)
        return checkpoint(self.third, x, use_reentrant=self.reentrant)


@on_ranks(2, 3)
def test_activation_checkpoints_of_both_kinds_are_equal(comms):
    for view in VIEWS:
        for cap in ({}, {"bucket_cap_mb": SMALL}):
            for reentrant in (True, False):
                for static in ({}, {"static_graph": True}):
                    make = partial(Checkpointed, reentrant)
                    what = (reentrant, view, cap, static)
                    Pair(comms, make, **view, **cap, **static).train(plain_step(comms), what=what)
            # Parameters of several reentrant checkpoints need a static graph.
            for shared in ((True, {"static_graph": True}), (False, {})):
                make = partial(Checkpointed, shared[0], shared=True)
                pair = Pair(comms, make, **view, **cap, **shared[1])
                pair.train(plain_step(comms), what=("shared", shared, view, cap))


@on_ranks(2)
def test_a_gradient_that_comes_twice_is_refused(comms):
    ddp = DDP(Checkpointed(True, shared=True), comms)
    loss = ddp(data(comms.rank, 0)[0]).sum()
    with pytest.raises(RuntimeError, match=r"second\.\w+ came twice .* static_graph=True"):
        loss.backward()


class Drop(torch.autograd.Function):
    """The first of two tensors; to the second it passes no gradient, not even zeros."""

    @staticmethod
    def forward(ctx, kept, dropped):  # noqa: ARG004
        return kept.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad, None


@on_ranks(2)
def test_an_output_that_gets_no_gradient_passes_none_on(comms):
    def body(ddp, optimizer, step):
        optimizer.zero_grad()
        left, right = ddp(data(comms.rank, step)[0])
        Drop.apply(left, right).square().sum().backward()
        optimizer.step()

    pair = Pair(comms, Branches, find_unused_parameters=True)
    pair.train(body)
    for ddp in (pair.ours, pair.theirs):
        assert ddp.module.right.weight.grad is None
        assert ddp.module.left.weight.grad is not None


@on_ranks(2)
def test_a_gradient_that_comes_though_no_output_leads_to_it_is_refused(comms):
    ddp = DDP(Branches(), comms, find_unused_parameters=True)
    left, right = ddp(data(comms.rank, 0)[0], middle=False)
    loss = (left + right).sum() + ddp.module.middle.bias.sum()  # past the wrapper
    with pytest.raises(RuntimeError, match=r"middle\.bias came twice"):
        loss.backward()


@on_ranks(2)
def test_a_compiled_module_is_equal(comms):
    for backend in ("eager", "aot_eager"):
        for cap in ({}, {"bucket_cap_mb": SMALL}):
            pair = Pair(comms, mlp, **cap)
            pair.ours.module.compile(backend=backend)
            with errors_from_warnings_of_ours_only():
                for step in range(3):
                    pair.each(plain_step(comms), step)
                    for p, q in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
                        torch.testing.assert_close(p, q)
            check_replicas(pair.ours.module, comms)


# ---- copies


@on_ranks(2)
def test_copies_and_pickles_train_on_as_the_original(comms):
    pair = Pair(comms, Branches, gradient_as_bucket_view=True, bucket_cap_mb=SMALL)
    step = accumulating(comms)
    pair.train(step, 2)
    with pair.ours.no_sync():
        copies = [copy.deepcopy(pair.ours), pickle.loads(pickle.dumps(pair.ours))]
    assert all(c.bucket_cap_mb == pair.ours.bucket_cap_mb for c in copies)
    for replica in [pair.ours, *copies]:
        replica.require_backward_grad_sync = True
        optimizer = sgd(replica)
        for i in range(3):
            step(replica, optimizer, 5 + i)
    for replica in copies:
        for p, q in zip(pair.ours.parameters(), replica.parameters(), strict=True):
            assert torch.equal(p, q)
            assert p is not q
        check_replicas(replica.module, comms)


@on_ranks(2)
def test_state_goes_from_ours_to_pytorchs_and_back(comms):
    pair = Pair(comms, Branches)
    pair.train(accumulating(comms), 2)
    ours, theirs = pair.ours, pair.theirs
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        for p in (*ours.parameters(), *ours.buffers()):
            p.add_(1)
    theirs.load_state_dict(ours.state_dict())
    pair.check()
    with torch.no_grad():
        for p in (*theirs.parameters(), *theirs.buffers()):
            p.sub_(2)
    ours.load_state_dict(theirs.state_dict())
    pair.train(accumulating(comms), 2)


@on_ranks(2)
def test_a_module_that_outlives_its_wrapper_is_as_it_was(comms):
    module = mlp()
    ddp = DDP(module, comms)
    ddp(data(comms.rank, 0)[0]).sum().backward()
    ddp(data(comms.rank, 0)[0])  # after which a backward would be averaged
    del ddp
    module.zero_grad()
    module(data(comms.rank, 0)[0]).sum().backward()
    alone = copy.deepcopy(module)
    alone.zero_grad()
    alone(data(comms.rank, 0)[0]).sum().backward()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    grads = comms.all_gather(module[0].weight.grad)
    assert not torch.equal(grads[0], grads[1])
    again = Pair(comms, lambda: module)
    again.train(plain_step(comms), 2)
