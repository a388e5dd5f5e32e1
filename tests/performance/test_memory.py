"""What a rank keeps, by formula, against published figures."""

import pytest

from microddp.performance import bytes_kept
from microddp.performance.memory import activation_bytes


def test_bytes_kept_by_formula():
    """ZeRO's figure 1: 7.5 billion parameters on 64 devices, Adam in half precision."""
    sizes = {"parameter": 2, "gradient": 2, "optimizer": 12}
    found = [bytes_kept(stage, 7.5e9, 64, **sizes).total / 1e9 for stage in (0, 1, 2, 3)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.88], rel=0.01)


def test_activation_bytes_of_two_blocks_by_hand():
    """Three tokens, two blocks of 10 values each, of which 4 are at the entry; 4 bytes a value."""
    assert activation_bytes(3, 2, 10, value_size=4) == 3 * 20 * 4
    assert activation_bytes(3, 2, 10, entry=4, value_size=4) == 3 * (4 + 10) * 4


def test_activation_bytes_around_a_published_run():
    """torchtitan, Llama 3 8B, 8 H100, 16,384 tokens a GPU: 82.4 GiB, with some recomputed."""
    state = bytes_kept(3, 8.03e9, 8).total
    block, entry = 8 * 4096 + 4 * 14_336, 4096
    least = activation_bytes(16_384, 32, block, entry=entry)
    assert state + least < 82.4 * 2**30 < state + activation_bytes(16_384, 32, block)
