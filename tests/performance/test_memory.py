"""What a rank keeps, by formula, against published figures."""

import pytest

from microddp.performance import bytes_kept


def test_bytes_kept_by_formula():
    """ZeRO's figure 1: 7.5 billion parameters on 64 devices, Adam in half precision."""
    sizes = {"parameter": 2, "gradient": 2, "optimizer": 12}
    found = [bytes_kept(stage, 7.5e9, 64, **sizes).total / 1e9 for stage in (0, 1, 2, 3)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.88], rel=0.01)
