"""Where the time of a step goes, by what the profiler saw."""

import math
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import pytest
import torch
from ranks import on_ranks
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.ddp import DDP
from microddp.model import SimpleCNN
from microddp.performance import ProfileSummary, profile_steps
from microddp.performance.profiler import Event, RankProfile, events_of, summarize
from microddp.schedule import naive_data_parallel_step
from microddp.workloads import Transformer, token_loss

# ---- events made by hand


def op(name, start, end, alone=None, within=(), device=False):
    return Event(name, start, end, end - start if alone is None else alone, within, device)


KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>"
GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "operation"),
        ("gloo:all_reduce", "all_reduce"),
        ("gloo:broadcast", "collective"),
        ("step 0", None),
        ("AddmmBackward0", None),
        ("torch::autograd::AccumulateGrad", None),
        ("c10d::allreduce_", None),
    ],
)
def test_on_the_host_operations_compute_and_backends_communicate(name, kind):
    assert kind_of(op(name, 0, 1)) == kind


def kind_of(event):
    assert not (event.operation and event.collective)
    assert event.collective or not event.all_reduce
    return next((k for k in ("operation", "all_reduce", "collective") if getattr(event, k)), None)


@pytest.mark.parametrize(
    ("name", "within", "kind"),
    [
        (NCCL, ("c10d::allreduce_",), "all_reduce"),
        ("ncclDevKernel_Broadcast_RING_LL", (), "collective"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", (), "all_reduce"),
        (GENERIC, ("nccl:all_reduce", "record_param_comms"), "all_reduce"),
        (GENERIC, ("record_param_comms", "c10d::allreduce_"), "all_reduce"),
        (GENERIC, ("nccl:_all_gather_base", "record_param_comms"), "collective"),
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgs)", ("nccl:all_reduce",), "all_reduce"),
        ("mscclKernel_Sum_float_Simple_false", ("nccl:all_reduce",), "all_reduce"),
        ("mscclKernel_Sum_float_Simple_false", ("nccl:reduce_scatter",), "collective"),
        # NCCL says itself that a kernel named for one collective may run another.
        (NCCL, ("nccl:broadcast", "record_param_comms"), "collective"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn", (), "operation"),
        (KERNEL, (), "operation"),
        ("Memcpy HtoD (Pageable -> Device)", (), "operation"),
    ],
)
def test_a_collectives_kernel_is_what_launched_it_and_any_other_computes(name, within, kind):
    assert kind_of(op(name, 0, 1, within=within, device=True)) == kind


BACKWARD = [
    op("aten::linear", 0, 4, alone=1),
    op("aten::addmm", 1, 4, alone=3),
    op("AddmmBackward0", 4, 9, alone=2),
    op("aten::mm", 5, 8),
    op("c10d::allreduce_", 4, 5),
]


def test_a_ranks_time_is_computing_and_collectives():
    ranges = [op("gloo:all_reduce", 5, 9), op("gloo:all_reduce", 7, 11)]
    mine = summarize([*BACKWARD, *ranges, op("gloo:broadcast", 11, 12)], 14, steps=2)
    assert mine == RankProfile(wall=7, computing=7 / 2, all_reduce=6 / 2, busy=(7 + 6 + 1) / 2)


def test_on_cuda_kernels_compute():
    kernels = [
        op("sm90_xmma_gemm_f32f32", 6, 10, device=True),
        op(NCCL, 8, 14, within=("c10d::allreduce_",), device=True),
    ]
    mine = summarize([*BACKWARD, *kernels], 16, kernels=True)
    assert mine == RankProfile(wall=16, computing=4, all_reduce=6, busy=4 + 6)
    assert ProfileSummary((mine,)).busy_share == 0.6


def test_a_summary_is_the_mean_over_the_ranks():
    quick = summarize(BACKWARD, 10)
    slow = summarize([*BACKWARD, op("gloo:all_reduce", 9, 19)], 20)
    summary = ProfileSummary((quick, slow))
    assert (summary.mean("wall"), summary.mean("all_reduce")) == (15, 5)
    assert summary.busy_share == 5 / 12
    assert ProfileSummary((summarize([], 1),)).busy_share == 0


# ---- a profiler's own events


def seen(name, start, end, number, parent=None, kernel=False, link=0, thread=1, **more):
    """An event as torch's profiler makes it, in microseconds."""
    device = torch.autograd.DeviceType.CUDA if kernel else torch.autograd.DeviceType.CPU
    times = {"start_us": start, "end_us": end}
    event = FunctionEvent(
        number, name, thread, **times, device_type=device, linked_correlation_id=link, **more
    )
    if parent:
        event.set_cpu_parent(parent)
        parent.append_cpu_child(event)
    return event


def kernels_of(found):
    return [event for event in events_of(found) if event.device]


def test_a_kernel_belongs_to_the_operation_that_launched_it_and_to_no_namesake():
    outer = seen("c10d::allreduce_", 0, 9, 3)
    inner = seen("record_param_comms", 1, 8, 4, outer)
    call = seen("cudaLaunchKernel", 2, 3, 7, inner, link=4)
    loading = seen("Runtime Triggered Module Loading", 4, 5, 7, inner, link=4)
    other = seen("c10d::broadcast_", 10, 11, 7)  # a number that the runtime's call has, too
    unlinked = seen("cuLaunchKernelEx", 12, 13, 4)  # and one outside all operations
    first = seen(GENERIC, 20, 30, 7, kernel=True, link=4)
    second = seen(GENERIC, 30, 31, 8, kernel=True, link=7)
    third = seen(GENERIC, 31, 32, 9, kernel=True)
    found = [outer, inner, call, loading, other, unlinked, first, second, third]
    for order in (found, found[::-1]):
        within = {event.start: event.within for event in kernels_of(order)}
        assert [within[start * 1e-6] for start in (20, 30, 31)] == [
            ("record_param_comms", "c10d::allreduce_"),
            ("c10d::broadcast_",),
            (),
        ]
    (mine,) = (event for event in events_of(found) if event.name == "record_param_comms")
    assert not mine.device
    assert mine.alone == pytest.approx(5e-6), "without the launch"


@pytest.mark.parametrize("name", [NCCL, GENERIC, "mscclKernel_Sum_float_Simple_false"])
def test_a_collective_of_nccl_is_counted_once_as_the_host_calls_it(name):
    found = []
    for i, (call, operation) in enumerate(
        [("nccl:all_reduce", "c10d::allreduce_"), ("nccl:broadcast", "c10d::broadcast_")]
    ):
        start = 100 * i
        outer = seen(operation, start, start + 9, 10 * i + 1)
        inner = seen("record_param_comms", start + 1, start + 8, 10 * i + 2, outer)
        host = seen(call, start + 2, start + 60, 10 * i + 3, is_async=True, is_user_annotation=True)
        kernel = seen(name, start + 20, start + 50, 5, kernel=True, link=10 * i + 2)
        again = seen(call, start + 20, start + 50, 0, kernel=True, is_user_annotation=True)
        found += [outer, inner, host, kernel, again]
    mine = summarize(list(events_of(found)), 200e-6, kernels=True)
    assert mine.all_reduce == pytest.approx(30e-6)
    assert mine.busy == pytest.approx(60e-6)
    assert mine.computing == 0
    assert kernels_of(found)[0].within == (
        *("nccl:all_reduce", "record_param_comms", "c10d::allreduce_"),
    )


@pytest.mark.parametrize("name", ["gloo:all_reduce", "nccl:all_reduce"])
def test_without_a_kernel_the_range_on_the_host_is_the_collective(name):
    # gloo's, and NCCL's in a group of one rank, which launches none.
    found = [
        seen("c10d::allreduce_", 0, 2, 1),
        seen(name, 1, 9, 2, thread=3, is_async=True, is_user_annotation=True),
        seen("some_kernel", 3, 4, 5, kernel=True, link=1),
    ]
    mine = summarize(list(events_of(found)), 10e-6, kernels=True)
    assert mine.all_reduce == pytest.approx(8e-6)


# ---- real steps of real ranks


def transformer():
    torch.manual_seed(0)
    return Transformer(vocabulary=256, dim=64, depth=2, heads=4, context=32)


def wrapped_step(model):
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 32))

    def step():
        optimizer.zero_grad()
        token_loss(model(tokens), tokens).backward()
        optimizer.step()

    step()
    step()  # until buckets are those of all later steps
    return step


@on_ranks(1, 2)
def test_a_naive_step_computes_or_sends(comms):
    model = transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randint(0, 256, (4, 32)),) * 2
    step = partial(naive_data_parallel_step, model, token_loss, optimizer, batch, comms)
    summary = profile_steps(step, comms, steps=2)
    assert len(summary.ranks) == comms.world_size
    assert 0 < summary.busy_share < 1
    for rank in summary.ranks:
        assert rank.computing + rank.all_reduce <= rank.wall * 1.05, "nothing is hidden"
        assert math.isclose(rank.busy - rank.all_reduce, rank.computing, rel_tol=0.02)
    everyone = comms.all_gather_data([asdict(rank) for rank in summary.ranks])
    assert all(theirs == everyone[0] for theirs in everyone)


@on_ranks(2)
def test_both_wrappers_are_profiled_alike(comms):
    for model in (DDP(transformer(), comms), TorchDDP(transformer())):
        summary = profile_steps(wrapped_step(model), comms, steps=2)
        assert 0 < summary.mean("all_reduce") < summary.mean("wall")
        assert summary.mean("busy") > summary.mean("all_reduce") + 0.9 * summary.mean("computing")


@on_ranks(2)
def test_a_buffers_broadcast_is_no_all_reduce(comms):
    model = DDP(SimpleCNN(), comms)
    images = torch.randn(8, 64)

    def step():
        with torch.no_grad():
            model(images)

    summary = profile_steps(step, comms)
    assert summary.mean("all_reduce") == 0
    assert summary.mean("busy") > 0


@on_ranks(1)
def test_profiling_nothing_is_refused(comms):
    with pytest.raises(ValueError, match="rank 0: expected at least one step, got 0"):
        profile_steps(lambda: None, comms, steps=0)


QUIET = """
import torch, microddp
from microddp.performance import profile_steps
with microddp.init() as comms:
    profile_steps(lambda: torch.ones(3) + 1, comms)
"""


def test_the_profiler_is_quiet():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if not line.startswith("microddp: one rank")] == []
