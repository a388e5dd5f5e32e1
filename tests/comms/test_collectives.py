"""The collectives: against torch.distributed's own, and against results computed by hand."""

import os
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run

from microddp.comms import Comms
from microddp.comms.collectives import DEFAULT_TIMEOUT
from microddp.ddp import DDP
from microddp.hosts import relink

DEBUG = {"MICRODDP_DEBUG": "1"}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3))


def of_rank(rank, shape, dtype=torch.float32):
    """What ``rank`` contributes: small whole numbers, so that every sum and product is exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def of_all(comms, shape, dtype=torch.float32):
    return torch.stack([of_rank(rank, shape, dtype) for rank in range(comms.world_size)])


def still_works(comms):
    """Whether the next collective gives what it should."""
    total = torch.tensor(comms.rank)
    comms.all_reduce(total)
    return total.item() == sum(range(comms.world_size))


# ---- one result for all


@on_ranks()
def test_broadcast_overwrites_every_rank_with_the_source(comms):
    for src in range(comms.world_size):
        for dtype in DTYPES:
            for shape in SHAPES:
                tensor = of_rank(comms.rank, shape, dtype)
                comms.broadcast(tensor, src)
                assert torch.equal(tensor, of_rank(src, shape, dtype)), (src, dtype, shape)


@on_ranks()
def test_all_reduce_equals_the_backends_and_the_fold_by_hand(comms):
    reference = {"sum": "SUM", "max": "MAX", "min": "MIN", "product": "PRODUCT"}
    for op, name in reference.items():
        for dtype in DTYPES:
            for shape in SHAPES:
                tensor = of_rank(comms.rank, shape, dtype)
                backend = tensor.clone()
                dist.all_reduce(backend, getattr(dist.ReduceOp, name))
                comms.all_reduce(tensor, op)
                everyone = of_all(comms, shape, dtype)
                by_hand = {
                    "sum": lambda all_: all_.sum(0),
                    "max": lambda all_: all_.amax(0),
                    "min": lambda all_: all_.amin(0),
                    "product": lambda all_: all_.prod(0),
                }[op](everyone).to(dtype)
                assert torch.equal(tensor, backend), (op, dtype, shape)
                assert torch.equal(tensor, by_hand), (op, dtype, shape)


@on_ranks()
def test_all_reduce_mean_is_the_mean_in_place(comms):
    for dtype in (torch.float64, torch.float32, torch.complex64):
        tensor = of_rank(comms.rank, (11,), dtype)
        comms.all_reduce_mean(tensor)
        torch.testing.assert_close(tensor, of_all(comms, (11,), dtype).mean(0))


@on_ranks(2, 5)
def test_all_reduce_mean_does_not_overflow_where_the_sum_does(comms):
    tensor = torch.full((3,), 60_000.0, dtype=torch.float16)  # the largest float16 is 65504
    comms.all_reduce_mean(tensor)
    assert (tensor - 60_000).abs().max() <= 64  # two units in the last place


@on_ranks(3)
def test_asynchronous_collectives_are_done_when_waited_for(comms):
    summed, mean, sent = (torch.full((1000,), float(comms.rank)) for _ in range(3))
    pending = [
        comms.all_reduce(summed, async_op=True),
        comms.all_reduce_mean(mean, async_op=True),
        comms.broadcast(sent, src=2, async_op=True),
    ]
    for transfer in pending:
        transfer.wait()
    assert summed.unique().tolist() == [3]
    assert mean.unique().tolist() == [1]
    assert sent.unique().tolist() == [2]


# ---- all or none


@on_ranks(1, 4)
def test_a_problem_of_some_is_an_error_on_all_with_the_problems_of_each(comms):
    comms.fail_together("", "nothing")
    last = comms.world_size - 1
    with pytest.raises(KeyError) as caught:
        comms.fail_together("late" if comms.rank == last else "", "all in time", KeyError)
    assert caught.value.args == (f"rank {comms.rank}: expected all in time, got rank {last}: late",)
    problem = {1: "no space", 2: "no folder", 3: "no space"}.get(comms.rank, "")
    if comms.world_size == 4:
        message = f"rank {comms.rank}: expected x, got ranks 1, 3: no space; rank 2: no folder"
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            comms.fail_together(problem, "x")
    assert still_works(comms)


# ---- every rank's part


@on_ranks(2)
def test_links_that_are_the_machines_own_stay_as_they_are(comms):
    with pytest.raises(RuntimeError, match=r"hosts in a box, .* got ranks 0, 1: the machine's own"):
        relink(comms, "1gbit")


@on_ranks()
def test_all_gather_stacks_every_ranks_tensor_in_rank_order(comms):
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = of_rank(comms.rank, shape, dtype)
            backend = [torch.empty_like(tensor) for _ in range(comms.world_size)]
            dist.all_gather(backend, tensor)
            result = comms.all_gather(tensor)
            assert torch.equal(result, torch.stack(backend)), (dtype, shape)
            assert torch.equal(result, of_all(comms, shape, dtype)), (dtype, shape)


@on_ranks()
def test_all_gather_data_carries_plain_data_of_different_sizes(comms):
    def data(rank):
        return {"rank": rank, "list": [1.5, None, "é"] * rank, "text": "x" * 100 * rank}

    assert comms.all_gather_data(data(comms.rank)) == [data(r) for r in range(comms.world_size)]
    assert comms.all_gather_data("") == [""] * comms.world_size


@on_ranks()
def test_reduce_scatter_keeps_this_ranks_part_of_the_reduction(comms):
    n = comms.world_size
    for op, name in {"sum": "SUM", "max": "MAX", "min": "MIN", "product": "PRODUCT"}.items():
        for dtype in DTYPES:
            for shape in ((n,), (2 * n, 3), (0, 2), (n, 0)):
                tensor = of_rank(comms.rank, shape, dtype)
                kept = tensor.clone()
                backend = torch.empty_like(tensor[: shape[0] // n])
                dist.reduce_scatter(
                    backend, list(tensor.tensor_split(n)), getattr(dist.ReduceOp, name)
                )
                result = comms.reduce_scatter(tensor, op)
                whole = tensor.clone()
                comms.all_reduce(whole, op)
                assert torch.equal(result, backend), (op, dtype, shape)
                assert torch.equal(result, whole.tensor_split(n)[comms.rank]), (op, dtype, shape)
                assert torch.equal(tensor, kept), "the argument should stay as it is"


@on_ranks()
def test_all_to_all_transposes_parts_and_ranks(comms):
    n = comms.world_size
    for dtype in DTYPES:
        for shape in ((n,), (2 * n, 3), (0, 2)):
            result = comms.all_to_all(of_rank(comms.rank, shape, dtype))
            parts = [part.tensor_split(n)[comms.rank] for part in of_all(comms, shape, dtype)]
            assert torch.equal(result, torch.cat(parts)), (dtype, shape)


# ---- scatter and gather


@on_ranks()
def test_scatter_deals_rows_and_gather_collects_them_again(comms):
    n = comms.world_size
    for root in range(n):
        for rows in (0, 1, n - 1, n, n + 1, 3 * n + 2):
            for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
                whole = (torch.arange(rows * 4).view(rows, 4) % 3).to(dtype)
                part = comms.scatter(whole if comms.rank == root else None, src=root)
                assert part.dtype == dtype
                assert torch.equal(part, whole.tensor_split(n)[comms.rank]), (root, rows)
                again = comms.gather(part, dst=root)
                if comms.rank == root:
                    assert torch.equal(again, whole), (root, rows, dtype)
                else:
                    assert again is None


@on_ranks()
def test_scatter_takes_one_tensor_for_each_rank_of_any_shape_and_dtype(comms):
    def part(rank):
        shapes = ((3,), (), (2, 0), (2, 3), (1, 1, 4))
        dtypes = (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float16)
        return torch.ones(shapes[rank], dtype=dtypes[rank]) * 2

    n, src = comms.world_size, comms.world_size - 1
    parts = [part(rank) for rank in range(n)] if comms.rank == src else "ignored elsewhere"
    mine = comms.scatter(parts, src)
    assert mine.dtype == part(comms.rank).dtype
    assert torch.equal(mine, part(comms.rank))


@on_ranks(3)
def test_scatter_takes_tensors_that_are_not_contiguous(comms):
    whole = torch.arange(12.0).view(4, 3).T  # 3 rows of 4
    assert torch.equal(comms.scatter(whole), whole[comms.rank : comms.rank + 1])


@on_ranks(1, 3)
def test_scatter_refuses_what_cannot_be_dealt_on_every_rank(comms):
    n = comms.world_size
    wrong = {
        "a list of nothing": None,
        "int": 5,
        "float32 ()": torch.tensor(1.0),
        "a list of " + ", ".join(["Tensor"] * (n + 1)): [torch.ones(1)] * (n + 1),
        "a list of " + ", ".join(["int"] * n): [1] * n,
    }
    for src in range(n):
        for got, argument in wrong.items():
            with pytest.raises(ValueError, match="expected a tensor to scatter") as caught:
                comms.scatter(argument if comms.rank == src else torch.ones(3).numpy(), src)
            assert str(caught.value).startswith(f"rank {comms.rank}: ")
            assert str(caught.value).endswith(f"a list of {n} tensors, got rank {src}: {got}")
            assert still_works(comms)


@on_ranks(1, 2, 3)
def test_gather_refuses_tensors_that_do_not_fit_on_every_rank(comms):
    last = comms.rank == comms.world_size - 1
    wrong = {
        "width": (torch.ones(2, 3 if last else 4), True),
        "dimensions": (torch.ones(2, 1) if last else torch.ones(2), True),
        "dtype": (torch.ones(2, dtype=torch.float64 if last else torch.float32), True),
        "scalars": (torch.tensor(1.0), False),
    }
    for what, (tensor, fits_alone) in wrong.items():
        if comms.world_size == 1 and fits_alone:
            continue
        with pytest.raises(ValueError, match="gather expected tensors alike") as caught:
            comms.gather(tensor)
        for rank in range(comms.world_size):
            assert f"rank {rank}: [" in str(caught.value), what
        assert still_works(comms)


# ---- arguments


@on_ranks(3)
def test_wrong_arguments_are_refused_before_anything_is_sent(comms):
    ok, slanted = torch.ones(3, 2), torch.ones(2, 3).T
    bad_arguments = [
        (lambda: comms.broadcast(ok, src=3), "expected src in 0..2, got 3"),
        (lambda: comms.scatter(ok, src=-1), "expected src in 0..2, got -1"),
        (lambda: comms.gather(ok, dst=3), "expected dst in 0..2, got 3"),
        (lambda: comms.broadcast(slanted), "broadcast expected a contiguous tensor"),
        (lambda: comms.all_reduce(slanted), r"got shape \(3, 2\) with strides \(1, 3\)"),
        (lambda: comms.all_reduce_mean(slanted), "all_reduce_mean expected a contiguous tensor"),
        (lambda: comms.all_gather(slanted), "all_gather expected a contiguous tensor"),
        (lambda: comms.reduce_scatter(slanted), "reduce_scatter expected a contiguous tensor"),
        (lambda: comms.all_to_all(slanted), "all_to_all expected a contiguous tensor"),
        (lambda: comms.gather(slanted), "gather expected a contiguous tensor"),
        (lambda: comms.all_reduce(ok.to("meta")), "expected a tensor on cpu, got meta"),
        (lambda: comms.all_reduce(ok, "mean"), r"expected op in \['sum', .*\], got 'mean'"),
        (lambda: comms.reduce_scatter(ok, "avg"), "got 'avg'"),
        (
            lambda: comms.all_reduce_mean(ok.long()),
            "needs a floating point tensor, got torch.int64",
        ),
        (lambda: comms.reduce_scatter(ok.view(2, 3)), r"a multiple of 3, got shape \(2, 3\)"),
        (lambda: comms.reduce_scatter(torch.tensor(1.0)), r"got shape \(\)"),
        (lambda: comms.all_to_all(torch.ones(4)), r"a multiple of 3, got shape \(4,\)"),
        (lambda: comms.subgroup([]), r"expected distinct ranks for a group, got \[\]"),
        (lambda: comms.subgroup([1, 1]), r"got \[1, 1\]"),
        (lambda: comms.subgroup([0, 3]), "expected ranks in 0..2, got 3"),
    ]
    for call, message in bad_arguments:
        with pytest.raises(ValueError, match=f"^rank {comms.rank}: .*{message}"):
            call()
    assert ok.eq(1).all()
    assert still_works(comms)


# ---- sub-groups and leaving


@on_ranks(2, 3, 5)
def test_a_subgroup_numbers_its_own_ranks_and_reduces_over_them(comms):
    members = [0, comms.world_size - 1]
    few = comms.subgroup(members)
    if comms.rank not in members:
        assert few is None
    else:
        assert (few.rank, few.world_size) == (members.index(comms.rank), 2)
        assert few.timeout == comms.timeout
        total = torch.tensor(comms.rank)
        few.all_reduce(total)
        assert total.item() == sum(members)
        # src and dst are ranks of the sub-group.
        sent = torch.tensor(comms.rank)
        few.broadcast(sent, src=1)
        assert sent.item() == members[1]
        gathered = few.gather(few.scatter(torch.arange(5) if few.rank == 1 else None, 1), dst=1)
        assert gathered is None if few.rank == 0 else gathered.tolist() == [0, 1, 2, 3, 4]
        few.close()
    assert still_works(comms)


@on_ranks(1, 3)
def test_comms_of_a_process_group_that_torch_made(comms):
    everyone = Comms.of_group(None, comms.device)
    assert (everyone.rank, everyone.world_size) == (comms.rank, comms.world_size)
    assert everyone.group is dist.group.WORLD
    assert everyone.timeout == comms.timeout != DEFAULT_TIMEOUT
    assert (everyone.local_rank, everyone.local_world_size) == (comms.rank, comms.world_size)
    assert still_works(everyone)
    with everyone:
        pass
    assert still_works(comms), "it is for others to end"
    last = dist.new_group([comms.world_size - 1])
    if comms.rank == comms.world_size - 1:
        alone = Comms.of_group(last, comms.device)
        assert (alone.rank, alone.world_size, alone.device) == (0, 1, comms.device)
        assert still_works(alone)
    else:
        with pytest.raises(ValueError, match=f"rank {comms.rank}: expected a group that"):
            Comms.of_group(last, comms.device)
    comms.close()
    with pytest.raises(ValueError, match=r"expected microddp.init\(\) or torch's"):
        Comms.of_group(None, torch.device("cpu"))


def joined_without_a_backend():
    dist.init_process_group()
    comms = Comms.of_group(None, torch.device("cpu"))
    assert comms.backend == Comms.of_group(dist.new_group(), comms.device).backend == "gloo"
    use_every_collective(comms)
    comms.sendrecv(torch.ones(2), (comms.rank + 1) % 3, torch.ones(2), (comms.rank - 1) % 3)
    model = DDP(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(comms.rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match=f"rank {comms.rank}: expected a group with a backend for"):
        Comms.of_group(None, torch.device("meta"))
    comms.close()
    dist.destroy_process_group()


def test_a_group_that_was_made_without_naming_a_backend_has_that_of_the_device():
    run(joined_without_a_backend, 3, join=False)


@on_ranks(4)
def test_a_subgroup_can_have_subgroups(comms):
    three = comms.subgroup([1, 2, 3])
    if three:
        two = three.subgroup([0, 2], timeout=5)
        if two:
            assert two.timeout == 5
            assert two.all_gather(torch.tensor(comms.rank)).tolist() == [1, 3]
        assert still_works(three)
    assert still_works(comms)
    # The others counted no group meanwhile.
    both = comms.subgroup([0, 3])
    if both:
        assert both.all_gather(torch.tensor(comms.rank)).tolist() == [0, 3]


@on_ranks(5)
def test_disjoint_groups_can_have_subgroups_of_their_own(comms):
    halves = [comms.subgroup(ranks) for ranks in ([0, 1, 2], [3, 4])]
    half = next(filter(None, halves))
    for _ in range(2):
        few = half.subgroup([0, 1])
        if few:
            first = comms.rank - half.rank
            assert few.all_gather(torch.tensor(comms.rank)).tolist() == [first, first + 1]
            few.close()


@on_ranks(3)
def test_with_nccl_only_the_group_of_all_ranks_has_subgroups_and_all_are_timed(comms):
    few = comms.subgroup([0, 1])
    if few:
        few.backend = "nccl"
        message = rf"^rank {few.rank}: NCCL .* expected subgroup\(\) of their group of 3, got .* 2$"
        with pytest.raises(RuntimeError, match=message):
            few.subgroup([0])
        assert few.timed() is few, "also where a rank sees one GPU only"


@on_ranks(2)
def test_closed_comms_say_so_and_can_be_closed_again(comms):
    few = comms.subgroup([0, 1])
    few.close()
    few.close()
    with pytest.raises(RuntimeError, match=f"rank {few.rank}: these Comms are closed"):
        few.all_reduce(torch.ones(1))
    assert still_works(comms)
    comms.close()
    comms.close()
    for call in (comms.barrier, lambda: comms.send(torch.ones(1), 1 - comms.rank)):
        with pytest.raises(RuntimeError, match=f"rank {comms.rank}: these Comms are closed"):
            call()
    assert not dist.is_initialized()


@on_ranks(2)
def test_leaving_the_with_block_closes_the_group_also_after_an_error(comms):
    with pytest.raises(KeyError), comms.subgroup([0, 1]) as few:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        few.barrier()


@on_ranks(2)
def test_an_error_aborts_a_group_of_nccl_instead_of_waiting_for_what_failed(comms):
    ended = []
    dist.distributed_c10d._abort_process_group = lambda group: ended.append(("abort", group))
    dist.destroy_process_group = lambda group: ended.append(("destroy", group))
    few = comms.subgroup([0, 1])
    group, few.backend, comms.backend = few.group, "nccl", "nccl"
    with pytest.raises(KeyError), few:
        raise KeyError
    with pytest.raises(KeyboardInterrupt), comms:
        raise KeyboardInterrupt
    again = Comms.of_group(None, comms.device)
    again.backend, again.joined = "nccl", False
    with again:
        pass
    assert ended == [("abort", group), ("abort", None), ("destroy", None)]


@on_ranks(2)
def test_closing_the_group_of_all_ranks_closes_its_subgroups(comms):
    few = comms.subgroup([0, 1])
    comms.close()
    few.close()
    assert not dist.is_initialized()


# ---- the ways a tensor can take


@on_ranks(3, environment=DEBUG)
def test_every_collective_works_with_the_debug_switch(comms):
    use_every_collective(comms)


@on_ranks(3)
def test_every_collective_works_through_the_host(comms):
    comms.through_host = True  # as for CUDA tensors over gloo
    use_every_collective(comms)


def use_every_collective(comms):
    rank = comms.rank
    comms.barrier()
    tensor = torch.full((3,), rank)
    assert comms.all_gather(tensor).tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert comms.all_to_all(torch.arange(3) + 3 * rank).tolist() == [rank, rank + 3, rank + 6]
    assert comms.reduce_scatter(torch.arange(3) + rank).tolist() == [3 * rank + 3]
    assert comms.scatter(torch.arange(4), src=1).tolist() == [[0, 1], [2], [3]][rank]
    gathered = comms.gather(torch.arange(rank), dst=1)
    assert gathered is None if rank != 1 else gathered.tolist() == [0, 0, 1]
    comms.broadcast(tensor, src=2)
    assert tensor.tolist() == [2, 2, 2]
    comms.all_reduce(tensor, "product")
    assert tensor.tolist() == [8, 8, 8]
    few = comms.subgroup([0, 2])
    assert few is None or few.all_gather(torch.tensor(rank)).tolist() == [0, 2]
    assert still_works(comms)


# ---- MICRODDP_DEBUG=1


@on_ranks(3, environment=DEBUG)
def test_debug_names_the_odd_rank_and_its_call_on_every_rank(comms):
    odd = comms.rank == 1
    x, y, z = torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.float64)
    disagreements = [
        (lambda: comms.all_reduce(y if odd else x), "all_reduce(float32 (4,), op=sum)"),
        (lambda: comms.all_reduce(z if odd else x), "all_reduce(float64 (3,), op=sum)"),
        (lambda: comms.all_reduce(x, "max" if odd else "sum"), "all_reduce(float32 (3,), op=max)"),
        (lambda: comms.broadcast(x, src=2 if odd else 0), "broadcast(float32 (3,), src=2)"),
        (lambda: comms.barrier() if odd else comms.all_reduce(x), "barrier()"),
        (lambda: comms.all_gather(y if odd else x), "all_gather(float32 (4,))"),
        (lambda: comms.all_to_all(z if odd else x), "all_to_all(float64 (3,))"),
        (
            lambda: comms.reduce_scatter(x, "min" if odd else "sum"),
            "reduce_scatter(float32 (3,), op=min)",
        ),
        (lambda: comms.scatter(x, src=1 if odd else 0), "scatter(src=1)"),
        (lambda: comms.gather(x, dst=1 if odd else 0), "gather(dst=1)"),
        (lambda: comms.subgroup([0, 1] if odd else [0, 2]), "subgroup([0, 1])"),
    ]
    for call, said in disagreements:
        with pytest.raises(RuntimeError) as caught:
            call()
        start = f"rank {comms.rank}: the ranks disagree: rank 1 calls {said}; expected "
        assert str(caught.value).startswith(start), caught.value
    assert x.tolist() == [1, 1, 1], "nothing should have been reduced"
    assert still_works(comms)


@on_ranks(1, 4)
def test_ranks_without_a_core_leave_when_it_comes_to_timing(comms):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # at least two stay all the same
    if comms.rank >= 2:
        with pytest.raises(SystemExit) as left:
            comms.timed()
        assert left.value.code is None
        return
    few = comms.timed()
    assert (few is comms) == (comms.world_size == 1)
    assert few.world_size == min(2, comms.world_size)
    assert few.all_gather(torch.tensor([few.rank])).flatten().tolist() == list(
        range(few.world_size)
    )


@on_ranks(3)
def test_a_group_of_ranks_beyond_the_cores_is_timed_by_its_own(comms):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    last = comms.subgroup([2])
    if last:
        assert last.timed() is last


@on_ranks(2)
def test_a_closed_subgroup_is_forgotten_when_the_next_is_made(comms):
    closed = weakref.ref(few := comms.subgroup([0, 1]))
    few.close()
    del few
    with comms.subgroup([0, 1]):
        assert closed() is None


@on_ranks(2, environment=DEBUG)
def test_the_order_of_a_subgroups_ranks_is_no_difference(comms):
    few = comms.subgroup([0, 1] if comms.rank else [1, 0])
    assert few.rank == comms.rank


@on_ranks(2)
def test_closing_a_group_closes_its_subgroups(comms):
    inner = comms.subgroup([0, 1]).subgroup([1, 0])
    inner.barrier()
    comms.close()
    with pytest.raises(RuntimeError, match="closed"):
        inner.barrier()
