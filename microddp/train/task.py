"""The tasks to train on: a model, its loss and its data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from microddp.comms import Comms
from microddp.data import shard
from microddp.datasets import (
    CHARACTERS,
    Split,
    SyntheticDataset,
    load_digits,
    load_mnist,
    load_text,
)
from microddp.model import FullMLP, ModelConfig, SimpleCNN
from microddp.train.options import HEADS, TrainingConfig
from microddp.workloads import Transformer

SYNTHETIC_SAMPLES, SYNTHETIC_TESTS = 4096, 1024
PIXELS, CLASSES = 64, 10  # of synthetic data, which has the shape of the digits
LEVELS = 17  # levels of grey in the digits, and so the number of tokens
LENGTH = 64  # characters in a sequence
SURPRISES = 0.1  # the share of synthetic tokens that follow no rule


@dataclass(frozen=True)
class Task:
    """A model and the data that it learns from.

    Attributes:
        model: model, on the rank's device.
        train: inputs and targets to train on.
        test: inputs and targets to test on.
        classifies: true if targets are classes, false if they are values.
    """

    model: nn.Module
    train: TensorDataset
    test: TensorDataset
    classifies: bool

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over samples, or over tokens of sequences, as a scalar."""
        if self.classifies:
            return cross_entropy(outputs.flatten(0, -2), targets.flatten())
        return mse_loss(outputs, targets)

    def accuracy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the share of targets that got the largest output, as a scalar."""
        return (outputs.argmax(-1) == targets).double().mean()


def make_task(config: TrainingConfig, comms: Comms) -> Task:
    """Load the data and make the model. A collective.

    The model's weights come from torch's default generator of the CPU, whatever the device.

    Raises:
        ValueError: on every rank, if the data cannot be loaded, or the model's sizes do not fit.
    """
    sequences = config.model == "transformer"
    if config.data == "synthetic":
        data = synthetic_tokens(config.seed) if sequences else _synthetic(config.seed)
    elif config.data == "text":
        data = load_text(LENGTH)
    else:
        data = load_digits() if config.data == "digits" else _load_mnist(comms)
        if sequences:
            data = Split(_as_tokens(data.train), _as_tokens(data.test))
    sample = data.train.tensors[0][0]
    model: nn.Module
    if sequences:
        vocabulary = CHARACTERS if config.data == "text" else LEVELS
        model = Transformer(vocabulary, config.width, config.depth, HEADS, context=len(sample))
    elif config.model == "cnn":
        size = round(len(sample) ** 0.5)
        model = SimpleCNN(ModelConfig(config.channels, config.hidden, size=size, norm="group"))
    else:
        model = FullMLP(config.width, config.depth, inputs=len(sample), outputs=CLASSES)
    train, test = (
        TensorDataset(*(tensor.to(comms.device) for tensor in part.tensors))
        for part in (data.train, data.test)
    )
    classifies = not train.tensors[1].is_floating_point()
    return Task(model.to(comms.device), train, test, classifies)


def evaluate(task: Task, comms: Comms, batch_size: int) -> tuple[float, float | None]:
    """Compute loss and accuracy on the whole test set, each rank on a part of it. A collective.

    Args:
        task: task whose model is the same on every rank, and in training mode.
        comms: ranks that share the test set.
        batch_size: most samples of a forward pass on a rank.

    Returns:
        The mean loss, and the share of right answers, ``None`` where values are predicted.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=comms.device)
    mine = [shard(tensor, comms.rank, comms.world_size) for tensor in task.test.tensors]
    # As many batches on every rank: forward may be a collective.
    batches = math.ceil(len(task.test) / (comms.world_size * batch_size))
    task.model.eval()
    with torch.no_grad():
        for inputs, targets in zip(*(t.tensor_split(batches) for t in mine), strict=True):
            outputs = task.model(inputs)
            if not len(inputs):
                continue
            sums[0] += len(inputs)
            sums[1] += len(inputs) * task.loss(outputs, targets)
            if task.classifies:
                sums[2] += len(inputs) * task.accuracy(outputs, targets)
    task.model.train()
    comms.all_reduce(sums)
    count, loss, right = sums.tolist()
    return loss / count, right / count if task.classifies else None


def _synthetic(seed: int) -> Split:
    x, y = SyntheticDataset(SYNTHETIC_SAMPLES + SYNTHETIC_TESTS, PIXELS, CLASSES, seed=seed).tensors
    return _split(x, y)


def _split(x: torch.Tensor, y: torch.Tensor) -> Split:
    n = SYNTHETIC_SAMPLES
    return Split(TensorDataset(x[:n], y[:n]), TensorDataset(x[n:], y[n:]))


def synthetic_tokens(seed: int) -> Split:
    """Make chains of tokens in which each token decides the next, but for some surprises.

    Inputs are all tokens of a chain but the last, targets all but the first.
    """
    generator = torch.Generator().manual_seed(seed)
    follower = torch.randperm(LEVELS, generator=generator)
    shape = SYNTHETIC_SAMPLES + SYNTHETIC_TESTS, PIXELS
    tokens = torch.randint(LEVELS, shape, generator=generator)
    surprise = torch.rand(shape, generator=generator) < SURPRISES
    for i in range(1, PIXELS):
        tokens[:, i] = torch.where(surprise[:, i], tokens[:, i], follower[tokens[:, i - 1]])
    return _split(tokens[:, :-1], tokens[:, 1:])


def _as_tokens(images: TensorDataset) -> TensorDataset:
    tokens = (images.tensors[0] * (LEVELS - 1)).round().long()
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _load_mnist(comms: Comms) -> Split:
    """Load MNIST: one rank of each machine downloads it, then the others read it."""
    mnist = None
    for others in (False, True):
        problem = ""
        if others == (comms.local_rank > 0):
            try:
                mnist = load_mnist()
            except RuntimeError as error:
                problem = str(error)
        comms.fail_together(problem, "MNIST on every machine", ValueError)
    assert mnist is not None
    return mnist
