"""A rank's place, and messages from one rank to another."""

import contextlib
import io
import re

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from microddp.comms import Pending, cpu_cores, describe

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
DEBUG = {"MICRODDP_DEBUG": "1"}


def values(rank, size, dtype=torch.float32):
    """What ``rank`` sends; every rank can compute it."""
    return ((torch.arange(size) * 7 + 3 * rank) % 5).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def other(comms):
    return 1 - comms.rank


def exchange_around_the_ring(comms):
    """One right exchange: shows that nothing is left over from what was before."""
    n = comms.world_size
    incoming = torch.zeros(9)
    comms.sendrecv(values(comms.rank, 9), (comms.rank + 1) % n, incoming, (comms.rank - 1) % n)
    return torch.equal(incoming, values((comms.rank - 1) % n, 9))


@on_ranks()
def test_a_rank_knows_its_place(comms):
    assert comms.world_size == comms.local_world_size
    assert comms.rank == comms.local_rank
    assert comms.backend == "gloo"
    assert comms.timeout == 30
    everyone = comms.all_gather(torch.tensor(comms.rank, device=comms.device))
    assert everyone.tolist() == list(range(comms.world_size))


@on_ranks(3)
def test_only_rank_0_prints(comms):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        comms.print("rank", comms.rank)
    assert output.getvalue() == ("rank 0\n" if comms.rank == 0 else "")


@on_ranks(1, 3)
def test_describe_is_one_line_with_backend_ranks_and_cores(comms):
    text = comms.describe()
    assert text.startswith("gloo, 3 ranks on " if comms.world_size == 3 else "gloo, 1 rank on ")
    assert torch.__version__ in text
    assert "\n" not in text
    if comms.device.type == "cpu":
        assert ("more ranks than cores" in text) == (comms.world_size > cpu_cores())
    assert repr(comms).startswith(f"Comms(rank={comms.rank}, world_size={comms.world_size}")


@on_ranks(4)
def test_describe_tells_machines_apart_by_the_ranks_on_each(comms):
    comms.local_world_size = 2
    assert comms.describe().startswith(f"gloo, 4 ranks on 2 machines of {cpu_cores()} cores (")
    torch.cuda.get_device_name = lambda _: "GPU"
    comms.device = torch.device("cuda")
    for backend, seen, where in (
        ("nccl", 2, "2 x GPU, "),
        ("nccl", 1, "2 x GPU, "),  # each rank sees its own only
        ("gloo", 1, "1 x GPU, more ranks than GPUs, "),
    ):
        torch.cuda.device_count = lambda seen=seen: seen
        comms.backend = backend
        assert comms.describe().startswith(f"{backend}, 4 ranks on 2 machines of {where}")
    comms.local_world_size = 4
    assert comms.describe().startswith("gloo, 4 ranks on 1 x GPU, more ranks than GPUs, ")


@on_ranks(2, 3, 5)
def test_a_message_arrives_between_any_two_ranks(comms):
    for src in range(comms.world_size):
        for dst in range(comms.world_size):
            tensor = torch.full((4, 3), -1.0)
            if comms.rank == src != dst:
                comms.send(values(src, 12).view(4, 3) + dst, dst)
            if comms.rank == dst != src:
                comms.recv(tensor, src)
                assert torch.equal(tensor, values(src, 12).view(4, 3) + dst)


def send_every_dtype(comms):
    for dtype in DTYPES:
        for size in (0, 1, 5, 1009):
            incoming = torch.zeros(size, dtype=torch.uint8).to(dtype)
            if comms.rank == 0:
                comms.send(values(0, size, dtype), 1)
                comms.recv(incoming, 1)
            else:
                comms.recv(incoming, 0)
                comms.send(values(1, size, dtype), 0)
            assert same(incoming, values(1 - comms.rank, size, dtype)), (dtype, size)
            outgoing = values(comms.rank, size, dtype)
            comms.sendrecv(outgoing, other(comms), incoming.zero_(), other(comms))
            assert same(incoming, values(1 - comms.rank, size, dtype)), (dtype, size)


@on_ranks(2)
def test_every_dtype_and_size_arrives_unchanged(comms):
    send_every_dtype(comms)


@on_ranks(2, environment=DEBUG)
def test_every_dtype_and_size_arrives_unchanged_with_the_debug_switch(comms):
    send_every_dtype(comms)


@on_ranks(2)
def test_every_dtype_and_size_arrives_unchanged_through_the_host(comms):
    comms.through_host = True  # as for CUDA tensors over gloo
    send_every_dtype(comms)


@on_ranks(2)
def test_messages_to_one_rank_arrive_in_the_order_they_were_sent(comms):
    if comms.rank == 0:
        tensors = [torch.full((100,), float(i)) for i in range(20)]
        for pending in [comms.send(tensor, 1, async_op=True) for tensor in tensors]:
            pending.wait()
    else:
        tensors = [torch.empty(100) for _ in range(20)]
        for pending in [comms.recv(tensor, 0, async_op=True) for tensor in tensors]:
            pending.wait()
        assert [tensor.unique().tolist() for tensor in tensors] == [[float(i)] for i in range(20)]


@on_ranks(2, environment=DEBUG)
def test_in_whatever_order_they_are_waited_for(comms):
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    if comms.rank == 0:
        for tensor in tensors:
            comms.send(tensor, 1)
        return
    empty = [torch.empty(2) for _ in tensors]
    for pending in [comms.recv(tensor, 0, async_op=True) for tensor in empty][::-1]:
        pending.wait()
    assert torch.equal(torch.stack(empty), torch.stack(tensors))


@on_ranks(2, 3, 4, 5)
def test_all_ranks_can_send_around_a_ring_at_once(comms):
    # 8 MB: far more than the sockets hold, so that a send that waited for its receiver would hang.
    n, size = comms.world_size, 1 << 21
    incoming = torch.empty(size)
    comms.sendrecv(
        torch.full((size,), float(comms.rank)), (comms.rank + 1) % n, incoming, (comms.rank - 1) % n
    )
    assert incoming.unique().tolist() == [(comms.rank - 1) % n]


@on_ranks(2)
def test_a_pending_transfer_can_be_waited_for_twice(comms):
    incoming = torch.zeros(3)
    exchange = comms.exchanger(incoming, other(comms), other(comms))
    pending = exchange(torch.ones(3), incoming)
    pending.wait()
    pending.wait()
    assert incoming.tolist() == [1, 1, 1]


def test_pending_takes_its_steps_in_order_and_once():
    taken = []
    pending = Pending(lambda: taken.append(1), lambda: taken.append(2))
    assert taken == []
    pending.wait()
    pending.wait()
    assert taken == [1, 2]


@on_ranks(2)
def test_on_send_sees_every_message_that_is_sent(comms):
    seen = []
    comms.on_send = lambda tensor, dst: seen.append((tensor.tolist(), dst))
    incoming = torch.empty(1)
    comms.sendrecv(torch.ones(1), other(comms), incoming, other(comms))
    if comms.rank == 0:
        comms.send(torch.zeros(2), 1)
    else:
        comms.recv(torch.empty(2), 0)
    comms.all_reduce(incoming)
    also = [([0.0, 0.0], 1)] if comms.rank == 0 else []
    assert seen == [([1.0], other(comms)), *also]


@on_ranks(3)
def test_wrong_arguments_are_refused_before_anything_is_sent(comms):
    ok, me, peer = torch.ones(2, 2), comms.rank, (comms.rank + 1) % 3
    bad_arguments = [
        (lambda: comms.send(ok, 3), "expected dst in 0..2, got 3"),
        (lambda: comms.send(ok, -1), "expected dst in 0..2, got -1"),
        (lambda: comms.recv(ok, 7), "expected src in 0..2, got 7"),
        (lambda: comms.send(ok, me), "expected another rank as dst, got itself"),
        (lambda: comms.recv(ok, me), "expected another rank as src, got itself"),
        (lambda: comms.send(torch.ones(2, 3).T, peer), "send expected a contiguous tensor"),
        (lambda: comms.recv(torch.ones(6)[::2], peer), r"got shape \(3,\) with strides \(2,\)"),
        (lambda: comms.send(ok.to("meta"), peer), "send expected a tensor on cpu, got meta"),
        (lambda: comms.sendrecv(ok, 3, ok, peer), "expected dst in 0..2, got 3"),
        (lambda: comms.sendrecv(ok, me, ok, peer), "another rank as dst"),
        (lambda: comms.sendrecv(ok, peer, ok, 3), "expected src in 0..2, got 3"),
        (lambda: comms.sendrecv(ok.T, peer, ok, peer), "sendrecv expected a contiguous tensor"),
        (lambda: comms.sendrecv(ok, peer, ok.T, peer), "sendrecv expected a contiguous tensor"),
        (lambda: comms.exchanger(ok, peer, 3), "expected src in 0..2, got 3"),
        (lambda: comms.exchanger(ok.T, peer, peer), "sendrecv expected a contiguous tensor"),
    ]
    for call, message in bad_arguments:
        with pytest.raises(ValueError, match=f"^rank {me}: .*{message}"):
            call()
    assert exchange_around_the_ring(comms)


@on_ranks(2, environment=DEBUG)
def test_debug_names_what_a_receiver_expected_and_what_came(comms):
    wrong = [torch.ones(4), torch.ones(3, 1), torch.ones(3, dtype=torch.float64)]
    if comms.rank == 0:
        for pending in [comms.send(tensor, 1, async_op=True) for tensor in wrong]:
            pending.wait()
        return
    for coming in wrong:
        message = f"rank 1: recv expected float32 (3,) from rank 0, got {describe(coming)}"
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            comms.recv(torch.ones(3), 0)
        dist.recv(coming, 0)  # what followed the header


@on_ranks(2)
def test_without_debug_no_header_is_exchanged(comms):
    class NoHeaders:
        def __getattr__(self, name):
            raise AssertionError(f"a header was used: {name}")

    type(comms).headers = NoHeaders()
    assert exchange_around_the_ring(comms)
    for call in (comms.all_reduce, comms.broadcast, comms.all_gather, comms.all_to_all):
        call(torch.ones(2))
    comms.reduce_scatter(torch.ones(2))
    comms.barrier()


@on_ranks(1)
def test_scratch_has_the_dtype_and_count_asked_for_and_is_handed_out_again(comms):
    first = comms.scratch(1000, torch.empty(0, dtype=torch.float64))
    assert (first.dtype, first.shape) == (torch.float64, (1000,))
    for count, dtype in ((8, torch.bool), (0, torch.float32), (999, torch.complex64)):
        again = comms.scratch(count, torch.empty(3, dtype=dtype))
        assert (again.dtype, again.shape) == (dtype, (count,))
        assert again.untyped_storage().data_ptr() == first.data_ptr()
    assert comms.scratch(1001, first).shape == (1001,)
