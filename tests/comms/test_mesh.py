"""A rank's place in a device mesh."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import microddp


def test_get_before_init_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"call microddp.init\(\) before get\(\)"):
        microddp.get("rank")


@on_ranks(1, 3)
def test_without_a_mesh_get_answers_for_all_ranks(comms):
    assert microddp.get("ws") == comms.world_size
    assert microddp.get("rank") == microddp.get("grank") == comms.rank
    assert microddp.get("lrank") == comms.local_rank
    assert microddp.get("pg") is dist.group.WORLD


@on_ranks(2)
def test_without_a_launchers_number_a_local_rank_is_that_of_comms(comms):
    del os.environ["LOCAL_RANK"]
    assert microddp.get("lrank") == comms.rank
    assert microddp.Comms.of_group(None, comms.device).local_rank == comms.rank


@on_ranks(4)
def test_in_a_mesh_get_answers_for_one_dimension(comms):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    across, within = mesh["dp"], mesh["tp"]
    assert microddp.get("ws", across) == 2
    assert microddp.get("rank", across) == comms.rank // 2
    assert microddp.get("rank", within) == comms.rank % 2
    assert microddp.get("grank", within) == comms.rank
    total = torch.tensor(comms.rank)
    dist.all_reduce(total, group=microddp.get("pg", across))
    assert total.item() == {0: 2, 1: 4, 2: 2, 3: 4}[comms.rank]


@on_ranks(4)
def test_a_registered_mesh_is_the_default_until_it_is_forgotten(comms):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    microddp.register_mesh(mesh["tp"])
    assert microddp.get("ws") == 2
    assert microddp.get("rank") == comms.rank % 2
    assert microddp.get("rank", mesh["dp"]) == comms.rank // 2, "an argument counts for more"
    microddp.register_mesh(None)
    assert microddp.get("ws") == 4


@on_ranks(4)
def test_a_mesh_of_two_dimensions_is_refused_with_their_names(comms):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    message = rf"rank {comms.rank}: expected a one-dimensional mesh, got .*'dp', 'tp'"
    with pytest.raises(ValueError, match=message):
        microddp.get("ws", mesh)
    comms.barrier()  # one that has gone cannot be met by another that still makes its mesh


@on_ranks(1)
def test_an_unknown_question_is_refused_with_those_that_are_known(comms):
    known = "'ws', 'rank', 'grank', 'lrank' or 'pg'"
    with pytest.raises(ValueError, match=f"rank {comms.rank}: expected {known}, got 'size'"):
        microddp.get("size")
