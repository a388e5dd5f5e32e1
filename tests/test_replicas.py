"""Copies of one model: made equal, and shown to be equal."""

import pytest
import torch
from ranks import on_ranks
from torch import nn

from microddp import replicas
from microddp.model import FullMLP
from microddp.replicas import (
    broadcast_parameters,
    broadcast_tensors,
    check_replicas,
    check_structure,
)


def model(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Linear(3, 2)).to(dtype)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.copy_(torch.randint(0, 100, tensor.shape))
    return made


def state(module):
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


@on_ranks()
def test_broadcasting_copies_parameters_and_buffers_of_the_source(comms):
    for src in range(comms.world_size):
        replica = model(comms.rank)
        assert (state(replica) == state(model(src))) == (comms.rank == src)
        broadcast_parameters(replica, comms, src)
        assert state(replica) == state(model(src))
        assert all(p.requires_grad and p.is_leaf for p in replica.parameters())
        check_replicas(replica, comms)


@on_ranks(3)
def test_broadcasting_copes_with_parameters_that_are_not_contiguous(comms):
    replica = model(comms.rank).to(memory_format=torch.channels_last)
    assert not replica[0].weight.is_contiguous()
    broadcast_parameters(replica, comms)
    assert state(replica) == state(model(0))
    assert not replica[0].weight.is_contiguous()
    check_replicas(replica, comms)


@on_ranks()
def test_equal_replicas_pass_whatever_they_hold(comms):
    module = nn.Module()
    module.scalar_values = nn.Parameter(torch.tensor(1.0))
    module.empty_values = nn.Parameter(torch.empty(0, 3))
    module.undefined_values = nn.Parameter(torch.full((3,), float("nan")))
    module.half_values = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    module.complex_values = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    module.frozen_values = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    check_replicas(module, comms)
    check_replicas(nn.Module(), comms)


@on_ranks(2, 3, 5)
def test_a_different_value_is_named_with_its_ranks_on_every_rank(comms):
    odd, middle = comms.world_size - 1, FullMLP(6, depth=3)
    broadcast_parameters(middle, comms)
    with torch.no_grad():
        value = middle.layers[1].bias[2]
        if comms.rank == odd:
            value.copy_(torch.nextafter(value, torch.tensor(9.0)))  # a last bit
            middle.layers[2].bias += 1  # which comes later, and is not named
    message = (
        rf"rank {comms.rank}: parameter layers.1.bias \(float32 \(6,\)\) on rank {odd} differs"
    )
    with pytest.raises(RuntimeError, match=f"^{message}"):
        check_replicas(middle, comms)
    assert comms.all_gather(torch.ones(1)).sum() == comms.world_size, "all still talk"


@on_ranks(5)
def test_several_odd_ranks_are_all_named(comms):
    replica = model(1 if comms.rank in (1, 3) else 0)
    with pytest.raises(RuntimeError, match=r"parameter 0.weight .* on ranks 1, 3 differs"):
        check_replicas(replica, comms)


@on_ranks(2)
def test_the_two_zeros_differ(comms):
    replica = nn.Linear(2, 2)
    with torch.no_grad():
        replica.weight.fill_(0.0 if comms.rank else -0.0)
    with pytest.raises(RuntimeError, match="parameter weight"):
        check_replicas(replica, comms)


@on_ranks(3)
def test_a_different_structure_is_named_on_every_rank(comms):
    odd = comms.rank == 2
    buffered, frozen = nn.Linear(2, 3), nn.Linear(2, 3)
    buffered.register_buffer("count", torch.tensor(1))
    frozen.bias.requires_grad_(False)
    pairs = [
        (nn.Linear(2, 3), nn.Linear(3, 2), "weight: float32 (3, 2)", "weight: float32 (2, 3)"),
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), "bias: float32 (3,)", "nothing"),
        (nn.Linear(2, 3), nn.Linear(2, 3).double(), "weight: float32", "weight: float64"),
        (nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 3), "0.weight: float32", "weight: float32"),
        (nn.Linear(2, 3), nn.Module(), "weight: float32 (3, 2)", "nothing"),
        (nn.Module(), nn.Linear(2, 3), "nothing", "weight: float32 (3, 2)"),
        (nn.Linear(2, 3), buffered, "nothing", "count: int64 (), no gradient"),
        (nn.Linear(2, 3), frozen, "bias: float32 (3,)", "bias: float32 (3,), no gradient"),
    ]
    for check in (check_structure, check_replicas):
        for usual, other, first, second in pairs:
            with pytest.raises(RuntimeError) as caught:
                check(other if odd else usual, comms)
            told = str(caught.value)
            assert told.startswith(
                f"rank {comms.rank}: expected the same parameters, buffers and options"
            )
            on_rank_0, on_rank_2 = told.split(", got ")[1].split(" and ")
            assert on_rank_0.startswith(first), told
            assert on_rank_2.startswith(second), told
            assert " on rank 0 (" in on_rank_0
            assert " on rank 2 (" in on_rank_2
    assert comms.all_gather(torch.ones(1)).sum() == 3, "all still talk"


@on_ranks(1, 3)
def test_an_equal_structure_passes_whatever_the_values(comms):
    check_structure(model(comms.rank), comms)
    check_structure(nn.Module(), comms)


@on_ranks(2, 3)
def test_many_tensors_travel_in_messages_of_bounded_size(comms):
    def tensors(rank):
        shapes = ((5,), (), (3, 4), (0,), (7,), (2, 2), (100,), (1,))
        dtypes = (torch.float32, torch.int64, torch.float32, torch.bool, torch.bfloat16)
        made = [
            (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * rank + i).to(
                dtypes[i % len(dtypes)]
            )
            for i, shape in enumerate(shapes * 2)
        ]
        return [*made, torch.full((4, 6), float(rank)).T, torch.full((4, 6), rank + 0.5)[:, ::2]]

    for limit in (1, 64, 1 << 20):
        for src in range(comms.world_size):
            with pytest.MonkeyPatch.context() as patch:
                sent, broadcast = [], comms.broadcast
                patch.setattr(replicas, "BROADCAST_BYTES", limit)

                def counted(tensor, src, call=broadcast, sent=sent, **options):
                    sent.append(tensor)
                    return call(tensor, src, **options)

                patch.setattr(comms, "broadcast", counted)
                mine = tensors(comms.rank)
                strides = [t.stride() for t in mine]
                broadcast_tensors(mine, comms, src)
            for tensor, expected in zip(mine, tensors(src), strict=True):
                assert torch.equal(tensor, expected), (limit, src)
            assert [t.stride() for t in mine] == strides
            largest = max(t.nbytes for t in mine)
            assert all(t.nbytes <= max(limit, largest) for t in sent)
            assert (len(sent) == 1) == (limit == 1 << 20), (limit, len(sent))
    broadcast_tensors([], comms)
