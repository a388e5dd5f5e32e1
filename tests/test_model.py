"""The models the book trains."""

import pytest
import torch
from torch import nn

from microddp.model import FullMLP, ModelConfig, SimpleCNN, gradient_bytes, parameter_count
from microddp.workloads import Transformer


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


# ---- convolutions


def test_a_cnn_has_the_parameters_counted_by_hand():
    model = SimpleCNN(ModelConfig(channels=(2, 3), hidden=5, inputs=3, size=8, classes=4))
    convolutions = 3 * 2 * 9 + 2 * 3 * 9
    norms = 2 * 2 + 2 * 3
    linear = (3 * 2 * 2 * 5 + 5) + (5 * 4 + 4)  # two poolings leave 2 x 2 pixels of 8 x 8
    assert parameter_count(model) == convolutions + norms + linear == 207


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (ModelConfig(), 128),
        (ModelConfig(channels=(8, 8, 8, 8, 8)), 8),  # 8, 4, 2, 1, 1, 1
        (ModelConfig(size=28), 128 * 3 * 3),  # 28, 14, 7, 3
        (ModelConfig(inputs=3, size=32, classes=100), 128 * 4 * 4),
        (ModelConfig(channels=(4,), size=1), 4),
    ],
)
def test_a_cnn_takes_images_of_its_size_in_both_forms(config, features):
    model = SimpleCNN(config).eval()
    assert model.hidden.in_features == features
    images = torch.randn(2, config.inputs, config.size, config.size)
    logits = model(images)
    assert logits.shape == (2, config.classes)
    assert torch.equal(model(images.flatten(1)), logits)


def test_a_cnn_trains_on_a_batch():
    torch.manual_seed(0)
    model = SimpleCNN(ModelConfig(channels=(4, 8), hidden=16))
    x, y = torch.randn(20, 64), torch.arange(20) % 10
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(30):
        sgd.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "options", [{"channels": ()}, {"channels": (4, 0)}, {"hidden": 0}, {"size": 0}, {"inputs": -1}]
)
def test_a_cnn_without_channels_or_sizes_is_refused(options):
    with pytest.raises(ValueError, match="expected at least one channel and sizes of at least 1"):
        ModelConfig(**options)


def test_with_group_norm_an_image_does_not_depend_on_its_neighbours():
    images = torch.randn(6, 64)
    for norm, depends in (("batch", True), ("group", False)):
        torch.manual_seed(0)
        model = SimpleCNN(ModelConfig(channels=(16, 5), hidden=8, norm=norm))
        assert any(True for _ in model.buffers()) == depends
        together, alone = model(images)[:2], model(images[:2])
        assert torch.allclose(together, alone, atol=1e-5) != depends
    assert [norm.num_groups for norm in model.norms] == [8, 1]
    with pytest.raises(ValueError, match="expected norm 'batch' or 'group', got 'layer'"):
        ModelConfig(norm="layer")


# ---- the transformer


def small_transformer():
    torch.manual_seed(0)
    return Transformer(vocabulary=11, dim=8, depth=2, heads=2, context=6)


def test_a_transformer_has_the_parameters_counted_by_hand():
    norm = 8 + 8
    block = norm + (8 * 24 + 24) + (8 * 8 + 8) + norm + (8 * 32 + 32) + (32 * 8 + 8)
    assert parameter_count(small_transformer()) == 11 * 8 + 6 * 8 + 2 * block + norm


def test_a_transformers_position_depends_on_no_later_token():
    model = small_transformer().double()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    logits = model(tokens)
    assert logits.shape == (1, 6, 11)
    for changed in range(6):
        other = tokens.clone()
        other[0, changed] = 10
        same = (model(other) - logits).abs().amax(dim=2)[0] < 1e-12
        assert same.tolist() == [position < changed for position in range(6)]
    assert (model(tokens[:, :3]) - logits[:, :3]).abs().max() < 1e-12, "shorter sequences fit"


def test_a_tied_transformer_has_one_matrix_for_input_and_output():
    model = small_transformer()
    assert model.output.weight is model.tokens.weight
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.tokens.weight.grad[5].any(), "tokens that were not read still take part in output"


@pytest.mark.parametrize("name", ["vocabulary", "dim", "depth", "heads", "context"])
def test_a_transformer_without_a_size_is_refused(name):
    sizes = {"vocabulary": 11, "dim": 8, "depth": 2, "heads": 2, "context": 6, name: 0}
    with pytest.raises(ValueError, match=r"expected a vocabulary and sizes of at least 1, got .*0"):
        Transformer(**sizes)


def test_a_transformer_refuses_heads_that_do_not_divide_and_sequences_too_long():
    with pytest.raises(ValueError, match="a number of heads that divides dim 8, got 3"):
        Transformer(vocabulary=11, dim=8, depth=1, heads=3, context=6)
    with pytest.raises(ValueError, match="expected at most 6 tokens, got 7"):
        small_transformer()(torch.zeros(1, 7, dtype=torch.int64))
