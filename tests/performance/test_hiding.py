"""What a step can hide: by hand, and beside simulated steps whose messages start at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microddp.performance import Network, Port, Sends, Way, simulate
from microddp.program import Layer, Work

LAYERS = 4
DDP = Sends(0, 0, 1, 1 / LAYERS)
ZERO2 = Sends(0.5, 0.5 / LAYERS, 0.5, 0.5 / LAYERS)
ZERO3 = Sends(0.5, 0.5 / LAYERS, 1 - 0.5 / LAYERS, 0.5 / LAYERS, waits=False)


def test_by_hand():
    # Computing 12: forward 4, backward 8, a layer 1 and 2.
    assert DDP.least(12, 4, LAYERS) == 4 + 8 + 1, "the last message"
    assert DDP.least(12, 16, LAYERS) == 4 + 2 + 16, "the link is busy from the second layer on"
    assert DDP.most(12, 16) == 28
    assert DDP.hidden(25, 12, 16, LAYERS) == 0.5
    assert ZERO2.least(12, 8, LAYERS) == 1 + 4 + 8 + 1
    assert ZERO2.least(12, 32, LAYERS) == 16 + 1 + 2 + 16, "both phases wait for the link"
    assert ZERO3.least(12, 8, LAYERS) == 1 + 4 + 8 + 1
    assert ZERO3.least(12, 32, LAYERS) == 16 + 1 + 28, "backward sends from its beginning"
    assert ZERO3.hidden(12 + 16 + 28, 12, 32, LAYERS) == 0
    assert ZERO3.one_ahead(12, 12, LAYERS) == ZERO3.least(12, 12, LAYERS) + 2 * (2 - 12 / 8)
    with pytest.raises(ZeroDivisionError):
        DDP.hidden(12, 12, 0, LAYERS)


@given(st.floats(0.1, 4))
def test_simulated_steps_take_no_less_and_ddp_and_zero3_take_just_what_is_said(ratio):
    layer = Layer(1.0, 2.0, (256,))
    work = Work((layer,) * LAYERS)
    compute = 3.0 * LAYERS
    nbytes = 4 * 256 * LAYERS
    # Two devices: an all-reduce sends as many bytes as there are.
    network = Network(2, Port(nbytes / (ratio * compute), 0.0))
    cap = 256 * 4 / 2**20
    ddp, zero2, zero3 = (
        simulate(work, network, Way(name, bucket_cap_mb=cap)).step
        for name in ("ddp", "zero2", "zero3")
    )
    messages = ratio * compute
    assert ddp == pytest.approx(DDP.least(compute, messages, LAYERS))
    assert zero2 >= ZERO2.least(compute, messages, LAYERS) * (1 - 1e-9)
    assert zero3 >= ZERO3.least(compute, messages, LAYERS) * (1 - 1e-9)
    assert zero3 == pytest.approx(ZERO3.one_ahead(compute, messages, LAYERS))
    if ratio <= 2 / 3 or ratio >= 4 / 3:
        assert zero3 == pytest.approx(ZERO3.least(compute, messages, LAYERS))
