"""The simulator: steps by hand, what real ranks call at a world of 1024, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microddp.buckets import bucket_caps, plan_buckets
from microddp.model import FullMLP
from microddp.performance.network import Network, Port
from microddp.performance.simulator import Way, program, simulate
from microddp.program import Call, Layer, Op, Work
from microddp.strategies import STRATEGIES

# A second for each byte that a device sends in half an all-reduce on two devices.
NETWORK = Network(2, Port(0.5, 0.0))
# The last layer first: 4 bytes after 2 s, then 8 after 6 s. Forward takes 4.
WORK = Work((Layer(1, 4, (2,)), Layer(3, 2, (1,))), optimizer=1)


def step(way, work=WORK, **options):
    return simulate(work, NETWORK, way, **options)


def test_each_strategy_by_hand():
    small = 1e-6  # MiB: each tensor alone
    assert step(Way("none")).step == 11
    assert step(Way("naive")).step == 11 + 8 + 16
    # Of the last layer from 6 to 14, of the first from then to 30.
    hooks = step(Way("hooks"))
    assert (hooks.step, hooks.exposed) == (31, 20)
    assert step(Way("ddp", bucket_cap_mb=small)).step == 31
    assert step(Way("ddp")).step == 11 + 24, "one bucket"
    # Flat tensors have 8 bytes, since two devices divide them. Gathered to 8 and 16; forward to 9,
    # and from 16 to 19; backward to 21 and 25; reduced to 29 and 37; half an optimizer's step.
    assert step(Way("zero1", bucket_cap_mb=small)).step == 37.5
    # Forward likewise. The last layer stays whole, the first is gathered again to 27; backward to
    # 21, and from 27 to 31; reduced from 27 to 35 and 43.
    assert step(Way("zero3")).step == 43.5
    assert step(Way("local", every=2), steps=4).steps.tolist() == [11, 35, 11, 35]


def test_accumulation_sends_once_but_in_stage_3():
    small = 1e-6
    assert step(Way("ddp", accumulation=3)).step == 11 + 24 + 2 * 10
    assert step(Way("naive", accumulation=3)).step == 35 + 20
    for name, times in (("ddp", 1), ("zero1", 1), ("zero2", 1), ("zero3", 3)):
        once = step(Way(name, bucket_cap_mb=small)).calls
        many = step(Way(name, bucket_cap_mb=small, accumulation=3)).calls
        assert len(many) == times * len(once), name


def test_compressed_sends_less():
    assert step(Way("ddp", kept=0.25)).step == 11 + 6


def test_copying_takes_time_before_what_is_copied_is_sent():
    copied = Work(WORK.layers, 1, copy=0.25)
    assert step(Way("ddp", bucket_cap_mb=1e-6), copied).step == 31 + 1, (
        "the second one waits anyway"
    )


def test_computing_is_slower_while_messages_are_under_way():
    # The last layer's gradients travel from 6 to 14. The 4 s of backward that are left take 6.
    assert step(Way("hooks", slowed=0.5)).step == step(Way("hooks")).step == 31
    # In one bucket nothing is sent while something is computed.
    assert step(Way("ddp", slowed=0.5)).step == step(Way("ddp")).step
    busy = Work((Layer(0.0, 10.0, (0,)), Layer(0.0, 1.0, (8,))))
    network = Network(2, Port(8.0, 0.0))
    alone = simulate(busy, network, Way("hooks")).step
    half = simulate(busy, network, Way("hooks", slowed=0.5)).step
    # 32 bytes take 4 s, in which 4 / 1.5 s of work are done.
    assert alone == pytest.approx(11)
    assert half == pytest.approx(11 + 4 * 0.5 / 1.5)
    with pytest.raises(ValueError, match="expected slowed to be 0 or more, got -1"):
        Way(slowed=-1)


@given(st.sampled_from([*STRATEGIES]), st.integers(1, 4), st.floats(0.1, 10), st.floats(1.01, 10))
def test_a_faster_link_never_makes_a_step_longer(strategy, accumulation, bandwidth, times):
    way = Way(strategy, bucket_cap_mb=1e-6, accumulation=accumulation, every=2)
    slow, fast = (
        simulate(WORK, Network(4, Port(speed, 0.1)), way, steps=2).steps.sum()
        for speed in (bandwidth, bandwidth * times)
    )
    assert fast <= slow
    alone = 2 * (accumulation * 10 + (0.25 if strategy.startswith("zero") else 1))
    assert fast >= alone * (1 - 1e-12)


def test_bytes_are_those_of_the_stages():
    n = 4
    work = Work((Layer(1, 2, (100, 4)), Layer(1, 2, (37,))))
    found = {name: simulate(work, Network(n, Port(1, 0)), Way(name)).calls for name in STRATEGIES}
    size = 141 * 4
    padded = 144 * 4
    assert sum(c.nbytes for c in found["hooks"]) == sum(c.nbytes for c in found["naive"]) == size
    assert found["ddp"] == (Call("all_reduce", size),)
    assert found["zero1"] == (Call("all_gather", padded), Call("reduce_scatter", padded))
    halves = {half: sum(c.nbytes for c in found["zero3"] if c.half == half) for half in
              ("all_gather", "reduce_scatter")}  # fmt: skip
    assert halves == {"all_gather": (2 * 104 + 40) * 4, "reduce_scatter": (104 + 40) * 4}


def test_what_real_ranks_call_at_a_world_of_1024():
    script = Path(__file__).with_name("thousand.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    real = json.loads(done.stdout.strip().splitlines()[-1])
    model = FullMLP(256, depth=5)
    layers = tuple(Layer(1.0, 2.0, tuple(p.numel() for p in m.parameters())) for m in model.layers)
    network = Network(1024, Port(1e9, 1e-6), 8, Port(1e10, 1e-6))
    for name, calls in real.items():
        played = simulate(Work(layers), network, Way(name, bucket_cap_mb=0.4)).calls
        found, right = [(c.half, c.nbytes) for c in played], [tuple(call) for call in calls]
        if name == "hsdp":  # its two lanes do not wait for each other
            found, right = (sorted(each, key=lambda call: call[0]) for each in (found, right))
        assert found == right, name
    plan = plan_buckets(list(model.parameters())[::-1], bucket_caps(0.4))
    assert len(real["ddp"]) == len(plan) > 1


def test_two_levels_have_two_lanes():
    inside, between = Port(8.0, 0.0), Port(1.0, 0.0)  # bytes a second
    network = Network(4, between, 2, inside, 1)
    layer = Layer(3.0, 9.0, (16,))  # 64 bytes: 4 s a half inside
    played = simulate(Work((layer, layer)), network, Way("hsdp"))
    assert {(c.half, c.among, c.nbytes) for c in played.calls} == {
        ("all_gather", "node", 64), ("reduce_scatter", "node", 64), ("all_reduce", "replicas", 32)
    }  # fmt: skip
    # Gather 4, forward to 7, wait to 8, to 11; backward to 20, when the first layer has been there
    # since 15, and the last one's shard is reduced, to 24. Backward to 29, reduced at 33. Between
    # two nodes, whose port two ranks share: 32 bytes at half a byte a second are 64 s, and again.
    assert played.step == pytest.approx(24 + 64 + 64)


def test_a_network_of_one_group_has_its_share_of_what_groups_share():
    network = Network(
        16,
        Port(8.0, 1.0),
        4,
        Port(50.0, 0.5),
        rails=2,
    )
    node, replicas = network.among("node"), network.among("replicas")
    assert (node.devices, node.nodes, node.inside) == (4, 1, Port(50.0, 0.5))
    assert (replicas.devices, replicas.node, replicas.between) == (4, 1, Port(4.0, 1.0))
    assert network.among("all") is network


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Way("zero4"), "expected a strategy of none, naive"),
        (lambda: Way(accumulation=0), "expected accumulation to be a whole number from 1 on"),
        (lambda: Way(every=1.5), "expected every"),
        (lambda: Way(every=float("inf")), "expected every to be a whole number from 1 on, got inf"),
        (lambda: Way(kept=0), "expected kept above 0 and at most 1, got 0"),
        (lambda: Work.from_operations(-1, 2, 3, 4), "expected parameters above 0, got -1"),
        (lambda: Work.from_operations(1, 2, 3, float("inf")), "expected rate above 0, got inf"),
        (lambda: step(Way(), steps=0), "expected at least one step"),
        (lambda: step(Way("zero1", "tree")), "expected the algorithm ring or nccl, got 'tree'"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_program_is_lines_of_computing_starting_and_waiting():
    ops = program(WORK, Way("hooks"), 2)
    assert ops == [
        Op(1), Op(3), Op(2), Op(start=Call("all_reduce", 4)), Op(4),
        Op(start=Call("all_reduce", 8)), Op(wait=0), Op(wait=1), Op(1),
    ]  # fmt: skip
