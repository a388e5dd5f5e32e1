"""What the simulator is fed: fits by hand, and fed back where they were measured."""

import pytest
import torch
from ranks import on_ranks

from microddp.performance.calibration import SIZES, fit_network, measure_network, measured_work
from microddp.performance.network import Network, Port
from microddp.performance.simulator import Way, simulate
from microddp.step_times import ComputeTimes


def test_a_fit_by_hand():
    n, latency, bandwidth = 4, 2e-3, 1e8
    seconds = [6 * (latency + size / n / bandwidth) for size in SIZES]
    spent = [6 * (1e-4 + size / n * 5e-10) for size in SIZES]
    for known in (None, bandwidth):
        port, processor = fit_network(n, SIZES, seconds, spent, cores=2, bandwidth=known)
        assert port.bandwidth == pytest.approx(bandwidth, rel=1e-6)
        # A message of 16 KiB or less says most of the latency, and something of the bytes.
        assert port.latency == pytest.approx(latency, rel=1e-6)
        assert processor.message == pytest.approx(1e-4 / 2, rel=1e-6)
        assert processor.byte == pytest.approx(5e-10 / 2, rel=1e-6)


def test_the_network_gives_back_what_was_measured():
    port, _ = fit_network(2, SIZES, [2 * (1e-3 + s / 2 / 1e8) for s in SIZES], [1e-9] * 4, 2)
    assert Network(2, port).seconds("all_reduce", "ring", 1e6) == pytest.approx(2e-3 + 1e-2)


def test_measured_work_has_a_layer_for_each_parameter_in_the_order_of_forward():
    compute = ComputeTimes(2.0, 6.0, {"b": 1.0, "a": 4.0}, 0.5, copy=0.25)
    work = measured_work(compute, {"a": 10, "b": 3}, crowd=2)
    assert [layer.tensors for layer in work.layers] == [(10,), (3,)]
    # Backward takes 2 s more than all gradients, which count for the layer of the last one.
    assert [layer.backward for layer in work.layers] == [5.0, 1.0]
    assert [layer.forward for layer in work.layers] == pytest.approx([5 / 3, 1 / 3])
    assert (work.optimizer, work.copy) == (1.0, 0.5)
    step = simulate(work, Network(1, Port(1, 0)), Way("none")).step
    assert step == 2 + 6 + 1


@on_ranks(2)
def test_a_port_and_the_processor_of_these_ranks(comms):
    port, processor = measure_network(comms, repeat=3)
    assert port.bandwidth > 1e6
    assert 0 <= port.latency < 1
    assert processor.message > 0


@on_ranks(1)
def test_one_rank_has_nobody_to_measure_with(comms):
    assert torch.get_num_threads() >= 1
    with pytest.raises(ValueError, match="rank 0: expected two ranks or more to measure, got one"):
        measure_network(comms)
