"""Collectives through shared memory: results, barriers, who may share, and what goes wrong.

That the all-reduce equals the oracles for every dtype, op and size is tested with the others'.
"""

import gc
import mmap
import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kills import kill
from ranks import on_ranks, run

import microddp
from microddp.launch import is_echo
from microddp.shared import (
    collectives,
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
    shared_reduce_scatter,
)
from microddp.shared import region as regions
from microddp.shared.memory import Memory
from microddp.shared.region import region_of

SIZES = (0, 1, 2, 97, 270_001, 1_000_003)  # of float32: both ways, one piece and several


def of_rank(rank, size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_rank_order(n, size, dtype=torch.float32):
    total = of_rank(0, size, dtype)
    for rank in range(1, n):
        total = total + of_rank(rank, size, dtype)
    return total


def in_memory(comms, tensor):
    """A copy that is in shared memory."""
    return region_of(comms).zeros(tensor.numel(), tensor.dtype).copy_(tensor)


# ---- results


@on_ranks()
def test_sums_in_rank_order_to_the_bit(comms):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in SIZES:
            expected = in_rank_order(comms.world_size, size, dtype)
            tensor = of_rank(comms.rank, size, dtype)
            shared_all_reduce(tensor, comms)
            assert torch.equal(tensor, expected), (size, dtype)
            if size:
                tensor = in_memory(comms, of_rank(comms.rank, size, dtype))
                shared_all_reduce(tensor, comms)
                assert torch.equal(tensor, expected), (size, dtype, "in place")


@on_ranks()
def test_the_halves_and_a_broadcast_equal_the_backends(comms):
    n = comms.world_size
    for size in SIZES:
        whole = in_rank_order(n, size)
        mine, before = of_rank(comms.rank, size), of_rank(comms.rank, size)
        chunk = shared_reduce_scatter(mine, comms)
        assert torch.equal(chunk, whole.tensor_split(n)[comms.rank])
        others = [rank for rank in range(n) if rank != comms.rank]
        for rank in others:
            assert torch.equal(mine.tensor_split(n)[rank], before.tensor_split(n)[rank])
        shared_all_gather(mine, comms)
        assert torch.equal(mine, whole)
        for src in range(n):
            tensor, theirs = of_rank(comms.rank, size), of_rank(comms.rank, size)
            shared_broadcast(tensor, comms, src)
            dist.broadcast(theirs, src)
            assert torch.equal(tensor, theirs)


@on_ranks(2, 3)
def test_chunks_may_be_of_any_size(comms):
    n, flat = comms.world_size, of_rank(comms.rank, 300_000)
    sizes = [0, 299_999, 1][:n] if n == 3 else [299_999, 1]
    chunks = flat.split(sizes)
    mine = shared_reduce_scatter(flat, comms, "max", chunks)
    assert mine.numel() == sizes[comms.rank]
    shared_all_gather(flat, comms, chunks)
    expected = torch.stack([of_rank(rank, 300_000) for rank in range(n)]).amax(0)
    assert torch.equal(flat, expected)


@on_ranks(4)
def test_groups_at_once_do_not_mix(comms):
    whole, left, right = comms, comms.subgroup([0, 2]), comms.subgroup([1, 3, 2])
    for _ in range(20):
        for group in filter(None, (left, whole, right)):
            tensor = torch.full((100_000,), 1.0 + comms.rank)
            shared_all_reduce(tensor, group)
            expected = {2: 4, 4: 10, 3: 9}[group.world_size]
            assert bool((tensor == expected).all())


@on_ranks(2)
def test_on_another_thread(comms):
    """As gradients travel while backward goes on."""
    tensor = of_rank(comms.rank, 1_000_000)
    thread = threading.Thread(target=shared_all_reduce, args=(tensor, comms))
    thread.start()
    thread.join()
    assert torch.equal(tensor, in_rank_order(2, 1_000_000))


# ---- barriers


@on_ranks(2, 4)
def test_how_many_barriers_a_call_has(comms):
    region = region_of(comms)
    piece = regions.BUFFER_BYTES // comms.world_size  # bytes of a chunk that travel at a time

    def barriers(call, *arguments):
        before = region.barriers
        call(*arguments)
        return region.barriers - before

    assert barriers(shared_all_reduce, torch.ones((1 << 18) // comms.world_size), comms) == 1
    for pieces in (1, 2, 5):
        tensor = torch.ones(comms.world_size * piece * pieces // 4)
        assert barriers(shared_all_reduce, tensor, comms) == pieces + 1
        assert barriers(shared_reduce_scatter, tensor, comms) == pieces
    assert barriers(shared_all_reduce, region.zeros(5_000_000, torch.float32), comms) == 2


def many_barriers(comms, times):
    """Each rank writes, before each barrier, what all others must read after it."""
    region = region_of(comms)
    words = [memoryview(memory.first)[regions.BUFFERS_AT :].cast("q") for memory in region.memories]
    mine, others = words[comms.rank], [word for word in words if word is not words[comms.rank]]
    for k in range(times):
        turn = k % 2
        mine[turn] = k
        region.barrier()
        for theirs in others:
            if theirs[turn] != k:
                raise AssertionError((k, theirs[turn]))
    for word in words:
        word.release()


@on_ranks(2, 3, timeout=120.0)
def test_what_was_written_before_a_barrier_is_read_after_it(comms):
    many_barriers(comms, 100_000)


@on_ranks(2, 3, timeout=120.0)
def test_many_calls_one_after_the_other(comms):
    """Whoever is a call ahead must not write what another still reads, nor read what is not there.

    Ranks stumble now and then, so that each is ahead of the others at times.
    """
    generator = torch.Generator().manual_seed(comms.rank)
    n, region = comms.world_size, region_of(comms)
    small, large = torch.empty(5), torch.empty(300_000)
    shared = region.zeros(300_001, torch.float32)
    for k in range(7_000):
        for tensor in (small, shared, large) if k % 50 == 0 else (small, small):
            tensor.fill_(comms.rank + k)
            shared_all_reduce(tensor, comms)
            assert bool((tensor == n * k + n * (n - 1) // 2).all()), (k, tensor)
        if torch.rand((), generator=generator) < 0.01:
            time.sleep(2e-4)


@on_ranks(2)
def test_a_part_of_a_shared_tensor_may_be_reduced_before_or_after_the_whole(comms):
    shared = region_of(comms).zeros(2_000_000, torch.float32)
    for sizes in ((1_000_000, 2_000_000), (2_000_000, 1_000_000)):
        for size in sizes:
            shared.fill_(comms.rank + 1.0)
            shared_all_reduce(shared[:size], comms)
            assert bool((shared[:size] == 3).all())
            assert bool((shared[size:] == comms.rank + 1).all())


# ---- who shares memory


@on_ranks(2)
def test_other_mappings_are_the_same_memory(comms):
    region = region_of(comms)
    assert [memory is region.mine for memory in region.memories] == [
        comms.rank == k for k in (0, 1)
    ]
    mine = region.zeros(10, torch.float32)
    mine.fill_(comms.rank)
    offsets = comms.all_gather_data(region.offset_of(mine))
    peer = 1 - comms.rank
    theirs = region.at(peer, offsets[peer], 10, torch.float32)
    assert theirs.tolist() == [float(peer)] * 10
    comms.barrier()
    mine.fill_(7)
    comms.barrier()
    assert theirs.tolist() == [7.0] * 10
    comms.barrier()  # whoever leaves gives its memory back
    assert region.offset_of(mine[1:]) == regions.NOT_SHARED


def test_who_shares_with_whom():
    assert regions._machines([[0, 1], [0, 1], [2]]) == [[0, 1], [2]]
    assert regions._machines([[0, 2], [1, 3], [0, 2], [1, 3]]) == [[0, 2], [1, 3]]
    assert regions._machines([[], [], []]) == [[0], [1], [2]]
    one_sided = [[0, 1], [1]]
    assert regions._machines(one_sided) == [[0], [1]]
    chain = [[0, 1], [0, 1, 2], [1, 2]]  # the first does not see the last
    assert regions._machines(chain) == [[0], [1], [2]]


def test_only_a_file_with_the_name_that_was_told_is_opened():
    memory = Memory.create(mmap.PAGESIZE)
    process, file, living, name = memory.handle
    assert Memory.open([process, file, living, name], mmap.PAGESIZE) is not None
    assert Memory.open([process, file, living, name[:-1] + "x"], mmap.PAGESIZE) is None
    assert Memory.open([process, 1, living, name], mmap.PAGESIZE) is None
    assert Memory.open([2**22 + 1, file, living, name], mmap.PAGESIZE) is None
    assert not [entry for entry in os.listdir("/dev/shm") if "microddp" in entry]


def test_memory_that_cannot_be_had_leaves_no_file_open(monkeypatch):
    memory = Memory.create(mmap.PAGESIZE)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="greater than file size"):
        Memory.open(memory.handle, 2 * mmap.PAGESIZE)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="no space left"):
        Memory.create(mmap.PAGESIZE)
    assert os.listdir("/proc/self/fd") == before


@on_ranks(3)
def test_ranks_of_other_machines_are_refused_alike(comms):
    if comms.rank == 1:  # as one in another container
        Memory.open = lambda *_: None
    with pytest.raises(
        RuntimeError, match=r"got ranks 0, 1, 2: memory shared by \[0, 2\] and \[1\]"
    ):
        shared_all_reduce(torch.ones(3), comms)


@on_ranks(2)
def test_a_machine_without_such_memory_is_told_alike(comms):
    def refused(_):
        raise PermissionError("memfd_create is not allowed")

    if comms.rank == 1:
        os.memfd_create = refused
    with pytest.raises(RuntimeError, match=r"shared by \[0\] and \[1\].*memfd_create is not al"):
        shared_all_reduce(torch.ones(3), comms)


def resident():
    """Bytes of shared memory that this process has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * resource.getpagesize()


@on_ranks(2)
def test_memory_is_given_back(comms):
    region, size = region_of(comms), 64 << 20
    file = region.mine._file
    before = os.fstat(file).st_blocks * 512
    for _ in range(3):
        tensor = region.zeros(size // 4, torch.float32).fill_(1)
        half = tensor[: size // 8]
        shared_all_reduce(tensor, comms)
        del tensor
        assert os.fstat(file).st_blocks * 512 >= before + size, "a view keeps it"
        assert half[-1] == 2
        del half
        assert os.fstat(file).st_blocks * 512 < before + size / 8


@on_ranks(2)
def test_a_child_that_lets_go_of_it_takes_nothing_away(comms):
    """As a worker that loads data is a child."""
    region = region_of(comms)
    tensor = region.zeros(1000, torch.float32).fill_(1)
    child = os.fork()
    if not child:
        del tensor
        os._exit(0)
    os.waitpid(child, 0)
    assert tensor[0] == tensor[-1] == 1
    shared_all_reduce(tensor, comms)
    assert tensor[0] == tensor[-1] == 2


# ---- what goes wrong


@on_ranks(2, 3)
def test_different_calls_are_an_error_on_every_rank_and_the_last(comms):
    with pytest.raises(RuntimeError, match=r"same call.*rank 0: .*\(3,\).*rank 1: .*\(4,\)"):
        shared_all_reduce(torch.ones(4 if comms.rank == 1 else 3), comms)
    call = shared_all_reduce if comms.rank == 1 else shared_broadcast
    with pytest.raises(RuntimeError, match=r"rank 0: shared_broadcast.*rank 1: shared_all_reduce"):
        call(torch.ones(3), comms)
    tensor = torch.ones(3)
    shared_all_reduce(tensor, comms)  # they are still in step
    assert tensor.tolist() == [comms.world_size] * 3


@on_ranks(1)
def test_a_tensor_elsewhere_is_refused(comms):
    with pytest.raises(ValueError, match="rank 0: expected a tensor in main memory"):
        shared_all_reduce(torch.ones(3, device="meta"), comms)
    with pytest.raises(ValueError, match="rank 0: shared_reduce_scatter expected a contiguous"):
        shared_reduce_scatter(torch.ones(3, 2).t(), comms)


def dies_in_the_middle(comms, when):
    tensor = torch.ones(3_000_000)
    shared_all_reduce(tensor, comms)
    region, barrier = region_of(comms), regions.SharedRegion.barrier
    before = region.barriers

    def die(self):
        if self.barriers == before + when:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(self)

    if comms.rank == 1:
        regions.SharedRegion.barrier = die
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match="expected rank 1 at a barrier in shared memory, got its"
    ) as caught:
        shared_all_reduce(tensor, comms)
    took = time.monotonic() - began
    assert is_echo(caught.value)
    with pytest.raises(RuntimeError, match="expected no error in an earlier call, got: rank "):
        shared_all_reduce(tensor, comms)
    return took


@pytest.mark.parametrize("when", [0, 3])
def test_a_rank_that_dies_is_an_error_on_the_others_at_once(when):
    took = run(dies_in_the_middle, 3, when, dies=[1])
    assert max(took[0], took[2]) < 2
    assert not [entry for entry in os.listdir("/dev/shm") if "microddp" in entry]


def test_kills_at_random_moments():
    """A few; many are ``python tests/allreduce/kills.py --kills 200``."""
    assert kill(6, seed=1)


def raises_in_the_middle(comms):
    tensor = torch.ones(3_000_000)
    shared_all_reduce(tensor, comms)
    if comms.rank == 0:
        collectives._reduce = None  # not callable
        with pytest.raises(TypeError):
            shared_all_reduce(tensor, comms)
        return 0.0
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 at a barrier in shared memory, got its error"):
        shared_all_reduce(tensor, comms)
    return time.monotonic() - began


def test_a_rank_that_raises_in_the_middle_is_an_error_on_the_others():
    assert run(raises_in_the_middle, 2)[1] < 2


@on_ranks(2, environment={"MICRODDP_TIMEOUT": "1"})
def test_a_rank_that_does_not_come_is_an_error_after_the_time_out(comms):
    shared_all_reduce(torch.ones(3), comms)
    if comms.rank == 0:
        time.sleep(3)
        return
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"expected rank 0 at a barrier .* within 1 s, got nobod"
    ):
        shared_all_reduce(torch.ones(3), comms)
    assert 0.9 < time.monotonic() - began < 2.5


def jobs_one_after_the_other(_):
    files = []
    for _ in range(3):
        comms = microddp.init()
        shared_all_reduce(torch.ones(9), comms)
        comms.close()
        del comms
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    return files


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_memory_is_given_back_when_a_job_ends():
    for files in run(jobs_one_after_the_other, 2, None, join=False):
        assert files[1] == files[2]
