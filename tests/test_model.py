"""The models the book trains."""

import pytest
import torch
from torch import nn

from microddp.model import FullMLP, gradient_bytes, parameter_count


def test_by_default_the_network_has_16_layers_of_one_width():
    model = FullMLP(24)
    assert [(layer.in_features, layer.out_features) for layer in model.layers] == [(24, 24)] * 16
    assert model(torch.zeros(5, 24)).shape == (5, 24)


def test_input_and_output_can_have_widths_of_their_own():
    model = FullMLP(24, depth=3, inputs=64, outputs=10)
    widths = [(layer.in_features, layer.out_features) for layer in model.layers]
    assert widths == [(64, 24), (24, 24), (24, 10)]
    assert model(torch.zeros(5, 64)).shape == (5, 10)


def test_layers_are_linear_with_relu_between_and_not_after_the_last():
    model = FullMLP(2, depth=2)
    with torch.no_grad():
        model.layers[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        model.layers[1].weight.copy_(torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))
        model.layers[1].bias.copy_(torch.tensor([0.5, 0.25]))
    # The first layer gives (3, -2), of which ReLU keeps (3, 0); the last may be negative.
    assert model(torch.tensor([3.0, 2.0])).tolist() == [-2.5, 0.25]


def test_a_signal_keeps_its_size_through_the_layers_at_the_start():
    torch.manual_seed(0)
    model = FullMLP(256)
    x = torch.randn(512, 256)
    assert 0.2 < (model(x).std() / x.std()).item() < 5
    for layer in model.layers:
        assert layer.weight.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.05)
        assert not layer.bias.any()


def test_the_same_seed_makes_the_same_network():
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(nn.utils.parameters_to_vector(FullMLP(8).parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({"dim": 8, "depth": 1}, r"\[8, 8\]"),
        ({"dim": 8, "depth": 0}, r"\[8, 8\]"),
        ({"dim": 0}, r"\[0, .*\]"),
        ({"dim": 8, "depth": 2, "inputs": 0}, r"\[0, 8, 8\]"),
        ({"dim": 8, "depth": 2, "outputs": -1}, r"\[8, 8, -1\]"),
    ],
)
def test_a_network_without_layers_or_width_is_refused(options, widths):
    with pytest.raises(ValueError, match=f"expected at least 2 layers of width 1, got .*{widths}"):
        FullMLP(**options)


def test_parameters_and_gradient_bytes_count_what_is_trained():
    model = FullMLP(4, depth=2, inputs=3, outputs=5)
    assert parameter_count(model) == (3 * 4 + 4) + (4 * 5 + 5) == 41
    assert gradient_bytes(model) == 4 * 41
    assert gradient_bytes(model.to(torch.bfloat16)) == 2 * 41
    model.layers[0].requires_grad_(False)
    assert parameter_count(model) == 25
    assert gradient_bytes(model) == 2 * 25
