"""Our DDP with another all-reduce than the backend's, against PyTorch's own.

On two ranks bit for bit: the sum of two numbers knows no order.
"""

import gc
import os
import warnings

import pytest
import torch
from ddp_pairs import (
    SMALL,
    VIEWS,
    Branches,
    Pair,
    accumulating,
    data,
    loss_of,
    mlp,
    plain_step,
    sgd,
)
from ranks import on_ranks, run
from test_ddp_options import leaving_out
from torch import nn

from microddp.carrier import BACKEND, Carrier
from microddp.comms import Comms
from microddp.ddp import DDP
from microddp.replicas import check_replicas
from microddp.shared import carrier, fastest
from microddp.shared import carriers as choice
from microddp.shared import region as regions
from microddp.timing import Timeline, Timing

NAMES = ("shared", "hierarchical", "ring", "auto")
CAPS = ({}, {"bucket_cap_mb": SMALL})


@on_ranks(2)
def test_every_step_is_pytorchs_to_the_bit(comms):
    for name in NAMES:
        for view in VIEWS:
            for cap in CAPS:
                options = {"all_reduce": name, **view, **cap}
                Pair(comms, mlp, **options).train(plain_step(comms), what=options)
                Pair(comms, Branches, **options).train(accumulating(comms), what=options)
                unused = Pair(comms, Branches, find_unused_parameters=True, **options)
                unused.train(leaving_out(comms, lambda step: (step % 2,)), what=options)
                Pair(comms, mlp, static_graph=True, **options).train(plain_step(comms))


@on_ranks(3, 4)
def test_on_more_ranks_up_to_the_order_of_addition(comms):
    for name in NAMES:
        pair = Pair(comms, mlp, all_reduce=name, bucket_cap_mb=SMALL)
        for step in range(4):
            pair.each(plain_step(comms), step)
            for p, q in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
        check_replicas(pair.ours.module, comms)


@on_ranks(2)
def test_uneven_inputs(comms):
    trained = []
    for name in (BACKEND, *NAMES):
        torch.manual_seed(0)
        ddp = DDP(Branches(), comms, all_reduce=carrier(name, comms), bucket_cap_mb=SMALL)
        optimizer = sgd(ddp)
        with ddp.join():
            for step in range(3 + 2 * comms.rank):
                x, y = data(comms.rank, step)
                optimizer.zero_grad()
                loss_of(ddp(x, True), y).backward()
                optimizer.step()
        trained.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    for weights in trained[1:]:
        assert torch.equal(weights, trained[0])


@on_ranks(2)
def test_large_buckets_are_in_shared_memory_and_go_with_the_wrapper(comms):
    def bytes_in_use():
        return os.fstat(regions.region_of(comms).mine._file).st_blocks * 512

    before = bytes_in_use()
    for _ in range(2):
        module = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4)))
        ddp = DDP(module, comms, all_reduce=carrier("shared", comms), bucket_cap_mb=5.0)
        for _ in range(3):  # the buckets are planned anew after the first backward
            ddp(torch.ones(2, 1000)).sum().backward()
        region = regions.region_of(comms)
        offsets = [region.offset_of(bucket.buffer()) for bucket in ddp.reducer.buckets]
        assert len(offsets) > 1
        assert regions.NOT_SHARED not in offsets
        assert 0 <= bytes_in_use() - before - 4 * 4_004_000 < 1 << 16
        del ddp, module
        gc.collect()
        assert bytes_in_use() - before < 1 << 16


@on_ranks(2)
def test_a_timeline_sees_them(comms):
    timeline = Timeline(comms)
    for name in ("shared", "ring"):
        ddp = DDP(Branches(), comms, all_reduce=carrier(name, comms), bucket_cap_mb=SMALL)
        ddp.reducer.buckets.timeline = timeline
        for step in range(2):
            x, y = data(comms.rank, step)
            loss_of(ddp(x, True), y).backward()
        spans = [span for span in timeline.take() if span.lane == "communication"]
        assert len(spans) == 1 + len(ddp.reducer.buckets.all)
        assert all(span.end > span.start for span in spans)


# ---- which


@on_ranks(2)
def test_what_is_not_known_or_not_alike_is_refused_on_every_rank(comms):
    with pytest.raises(ValueError, match=r"expected all_reduce of auto, backend, .*, got 'nccl'"):
        carrier("nccl", comms)
    with pytest.raises(
        RuntimeError, match=r"one all_reduce on all ranks, got \['shared', 'ring'\]"
    ):
        carrier("ring" if comms.rank else "shared", comms)
    ring = carrier("ring", comms)
    with pytest.raises(RuntimeError, match="all_reduce"):
        DDP(Branches(), comms, all_reduce=ring if comms.rank else None)
    with pytest.raises(TypeError, match=r"expected a carrier .*, got 'ring': see microddp.shared"):
        DDP(Branches(), comms, all_reduce="ring")
    regions.machines_of = choice.machines_of = lambda _: [[0], [1]]
    with pytest.raises(ValueError, match=r"these share memory as \[\[0\], \[1\]\]"):
        carrier("shared", comms)


@on_ranks(1, 2, 3)
def test_the_fastest_for_each_size_is_chosen_alike(comms):
    times = {BACKEND: [1e-5, 1e-3, 1e-2, 1e-1], "shared": [2e-5, 2e-3, 1e-3, 1e-2]}
    calls = iter(range(4))

    def measured(by_name, *_, **__):
        i = next(calls)
        return {name: Timing((times[name][i],)) for name in by_name}

    choice.measure = measured
    auto = carrier("auto", comms)
    names = [auto.name_for(size) for size in (0, 1 << 12, (1 << 16) + 1, 1 << 20, 1 << 30)]
    if comms.world_size == 1:
        assert names == [BACKEND] * 5
    else:
        assert fastest(comms) == {
            4096: BACKEND,
            65536: BACKEND,
            1 << 20: "shared",
            1 << 24: "shared",
        }
        assert names == [BACKEND, BACKEND, "shared", "shared", "shared"]
        assert auto.by_size is carrier("auto", comms).by_size, "measured once"


@on_ranks(3)
def test_slow_links_are_not_measured_for_long(comms):
    choice.machines_of = lambda _: [[0, 1], [2]]
    sizes = []

    def measured(by_name, *_, **__):
        sizes.append(len(by_name))
        return {name: Timing((1e-3 * 16 ** len(sizes),)) for name in by_name}

    choice.measure = measured
    assert list(fastest(comms).values()) == ["backend"] * len(sizes)
    assert len(sizes) == 2, "the third would take 4 s a round"


def on_a_gpu(comms):
    comms.device, comms.through_host = torch.device("cuda", 0), True  # as far as choosing goes
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        names = [carrier(name, comms).name for name in ("auto", "shared", "ring")]
    return names, [str(warning.message) for warning in warned]


def test_on_a_gpu_the_backend_stays_and_rank_0_says_why():
    (names, said), (others, silent) = run(on_a_gpu, 2)
    assert names == others == [BACKEND, BACKEND, "ring"]
    assert said == [
        f"all_reduce={name!r}: gradients are on a GPU, where gloo carries them; memory that ranks "
        "share is main memory"
        for name in ("auto", "shared")
    ]
    assert not silent


@on_ranks(4)
def test_a_part_of_the_ranks(comms):
    part = comms.subgroup([0, 3])
    if part is not None:
        assert isinstance(part, Comms)
        pair = Pair(part, Branches, process_group=part.group)
        assert pair.ours.all_reduce.name == BACKEND
        ddp = DDP(Branches(), part, all_reduce=carrier("shared", part), bucket_cap_mb=SMALL)
        twin = DDP(Branches(), part, bucket_cap_mb=SMALL)
        twin.module.load_state_dict(ddp.module.state_dict())
        for step in range(3):
            for each in (ddp, twin):
                x, y = data(part.rank, step)
                loss_of(each(x, True), y).backward()
            for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)


@on_ranks(2, 3)
def test_buffers_go_the_way_of_gradients(comms):
    for name in ("shared", BACKEND):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        ddp = DDP(model, comms, all_reduce=carrier(name, comms))
        before = regions.region_of(comms).barriers
        with torch.no_grad():
            model[1].running_mean.fill_(comms.rank + 1.0)
        ddp.eval()
        ddp(torch.ones(2, 3))
        assert model[1].running_mean.tolist() == [1.0] * 4, (name, "rank 0's")
        assert (regions.region_of(comms).barriers > before) == (name == "shared")


@on_ranks(2)
def test_two_wrappers_in_one_backward_do_not_mix_their_messages(comms):
    def gradients(name):
        torch.manual_seed(0)
        by = carrier(name, comms)
        pair = [nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]) for _ in range(2)]
        first, second = (DDP(half, comms, all_reduce=by, bucket_cap_mb=0.25) for half in pair)
        torch.manual_seed(comms.rank)
        for _ in range(10):
            first.zero_grad()
            second.zero_grad()
            second(first(torch.randn(8, 256))).square().mean().backward()
            yield torch.cat([p.grad.flatten() for half in pair for p in half.parameters()])

    ways = [list(gradients(name)) for name in ("ring", "direct", BACKEND)]
    for ring, direct, right in zip(*ways, strict=True):
        assert torch.equal(ring, right)
        assert torch.equal(direct, right)


@on_ranks(2)
def test_a_rank_without_batches_shadows_a_search_for_unused_parameters(comms):
    by = carrier("ring", comms)
    ddp = DDP(mlp(), comms, all_reduce=by, find_unused_parameters=True)
    with ddp.join():
        for step in range(1 + 2 * comms.rank):
            ddp.zero_grad()
            ddp(data(comms.rank, step)[0]).square().mean().backward()
    check_replicas(ddp.module, comms)


@on_ranks(2)
def test_a_carrier_between_other_ranks_is_refused(comms):
    alone = [comms.subgroup([rank]) for rank in range(2)][comms.rank]
    with pytest.raises(RuntimeError, match=rf"^rank {comms.rank}: .*all_reduce between=\[0\] on"):
        DDP(mlp(), comms, all_reduce=Carrier(alone))
    DDP(mlp(), comms, all_reduce=Carrier(comms.subgroup(range(2))))  # between the same ranks
    with pytest.raises(ValueError, match=rf"between ranks \[{comms.rank}\], got one .*\[0, 1"):
        DDP(mlp(), alone, all_reduce=Carrier(comms))
