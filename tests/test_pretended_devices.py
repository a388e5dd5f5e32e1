"""The book on pretended GPUs, and the pretence itself: what is planted is caught."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pretended.communicators import Call, Log
from pretended.job import on_pretended_gpus, run_chapter
from pretended.replay import DisorderError, replay
from ranks import run
from shorter import CHAPTERS, ON_THREE, shortened
from torch.nn.functional import cross_entropy

import microddp
from microddp.allreduce import ring_all_reduce
from microddp.replicas import broadcast_tensors
from microddp.shared import all_reduce_hook
from microddp.train.__main__ import main


def job(ranks, body, *arguments, gpus, ranks_here=None):
    """What every rank called, in a job on machines with as many pretended GPUs."""
    return run(
        on_pretended_gpus,
        ranks,
        body,
        gpus,
        ranks_here,
        *arguments,
        join=False,
        timeout=220,
        # In chapter 13 the others wait for rank 0, which starts jobs of its own.
        environment={"MICRODDP_TIMEOUT": "150"},
    )


# ---- devices


def devices_are_known():
    comms = microddp.init()
    here, x = comms.device, torch.arange(6.0, device=comms.device)
    parts = (
        x[1:],
        x.view(2, 3).T,
        x.detach(),
        x.data,
        x.clone(),
        x.double(),
        x + 1,
        x.new_empty(2),
    )
    for tensor in (x, *parts, torch.zeros_like(x), torch.tensor([1], device=here)):
        assert (tensor.device, tensor.is_cuda, tensor.is_cpu) == (here, True, False)
    assert x.to(here) is x
    assert x.cpu().device == x.to("cpu", torch.float64).device == torch.ones(2).device
    assert x.cpu().cuda().device == torch.ones(1).to(x).device == here
    assert torch.empty_like(x, device="meta").device.type == "meta"
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    model.to(here)
    with torch.autocast("cuda", torch.bfloat16):
        cross_entropy(model(x.long()), torch.zeros(6, dtype=torch.int64, device=here)).backward()
    assert {p.device for p in model.parameters()} == {p.grad.device for p in model.parameters()}
    # A leaf on the CPU gets its gradient there.
    leaf = torch.ones(2, requires_grad=True)
    leaf.to(here).sum().backward()
    assert (leaf.device, leaf.grad.device) == (torch.device("cpu"), torch.device("cpu"))
    # What PyTorch brings together.
    assert x[torch.tensor([0, 1])].device == (x * torch.tensor(2.0)).device == here
    assert torch.equal(torch.zeros(6).copy_(x), x.cpu())
    comms.close()


def devices_are_kept_apart():
    comms = microddp.init()
    here = comms.device
    x, y = torch.ones(3, device=here), torch.ones(3)
    tracked = torch.ones(3, device=here, requires_grad=True)
    mistakes = {
        "a sum": lambda: x + y,
        "a sum in place": lambda: y.add_(x),
        "a sum elsewhere": lambda: torch.add(x, x, out=y),
        "a join": lambda: torch.cat([x, y]),
        "a GPU's scalar": lambda: y * x.sum(),
        "a weight": lambda: torch.nn.functional.linear(x, torch.ones(3, 3)),
        "a gradient": lambda: (tracked * tracked).backward(y),
        "a list": lambda: torch._foreach_add_([x], [y]),
        "an index": lambda: y[x.long()],
        "another GPU": lambda: x + y.to("cuda:1"),
        "no such GPU": lambda: y.to("cuda:2"),
        "numpy": lambda: x.numpy(),
        "a generator": lambda: torch.rand(3, device=here, generator=torch.Generator()),
        "too much": lambda: torch.empty(1 << 29, device=here),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (RuntimeError, TypeError) as error:
            said = str(error)
        else:
            said = "nothing"
        words = "two devices|indices should|invalid device|to numpy|for generator|out of memory"
        assert re.search(words, said), f"{name}: {said}"
    comms.close()


def memory_is_counted():
    comms = microddp.init()
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, device=comms.device)
    half = x[: 1 << 19]
    del x
    assert torch.cuda.memory_allocated() - before == 4 << 20, "a view keeps the whole alive"
    del half
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= 4 << 20
    comms.close()


@pytest.mark.parametrize("body", [devices_are_known, devices_are_kept_apart, memory_is_counted])
def test_devices(body):
    job(1, body, gpus=2)


# ---- backends


def refused(call, *tensors):
    with pytest.raises(RuntimeError, match=r"tensor on|does not have|No backend"):
        call(*tensors)


def nccl_wants_gpus():
    comms = microddp.init()
    x, peer = torch.ones(4, device=comms.device), 1 - comms.rank
    assert (comms.backend, dist.get_backend()) == ("nccl", "nccl")
    refused(dist.all_reduce, torch.ones(4))
    refused(comms.group.allreduce, [torch.ones(4)])
    refused(dist.send, torch.ones(4), peer)
    refused(dist.all_gather, [torch.ones(4)] * 2, x)
    refused(dist.all_reduce, x.to(torch.int16))
    refused(dist.broadcast, torch.ones(4, device=f"cuda:{peer}"), 0)
    refused(comms.group._get_backend, torch.device("cpu"))
    ring_all_reduce(x, comms)
    assert comms.all_gather_data(comms.rank) == [0, 1]
    assert x.tolist() == [2.0] * 4
    comms.close()


def gloo_wants_little_of_gpus():
    comms = microddp.init()
    x, peer = torch.ones(4, device=comms.device), 1 - comms.rank
    assert (comms.backend, str(comms.device)) == ("gloo", "cuda:0")
    refused(dist.gather, x, [torch.empty_like(x)] * 2 if comms.rank == 0 else None)
    refused(dist.all_gather, [torch.empty_like(x)] * 2, x)
    refused(dist.send, x, peer)
    refused(comms.group._get_backend(comms.device).recv, [x], peer, 0)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    ring_all_reduce(x, comms)
    assert x.tolist() == [4.0] * 4
    comms.close()


@pytest.mark.parametrize(("body", "gpus"), [(nccl_wants_gpus, 2), (gloo_wants_little_of_gpus, 1)])
def test_backends(body, gpus):
    replay(job(2, body, gpus=gpus))


# ---- order


def leaves_early():
    comms = microddp.init()
    few = comms.subgroup([0])
    if few is None:
        comms.close()
        return
    dist.new_group([0], timeout=timedelta(seconds=5))
    comms.close()


def sends_around_a_collective():
    comms = microddp.init()
    x = torch.ones(4, device=comms.device)
    if comms.rank == 0:
        sending = comms.send(x, 1, async_op=True)
        comms.all_reduce(x.clone())
        sending.wait()
    else:
        comms.all_reduce(x.clone())
        comms.recv(x, 0)
    comms.close()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (leaves_early, r"rank 0: waits in call 3 of 3, new_group \[0\] at .*\n  rank 1: has left"),
        (
            sends_around_a_collective,
            r"rank 0: waits in call 2 of 3, send float32 x 4 \(1\) at .*\n"
            r"  rank 1: waits in call 2 of 3, all_reduce float32 x 4 at .*test_pretended",
        ),
    ],
)
def test_what_gloo_forgives(body, found):
    logs = job(2, body, gpus=2)
    with pytest.raises(DisorderError, match=found):
        replay(logs)


class LateGradient(torch.autograd.Function):
    """Backward takes a while, in which a thread can send what was ready before."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        time.sleep(0.2)
        return gradient


def hook_on_a_thread():
    comms = microddp.init()
    first, last, spare = (torch.nn.Linear(8, 8).to(comms.device) for _ in range(3))
    model = torch.nn.ModuleList([first, last, spare])
    model.forward = lambda x: last(LateGradient.apply(first(x)))

    def ring(tensor, comms, op):
        time.sleep(0.4 * comms.rank)
        ring_all_reduce(tensor, comms, op)

    ddp = microddp.DDP(model, comms, bucket_cap_mb=1e-5, find_unused_parameters=True)
    ddp.register_comm_hook((comms, ring), all_reduce_hook)
    ddp(torch.ones(4, 8, device=comms.device)).sum().backward()
    comms.close()


def test_hook_on_a_thread():
    replay(job(2, hook_on_a_thread, gpus=2))


def queues(*ranks):
    key = (tuple(range(len(ranks))), 0)
    return [Log("nccl", (0, rank), {key: calls}) for rank, calls in enumerate(ranks)]


SUM, BARRIER = Call("all_reduce float32 x 4"), Call("barrier")
SEND, RECV = (
    Call("", ((kind, 1 - rank, "int64 x 1"),)) for rank, kind in enumerate(("send", "recv"))
)
BOTH = [Call("", (("recv", peer, "x"), ("send", peer, "x"))) for peer in (1, 0)]


@pytest.mark.parametrize(
    ("ranks", "fits"),
    [
        (([SUM, BARRIER], [SUM, BARRIER]), True),
        (([SUM, BARRIER], [BARRIER, SUM]), False),
        (([SUM, BARRIER], [SUM]), False),
        (([SUM], [Call("all_reduce float32 x 5")]), False),
        (([SEND, SUM], [RECV, SUM]), True),
        (([SEND, SUM], [SUM, RECV]), False),
        (([SEND], [Call("", (("recv", 0, "int64 x 2"),))]), False),
        (([BOTH[0], SUM], [BOTH[1], SUM]), True),
        # One after the other, both would first receive.
        (tuple([Call("", (m,)) for m in both.messages] for both in BOTH), False),
    ],
)
def test_replay(ranks, fits):
    if fits:
        replay(queues(*ranks))
    else:
        with pytest.raises(DisorderError):
            replay(queues(*ranks))


def test_ranks_that_share_a_gpu():
    logs = queues([], [])
    logs[1].gpu = logs[0].gpu
    with pytest.raises(DisorderError, match="ranks 0 and 1 are both on GPU 0"):
        replay(logs)


# ---- the book

ON_TWO_MACHINES = ("07", "15", "16")  # they make groups of ranks, or ask where ranks are


# Each chapter once; those that make groups of machines on two of them, below.
@pytest.mark.parametrize("chapter", sorted(set(CHAPTERS) - set(ON_TWO_MACHINES)))
def test_chapter_with_nccl(chapter):
    ranks = 1 if chapter in ("00", "01") else 3 if chapter in ON_THREE else 2
    replay(job(ranks, run_chapter, CHAPTERS[chapter], shortened(chapter), gpus=3))


# Those whose own code sends messages of several kinds, of which gloo takes few from a GPU.
@pytest.mark.parametrize("chapter", ["02", "06", "07", "10"])
def test_chapter_with_gloo(chapter):
    ranks = 3 if chapter in ON_THREE else 2
    logs = job(ranks, run_chapter, CHAPTERS[chapter], shortened(chapter), gpus=1)
    if chapter not in ("06", "07"):  # whose ranks disagree on purpose, to show what comes of it
        replay(logs)


@pytest.mark.parametrize("chapter", ON_TWO_MACHINES)
def test_chapter_on_two_machines(chapter):
    replay(job(4, run_chapter, CHAPTERS[chapter], shortened(chapter), gpus=2, ranks_here=2))


def parts_on_two_gpus():
    comms = microddp.init("gloo")
    mine = [torch.full((3,), comms.rank + 1.0, device=f"cuda:{i % 2}") for i in range(4)]
    mine.append(torch.full((), comms.rank, device="cuda:1"))
    broadcast_tensors(mine, comms, src=1)
    assert [tensor.tolist() for tensor in mine] == [[2.0] * 3] * 4 + [1]
    assert [tensor.device.index for tensor in mine] == [0, 1, 0, 1, 1]
    comms.close()


def test_a_model_on_two_gpus_is_broadcast():
    job(2, parts_on_two_gpus, gpus=2)


def one_line_of_nanogpt():
    comms = microddp.init()
    model = torch.nn.Linear(3, 3).to(comms.device)
    ddp_local_rank = comms.rank
    model = microddp.DDP(model, device_ids=[ddp_local_rank])
    model(torch.ones(2, 3, device=comms.device)).sum().backward()
    with pytest.raises(ValueError, match="expected device_ids of one device"):
        microddp.DDP(model.module, device_ids=[0, 1])
    with pytest.raises((ValueError, RuntimeError)):
        microddp.DDP(model.module, device_ids=["cpu"])
    comms.close()


def test_a_script_may_name_its_device():
    replay(job(2, one_line_of_nanogpt, gpus=2))


def train(folder):
    """With losses that are scaled, and on from a checkpoint that was written on the GPU."""
    usual = "--model mlp --width 32 --precision fp16 --accumulate 2 --batch-size 480 --checkpoint"
    for options in (("--epochs", "1"), ("--epochs", "2", "--resume")):
        main([*usual.split(), folder, *options])


@pytest.mark.parametrize("gpus", [1, 2])
def test_training(gpus, tmp_path):
    replay(job(2, train, str(tmp_path), gpus=gpus))
