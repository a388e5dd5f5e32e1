"""A small transformer on real text: what is counted and what is learned."""

import pytest
import torch
from ranks import on_ranks

from microddp.data import CHARACTERS, load_text
from microddp.local_sgd import Local, LocalSteps
from microddp.step import Strategy
from microddp.strategies import STRATEGIES
from microddp.workloads import LENGTH, Learned, character_model, learn, times_by_link, token_loss
from microddp.workloads.characters import WINDOW, Curves


def test_a_target_is_the_input_one_character_later():
    text = load_text(50)
    inputs, targets = text.train.tensors
    assert inputs.shape == targets.shape == (len(text.train), 50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1:, 0], targets[:-1, -1]), "one window after the other"
    assert torch.equal(text.test.tensors[0][0, :1], targets[-1, -1:]), "the end is for testing"
    share = len(text.test) / (len(text.train) + len(text.test))
    assert share == pytest.approx(0.1, abs=0.001)
    assert 0 <= inputs.min() <= inputs.max() < CHARACTERS
    assert "The Python" in "".join(map(chr, inputs.flatten().tolist())), "text that can be read"


def test_a_model_is_the_same_on_each_call_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    first, second = character_model(), character_model()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert torch.equal(torch.get_rng_state(), before)
    tokens = torch.randint(CHARACTERS, (2, LENGTH))
    loss = token_loss(first(tokens), tokens)
    assert loss.item() == pytest.approx(torch.tensor(CHARACTERS).log().item(), rel=0.02)


def test_when_a_loss_is_reached_is_told_by_means():
    falling = [float(100 - i) for i in range(40)]
    learned = Learned(falling, [0.5 * i for i in range(1, 41)])
    assert learned.smooth[:3] == [100, 99.5, 99]
    assert learned.smooth[-1] == sum(falling[-WINDOW:]) / WINDOW
    assert learned.steps_to(learned.smooth[29]) == 30
    assert learned.seconds_to(learned.smooth[29]) == 15
    assert learned.step == 0.5
    assert Learned([1.0] * 40, [9 + 0.5 * i for i in range(1, 41)]).step == 0.5, "a slow beginning"
    assert Learned([1.0], [2.0]).step == 2
    assert learned.steps_to(1000) == WINDOW, "means of fewer say little"
    assert learned.steps_to(0) == learned.seconds_to(0) == float("inf")


def test_over_a_faster_link_only_the_bytes_take_less():
    slow = Learned([3.0] * 16 + [1.0] * 24, [i + 1.0 for i in range(40)])
    lazy = Learned([3.0] * 40, [0.1 * i for i in range(1, 41)])
    ways = {"all": (slow, 0.5), "half": (slow, 0.25), "never there": (lazy, 0.0)}
    times = times_by_link(ways, 1.0, seconds_per_byte=1.0, links=[8, 16, 4])
    assert slow.steps_to(1.0) == 32
    assert times == {
        "all": ["32.00 s *", "24.00 s *", "48.00 s  "],
        "half": ["32.00 s *", "28.00 s  ", "40.00 s *"],
    }
    assert times_by_link({"never there": (lazy, 0.0)}, 1.0, 1.0, [8]) == {}


def test_runs_are_told_apart_where_all_of_them_agree():
    low, middle, high = (
        Curves([[9.0, 4.0, end] for end in ends], every=16)
        for ends in ((1.0, 2.0), (1.5, 1.5), (1.5, 6.0))
    )
    assert low.mean == [9, 4, 1.5]
    assert str(high) == "3.75 (1.50 to 6.00)"
    assert high.steps_to(4) == [32, 32]
    assert high.steps_to(2) == [48, float("inf")]
    assert (low.beside(high), high.beside(low)) == ("below", "above")
    assert low.beside(middle) == middle.beside(low) == "not told apart from"
    assert low.sides(high, "So.") == {
        "below": (True, "So."),
        "above": (False, "So."),
        "not": (False, "So."),
    }


@on_ranks(2)
def test_ranks_learn_what_one_device_learns(comms):
    text = load_text(LENGTH)
    mine = [comms.subgroup([rank]) for rank in range(comms.world_size)][comms.rank]
    split = learn(STRATEGIES["ddp"](character_model(), comms), text, comms, 6)
    whole = learn(Strategy(character_model(), mine), text, mine, 6)
    torch.testing.assert_close(torch.tensor(split.losses), torch.tensor(whole.losses))
    assert split.losses[-1] < split.losses[0]
    assert list(split.seconds) == sorted(split.seconds)
    everyone = comms.all_gather_data((split.losses, split.seconds))
    assert everyone == [everyone[0]] * comms.world_size


@on_ranks(2)
def test_local_steps_end_with_equal_weights_and_say_what_they_sent(comms):
    model = character_model()
    strategy = Local(model, comms, local=LocalSteps(model, comms, 4))
    learn(strategy, load_text(LENGTH), comms, 6)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(*comms.all_gather(flat))
    assert strategy.sent_bytes() == flat.nbytes / 4
