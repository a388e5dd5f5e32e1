"""Devices of known speed: they pause as long as they should, and have real gradients."""

import pytest
import torch
from ranks import on_ranks

import microddp
from microddp.program import Layer, Work
from microddp.stage import devices, pausing_batch, pausing_loss, pausing_model

WORK = Work((Layer(0.001, 0.002, (6, 2)), Layer(0.003, 0.004, (5,))), optimizer=0.01)


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeps move, each by a tenth of a millisecond too much."""

    class Clock:
        now, slept = 0.0, []

        def sleep(self, seconds):
            self.slept.append(seconds)
            self.now += seconds + 1e-4

        def perf_counter(self):
            return self.now

    clock = Clock()
    clock.slept = []
    monkeypatch.setattr(devices, "time", clock)
    monkeypatch.setattr(devices, "_owed", 0.0)
    return clock


def test_what_a_pause_was_too_long_the_next_one_is_shorter(clock):
    for _ in range(100):
        devices.pause(0.001)
    assert clock.now == pytest.approx(0.1 + 1e-4)
    devices.pause(0.00005)  # less than is owed
    assert len(clock.slept) == 100
    devices.pause(0.001)
    assert clock.now == pytest.approx(0.1 + 0.00005 + 0.001 + 1e-4)


def test_layers_pause_in_their_order_and_have_gradients(clock):
    model = pausing_model(WORK)
    loss = pausing_loss(model(pausing_batch()[0]))
    assert clock.now == pytest.approx(0.004, abs=2e-4)
    loss.backward()
    assert clock.now == pytest.approx(0.010, abs=2e-4)
    assert [p.shape for p in model.parameters()] == [(6,), (2,), (5,)]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    optimizer = devices.PausingOptimizer(model.parameters(), seconds=0.01)
    optimizer.step()
    assert clock.now == pytest.approx(0.020, abs=2e-4)
    assert all(not p.any() for p in model.parameters())


@on_ranks(2)
def test_their_gradients_are_averaged_as_any(comms):
    model = microddp.DDP(pausing_model(WORK), comms)
    for scale in (1, comms.rank + 1):
        model.zero_grad()
        (scale * pausing_loss(model(pausing_batch()[0]))).backward()
    # A layer's gradients are ones, whatever comes from behind: it computes nothing.
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
