"""What NCCL expects of a collective: by hand, and beside what was measured."""

import pytest

from microddp.performance.nccl import nccl_seconds
from microddp.performance.network import Network, Port

NVLINK, NET = Port(400e9, 3.4e-6), Port(50e9, 14e-6)


def test_a_large_ring_crosses_the_network_once_a_node():
    network = Network(32, NET, 8, NVLINK, 8)
    nbytes = 64e9
    seconds, name = nccl_seconds(network, "all_gather", nbytes)
    assert name == "ring, Simple"
    latency = 8.4e-6 + (31 - 3) * 3.4e-6 + 3 * 14e-6
    assert seconds == pytest.approx(latency + nbytes * 31 / 32 / 400e9)
    assert network.seconds("all_gather", "nccl", nbytes) == seconds
    # An all-reduce is two of them, whose chunks wait for each other.
    seconds, name = nccl_seconds(network, "all_reduce", nbytes)
    latency = 8.4e-6 + 1.4 * ((62 - 6) * 3.4e-6 + 6 * 14e-6)
    assert seconds == pytest.approx(latency + nbytes * 62 / 32 / 400e9)


def test_small_tensors_use_protocols_of_low_latency_and_trees():
    network = Network(1024, NET, 8, NVLINK, 8)
    names = [nccl_seconds(network, "all_reduce", 1 << shift)[1] for shift in (10, 20, 37)]
    assert names == ["tree, LL", "tree, LL128", "ring, Simple"]
    halves = [nccl_seconds(network, "reduce_scatter", 1 << shift)[1] for shift in (10, 32, 37)]
    assert halves == ["ring, LL", "ring, LL128", "ring, Simple"], "no trees for them"
    pcie = Network(8, NET, 8, Port(25e9, 5.7e-6))
    assert "LL128" not in {nccl_seconds(pcie, "all_reduce", 1 << k)[1] for k in range(10, 34)}


@pytest.mark.parametrize(
    ("network", "nbytes", "bus"),
    [
        # stas00/ml-engineering, network/benchmarks/README.md, read in November 2026.
        (Network(32, NET, 8, Port(693e9, 3.4e-6), 8), 1 << 28, 283.2e9),
        (Network(32, NET, 8, Port(693e9, 3.4e-6), 8), 1 << 34, 376.7e9),
        (Network(8, NET, 8, Port(450e9, 3.4e-6), adds=True), 1 << 20, 74.6e9),
        (Network(8, NET, 8, Port(450e9, 3.4e-6), adds=True), 1 << 28, 441.9e9),
        (Network(8, NET, 8, Port(367.6e9, 3.4e-6)), 1 << 34, 367.6e9),
    ],
)
def test_beside_what_was_measured(network, nbytes, bus):
    n = network.devices
    seconds, _ = nccl_seconds(network, "all_reduce", nbytes)
    assert nbytes * 2 * (n - 1) / n / seconds == pytest.approx(bus, rel=0.2)


def test_one_device_sends_nothing():
    assert nccl_seconds(Network(1, NET), "all_reduce", 1e9) == (0.0, "none")
