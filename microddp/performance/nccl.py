"""The seconds that NCCL expects a collective to take: by algorithm, protocol, and size.

NCCL chooses before each call. It estimates a latency and a bandwidth for each algorithm, and for
each of three protocols: Simple sends large chunks, and waits for each at a barrier; LL sends a flag
with every 4 bytes, so that a chunk may be used at once, and half the bandwidth is flags; LL128 has
one flag in 128 bytes, and needs NVLink. The least time counts.

Source: NCCL 2.18, ``src/graph/tuning.cc``, with the constants of Hopper. Its own estimate serves to
choose, and is far too short for trees, so their bandwidth here is what was measured: a fifth of the
links' for 16 MiB on 4 nodes of 8 B200. Left out: corrections that were fitted to single machines,
and CollNet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microddp.performance.network import Network

NVLINK, PCIE, NETWORK = 3.4e-6, 5.7e-6, 14e-6  # seconds of a ring's step with Simple, in tuning.cc
PIPELINED = 64  # bytes of a channel and device, from which chunks of a ring queue up
# Where the switches of NVLink add (NVLS): seconds of a call, in tuning.cc; and the bus bandwidth as
# a multiple of the specified one, measured on 8 H200, 16 GiB (stas00/ml-engineering,
# network/benchmarks): 480.7 GB/s by 450.
SWITCH, ADDED = 23e-6, 1.07


@dataclass(frozen=True)
class Protocol:
    """An algorithm of NCCL's with one of its protocols.

    Attributes:
        algorithm: ``"ring"`` or ``"tree"``.
        protocol: ``"Simple"``, ``"LL128"`` or ``"LL"``.
        start: seconds of each call.
        inside: seconds of a step inside a node, over NVLink.
        between: seconds of a step from node to node.
        share: share of the bandwidth that is left for data.
        most: upper limits of the bus bandwidth, bytes a second: on one node, on two, and on more.
    """

    algorithm: str
    protocol: str
    start: float
    inside: float
    between: float
    share: float
    most: tuple[float, float, float] = (math.inf, math.inf, math.inf)


LL = (87.7e9, 22.5e9, 19.0e9)
PROTOCOLS = (
    Protocol("ring", "Simple", 8.4e-6, NVLINK, NETWORK, 1.0),
    Protocol("ring", "LL128", 14e-6, 1.9e-6, 4.0e-6, 0.92),
    Protocol("ring", "LL", 6.6e-6, 0.6e-6, 2.7e-6, 0.5, LL),
    Protocol("tree", "Simple", 0.0, 28e-6, 28e-6, 0.2),
    Protocol("tree", "LL128", 14e-6, 1.25e-6, 8.5e-6, 0.2),
    Protocol("tree", "LL", 6.8e-6, 0.6e-6, 5.0e-6, 0.2, LL),
)


def nccl_seconds(network: Network, half: str, nbytes: float) -> tuple[float, str]:
    """Estimate a collective's seconds as NCCL does.

    Args:
        network: latencies of its ports stand for those of Simple; other protocols' are in
            proportion.
        half: ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``. NCCL has trees for the
            first only.
        nbytes: size of the whole tensor in bytes.

    Returns:
        The seconds, and the name of the algorithm and protocol that take the least.
    """
    n, nodes, each = network.devices, network.nodes, network.in_node
    if n == 1:
        return 0.0, "none"
    times = 2 if half == "all_reduce" else 1
    inside = network.inside.bandwidth if network.inside and each > 1 else math.inf
    bandwidth = inside if nodes == 1 else min(inside, network.between.bandwidth * network.rails)
    to_nvlink = network.inside.latency / NVLINK if network.inside else 1.0
    to_network = network.between.latency / NETWORK
    options = []
    for way in PROTOCOLS:
        ring = way.algorithm == "ring"
        if not ring and times == 1:
            continue
        if way.protocol == "LL128" and each > 1 and to_nvlink > 1.2:  # PCIe
            continue
        hop, far = way.inside * to_nvlink, way.between * to_network
        if nodes > 1 and way.protocol == "LL":
            hop *= 1.8
        if ring:  # a chunk leaves a node once a node, however many devices it has
            crossing = times * (nodes - 1)
            latency = (times * (n - 1) - crossing) * hop + crossing * far
            queue = nbytes / n / network.rails >= PIPELINED
            if way.protocol == "Simple" and nodes > 1 and times == 2 and queue:
                latency *= 1.4
        else:
            latency = 2 * ((each - 1) * hop + math.floor(math.log2(nodes)) * far)
        reached = min(bandwidth * way.share, way.most[min(nodes, 3) - 1])
        moved = times * (n - 1) / n if ring else 2.0
        name = f"{way.algorithm}, {way.protocol}"
        options.append((way.start + latency + nbytes * moved / reached, name))
    if network.adds and nodes == 1:
        moved = nbytes * times * (n - 1) / n
        options.append((SWITCH + moved / (ADDED * bandwidth), "switch"))
    return min(options)
