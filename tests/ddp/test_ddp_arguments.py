"""Scripts written for PyTorch's DDP: each of its arguments is taken, or refused in words."""

import inspect

import pytest
import torch
from ddp_pairs import HAS_FORWARD_SYNC, Branches, Pair, accumulating, mlp
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.ddp import DDP
from microddp.ddp.arguments import INSTEAD, which_buffers


def test_no_argument_of_pytorchs_is_forgotten():
    theirs, ours = (set(inspect.signature(kind).parameters) for kind in (TorchDDP, DDP))
    assert theirs - ours <= set(INSTEAD)
    assert not ours & set(INSTEAD)


@on_ranks(2)
def test_arguments_that_place_a_module_are_checked_as_pytorchs(comms):
    for options in (
        {"device_ids": None, "output_device": None, "dim": 1},
        {"device_ids": []},
        {"device_ids": [comms.rank]},
        {"device_ids": [0, 1]},
        {"output_device": 1},
        {"output_device": torch.device("cpu")},
    ):
        raised = []
        for kind in (TorchDDP, DDP):
            try:
                kind(mlp(), **options)
            except ValueError as error:
                raised.append(str(error))
        assert len(raised) in (0, 2), (options, raised)
        assert not raised or raised[1].startswith(f"rank {comms.rank}: expected "), raised


@on_ranks(2)
def test_what_is_not_to_be_had_is_refused_with_what_is(comms):
    defaults = {name: p.default for name, p in inspect.signature(TorchDDP).parameters.items()}
    kept = {name: defaults[name] for name in INSTEAD if name in defaults}
    DDP(mlp(), comms, **kept)
    for name, instead in INSTEAD.items():
        with pytest.raises(TypeError) as caught:
            DDP(mlp(), comms, **{name: name != "init_sync"})
        assert str(caught.value) == f"rank {comms.rank}: expected no {name}: use {instead}"
    with pytest.raises(TypeError, match="expected arguments of DDP, got 'buckets'"):
        DDP(mlp(), comms, buckets=1)
    with pytest.raises(TypeError, match=r"got \[0\]; PyTorch's device_ids has to be named"):
        DDP(mlp(), [0])
    with pytest.warns(FutureWarning, match="check_reduction is deprecated"):
        DDP(mlp(), comms, check_reduction=True)


@pytest.mark.skipif(not HAS_FORWARD_SYNC, reason="PyTorch has it from 2.13 on")
@on_ranks(2)
def test_both_names_for_the_broadcast_of_buffers_mean_what_they_do_in_pytorch(comms):
    for old in (None, True, False):
        for new in (None, True, False):
            options = {"broadcast_buffers": old, "forward_sync_buffers": new}
            pair = Pair(comms, Branches, **options)
            pair.check(options)
            pair.train(accumulating(comms, 1), steps=2, what=options, alike=False)


def test_the_old_name_warns_and_means_both():
    assert which_buffers(None, None) == (True, True)
    assert which_buffers(None, False) == (True, False)
    for old, new, both in ((True, None, (True, True)), (False, None, (False, False))):
        with pytest.warns(FutureWarning, match="broadcast_buffers is deprecated"):
            assert which_buffers(old, new) == both
    with pytest.warns(FutureWarning, match="which is heeded here"):
        assert which_buffers(False, True) == (True, True)
