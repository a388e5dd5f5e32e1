"""Where the time of a step goes, by what the profiler saw."""

import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from microddp.ddp import DDP
from microddp.model import SimpleCNN
from microddp.performance import ProfileSummary, profile_steps
from microddp.performance.profiler_events import Event, events_of, summarize
from microddp.schedule import naive_data_parallel_step
from microddp.step_times import covered, in_both
from microddp.workloads import Transformer, token_loss

# ---- kinds and interval arithmetic, on events made by hand


def op(name, start, end, alone=None, within=(), device=False):
    return Event(name, start, end, end - start if alone is None else alone, within, device)


KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>"
GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("name", "within", "kind"),
    [
        ("aten::mm", (), "matrix multiplication"),
        ("aten::addmm", ("aten::linear",), "matrix multiplication"),
        ("aten::t", ("aten::linear", "AddmmBackward0"), "matrix multiplication"),
        ("aten::bmm", ("aten::scaled_dot_product_attention",), "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", (), "attention"),
        ("aten::mkldnn_convolution", ("aten::conv2d",), "convolution"),
        ("aten::silu", (), "elementwise"),
        ("aten::_log_softmax_backward_data", (), "elementwise"),
        ("aten::native_layer_norm_backward", (), "elementwise"),
        ("aten::addcdiv_", (), "elementwise"),
        ("aten::copy_", ("aten::_to_copy", "aten::to"), "copy"),
        ("aten::mul_", ("Optimizer.step#AdamW.step",), "optimizer"),
        ("aten::embedding", (), "other"),
        ("aten::view", (), "other"),
        ("gloo:all_reduce", (), "all-reduce"),
        ("gloo:broadcast", (), "other collectives"),
    ],
)
def test_operations_have_kinds(name, within, kind):
    assert op(name, 0, 1, within=within).kind == kind


@pytest.mark.parametrize(
    ("name", "within", "kind"),
    [
        (NCCL, ("c10d::allreduce_",), "all-reduce"),
        ("ncclDevKernel_Broadcast_RING_LL", (), "other collectives"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", (), "all-reduce"),
        (GENERIC, ("nccl:all_reduce", "record_param_comms"), "all-reduce"),
        (GENERIC, ("record_param_comms", "c10d::allreduce_"), "all-reduce"),
        (GENERIC, ("nccl:_all_gather_base", "record_param_comms"), "other collectives"),
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgs)", ("nccl:all_reduce",), "all-reduce"),
        ("mscclKernel_Sum_float_Simple_false", ("nccl:all_reduce",), "all-reduce"),
        ("mscclKernel_Sum_float_Simple_false", ("nccl:reduce_scatter",), "other collectives"),
        # NCCL says itself that a kernel named for one collective may run another.
        (NCCL, ("nccl:broadcast", "record_param_comms"), "other collectives"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn", (), "matrix multiplication"),
        (KERNEL, ("cudaLaunchKernel", "aten::add"), "elementwise"),
        (KERNEL, ("aten::add_", "Optimizer.step#SGD.step"), "optimizer"),
        (KERNEL, ("aten::mul", "aten::_flash_attention_forward"), "attention"),
        (KERNEL, (), "elementwise"),
        ("Memcpy HtoD (Pageable -> Device)", (), "copy"),
    ],
)
def test_kernels_have_the_kind_of_what_launched_them(name, within, kind):
    event = op(name, 0, 1, within=within, device=True)
    assert event.kind == kind
    assert event.operation


def test_a_call_is_counted_where_its_kind_begins():
    assert op("aten::addmm", 0, 1, within=("AddmmBackward0",)).outermost
    assert not op("aten::t", 0, 1, within=("aten::linear",)).outermost
    assert op("aten::copy_", 0, 1, within=("aten::linear",)).outermost
    assert op("aten::mul_", 0, 1, within=("Optimizer.step#AdamW.step",)).outermost


@pytest.mark.parametrize(
    "name", ["step 0", "AddmmBackward0", "torch::autograd::AccumulateGrad", "c10d::allreduce_"]
)
def test_ranges_nodes_and_calls_of_collectives_are_no_computation(name):
    assert not op(name, 0, 1).operation


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=8)


@given(RANGES, RANGES)
def test_intervals_are_counted_once_and_intersected_exactly(first, second):
    a, b = ([op("aten::mm", start, start + length) for start, length in r] for r in (first, second))
    seconds = range(26)
    of_a, of_b = ({s for s in seconds for e in r if e.start <= s < e.end} for r in (a, b))
    assert covered(a) == len(of_a)
    assert in_both(a, b) == len(of_a & of_b)


BACKWARD = [
    op("aten::linear", 0, 4, alone=1),
    op("aten::addmm", 1, 4, alone=3, within=("aten::linear",)),
    op("AddmmBackward0", 4, 9, alone=2),
    op("aten::mm", 5, 8, within=("AddmmBackward0",)),
    op("c10d::allreduce_", 4, 5),
]


def test_a_ranks_time_is_computing_waiting_and_idle():
    ranges = [op("gloo:all_reduce", 5, 9), op("gloo:all_reduce", 7, 11)]
    mine = summarize([*BACKWARD, *ranges, op("gloo:broadcast", 11, 12)], 14, steps=2)
    assert mine.wall == 7
    assert mine.kinds["matrix multiplication"] == (7 / 2, 1)
    assert mine.kinds["all-reduce"] == (6 / 2, 1)
    assert mine.kinds["other collectives"] == (1 / 2, 1 / 2)
    assert mine.computing == mine.host == 7 / 2
    assert mine.hidden == 3 / 2
    assert mine.idle == (14 - 7 - 6 + 3 - 1) / 2  # what is hidden is in both


def share_of_all_reduce(summary):
    return {row.kind: row.share for row in summary.rows}["all-reduce"]


def test_on_cuda_kernels_compute_and_the_host_launches():
    kernels = [
        op("sm90_xmma_gemm_f32f32", 6, 10, within=("aten::mm",), device=True),
        op(NCCL, 8, 14, within=("c10d::allreduce_",), device=True),
    ]
    mine = summarize([*BACKWARD, *kernels], 16, kernels=True)
    assert (mine.computing, mine.host, mine.hidden, mine.idle) == (4, 7, 2, 8)
    assert mine.busy == 4 + 6
    assert mine.kinds["matrix multiplication"] == (4, 1)
    nccl = ProfileSummary((mine,), of="kernel time")
    assert nccl.busy_share == share_of_all_reduce(nccl) == 0.6
    assert share_of_all_reduce(ProfileSummary((mine,), of="wall time")) == 6 / 16
    assert math.isclose(sum(row.share for row in nccl.rows), 1)


def test_a_summary_is_the_mean_over_the_ranks_and_prints_as_tables():
    quick = summarize(BACKWARD, 10)
    slow = summarize([*BACKWARD, op("gloo:all_reduce", 9, 19)], 20)
    summary = ProfileSummary((quick, slow), of="wall time")
    assert share_of_all_reduce(summary) == 5 / 15
    assert summary.mean("hidden") == 0
    assert [row.kind for row in summary.rows] == ["matrix multiplication", "all-reduce"]
    assert {row.kind: row.seconds for row in summary.rows}["all-reduce"] == 5
    text = str(summary)
    assert "share of wall time" in text
    assert "33.3%" in text
    assert len(text.split("\n\n")[1].splitlines()) == 2 + 2
    page = summary._repr_html_()
    assert page.count("<table>") == 2
    assert "33.3%" in page


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
    backward = seen("MmBackward0", 0, 9, 3)
    mm = seen("aten::mm", 1, 8, 4, backward)
    call = seen("cudaLaunchKernel", 2, 3, 7, mm, link=4)
    loading = seen("Runtime Triggered Module Loading", 4, 5, 7, mm, link=4)
    view = seen("aten::view", 10, 11, 7)  # a number that the runtime's call has, too
    unlinked = seen("cuLaunchKernelEx", 12, 13, 4)  # and one outside all operations
    gemm = seen("sm90_xmma_gemm", 20, 30, 7, kernel=True, link=4)
    copy = seen("some_kernel", 30, 31, 8, kernel=True, link=7)
    other = seen("some_kernel", 31, 32, 9, kernel=True)
    found = [backward, mm, call, loading, view, unlinked, gemm, copy, other]
    for order in (found, found[::-1]):
        within = {event.start: event.within for event in kernels_of(order)}
        assert [within[start * 1e-6] for start in (20, 30, 31)] == [
            ("aten::mm", "MmBackward0"),
            ("aten::view",),
            (),
        ]
    (mine,) = (event for event in events_of(found) if event.name == "aten::mm")
    assert (mine.within, mine.device) == (("MmBackward0",), False)
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
    for kind in ("all-reduce", "other collectives"):
        assert mine.kinds[kind] == (pytest.approx(30e-6), 1)
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
    assert mine.kinds["all-reduce"] == (pytest.approx(8e-6), 1)


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


def naive_step(model, comms):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randint(0, 256, (4, 32)),) * 2
    return lambda: naive_data_parallel_step(model, token_loss, optimizer, batch, comms)


@on_ranks(1, 2)
def test_a_naive_step_hides_nothing_and_sends_each_gradient(comms):
    model = transformer()
    summary = profile_steps(naive_step(model, comms), comms, steps=2)
    assert summary.of == "wall time"
    assert len(summary.ranks) == comms.world_size
    calls = {row.kind: row.calls for row in summary.rows}
    assert calls["all-reduce"] == len(list(model.parameters()))
    assert summary.mean("hidden") < 0.05 * summary.mean("all_reduce")
    assert 0 < share_of_all_reduce(summary) < 1
    # Two blocks of four linear layers and the output, forward and two in backward each.
    assert calls["matrix multiplication"] == 27
    assert calls["attention"] == 4
    for rank in summary.ranks:
        parts = rank.computing + rank.all_reduce - rank.hidden + rank.idle
        assert math.isclose(parts, rank.wall, rel_tol=1e-6)
        assert rank.host == rank.computing
        compute = rank.busy - rank.all_reduce
        assert math.isclose(compute, rank.computing, rel_tol=0.02)
    everyone = comms.all_gather_data([str(summary), share_of_all_reduce(summary)])
    assert all(theirs == everyone[0] for theirs in everyone)


@on_ranks(2)
def test_both_wrappers_are_profiled_alike(comms):
    ours = DDP(transformer(), comms, bucket_cap_mb=0.1)
    for model in (ours, TorchDDP(transformer(), bucket_cap_mb=0.1)):
        summary = profile_steps(wrapped_step(model), comms, steps=2)
        calls = {row.kind: row.calls for row in summary.rows}
        assert calls["all-reduce"] == len(ours.reducer.buckets.all) > 1
        assert calls["matrix multiplication"] == 27
        assert calls["optimizer"] > 28
        assert 0 <= summary.mean("hidden") <= summary.mean("all_reduce")


@on_ranks(2)
def test_work_during_an_all_reduce_is_overlap(comms):
    large, matrix = torch.ones(1 << 22), torch.ones(600, 600)

    def step():
        work = dist.all_reduce(large, async_op=True)
        while not work.is_completed():
            matrix @ matrix

    summary = profile_steps(step, comms, steps=1)
    assert summary.mean("hidden") > 0.3 * summary.mean("all_reduce")


@on_ranks(2)
def test_convolutions_and_buffers_are_seen(comms):
    model = DDP(SimpleCNN(), comms)
    images, classes = torch.randn(8, 64), torch.arange(8)

    def step():
        cross_entropy(model(images), classes).backward()

    step()
    summary = profile_steps(step, comms)
    calls = {row.kind: row.calls for row in summary.rows}
    assert calls["convolution"] == 6  # three, forward and backward
    assert calls["other collectives"] == 1  # the buffers, whatever their dtypes
    assert "copy" in calls


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
