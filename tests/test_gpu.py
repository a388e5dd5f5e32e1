"""What only GPUs can show: both backends on their tensors, and a clock of their events."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from ddp_pairs import errors_from_warnings_of_ours_only
from ranks import gpus, run
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.allreduce import ALGORITHMS, ring_all_reduce
from microddp.ddp import DDP
from microddp.replicas import check_replicas
from microddp.shared import all_reduce_hook
from microddp.timing import Timeline, measure, seconds_now

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
OPS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}
STEPS = 4
ROWS, WIDTH = 8, 16  # of a rank's batch
SMALL = 0.002  # MiB: a bucket of one layer here
CYCLES = 10**8  # for which a GPU spins: about a twentieth of a second
TIMEOUT = 120  # seconds of a job: each of its processes loads CUDA


def layout(count, ranks):
    return pytest.param(count, ranks, marks=pytest.mark.gpu(count), id=f"{ranks} on {count}")


ONE, SHARED, TWO = layout(1, 1), layout(1, 2), layout(2, 2)


# ---- who sees GPUs


def what_a_rank_sees():
    # Whoever asks CUDA for anything before the rank is forked makes it unusable in the rank.
    unusable = torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized()
    return os.environ["CUDA_VISIBLE_DEVICES"], unusable


def test_only_ranks_that_are_given_gpus_see_them_and_can_use_them():
    kept = os.environ["GPUS_FOR_TESTS"].split(",")
    assert torch.cuda.device_count() == 0
    assert run(what_a_rank_sees, 2, join=False) == [("", False)] * 2
    for count in (1, 2):
        seen = run(what_a_rank_sees, 1, join=False, environment=gpus(count))
        assert seen == [(",".join(kept[:count]), False)]


def place(comms):
    total = torch.ones(3, device=comms.device)
    comms.all_reduce(total)
    assert total.tolist() == [comms.world_size] * 3
    return comms.backend, str(comms.device), torch.cuda.current_device()


@pytest.mark.parametrize(("count", "ranks"), [ONE, SHARED, TWO])
def test_init_picks_nccl_where_there_is_a_gpu_for_each_rank(count, ranks):
    backend = "nccl" if ranks == count else "gloo"
    expected = [(backend, f"cuda:{rank % count}", rank % count) for rank in range(ranks)]
    assert run(place, ranks, environment=gpus(count), timeout=TIMEOUT) == expected


# ---- every rank's part of a test, on each layout


def of_ranks(comms, dtype, shape):
    """What every rank contributes, on this rank's GPU: small whole numbers, exact in any sum."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 4, (comms.world_size, *shape), generator=generator)
    return values.to(comms.device, dtype)


def collectives(comms):
    n, rank = comms.world_size, comms.rank
    for dtype in DTYPES:
        everyone = of_ranks(comms, dtype, (2 * n, 3))
        mine = everyone[rank]
        same("all_gather", comms.all_gather(mine), everyone)
        parts = [theirs.chunk(n)[rank] for theirs in everyone]
        same("all_to_all", comms.all_to_all(mine), torch.cat(parts))
        for op, of_all in OPS.items():
            reduced, expected = mine.clone(), of_all(everyone, 0).to(dtype)
            comms.all_reduce(reduced, op)
            same(op, reduced, expected)
            same(op, comms.reduce_scatter(mine, op), expected.chunk(n)[rank])
        for root in range(n):
            sent = mine.clone()
            comms.broadcast(sent, root)
            same("broadcast", sent, everyone[root])
            part = comms.scatter(everyone[root] if rank == root else None, root)
            same("scatter", part, everyone[root].chunk(n)[rank])
            gathered = comms.gather(part, root)
            if rank == root:
                same("gather", gathered, everyone[root])
            else:
                assert gathered is None
        if dtype.is_floating_point:
            mean = mine.clone()
            comms.all_reduce_mean(mean, async_op=True).wait()
            same("mean", mean, everyone.mean(0))
    assert comms.all_gather_data({"rank": rank}) == [{"rank": r} for r in range(n)]
    comms.barrier()
    last = comms.subgroup([n - 1])
    assert (last is not None) == (rank == n - 1)
    if last:
        same("subgroup", last.all_gather(mine), mine[None])
        last.close()


def same(what, got, expected):
    assert got.device == expected.device, what
    assert got.dtype == expected.dtype, what
    assert torch.equal(got, expected), (what, expected.dtype)


def messages(comms):
    other = 1 - comms.rank
    for dtype in DTYPES:
        everyone = of_ranks(comms, dtype, (1000,))
        mine, theirs = everyone[comms.rank], everyone[other]
        arrived = torch.empty_like(mine)
        comms.sendrecv(mine, other, arrived, other)
        same("sendrecv", arrived, theirs)
        arrived.zero_()
        if comms.rank == 0:
            comms.send(mine, other)
            comms.recv(arrived, other)
        else:
            comms.recv(arrived, other)
            comms.send(mine, other)
        same("send and recv", arrived, theirs)


BETWEEN_GPUS = ALGORITHMS


def all_reduce_algorithms(comms):
    for size in (1, 97, 1 << 20):  # the last in several pieces around the ring
        everyone = of_ranks(comms, torch.float32, (size,))
        for op in OPS:
            expected = everyone[comms.rank].clone()
            dist.all_reduce(expected, getattr(dist.ReduceOp, op.upper()))
            for name, algorithm in BETWEEN_GPUS.items():
                reduced = everyone[comms.rank].clone()
                algorithm(reduced, comms, op)
                same((name, op, size), reduced, expected)
        for name, algorithm in BETWEEN_GPUS.items():
            mean = everyone[comms.rank].clone()
            algorithm(mean, comms, "mean")
            same((name, "mean", size), mean, everyone.mean(0))


def model():
    """In float64: sums in another order, of other kernels, differ in the last bits only."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()


def batch(comms, step):
    """Inputs and targets for all ranks, on this rank's GPU."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, comms.world_size * ROWS, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(comms.device)


def train(module, optimizer, x, y):
    optimizer.zero_grad()
    mse_loss(module(x), y).backward()
    optimizer.step()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def ddp_is_one_process_on_the_whole_batch(comms):
    n, rank = comms.world_size, comms.rank
    for ring in (False, True):
        torch.manual_seed(0)
        alone = model().to(comms.device)
        ddp = DDP(copy.deepcopy(alone), comms, bucket_cap_mb=SMALL)
        if ring:  # on a thread of its own, with futures that know of streams
            ddp.register_comm_hook((comms, ring_all_reduce), all_reduce_hook)
        optimizer, optimizer_alone = sgd(ddp), sgd(alone)
        for step in range(STEPS):
            x, y = batch(comms, step)
            train(alone, optimizer_alone, x, y)
            train(ddp, optimizer, x.chunk(n)[rank], y.chunk(n)[rank])
            close(ddp.module, alone)
        assert len(ddp.reducer.buckets.plan) > 1
        check_replicas(ddp.module, comms)


def ddp_is_pytorchs(comms):
    torch.manual_seed(comms.rank)  # replicas that construction has to make equal
    norm = nn.BatchNorm1d(WIDTH).double()
    ours = nn.Sequential(model(), norm, nn.Linear(WIDTH, WIDTH).double()).to(comms.device)
    theirs = copy.deepcopy(ours)
    ddp = DDP(ours, comms, bucket_cap_mb=SMALL)
    with errors_from_warnings_of_ours_only():
        torch_ddp = TorchDDP(theirs, bucket_cap_mb=SMALL)
    optimizer, torch_optimizer = sgd(ddp), sgd(torch_ddp)
    for step in range(STEPS):
        x, y = (part.chunk(comms.world_size)[comms.rank] for part in batch(comms, step))
        train(ddp, optimizer, x, y)
        with errors_from_warnings_of_ours_only():
            train(torch_ddp, torch_optimizer, x, y)
        close(ours, theirs)
    check_replicas(ours, comms)


def close(ours, theirs):
    """Assert that gradients, parameters and buffers are equal, but for the order of sums."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        for a, b in ((p.grad, q.grad), (p, q)):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def spin():
    """Keep the GPU busy; returns at once."""
    torch.cuda._sleep(CYCLES)


def a_timeline_shows_what_the_gpu_did(comms):
    torch.cuda._sleep(1)  # the first launch loads the kernel
    timeline = Timeline(comms)
    start = seconds_now(comms.device)
    with timeline.span("spin"):
        spin()
    launched = time.perf_counter() - start
    timeline.mark("after it")
    busy = seconds_now(comms.device) - start
    spun, mark = timeline.take()
    assert launched < busy / 2, "the host should not have waited"
    assert busy / 2 < spun.end - spun.start < busy
    assert mark.start == mark.end >= spun.end

    total = torch.ones(1 << 20, device=comms.device)
    work = dist.all_reduce(total, async_op=True)
    timeline.launched("sum", work)
    work.wait()
    sums = timeline.gather()
    assert [span.rank for span in sums] == list(range(comms.world_size))
    mine = sums[comms.rank]
    assert spun.end < mine.start <= mine.end


def a_measurement_waits_for_the_gpu(comms):
    timings = measure({"spin": spin, "nothing": lambda: None}, comms, warmup=1, repeat=3)
    assert timings["spin"].median > 10 * timings["nothing"].median


@pytest.mark.parametrize(
    "body",
    [
        collectives,
        all_reduce_algorithms,
        ddp_is_one_process_on_the_whole_batch,
        ddp_is_pytorchs,
        a_timeline_shows_what_the_gpu_did,
        a_measurement_waits_for_the_gpu,
    ],
)
@pytest.mark.parametrize(("count", "ranks"), [ONE, SHARED, TWO])
def test_on_gpus(count, ranks, body):
    run(body, ranks, environment=gpus(count), timeout=TIMEOUT)


@pytest.mark.parametrize(("count", "ranks"), [SHARED, TWO])
def test_messages_between_gpus(count, ranks):
    run(messages, ranks, environment=gpus(count), timeout=TIMEOUT)
