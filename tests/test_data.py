"""Data sets, and how the ranks divide them."""

import sys
from types import SimpleNamespace

import pytest
import sklearn.datasets
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from microddp.data import ShardedBatches, epoch_order, shard
from microddp.datasets import CHARACTERS, SyntheticDataset, load_digits, load_mnist, load_text

# ---- data sets


def test_synthetic_samples_are_a_known_linear_map_and_noise():
    data = SyntheticDataset(4000, 6, 3, noise=0.1)
    x, y = data.tensors
    assert (x.shape, y.shape, data.true_weight.shape) == ((4000, 6), (4000, 3), (6, 3))
    fitted = torch.linalg.lstsq(x, y).solution
    assert (fitted - data.true_weight).abs().max() < 0.02
    assert (y - x @ data.true_weight).std().item() == pytest.approx(0.1, rel=0.05)
    x, y = (exact := SyntheticDataset(50, 6, 3, noise=0.0)).tensors
    assert torch.equal(y, x @ exact.true_weight)


def test_synthetic_samples_depend_on_their_seed_and_on_nothing_else():
    torch.manual_seed(1)
    first = SyntheticDataset(10, 3, 2, seed=5)
    state = torch.get_rng_state()
    second, other = SyntheticDataset(10, 3, 2, seed=5), SyntheticDataset(10, 3, 2, seed=6)
    for a, b, c in zip(first.tensors, second.tensors, other.tensors, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's generator is used"


def test_digits_are_real_images_split_the_same_way_every_time():
    digits, again = load_digits(), load_digits()
    for part, size in (("train", 1437), ("test", 360)):
        images, labels = getattr(digits, part).tensors
        assert images.shape == (size, 64)
        assert images.dtype == torch.float32
        assert (images.min().item(), images.max().item()) == (0, 1)
        shares = torch.bincount(labels, minlength=10) / size
        assert shares.min() > 0.09, "every digit is there in both parts"
        assert shares.max() < 0.11
        for a, b in zip((images, labels), getattr(again, part).tensors, strict=True):
            assert torch.equal(a, b)
    train, test = (
        {tuple(row) for row in part.tensors[0].tolist()} for part in (digits.train, digits.test)
    )
    assert len(train | test) > 1790, "no image is in both parts, but for a few equal ones"


def test_digits_are_scikit_learns():
    ours, theirs = load_digits(), sklearn.datasets.load_digits()
    pairs = [
        (*image, label)
        for part in (ours.train, ours.test)
        for image, label in zip(*(tensor.tolist() for tensor in part.tensors), strict=True)
    ]
    expected = zip((theirs.data / 16).tolist(), theirs.target.tolist(), strict=True)
    assert sorted(pairs) == sorted((*image, label) for image, label in expected)


def fake_torchvision(monkeypatch, mnist):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", mnist and SimpleNamespace(MNIST=mnist))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())


def test_mnist_comes_in_the_form_of_the_digits(monkeypatch, tmp_path):
    def mnist(folder, *, train, download):
        assert (folder, download) == (tmp_path / "microddp", True)
        images = torch.zeros(5 if train else 2, 28, 28, dtype=torch.uint8)
        images[0, 1, 2] = 255
        return SimpleNamespace(data=images, targets=torch.arange(len(images)))

    fake_torchvision(monkeypatch, mnist)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    digits = load_mnist()
    for part, size in ((digits.train, 5), (digits.test, 2)):
        images, labels = part.tensors
        assert (images.shape, images.dtype) == ((size, 784), torch.float32)
        assert images[0].nonzero().tolist() == [[30]]
        assert images.max() == 1
        assert labels.tolist() == list(range(size))


def test_without_mnist_the_error_says_what_to_use_instead(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    fake_torchvision(monkeypatch, unreachable)
    with pytest.raises(RuntimeError, match=r"cannot fetch .*no route to host.*--data digits"):
        load_mnist()
    fake_torchvision(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"needs torchvision.*--data digits"):
        load_mnist()


# ---- shards


@given(rows=st.integers(0, 200), n=st.integers(1, 17))
def test_shards_are_consecutive_and_differ_by_one_row_at_most(rows, n):
    whole = torch.arange(rows)
    shards = [shard(whole, rank, n) for rank in range(n)]
    assert torch.equal(torch.cat(shards), whole)
    sizes = [len(part) for part in shards]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the first ranks get one more"


def test_a_shard_is_a_view():
    whole = torch.zeros(5, 2)
    shard(whole, 1, 2).fill_(1)
    assert whole.sum(1).tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("rank", [-1, 3, 7])
def test_a_rank_that_is_not_there_has_no_shard(rank):
    with pytest.raises(ValueError, match=f"expected 0 <= rank < 3, got {rank}"):
        shard(torch.ones(6), rank, 3)


def test_a_tensor_without_rows_has_no_shards():
    with pytest.raises(ValueError, match="rank 1: expected a tensor with rows"):
        shard(torch.tensor(1.0), 1, 3)


# ---- orders


@given(samples=st.integers(0, 300), epoch=st.integers(0, 1000), seed=st.integers(0, 1000))
def test_an_order_is_a_permutation_that_every_rank_can_compute(samples, epoch, seed):
    torch.manual_seed(samples)
    state = torch.get_rng_state()
    order = epoch_order(samples, epoch, seed)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)  # a rank that has used its generator more often
    assert torch.equal(epoch_order(samples, epoch, seed), order)
    assert torch.equal(order.sort().values, torch.arange(samples))


def test_no_two_epochs_or_seeds_share_an_order():
    orders = {
        tuple(epoch_order(100, epoch, seed).tolist()) for epoch in range(30) for seed in range(30)
    }
    assert len(orders) == 900


# ---- batches


@given(
    n=st.integers(1, 6),
    per_rank=st.integers(1, 7),
    samples=st.integers(1, 150),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 5),
)
def test_all_ranks_together_see_the_batches_that_one_rank_alone_would_see(
    n, per_rank, samples, epoch, seed
):
    batch = n * per_rank
    dataset = TensorDataset(torch.arange(samples), -torch.arange(samples))
    if batch > samples:
        with pytest.raises(ValueError, match=f"expected a batch size in 1..{samples}, got {batch}"):
            ShardedBatches(dataset, batch, 0, n, seed)
        return
    by_rank = [list(ShardedBatches(dataset, batch, r, n, seed).epoch(epoch)) for r in range(n)]
    alone = ShardedBatches(dataset, batch, 0, 1, seed)
    whole = list(alone.epoch(epoch))
    assert len(whole) == len(alone) == samples // batch
    for batch_of_one, shards in zip(whole, zip(*by_rank, strict=True), strict=True):
        assert all(len(x) == per_rank for x, _ in shards), "equal shards: chapter 01 says why"
        for i in (0, 1):
            assert torch.equal(torch.cat([part[i] for part in shards]), batch_of_one[i])
    seen = torch.cat([x for x, _ in whole])
    assert len(seen.unique()) == len(seen) == len(whole) * batch
    assert all(torch.equal(x, -y) for x, y in whole), "a sample keeps its target"


def test_every_epoch_has_its_own_order():
    batches = ShardedBatches(TensorDataset(torch.arange(60)), 20, 0, 1)
    first, again, second = (torch.cat([x for (x,) in batches.epoch(epoch)]) for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (10, "rank 1: expected a global batch size that is a multiple of 3 ranks, got 10"),
        (63, "rank 1: expected a batch size in 1..60, got 63"),
        (0, "rank 1: expected a batch size in 1..60, got 0"),
        (-3, "rank 1: expected a batch size in 1..60, got -3"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ShardedBatches(TensorDataset(torch.arange(60)), batch, 1, 3)


def test_an_epoch_goes_on_where_it_was_left():
    batches = ShardedBatches(TensorDataset(torch.arange(60)), 20, 1, 4)
    whole, rest = list(batches.epoch(5)), list(batches.epoch(5, start=2))
    assert len(whole) == 3
    assert torch.equal(whole[2][0], rest[0][0])
    assert len(rest) == 1


def test_unequal_shares_are_the_same_batches():
    dataset = TensorDataset(torch.arange(60))
    sizes = (1, 12, 7)
    parts = [list(ShardedBatches(dataset, 20, rank, 3, sizes=sizes).epoch(2)) for rank in range(3)]
    for i, (whole,) in enumerate(ShardedBatches(dataset, 20, 0, 1).epoch(2)):
        mine = [batches[i][0] for batches in parts]
        assert [len(part) for part in mine] == list(sizes)
        assert torch.equal(torch.cat(mine), whole)
    for sizes in ((10, 10), (0, 10, 10), (5, 5, 5)):
        with pytest.raises(ValueError, match=r"rank 0: expected 3 sizes .* up to 20, got \["):
            ShardedBatches(dataset, 20, 0, 3, sizes=sizes)


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
