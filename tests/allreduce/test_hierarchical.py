"""All-reduce inside machines and between them: results, partitions, what the network carries."""

import functools

import pytest
import torch
from ranks import on_ranks

from microddp.message_counter import MessageCounter
from microddp.shared import Hierarchy, carrier

# The ranks of one real machine, taken for several.
PARTITIONS = {
    1: [[[0]]],
    2: [[[0, 1]], [[0], [1]]],
    3: [[[0, 1, 2]], [[0, 2], [1]], [[2], [1], [0]]],
    4: [[[0, 1], [2, 3]], [[1, 3], [0, 2]], [[0], [1, 2, 3]], [[3], [0, 1], [2]]],
    5: [[[0, 1, 2], [3, 4]], [[0, 1, 2, 4], [3]], [[4, 0], [1, 3], [2]]],
}
OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def of_rank(rank, size, dtype=torch.float64):
    return torch.randint(-9, 9, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@on_ranks()
def test_equals_the_fold_by_hand_for_every_partition(comms):
    n = comms.world_size
    for machines in PARTITIONS[n]:
        hierarchy = Hierarchy(comms, machines)
        for size in (0, 1, n, 97, 1_300_001):  # of float64: the last in three parts
            for op, fold in OPS.items():
                expected = functools.reduce(fold, [of_rank(rank, size) for rank in range(n)])
                tensor = of_rank(comms.rank, size)
                hierarchy.all_reduce(tensor, comms, op)
                assert torch.equal(tensor, expected), (machines, size, op)
            tensor = of_rank(comms.rank, size)
            hierarchy.all_reduce(tensor, comms, "mean")
            mean = sum(of_rank(rank, size) for rank in range(n)) / n
            torch.testing.assert_close(tensor, mean)


@on_ranks(4, 5)
def test_all_ranks_have_the_same_bits(comms):
    for machines in PARTITIONS[comms.world_size]:
        tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(comms.rank))
        Hierarchy(comms, machines).all_reduce(tensor, comms)
        everyone = comms.all_gather(tensor)
        assert bool((everyone == everyone[0]).all()), machines


@on_ranks(2, 3, 4, 5)
def test_a_machines_link_carries_each_sum_once(comms):
    """2 (M-1)/M S out of each machine with a ring between them, however many ranks it has."""
    size = 120_000
    for machines in PARTITIONS[comms.world_size]:
        hierarchy = Hierarchy(comms, machines)
        counters = [MessageCounter(lane) for lane in hierarchy.lanes.values()]
        inside = MessageCounter(hierarchy.inside)
        tensor = torch.ones(size)
        with inside:
            for counter in counters:
                counter.__enter__()
            hierarchy.all_reduce(tensor, comms)
            for counter in counters:
                counter.__exit__(None, None, None)
        assert not inside.messages
        mine = sum(message.nbytes for counter in counters for message in counter.messages)
        sent = comms.all_gather_data(mine)
        count = len(machines)
        for ranks in machines:
            assert sum(sent[rank] for rank in ranks) == 2 * (count - 1) * 4 * size // count, (
                machines
            )


@on_ranks(3)
def test_a_partition_that_is_none_is_refused_on_every_rank(comms):
    for machines in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]], [[0], [1], [2], []]):
        with pytest.raises(ValueError, match=r"expected machines .* ranks 0 to 2 once, got \[\["):
            Hierarchy(comms, machines)


@on_ranks(4)
def test_each_machine_may_hold_its_ranks_in_any_order(comms):
    hierarchy = Hierarchy(comms, [[3, 0], [2, 1]])
    assert hierarchy.machines == [[0, 3], [1, 2]]
    flat = torch.arange(10)
    chunks = hierarchy.chunks(flat)
    assert torch.cat(chunks).tolist() == list(range(10))
    assert len(chunks) == hierarchy.inside.world_size == 2
    # A rank that left now would leave others that are still connecting to it.
    hierarchy.all_reduce(flat, comms)
    assert flat.tolist() == [comms.world_size * i for i in range(10)]


@on_ranks(2)
def test_inference_mode_holds_between_machines_too(comms):
    with torch.inference_mode():
        tensor = torch.ones(3 << 20)  # several parts, which cross on a thread
        Hierarchy(comms, [[0], [1]]).all_reduce(tensor, comms)
    assert tensor.eq(2).all()


@on_ranks(2)
def test_a_carrier_makes_its_groups_at_once(comms):
    """Later, on a thread, that would come among other calls of these ranks."""
    made = carrier("hierarchical", comms)
    comms.subgroup = comms.all_gather_data = None
    tensor = torch.ones(1000)
    made.start(tensor, is_last=False).wait()
    assert tensor.eq(2).all()
