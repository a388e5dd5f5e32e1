"""Train a classifier of handwritten digits on one device.

python train_single.py --epochs 20
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def load_data():
    """1797 images of 8 x 8 pixels, four fifths of them to train on."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(pixels, torch.tensor(digits.target))
    return random_split(data, (0.8, 0.2), torch.Generator().manual_seed(0))


def new_model():
    """Two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )


def train_epoch(model, optimizer, loader, device):
    """Train once through the data; returns the mean loss over the samples."""
    model.train()
    total, count = 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(x)
        count += len(x)
    return total / count


@torch.no_grad()
def evaluate(model, loader, device):
    """The share of samples that the model reads right."""
    model.eval()
    right, count = 0, 0
    for x, y in loader:
        right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
        count += len(y)
    return right / count


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, testing = load_data()
    loader = DataLoader(training, options.batch, shuffle=True, drop_last=True)
    model = new_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    for epoch in range(options.epochs):
        loss = train_epoch(model, optimizer, loader, device)
        share = evaluate(model, DataLoader(testing, 128), device)
        print(f"epoch {epoch}: loss {loss:.4f}, {share:.1%} read right")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
